"""The holders of a program's state: how each kind is copied, compared and put back, and its items.

A kind that only holds (a tuple, a partial application) is a way to its items, and is never written to.
"""

from __future__ import annotations

import array
import collections
import ctypes
import dataclasses
import functools
import io
import operator
import random
import types
from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any, NoReturn

import torch

from .._torch.symbols import concrete, is_symbolic
from .._torch.tensors import without_marks
from ..frontend.source import ABSENT
from ..frontend.values import is_plain
from ..graph.source import key_text
from ..house import is_house_module
from ._torch.asked import own_names
from .effects import put_back_deque
from .libraries import is_of_library
from .objects import dict_of_class
from .opaque import results_of

Way = tuple[Any, tuple[tuple[str, Any], ...]]


class Holder:
    """One mutable thing: `kind` says how it is read, compared and put back; `before` is its former contents."""

    __slots__ = ("_name", "_way", "before", "is_table", "kind", "owner", "parent", "step", "style", "target")

    def __init__(
        self,
        kind: HolderKind,
        target: Any,
        parent: Holder | None,
        step: Any,
        style: str,
        before: Any,
        owner: Any = None,
    ) -> None:
        self.kind = kind
        self.target = target
        self.parent = parent
        self.step = step
        self.style = style  # how people write an item: "attr", "item", "name" or "" for the holder itself
        self.before = before
        self.owner = owner  # the object that has these attributes
        self.is_table = False  # where a module keeps its parameters, buffers or parts
        self._way: Way | None = None
        self._name: str | None = None

    @property
    def place(self) -> Any:
        """The object by which `Reads` knows the holder: for a class, its dict."""
        return dict_of_class(self.target) if self.kind is CLASS else self.target

    def way(self) -> Way:
        """An object that stays, and the steps from the object to the holder; see `Source`."""
        if self._way is None:
            here, parent = self.target if self.owner is None else self.owner, self.parent
            if parent is None or not parent.leads_to(here, self.step):
                self._way = here, ()
            else:
                root, steps = parent.way()
                self._way = root, (*steps, *parent.steps_to(self.step))
        return self._way

    def is_named(self, names: Container[str]) -> bool:
        """Whether the attribute by which the holder was reached has one of these names; true if none leads there."""
        holder = self
        while (parent := holder.parent) is not None and parent.style != "attr":
            holder = parent
        return parent is None or holder.step in names

    def leads_to(self, value: Any, key: Any) -> bool:
        """Whether a value was directly under this key, and not in something on the way."""
        if self.kind is CELL:
            return self.before is value
        before = self.before
        if isinstance(before, dict):
            return before.get(key, ABSENT) is value
        return isinstance(before, list) and type(key) is int and key < len(before) and before[key] is value

    def steps_to(self, key: Any) -> tuple[tuple[str, Any], ...]:
        """The steps from the holder to an item."""
        if self.kind is CELL:
            return (("attr", "cell_contents"),)
        if self.owner is None:
            makes = hasattr(type(self.target), "__missing__")
            return (("attr" if self.kind in (SLOTS, CLASS) else "there" if makes else "item", key),)
        return (("attr", key),) if type(key) is str else (("attr", "__dict__"), ("item", key))

    def items(self) -> Iterable[tuple[Any, Any]]:
        """The items before the run, with the keys that `put` takes."""
        return self.kind.items(self.before)

    def now(self, key: Any) -> Any:
        """The item under a key now."""
        return dict(self.kind.items(self.kind.read(self.target))).get(key, ABSENT)

    def put(self, key: Any, value: Any) -> None:
        """Replace a value, without running the user's code."""
        self.kind.put(self.target, key, value)

    def is_written(self) -> bool:
        """Whether the holder differs from its copy."""
        return not self.kind.same(self.target, self.before)

    def put_back(self, *after: Any) -> None:
        """Put the copy back. Given a copy from `after` the run, the holder keeps later changes."""
        self.kind.put_back(self.target, self.before, *after or (self.kind.read(self.target),))

    @property
    def is_by_name(self) -> bool:
        """Whether the holder's items are globals or attributes: code sets these by name."""
        return self.kind in (NAMESPACE, SLOTS, CLASS) or (self.kind is DICT and self.owner is not None)

    def name(self) -> str:
        """The holder's name for people."""
        if self._name is None:
            if self.parent is None:
                self._name = "" if self.step is None else str(self.step)
            else:
                self._name = self.parent.name() if self.is_table else _spelled(self.parent, self.step)
        return self._name

    def path(self, key: Any) -> str:
        """An item's name for people."""
        return _spelled(self, key)


