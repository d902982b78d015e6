"""`Watch`: whether values that a function read besides its arguments are unchanged, in two calls into C++.

Places that are seldom written to (the tables of modules, the globals of a library) are checked by CPython's version of
each dict. A place that was written to is compared again, item by item; if no item that matters has changed, it is
checked by its items from the second time on. So a place of any size costs some ten nanoseconds, and a change is never
missed: every doubt ends in the slow comparison. A dict whose version does not tell of every write (see `versions_tell`)
is checked by its items from the start.

The parameters and buffers of modules are kept as a tuple, read again after a write to one of their tables; their
metadata, which can change without any table being written to, is checked on every call.

A watch holds none of the user's objects but tables and tensors, and lets go when an object that is guarded by identity
is gone: no call can pass its guard again.
"""

from __future__ import annotations

import collections
import functools
import operator
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from types import CellType
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from .._torch.guards import TensorGuards
from .._torch.native import make_tensor_check, make_version_check
from ..dispatch.explain import Difference
from ..frontend.source import ABSENT, table_of
from ..frontend.values import describe, same_value
from ._torch.check_tree import GLOBAL_HOOKS, CheckTree, dict_version, versions_tell
from .expected import Expected
from .opaque import is_cached_function
from .reads import Reads, ReadSite, items_in, tensors_in_key

Check = Callable[[tuple[Any, ...]], bool]
_FEW = 6  # cells
_MOST_ABSENT = 32  # names that are asked for one by one: a class lacks a hundred special methods
_MOST_KEYS = 1024  # of a place whose items are checked one by one in C++
_PATIENCE = 2  # writes without a difference until a place is checked by its items
_alive: weakref.WeakSet[Watch] = weakref.WeakSet()


def _never(objects: tuple[Any, ...]) -> bool:
    return False


