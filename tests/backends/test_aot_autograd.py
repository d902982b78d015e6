"""`aot_autograd`, its helpers, and fusion by TorchScript, as code written for PyTorch's expects them."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.fx.experimental.proxy_tensor import make_fx

import foregrad
from foregrad.dynamo import AotAutograd
from foregrad.dynamo._torch import dynamo as door

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def recording(into, name):
    def compiler(gm, inputs):
        into.append(name)
        return gm

    return compiler


def test_each_phase_has_its_compiler():
    calls = []
    backend = foregrad.aot_autograd(
        fw_compiler=recording(calls, "fw"),
        bw_compiler=recording(calls, "bw"),
        inference_compiler=recording(calls, "inf"),
    )
    assert isinstance(backend, AotAutograd)
    f = torch.compile(lambda x: x.sin(), backend=backend)
    x = torch.ones(3, requires_grad=True)
    out = f(x)
    assert calls == ["fw"]
    out.sum().backward()
    assert calls == ["fw", "bw"]
    assert torch.equal(x.grad, x.detach().cos())
    with torch.no_grad():
        f(x)
    assert calls == ["fw", "bw", "inf"]
    assert torch._dynamo.utils.counters["aot_autograd"] == {"total": 2, "ok": 2}


@pytest.mark.parametrize("is_shielded", [True, False])
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_dynamo_does_not_look_into_the_backwards_compiler(monkeypatch, is_shielded):
    """Without the shield it does, in a backward after a graph break: else this would test nothing."""
    if not is_shielded:
        monkeypatch.setattr(door, "shielded", lambda function, reason: function)
    watched = []

    def bw(gm, inputs):
        watched.append(get_eval_frame_callback() is not None)

        def run(*args):
            watched.append(get_eval_frame_callback() is not None)
            return gm(*args)

        return run

    def train(x):
        y = x.sin().sum()
        torch._dynamo.graph_break()
        return torch.autograd.grad(y, x)[0]

    x = torch.ones(3, requires_grad=True)
    backend = foregrad.aot_autograd(fw_compiler=foregrad.nop, bw_compiler=bw)
    torch.testing.assert_close(torch.compile(train, backend=backend)(x), x.detach().cos())
    assert watched == [not is_shielded] * 2


def test_a_failing_compiler_is_counted():
    def failing(gm, inputs):
        raise ValueError("no")

    with pytest.raises(Exception, match="no"):
        torch.compile(lambda x: x.sin(), backend=foregrad.aot_autograd(fw_compiler=failing))(torch.ones(3))
    assert torch._dynamo.utils.counters["aot_autograd"] == {"total": 1, "not_ok": 1}


def test_containers_among_the_inputs_are_flattened():
    class Module(nn.Module):
        def forward(self, pair, named):
            return (pair[0] * pair[1] + named["b"],)

    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    args = ((a, b), {"b": b})
    call = foregrad.aot_autograd(fw_compiler=foregrad.nop)(Module(), args)
    (out,) = call(*args)
    assert torch.equal(out, a * b + b)
    grads = torch.autograd.grad(out.sum(), (a, b))
    assert torch.equal(grads[0], b)
    assert torch.equal(grads[1], a + 1)
    with pytest.raises(foregrad.errors.BackendError, match="containers"):
        call((a, b, a), {"b": b})


def test_decompositions_may_come_late():
    asked = []

    def table():
        asked.append(1)
        return {torch.ops.aten.sin.default: lambda x: torch.cos(x - torch.pi / 2)}

    seen = []

    def compiler(gm, inputs):
        seen.extend(str(node.target) for node in gm.graph.nodes)
        return gm

    backend = foregrad.aot_autograd(fw_compiler=compiler, decompositions=table)
    assert not asked
    x = torch.ones(3)
    torch.testing.assert_close(torch.compile(lambda x: x.sin(), backend=backend)(x), x.sin())
    assert asked
    assert "aten.sin.default" not in seen
    assert "aten.cos.default" in seen


def test_unknown_options_are_said_to_be_ignored(caplog):
    backend = foregrad.aot_autograd(fw_compiler=foregrad.nop)
    with caplog.at_level(logging.WARNING, "foregrad"):
        torch.compile(lambda x: x + 1, backend=backend, options={"fast": True})(torch.ones(2))
    assert "`options`" in caplog.text


def test_with_nop_every_stage_is_checked(monkeypatch):
    checked = []
    original = foregrad.JointGraph.check
    monkeypatch.setattr(foregrad.JointGraph, "check", lambda self: (checked.append(1), original(self)))
    torch.compile(lambda x: x + 1, backend=foregrad.aot_autograd(fw_compiler=foregrad.nop))(torch.ones(2))
    assert checked
    checked.clear()
    with foregrad.config.override(check=False):
        torch.compile(lambda x: x + 2, backend=foregrad.aot_autograd(fw_compiler=recording([], "")))(torch.ones(2))
    assert not checked


def test_real_tensors_for_a_backend_that_needs_them():
    seen = []

    @foregrad.fake_tensor_unsupported
    def backend(gm, inputs, *, factor=1):
        seen.extend(inputs)
        return (gm, factor)

    with torch._subclasses.FakeTensorMode():
        fake = torch.empty(2, 3).t()
    real = torch.ones(1)
    assert backend("gm", [fake, real, 3], factor=2) == ("gm", 2)
    assert type(seen[0]) is torch.Tensor
    assert seen[0].shape == (3, 2)
    assert seen[0].stride() == (1, 3)
    assert not seen[0].any()
    assert seen[1] is real
    assert seen[2] == 3


def test_device_and_dtype_from_inputs():
    inputs = [3, torch.ones(2, dtype=torch.float64, device="meta")]
    assert foregrad.device_from_inputs(inputs) == torch.device("meta")
    assert foregrad.dtype_from_inputs(inputs) is torch.float64
    assert foregrad.device_from_inputs([]) == torch.device("cpu")
    assert foregrad.dtype_from_inputs([2]) is torch.float32


# ------------------------------------------------------------------------------------------------- TorchScript


def test_memory_efficient_fusion_of_a_function():
    def f(a, b):
        return torch.nn.functional.gelu(a * b).sum()

    call = foregrad.memory_efficient_fusion(f)
    grads = []
    for run in (f, call):
        a, b = (torch.linspace(-1, 1, 5, requires_grad=True) for _ in range(2))
        run(a, b).backward()
        grads.append((a.grad, b.grad))
    torch.testing.assert_close(*grads)


def test_memory_efficient_fusion_of_a_module():
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    call = foregrad.memory_efficient_fusion(module, bw_compiler=foregrad.nop)
    x = torch.randn(2, 3)
    torch.testing.assert_close(call(x), module(x))


def test_ts_compile_of_a_cast_and_a_factory():
    def f(x):
        return x.to(torch.float64) + torch.ones(3, device="cpu")

    x = torch.randn(3)
    run = foregrad.ts_compile(make_fx(f)(x), [x])
    torch.testing.assert_close(run([x]), f(x))


def test_the_kwargs_of_fusion():
    kwargs = foregrad.mem_efficient_fusion_kwargs(use_decomps=False)
    assert set(kwargs) == {"fw_compiler", "bw_compiler", "partition_fn"}
    table = foregrad.mem_efficient_fusion_kwargs(use_decomps=True)["decompositions"]
    assert table == foregrad.default_decompositions
    aten = torch.ops.aten
    for op in (aten.gelu_backward.default, aten.tanh_backward.default, aten.native_layer_norm.default):
        assert op in table
    assert not any(op._schema.is_mutable for op in table)