def _spelled(holder: Holder, key: Any) -> str:
    own, style = holder.name(), "attr" if holder.is_table else holder.style
    if style == "name" or not own:
        return f"[{key_text(key)}]" if style == "item" else str(key)
    if style in ("", "key"):
        return own
    return f"{own}.{key}" if style == "attr" and type(key) is str else f"{own}[{key_text(key)}]"


def _nothing(_: Any) -> tuple[()]:
    return ()


def _refuse(*_: Any) -> NoReturn:
    raise TypeError("the content of this object can't be replaced")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class HolderKind:
    """How a kind of holder is read into a copy, compared with a copy, and put back; the items in a copy; how one is
    set. `put_back(target, before, after)` undoes the difference of the copies, except where a thread has written since.
    """

    read: Callable[[Any], Any]
    same: Callable[[Any, Any], bool]
    put_back: Callable[[Any, Any, Any], None]
    items: Callable[[Any], Iterable[tuple[Any, Any]]] = _nothing
    put: Callable[[Any, Any, Any], None] = _refuse


def without(before: Any, after: Any, now: Any) -> Any:
    """The value `now` without a run's part. A second thread's part of a count stays."""
    if now is after:
        return before
    is_like = is_symbolic(now) is is_symbolic(after)  # a plain number did not count on from the symbol that stood there
    now, after = concrete(now), concrete(after)
    return now - (after - before) if is_like and type(now) is type(after) is type(before) is int else now


def adopted(copy: dict[Any, Any], now: dict[Any, Any], names: Container[Any]) -> dict[Any, Any]:
    """A copy with the present globals and attributes, but for `names`."""
    found = {n: copy[n] if n in names else value for n, value in now.items() if n in copy or n not in names}
    return found | {n: value for n, value in copy.items() if n in names and n not in now}


def _undone(before: dict[Any, Any], after: dict[Any, Any], now: dict[Any, Any]) -> Iterator[tuple[Any, Any]]:
    for key in after | before:
        was, left, value = before.get(key, ABSENT), after.get(key, ABSENT), now.get(key, ABSENT)
        if was is not left and (wanted := without(was, left, value)) is not value:
            yield key, wanted


# -------------------------------------------------------------------- dicts


def _read_dict(table: Any) -> dict[Any, Any]:
    if type(table) is dict:
        return table.copy()  # in one piece, even while a second thread writes
    if type(table) is collections.OrderedDict:
        return dict(table)
    return {key: dict.__getitem__(table, key) for key in _base_of_dict(table).keys(table)}


def _same_dict(table: Any, before: dict[Any, Any]) -> bool:
    if len(table) != len(before):
        return False
    if type(table) is not dict:
        table = _read_dict(table)
    try:
        return all(map(operator.is_, table.values(), before.values())) and all(map(operator.is_, table, before))
    except RuntimeError:  # a second thread writes to it
        return _same_dict(table.copy(), before)


def _base_of_dict(table: Any) -> Any:
    return collections.OrderedDict if isinstance(table, collections.OrderedDict) else dict


def _put_item(table: Any, key: Any, value: Any) -> None:
    _base_of_dict(table).__setitem__(table, key, value)


def _put_back_dict(table: Any, before: dict[Any, Any], after: dict[Any, Any]) -> None:
    base = _base_of_dict(table)
    for key, value in _undone(before, after, _read_dict(table)):
        base.pop(table, key, None) if value is ABSENT else base.__setitem__(table, key, value)
    if [key for key in base.keys(table) if key in before] != list(before):  # one was taken out: the order is made anew
        for key in [key for key in before if key in base.keys(table)]:
            base.__setitem__(table, key, base.pop(table, key))


