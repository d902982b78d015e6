"""What AOTAutograd's doors give to partitioners and compilers: as PyTorch's give it, program by program."""

from __future__ import annotations

import functorch.compile as theirs
import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd as their_aot_autograd

import foregrad

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


# ------------------------------------------------------------------------------------------ partitioners


def told_to_a_partition(aot_autograd):
    """The names and values that a partition gets under `torch.compile`."""
    told = []

    def partition(joint, inputs, **facts):
        told.append(facts)
        return foregrad.default_partition(joint, inputs, **facts)

    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    backend = aot_autograd(fw_compiler=theirs.nop, partition_fn=partition)
    torch.compile(module, backend=backend)(torch.ones(2, 3)).sum().backward()
    return told


def test_a_partition_is_told_which_inputs_live_on():
    torch._dynamo.reset()
    original = told_to_a_partition(their_aot_autograd)
    torch._dynamo.reset()
    assert told_to_a_partition(foregrad.aot_autograd) == original
    assert original[0]["static_lifetime_input_indices"]


def test_a_partition_without_that_parameter_is_called_without_it():
    called = []

    def partition(joint, inputs, *, num_fwd_outputs):
        called.append(num_fwd_outputs)
        return foregrad.default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs)

    foregrad.aot_module(nn.Linear(3, 4), foregrad.nop, partition_fn=partition)(torch.ones(2, 3))
    assert called == [1]


# ------------------------------------------------------------------------------------------ writes in the graph


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.seen += x.sum(0)
        return self.norm(x) + self.seen


class Swapping(nn.Module):
    """Two buffers that swap values: whoever copies one by one loses one of them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("first", torch.zeros(4))
        self.register_buffer("last", torch.ones(4))

    def forward(self, x):
        first = self.first.clone()
        self.first.copy_(self.last)
        self.last.copy_(first)
        return x + self.first, first


class Keeping(nn.Module):
    """The old value is a result, and a view of it the new value of another."""

    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.arange(4.0))
        self.register_buffer("before", torch.zeros(4))

    def forward(self, x):
        self.before.copy_(self.state.flip(0))
        old = self.state.detach().clone()
        self.state.add_(x[0])
        return old, self.state.view(2, 2), x * self.before


def kept_inside(api, module, calls=2):
    """(the numbers of `copy_` and of results in the graph, results and buffers of the calls)."""
    seen, found = [], []

    def compiler(gm, inputs):
        nodes = list(gm.graph.nodes)
        seen.append((sum(n.target is aten.copy_.default for n in nodes), len(nodes[-1].args[0])))
        return gm

    run = api.aot_module(module, fw_compiler=compiler, keep_inference_input_mutations=True) if api else module
    with torch.no_grad():
        for call in range(calls):
            out = run(torch.full((3, 4), call + 1.0))
            found += [t.clone() for t in (out if isinstance(out, tuple) else (out,))]
    return seen, [*found, *(b.clone() for b in module.buffers()), *(torch.tensor(b._version) for b in module.buffers())]


def test_an_update_that_the_graph_writes_is_no_output_of_it():
    ours, original = (kept_inside(api, nn.BatchNorm1d(4))[0] for api in (foregrad, theirs))
    assert ours == original == [(3, 1)]


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(4), Counting, Swapping, Keeping])
def test_a_graph_that_writes_its_updates_does_what_eager_does(make):
    """Values, buffers, and the counters of their versions."""
    torch.testing.assert_close(kept_inside(foregrad, make())[1], kept_inside(None, make())[1])
