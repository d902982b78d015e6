"""Guards for a plain object among the arguments: its attributes and items are those of the capture, and no others."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..frontend.arrays import are_apart
from ..frontend.call import FlatCall
from ..frontend.objects import Layout, slot_members
from ..frontend.tree import Tree
from ..graph.python_effects import OfArgument, PythonWrite
from ..graph.source import Names, unpacked
from .constants import has_context, same_keys

Bind = Callable[[str, Any], str]


def apart_guards(
    call: FlatCall,
    names: Mapping[int, str],
    writes: Sequence[PythonWrite],
    reached: Mapping[type, frozenset[int]],
    bind: Bind,
) -> Iterator[str]:
    """Guards that distinct containers are distinct still, and that none is a container which the function also reaches
    by itself (`reached`: their ids, by class). `names`: the variables of the containers, by number.
    """
    is_written = any(type(write.target) is OfArgument for write in writes)
    of_class: dict[type, list[str]] = {}
    for number, (container, _) in enumerate(call.containers):
        of_class.setdefault(type(container), []).append(names[number])
    for cls, variables in of_class.items():
        if len(variables) > 1 and (cls not in (list, dict) or is_written):
            yield f"len({{{', '.join(f'id({name})' for name in variables)}}}) == {len(variables)}"
        if reached.get(cls):
            ids = bind("reached", reached[cls])
            yield from (f"id({name}) not in {ids}" for name in variables)


def arrays_apart_guards(call: FlatCall, leaves: Sequence[str], reached: Sequence[str], bind: Bind) -> Iterator[str]:
    """Guards that arrays among the arguments share memory with no other input. `leaves`: the variables of the
    arguments; `reached`: the variables of other inputs.
    """
    arrays = call.arrays()
    if arrays:
        others = [*(leaves[i] for i in call.tensors_apart()), *reached]
        over = f"({', '.join(leaves[i] for i in arrays)},)"
        yield f"{bind('are_apart', are_apart)}({over}, ({''.join(f'{name}, ' for name in others)}))"


def object_lines(name: str, tree: Tree, children: list[str], names: Names, bind: Bind) -> Iterator[tuple[str, str]]:
    """(a line, "") or ("", a condition) in order: the variable `name` holds an object with the layout of `tree`, and
    its values are in the variables `children`. The class was tested before.
    """
    if tree.kind == "array":
        yield "", f"{name}.flags.writeable"
        yield f"{children[0]} = {bind('from_numpy', torch.from_numpy)}({name})", ""
        return
    if tree.kind != "object":
        if tree.kind == "partial":
            yield "", f"not {name}.__dict__"
        parts = {"partial": ("func", "args", "keywords"), "method": ("__func__", "__self__")}.get(tree.kind)
        values = [f"{name}()"] if parts is None else [f"{name}.{part}" for part in parts]
        yield f"{', '.join(children)} = {', '.join(values)}", ""
        return
    layout: Layout = tree.context
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


def _items(name: str, layout: Layout, children: list[str], names: Names, bind: Bind) -> Iterator[tuple[str, str]]:
    base: Any = layout.base
    if base is set:
        yield "", has_context(f"frozenset({bind('members_of', set.__iter__)}({name}))", layout.members, bind)
    elif layout.keys is not None:
        kind: Any = collections.OrderedDict if base is collections.OrderedDict else dict
        if base is collections.defaultdict:
            yield f"{children[0]} = {name}.default_factory", ""
            children = children[1:]
        keys = bind("keys_of", kind.keys)
        if all(type(key) is str for key in layout.keys):
            yield "", f"tuple({keys}({name})) == {bind('keys', layout.keys)}"
        else:
            yield "", f"{bind('same_keys', same_keys)}({bind('keys', layout.keys)}, {keys}({name}))"
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
