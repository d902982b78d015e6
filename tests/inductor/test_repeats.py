"""Repeated regions are found by structure, in both halves: one copy, run on another's operands, gives its values."""

from __future__ import annotations

import random

import pytest
import torch
from torch import fx, nn

import foregrad
from foregrad.inductor.repeats import find_repeats
from tests.covering import ALL

torch.manual_seed(0)
WEIGHTS = [torch.randn(8, 8, requires_grad=True) for _ in range(12)]


def values_of(joint):
    """Every node's value, for made-up arguments and tangents."""
    known = {}
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            made = torch.randn(value.shape, dtype=value.dtype) if value.dtype.is_floating_point else None
            known[node] = torch.zeros(value.shape, dtype=value.dtype) if made is None else made
        elif node.op == "get_attr":
            known[node] = getattr(joint.module, node.target)
        elif node.op == "call_function":
            known[node] = run(node, known)
    return known


def run(node, known):
    args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
    return node.target(*args, **kwargs)


def check(joint, repeats):
    """What is said of each repeat is so."""
    known = values_of(joint)
    order = {node: i for i, node in enumerate(joint.graph.nodes)}
    seen = set()
    for number, repeat in enumerate(repeats):
        body = repeat.copies[0]
        assert len(repeat.copies) > 1
        for copy, inputs in zip(repeat.copies, repeat.inputs, strict=True):
            assert not seen.intersection(copy)
            seen.update(copy)
            inside = set(copy)
            # Convex: what a copy reads comes before it, or is between its nodes and independent of it.
            assert all(order[node] < order[copy[0]] for node in inputs if node.op == "call_function")
            env = dict(zip(repeat.inputs[0], (known[node] for node in inputs), strict=True))
            for r, node in enumerate(body):
                env[node] = run(node, env)
                assert identical(env[node], known[copy[r]])
            read = {r for r, n in enumerate(copy) if any(u not in inside for u in n.users)}
            assert read <= set(repeat.results)
        assert number == 0 or order[repeats[number - 1].copies[0][0]] < order[body[0]]


def identical(a, b):
    if isinstance(a, (tuple, list)):
        return all(map(identical, a, b))
    return not isinstance(a, torch.Tensor) or (a.stride() == b.stride() and torch.equal(a, b))


def is_of_backward(repeat):
    waiting, seen = list(repeat.inputs[0]), set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return any(node.name.startswith("tangents") for node in seen)


def halves(repeats):
    """(the longest row of the forward, the longest of the backward)."""
    found = []
    for is_backward in (False, True):
        mine = [repeat for repeat in repeats if is_of_backward(repeat) is is_backward]
        found.append(max(mine, key=lambda repeat: len(repeat.copies) * len(repeat.copies[0]), default=None))
    return found


def captured(f, *args):
    joint = foregrad.capture(f, *args)
    repeats = find_repeats(joint.graph)
    check(joint, repeats)
    return repeats


def x():
    return torch.randn(4, 8, requires_grad=True)


def layer(x, weight):
    return x + (x @ weight).tanh().sin()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_layers_of_a_module_in_both_halves():
    module = nn.Sequential(nn.Linear(8, 8), *(Block() for _ in range(5)), nn.Linear(8, 3))
    forward, backward = halves(captured(lambda x: module(x).square().mean(), torch.randn(4, 8)))
    assert len(forward.copies) == 5
    assert len(backward.copies) == 5
    assert len(set(forward.inputs[0]) - set(forward.inputs[1])) == 7  # the parameters and what comes in


def test_layers_without_modules():
    def f(x):
        for weight in WEIGHTS[:6]:
            x = layer(x, weight)
        return x.sum()

    forward, backward = halves(captured(f, x()))
    assert len(forward.copies) == 6
    assert len(backward.copies) >= 4  # the first reads an expanded scalar, the last returns its result


def test_masks_made_once_are_shared():
    def f(x, mask):
        mask = mask.exp()
        for weight in WEIGHTS[:5]:
            x = (x @ weight * mask).tanh() + x
        return x.sum()

    forward, _ = halves(captured(f, x(), torch.randn(4, 8)))
    assert len(forward.copies) == 5
    assert len(set(forward.inputs[0]) & set(forward.inputs[1])) == 1


