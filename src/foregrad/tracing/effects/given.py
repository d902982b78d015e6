"""What a run is given: its arguments, made anew with stand-ins in them, so that the user's own stay as they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ...errors import UnsupportedSideEffectError
from ...frontend.call import FlatCall
from ...frontend.holders import DICT, SET
from ...frontend.lifted import lifted_places, times_lifted
from ...frontend.opaque import is_array, overlaps
from ...frontend.program_state import ProgramState
from ...frontend.reads import table_of
from ...frontend.tree import is_as_opened, open_container
from ...graph.python_effects import OfArgument, PythonWrite
from ...identity import ById, IdSet
from .side_effects import refuse_change


class Given:
    """`args` and `kwargs` with `leaves` in them. `of_argument`: the containers among these and the tables of
    their attributes, as each call knows its own; `named`: the same containers with what people call them.
    `arguments(leaves, made)` makes them.
    """

    def __init__(self, call: FlatCall, leaves: list[Any], arguments: Callable[..., Any]) -> None:
        self.call = call
        self.leaves = leaves
        made: dict[int, Any] = {}
        self.args, self.kwargs = arguments(leaves, made)
        paths = [path for _, path in call.containers]
        arrays = {node.number for _, node in call.tree.walk("") if node.kind == "array"}  # which nothing is written to
        self.named = [(value, paths[number]) for number, value in made.items() if number not in arrays]
        self.of_argument: ById[Any, OfArgument] = ById()
        for number, value in made.items():
            self.of_argument[value] = OfArgument(number, type(value))
            if type(table := table_of(value)) is dict:
                self.of_argument[table] = OfArgument(number, type(value), attributes=True)
        states = call.tree.children[0].children[: times_lifted(call.function)]
        numbers = {node.number for tree in states for _, node in tree.walk("")}
        self._of_state = IdSet(call.containers[number][0] for number in numbers if number >= 0)
        # Writes to registered pytrees and dataclasses are refused, not replayed.
        closed = [node.number for _, node in call.tree.walk("") if node.kind in ("registered", "dataclass")]
        self._closed = [(made[n], open_container(made[n]), paths[n]) for n in closed if n in made]

    def check_closed(self, name: str) -> None:
        """Containers that are no lists, dicts or plain objects are as they were."""
        for value, opened, path in self._closed:
            if not is_as_opened(value, opened):
                refuse_change(name, path)

    def reached(self, name: str, state: ProgramState, writes: Iterable[PythonWrite]) -> dict[type, frozenset[int]]:
        """By class, the ids of objects and arrays that the function reaches by itself: none may be an argument. So with
        lists and dicts where the call writes to its arguments.
        """
        classes = {node.type for _, node in self.call.tree.walk("") if node.kind in ("object", "array")}
        if any(type(write.target) is OfArgument for write in writes):
            classes.update(type(container) for container, _ in self.call.containers)
        found: dict[type, IdSet[Any]] = {}
        for value in _objects_in(state) if classes else ():
            if type(value) in classes and value not in self.of_argument:
                found.setdefault(type(value), IdSet()).add(value)
        for container, path in self.call.containers:
            others = found.get(type(container), IdSet[Any]())
            if self.is_lifted(container, state):
                others.discard(container)
            if container in others or overlaps(container, others):
                raise UnsupportedSideEffectError(
                    f"`{name}` is given {path}, a {type(container).__name__} that it also reaches by itself: pass it, "
                    "or use it, not both."
                )
        return {cls: frozenset(map(id, values)) for cls, values in found.items()}

    def is_own(self, container: Any, state: ProgramState) -> bool:
        """Whether the items of a container are others in each call: only the guards of arguments ask for them."""
        return is_array(container) or self.is_lifted(container, state)

    def is_lifted(self, container: Any, state: ProgramState, inside: IdSet[Any] | None = None) -> bool:
        """Whether the function reaches a container or array only at places that are arguments, see `Lifted`, and what
        is there. `inside`: containers on the way.
        """
        inside = inside or IdSet()
        if container not in self._of_state or container in inside:
            return False
        lifted = {place.identity for place in lifted_places(self.call.function)}
        places = state.references_to(container)
        return bool(places) and all(
            not lifted.isdisjoint({(id(holder.target), key), (id(holder.place), key)})
            or self.is_lifted(holder.target, state, inside | [container])
            for holder, key in places
        )


def _objects_in(state: ProgramState) -> Iterator[Any]:
    """The objects that were met, and those by which something may be looked up."""
    for value in state.met():
        yield value
        if isinstance(value, _WEAK):
            yield from list(value)
    for holder in state.holders:
        for key in holder.before if holder.kind in (DICT, SET) else ():
            if type(key) is tuple:
                yield from key
            elif type(key) is not str:
                yield key


_WEAK = (weakref.WeakKeyDictionary, weakref.WeakSet)
