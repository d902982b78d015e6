"""Debugging backends, torch.compile's backends for both halves, and backends from entry points."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import foregrad
from foregrad.backends import registry
from foregrad.backends.debugging import op_counts
from foregrad.backends.registry import Backend, backend_help, get_backend, list_backends
from foregrad.errors import BackendError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    registry._entry_points.cache_clear()
    yield
    registry._entry_points.cache_clear()


def step(x, w):
    return torch.sin(x @ w)


def gradients(backend):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=generator)
    w = torch.randn(4, 2, generator=generator).requires_grad_()
    out = foregrad.compile(step, backend=backend)(x, w)
    return out, *torch.autograd.grad(out.sum(), w)


def test_every_listed_backend_is_explained():
    names = list_backends()
    assert {"auto", "eager", "inductor", "interpreter", "print", "count", "torch:<name>", "crash-on:<op>"} <= set(names)
    assert list(backend_help()) == names
    assert all(backend_help().values())


def test_print_prints_both_graphs(capsys):
    expected = gradients("eager")
    actual = gradients("print")
    assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True))
    printed = capsys.readouterr().out
    assert "forward graph" in printed
    assert "backward graph" in printed
    assert "sin" in printed


def test_count_counts_operators(capsys):
    gradients("count")
    printed = capsys.readouterr().out
    assert "forward graph: 2 operators" in printed
    assert "1  aten.sin.default" in printed
    joint = foregrad.capture(step, torch.ones(2, 2), torch.ones(2, 2))
    assert op_counts(joint.module) == {"aten.mm.default": 1, "aten.sin.default": 1}


@pytest.mark.parametrize("name", ["cos", "aten.cos", "aten.cos.default"])
def test_crash_on_fails_on_graphs_with_the_operator(name):
    x = torch.ones(3, requires_grad=True)
    out = foregrad.compile(lambda x: x.sin(), backend=f"crash-on:{name}")(x)
    with pytest.raises(BackendError, match=r"backward graph has cos"):
        out.sum().backward()


@pytest.mark.parametrize("name", ["torch:eager", "torch:aot_eager", "torch:aot_eager_decomp_partition"])
def test_a_backend_of_torch_compiles_runs_both_halves(name):
    expected = gradients("eager")
    actual = gradients(name)
    for a, b in zip(expected, actual, strict=True):
        torch.testing.assert_close(a, b)


def test_a_backend_that_torch_does_not_have():
    with pytest.raises(BackendError, match=r"no backend called `nothing`. It has: .*inductor"):
        get_backend("torch:nothing")
    with pytest.raises(BackendError, match=r"It takes a name: `torch:<name>`"):
        get_backend("torch")
    with pytest.raises(BackendError, match="no backend called"):
        get_backend("eager:3")


def test_a_family_name_is_taken():
    with pytest.raises(BackendError, match="`auto` already"):
        foregrad.register_backend("auto", foregrad.nop)


PACKAGE = """
def compile_half(gm, inputs):
    def run(*args):
        run.calls += 1
        return gm(*args)
    run.calls = 0
    return run

text = "eager"
"""


def install(folder, name, groups):
    """What an installation leaves behind: a module, and metadata with entry points."""
    (folder / f"{name}.py").write_text(PACKAGE)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(groups)


def test_an_installed_package_brings_backends(tmp_path, monkeypatch):
    lines = "[foregrad.backends]\nsolid = plugged:compile_half\ntext = plugged:text\ngone = plugged:missing\n"
    install(tmp_path, "plugged", lines)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert "solid" in list_backends()
    assert isinstance(get_backend("solid"), Backend)
    assert get_backend("solid").name == "solid"
    assert all(torch.equal(a, b) for a, b in zip(gradients("eager"), gradients("solid"), strict=True))
    with pytest.raises(BackendError, match="is a string"):
        get_backend("text")
    with pytest.raises(BackendError, match="can't be loaded"):
        get_backend("gone")


def test_torch_compile_finds_foregrad_by_its_entry_point(tmp_path):
    """With what pyproject.toml declares, as an installation writes it, and no import of foregrad."""
    declared = (ROOT / "pyproject.toml").read_text()
    section = declared.split("[project.entry-points.torch_dynamo_backends]")[1].split("\n[")[0]
    name, _, target = section.strip().partition(" = ")
    install(tmp_path, "installed", f"[torch_dynamo_backends]\n{name} = {target.strip(chr(34))}\n")
    code = (
        "import torch\n"
        "f = torch.compile(lambda x: x.sin(), backend='foregrad', options={'backend': 'eager'})\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "out = f(x)\n"
        "out.sum().backward()\n"
        "assert torch.equal(out, x.sin()) and torch.equal(x.grad, x.detach().cos())\n"
        "import sys; print('foregrad.dynamo' in sys.modules)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": path}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert ran.stdout.strip() == "True", ran.stderr


def test_memory_lent_by_another_runtime_is_copied(monkeypatch):
    """A runtime that gives the same buffer again on its next call must not change what was returned before."""
    from foregrad.dynamo._torch import dynamo

    def reusing(gm, inputs):
        buffers = {}

        def run(*args):
            outs = []
            for i, value in enumerate(gm(*args)):
                # Memory of numpy's, as a runtime's is: not PyTorch's to grow or free.
                kept = buffers.setdefault(i, value.detach().numpy().copy())
                kept[...] = value.detach().numpy()
                outs.append(torch.from_numpy(kept))
            return outs

        return run

    monkeypatch.setattr(dynamo, "known_backends", lambda: ["reusing"])
    monkeypatch.setattr(dynamo, "lookup_backend", lambda name: reusing)
    call = foregrad.compile(lambda x: x.sin(), backend="torch:reusing")
    first = call(torch.zeros(3))
    call(torch.ones(3))
    assert torch.equal(first, torch.zeros(3))


OPENVINO = """
import copy, warnings
warnings.simplefilter("ignore")
import torch
from torch import nn
import foregrad

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 4))
twin = copy.deepcopy(model)
call = foregrad.compile(twin, backend="torch:openvino")
for step in range(3):
    x = torch.randn(5, 8)
    losses = [side(x).pow(2).mean() for side in (model, call)]
    torch.testing.assert_close(*losses)
    for loss in losses:
        loss.backward()
    for p, q in zip(model.parameters(), twin.parameters()):
        torch.testing.assert_close(p.grad, q.grad)
from openvino.frontend.pytorch.torchdynamo import execute
assert execute.compiled_cache, "OpenVINO compiled nothing"
print("trained")
"""


def test_openvino_runs_both_halves_with_eagers_numbers():
    """A backend from a package index. In a process of its own: importing it changes settings of Dynamo's."""
    names = {entry.name for entry in importlib.metadata.entry_points(group="torch_dynamo_backends")}
    if "openvino" not in names:
        pytest.skip("the extra foregrad[openvino] is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    ran = subprocess.run([sys.executable, "-c", OPENVINO], capture_output=True, text=True, env=environment, check=False)
    assert ran.stdout.strip().endswith("trained"), ran.stderr
