"""The Python state that a function can change: shallow copies from before a run, the differences since, the way back.

`ProgramState(roots)` walks from callables and values through closure cells, globals that code names, modules, classes,
objects and containers, and copies each mutable holder it meets: one level each, so the copy of a large heap is cheap
and every write is found by comparing identities. State that libraries keep for themselves is not looked at, but for the
random generators of Python and NumPy. The walk runs no code of the user's.
Functions of installed packages name thousands of objects and run few of them. Unless the walk is to be whole, a
package's function is gone through when its code begins to run, see `enter`.

Known weaknesses: output, writes to files, sent data and items taken from a queue are not put back; nor objects behind
names made up at run time; objects of libraries' classes are taken for constant (but see `keeps_state`).
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
from typing import Any

import torch

from .._torch.hooks import gradient_hooks
from .._torch.stand_ins import is_stand_in
from ..frontend.source import ABSENT, table_of
from ..frontend.values import PLAIN
from . import holders as kinds
from ._torch.check_tree import GLOBAL_HOOKS
from ._torch.recurrent import attributes_of
from .code import Seen, imported_modules, look_at, stored_in
from .expected import stored
from .holders import Holder, HolderKind, before_entering, own_globals, slots_of
from .known_calls import is_called_in_c, is_untold
from .large_state import MOST_ITEMS, LargeState
from .libraries import (
    BAGS,
    OF_CTYPES,
    WEAK,
    is_class_outside,
    is_constant,
    is_installed,
    is_of_library,
    is_of_operators,
    is_outside,
    referent,
)
from .objects import CODE_OF_CLASSES
from .opaque import DRAWN, is_cached_function, is_random_generator, results_of, used_up
from .reads import TABLES, VIEWS
from .tensor_places import TensorPlaces

ATOMS = PLAIN | {types.CodeType, type(NotImplemented), types.GetSetDescriptorType}
_DESCRIBES = {"__annotations__", "__dataclass_fields__"}  # looked at where code names them, as are methods not special
_BUFFERS = (bytearray, array.array, memoryview, *OF_CTYPES)
_OF_PARTIALS, _OF_DESCRIPTORS = ("func", "args", "keywords"), ("__func__", "fget", "fset", "func")
_WITH_ATTRIBUTES = {dict, list, tuple, set, frozenset, collections.deque, functools.partial, _BUFFERS}
_NEVER_WRITTEN = (tuple, frozenset, functools.partial, types.BuiltinMethodType, types.MethodWrapperType)
_Action = Callable[["ProgramState", Any, "Holder | None", Any], None]
_PLAIN = {dict, list, tuple, set, frozenset, collections.deque, collections.defaultdict, *_BUFFERS}
# Modules' tables of hooks, a dozen each, are like this: an empty table needs no copy.
_DICTS: tuple[Any, ...] = (dict, collections.OrderedDict)
_OFTEN_EMPTY = dict.fromkeys(_DICTS, kinds.DICT) | {list: kinds.LIST, set: kinds.SET}


def _of_the_process() -> Iterator[tuple[Any, str]]:
    """Objects of the standard library that any code may write to."""
    yield sys.path, "sys.path"
    yield sys.argv, "sys.argv"
    yield warnings.filters, "warnings.filters"
    yield vars(os.environ)["_data"], "os.environ"
    for hooks in GLOBAL_HOOKS:
        yield hooks, "hooks of all modules"
    if "decimal" in sys.modules:
        yield sys.modules["decimal"].getcontext(), "decimal.getcontext()"


class ProgramState:
    """The present state that is reached from `roots`: pairs of a value and its name for people."""

    def __init__(self, roots: Iterable[tuple[Any, str]], *, is_whole: bool = True) -> None:
        """Not `is_whole`: functions of installed packages wait until their code runs."""
        self.holders: list[Holder] = []
        self.ways: list[Holder] = []  # the holders, tuples and the like, as they were met
        self.empty: list[tuple[Any, Holder | None, Any]] = []  # empty containers, and their places
        self._seen: dict[int, Any] = {}
        self._names = {"forward", "__call__"}  # and the names in code, looked up in every namespace
        # The contents of namespaces and classes, until code names them.
        self._unnamed: dict[str, list[tuple[Any, Holder]]] = collections.defaultdict(list)
        self._own_globals: dict[int, bool] = {}  # by the id of a namespace: whether it is the user's
        self.places = TensorPlaces(self.holders, self._unnamed)
        self.drawing: list[tuple[Holder | None, Any, Any]] = []  # the places of functions that draw, and the functions
        self.iterators: list[tuple[Any, Any]] = []  # and the key or argument by which each was met first
        self.untold: set[Any] = set()  # the names of objects with calls that no event tells of
        self._libraries: dict[int, Holder] = {}  # modules, classes, functions and objects of libraries
        self._modules: list[Holder] = []  # the modules among these
        self._held: dict[str, int] = {}  # by attribute: how many of these, the first, are tracked under it
        self._written_outside: set[tuple[int, str]] = set()  # attributes of these that once differed from before
        self.caches: list[Holder] = []  # of functions under `functools.cache` and `lru_cache`
        self._waiting: dict[types.CodeType, list[Any]] | None = None if is_whole else {}  # packages' functions, by code
        self._entered: set[types.CodeType] = set()
        self._late: tuple[list[Any], list[Any]] = [], []
        self._of_defaults: dict[types.CodeType, list[Any]] = {}  # as in `drawing`, where the code runs
        self._slots: dict[type, bool] = {}
        self._actions: dict[type, _Action | None] = {}
        self._queue: collections.deque[tuple[Any, Holder | None, Any]] = collections.deque()
        self._large = LargeState()
        self.walk((*roots, *_of_the_process()))

    def walk(self, roots: Iterable[tuple[Any, str]]) -> None:
        """Go on from the `roots`, the shortest ways first."""
        self._queue += [(value, None, name) for value, name in roots]
        self._walk()
        self.is_partial, self._in_time = bool(self._waiting), self._for_arguments()

    def enter(self, code: types.CodeType) -> tuple[list[Any], list[Any]]:
        """Go through waiting functions with this code, about to run. Returns new items of `drawing` and `iterators`."""
        self._entered.add(code)
        if self._waiting and code in self._waiting:
            self._go_through(self._waiting.pop(code))
        found, self._late = self._late, ([], [])
        found[0].extend(self._of_defaults.pop(code, ()))
        return found

    def enter_all(self) -> bool:
        """Go through all waiting functions: unobserved code may run. Returns whether a function waited."""
        waiting, self._waiting = self._waiting, None
        if waiting:
            self._go_through(function for functions in waiting.values() for function in functions)
        return bool(waiting)

    def _go_through(self, functions: Iterable[Any]) -> None:
        drawing, iterators = len(self.drawing), len(self.iterators)
        for function in functions:
            self._body(function)
        self._walk()
        self._late[0].extend(self.drawing[drawing:])
        self._late[1].extend(self.iterators[iterators:])

    def is_late(self) -> bool:
        """Whether the run reached tensors that only a whole walk finds in time."""
        return self.is_partial and self._in_time != self._for_arguments()

    def _for_arguments(self) -> tuple[int, bool]:
        return sum(1 for _ in self.with_attributes()), self.names("functional_call")

    def meet(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Code begins to run that no walk has reached, perhaps a library's: track the globals that it names."""
        count, cached = len(self.holders), len(self.caches)
        # Of `warnings` the filters are tracked, see `_of_the_process`: the list that a caller records in is his.
        if not self._own_globals.get(id(namespace)) and namespace is not vars(warnings):
            self._own_globals[id(namespace)] = True
            self._namespace(namespace, None, str(namespace.get("__name__")), "attr")
        seen = self._code(code, namespace)
        self._walk()
        for holder in self.caches[cached:]:
            holder.before = before_entering(code, holder.target, holder.before)
        if stored := stored_in(code):
            self._hold_libraries(stored, seen.names)
        for holder in self.holders[count:]:
            if holder.kind is kinds.NAMESPACE:  # a capture's replacement of a function is the capture's own
                holder.before = own_globals(holder.before)

    def _library(self, value: Any, parent: Holder | None, step: Any) -> None:
        if id(value) not in self._libraries:
            holder = self._libraries[id(value)] = Holder(kinds.PASSAGE, value, parent, step, "attr", {}, value)
            self._modules += [holder] if isinstance(value, types.ModuleType) else []

    def _hold_libraries(self, stored: frozenset[str], names: frozenset[str]) -> None:
        """Track these attributes on every library object that was reached, and on its attributes in `names`."""
        for name in stored if "modules" in names else ():
            before = sys.modules.get(name, ABSENT)
            self.holders.append(Holder(kinds.OUTSIDE, (sys.modules, name), None, f"sys.modules.{name}", "", before))
        for owner in self._modules:  # more are appended meanwhile
            for name in names & (table := table_of(owner.target) or {}).keys():
                if isinstance(part := table[name], (types.ModuleType, types.FunctionType, type)):
                    self._library(part, owner, name)
        owners = list(self._libraries.values())
        for name in stored:
            for owner in owners[self._held.get(name, 0) :]:
                if (table := table_of(owner.target)) is not None:
                    owner.before[name] = table.get(name, ABSENT)
            self._held[name] = len(owners)

    # ---------------------------------------------------------------- afterwards

    def changed(self) -> list[Holder]:
        """The holders that are not as they were."""
        filled = [found for found in self.empty if found[0]]
        if filled:
            self.empty = [found for found in self.empty if not found[0]]
            for value, parent, step in filled:
                kind = _OFTEN_EMPTY[type(value)]
                style, before = "" if kind is kinds.SET else "item", kind.read(type(value)())
                holder = Holder(kind, value, parent, step, style, before)
                holder.is_table = parent is not None and isinstance(parent.owner, torch.nn.Module) and step in TABLES
                self.holders.append(holder)
        for owner in self._libraries.values():
            table = table_of(owner.target) if owner.before else {}
            for name, was in owner.before.items():
                now = table.get(name, ABSENT)
                is_written = now is not was and not (kinds.is_of_house(was) or kinds.is_of_house(now))
                if is_written and (id(owner.target), name) not in self._written_outside:
                    self._written_outside.add((id(owner.target), name))
                    self.holders.append(Holder(kinds.OUTSIDE, (owner.target, name), owner, name, "", was))
        return [holder for holder in self.holders if holder.is_written()]

    def names_of(self, kinds: tuple[type, ...]) -> set[Any]:
        """The names by which objects of the library classes `kinds` were reached first."""
        return {held.step for held in [*self.ways, *self._libraries.values()] if isinstance(held.owner, kinds)}

    def result_of(self, value: Any) -> Any:
        """The function that keeps this very object as a result or inside a result; None if there is none."""
        keepers = (holder.target for holder in self.caches)
        return next((c for c in keepers if any(kinds.keeps(kept, value) for kept in results_of(c)[1].values())), None)

    def references_to(self, target: Any) -> list[tuple[Holder, Any]]:
        """Every (holder, key) of an object; none if a tuple, partial, set or bound method, too, holds the object."""
        self.enter_all()
        found = [(holder, key) for holder in self.holders for key, value in holder.items() if value is target]
        in_sets = (item for holder in self.holders if holder.kind is kinds.SET for item in holder.before)
        classes = {cls for cls in self._actions if issubclass(cls, _NEVER_WRITTEN)}
        fixed = (value for value in self._seen.values() if type(value) in classes)
        if any(item is target for item in in_sets) or any(kinds.is_in(value, target) for value in fixed):
            return []
        return found

    def module_names(self) -> dict[int, str]:
        """By id, a module's name for people: `model.layers.0`."""
        return {id(w.owner): w.name() for w in self.ways if isinstance(w.owner, torch.nn.Module)}

    def names(self, name: str) -> bool:
        """Whether code that was met names something so."""
        return name in self._names

    def has_met(self, value: Any) -> bool:
        """Whether the walk has met an object so far."""
        return id(value) in self._seen

    def knows(self, value: Any) -> bool:
        """Whether an object is older than the run: the walk has met the object, the whole walk if need be."""
        return id(value) in self._seen or (self.enter_all() and id(value) in self._seen)

    def met(self) -> Iterable[Any]:
        """All objects that were met in the walk."""
        return self._seen.values()

    def with_attributes(self) -> Iterator[torch.Tensor]:
        """Tensors with attributes that code names."""
        return self.places.with_attributes(self._names)

    # ---------------------------------------------------------------- the walk

    def _walk(self) -> None:
        queue, seen, actions = self._queue, self._seen, self._actions
        while queue:
            value, parent, step = queue.popleft()
            cls = type(value)
            if id(value) in DRAWN:
                self._note_drawing(value, parent, step)
            if cls in ATOMS:
                continue
            if id(value) in seen:
                if value in self.places:
                    self.places.add(value, parent, step)
                continue
            seen[id(value)] = value
            try:
                action = actions[cls]
            except KeyError:
                action = actions[cls] = self._action(value, cls)
            if action is not None:
                action(self, value, parent, step)
        for place in self._large.named():
            self._hold(place.kind, place.target, place.parent, place.step, "")

    def _code(self, code: types.CodeType, namespace: dict[str, Any]) -> Seen:
        """Go on to the objects that code names in namespaces and classes that were reached, and to its imports."""
        seen = look_at(code)
        self._large.meet(code, seen.names)
        if new := seen.names - self._names:
            self._names |= new
            self._queue += [(v, h, name) for name in new & self._unnamed.keys() for v, h in self._unnamed.pop(name)]
        for _, module in imported_modules(seen.imports, namespace) if seen.imports else ():
            if id(module) not in self._seen:
                self._queue.append((module, None, module.__name__))
        return seen

    def _look_up(self, holder: Holder, items: Iterable[tuple[str, Any]]) -> None:
        """Items that matter where code names them."""
        for name, value in items:
            if type(value) not in ATOMS:
                if name in self._names:
                    self._queue.append((value, holder, name))
                else:
                    self._unnamed[name].append((value, holder))

    def _action(self, value: Any, cls: type) -> _Action | None:
        """The method that goes on from values of a class; None where nothing is to be tracked."""
        for base, action in _BY_BASE:
            if issubclass(cls, base):
                is_plain = cls in _PLAIN or base not in _WITH_ATTRIBUTES
                return action if is_plain else functools.partial(ProgramState._with_attributes_of, action=action)
        if cls is types.BuiltinFunctionType:
            return ProgramState._builtin
        if cls is types.MethodWrapperType:
            return ProgramState._wrapped_method
        if cls in VIEWS:
            return lambda state, value, parent, step: state._queue.append((gc.get_referents(value)[0], parent, step))
        if is_cached_function(value):
            return ProgramState._cached_function
        if hasattr(cls, "__wrapped__") or "__wrapped__" in (table_of(value) or ()):
            return functools.partial(ProgramState._through, names=("__wrapped__",))
        if issubclass(cls, WEAK):
            return lambda state, value, parent, step: state._queue.append((referent(value), parent, step))
        if cls.__module__ in ("builtins", "itertools") and hasattr(cls, "__next__"):
            return ProgramState._iterator
        if cls.__module__ == "decimal" and cls.__name__ == "Context":
            return functools.partial(ProgramState._single, kind=kinds.DECIMALS)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            if issubclass(cls, numpy.ndarray):
                return ProgramState._array
            if issubclass(cls, (numpy.random.Generator, numpy.random.RandomState)):
                return ProgramState._numpy_random
        if is_called_in_c(cls):
            return ProgramState._called_in_c
        if is_constant(cls) and not issubclass(cls, BAGS):
            return ProgramState._library if is_of_operators(cls) else ProgramState._object_of_library
        return ProgramState._object

    def _hold(
        self, kind: HolderKind, target: Any, parent: Holder | None, step: Any, style: str, owner: Any = None
    ) -> Holder:
        holder = Holder(kind, target, parent, step, style, kind.read(target), owner)
        self.holders.append(holder)
        self.ways.append(holder)
        return holder

    def _push(self, holder: Holder, items: Iterable[tuple[Any, Any]] | None = None) -> None:
        """Go on to a holder's items; from a large holder to its tensors alone."""
        queue, seen, held = self._queue, self._seen, holder.items() if items is None else items
        if len(holder.before) > MOST_ITEMS:
            held = [pair for pair in held if isinstance(pair[1], torch.Tensor)]
            self._large.add(holder)
        for key, value in held:
            cls = type(value)
            if cls in _OFTEN_EMPTY and not value:
                if id(value) not in seen:
                    seen[id(value)] = value
                    self.empty.append((value, holder, key))
            elif cls not in ATOMS:
                queue.append((value, holder, key))

    def _container(
        self, value: Any, parent: Holder | None, step: Any, kind: HolderKind, *, is_table: bool = False
    ) -> None:
        if value is vars(builtins):  # a capture replaces `print` there
            return
        holder = self._hold(kind, value, parent, step, "" if kind is kinds.SET else "item")
        holder.is_table = is_table
        self._push(holder)
        if kind in (kinds.DICT, kinds.SET) and not ATOMS.issuperset(map(type, holder.before)):
            keys = tuple(key for key in holder.before if type(key) not in ATOMS)
            self._pass(keys, None, f"a key of {holder.name()}", dict(enumerate(keys))).style = "key"

    def _with_attributes_of(self, value: Any, parent: Holder | None, step: Any, action: _Action) -> None:
        """A container with attributes, or of a class of the program's."""
        action(self, value, parent, step)
        if not is_of_operators(type(value)) and (table_of(value) or not is_class_outside(type(value))):
            self._object(value, parent, step)

    def _single(self, value: Any, parent: Holder | None, step: Any, kind: HolderKind, nbytes: int = 0) -> None:
        if not self._large.takes(value, parent, step, kind, nbytes):
            self._hold(kind, value, parent, step, "")

    def _items(self, value: Any, parent: Holder | None, step: Any) -> None:
        items = stored(value)
        if not isinstance(value, tuple):
            value, parent = tuple(items), None
        if not ATOMS.issuperset(map(type, items)):
            self._pass(value, parent, step, dict(enumerate(items)))

    def _pass(
        self,
        value: Any,
        parent: Holder | None,
        step: Any,
        items: dict[Any, Any],
        owner: Any = None,
        is_table: bool = False,
    ) -> Holder:
        passage = Holder(kinds.PASSAGE, value, parent, step, "item" if owner is None else "attr", items, owner)
        passage.is_table = is_table
        self.ways.append(passage)
        self._push(passage)
        return passage

    def _cell(self, cell: Any, parent: Holder | None, step: Any) -> None:
        holder = self._hold(kinds.CELL, cell, parent, step, "")
        if holder.before is not ABSENT:
            self._queue.append((holder.before, holder, step))

    def _buffer(self, value: Any, parent: Holder | None, step: Any) -> None:
        try:
            view = memoryview(value)
        except ValueError:  # it was released
            return
        if not view.readonly and (view.ndim == 1 or view.c_contiguous):
            self._single(value, parent, step, kinds.BUFFER, view.nbytes)

    def _array(self, value: Any, parent: Holder | None, step: Any) -> None:
        if value.flags.writeable:
            self._single(value, parent, step, kinds.NUMBERS, value.nbytes)
        if value.dtype.hasobject:
            self._queue.append((value.ravel().tolist(), None, step))

    def _random(self, value: Any, parent: Holder | None, step: Any) -> None:
        if not isinstance(value, random.SystemRandom):
            self._hold(kinds.RANDOM, value, parent, step, "")

    def _numpy_random(self, value: Any, parent: Holder | None, step: Any) -> None:
        self._hold(kinds.NUMPY_RANDOM, value, parent, step, "")
        self.drawing.append((parent, step, value))

    def _iterator(self, value: Any, parent: Holder | None, step: Any) -> None:
        self.iterators.append((value, step))

    def _object(self, value: Any, parent: Holder | None, step: Any) -> None:
        table = table_of(value)
        if type(table) is dict:
            self._seen[id(table)] = table
            holder = self._hold(kinds.DICT, table, parent, step, "attr", value)
            if isinstance(value, torch.nn.Module):  # its parts are nearer than its other attributes
                for name in TABLES:
                    part = holder.before.get(name)
                    if part and isinstance(part, dict) and id(part) not in self._seen:
                        self._seen[id(part)] = part
                        self._container(part, holder, name, kinds.DICT, is_table=True)
            self._push(holder)
        cls = self._class_of(value)
        if cls not in self._slots:
            self._slots[cls] = bool(slots_of(cls))
        if self._slots[cls]:
            holder = self._hold(kinds.SLOTS, value, parent, step, "attr", value)
            self._push(holder)

    def _called_in_c(self, value: Any, parent: Holder | None, step: Any) -> None:
        self.untold |= {step} if is_untold(value) else set()
        (self._object_of_library if is_constant(type(value)) else self._object)(value, parent, step)

    def _class_of(self, value: Any) -> type:
        cls: type = type(value)
        if id(cls) not in self._seen:
            self._queue.append((cls, None, cls.__name__))
        return cls

    def _object_of_library(self, value: Any, parent: Holder | None, step: Any) -> None:
        """An object that is taken for constant: tensors and modules that people hang onto it are read as anywhere."""
        table = table_of(value)
        held = (torch.Tensor, torch.nn.Module, *OF_CTYPES)
        self._library(value, parent, step)
        if type(table) is dict and (items := {name: x for name, x in [*table.items()] if isinstance(x, held)}):
            self._pass(value, parent, step, items, value)

    def _script(self, value: Any, parent: Holder | None, step: Any) -> None:
        """A module of TorchScript's; most of its state is in C++."""
        tables = {name: getattr(value, name) for name in TABLES}
        held = {name: getattr(value, name) for name in attributes_of(value)}
        passage = self._pass(value, parent, step, tables | held, value)
        for name, table in tables.items():
            self._seen[id(table)] = table
            self._pass(table, passage, name, dict(table.items()), is_table=True)
        self._object(value, parent, step)

    def _tensor(self, value: Any, parent: Holder | None, step: Any) -> None:
        if not is_stand_in(value) and type(table := table_of(value)) is dict:
            holder = self._hold(kinds.ATTRIBUTES, table, parent, step, "attr", value)
            self.places.add(value, parent, step)
            self._class_of(value)
            if holder.before:
                self._push(holder)
                self.places.add_attributes(value, holder)
            self._queue += [(hook, parent, step) for hook in gradient_hooks(value).values()]

    def _cached_function(self, value: Any, parent: Holder | None, step: Any) -> None:
        self.caches.append(Holder(kinds.CACHE, value, parent, step, "", kinds.CACHE.read(value)))
        self._queue.append((value.__wrapped__, parent, step))

    def _through(self, value: Any, parent: Holder | None, step: Any, names: tuple[str, ...]) -> None:
        """Go on through a partial application, a property or a decorated function."""
        self._queue += [(getattr(value, name, None), parent, step) for name in names]

    def _builtin(self, value: Any, parent: Holder | None, step: Any) -> None:
        if id(value) not in DRAWN:
            self._note_drawing(value, parent, step)
        self._wrapped_method(value, parent, step)

    def _wrapped_method(self, value: Any, parent: Holder | None, step: Any) -> None:
        """A method of an object of a built-in class: `items.append`, `iterator.__next__`."""
        if not isinstance(value.__self__, (types.ModuleType, type)):
            self._queue.append((value.__self__, parent, step))

    def _note_drawing(self, value: Any, parent: Holder | None, step: Any) -> None:
        """A function that draws from a generator, or reads a clock, held by a name: `from random import random`."""
        if id(value) in DRAWN or is_random_generator(used_up(value)):
            self.drawing.append((parent, step, value))

    def _method(self, value: Any, parent: Holder | None, step: Any) -> None:
        if id(value) not in DRAWN:
            self._note_drawing(value, parent, step)
        self._queue += [(value.__func__, None, value.__func__), (value.__self__, None, "self")]

    def _function(self, function: Any, parent: Holder | None, step: Any) -> None:
        closure, table = function.__closure__, function.__globals__
        if closure:
            for name, cell in zip(function.__code__.co_freevars, closure, strict=True):
                self._queue.append((cell, None, name))
        if function.__dict__:
            self._queue.append((function.__dict__, None, function.__name__))
        is_own = self._own_globals.get(id(table))
        if is_own is None:
            is_own = self._own_globals[id(table)] = not is_outside(table.get("__name__", ""))
            if is_own:
                self._namespace(table, None, "", "name")
        if not is_own:
            self._library(function, None, function.__name__)
            return
        if not function.__dict__:
            self._seen[id(function.__dict__)] = function.__dict__
            self.empty.append((function.__dict__, None, function.__name__))
        waiting, code = self._waiting, function.__code__
        if waiting is not None and code not in self._entered and is_installed(table):
            waiting.setdefault(code, []).append(function)
        else:
            self._body(function)

    def _body(self, function: Any) -> None:
        code, held = function.__code__, function.__defaults__ or ()
        self._code(code, function.__globals__)
        if drawing := [(None, None, value) for value in held if id(value) in DRAWN]:
            (self.drawing if code in self._entered else self._of_defaults.setdefault(code, [])).extend(drawing)
            held = tuple(None if id(value) in DRAWN else value for value in held)
        for defaults in filter(None, (held, function.__kwdefaults__)):
            self._queue.append((defaults, None, f"default of {function.__name__}"))

    def _module(self, module: Any, parent: Holder | None, step: Any) -> None:
        if not is_outside(module.__name__):
            self._namespace(vars(module), None, module.__name__, "attr")
            return
        self._library(module, None, module.__name__)
        if module is random or module.__name__ in ("numpy", "numpy.random"):
            spent = used_up(module if module is random else sys.modules["numpy.random"])
            self._queue.append((spent, None, module.__name__))

    def _namespace(self, table: dict[str, Any], parent: Holder | None, step: str, style: str) -> None:
        if id(table) in self._seen:
            return
        self._seen[id(table)] = table
        holder = self._hold(kinds.NAMESPACE, table, parent, step or None, style)
        self._look_up(holder, holder.before.items())

    def _class(self, cls: type, parent: Holder | None, step: Any) -> None:
        for base in cls.__mro__:
            if id(base) in self._seen and base is not cls:
                continue
            self._seen[id(base)] = base
            if is_of_library(base):
                self._library(base, None, base.__name__)
                continue
            holder = self._hold(kinds.CLASS, base, None, base.__name__, "attr")
            items = holder.before.items()
            named = {k: v for k, v in items if k in _DESCRIBES or (type(v) is types.FunctionType and k[:2] != "__")}
            self._look_up(holder, named.items())
            self._queue.append((type(base), None, type(base).__name__))
            self._push(holder, [(name, item) for name, item in items if name not in named])


_of, _State = functools.partial, ProgramState  # (a state that held its methods would be a circle)
_BY_BASE: tuple[tuple[Any, _Action], ...] = (
    (dict, _of(_State._container, kind=kinds.DICT)), (list, _of(_State._container, kind=kinds.LIST)),
    (tuple, _State._items), (set, _of(_State._container, kind=kinds.SET)), (frozenset, _State._items),
    (collections.deque, _of(_State._container, kind=kinds.DEQUE)), (types.CellType, _State._cell),
    (types.FunctionType, _State._function), (types.MethodType, _State._method),
    (torch.Tensor, _State._tensor), (types.ModuleType, _State._module), (type, _State._class),
    (torch.jit.ScriptModule, _State._script), (torch.nn.Module, _State._object),
    (functools.partial, _of(_State._through, names=_OF_PARTIALS)), (_BUFFERS, _State._buffer),
    (CODE_OF_CLASSES, _of(_State._through, names=_OF_DESCRIPTORS)), (random.Random, _State._random),
    ((io.StringIO, io.BytesIO), _of(_State._single, kind=kinds.FILE)),
)  # fmt: skip
