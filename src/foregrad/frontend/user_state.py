"""The Python state that a function can change: shallow copies from before a run, what differs since, the way back.

`UserState(roots)` walks from callables and values through closure cells, globals that code names, modules, classes,
objects and containers, and copies each mutable holder it meets: one level each, so the copy of a large heap is cheap
and every write is found by comparing identities. What code of libraries keeps for itself is not looked at, but for the
random generators of Python and NumPy. The walk runs no code of the user's.

Known weaknesses: what was printed, written to files, sent, or taken from a queue is not put back; nor what lies
behind names that are made up at run time; objects of libraries' classes are taken for constant (but see `keeps_state`).
"""

from __future__ import annotations

import array
import builtins
import collections
import functools
import gc
import io
import os
import random
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from .._torch.guards import GLOBAL_HOOKS
from .._torch.hooks import gradient_hooks
from .._torch.plain_types import own_names
from .._torch.stand_ins import is_stand_in
from ..graph.slots import Closure
from .classes import CODE_OF_CLASSES
from .clocks import DRAWN, asks_for_date, is_of_dates
from .code import imported_modules, imports_of
from .expected import ABSENT, stored
from .holders import (
    ATTRIBUTES,
    BUFFER,
    CACHE,
    CELL,
    CLASS,
    DECIMALS,
    DEQUE,
    DICT,
    FILE,
    LIST,
    NAMESPACE,
    NUMBERS,
    NUMPY_RANDOM,
    RANDOM,
    SET,
    SLOTS,
    Holder,
    Kind,
    slots_of,
)
from .libraries import BAGS, is_class_outside, is_constant, is_outside, referent
from .opaque import is_cached_function, is_random_generator, results_of, used_up
from .reads import Reads, keys_in, table_of
from .sources import Source

__all__ = ["UserState", "forget_written", "own_globals"]

_MOST_VISITS = 200_000
_LARGE = 10_000  # items, from which on those of a container are not looked into
_MOST_BYTES = 1 << 20  # of a buffer that is copied
_ATOMS = {int, float, str, bool, bytes, complex, type(None), type(...), range, slice, types.CodeType}
_ATOMS |= {torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format}
_ATOMS |= {type(NotImplemented), types.GetSetDescriptorType}
_BUFFERS = (bytearray, array.array)
_PLAIN_CONTAINERS = {dict, list, set, collections.OrderedDict, collections.deque, collections.defaultdict}
# As modules' tables of hooks are, a dozen each: of those with nothing in them there is nothing to copy.
_OFTEN_EMPTY: dict[Any, Kind] = {dict: DICT, collections.OrderedDict: DICT, list: LIST, set: SET}


class _Seen(NamedTuple):
    """Of a code object and those made in it: the names, the modules that it imports as (name, level), whether it asks
    for the date by way of one. `code` keeps its id its own.
    """

    names: frozenset[str]
    imports: frozenset[tuple[str, int]]
    asks_for_date: bool
    code: types.CodeType


_seen_code: dict[int, _Seen] = {}


def _look_at_code(code: types.CodeType) -> _Seen:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= (_seen_code.get(id(constant)) or _look_at_code(constant)).names
        elif type(constant) is str and constant.isidentifier():
            names.add(constant)
    imports = imports_of(code)
    seen = _seen_code[id(code)] = _Seen(frozenset(names), imports, asks_for_date(names, imports), code)
    return seen


def forget_written(reads: Reads, state: UserState) -> None:
    """Drop from `reads` what was first looked at after it had been written, now that all is as it was: what a call does
    does not depend on what was there before.
    """
    held = {id(holder.place) for holder in state.holders}
    held.update(id(container) for container, _, _ in state.empty)
    for place in [place for place in reads.places.values() if id(place.holder) in held]:
        if place.kind == "asked" or place.difference() is None:
            continue
        for key in [key for key, expected in place.items.items() if not expected.holds(place.look(key))]:
            _forget_contents(reads, place.items.pop(key).before(), state)
        if place.keys is not None:
            place.keys = keys_in(place.holder)
        place.absent.difference_update(place.appeared())


