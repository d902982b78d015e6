"""The places that code can read, told from its names without running it: globals, cells, options of objects.

After a run, when all is as it was before, `Scan` walks from a callable through every function that its code names (in
globals, cells, defaults, attributes of modules and classes) and that ran, and notes each name's value in `Reads`. A
name on a line that did not run is noted as well: the price is a capture too many, never a wrong result. Attributes of
plain objects are noted when any code names them, their absence when it asks for them (`getattr`, `hasattr`, `except
AttributeError`); when some code makes names up (`getattr(x, name)`, `vars`, `__dict__`), all attributes of all objects.

Known weaknesses, not looked at: the own globals of the standard library, NumPy and PyTorch; contents of C extensions
and files; a function's replaced `__dict__`; reads of methods called by made-up names; results of `inspect.signature`
and its like for functions of installed packages.
"""

from __future__ import annotations

import builtins
import collections
import contextvars
import datetime as dt
import enum
import functools
import gc
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
import torch.utils.weak

from .._torch.dynamo_off import is_disabled
from ..errors import UnsupportedSideEffectError
from ..frontend.arrays import is_array
from ..frontend.source import ABSENT, table_of
from ..frontend.values import holds_classes, is_plain
from ..graph.source import in_order
from ..locks import Replacements
from .code import OF_CODE, CodeNames, NamesMet, codes_in, imported_modules, names_of
from .large_state import CONTAINERS, MOST_ITEMS, looked_into
from .libraries import (
    BAGS,
    is_installed,
    is_library,
    is_of_library,
    is_of_operators,
    is_outside,
    keeps_options,
    loggers_of,
    referent,
)
from .library_state import LibraryState
from .objects import (
    CODE_OF_CLASSES,
    SPECIAL,
    attributes_of,
    dict_of_class,
    kept_by_c,
    makers_of,
    slots_in,
    special_names,
    values_of,
)
from .opaque import context_value, derived_from, is_cached_function, names_in_own, of_each, size_of_cache
from .reads import VIEWS, Reads, ReadSite, items_in

_DEEPEST, _DEEPEST_IN_LIBRARY = 100, 3  # objects, each reached through the one before: a list linked by hand, a tree