def is_import(value: Any) -> bool:
    """Whether a namespace's new name is left alone: an import, a definition, or a capture's own binding."""
    return isinstance(value, (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type))


def own_globals(namespace: dict[str, Any]) -> dict[str, Any]:
    """The globals of a module without the functions that a capture puts there."""
    return {name: value for name, value in own_names(namespace).items() if not is_of_house(value)}


def is_of_house(value: Any) -> bool:
    """Whether a capture puts this function or property into classes and modules."""
    function = value.fget if isinstance(value, property) else value
    return isinstance(function, types.FunctionType) and is_house_module(function.__module__)


def _read_namespace(table: dict[str, Any]) -> dict[str, Any]:
    names = table.copy()
    names.pop("__warningregistry__", None)  # the interpreter's notes of warnings, C++'s too
    return names


def _same_namespace(table: dict[str, Any], before: dict[str, Any]) -> bool:
    if _same_dict(table, before):
        return True
    now = _read_namespace(table)
    if any(now.get(name, ABSENT) is not value for name, value in before.items()):
        return False
    return all(is_import(now[name]) for name in now.keys() - before.keys())


def _put_back_namespace(table: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, value in _undone(before, after, _read_namespace(table)):
        if value is not ABSENT:
            table[name] = value
        elif not is_import(after[name]):
            table.pop(name, None)


# -------------------------------------------------------------------- sequences and sets


def _same_items(now: Iterable[Any], before: list[Any]) -> bool:
    items = list(now)
    return len(items) == len(before) and all(map(operator.is_, items, before))


def _row(before: list[Any], after: list[Any], now: list[Any]) -> list[Any]:
    count, others = len(after), len(now) - len(after)
    if _same_items(now[:count], after):
        return before + now[count:]
    if others > 0 and _same_items(now[others:], after):
        return now[:others] + before
    own = {*map(id, after)} - {*map(id, before)}
    return [item for item in now if id(item) not in own]


def _same_set(items: Any, before: set[Any]) -> bool:
    if len(items) != len(before):
        return False
    # A copy mostly keeps the order.
    return all(map(operator.is_, set.__iter__(items), before)) or {*map(id, set.__iter__(items))} == {*map(id, before)}


def _put_back_set(items: Any, before: set[Any], after: set[Any]) -> None:
    if not _same_set(items, after):
        before = (set(items) - (after - before)) | (before - after)
    set.clear(items)
    set.update(items, before)


# -------------------------------------------------------------------- cells, slots, classes, buffers


def _read_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT


def _put_back_cell(cell: Any, before: Any, after: Any) -> None:
    value = without(before, after, _read_cell(cell))
    if value is ABSENT:
        del cell.cell_contents
    else:
        cell.cell_contents = value


def slots_of(cls: type) -> list[tuple[str, Any]]:
    return [
        (name, item)
        for base in cls.__mro__
        for name, item in [*vars(base).items()]  # a second thread may set attributes of a class meanwhile
        if type(item) is types.MemberDescriptorType and not is_of_library(base)
    ]


def _read_slots(value: Any) -> dict[str, Any]:
    found = {}
    for name, slot in slots_of(type(value)):
        try:
            found[name] = slot.__get__(value)
        except AttributeError:
            found[name] = ABSENT
    return found


def _put_back_slots(value: Any, before: dict[str, Any], after: dict[str, Any]) -> None:
    slots = dict(slots_of(type(value)))
    for name, item in _undone(before, after, _read_slots(value)):
        slots[name].__delete__(value) if item is ABSENT else slots[name].__set__(value, item)


_DICT_OF_CLASS = type.__dict__["__dict__"].__get__


def _read_class(cls: type) -> dict[str, Any]:
    table: Any = _DICT_OF_CLASS(cls)
    copied: dict[str, Any] = table.copy()  # several times as fast as `dict(table)`
    return copied


def _put_back_class(cls: type, before: dict[str, Any], after: dict[str, Any]) -> None:
    for name, value in _undone(before, after, _read_class(cls)):
        type.__delattr__(cls, name) if value is ABSENT else type.__setattr__(cls, name, value)


def _read_outside(place: tuple[Any, str]) -> Any:
    owner, name = place
    return (owner if type(owner) is dict else vars(owner)).get(name, ABSENT)


def _put_back_outside(place: tuple[Any, str], before: Any, after: Any) -> None:
    owner, name = place
    before = without(before, after, _read_outside(place))
    if type(owner) is dict:
        owner.pop(name, None) if before is ABSENT else owner.update({name: before})
    else:
        delattr(owner, name) if before is ABSENT else setattr(owner, name, before)


def _put_back_buffer(buffer: Any, before: bytes, _: Any) -> None:
    if isinstance(buffer, array.array):
        buffer[:] = array.array(buffer.typecode, before)
    elif isinstance(buffer, (bytearray, memoryview)):
        has_gaps = isinstance(buffer, memoryview) and not buffer.c_contiguous
        now: Any = buffer if has_gaps or isinstance(buffer, bytearray) else buffer.cast("B")
        now[:] = memoryview(before).cast(now.format) if has_gaps else before
    else:
        ctypes.memmove(ctypes.addressof(buffer), before, len(before))


def _read_numbers(values: Any) -> Any:
    return values.copy()


def _same_numbers(values: Any, before: Any) -> bool:
    return bool(values.shape == before.shape and values.tobytes() == before.tobytes())


def _put_back_numbers(values: Any, before: Any, _: Any) -> None:
    if values.shape == before.shape:
        values[...] = before


# -------------------------------------------------------------------- random generators


def _same(a: Any, b: Any) -> bool:
    return bool(a == b)


def _numpy_state(generator: Any) -> Any:
    bits = getattr(generator, "bit_generator", None)
    return bits.state if bits is not None else generator.get_state(legacy=False)


def _same_numpy_state(generator: Any, before: Any) -> bool:
    return _same_state(_numpy_state(generator), before)


def _same_state(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_same_state(now[key], before[key]) for key in now)
    if isinstance(now, (tuple, list)):
        return len(now) == len(before) and all(map(_same_state, now, before))
    return _same_numbers(now, before) if hasattr(now, "tobytes") else _same(now, before)


def _put_back_numpy_state(generator: Any, before: Any, _: Any) -> None:
    bits = getattr(generator, "bit_generator", None)
    if bits is not None:
        bits.state = before
    else:
        generator.set_state(before)


# -------------------------------------------------------------------- what is no attribute


def _same_file(file: Any, before: Any) -> bool:
    return bool(FILE.read(file) == before)


def _put_back_file(file: Any, before: Any, _: Any) -> None:
    text, at = before
    if text is None or file.closed:
        return  # nobody needs the written value any more
    file.seek(0)
    file.truncate()
    file.write(text)
    file.seek(at)


def read_decimals(context: Any) -> tuple[Any, ...]:
    """The settings of a `decimal` context, without its flags: computations set flags."""
    *limits, _, traps = context.__reduce__()[1]
    return (*limits, tuple(traps))


def _put_back_decimals(context: Any, before: Any, _: Any) -> None:
    context.__init__(*before[:-1], context.__reduce__()[1][-2], list(before[-1]))


# -------------------------------------------------------------------- caches of functions


def _read_cache(cached: Any) -> tuple[int, frozenset[int]]:
    return cached.cache_info().misses, frozenset(map(id, results_of(cached)[0]))


def before_entering(code: types.CodeType, cached: Any, now: tuple[int, frozenset[int]]) -> tuple[int, frozenset[int]]:
    """A cache before the call that runs `code`, which begins: a miss counts before the function runs."""
    return now[0] - (getattr(cached.__wrapped__, "__code__", None) is code), now[1]


def _put_back_cache(cached: Any, before: tuple[int, frozenset[int]], _: Any = None) -> None:
    table, _ = results_of(cached)
    for key in [key for key in table if id(key) not in before[1]]:
        del table[key]


def left_in_cache(cached: Any, before: tuple[int, frozenset[int]]) -> tuple[int, frozenset[int]]:
    """A copy of a cache from before, with the plain results of plain arguments that were added since."""
    table, results = results_of(cached)
    return before[0], before[1].union(
        id(key) for key in table if is_plain(results.get(key, table)) and not _is_traced(key)
    )


def _is_traced(key: Any) -> bool:
    traced = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    return any(isinstance(item, traced) for item in (key if isinstance(key, (list, tuple)) else (key,)))


def keeps(kept: Any, value: Any) -> bool:
    """Whether a result is this very object, or a container that holds the object."""
    items = kept.values() if type(kept) is dict else kept if type(kept) in (tuple, list) else ()
    return kept is value or any(item is value for item in items)


def is_in(value: Any, target: Any) -> bool:
    """Whether an object is held by a holder that is never written to."""
    if isinstance(value, (tuple, frozenset)):
        return any(item is target for item in value)
    if isinstance(value, functools.partial):
        return value.keywords is target
    return isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)) and value.__self__ is target


