"""The guards of a call on its function's reads besides the arguments: a watch over the places of `Reads`."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from ..dispatch.guard_list import Lines, Words
from ..dispatch.guards import CallGuards
from ..frontend.source import Source
from ..frontend.tree import is_kept_whole
from ..graph.source import unpacked
from .expected import Expected
from .reads import TABLES, Reads, tensors_in_key
from .watch import Watch


class ReadGuards:
    """Adds the guards on one capture's reads to the call's `guards`. `watch` is the watch that they ask."""

    watch: Watch

    def __init__(self, guards: CallGuards) -> None:
        self.guards, self.reads = guards, guards.captured.reads

    def in_tables(self) -> dict[int, tuple[dict[str, Any], str, str]]:
        """The inputs that are parameters and buffers of modules: table, key and name."""
        guards = self.guards
        table_by_input = {}
        object_by_path: dict[Any, Any] = {}
        for index, info in enumerate(guards.signature.inputs):
            source = info.source
            if isinstance(source, Source) and len(source.steps) >= 2 and source.steps[-2][1] in TABLES:
                table = _note_way(self.reads, source, source.steps[:-1], object_by_path)
                if type(table) is dict:
                    table_by_input[index] = (table, source.steps[-1][1], str(info.slot).partition(" ")[2])
        return table_by_input

    def watched(self, inputs: list[str], static: dict[int, Any]) -> str:
        """Add the watch over values that were read besides the arguments, and bind parameters and buffers. Returns the
        watch's variable.
        """
        guards = self.guards
        roots = [leaf for leaf in guards.call.leaves if is_kept_whole(leaf)]
        modules = guards.captured.modules
        self.watch = watch = Watch(self.reads, modules, list(static.values()), roots, native=guards.native)
        name, handles = guards.bind("watch", watch), guards.bind("handles", RemovableHandle)
        check, objects, values = (guards.names.fresh(n) for n in ("check", "objects", "values"))
        code = (
            f"{check}, {objects}, {values} = {name}.now",
            f"if not {check}({objects}):",
            f"    if not {name}.refresh(): return MISS",
            f"    {values} = {name}.now[2]",
        )
        guards.list.steps.append(Lines(code, (f"{values} = {name}.tensors()",)))
        hooks = f"{handles}.next_id == {name}.hooks_seen or {name}.hooks_unchanged()"
        guards.require(hooks, "hooks of a module", Words("none"), Words("some"))
        if static:
            targets = [inputs[i] for i in static]
            test = f"{guards.bind('check_parameters', watch.check_tensors)}({values})"
            guards.compare(test, guards.facts_of(static), values)
            guards.let(f"{unpacked(targets)}{values}")
        guards.arguments_reached_too(inputs)
        if self.reads.compares_identity:
            self._other_objects()
        return name

    def _other_objects(self) -> None:
        """If the function compares objects by identity: guard each argument's identity with the found tensors."""
        guards = self.guards
        first_index = guards.bind("tensors_found", self.watch.first_index)
        nodes = [node for _, node in guards.call.tree.walk("")]
        keys_given = [n.context if n.kind == "dict" else getattr(n.context, "keys", None) for n in nodes]
        keys = frozenset(id(tensor) for key in keys_given for tensor in tensors_in_key(key))
        for name, _ in zip(guards.wrappers, guards.call.tree.wrappers(), strict=False):  # arguments come first
            guards.require(f"{first_index}.get(id({name})) is None", "whether it found an argument", False)
        for i, leaf in enumerate(guards.call.leaves):
            if isinstance(leaf, torch.Tensor) and guards.call.first_of[i] == i:
                which, name = self.watch.first_index.get(id(leaf)), guards.leaves[i]
                if which is None and id(leaf) in self.reads.given:  # code may have found it where nobody looks
                    test = f"{name} is {guards.bind('given', weakref.ref(leaf))}()"
                elif which is None:
                    test = f"{first_index}.get(id({name})) is None"
                    test += f" and id({name}) not in {guards.bind('keys', keys)}" if keys else ""
                else:
                    test = f"{first_index}.get(id({name})) == {which}"
                guards.require(test, f"which of the tensors it found {guards.paths[i]} is", Words("as captured"))


def _note_way(reads: Reads, source: Source, steps: tuple[tuple[str, Any], ...], object_by_path: dict[Any, Any]) -> Any:
    """The object at the end of `steps` from the source's root.

    Each step on the way is guarded, since a replaced object leads elsewhere. `object_by_path`: the objects at the ends
    of paths that were followed earlier.
    """
    if not steps:
        return source.root
    way = (id(source.root), steps)
    if way in object_by_path:
        return object_by_path[way]
    value, (kind, key) = _note_way(reads, source, steps[:-1], object_by_path), steps[-1]
    name = str(source.slot)
    if kind == "attr" and key in getattr(value, "__dict__", ()):
        place, step = reads.place(vars(value), "dict", name, "attr"), vars(value)[key]
        if key in TABLES:
            place.items.setdefault(key, Expected(step))
        else:
            reads.add(place, key, step)
    elif kind == "attr":
        step = getattr(value, key)
        reads.add(reads.place(value, "object", name, "attr"), key, step)
    else:
        step = value[key]
        if isinstance(value, (dict, list)):
            holder = reads.place(value, "dict" if isinstance(value, dict) else "list", name, "item")
            reads.add(holder, key, step)
    object_by_path[way] = step
    return step