def test_ends_are_peeled():
    def f(x):
        x = (x @ WEIGHTS[0]).exp().cos()
        for weight in WEIGHTS[1:7]:
            x = layer(x, weight)
        return (x.sigmoid() @ WEIGHTS[7]).sum()

    forward, _ = halves(captured(f, x()))
    assert len(forward.copies) == 6
    assert len(forward.copies[0]) == 4


def without(change):
    def f(x):
        for k, weight in enumerate(WEIGHTS[:7]):
            x = change(x, weight) if k == 3 else layer(x, weight)
        return x.sum()

    return f


OTHERS = {
    "operator": lambda x, w: x + (x @ w).tanh().cos(),
    "constant": lambda x, w: torch.add(x, (x @ w).tanh().sin(), alpha=2),
    "wiring": lambda x, w: (x @ w).tanh() + (x @ w).sin(),
    "dtype": lambda x, w: (x.double() + (x.double() @ w.double()).tanh().sin()).float(),
    "strides": lambda x, w: x + (x @ w).t().contiguous().t().tanh().sin(),
    "more_inside": lambda x, w: x + (x @ w).tanh().exp().sin(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_differs_is_no_copy(name):
    repeats = captured(without(OTHERS[name]), x())
    assert max(len(repeat.copies) for repeat in repeats if not is_of_backward(repeat)) == 3
    other, _ = halves(captured(without(layer), x()))
    assert len(other.copies) == 7


def test_equal_operands_of_one_copy_are_equal_in_all():
    def f(x):
        for k in range(6):
            a, b = WEIGHTS[k], WEIGHTS[k + 1 if k == 2 else k]
            x = ((x @ a).tanh() @ b).sin() + x
        return x.sum()

    rows = [repeat for repeat in captured(f, x()) if not is_of_backward(repeat)]
    assert max(len(repeat.copies) for repeat in rows) == 3


def test_what_an_earlier_layer_gives_to_a_later_one():
    """As in a residual stream of two: each layer reads the two before it."""

    def f(x):
        before = x.cos()
        for weight in WEIGHTS[:6]:
            before, x = x, (x @ weight).tanh() + before.sin()
        return x.sum()

    forward, _ = halves(captured(f, x()))
    assert len(forward.copies) >= 5


def test_nothing_repeats():
    assert captured(lambda x: (x.sin() @ WEIGHTS[0]).exp().mean(), x()) == ()


def test_rows_within_a_network_of_stages():
    def f(x):
        for weight in WEIGHTS[:4]:
            x = layer(x, weight)
        x = x[:, :4].exp()
        for weight in WEIGHTS[4:9]:
            x = (x @ weight[:4, :4]).relu().cos() * x
        return x.sum()

    rows = [repeat for repeat in captured(f, x()) if not is_of_backward(repeat)]
    assert [len(repeat.copies) for repeat in rows] == [4, 5]


POINTWISE = [torch.sin, torch.cos, torch.tanh, torch.sigmoid, torch.relu, lambda x: x * 2, lambda x: x - 1.5]


def made_up(seed):
    """(a program of a head, a body a few times, a tail; how often; operators in the body)."""
    draw = random.Random(seed)

    def steps(count):
        found = []
        for _ in range(count):
            kind = draw.choice(["pointwise", "product", "skip", "norm"])
            found.append((kind, draw.choice(POINTWISE)))
        return found

    head, body, tail, count = steps(draw.randrange(4)), steps(draw.randrange(2, 7)), steps(2), draw.randrange(3, 9)
    body[:2] = [("product", torch.sin), ("pointwise", torch.erf)]

    def apply(x, steps, weight):
        kept = x
        for kind, function in steps:
            if kind == "pointwise":
                x = function(x)
            elif kind == "product":
                x = x @ weight
            elif kind == "skip":
                x = function(x) + kept
            else:
                x = function(nn.functional.layer_norm(x, (8,)))
        return x

    def f(x):
        x = apply(x, head, WEIGHTS[10])
        for weight in WEIGHTS[:count]:
            x = apply(x, body, weight)
        return apply(x, tail, WEIGHTS[11]).mean()

    return f, count


@pytest.mark.parametrize("seed", range(60 if ALL else 24))
def test_programs_made_up(seed):
    f, count = made_up(seed)
    forward, backward = halves(captured(f, x()))
    assert len(forward.copies) >= count - 1
    assert backward is None or len(backward.copies) >= 2
