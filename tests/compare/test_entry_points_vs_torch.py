"""Parts change hands: PyTorch's partitioners and compilers under foregrad's entry points, and ours under PyTorch's."""

from __future__ import annotations

import functools

import functorch.compile as theirs
import pytest
import torch
from torch._dynamo.backends.common import aot_autograd as their_aot_autograd
from torch._functorch import partitioners as their_partitioners
from torch._functorch.aot_autograd import aot_module_simplified as their_aot_module_simplified

import foregrad
from foregrad.backends.eager import eager_compiler
from foregrad.backends.interpreter import interpreter_compiler

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

PARTITIONS = {
    "theirs, default": their_partitioners.default_partition,
    "theirs, min-cut": their_partitioners.min_cut_rematerialization_partition,
    "ours, default": foregrad.default_partition,
    "ours, min-cut": foregrad.min_cut_rematerialization_partition,
}
COMPILERS = {
    "theirs, nop": theirs.nop,
    "theirs, ts_compile": theirs.ts_compile,
    "ours, nop": foregrad.nop,
    "ours, eager": eager_compiler,
    "ours, interpreter": interpreter_compiler,
    "ours, ts_compile": foregrad.ts_compile,
}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        self.norm = torch.nn.BatchNorm1d(8)

    def forward(self, x):
        hidden = torch.relu(self.norm(self.first(x)))
        return self.last(hidden).tanh() * x


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def observed(compile):
    """Output, gradients and buffers of one step."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(5, 4, requires_grad=True)
    out = compile(model)(x)
    out.square().sum().backward()
    return [out, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def assert_same(compile):
    for expected, actual in zip(observed(lambda model: model), observed(compile), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("door", ["ours", "theirs"])
def test_every_partitioner_at_either_door(door, partition):
    module = foregrad if door == "ours" else theirs
    assert_same(lambda model: module.aot_module(model, fw_compiler=module.nop, partition_fn=PARTITIONS[partition]))


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("door", ["ours", "theirs"])
def test_every_compiler_at_either_door(door, compiler):
    """On a function of operators that TorchScript knows."""
    module = foregrad if door == "ours" else theirs

    def f(x, w):
        return torch.tanh(x @ w).relu() * x

    results = []
    for run in (f, module.aot_function(f, fw_compiler=COMPILERS[compiler])):
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(4, 4, generator=generator).requires_grad_() for _ in range(2))
        out = run(x, w)
        out.square().sum().backward()
        results.append((out, x.grad, w.grad))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("aot_autograd", [foregrad.aot_autograd, their_aot_autograd], ids=["ours", "theirs"])
def test_either_aot_autograd_under_torch_compile(aot_autograd, partition):
    backend = aot_autograd(fw_compiler=foregrad.make_boxed_compiler(foregrad.nop), partition_fn=PARTITIONS[partition])
    assert_same(functools.partial(torch.compile, backend=backend, fullgraph=True))


def test_either_aot_module_simplified_in_a_backend():
    for simplified in (foregrad.aot_module_simplified, their_aot_module_simplified):
        torch._dynamo.reset()

        def backend(gm, inputs, simplified=simplified):
            return simplified(gm, inputs, fw_compiler=foregrad.make_boxed_compiler(foregrad.nop))

        assert_same(functools.partial(torch.compile, backend=backend))