class Scan:
    """One walk: `function(f)` adds a callable that may run, none of `apart`; `finish()` follows all to its end.
    `of_code()` comes last.
    """

    def __init__(self, reads: Reads, apart: tuple[types.FunctionType, ...], entered: Collection[Any]) -> None:
        """`entered`: the code that ran, and no other is opened."""
        self.reads, self.entered = reads, entered
        self.libraries = LibraryState(reads, weakref.proxy(self), entered)
        self.names: set[str] = set()
        self.probed: set[str] = set()  # names that code asks for without knowing whether they are there
        self.makes_up_names = False
        self.code: list[tuple[dict[str, Any], CodeNames]] = []  # globals of functions, and the names in their code
        self._functions: list[types.FunctionType] = []
        self._apart = frozenset(function.__code__ for function in apart)
        self._opened: set[types.CodeType] = set()
        self._seen: dict[int, Any] = {id(function): function for function in apart}  # the values keep the ids theirs
        self._objects: list[tuple[Any, str, int, set[str]]] = []  # (object or class, name, depth, names done)
        self.modules: dict[int, tuple[torch.nn.Module, str]] = {}
        self._handed_on: dict[int, Any] = {}
        self._under = NamesMet()  # the names under which objects were last looked at
        self._settled: dict[int, set[str]] = {}  # by the id of a namespace: globals that were looked at, modules apart
        self._class_tables: dict[type, ReadSite] = {}
        self._of_modules: set[type] = set()
        self._attributes_of: Callable[[type], frozenset[str]] = functools.cache(attributes_of)
        self._slots_of: Callable[[type], frozenset[str]] = functools.cache(slots_in)
        self._keeps_options: Callable[[type], bool] = functools.cache(lambda cls: any(map(keeps_options, cls.__mro__)))

    # ---------------------------------------------------------------- callables

    def function(self, value: Any, name: str = "") -> None:
        """Look at a callable that may run."""
        if type(value) is types.FunctionType:
            if not self._is_new(value) or is_disabled(value):
                return
            if _is_users(value):
                self._functions.append(value)
                return
            if value.__closure__:
                self._cells(value)  # a decorator of theirs around a function of the user's
            self.function(getattr(value, "__wrapped__", None), name)
        elif isinstance(value, (functools.partial, functools.partialmethod)):
            if self._is_new(value):
                self._parts(value, name, ("func", "args", "keywords"))
                if value.__dict__ and not is_of_operators(type(value)):
                    self._object(value, name, 0)
        elif isinstance(value, types.MethodType):
            self.function(value.__func__, name)
            self.visit(value.__self__, "self")
        elif isinstance(value, (staticmethod, classmethod)):
            self.visit(value.__func__, name)
        elif isinstance(value, property):
            for part in (value.fget, value.fset):
                self.function(part, name)
        elif isinstance(value, (functools.cached_property, functools.singledispatchmethod)):
            self.function(value.func, name)
            self.function(getattr(value, "dispatcher", None), name)
        elif hasattr(value, "__wrapped__"):
            self.visit(value.__wrapped__, name)

    def finish(self) -> None:
        """Follow all code and objects that were met to their end."""
        while True:
            while self._functions:
                self._open(self._functions.pop())
            if not (self._objects_again() or self._namespaces_whole()):
                break
        self.libraries.again(frozenset(self.names), self.probed)
        self.reads.compares_identity |= any(code in self.entered for code in LOOKS_UP)

    def of_code(self) -> None:
        """Note the attributes that C keeps of functions and classes (`__defaults__`, `__doc__`) where any code that was
        met names them: of all functions and classes that were met, as any may be asked.
        """
        met = [*self._seen.values()]
        for value in filter(is_cached_function, met if "cache_info" in self.names else ()):
            ask = functools.partial(size_of_cache, value)
            self.reads.ask(ask, "the size of a cache", ask)
        asked = frozenset().union(*(OF_CODE[name] for name in self.names & OF_CODE.keys()))
        classes = [value for value in met if isinstance(value, type)]
        functions = [f for f in met if type(f) is types.FunctionType and not f.__closure__ and _is_users(f)]
        own = [*(cls for cls in classes if not is_of_library(cls)), *functions]
        functions = [function for function in functions if not is_installed(function.__globals__)]
        for attribute in in_order(asked - _NAMES):
            for cls in classes:
                if attribute == "__subclasses__":
                    self.reads.ask(cls, f"classes derived from {cls.__name__}", derived_from)
                else:
                    self.reads.add(self._class_table(cls), attribute, cls.__dict__.get(attribute, ABSENT))
            for function in functions:
                self._parts(function, function.__name__, (attribute,))
        for attribute in in_order(asked & _NAMES if own else ()):
            asked_of_each = functools.partial(of_each, attribute)
            self.reads.ask([*own], f"the {attribute} of a class or function", asked_of_each)

    def has_opened(self, code: types.CodeType) -> bool:
        return code in self._opened or code in self._apart

    def ran(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Note the globals that code which ran names, wherever the code is from."""
        if not self.has_opened(code):
            self._names_in(code, namespace)

    def _names_in(self, code: types.CodeType, namespace: dict[str, Any]) -> CodeNames:
        self._opened.update(codes_in(code))
        named = names_of(code, self._apart)
        others = named.others
        self.names |= others
        self.probed |= named.probed
        self.makes_up_names = self.makes_up_names or any(
            not is_library(namespace.get(root)) for root in named.made_up_of
        )
        self.libraries.gone_through |= named.gone_through
        if named.compares:
            self._comparisons(namespace, named.compares)
        self.code.append((namespace, named))
        self._globals(namespace, named.loaded, others, named.handed_on)
        if named.whole_namespace:
            options = {name for name, value in namespace.items() if name[:2] != "__" and _is_option(value)}
            self._globals(namespace, others | options, others, named.handed_on)
        imported = dict(imported_modules(named.imports, namespace))
        for module in imported.values():
            self.libraries.named(module, others, self.probed)
        missing = {name for name, level in named.imports if not level and name not in sys.modules}
        self.libraries.modules(imported, missing)
        return named

    def _open(self, function: types.FunctionType) -> None:
        if function.__dict__:  # code elsewhere may read them
            self._objects.append((function, function.__name__, 0, set()))
        if function.__code__ not in self.entered:
            return
        code = self._names_in(function.__code__, function.__globals__)
        if function.__closure__ is None and "site-packages" not in function.__code__.co_filename:
            # Tools that reload edited code set `__code__`. A place of a function with cells would keep the cells alive.
            place = self.reads.place(function, "object", function.__name__, "attr")
            self.reads.add(place, "__code__", function.__code__)
        self._cells(function, code)
        for table, what in ((function.__defaults__, "default"), (function.__kwdefaults__, "default")):
            if table:
                holder = self.reads.place(function, "object", function.__name__, "attr")
                attribute = "__defaults__" if table is function.__defaults__ else "__kwdefaults__"
                self.reads.add(holder, attribute, table)
                for item in table.values() if isinstance(table, dict) else table:
                    self.visit(item, f"{what} of {function.__name__}")
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self.function(wrapped, function.__name__)

    def _comparisons(self, namespace: dict[str, Any], paths: frozenset[tuple[str, ...]]) -> None:
        """A comparison by `is` matters where either side may be a tensor."""
        for path in paths:
            value: Any = namespace.get(path[0], ABSENT) if path else ABSENT
            for name in path[1:]:
                value = vars(value).get(name, ABSENT) if isinstance(value, (type, types.ModuleType)) else ABSENT
            if value is ABSENT or isinstance(value, torch.Tensor):
                self.reads.compares_identity = True

    def _globals(
        self, namespace: dict[str, Any], loaded: frozenset[str], others: frozenset[str], handed_on: frozenset[str]
    ) -> None:
        place = self.reads.place(namespace, "dict", "", "key")
        settled = self._settled.setdefault(id(namespace), set())
        for name in in_order(loaded - settled):
            if name not in namespace:
                place.lacks((name,))  # a built-in function may be hidden later, and a `NameError` be caught
                value = vars(builtins).get(name, ABSENT)
                if value is ABSENT:
                    self.reads.place(vars(builtins), "dict", "builtins", "attr").lacks((name,))
                elif not isinstance(value, _OF_BUILTINS):  # the program put it there; a capture replaces `print`
                    self.reads.add(self.reads.place(vars(builtins), "dict", "builtins", "attr"), name, value)
                    self.visit(value, name)
                continue
            value = namespace[name]
            self.reads.add(place, name, value)
            if isinstance(value, types.ModuleType):
                self.libraries.named(value, others, self.probed)
            else:
                settled.add(name)
                if name in handed_on:
                    self._hand_on(value, name)
            if name in handed_on or not isinstance(value, types.ModuleType):
                self.visit(value, name)

    def _cells(self, function: types.FunctionType, code: CodeNames | None = None) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if code is not None and name not in code.cells:
                continue
            place = self.reads.place(cell, "object", name, "self")
            try:
                value = cell.cell_contents
            except ValueError:
                value = ABSENT
            is_new = self.reads.add(place, "cell_contents", value)
            is_handed_on = code is not None and name in code.handed_on
            if isinstance(value, types.ModuleType):  # each code names further items of a module
                self.libraries.named(value, frozenset() if code is None else code.others, self.probed)
            elif is_handed_on:
                self._hand_on(value, name)
            if is_new and (is_handed_on or not isinstance(value, types.ModuleType)):
                self.visit(value, name)

    def _hand_on(self, value: Any, name: str) -> None:
        """A function or class that code hands on, to `getattr` perhaps: the attribute may be missing."""
        if isinstance(value, (types.FunctionType, type)) and id(value) not in self._handed_on:
            self._handed_on[id(value)] = value
            self._objects.append((value, name, 0, set()))

    def _namespaces_whole(self) -> bool:
        """Note all options in modules where code makes up names. Returns whether any was new."""
        is_new = False
        while self.makes_up_names and self.libraries.own:
            _, module = self.libraries.own.popitem()
            place = self.reads.place(vars(module), "dict", module.__name__, "attr")
            for name, value in [*vars(module).items()]:
                if not name.startswith("__") and _is_option(value):
                    is_new = self.reads.add(place, name, value) or is_new
                    self.visit(value, f"{module.__name__}.{name}")
        return is_new

    # ---------------------------------------------------------------- values

    def visit(self, value: Any, name: str, depth: int = 0, inside: int = 0) -> None:
        """Go on from a value that code can get at. `depth`: the number of objects on the way, the last `inside` of
        which are a library's, nested.
        """
        if type(value) is types.FunctionType:  # most values are
            self.function(value, name)
            return
        if isinstance(value, torch.Tensor) and not is_of_library(type(value)) and self._is_new(value):
            self._object(value, name, depth)
        if isinstance(value, torch.Tensor) or (is_plain(value) and not holds_classes(value)):
            return
        if isinstance(value, types.ModuleType):
            if not is_outside(value.__name__) and self._is_new(value):  # handed on, it may be known by any name
                self._objects.append((value, value.__name__, depth, set()))
            return
        owner = getattr(value, "__self__", None) if isinstance(value, types.BuiltinMethodType) else None
        if isinstance(owner, type) and not is_of_library(owner):
            value = owner  # of a method in C that is bound to a class, as `Function.apply` is since PyTorch 2.14
        if isinstance(value, types.BuiltinFunctionType) or id(value) in self.reads.unread:
            return
        if isinstance(value, VIEWS):
            value = gc.get_referents(value)[0]
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self.function(value, name)
        elif isinstance(value, CONTAINERS):
            if self._is_new(value):
                self.reads.contents(value, name)
                for key, item in looked_into(items_in(value), name):
                    self.visit(item, f"{name}[...]", depth)
                    if type(key) not in (str, int):
                        self.visit(key, f"a key of {name}", depth)
                if isinstance(value, collections.defaultdict):
                    factory = functools.partial(lambda table, _: table.default_factory, value)
                    self.reads.ask(factory, f"{name}.default_factory", factory)
                    self.visit(value.default_factory, f"{name}.default_factory", depth)
                is_users = not is_of_library(type(value))
                if table_of(value) or (is_users and not isinstance(value, tuple)):
                    self._object(value, name, depth)
                elif is_users:
                    self._class(type(value))
        elif isinstance(value, operator.attrgetter):
            self.names.update(*(text.split(".") for text in value.__reduce__()[1]))
        elif isinstance(value, operator.methodcaller):
            self.names.add(value.__reduce__()[1][0])
        elif isinstance(value, torch.nn.Module):
            self.modules.setdefault(id(value), (value, name))  # their attributes are noted as they are read
            if type(value) not in self._of_modules:
                self._of_modules.add(type(value))
                self._class_of_module(type(value))
        elif isinstance(value, type):
            self.libraries.abstract(value)
            if is_of_library(value) and value.__module__ in sys.modules:
                self.libraries.named(sys.modules[value.__module__], frozenset({value.__name__}), self.probed)
            self.libraries.object(value, name)
            self._class(value)
            if vars(value).get("_is_protocol") is True:
                self.probed |= {name for name in vars(value) if name[0] != "_"}
                self.names |= self.probed
            for table in _OF_ENUMS & vars(value).keys() if issubclass(value, enum.Enum) else ():
                if table == "_member_map_" or not issubclass(value, enum.Flag):  # combined flags are made when used
                    self._attribute_of_class(value, name, table)
            for base in value.__mro__:  # it may be called
                if not is_of_library(base):
                    for maker in makers_of(base):
                        self.function(base.__dict__[maker], f"{name}.{maker}")
        elif isinstance(value, BAGS) or not is_of_library(type(value)):
            if self._is_new(value):
                if depth > _DEEPEST:
                    raise UnsupportedSideEffectError(
                        f"`{name}` is behind {_DEEPEST} objects in a row. Pass what is read there as arguments."
                    )
                self._object(value, name, depth)
                if isinstance(value, BaseException):
                    self._parts(value, name, kept_by_c(type(value)), depth + 1)
                if isinstance(value, enum.Enum):
                    self._attribute(value, name, "_value_", depth)
        elif isinstance(value, contextvars.ContextVar):
            if self._is_new(value):
                self.reads.contents(value, name)
                self.visit(context_value(value), f"{name}.get()", depth + 1)
        elif isinstance(value, types.CellType):
            if self._is_new(value):
                self._parts(value, name, ("cell_contents",), depth)
        else:
            if self._is_new(value):
                self.reads.contents(value, name)
                self.libraries.object(value, name)
                self._of_library(value, name, depth, inside)
                for held in value.values() if isinstance(value, contextvars.Context) else ():
                    self.visit(held, f"{name}[...]", depth + 1)
                if isinstance(value, (dt.datetime, dt.time)):
                    self.visit(value.tzinfo, f"{name}.tzinfo", depth + 1)
                if is_array(value) and value.dtype.hasobject and value.size <= MOST_ITEMS:
                    for item in value.ravel().tolist():
                        self.visit(item, f"{name}[...]", depth)
                elif table_of(value) is None:  # C calls it: a key of `functools.cmp_to_key`
                    for held in gc.get_referents(value):
                        if isinstance(held, (types.FunctionType, types.MethodType)):
                            self.function(held, name)
            if hasattr(value, "__wrapped__"):
                self.function(value, name)

    def _parts(self, value: Any, name: str, attributes: Iterable[str], depth: int = 0) -> None:
        """Note attributes of an object that C keeps."""
        place = self.reads.place(value, "object", name, "attr")
        for attribute in attributes:
            item = place.look(attribute)
            self.reads.add(place, attribute, item)
            self.visit(item, f"{name}.{attribute}", depth)

    def _of_library(self, value: Any, name: str, depth: int, inside: int) -> None:
        """Note the attributes of an object of a library's class: each may be an option."""
        target = referent(value)
        if target is not None:
            self.visit(target, name, depth)
        for logger in loggers_of(value):
            place = self.reads.place(logger.__dict__, "dict", f"logger {logger.name}", "attr")
            for attribute in ("level", "disabled", "parent"):
                self.reads.add(place, attribute, logger.__dict__[attribute])
            manager = vars(logger.manager)  # `logging.disable`
            self.reads.add(self.reads.place(manager, "dict", "logging", "attr"), "_disable", manager["_disable"])
            if logger is value or self._is_new(logger):
                self._object(logger, f"logger {logger.name}", depth)  # further attributes that the program names
        table = table_of(value)
        if type(table) is not dict or inside > _DEEPEST_IN_LIBRARY or not keeps_options(type(value)):
            return
        if isinstance(value, torch.optim.Optimizer):
            self._objects.append((value, name, depth, set()))
            return
        place = self.reads.place(table, "dict", name, "attr")
        place.keys = tuple(table)
        for attribute, item in [*table.items()]:
            self.reads.add(place, attribute, item)
            self.visit(item, f"{name}.{attribute}", depth + 1, inside + 1)

    def _object(self, value: Any, name: str, depth: int) -> None:
        if not isinstance(value, threading.local):
            self.reads.shape(value)
        self._objects.append((value, name, depth, set()))
        self._class(type(value))

    def _class(self, cls: type) -> None:
        """Look later at the methods and options of a class that code names, and at its special methods."""
        for base in cls.__mro__:
            if not is_of_library(base) and self._is_new(base):
                self._objects.append((base, base.__name__, 0, set()))
                self._class(type(base))

    def _class_of_module(self, cls: type) -> None:
        """Note the methods that code gets past a module: special methods, and methods that ran."""
        bases = [base for base in cls.__mro__ if not is_of_library(base)]
        names = SPECIAL.union(*map(self._that_ran, bases))
        for base in bases:
            self._class_table(base).lacks(names, base.__dict__)
            for name in in_order(names.intersection(base.__dict__).union(special_names(base))):
                self._attribute_of_class(base, base.__name__, name)
            self._class(type(base))

    def attribute_of_class(self, cls: type, name: str) -> None:
        """Note an attribute of the class that was read on an instance."""
        for base in cls.__mro__:
            if name in base.__dict__:
                is_option = (id(base), name) not in Replacements.names and isinstance(base.__dict__[name], _OPTIONS)
                if is_option or not is_of_library(base):
                    self._attribute(base, base.__name__, name)
                return
            if not is_of_library(base):
                self._class_table(base).lacks((name,))

    def _objects_again(self) -> bool:
        """Look at objects under the names that came since the last time. Returns whether any attribute was new."""
        is_new = False
        before = self._under
        names, probed = frozenset(self.names), frozenset(self.probed)
        now = self._under = NamesMet(names, probed, self.makes_up_names, len(self._objects))
        fresh = NamesMet(names - before.names, probed - before.probed)
        first = before.objects if now.makes_up_names == before.makes_up_names else 0  # that was not looked at yet
        for index in range(0 if fresh.names or fresh.probed else first, now.objects):
            value, name, depth, done = self._objects[index]
            under = fresh if index < first else now
            if isinstance(value, type):
                names = self._attributes_of(value)
                names = names if type(value) is type else names | self._attributes_of(type(value))
                new = names & under.names
                if not is_of_library(value):
                    self._class_table(value).lacks(under.probed, value.__dict__)
                if under is now:
                    self._class_table(value).lacks(SPECIAL, value.__dict__)
                    options = values_of(value) if self.makes_up_names else ()
                    new = new.union(special_names(value), self._that_ran(value), options)
                    goes_through = not now.names.isdisjoint(_GO_THROUGH)
                    if (goes_through or self.makes_up_names) and not is_of_library(value):
                        self._class_table(value).keys = tuple(value.__dict__)
                        new = new.union(name for name in value.__dict__ if goes_through and name[:2] != "__")
            else:
                new = self._names_in_object(value, under)
            new -= done
            there = self._there(value, new)
            if len(there) < len(new):
                missing = new - there
                done |= missing
                if isinstance(value, type):
                    self._class_table(value).lacks(missing)
                elif (table := table_of(value)) is not None:
                    self.reads.place(table, "dict", name, "attr").lacks(missing)
            for attribute in in_order(there):
                done.add(attribute)
                is_new = self._attribute(value, name, attribute, depth) or is_new
        return is_new

    def _that_ran(self, cls: type) -> list[str]:
        """The methods of a class that ran: code of libraries calls some that no code of the program names."""
        methods = [(name, item) for name, item in [*cls.__dict__.items()] if isinstance(item, CODE_OF_CLASSES)]
        return [n for n, item in methods if getattr(getattr(item, "__func__", item), "__code__", None) in self.entered]

    def _there(self, value: Any, names: frozenset[str]) -> frozenset[str] | set[str]:
        """The names in an object's or a class's own table and slots."""
        if isinstance(value, type):
            return names & value.__dict__.keys()
        if isinstance(value, threading.local):
            return names - self._attributes_of(threading.local)
        table = table_of(value)
        there = names & self._slots_of(type(value))
        return there if table is None else there | (names & table.keys())

    def _names_in_object(self, value: Any, under: NamesMet) -> frozenset[str]:
        """The attributes of an object that matter to the code that was met."""
        table = table_of(value)
        if isinstance(value, types.FunctionType):
            is_handed_on = id(value) in self._handed_on
            if self.makes_up_names and is_handed_on and type(table) is dict:
                self.reads.place(table, "dict", value.__name__, "attr").keys = tuple(table)
            own = frozenset(table or ()) if self.makes_up_names else under.names.intersection(table or ())
            return own | under.probed if is_handed_on else own
        defined = self._attributes_of(type(value))
        names = under.names if "__getattr__" in defined else defined & under.names | under.probed
        if self.makes_up_names:
            names |= self._slots_of(type(value))
        if table is None:
            return names
        if self.makes_up_names or isinstance(value, BAGS) or self._keeps_options(type(value)):
            if isinstance(value, threading.local):
                ask = functools.partial(names_in_own, value)
                self.reads.ask(ask, "a thread's own attributes", ask)
            elif type(table) is dict:
                self.reads.place(table, "dict", type(value).__name__, "attr").keys = tuple(table)
            if isinstance(value, torch.optim.Optimizer) and not self.makes_up_names:
                return names | self.libraries.options_of_optimizer(table, under.names)
            return names.union(table)
        return names | under.names.intersection(table)

    def _attribute(self, value: Any, name: str, attribute: str, depth: int = 0) -> bool:
        if isinstance(value, type):
            return self._attribute_of_class(value, name, attribute)
        table = table_of(value)
        if table is not None and attribute in table and not isinstance(value, threading.local):
            place = self.reads.place(table, "dict", name, "attr")
            item = table[attribute]
            for base in type(value).__mro__:  # a property of that name would hide the attribute
                if not is_of_library(base) and attribute not in base.__dict__:
                    self._class_table(base).lacks((attribute,))
        else:
            place = self.reads.place(value, "object", name, "attr")
            item = place.look(attribute)
        self.reads.add(place, attribute, item)
        self.visit(item, f"{name}.{attribute}", depth + 1)
        return True

    def _attribute_of_class(self, cls: type, name: str, attribute: str) -> bool:
        item = cls.__dict__[attribute]
        is_code = isinstance(item, CODE_OF_CLASSES)
        if attribute.startswith("__") and not is_code and attribute not in SPECIAL:
            return False
        self.reads.add(self._class_table(cls), attribute, item)
        (self.function if is_code else self.visit)(item, f"{name}.{attribute}")
        return True

    def _class_table(self, cls: type) -> ReadSite:
        """The dict behind a class's `__dict__`; CPython counts its writes."""
        if cls not in self._class_tables:
            self._class_tables[cls] = self.reads.place(dict_of_class(cls), "dict", cls.__name__, "attr")
        return self._class_tables[cls]

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True


LOOKS_UP = (torch.Tensor.__hash__.__code__, torch.utils.weak.WeakIdRef.__hash__.__code__)  # tensors in dicts and sets
_OF_ENUMS = {"_member_map_", "_value2member_map_"}
_NAMES = {"__module__", "__name__", "__qualname__"}
_GO_THROUGH = {"__dict__", "dir", "getmembers", "vars"}  # code with these names may ask a class for any attribute
_OPTIONS = (types.FunctionType, bool, int, float, str, type(None))
_OF_BUILTINS = (types.BuiltinFunctionType, types.FunctionType, type)


def _is_option(value: Any) -> bool:
    return is_plain(value) or isinstance(value, CONTAINERS)


def _is_users(function: types.FunctionType) -> bool:
    """Whether a function is of no library; one made by `exec` may be of no module at all."""
    module = function.__globals__.get("__name__")
    return not (function.__code__.co_filename.startswith("<eval_with_key>") if module is None else is_outside(module))