class Watch:
    """A watch over the places of `reads`, the hooks of `modules`, and `tensors`: (table, key, name) of parameters and
    buffers.

    `now` is (check, its argument, the tensors). If the check fails, `refresh()` tells whether the change matters.
    """

    def __init__(
        self,
        reads: Reads,
        modules: Sequence[torch.nn.Module],
        tensors: Sequence[tuple[dict[str, Any], str, str]],
        roots: Sequence[Any] = (),
        *,
        native: bool = False,
    ) -> None:
        _alive.add(self)
        self.native = native
        self.now: tuple[Check, tuple[Any, ...], tuple[torch.Tensor, ...]]
        self._is_same_but: Check | None = None  # whether all but the tensors in volatile tables is unchanged
        self.dead, self._gone = False, ""  # whether an object that matters is gone, and its name
        self.tables = list(tensors)
        self.hook_tables: list[dict[int, Any]] = []
        self.places = list(reads.places.values())
        # A table without guarded items may be replaced.
        self.shapes = [
            (reference, cls, table if id(table) in reads.places else None)
            for reference, cls, table in reads.shapes.values()
        ]
        self.modules = list(reads.modules.values())
        tensors_found, self.held = tensors_in(self.places), held_in(self.places)
        self.compared = tensors_found if reads.compares_identity else _at_several(tensors_found, self.held)
        # The first index of each tensor in the list, by its id.
        self.first_index: dict[int, int] = {}
        self.one_another = self._one_another()
        own = {id(place.holder) for place in self.places}
        self._add_hooks(modules, own)
        self.hooks_seen = RemovableHandle.next_id
        self._refs: list[Any] = []
        self._notice_ends(roots)
        first = self.tensors()
        self.check_tensors = self._check_of(first)
        self._rebuild(first)
        if self.difference() is not None:  # the function changed it
            self.forget()

    def _add_hooks(self, modules: Sequence[torch.nn.Module], own: set[int]) -> None:
        """Empty tables of hooks must stay empty; in other tables, every hook matters."""
        tables = [(table, "global hooks of modules") for table in GLOBAL_HOOKS]
        for module in modules:
            name = type(module).__name__
            tables += [(table, f"hooks of {name}") for table in _hooks_of(module)]
        for table, name in tables:
            if not table:
                self.hook_tables.append(table)
            elif id(table) not in own:
                place = ReadSite(table, "dict", name, "item")
                place.keys = tuple(table)
                place.items = {key: Expected(value) for key, value in table.items()}
                self.places.append(place)

    # ---------------------------------------------------------------- the end of what is watched

    def _notice_ends(self, roots: Sequence[Any]) -> None:
        me = weakref.ref(self)

        def gone(name: str, _: Any) -> None:
            watch = me()
            if watch is not None and not watch.dead:
                watch.kill()
                watch._gone = name

        seen = set()
        for place in self.places:
            for key, expected in place.items.items():
                if expected.kind == "same" and isinstance(expected.value, weakref.ref):
                    value = expected.value()
                    if value is not None and id(value) not in seen:
                        seen.add(id(value))
                        self._refs.append(weakref.ref(value, functools.partial(gone, place.path(key))))
        self._refs += [weakref.ref(root, functools.partial(gone, "")) for root in roots]

    def kill(self) -> None:
        """Let go of everything: an object that the graph was made for is gone."""
        self.dead = True
        self.now = (_never, (), ())
        self.tables, self.places, self.hook_tables, self.shapes, self.compared = [], [], [], [], []
        self.modules, self._is_same_but = [], None

    # ---------------------------------------------------------------- checking

    def hooks_unchanged(self) -> bool:
        """Whether the watched hooks are unchanged; asked after any hook was registered anywhere."""
        counter = RemovableHandle.next_id
        if any(self.hook_tables):
            return False
        self.hooks_seen = counter
        return True

    def refresh(self) -> bool:
        """Compare every place; if no difference matters, take the present state as the expected one."""
        check, objects, _ = self.now
        is_same = self._is_same_but is not None and check is not _never and self._is_same_but(objects)
        if self.dead or (not self.are_one_another() if is_same else self.difference() is not None):
            return False
        tensors = self.tensors()
        if len(set(map(id, tensors))) != len(tensors):
            return False
        if is_same:
            self.now = check, objects, tensors
            return True
        for place, mark in zip(self.places, self._marks, strict=True):
            place.volatile += _mark(place) != mark
        self._rebuild(tensors)
        return True

    def forget(self) -> None:
        """Drop the tensors; the next call reads them again."""
        if not self.dead:
            self.now = (_never, self.now[1], ())

    def forget_trees(self) -> None:
        """In a forked child: a tree locks a mutex while it checks, perhaps held by a thread of the parent for ever."""
        if not self.dead:
            self.forget()

    def difference(self) -> Difference | None:
        """The first difference from the capture, or None."""
        if self.dead:
            return _of_state(self._gone or "an object the function reached", "alive", "gone")
        for place in self.places:
            difference = place.difference()
            if difference is not None:
                return _of_state(*difference)
        for reference, cls, table in (*self.shapes, *self.modules):
            value = reference()
            if value is None:
                continue  # no watched place leads there any more, else its change would be noticed
            if type(value) is not cls:
                return _of_state(f"the class of a {cls.__name__}", cls.__name__, type(value).__name__)
            if table is not None and table_of(value) is not table:
                return _of_state(f"the `__dict__` of a {cls.__name__}", "one", "another")
        if not self.are_one_another():
            return _of_state("which of the tensors it found are one", "as captured", "otherwise")
        for table in self.hook_tables:
            if table:
                return _of_state("hooks of a module", "none", describe(list(table.values())))
        return None

    def drop_changed(self) -> list[str]:
        """Stop watching places that differ now; their descriptions, for people."""
        dropped = []
        for place in [] if self.dead else self.places:
            while (difference := place.difference()) is not None:
                dropped.append(f"{difference[0]} (from {difference[1]} to {difference[2]})")
                place.drop_changed()
        self._rebuild(self.tensors())
        return dropped

    def are_one_another(self) -> bool:
        """Whether tensors that may be compared by identity are one tensor where they were at the capture."""
        return self._one_another() == self.one_another

    def _one_another(self) -> list[int]:
        """For each tensor that may be compared by identity, its first position in the list, behind the `held`."""
        found = {tensor: number for number, tensor in enumerate(self.held)}
        positions = [
            found.setdefault(id(place.look(key)), number)
            for number, (place, key) in enumerate(self.compared, len(self.held))
        ]
        self.first_index.update(found)  # a second thread may be reading the index now
        for gone in self.first_index.keys() - found.keys():
            self.first_index.pop(gone, None)
        return positions

    def tensors(self) -> tuple[Any, ...]:
        return tuple(table.get(key) for table, key, _ in self.tables)

    def _rebuild(self, tensors: tuple[Any, ...]) -> None:
        """Make the check anew, for the present values."""
        if self.dead:
            return
        self._marks = [*map(_mark, self.places)]
        check, objects = self._check()
        kept = {id(table) for table, _, _ in self.tables}
        # Calls that replace buffers have the tensors read again, and no more.
        self._is_same_but = check if any(id(p.holder) in kept and _is_volatile(p) for p in self.places) else None
        if self._is_same_but is not None:
            check = functools.partial(_has_same_tensors, weakref.ref(self), check)
        self.now = check, objects, tensors

    def _check(self) -> tuple[Check, tuple[Any, ...]]:
        """The check of all places and shapes, and its argument."""
        checks, rest, modules, shapes = [], self.places, self.modules, self.shapes
        unwritten = [place for place in rest if _by_version(place)]
        counted = make_version_check([place.holder for place in unwritten], modules) if self.native else None
        if counted is not None:
            rest, modules = [place for place in rest if not _by_version(place)], []
            weak: list[Any] = [shape for shape in shapes if shape[2] is not None and isinstance(shape[0], weakref.ref)]
            if weak and (of_shapes := make_version_check((), weak))(()):  # it finds the `__dict__` of each
                checks.append(of_shapes)
                shapes = [shape for shape in shapes if shape[2] is None or not isinstance(shape[0], weakref.ref)]
            if unwritten or self.modules:
                checks.append(counted)
        cells = [place for place in rest if _is_full_cell(place) and place.volatile < _PATIENCE]
        if len(cells) > _FEW:
            rest = [place for place in rest if not _is_full_cell(place) or place.volatile >= _PATIENCE]
            checks.append(_cell_check(cells))
        alive = [shape for shape in modules if shape[0]() is not None]
        if shapes:
            checks.append(_shape_check(shapes))
        if rest or alive:
            checks.append(_item_check(rest, alive))
        if any(place.volatile >= _PATIENCE for place, _ in self.compared):
            checks.append(functools.partial(_are_one_another, weakref.ref(self)))
        return _all_of(checks), (*(place.holder for place in rest), *(reference for reference, _, _ in alive))

    def _check_of(self, tensors: tuple[Any, ...]) -> Check:
        """A check that a tuple of tensors has the metadata of `tensors`."""
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return _never
        shapes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
        check = make_tensor_check(tensors, shapes, strides, distinct=False) if self.native else None
        if check is not None:
            of_all: Check = check.all
            return of_all
        guards = TensorGuards(*tensors, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
        return lambda values: guards.check(*values)


def _in_child() -> None:
    for watch in list(_alive):
        watch.forget_trees()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _of_state(name: str, before: str, now: str) -> Difference:
    return Difference(name, before, now, of_state=True)


def tensors_in(places: list[ReadSite]) -> list[tuple[ReadSite, Any]]:
    """The places and keys where the function found tensors."""
    return [
        (place, key)
        for place in places
        if place.kind in ("dict", "list", "object")
        for key, expected in place.items.items()
        if expected.kind == "tensor"
    ]


def held_in(places: list[ReadSite]) -> list[int]:
    """The ids of the tensors in keys, sets and tuples, and behind weak references: these hold the very objects."""
    held: list[Any] = []
    for place in places:
        held += (*(place.copy or ()), *(place.keys or ()))
        for expected in place.items.values():
            if expected.kind == "same" and isinstance(value := expected.value(), (tuple, frozenset, weakref.ref)):
                held.append(value)
            held += expected.value.values() if expected.kind == "members" else ()
    found = (id(tensor) for value in held if type(value) is not str for tensor in tensors_in_key(value))
    return list(dict.fromkeys(found))


def _mark(place: ReadSite) -> int:
    """A number that a write to the place changes, where there is one."""
    if place.kind == "dict":
        return dict_version(place.holder)
    if type(place.holder) is list:
        return hash(tuple(map(id, place.holder)))
    if place.kind == "object":
        return hash(tuple(id(place.look(key)) for key, item in place.items.items() if item.kind == "tensor"))
    return id(place.look("cell_contents")) if _is_full_cell(place) else 0


def _all_of(checks: list[Check]) -> Check:
    if len(checks) > 2:
        return lambda objects: all(check(objects) for check in checks)
    if len(checks) == 2:
        first, second = checks
        return lambda objects: first(objects) and second(objects)
    return checks[0] if checks else lambda objects: True


def _cell_check(places: list[ReadSite]) -> Check:
    """A check by the addresses of objects in closure cells: a generated function has thousands; a tree is slow."""
    cells, read, contents = [place.holder for place in places], operator.attrgetter("cell_contents"), []
    for place in places:
        contents.append(place.look("cell_contents"))
        place.items["cell_contents"].pin(contents[-1])
    addresses = [*map(id, contents)]

    def check(_: Any) -> bool:
        try:
            return [*map(id, map(read, cells))] == addresses
        except ValueError:  # one is empty
            return False

    return check


def _shape_check(shapes: list[tuple[Any, type, Any]]) -> Check:
    """A check that objects have kept their class and, if it is watched, their `__dict__`."""

    def check(_: Any) -> bool:
        for reference, cls, table in shapes:
            value = reference()
            if value is not None and (type(value) is not cls or (table is not None and value.__dict__ is not table)):
                return False
        return True

    return check


def _at_several(sites: list[tuple[ReadSite, Any]], held: list[int]) -> list[tuple[ReadSite, Any]]:
    """The places that share a tensor with further places: one input of the graph stands for all."""
    tensors = [place.look(key) for place, key in sites]
    counts = collections.Counter([*map(id, tensors), *held])
    return [place for place, tensor in zip(sites, tensors, strict=True) if counts[id(tensor)] > 1]


def _has_same_tensors(reference: weakref.ref[Watch], check: Check, objects: tuple[Any, ...]) -> bool:
    watch = reference()
    return watch is not None and check(objects) and all(map(operator.is_, watch.tensors(), watch.now[2]))


def _are_one_another(reference: weakref.ref[Watch], _: Any) -> bool:
    watch = reference()
    return watch is not None and watch.are_one_another()


def _item_check(places: list[ReadSite], modules: list[tuple[Any, type, Any]]) -> Check:
    """A check by one call into C++; places that it can't check are compared in Python."""
    tree = CheckTree((*(place.holder for place in places), *(reference for reference, _, _ in modules)))
    for index, (reference, cls, table) in enumerate(modules, len(places)):
        tree.shape(index, reference(), cls, table)
    slow = [place for index, place in enumerate(places) if not _render_place(tree, index, place)]
    ordered = [(p.holder, list(p.keys)) for p in places if p.keys is not None and _by_items_in_order(p)]
    lacking = [(p.holder.keys(), frozenset(p.absent)) for p in places if _lacks_many(p) and not _by_version(p)]
    fast: Check = tree.check
    if ordered:
        fast = _and_in_order(fast, ordered)
    if lacking:
        fast = _and_lacking(fast, lacking)
    if not slow:
        return fast
    # A quicker test can show for some of these that nothing differs.
    quick = [_quick_look(place) for place in slow]
    looks = [(place, look) for place, look in zip(slow, quick, strict=True) if look is not None]
    others = [place for place, look in zip(slow, quick, strict=True) if look is None]

    def check(objects: tuple[Any, ...]) -> bool:
        if not fast(objects):
            return False
        for place, same in looks:
            if not same() and place.difference() is not None:
                return False
        return all(place.difference() is None for place in others)

    return check


def _and_in_order(check: Check, ordered: list[tuple[dict[Any, Any], list[Any]]]) -> Check:
    if all(type(key) is str for _, keys in ordered for key in keys):  # only a str equals a str
        return lambda objects: check(objects) and all(list(table) == keys for table, keys in ordered)
    expected = [(table, tuple(keys)) for table, keys in ordered]
    return lambda objects: check(objects) and all(same_value(tuple(table), keys) for table, keys in expected)


def _and_lacking(check: Check, lacking: list[tuple[Any, frozenset[Any]]]) -> Check:
    return lambda objects: check(objects) and all(keys.isdisjoint(absent) for keys, absent in lacking)


def _lacks_many(place: ReadSite) -> bool:
    return place.kind == "dict" and place.keys is None and len(place.absent) > _MOST_ABSENT


def _quick_look(place: ReadSite) -> Callable[[], bool] | None:
    """A quick test that a place is unchanged; False if it may have changed. None if no test beats the comparison."""
    holder = place.holder
    if _is_long(place):
        return _look_at_all(holder, [i for i, (key, _) in enumerate(items_in(holder)) if key not in place.items])
    if place.kind == "set" and type(holder) is set and all(e.kind == "equal" for e in place.items.values()):
        items = tuple(holder)  # unchanged as long as nothing is written
        if all(type(item) is str for item in items):  # equal strings are interchangeable
            return lambda: tuple(holder) == items
        return lambda: len(holder) == len(items) and all(map(operator.is_, holder, items))
    if isinstance(holder, threading.local) and place.kind == "object" and not place.absent:
        return _look_at_own(holder, place.items)  # `getattr` takes a microsecond for each name
    if place.kind == "asked" and is_cached_function(holder):
        return functools.partial(place.ask, holder)
    if place.kind == "dict" and place.keys is not None and isinstance(holder, collections.OrderedDict):
        version, keys = dict_version(holder), place.keys  # a version tells of every write but one of order
        return lambda: dict_version(holder) == version and tuple(_KEYS(holder)) == keys
    return None


_KEYS = collections.OrderedDict.keys


def _look_at_all(holder: Any, free: list[int]) -> Callable[[], bool]:
    """A test that a long dict or list has its present objects in order; any are fine at the positions `free`."""
    items = dict.values if type(holder) is dict else iter
    keys, values = [*holder] if type(holder) is dict else [], [*items(holder)]

    def same() -> bool:
        now = [*items(holder)]
        if len(now) != len(values):
            return False
        for position in free:
            now[position] = values[position]
        return all(map(operator.is_, now, values)) and all(map(operator.is_, keys, holder))

    return same


def _look_at_own(holder: threading.local, items: dict[Any, Expected]) -> Callable[[], bool]:
    """A test that a thread's own attributes in `holder` are unchanged: no table has an absent name."""
    absent = frozenset(name for name, expected in items.items() if expected.kind == "absent")
    others = [(name, expected) for name, expected in items.items() if expected.kind != "absent"]
    tables = [vars(cls) for cls in type(holder).__mro__ if cls not in threading.local.__mro__]
    none_of = absent | {"__getattr__", "__getattribute__"}  # these would be asked

    def same() -> bool:
        if not absent.isdisjoint(vars(holder)) or not all(map(none_of.isdisjoint, tables)):
            return False
        return all(expected.holds(getattr(holder, name, ABSENT)) for name, expected in others)

    return same


def _by_version(place: ReadSite) -> bool:
    if place.kind != "dict" or (place.keys is not None and isinstance(place.holder, collections.OrderedDict)):
        return False  # `move_to_end` is no write
    return not _is_volatile(place) and versions_tell(place.holder)


def _is_long(place: ReadSite) -> bool:
    """Whether the items of a place are many, and are compared by identity first."""
    return type(place.holder) in (dict, list) and place.copy is None and len(place.keys or ()) > _MOST_KEYS


def _is_volatile(place: ReadSite) -> bool:
    return place.volatile >= _PATIENCE


def _is_full_cell(place: ReadSite) -> bool:
    """Whether a place is a closure cell with contents that matter."""
    if type(place.holder) is not CellType or place.absent or place.keys is not None or place.copy is not None:
        return False
    return [*place.items] == ["cell_contents"] and place.items["cell_contents"].kind in ("same", "equal")


def _by_items_in_order(place: ReadSite) -> bool:
    """Whether the tree checks the items of a dict: it leaves out their order."""
    is_dict = place.kind == "dict" and type(place.holder) is dict and place.copy is None
    return is_dict and not _by_version(place) and not _is_long(place)


def _render_place(tree: CheckTree, index: int, place: ReadSite) -> bool:
    """Add the check of one place; False when it can only be done in Python."""
    holder = place.holder
    if _by_version(place):
        tree.unchanged(tree.of(index), holder)
        return True
    has_holes = place.kind == "object" and any(one.kind in ("absent", "bound") for one in place.items.values())
    if has_holes or place.copy is not None or place.kind in ("set", "asked") or _is_long(place):
        return False
    if isinstance(holder, (collections.OrderedDict, collections.deque)):
        return False
    if any(True for key in place.items for _ in tensors_in_key(key)):  # a tree in C++ compares keys, from 3.12 on
        return False
    node = tree.of(index)
    if place.keys is not None:
        tree.counts(node, holder)
    for key in () if place.keys is not None or _lacks_many(place) else place.absent:
        tree.lacks(node, key)
    for key, expected in place.items.items():
        now = place.look(key)
        if now is ABSENT:
            tree.lacks(node, key)
            continue
        if place.kind == "dict":
            item = tree.key(node, holder, key)
        elif place.kind == "list":
            item = tree.item(node, holder, key)
        else:
            item = tree.attribute(node, holder, key)
        if expected.kind == "tensor":
            tree.type_is(item, expected.value)
            if not _is_volatile(place):  # else each call may replace the tensor, as an average does
                tree.is_(item, now)  # a different object fails here and is compared in Python
        elif expected.kind == "type":
            tree.type_is(item, expected.value)
        elif expected.kind == "equal" and _is_simple(now):
            tree.equals(item, now)
        else:
            tree.is_(item, now)
            expected.pin(now)
    return True


def _is_simple(value: Any) -> bool:
    """Whether equal values of the type are interchangeable."""
    if type(value) is float:
        return value not in (0.0, value + 1.0)  # neither zero (it has two signs) nor NaN nor infinite
    return value is None or type(value) in (int, bool, str, bytes, torch.dtype, torch.device)


def _hooks_of(module: torch.nn.Module) -> list[dict[int, Any]]:
    return [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
