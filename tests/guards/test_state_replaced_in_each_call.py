"""Tensors that each call replaces in a table of the program's (averages of weights) are not compared by the slow way."""

import dataclasses
import enum

import pytest
import torch

import foregrad
from foregrad.python.watch import Watch


class Averages:
    """Averages of a model's weights, trained by an optimizer, which finds its state by identity."""

    def __init__(self, kind, layers=2):
        self.model = torch.nn.Sequential(*(torch.nn.Linear(3, 3) for _ in range(layers)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        weights = dict(self.model.named_parameters())
        self.kind = kind
        self.averages = {name: weight.detach().clone() for name, weight in weights.items()}
        if kind == "list":
            self.averages = list(self.averages.values())

    def __call__(self, x):
        loss = self.model(x).square().sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for key, (name, weight) in enumerate(self.model.named_parameters()):
            key = key if self.kind == "list" else name
            self.averages[key] = 0.9 * self.averages[key] + 0.1 * weight.detach()
        return loss.detach() + sum(map(torch.sum, self.items()))

    def items(self):
        return self.averages if self.kind == "list" else self.averages.values()


def made(kind, layers=2):
    torch.manual_seed(0)
    return Averages(kind, layers)


@pytest.mark.parametrize(("kind", "layers"), [("dict", 2), ("list", 2), ("dict", 40)])
def test_no_slow_comparison_once_each_call_replaces_the_tensors(kind, layers, monkeypatch):
    eager, function = made(kind, layers), made(kind, layers)
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    slow, refresh = [], Watch.refresh
    monkeypatch.setattr(Watch, "refresh", lambda watch: (slow.append(call), refresh(watch))[1])
    for call in range(16):
        x = torch.full((2, 3), call / 8)
        assert torch.equal(compiled(x), eager(x))
        assert all(map(torch.equal, function.items(), eager.items()))
    assert max(slow, default=0) < 8
    assert len(list(compiled.foregrad.all_specializations())) <= 2


@pytest.mark.parametrize("kind", ["dict", "list"])
def test_a_tensor_put_at_two_places_is_noticed(kind):
    eager, function = made(kind), made(kind)
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    for call in range(16):
        x = torch.full((2, 3), call / 8)
        if call == 10:
            for program in (eager, function):
                keys = [0, 2] if kind == "list" else ["0.weight", "1.weight"]
                program.averages[keys[1]] = program.averages[keys[0]]
        if call == 13:
            for program in (eager, function):
                program.averages[0 if kind == "list" else "0.bias"] = torch.zeros(1, 1)
        assert torch.equal(compiled(x), eager(x))
        assert all(map(torch.equal, function.items(), eager.items()))


def test_a_parameter_put_among_the_averages_is_one_with_itself():
    """The function writes to the parameter and reads the average: which of them are one decides what is read."""

    class Program:
        def __init__(self):
            self.weight = torch.nn.Parameter(torch.ones(3))
            self.seen = {"last": torch.zeros(3)}
            self.rates = {self.weight: 2.0}

        def __call__(self, x):
            with torch.no_grad():
                self.weight.add_(x * self.rates[self.weight])
                result = self.seen["last"] * 1
                same = self.seen["last"] is self.weight
            self.seen["last"] = result + x
            return result * 2 if same else result

    eager, function = Program(), Program()
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    for call in range(12):
        if call == 9:
            eager.seen["last"], function.seen["last"] = eager.weight, function.weight
        x = torch.full((3,), float(call))
        assert torch.equal(compiled(x), eager(x)), call


class Recurrent(torch.nn.Module):
    """Keeps its hidden state from call to call, in a tuple, cut off from the call before."""

    def __init__(self):
        super().__init__()
        self.recurrent, self.hidden = torch.nn.LSTM(3, 4, batch_first=True), [None]

    def forward(self, x):
        if self.hidden[0] is not None:
            self.hidden[0] = tuple(part.detach() for part in self.hidden[0])
        out, self.hidden[0] = self.recurrent(x, self.hidden[0])
        loss = out.square().sum()
        if loss.item() > 1e9:  # a number that is read
            raise ValueError
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.25)
        return loss.item()


def test_a_hidden_state_replaced_in_each_call_has_one_graph():
    """A capture that starts over does not take state that is an input of the graph for an argument found twice."""
    torch.manual_seed(0)
    function = Recurrent()
    torch.manual_seed(0)
    eager = Recurrent()
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    for call in range(12):
        x = torch.full((2, 3, 3), call / 8)
        function.zero_grad()
        eager.zero_grad()
        assert compiled(x) == eager(x)
        assert all(map(torch.equal, function.hidden[0], eager.hidden[0]))
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(function.parameters(), eager.parameters(), strict=True))
    assert len(list(compiled.foregrad.all_specializations())) <= 3


class Kind(enum.Enum):
    IMAGE = 1
    MASK = 2


KEPT = {
    "members of an enumeration": lambda: [Kind.IMAGE, Kind.MASK],
    "classes": lambda: [int, float],
    "functions": lambda: (torch.sin, torch.cos),
    "by name": lambda: {"first": Kind.MASK},
}


@pytest.mark.parametrize("name", KEPT)
def test_a_container_of_constants_replaced_in_each_call_has_two_graphs(name):
    """As kornia's sequences do with the kinds of their inputs."""

    class Sequence:
        def __init__(self):
            self.keys = KEPT[name]()

        def __call__(self, x):
            now = self.keys
            self.keys = dict(now) if isinstance(now, dict) else type(now)(list(now))
            first = next(iter(self.keys.values() if isinstance(self.keys, dict) else self.keys))
            return x * (2 if first in (Kind.IMAGE, int, torch.sin) else 3)

    eager, function = Sequence(), Sequence()
    compiled, x = foregrad.compile(function, backend="eager", on_unsupported="raise"), torch.ones(3)
    for _ in range(12):
        before = function.keys
        assert torch.equal(compiled(x), eager(x))
        assert function.keys == eager.keys
        assert function.keys is not before or isinstance(before, tuple)
    assert len(list(compiled.foregrad.all_specializations())) <= 2
    for each in (eager, function):
        each.keys = [Kind.MASK, Kind.IMAGE]
    assert torch.equal(compiled(x), eager(x)), "put there from outside"


@dataclasses.dataclass(slots=True)
class Running:
    mean: torch.Tensor
    seen: int = 0

    def __call__(self, x):
        self.seen += 1
        self.mean = self.mean + (x.mean(0) - self.mean) / self.seen
        return x - self.mean


def test_attributes_in_slots_that_each_call_replaces_are_not_compared_slowly(monkeypatch):
    eager, function = Running(torch.zeros(3)), Running(torch.zeros(3))
    compiled = foregrad.compile(function.__call__, backend="eager", on_unsupported="raise")
    slow, refresh = [], Watch.refresh
    monkeypatch.setattr(Watch, "refresh", lambda watch: (slow.append(call), refresh(watch))[1])
    for call in range(16):
        x = torch.full((2, 3), call / 8)
        assert torch.equal(compiled(x), eager(x))
        assert torch.equal(function.mean, eager.mean)
    assert max(slow, default=0) < 10
    function.mean, eager.mean = torch.ones(4), torch.ones(4)  # a difference that matters
    x = torch.full((2, 4), 2.0)
    assert torch.equal(compiled(x), eager(x))
