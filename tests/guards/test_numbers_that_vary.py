"""Numbers that a program sets between calls, an annealed temperature or the weight of a loss: inputs once they vary."""

import dataclasses
import types

import pytest
import torch
from torch import nn

import foregrad
from tests.covering import each


class Negated(torch.autograd.Function):
    """Reads the number when the gradient is computed."""

    @staticmethod
    def forward(ctx, x, read):
        ctx.read = read
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * -ctx.read(), None


USES = {
    "mul": lambda x, v, read: (x * v).sum(),
    "div": lambda x, v, read: (x / (v + 2.5)).exp().sum(),
    "compared": lambda x, v, read: x.sum() if v > 0.5 else x.cos().sum(),
    "clamp": lambda x, v, read: x.clamp(max=v).sum(),
    "in a backward": lambda x, v, read: Negated.apply(x, read).sum(),
    "returned": lambda x, v, read: (x.sum(), v + 1),
}
IN_WORDS = {
    "text": lambda x, v, read: x.sum() + len(f"{v}"),
    "dropout": lambda x, v, read: torch.nn.functional.dropout(x, abs(v) / 10).sum(),
    "index": lambda x, v, read: x[: int(abs(v)) % 3 + 1].sum(),
}
VALUES = {
    "annealed": [1.0, 0.9, 0.8, 0.7, 0.3],
    "odd": [0.5, 0.0, 1.0, -0.0, 1e-8, -2.0, 0.5],
    "counted": [3, 4, 5, 6, 7],
    "small": [0, 1, 2, 3, 0, -1],
    "of two types": [1.0, 2, 0.5, 3, 0.25],
}


def module(use):
    class Module(nn.Module):
        def forward(self, x):
            return use(x, self.v, lambda: self.v)

    made = Module()
    return made, lambda v: setattr(made, "v", v)


def plain_object(use):
    @dataclasses.dataclass
    class Options:
        v: float = 0.0

    made = Options()
    return lambda x: use(x, made.v, lambda: made.v), lambda v: setattr(made, "v", v)


def slots(use):
    class Slots:
        __slots__ = ("v",)

    made = Slots()
    made.v = 0.0
    return lambda x: use(x, made.v, lambda: made.v), lambda v: setattr(made, "v", v)


def nested_dict(use):
    made = {"loss": {"weight": 0.0}}
    return (
        lambda x: use(x, made["loss"]["weight"], lambda: made["loss"]["weight"]),
        lambda v: made["loss"].update(weight=v),
    )


def cell(use):
    number = 0.0

    def put(v):
        nonlocal number
        number = v

    return lambda x: use(x, number, lambda: number), put


def global_name(use):
    names = {"use": use, "V": 0.0}
    exec("def f(x): return use(x, V, lambda: V)", names)
    return names["f"], lambda v: names.update(V=v)


def of_an_optimizer(use):
    group = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0).param_groups[0]
    holder = types.SimpleNamespace(group=group)
    return lambda x: use(x, holder.group["lr"], lambda: holder.group["lr"]), lambda v: group.update(lr=v)


def run(make, use, values, compile):
    function, put = make(use)
    function = compile(function)
    torch.manual_seed(0)
    found = []
    for value in values:
        put(value)
        x = torch.randn(3, requires_grad=True)
        result = function(x)
        result = result if isinstance(result, tuple) else (result,)
        result[0].backward()
        found.append([result[0].detach(), x.grad, *result[1:]])
    return found


def check(make, use, values):
    """How many graphs it takes, after it was compared with eager."""
    made = []

    def compile(function):
        made.append(foregrad.compile(function, backend="eager"))
        return made[0]

    for ours, eager in zip(run(make, use, values, compile), run(make, use, values, lambda f: f), strict=True):
        for a, b in zip(ours, eager, strict=True):
            assert type(a) is type(b)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    return foregrad.explain_recompiles(made[0])


PLACES = [module, plain_object, slots, nested_dict, cell, global_name, of_an_optimizer]


@pytest.mark.parametrize(("make", "use"), each(PLACES, USES, times=2))
def test_one_more_graph_serves_all_values(make, use):
    graphs = check(make, USES[use], VALUES["annealed"])
    assert len(graphs) == (3 if use == "compared" else 2)
    assert "as input" in str(graphs)


@pytest.mark.parametrize(("use", "values"), each([*USES, *IN_WORDS], VALUES, times=2))
@pytest.mark.parametrize("make", [module])
def test_whatever_the_numbers_are(make, use, values):
    check(make, (USES | IN_WORDS)[use], VALUES[values])


def test_the_report_counts_graphs_through():
    use = USES["compared"]
    text = str(check(module, use, [1.0, 0.9, 0.1, 0.2, 0.8]))
    assert text.splitlines()[:4] == [
        "Module: compiled 3 times",
        "graph 1: the first call",
        "graph 2 with self.v as input:",
        "  not graph 1: self.v was 1.0, is 0.9",
    ]
    assert "  not graph 2: " in text
