"""Where an object is held in the Python state that a function can reach, and how another takes its place."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterable
from typing import Any

from .expected import ABSENT
from .holders import CELL, CLASS, DEQUE, DICT, LIST, NAMESPACE, SET, SLOTS, Holder
from .user_state import UserState

__all__ = ["held_in", "now_at", "put", "references_to"]

_MAPPINGS = (DICT, NAMESPACE, CLASS, SLOTS)


def held_in(holder: Holder) -> Iterable[tuple[Any, Any]]:
    """What a holder held before the run, with the keys that `put` takes."""
    if holder.kind in _MAPPINGS:
        return holder.before.items()  # type: ignore[no-any-return]
    if holder.kind in (LIST, DEQUE):
        return enumerate(holder.before)
    return [("cell_contents", holder.before)] if holder.kind is CELL else ()


def now_at(holder: Holder, key: Any) -> Any:
    """What a holder has under a key now."""
    now = holder.kind.read(holder.target)
    if holder.kind is CELL:
        return now
    if holder.kind in (LIST, DEQUE):
        return now[key] if key < len(now) else ABSENT
    return now.get(key, ABSENT)


def put(holder: Holder, key: Any, value: Any) -> None:
    """Put a value in the place of another, without code of the user's."""
    kind, target = holder.kind, holder.target
    if kind in (DICT, NAMESPACE):
        base: Any = collections.OrderedDict if isinstance(target, collections.OrderedDict) else dict
        base.__setitem__(target, key, value)
    elif kind is CELL:
        target.cell_contents = value
    elif kind is CLASS:
        type.__setattr__(target, key, value)
    elif kind is SLOTS:
        object.__setattr__(target, key, value)
    else:
        sequence: Any = list if kind is LIST else collections.deque
        sequence.__setitem__(target, key, value)


def references_to(target: Any, state: UserState) -> list[tuple[Holder, Any]]:
    """Every (holder, key) under which the walk of `state` met an object; none where something else refers to it, too,
    in which no other object can take its place: a tuple, a partial application, a set, a method of the object.
    """
    found = [(holder, key) for holder in state.holders for key, value in held_in(holder) if value is target]
    in_sets = (item for holder in state.holders if holder.kind is SET for item in holder.before)
    if any(item is target for item in in_sets) or any(_holds(value, target) for value in state.met()):
        return []
    return found


def _holds(value: Any, target: Any) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return any(item is target for item in value)
    if isinstance(value, functools.partial):
        return value.keywords is target
    return isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)) and value.__self__ is target
