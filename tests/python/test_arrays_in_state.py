"""NumPy arrays that a function reaches by itself and that vary: inputs of the graph, where it needs none of the numbers."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import foregrad

NUMBERS = np.zeros(4)


class World:
    """What an environment, a buffer or a running mean keeps in NumPy."""

    def __init__(self):
        self.state = np.arange(4.0)
        self.other = [1]
        self.batch = {"x": np.ones(4), "y": np.zeros(4)}


def grow(world, i):
    world.state += i


def rebind(world, i):
    world.state = np.full(4, float(i))


def resize(world, i):
    world.state = np.full(3 + i % 2, float(i))


def freeze(world, i):
    rebind(world, i)
    world.state.flags.writeable = False


def share(world, i):
    grow(world, i)
    world.other = [world.state]


def view(world, i):
    world.base = np.arange(8.0) + i
    world.state = world.base[::2]


def next_batch(world, i):
    world.batch.update(x=np.full(4, float(i)), y=np.full(4, 2.0 * i))


def count(world, i):
    NUMBERS[:] = i


def tensor(world, w):
    return (torch.from_numpy(world.state)[:3] * w).sum()


def copied(world, w):
    return (torch.tensor(world.state)[:3] * w).sum()


def written(world, w):
    return (torch.from_numpy(world.state).add_(1)[:3] * w).sum()


def item_written(world, w):
    over = torch.as_tensor(world.state)
    over[1] = 7.0
    return (over[:3] * w).sum()


def written_and_looked_at(world, w):
    over = torch.from_numpy(world.state)
    over.add_(1)
    return (over[:3] * w).sum() * float(world.state[0])


def of_two(world, w):
    return ((torch.from_numpy(world.batch["x"])[:3] * w - torch.as_tensor(world.batch["y"])[:3]) ** 2).sum()


def of_globals(world, w):
    return (torch.from_numpy(NUMBERS)[:3] * w).sum()


def branching(world, w):
    return (w * (2 if world.state[0] > 3 else 1)).sum()


def indexing(world, w):
    return w[int(world.state[0]) % 3] * 2


def aliased(world, w):
    return tensor(world, w) + float(world.other[0].sum())


def with_base(world, w):
    return tensor(world, w) + float(world.base[1])


CASES = {
    "grow": (tensor, grow, 2),
    "rebind": (tensor, rebind, 2),
    "copied": (copied, rebind, 2),
    "resize": (tensor, resize, 3),
    "written by tensors": (written, grow, 1),
    "item written": (item_written, rebind, 1),
    "written and looked at": (written_and_looked_at, grow, None),
    "dict": (of_two, next_batch, 2),
    "global": (of_globals, count, 2),
    "branch": (branching, grow, 6),
    "index": (indexing, grow, 6),
    "aliased": (aliased, share, 6),
    "frozen": (copied, freeze, 6),
    "view": (with_base, view, 6),
}


@pytest.mark.parametrize("name", CASES)
def test_arrays_that_vary(name):
    function, change, graphs = CASES[name]

    def run(compile):
        world = World()
        weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
        call = compile(lambda w: function(world, w))
        results = []
        for i in range(6):
            change(world, i)
            result = call(weight)
            result.backward()
            results += [result.detach(), weight.grad.clone(), torch.tensor(world.state), torch.tensor(NUMBERS)]
        return results, call

    expected, _ = run(lambda f: f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name == "frozen" or graphs is None else "error")  # of PyTorch's on the first
        found, call = run(lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"))
    assert all(map(torch.equal, found, expected))
    report = foregrad.explain_recompiles(call)
    if graphs is None:
        assert report.eager_calls
    else:
        assert len(report.entries) <= graphs
        assert report.eager_calls == 0


def test_an_array_whose_numbers_come_to_be_needed_is_no_input_any_more():
    world = World()

    def function(w):
        return (w * 2).sum() if world.state[0] > 4 and world.other else tensor(world, w)

    def early(w):
        return tensor(world, w) if len(world.other) else function(w)

    call = foregrad.compile(early, backend="eager")
    for i in range(8):
        if i == 4:
            world.other.clear()
        grow(world, i)
        assert torch.equal(call(torch.ones(3)), early(torch.ones(3)))
    assert foregrad.explain_recompiles(call).eager_calls == 0


def test_second_derivatives():
    world = World()
    call = foregrad.compile(lambda w: (torch.from_numpy(world.state)[:3] * w**3).sum(), backend="eager")
    for i in range(4):
        grow(world, i)
        w = torch.ones(3, dtype=torch.float64, requires_grad=True)
        (first,) = torch.autograd.grad(call(w), w, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), w)
        assert torch.equal(second, 6 * torch.from_numpy(world.state)[:3])
    assert len(foregrad.explain_recompiles(call).entries) == 2