# -------------------------------------------------------------------- the kinds


DICT = HolderKind(_read_dict, _same_dict, _put_back_dict, dict.items, _put_item)
ATTRIBUTES = HolderKind(
    without_marks, lambda table, before: _same_dict(without_marks(table), before), _put_back_dict, dict.items
)
# The globals of a module.
NAMESPACE = HolderKind(_read_namespace, _same_namespace, _put_back_namespace, dict.items, _put_item)
LIST = HolderKind(
    list.copy,
    lambda now, before: len(now) == len(before) and all(map(operator.is_, list.__iter__(now), before)),
    lambda items, before, after: list.__setitem__(items, slice(None), _row(before, after, list.copy(items))),
    enumerate,
    list.__setitem__,
)
DEQUE = HolderKind(
    lambda items: list(collections.deque.__iter__(items)),
    lambda items, before: _same_items(collections.deque.__iter__(items), before),
    lambda items, before, after: put_back_deque(items, _row(before, after, list(collections.deque.__iter__(items)))),
    enumerate,
    collections.deque.__setitem__,
)
SET = HolderKind(set, _same_set, _put_back_set)
CELL = HolderKind(
    _read_cell,
    lambda cell, before: _read_cell(cell) is before,
    _put_back_cell,
    lambda before: [("cell_contents", before)],
    setattr,
)
SLOTS = HolderKind(
    _read_slots,
    lambda value, before: _same_dict(_read_slots(value), before),
    _put_back_slots,
    dict.items,
    object.__setattr__,
)
CLASS = HolderKind(
    _read_class, lambda cls, before: _same_dict(_read_class(cls), before), _put_back_class, dict.items, type.__setattr__
)
BUFFER = HolderKind(
    lambda buffer: memoryview(buffer).tobytes(), lambda b, before: memoryview(b).tobytes() == before, _put_back_buffer
)
NUMBERS = HolderKind(_read_numbers, _same_numbers, _put_back_numbers)
FILE = HolderKind(lambda file: (None, 0) if file.closed else (file.getvalue(), file.tell()), _same_file, _put_back_file)
DECIMALS = HolderKind(read_decimals, lambda context, before: read_decimals(context) == before, _put_back_decimals)
RANDOM = HolderKind(
    random.Random.getstate, lambda r, before: r.getstate() == before, lambda r, before, _: r.setstate(before)
)
NUMPY_RANDOM = HolderKind(_numpy_state, _same_numpy_state, _put_back_numpy_state)
# One attribute of something that is a library's: (module, class or object, name); or a module: (sys.modules, name).
OUTSIDE = HolderKind(_read_outside, lambda place, before: _read_outside(place) is before, _put_back_outside)
PASSAGE = HolderKind(_nothing, _refuse, _refuse, dict.items)  # a tuple and the like: a way to its items
CACHE = HolderKind(_read_cache, lambda cached, before: cached.cache_info().misses == before[0], _put_back_cache)


_KINDS: tuple[tuple[Any, HolderKind], ...] = (
    (dict, DICT),
    (list, LIST),
    (set, SET),
    (collections.deque, DEQUE),
    ((bytearray, array.array), BUFFER),
    ((io.StringIO, io.BytesIO), FILE),
    (random.Random, RANDOM),
)


def kind_of(value: Any) -> HolderKind | None:
    """The kind of a holder that C knows how to write to; None where nothing can put it back."""
    return next((kind for cls, kind in _KINDS if isinstance(value, cls)), None)