def _forget_contents(reads: Reads, value: Any, state: UserState) -> None:
    """Drop what is in a container that the run made."""
    if isinstance(value, (list, dict, set, collections.deque)) and not state.knows(value):
        place = reads.places.pop(id(value), None)
        for expected in place.items.values() if place is not None else ():
            _forget_contents(reads, expected.before(), state)


def own_globals(namespace: dict[str, Any]) -> dict[str, Any]:
    """What is in a module's globals without what a capture puts in the place of functions there."""
    return {name: value for name, value in own_names(namespace).items() if not _is_of_foregrad(value)}


def _is_of_foregrad(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and str(value.__module__).partition(".")[0] == "foregrad"


def _of_the_process() -> Iterator[tuple[Any, str]]:
    """What any code may write to, in the standard library's own objects."""
    yield sys.path, "sys.path"
    yield sys.argv, "sys.argv"
    yield warnings.filters, "warnings.filters"
    yield os.environ._data, "os.environ"  # type: ignore[attr-defined]
    for hooks in GLOBAL_HOOKS:
        yield hooks, "hooks of all modules"
    if "decimal" in sys.modules:
        yield sys.modules["decimal"].getcontext(), "decimal.getcontext()"


class UserState:
    """The state that is reached from `roots`, pairs of a value and what people call it, as it is now."""

    def __init__(self, roots: Iterable[tuple[Any, str]]) -> None:
        self.holders: list[Holder] = []
        self.empty: list[tuple[Any, Holder | None, Any]] = []  # containers with nothing in them, and where they are
        self._seen: dict[int, Any] = {}
        self._names: set[str] = set()  # those in code, looked up wherever they may be
        self._new_names: set[str] = {"forward", "__call__"}
        # What is in namespaces and classes, until code names it.
        self._unnamed: dict[str, list[tuple[Any, Holder]]] = collections.defaultdict(list)
        self._own_globals: dict[int, bool] = {}  # by the id of a namespace: whether it is the user's
        self._tensors: dict[int, tuple[Holder, Any]] = {}
        self._with_attributes: list[tuple[torch.Tensor, Holder]] = []
        self.drawing: list[tuple[Holder | None, Any, Any]] = []  # where functions that draw are held, and which
        self.iterators: list[tuple[Any, Any]] = []  # and under which key, or as what argument, each was met first
        self.asks_for_date = False
        self.caches: list[Holder] = []  # of functions under `functools.cache` and `lru_cache`
        self._slots: dict[type, bool] = {}
        self._by_base: tuple[tuple[Any, Callable[[Any, Holder | None, Any], None]], ...] = (
            (dict, self._dict), (list, self._list), (tuple, self._items), (set, self._set),
            (frozenset, self._items), (collections.deque, self._deque), (types.CellType, self._cell),
            (types.FunctionType, self._function), (types.MethodType, self._method),
            (types.ModuleType, self._module), (type, self._class), (torch.nn.Module, self._object),
            (functools.partial, self._partial), (CODE_OF_CLASSES, self._descriptor), (_BUFFERS, self._buffer),
            (random.Random, self._random), ((io.StringIO, io.BytesIO), self._file), (torch.Tensor, self._tensor),
        )  # fmt: skip
        self._actions: dict[type, Callable[[Any, Holder | None, Any], None] | None] = {}
        self._stack: list[tuple[Any, Holder | None, Any]] = [(value, None, name) for value, name in roots]
        self._stack += [(value, None, name) for value, name in _of_the_process()]
        self._walk()

    def meet(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Code begins to run that no walk has come to, perhaps a library's: what it names in its globals is tracked."""
        count = len(self.holders)
        # Of `warnings` the filters are tracked, see `_of_the_process`: the list that a caller records in is his.
        if not self._own_globals.get(id(namespace)) and namespace is not vars(warnings):
            self._own_globals[id(namespace)] = True
            self._namespace(namespace, None, str(namespace.get("__name__")), "attr")
        seen = _seen_code.get(id(code)) or _look_at_code(code)
        self._imported(seen, namespace)
        if self._stack or not seen.names <= self._names:
            self._new_names |= seen.names
            self._walk()
        for holder in self.holders[count:]:
            if holder.kind is NAMESPACE:  # what a capture has put in the place of a function is its own
                holder.before = own_globals(holder.before)

    def _imported(self, seen: _Seen, namespace: dict[str, Any]) -> None:
        """A module is what it is wherever code comes by it: here, where it imports it as it runs."""
        for module in imported_modules(seen.imports, namespace):
            if id(module) not in self._seen:
                self._stack.append((module, None, module.__name__))

    # ---------------------------------------------------------------- afterwards

    def changed(self) -> list[Holder]:
        """The holders that are not as they were."""
        filled = [found for found in self.empty if found[0]]
        if filled:
            self.empty = [found for found in self.empty if not found[0]]
            for value, parent, step in filled:
                kind = _OFTEN_EMPTY[type(value)]
                style, before = "" if kind is SET else "item", kind.read(type(value)())
                self.holders.append(Holder(kind, value, parent, step, style, before))
        return [holder for holder in self.holders if holder.is_written()]

    def keeper_of(self, value: Any) -> Any:
        """The function that keeps this very object as a result, or in one; None if there is none."""
        keepers = (holder.target for holder in self.caches)
        return next((c for c in keepers if any(_keeps(kept, value) for kept in results_of(c)[1].values())), None)

    def references_to(self, target: Any) -> list[tuple[Holder, Any]]:
        """Every (holder, key) under which an object was met; none where something else refers to it, too, in which no
        other object can take its place: a tuple, a partial application, a set, a method of the object.
        """
        found = [(holder, key) for holder in self.holders for key, value in holder.items() if value is target]
        in_sets = (item for holder in self.holders if holder.kind is SET for item in holder.before)
        if any(item is target for item in in_sets) or any(_is_in(value, target) for value in self._seen.values()):
            return []
        return found

    def knows(self, value: Any) -> bool:
        """Whether an object was met in the walk: it is older than the run."""
        return id(value) in self._seen

    def met(self) -> Iterable[Any]:
        """All objects that were met in the walk."""
        return self._seen.values()

    def source_of(self, tensor: torch.Tensor) -> Source | None:
        """Where a tensor was before the run; None where nothing that was met held it."""
        if not self._tensors:
            self._tensors = {id(value): (holder, key) for holder, key, value in self._held_tensors()}
        holder, key = self._tensors.get(id(tensor), (None, None))
        if holder is None:
            return None
        step = "attr" if holder.kind in (SLOTS, CELL) else "item"
        return Source(Closure(holder.path(key)), holder.place, ((step, key),))

    def tensors(self) -> list[torch.Tensor]:
        """Those that were held somewhere."""
        return [tensor for _, _, tensor in self._held_tensors() if tensor.layout is torch.strided]

    def with_attributes(self) -> Iterator[torch.Tensor]:
        """Tensors with attributes that code names."""
        for tensor, holder in self._with_attributes:
            if not self._names.isdisjoint(holder.before) and tensor.layout is torch.strided:
                yield tensor

    def _held_tensors(self) -> Iterator[tuple[Holder, Any, torch.Tensor]]:
        for holder in self.holders:
            held = ((holder, key, value) for key, value in holder.items() if isinstance(value, torch.Tensor))
            yield from (found for found in held if not is_stand_in(found[2]))  # in the arguments of a run

    # ---------------------------------------------------------------- the walk

    def _walk(self) -> None:
        stack, seen, actions = self._stack, self._seen, self._actions
        while True:
            while stack:
                value, parent, step = stack.pop()
                cls = type(value)
                if id(value) in DRAWN:
                    self._note_drawing(value, parent, step)
                if cls in _ATOMS or id(value) in seen:
                    continue
                seen[id(value)] = value
                if len(seen) > _MOST_VISITS:
                    stack.clear()
                    return
                try:
                    action = actions[cls]
                except KeyError:
                    action = actions[cls] = self._action(value, cls)
                if action is not None:
                    action(value, parent, step)
            if not self._named_items():
                return

    def _named_items(self) -> bool:
        """Go on to the items of namespaces and classes that code met since names."""
        self._names |= self._new_names
        found = self._new_names & self._unnamed.keys()
        self._new_names = set()
        self._stack += [(value, holder, name) for name in found for value, holder in self._unnamed.pop(name)]
        return bool(found)

    def _look_up(self, holder: Holder, items: Iterable[tuple[str, Any]]) -> None:
        """Items that matter where code names them."""
        names, unnamed = self._names, self._unnamed
        for name, value in items:
            if type(value) not in _ATOMS:
                if name in names:
                    self._stack.append((value, holder, name))
                else:
                    unnamed[name].append((value, holder))

    def _action(self, value: Any, cls: type) -> Callable[[Any, Holder | None, Any], None] | None:
        """What is done with a value of this class."""
        for base, action in self._by_base:
            if issubclass(cls, base):
                return action
        if cls is types.BuiltinFunctionType:
            return self._builtin
        if cls is types.MethodWrapperType:
            return self._wrapped_method
        if cls is types.MappingProxyType:
            return lambda value, parent, step: self._stack.append((gc.get_referents(value)[0], parent, step))
        if is_cached_function(value):
            return self._cached_function
        if hasattr(cls, "__wrapped__") or "__wrapped__" in (table_of(value) or ()):
            return self._wrapper
        if cls.__module__ in ("weakref", "_weakref", "builtins") and (referent(value) is not None):
            return lambda value, parent, step: self._stack.append((referent(value), parent, step))
        if cls.__module__ in ("builtins", "itertools") and hasattr(cls, "__next__"):
            return self._iterator
        if cls.__module__ == "decimal" and cls.__name__ == "Context":
            return self._decimals
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if issubclass(cls, numpy.ndarray):
                return self._array
            if issubclass(cls, (numpy.random.Generator, numpy.random.RandomState)):
                return self._numpy_random
        return None if is_constant(cls) and not issubclass(cls, BAGS) else self._object

    def _hold(self, kind: Kind, target: Any, parent: Holder | None, step: Any, style: str) -> Holder:
        holder = Holder(kind, target, parent, step, style, kind.read(target))
        self.holders.append(holder)
        return holder

    def _push(self, holder: Holder, items: Iterable[tuple[Any, Any]]) -> None:
        stack, seen = self._stack, self._seen
        for key, value in items:
            cls = type(value)
            if cls in _OFTEN_EMPTY and not value:
                if id(value) not in seen:
                    seen[id(value)] = value
                    self.empty.append((value, holder, key))
            elif cls not in _ATOMS:
                stack.append((value, holder, key))

    def _dict(self, value: Any, parent: Holder | None, step: Any) -> None:
        if value is vars(builtins):  # in which a capture replaces `print`
            return
        holder = self._hold(DICT, value, parent, step, "item")
        if len(holder.before) <= _LARGE:
            self._push(holder, holder.before.items())
        if type(value) not in _PLAIN_CONTAINERS and not is_class_outside(type(value)):
            self._object(value, parent, step)

    def _list(self, value: Any, parent: Holder | None, step: Any) -> None:
        self._sequence(LIST, value, parent, step)

    def _deque(self, value: Any, parent: Holder | None, step: Any) -> None:
        self._sequence(DEQUE, value, parent, step)

    def _sequence(self, kind: Kind, value: Any, parent: Holder | None, step: Any) -> None:
        holder = self._hold(kind, value, parent, step, "item")
        if len(holder.before) <= _LARGE:
            self._push(holder, enumerate(holder.before))
        if type(value) not in _PLAIN_CONTAINERS and not is_class_outside(type(value)):
            self._object(value, parent, step)

    def _set(self, value: Any, parent: Holder | None, step: Any) -> None:
        self._hold(SET, value, parent, step, "")
        if type(value) not in _PLAIN_CONTAINERS and not is_class_outside(type(value)):
            self._object(value, parent, step)

    def _items(self, value: Any, parent: Holder | None, step: Any) -> None:
        items = stored(value)
        if len(items) <= _LARGE:
            self._stack += [(item, parent, step) for item in items if type(item) not in _ATOMS]

    def _cell(self, cell: Any, parent: Holder | None, step: Any) -> None:
        holder = self._hold(CELL, cell, parent, step, "")
        if holder.before is not ABSENT:
            self._stack.append((holder.before, holder, step))

    def _buffer(self, value: Any, parent: Holder | None, step: Any) -> None:
        if memoryview(value).nbytes <= _MOST_BYTES:
            self._hold(BUFFER, value, parent, step, "")

    def _array(self, value: Any, parent: Holder | None, step: Any) -> None:
        if value.nbytes <= _MOST_BYTES and value.flags.writeable and not value.dtype.hasobject:
            self._hold(NUMBERS, value, parent, step, "")

    def _random(self, value: Any, parent: Holder | None, step: Any) -> None:
        if not isinstance(value, random.SystemRandom):
            self._hold(RANDOM, value, parent, step, "")

    def _file(self, value: Any, parent: Holder | None, step: Any) -> None:
        self._hold(FILE, value, parent, step, "")

    def _decimals(self, value: Any, parent: Holder | None, step: Any) -> None:
        self._hold(DECIMALS, value, parent, step, "")

    def _numpy_random(self, value: Any, parent: Holder | None, step: Any) -> None:
        self._hold(NUMPY_RANDOM, value, parent, step, "")
        self.drawing.append((parent, step, value))

    def _iterator(self, value: Any, parent: Holder | None, step: Any) -> None:
        self.iterators.append((value, step))

    def _object(self, value: Any, parent: Holder | None, step: Any) -> None:
        table = table_of(value)
        if type(table) is dict:
            self._seen[id(table)] = table
            holder = self._hold(DICT, table, parent, step, "attr")
            self._push(holder, holder.before.items())
        cls = type(value)
        if id(cls) not in self._seen:
            self._stack.append((cls, None, cls.__name__))
        if cls not in self._slots:
            self._slots[cls] = bool(slots_of(cls))
        if self._slots[cls]:
            holder = self._hold(SLOTS, value, parent, step, "attr")
            self._push(holder, holder.before.items())

    def _tensor(self, value: Any, parent: Holder | None, step: Any) -> None:
        if not is_stand_in(value) and type(table := table_of(value)) is dict:
            holder = self._hold(ATTRIBUTES, table, parent, step, "attr")
            if holder.before:
                self._push(holder, holder.before.items())
                self._with_attributes.append((value, holder))
            self._stack += [(hook, parent, step) for hook in gradient_hooks(value).values()]

    def _cached_function(self, value: Any, parent: Holder | None, step: Any) -> None:
        self.caches.append(Holder(CACHE, value, parent, step, "", CACHE.read(value)))
        self._stack.append((value.__wrapped__, parent, step))

    def _wrapper(self, value: Any, parent: Holder | None, step: Any) -> None:
        self._stack.append((getattr(value, "__wrapped__", None), parent, step))

    def _partial(self, value: Any, parent: Holder | None, step: Any) -> None:
        self._stack += [(item, parent, step) for item in (value.func, value.args, value.keywords)]

    def _descriptor(self, value: Any, parent: Holder | None, step: Any) -> None:
        for name in ("__func__", "fget", "fset", "func"):
            self._stack.append((getattr(value, name, None), parent, step))

    def _builtin(self, value: Any, parent: Holder | None, step: Any) -> None:
        if id(value) not in DRAWN:
            self._note_drawing(value, parent, step)
        self._wrapped_method(value, parent, step)

    def _wrapped_method(self, value: Any, parent: Holder | None, step: Any) -> None:
        """A method of an object of a built-in class: `items.append`, `iterator.__next__`."""
        if not isinstance(value.__self__, (types.ModuleType, type)):
            self._stack.append((value.__self__, parent, step))

    def _note_drawing(self, value: Any, parent: Holder | None, step: Any) -> None:
        """A function that draws from a generator, or reads a clock, held by a name: `from random import random`."""
        if id(value) in DRAWN or is_of_dates(value) or is_random_generator(used_up(value)):
            self.drawing.append((parent, step, value))

    def _method(self, value: Any, parent: Holder | None, step: Any) -> None:
        if id(value) not in DRAWN:
            self._note_drawing(value, parent, step)
        self._stack += [(value.__func__, None, value.__func__), (value.__self__, None, "self")]

    def _function(self, function: Any, parent: Holder | None, step: Any) -> None:
        closure, table = function.__closure__, function.__globals__
        if closure:
            for name, cell in zip(function.__code__.co_freevars, closure, strict=True):
                self._stack.append((cell, None, name))
        if function.__dict__:
            self._stack.append((function.__dict__, None, function.__name__))
        is_own = self._own_globals.get(id(table))
        if is_own is None:
            is_own = self._own_globals[id(table)] = not is_outside(table.get("__name__", ""))
            if is_own:
                self._namespace(table, None, "", "name")
        if not is_own:
            return
        if not function.__dict__:
            self._seen[id(function.__dict__)] = function.__dict__
            self.empty.append((function.__dict__, None, function.__name__))
        code = function.__code__
        seen = _seen_code.get(id(code)) or _look_at_code(code)
        self._new_names |= seen.names
        self._imported(seen, table)
        self.asks_for_date = self.asks_for_date or seen.asks_for_date
        for defaults in (function.__defaults__, function.__kwdefaults__):
            if defaults:
                self._stack.append((defaults, None, f"default of {function.__name__}"))

    def _module(self, module: Any, parent: Holder | None, step: Any) -> None:
        if not is_outside(module.__name__):
            self._namespace(vars(module), None, module.__name__, "attr")
        elif module is random or module.__name__ in ("numpy", "numpy.random"):
            spent = used_up(module if module is random else sys.modules["numpy.random"])
            self._stack.append((spent, None, module.__name__))

    def _namespace(self, table: dict[str, Any], parent: Holder | None, step: str, style: str) -> None:
        if id(table) in self._seen:
            return
        self._seen[id(table)] = table
        holder = self._hold(NAMESPACE, table, parent, step or None, style)
        self._look_up(holder, holder.before.items())

    def _class(self, cls: type, parent: Holder | None, step: Any) -> None:
        for base in cls.__mro__:
            if (id(base) in self._seen and base is not cls) or is_outside(base.__module__):
                continue
            self._seen[id(base)] = base
            holder = self._hold(CLASS, base, None, base.__name__, "attr")
            items = holder.before.items()
            # Methods are looked at where code names them, special ones always.
            methods = {name: item for name, item in items if type(item) is types.FunctionType and name[:2] != "__"}
            self._look_up(holder, methods.items())
            self._push(holder, [(name, item) for name, item in items if name not in methods])


def _keeps(kept: Any, value: Any) -> bool:
    items = kept.values() if type(kept) is dict else kept if type(kept) in (tuple, list) else ()
    return kept is value or any(item is value for item in items)


def _is_in(value: Any, target: Any) -> bool:
    """Whether an object is held by what nothing is ever written to."""
    if isinstance(value, (tuple, frozenset)):
        return any(item is target for item in value)
    if isinstance(value, functools.partial):
        return value.keywords is target
    return isinstance(value, (types.BuiltinMethodType, types.MethodWrapperType)) and value.__self__ is target
