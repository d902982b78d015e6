"""A capture leaves nothing of itself in the caches of PyTorch's functions, where later calls would find it."""

from __future__ import annotations

import functools
import gc
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import foregrad

_CACHED = type(functools.cache(lambda: None))
_LEFT_OUT = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


@pytest.fixture
def mesh():
    """Two processes, of which the other is not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield dist.device_mesh.init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def left_in(cached):
    """What a cached function holds that is of a capture: symbolic numbers, fakes, objects of foregrad's."""
    own = (cached.__wrapped__, cached.__dict__)
    seen, todo, found = set(), [x for x in gc.get_referents(cached) if not any(x is y for y in own)], []
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, _LEFT_OUT):
            continue
        seen.add(id(value))
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool, FakeTensor)) or (
            type(value).__module__.startswith("foregrad")
            and type(value).__module__ != "foregrad._torch.size_arithmetic"
        ):
            found.append(value)
        else:
            todo += gc.get_referents(value)
    return found


def all_left():
    """(cached function, value) for all that is left now."""
    gc.unfreeze()  # objects that were frozen are in no list
    caches = [
        c for c in gc.get_objects() if type(c) is _CACHED and not str(c.__module__).startswith(("foregrad", "tests"))
    ]
    gc.freeze()
    assert len(caches) > 100
    return [(f"{c.__module__}.{c.__qualname__}", v) for c in caches if c.cache_info().currsize for v in left_in(c)]


@pytest.fixture
def newly_left():
    """The classes of what a test leaves; other tests of the process may have left something before."""
    before = all_left()
    known = {id(value) for _, value in before}
    yield lambda: [(name, type(value)) for name, value in all_left() if id(value) not in known]
    del before


def leaf(*sizes):
    return torch.randn(*sizes, requires_grad=True)


def spec_of_an_integer(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    def function(x, n):
        a = DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=(2 * n, 4), stride=(4, 1))
        a = a * 2 + a.sin()
        return a.redistribute(placements=[Shard(1)]).redistribute(placements=[Replicate()]).to_local().sin()

    return function


def spec_of_a_size(mesh):
    from torch.distributed.tensor import DTensor, Replicate, Shard, zeros

    def function(x, n):
        rows = zeros(x.shape[0], 4, device_mesh=mesh, placements=[Replicate()])
        all_x = DTensor.from_local(x, mesh, [Replicate()], run_check=False).redistribute(placements=[Shard(0)])
        return (all_x + rows.redistribute(placements=[Shard(0)])).to_local() * n

    return function


@pytest.mark.parametrize("make", [spec_of_an_integer, spec_of_a_size])
def test_specs_of_dtensors_with_sizes_that_vary(mesh, make, newly_left):
    function = make(mesh)
    compiled = foregrad.compile(function, backend="eager")
    for n in (4, 6, 8, 10):
        x = leaf(n, 4)
        compiled(x, n).sum().backward()
    assert newly_left() == []
    for n in (4, 6, 8, 10, 12):  # eager calls that would find what was left
        x = leaf(n, 4)
        expected, actual = function(x, n), compiled(x, n)
        assert all(type(size) is int for size in expected.shape)
        assert expected.shape == actual.shape
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (expected, actual)))


PROGRAMS = {
    "sizes": lambda x, n: F.softmax(x @ x.mT, -1).sum(0),
    "numbers": lambda x, n: x[: n // 2].repeat(n, 1) * n,
    "numbers read": lambda x, n: x * x.sum().item(),
    "elements found": lambda x, n: x[x > 0],
    "checkpoint": lambda x, n: checkpoint(lambda y: y.sin().cos(), x, use_reentrant=False),
    "cond": lambda x, n: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "attention": lambda x, n: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "interpolation": lambda x, n: F.interpolate(x[None], scale_factor=2.0),
    "norm": lambda x, n: nn.LayerNorm(x.shape[1:])(x),
    "vmap": lambda x, n: torch.vmap(torch.sin)(x),
    "einsum": lambda x, n: torch.einsum("ij,kj->ik", x, x),
}


@pytest.mark.parametrize("dynamic", [None, True])
def test_programs_of_many_kinds(dynamic, newly_left):
    for function in PROGRAMS.values():
        compiled = foregrad.compile(function, backend="eager", dynamic=dynamic)
        for n in (4, 6, 8):
            compiled(leaf(n, 4), n).sum().backward()
    assert newly_left() == []
