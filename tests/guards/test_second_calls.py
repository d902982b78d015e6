"""A second call that differs from the first in one respect gives eager's result, with a graph of its own if needed."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

import foregrad
from tests.guards.module_worlds import CASES
from tests.parity.observe import compare_trees


def leaves(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [leaf for item in value for leaf in leaves(item)]


def observe(fn, args, kwargs, seed):
    """Everything a call does: what it returns and raises, its arguments afterwards, gradients, buffers."""
    torch.manual_seed(seed)
    out = fn(*args, **kwargs)
    differentiable = [x for x in leaves(out) if x.requires_grad]
    for leaf in leaves((args, kwargs)):
        leaf.grad = None if leaf.is_leaf and not leaf.is_inference() else leaf.grad
    if isinstance(fn, torch.nn.Module):
        fn.zero_grad(set_to_none=True)
    if differentiable and torch.is_grad_enabled():
        with torch.autocast("cpu", enabled=False):
            torch.autograd.backward([x.float().sum() for x in differentiable])
    seen = {"out": out, "args": args, "kwargs": kwargs, "state": torch.get_rng_state()}
    seen["grads"] = [x.grad for x in leaves((args, kwargs)) if x.is_leaf and not x.is_inference()]
    if isinstance(fn, torch.nn.Module):
        seen["parameters"] = dict(fn.named_parameters())
        seen["parameter grads"] = {name: p.grad for name, p in fn.named_parameters()}
        seen["buffers"] = dict(fn.named_buffers())
    return seen


def without_modules(seen):
    return {k: list(leaves(v)) if k in ("args", "kwargs") else v for k, v in seen.items()}


def play(make, compiled):
    """The world's two calls; what was seen, and the compiled function."""
    torch.manual_seed(0)
    world = make()
    fn = foregrad.compile(world.fn, backend="eager") if compiled else world.fn
    seen = [without_modules(observe(fn, world.first, world.first_kwargs, 1))]
    with contextlib.ExitStack() as stack:
        undo = world.change()
        if callable(undo) and not isinstance(undo, torch.nn.Module):
            stack.callback(undo)
        elif hasattr(undo, "remove"):
            stack.callback(undo.remove)
        for context in world.under:
            stack.enter_context(context())
        called = world.rebuild(fn) if world.rebuild else fn
        second = world.first if world.second is None else world.second
        seen.append(without_modules(observe(called, second, world.second_kwargs, 2)))
    return seen, called


@pytest.mark.parametrize("name", CASES)
def test_a_second_call(name):
    graphs, make = CASES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        warnings.simplefilter("ignore", FutureWarning)
        expected, _ = play(make, compiled=False)
        actual, fn = play(make, compiled=True)
    for number, (eager, ours) in enumerate(zip(expected, actual, strict=True), 1):
        assert not compare_trees(eager, ours, f"call {number}"), name
    report = foregrad.explain_recompiles(fn)
    assert len(report) == graphs, str(report)
    assert len(fn.foregrad.specializations) <= graphs


def test_the_table_is_long_enough():
    assert len(CASES) >= 100
