"""Guards for a plain object among the arguments: its attributes and items are the capture's, and no more."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

from ..dispatch.conditions import Bind, has_context, has_keys
from ..frontend.tree import Tree
from ..graph.source import Names, unpacked
from .objects import ObjectLayout, slot_members


def object_lines(name: str, tree: Tree, children: list[str], names: Names, bind: Bind) -> Iterator[tuple[str, str]]:
    """(a line, "") or ("", a condition) in order: the variable `name` holds an object with the layout of `tree`, and
    its values are in the variables `children`. The class was tested before.
    """
    layout: ObjectLayout = tree.context
    end = layout.num_items
    yield from _items(name, layout, children[:end], names, bind)
    if layout.names is not None:
        table = names.fresh(f"{name}_table")
        yield f"{table} = {bind('attribute_of', object.__getattribute__)}({name}, '__dict__')", ""
        yield "", f"tuple({table}) == {bind('names', layout.names)}"
        if layout.names:
            own = children[end : end + len(layout.names)]
            yield f"{unpacked(own)}{table}.values()", ""
            end += len(own)
    members = slot_members(tree.type)
    for child, index in zip(children[end:], layout.slots, strict=True):
        yield f"{child} = {bind('slot', members[index].__get__)}({name})", ""
    empty = [member for i, member in enumerate(members) if i not in layout.slots]
    if empty:
        yield "", f"{bind('are_empty', _are_empty)}({name}, {bind('slots', tuple(empty))})"


def _items(name: str, layout: ObjectLayout, children: list[str], names: Names, bind: Bind) -> Iterator[tuple[str, str]]:
    base: Any = layout.base
    if base is set:
        yield "", has_context(f"frozenset({bind('members_of', set.__iter__)}({name}))", layout.members, bind)
    elif layout.keys is not None:
        kind: Any = collections.OrderedDict if base is collections.OrderedDict else dict
        if base is collections.defaultdict:
            yield f"{children[0]} = {name}.default_factory", ""
            children = children[1:]
        yield "", has_keys(f"{bind('keys_of', kind.keys)}({name})", layout.keys, bind)
        if children:
            yield f"{unpacked(children)}{bind('values_of', kind.values)}({name})", ""
    elif base is not None:
        yield "", f"{bind('length', base.__len__)}({name}) == {len(children)}"
        if base is collections.deque:
            yield "", f"{name}.maxlen == {layout.limit}"
        if children:
            yield f"{unpacked(children)}{bind('items_of', base.__iter__)}({name})", ""


def _are_empty(value: Any, slots: tuple[Any, ...]) -> bool:
    for slot in slots:
        try:
            slot.__get__(value)
        except AttributeError:
            continue
        return False
    return True
