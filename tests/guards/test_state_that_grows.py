"""State whose size varies from call to call becomes an argument of symbolic size: a cache of keys, a replay buffer."""

import warnings

import pytest
import torch

import foregrad

CALLS = 40


class Attribute(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(1, 3)

    def forward(self, x):
        self.seen = torch.cat([self.seen, x])
        return self.seen.sum()


class Buffer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, 3))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x])
        return (self.seen * 2).sum()


class Slots:
    __slots__ = ("seen",)

    def __init__(self):
        self.seen = torch.zeros(1, 3)

    def __call__(self, x):
        self.seen = torch.cat([self.seen, x])
        return (self.seen * 2).sum()


class Table:
    def __init__(self):
        self.table = {"seen": torch.zeros(1, 3)}

    def __call__(self, x):
        self.table["seen"] = torch.cat([self.table["seen"], x])
        return (self.table["seen"] * 2).sum()


class Items:
    def __init__(self):
        self.items = [torch.zeros(1, 3), torch.zeros(1, 3)]

    def __call__(self, x):
        for i in range(2):
            self.items[i] = torch.cat([self.items[i], x])
        return (self.items[0] * self.items[1]).sum()


class Window(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(1, 3)

    def forward(self, x):
        self.seen = torch.cat([self.seen, x])[-5:]
        return self.seen.sum()


class KeysAndValues(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(3, 9)
        self.cache = None

    def forward(self, x):
        q, k, v = self.project(x).chunk(3, -1)
        if self.cache is not None:
            k, v = torch.cat([self.cache[0], k]), torch.cat([self.cache[1], v])
        self.cache = (k.detach(), v.detach())
        return torch.softmax(q @ k.mT, -1) @ v


def variable():
    seen = torch.zeros(1, 3)

    def collect(x):
        nonlocal seen
        seen = torch.cat([seen, x])
        return seen.sum()

    return collect


@pytest.mark.parametrize("make", [Attribute, Buffer, Slots, Table, Items, Window, KeysAndValues, variable])
def test_two_graphs_for_all_sizes(make):
    torch.manual_seed(0)
    function = make()
    torch.manual_seed(0)
    eager = make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
        for i in range(CALLS):
            x = torch.full((1, 3), float(i + 1))
            assert torch.equal(compiled(x), eager(x))
    graphs = list(compiled.foregrad.all_specializations())
    assert len(graphs) <= 2 + (make in (Window, KeysAndValues)), (
        "the first size, all others, one before the window is full"
    )
    if isinstance(function, (Attribute, Buffer)):
        assert torch.equal(function.seen, eager.seen)
        assert list(function.state_dict()) == list(eager.state_dict())


def test_a_size_set_from_outside():
    class Held:
        weights = None

    held = Held()
    held.weights = torch.ones(2)
    compiled = foregrad.compile(lambda x: x * held.weights.sum(), backend="eager", on_unsupported="raise")
    for size in (2, 5, 7, 3, 9, 2):
        held.weights = torch.arange(float(size))
        assert torch.equal(compiled(torch.ones(3)), torch.ones(3) * held.weights.sum())
    assert len(list(compiled.foregrad.all_specializations())) == 2


def test_gradients_reach_the_state():
    class Held:
        pass

    held = Held()
    compiled = foregrad.compile(lambda x: (x.sum() * held.weights).sum(), backend="eager", on_unsupported="raise")
    for size in (2, 3, 4, 5):
        held.weights = torch.ones(size, requires_grad=True)
        compiled(torch.full((3,), 2.0)).backward()
        assert torch.equal(held.weights.grad, torch.full((size,), 6.0))
    assert len(list(compiled.foregrad.all_specializations())) == 2


def test_a_parameter_of_another_size_has_a_graph_of_its_own():
    module = torch.nn.Linear(3, 2)
    compiled = foregrad.compile(module, backend="eager", on_unsupported="raise")
    x = torch.ones(1, 3)
    for size in (2, 4, 5):
        module.weight = torch.nn.Parameter(torch.ones(size, 3))
        module.bias = torch.nn.Parameter(torch.zeros(size))
        assert torch.equal(compiled(x), torch.full((1, size), 3.0))
