"""No name and no key of the user's is ever run, mixed up with another, or in the way of a name of foregrad's own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import foregrad
from tests.covering import shared
from tests.guards.hostile_names import CANARY, KEYS, NAMES, canary_is_alive
from tests.guards.hostile_places import OF_KEYS, OF_NAMES, World


def through_compile(fn):
    return foregrad.compile(fn, backend="eager")


def same(a, b, path="out"):
    """What differs between two results; the type of everything counts."""
    if type(a).__name__ != type(b).__name__:
        return [f"{path}: {type(a)!r:.80} and {type(b)!r:.80}"]
    if isinstance(a, torch.Tensor):
        equal = a.shape == b.shape and a.requires_grad == b.requires_grad and torch.equal(a, b)
        return [] if equal else [f"{path}: {a} and {b}"]
    if isinstance(a, dict):
        if list(map(object_of, a)) != list(map(object_of, b)):
            return [f"{path}: other keys"]
        pairs = zip(a.values(), b.values(), strict=True)
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            return [f"{path}: {len(a)} and {len(b)} items"]
        pairs = zip(a, b, strict=True)
    elif dataclasses.is_dataclass(a):
        if a.__dict__.keys() != b.__dict__.keys():
            return [f"{path}: other fields"]
        pairs = zip(a.__dict__.values(), b.__dict__.values(), strict=True)
    else:
        return [] if a == b or a is b else [f"{path}: {a!r:.80} and {b!r:.80}"]
    return [d for i, (x, y) in enumerate(pairs) for d in same(x, y, f"{path}[{i}]")]


def object_of(key):
    """Keys of plain types by type and value, others by which object it is."""
    return (type(key), key) if type(key) in (int, str, bytes, bool) else id(key)


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif dataclasses.is_dataclass(value):
        value = value.__dict__.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for item in value for tensor in tensors_of(item)]


def observed(world: World, call):
    out = call(*world.args, **world.kwargs)
    for leaf in world.leaves:
        leaf.grad = None
    sum((i + 1.0) * t.sum() for i, t in enumerate(tensors_of(out)) if t.requires_grad).backward()
    return out, [leaf.grad for leaf in world.leaves]


def differences(make, names, compiler):
    eager, compiled = make(names), make(names)
    call = compiler(compiled.fn)
    found = []
    for step in ("first", "second", "changed", "changed, again"):
        if step == "changed":
            eager.change()
            compiled.change()
        found += [f"{step} call: {d}" for d in same(observed(eager, eager.fn), observed(compiled, call))]
    assert canary_is_alive(), f"a name was run as code; {CANARY} is set"
    return found


@pytest.mark.parametrize("place", OF_NAMES)
def test_a_name_is_only_a_name(place):
    names = shared(NAMES, [*OF_NAMES].index(place) % 3, 3)
    assert differences(OF_NAMES[place], names, through_compile) == []


@pytest.mark.parametrize("place", OF_KEYS)
def test_a_key_is_the_object_it_is(place):
    assert differences(OF_KEYS[place], KEYS, through_compile) == []
