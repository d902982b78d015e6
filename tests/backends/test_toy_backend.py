"""The backend of examples/toy_backend.py computes what eager does, and fuses."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import foregrad
from foregrad.backends import registry

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "toy_backend.py"


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    return runpy.run_path(str(EXAMPLE))


@pytest.mark.parametrize("shape", [(3, 5), (17, 40), (1, 1)])
def test_neighbours_are_fused_and_equal(toy, shape):
    def f(x, y):
        z = (x * y).sin() + x.exp()
        return z.sum(0), (z * 2).tanh()

    x, y = torch.randn(*shape, requires_grad=True), torch.randn(*shape)
    expected = f(x, y)
    actual = foregrad.compile(f, backend="toy")(x, y)
    for a, b in zip(expected, actual, strict=True):
        assert torch.equal(a, b)
    assert toy["launches"] == {"fused": 2, "library": 1}
    grads = [torch.autograd.grad(sum(out.sum() for out in outs), x)[0] for outs in (expected, actual)]
    torch.testing.assert_close(*grads)


def test_a_kernel_writes_only_what_others_read(toy):
    graph = foregrad.capture(lambda x: ((x + 1).sin() * 3).sum(), torch.ones(4)).graph
    (fused, alone) = toy["kernels"](graph)
    assert [str(node.target) for node in fused] == ["aten.add.Tensor", "aten.sin.default", "aten.mul.Tensor"]
    assert len(alone) == 1
    memory = {next(iter(graph.nodes)): torch.ones(4)}
    toy["launch"](fused, memory)
    assert set(memory) == {next(iter(graph.nodes)), fused[-1]}


def test_the_example_runs(toy, capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "gradients as in eager" in capsys.readouterr().out
