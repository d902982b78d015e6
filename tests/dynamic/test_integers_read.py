"""Integers read from tensors by `.item()`, another one in each call: counts of right answers, lengths, positions."""

import json
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foregrad
from tests.covering import each

ONE_GRAPH = {
    "returned": lambda x, n: (x.sum(), n, n * 2 + 1, -n),
    "multiplied": lambda x, n: (x * n).sum(),
    "divided": lambda x, n: (x / (n + 1)).sum(),
    "a mean": lambda x, n: x.sum() / (n + 1),
    "a slice": lambda x, n: x[:n].sum() + x[n:].cos().sum(),
    "a size": lambda x, n: (torch.zeros(n) + x.sum()).sum() + torch.arange(n).sum(),
    "repeated": lambda x, n: x.expand(n, -1).sin().sum() + x.repeat(n, 1).sum(),
    "an index": lambda x, n: torch.zeros(n + 1).index_add(0, torch.zeros(10, dtype=torch.long), x).sum(),
    "joined": lambda x, n: torch.cat([x, torch.zeros(n)]).cos().sum() + F.pad(x, (0, n)).sum(),
    "bits": lambda x, n: x.sum() * (n & 3) * (n << 1),
    "it is an integer": lambda x, n: x.sum() if isinstance(n, int) else x.mean(),
}
A_GRAPH_FOR_EACH = {
    "a loop": lambda x, n: sum((x * i for i in range(n)), x).sum(),
    "text": lambda x, n: x.sum() * len(f"{n}") * len(json.dumps({"n": n})),
    "an item": lambda x, n: x.sum() * list(range(12))[n],
    "a key": lambda x, n: x.sum() * {3: 2.0}.get(n, 1.0),
    "a float": lambda x, n: x.sum() * float(n),
}
BRANCHES = {
    "compared": lambda x, n: x.sum() if n > 4 else x.cos().sum(),
    "the least": lambda x, n: x[: min(n, 4)].sum() * max(n, 2),
    "true": lambda x, n: x.sum() if n else x.cos().sum(),
}
VALUES = {"growing": [3, 4, 5, 6, 7, 3], "small": [0, 1, 2, 1, 0, 5, 6], "alternating": [9, 2, 9, 2, 1]}


class Counts(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.use = use
        self.total = 0
        self.by_name = {}

    def forward(self, x, below):
        n = (torch.arange(20) < below).sum().item()
        self.total += n
        self.by_name["last"] = n
        return self.use(x, n)


def run(use, values, compile):
    module = Counts(use)
    called = compile(module)
    torch.manual_seed(0)
    found = []
    for value in values:
        x = torch.randn(10, requires_grad=True)
        result = called(x, torch.tensor(value))
        result = result if isinstance(result, tuple) else (result,)
        result[0].backward()
        found.append([result[0].detach(), x.grad, *result[1:], module.total, dict(module.by_name)])
    return found


def check(use, values):
    """How many graphs it took, after it was compared with eager."""
    made = []

    def compile(module):
        made.append(foregrad.compile(module, backend="eager"))
        return made[0]

    for ours, eager in zip(run(use, values, compile), run(use, values, lambda f: f), strict=True):
        for a, b in zip(ours, eager, strict=True):
            assert type(a) is type(b)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    return len(foregrad.explain_recompiles(made[0]))


@pytest.mark.parametrize("use", ONE_GRAPH)
def test_one_more_graph_serves_all(use):
    assert check(ONE_GRAPH[use], VALUES["growing"]) == 2


@pytest.mark.parametrize(
    ("use", "values"), each([*A_GRAPH_FOR_EACH, *BRANCHES, "returned", "a slice", "a size"], VALUES)
)
def test_whatever_is_done_with_it(use, values):
    check((ONE_GRAPH | A_GRAPH_FOR_EACH | BRANCHES)[use], VALUES[values])


READS = {
    "int": lambda buffer: int(buffer),
    "float": lambda buffer: float(buffer),
    "item": lambda buffer: buffer.item(),
    "a square root": lambda buffer: math.sqrt(buffer),
    "a list": lambda buffer: buffer.tolist()[0],
}


@pytest.mark.parametrize("read", READS)
def test_a_tensor_from_outside_is_read_as_an_argument_is(read):
    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("kept", torch.zeros(2, 40))
            self.register_buffer("at", torch.full((1,), 2))

        def forward(self, x):
            at, value = int(self.at), READS[read](self.at)
            self.kept[:, at : at + 3] = x
            self.at[0] = (at + 3) % 40
            return self.kept.sum() * value

    ours, eager = Queue(), Queue()
    compiled = foregrad.compile(ours, backend="eager")
    for _ in range(9):
        x = torch.randn(2, 3)
        assert torch.equal(compiled(x), eager(x))
        assert torch.equal(ours.kept, eager.kept)
    assert len(foregrad.explain_recompiles(compiled)) == 2


def _row(x):
    return x[x.sum(1).argmax()] * 2


def _column(x):
    return x[..., x.sum(0).argmin()].exp()


def _cell_written(x):
    y = x * 1
    y[x.sum(1).argmax(), 1] = x.mean()
    y[x.sum(1).argmin()] = x[0]
    return y


def _from_the_end(x):
    return x[x.sum(1).argmax() - 12, 1:]


@pytest.mark.parametrize("function", [_row, _column, _cell_written, _from_the_end])
def test_a_tensor_without_dimensions_is_an_index_as_its_number_is(function):
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    torch.manual_seed(0)
    for _ in range(25):
        x = torch.randn(12, 3, requires_grad=True)
        found, expected = compiled(x), function(x)
        assert torch.equal(found, expected)
        assert found.stride() == expected.stride()
        assert torch.equal(*torch.autograd.grad(found.sum(), x), *torch.autograd.grad(expected.sum(), x))
    assert len(foregrad.explain_recompiles(compiled)) <= 4
