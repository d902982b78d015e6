"""What functions can see, found from their code without running it: globals, closure cells, options of objects.

`scan(function, reads)` walks from a callable through every function that its code names (in globals, cells,
defaults, attributes of modules and classes) and notes each name's value in `Reads`. Before a run that is every function
that may run; after it, `entered` tells which ones did. A name on a line that did not run is noted as well: the price is
a capture too many, never a wrong result. Attributes of plain objects are noted when any code names them, their absence
when it asks for them (`getattr`, `hasattr`, `except AttributeError`); when some code makes names up (`getattr(x,
name)`, `vars`, `__dict__`), all attributes of all objects.

Known weaknesses: what the standard library, NumPy and PyTorch keep in their own globals is not looked at, nor what C
extensions and files hold; that a function gets another `__dict__`; what methods read that made-up names call.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import operator
import os
import sys
import threading
import types
from collections.abc import Container
from typing import Any

import torch

from ..graph.spelling import in_order
from .classes import CODE_OF_CLASSES, dict_of_class, is_method, is_slot, makers_of, special_names, values_of
from .code import CodeNames, NamesMet, imported_modules, names_of
from .eager_region import is_eager_region
from .expected import ABSENT, Expected, holds_classes, is_plain
from .libraries import BAGS, asked_of_module, is_installed, is_library, is_outside, keeps_options, loggers_of, referent
from .reads import Reads, ReadSite, items_in, table_of

__all__ = ["Scan"]

_MOST_FUNCTIONS = 20_000
_DEEPEST = 100  # objects, each reached through the one before: a list linked by hand, a tree
_DEEPEST_IN_LIBRARY = 3
_MOST_ITEMS = 10_000
_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)


class Scan:
    """One walk: `function(f)` adds a callable that may run, none of `apart`; `finish()` follows all to its end."""

    def __init__(self, reads: Reads, apart: tuple[types.FunctionType, ...] = ()) -> None:
        self.reads = reads
        self.names: set[str] = set()
        self.probed: set[str] = set()  # those that may be missing where they are asked for
        self.makes_up_names = False
        self.entered: Container[types.CodeType] | None = None  # after a run: the code that ran, and no other is opened
        self.code: list[tuple[dict[str, Any], CodeNames]] = []  # globals of functions, and what their code names
        self._called: set[str] = set()  # the names in code at most one method away from what was given
        self._rank = 0  # how many methods lie between what was given and what is being looked at
        self._functions: list[tuple[types.FunctionType, int]] = []
        self._apart = frozenset(function.__code__ for function in apart)
        self._opened: set[types.CodeType] = set()
        self._seen: dict[int, Any] = {id(function): function for function in apart}  # the values keep the ids theirs
        self._objects: list[
            tuple[Any, str, int, int, set[str]]
        ] = []  # (object or class, name, depth, rank, names done)
        self.modules: dict[int, tuple[torch.nn.Module, str]] = {}
        self._namespaces: dict[int, types.ModuleType] = {}  # modules of the user's that code names, not all looked at
        self._named_in: set[tuple[int, frozenset[str]]] = set()  # by the id of a module: names that were looked up
        self._handed_on: dict[int, Any] = {}
        self._count = 0
        self._named = 0  # how many of `modules` are in `_paths`
        self._under = NamesMet()  # what objects were last looked at under
        self._settled: dict[int, set[str]] = {}  # by the id of a namespace: globals that were looked at, modules apart
        self._paths: dict[int, str] = {}
        self._attributes: dict[tuple[type, ...], frozenset[str]] = {}
        self._slots: dict[type, frozenset[str]] = {}
        self._values: dict[type, set[str]] = {}
        self._special: dict[type, list[str]] = {}

    @property
    def module_names(self) -> dict[int, str]:
        """By id: what people call a module that was found or is part of one, `model.layers.0`."""
        if self._named < len(self.modules):
            for root, prefix in itertools.islice(self.modules.values(), self._named, None):
                self._name_parts(root, prefix)
            self._named = len(self.modules)
        return self._paths

    def _name_parts(self, module: torch.nn.Module, path: str) -> None:
        if id(module) in self._paths:
            return
        self._paths[id(module)] = path
        # As they are stored: asking the module would count as the function's own reading.
        for name, part in object.__getattribute__(module, "__dict__").get("_modules", {}).items():
            if part is not None:
                self._name_parts(part, f"{path}.{name}" if path else name)

    # ---------------------------------------------------------------- callables

    def function(self, value: Any, name: str = "") -> None:
        """A callable that may run."""
        if isinstance(value, (functools.partial, functools.partialmethod)):
            if self._is_new(value):
                self.visit(value.func, f"{name}.func")
                for index, item in enumerate(value.args):
                    self.visit(item, f"{name}.args[{index}]")
                self.reads.contents(value.keywords, f"{name}.keywords")
                for key, item in value.keywords.items():
                    self.visit(item, f"{name}.{key}")
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
        elif isinstance(value, types.FunctionType):
            if not self._is_new(value) or is_eager_region(value):
                return
            if _is_users(value):
                self._functions.append((value, self._rank))
                return
            if value.__closure__:
                self._cells(value)  # a decorator of theirs around a function of the user's
            self.function(getattr(value, "__wrapped__", None), name)
        elif hasattr(value, "__wrapped__"):
            self.visit(value.__wrapped__, name)

    def finish(self) -> None:
        """Follow everything found so far to its end."""
        self._under = NamesMet()  # since the last time, code may have written to objects and namespaces
        self._settled.clear()
        while True:
            while self._functions:
                function, self._rank = self._functions.pop()
                self._open(function)
            if not (self._objects_again() or self._namespaces_whole()):
                return

    def ran(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Code that ran, wherever it is from and however it was found: what it names in its globals."""
        if code not in self._opened and code not in self._apart:
            self._rank = 1
            self._names_in(code, namespace)

    def _names_in(self, code: types.CodeType, namespace: dict[str, Any]) -> CodeNames:
        waiting = [code]
        while waiting:
            inner = waiting.pop()
            self._opened.add(inner)
            waiting += (constant for constant in inner.co_consts if isinstance(constant, types.CodeType))
        named = names_of(code, self._apart)
        others = named.others
        self.names |= others
        self.probed |= named.probed
        self.makes_up_names = self.makes_up_names or any(
            not is_library(namespace.get(root)) for root in named.made_up_of
        )
        if named.compares:
            self._comparisons(namespace, named.compares)
        if self._rank <= 1:
            self._called |= others
        self.code.append((namespace, named))
        self._globals(namespace, named.loaded, others, named.handed_on)
        if named.whole_namespace:
            self._globals(namespace, frozenset(others), others, named.handed_on)
        for module in imported_modules(named.imports, namespace):
            self._module_names(module, others)
        return named

    def _open(self, function: types.FunctionType) -> None:
        ran = self.entered is None or function.__code__ in self.entered
        if not ran and function.__code__.co_name != "__torch_dispatch__":
            return  # that one is called by torch functions in C, during which nobody is told
        self._count += 1
        if self._count > _MOST_FUNCTIONS:
            return
        code = self._names_in(function.__code__, function.__globals__)
        if function.__dict__:
            self._objects.append((function, function.__name__, 0, self._rank, set()))
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
                place.lacks(name)  # a built-in function may be hidden later, and a `NameError` be caught
                continue
            value = namespace[name]
            self.reads.add(place, name, value)
            if isinstance(value, types.ModuleType):
                self._module_names(value, others)
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
            if isinstance(value, types.ModuleType):  # of which each code names others
                self._module_names(value, frozenset() if code is None else code.others)
            elif is_handed_on:
                self._hand_on(value, name)
            if is_new and (is_handed_on or not isinstance(value, types.ModuleType)):
                self.visit(value, name)

    def _hand_on(self, value: Any, name: str) -> None:
        """A function or class that code hands on, to `getattr` perhaps: it may lack what is asked for."""
        if isinstance(value, (types.FunctionType, type)) and id(value) not in self._handed_on:
            self._handed_on[id(value)] = value
            self._objects.append((value, name, 0, self._rank, set()))

    def _module_names(self, module: types.ModuleType, names: frozenset[str]) -> None:
        """What code names in a module that it imported."""
        if is_outside(module.__name__):
            self._names_outside(module, names)
            return
        if (id(module), names) in self._named_in:
            return
        self._named_in.add((id(module), names))
        self._namespaces |= {} if is_installed(module) else {id(module): module}  # theirs have thousands of items
        place = self.reads.place(vars(module), "dict", module.__name__, "attr")
        for name in in_order(names & vars(module).keys()):
            value = vars(module)[name]
            is_new = self.reads.add(place, name, value)
            if isinstance(value, types.ModuleType):
                self._module_names(value, names)
            elif is_new:
                self.visit(value, f"{module.__name__}.{name}")

    def _namespaces_whole(self) -> bool:
        """Where code makes up names: the options in modules, under whatever names; whether any was new."""
        found = False
        while self.makes_up_names and self._namespaces:
            _, module = self._namespaces.popitem()
            place = self.reads.place(vars(module), "dict", module.__name__, "attr")
            for name, value in [*vars(module).items()]:
                if not name.startswith("__") and (is_plain(value) or isinstance(value, _CONTAINERS)):
                    found = self.reads.add(place, name, value) or found
                    self.visit(value, f"{module.__name__}.{name}")
        return found

    def _names_outside(self, module: types.ModuleType, names: frozenset[str]) -> None:
        """What of a library's own is looked at all the same: random generators, the environment."""
        if module.__name__ == "numpy" and "random" in names:
            module = module.random
        self.reads.watch_use(module, f"`{module.__name__}`")
        for text, ask in asked_of_module(module, names):
            self.reads.ask(ask, text, ask)
        if module is sys and "argv" in names:
            self.reads.add(self.reads.place(vars(sys), "dict", "sys", "attr"), "argv", sys.argv)
        if module is os and not names.isdisjoint({"environ", "getenv", "environb"}):
            table: dict[Any, Any] = os.environ._data  # type: ignore[attr-defined]
            place = self.reads.place(table, "dict", "os.environ", "item")
            for name in names:
                key = os.environ.encodekey(name)
                place.items.setdefault(key, Expected(table.get(key, ABSENT)))

    # ---------------------------------------------------------------- values

    def visit(self, value: Any, name: str, depth: int = 0) -> None:
        """A value that code can get at: go on from it. `depth`: how many objects it was reached through."""
        if isinstance(value, torch.Tensor) or (is_plain(value) and not holds_classes(value)):
            return
        if isinstance(value, types.ModuleType):
            if not is_outside(value.__name__) and self._is_new(value):  # handed on, it may be known by any name
                self._objects.append((value, value.__name__, depth, self._rank, set()))
            return
        self.reads.watch_use(value, name)
        owner = getattr(value, "__self__", None) if isinstance(value, types.BuiltinMethodType) else None
        if isinstance(owner, type) and not is_outside(owner.__module__):
            value = owner  # of a method in C that is bound to a class, as `Function.apply` is since PyTorch 2.14
        if isinstance(value, types.BuiltinFunctionType) or id(value) in self.reads.unread:
            return
        if isinstance(value, types.MappingProxyType):
            value = gc.get_referents(value)[0]
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self.function(value, name)
        elif isinstance(value, _CONTAINERS):
            if self._is_new(value):
                self.reads.contents(value, name)
                items = items_in(value)
                if len(items) <= _MOST_ITEMS:
                    for _, item in items:
                        self.visit(item, f"{name}[...]", depth)
                is_users = not is_outside(type(value).__module__) and not isinstance(value, tuple)
                if is_users or table_of(value):
                    self._object(value, name, depth)
        elif isinstance(value, operator.attrgetter):
            self.names.update(*(text.split(".") for text in value.__reduce__()[1]))
        elif isinstance(value, operator.methodcaller):
            self.names.add(value.__reduce__()[1][0])
            self._called.add(value.__reduce__()[1][0])
        elif isinstance(value, torch.nn.Module):
            self.modules.setdefault(id(value), (value, name))  # their attributes are noted as they are read
        elif isinstance(value, type):
            if is_outside(value.__module__) and value.__module__ in sys.modules:
                self._names_outside(sys.modules[value.__module__], frozenset({value.__name__}))
            self._class(value)
            for base in value.__mro__:  # it may be called
                if not is_outside(base.__module__):
                    for maker in makers_of(base):
                        self.function(base.__dict__[maker], f"{name}.{maker}")
        elif isinstance(value, BAGS) or not is_outside(type(value).__module__):
            if self._is_new(value) and depth <= _DEEPEST:
                self._object(value, name, depth)
                if isinstance(value, BaseException):
                    self.reads.contents(value, name)
        else:
            if self._is_new(value):
                self.reads.contents(value, name)
                self._of_library(value, name, depth)
            if hasattr(value, "__wrapped__"):
                self.function(value, name)

    def _of_library(self, value: Any, name: str, depth: int) -> None:
        """An object of a library's class: its attributes, each of which may be an option."""
        target = referent(value)
        if target is not None:
            self.visit(target, name, depth)
        for logger in loggers_of(value):
            place = self.reads.place(logger.__dict__, "dict", f"logger {logger.name}", "attr")
            for attribute in ("level", "disabled", "parent"):
                self.reads.add(place, attribute, logger.__dict__[attribute])
        table = table_of(value)
        if type(table) is not dict or depth > _DEEPEST_IN_LIBRARY or not keeps_options(value):
            return
        self.reads.remember(value)
        place = self.reads.place(table, "dict", name, "attr")
        place.keys = self.reads.keys_of(table)
        for attribute, item in [*table.items()]:
            self.reads.add(place, attribute, item)
            self.visit(item, f"{name}.{attribute}", depth + 1)

    def _object(self, value: Any, name: str, depth: int) -> None:
        self.reads.remember(value)
        if not isinstance(value, threading.local):
            self.reads.shape(value)
        self._objects.append((value, name, depth, self._rank, set()))
        self._class(type(value))

    def _class(self, cls: type) -> None:
        """The methods of a class that code names, and its special ones; its options."""
        for base in cls.__mro__:
            if not is_outside(base.__module__) and self._is_new(base):
                self._objects.append((base, base.__name__, 0, self._rank, set()))
                if type(base) is not type:
                    self._class(type(base))

    def attribute_of_class(self, cls: type, name: str) -> None:
        """An attribute that was read on an instance and is not the instance's own."""
        for base in cls.__mro__:
            if name in base.__dict__:
                if not is_outside(base.__module__):
                    self._attribute(base, base.__name__, name)
                return
            if not is_outside(base.__module__):
                self._class_table(base).lacks(name)

    def _objects_again(self) -> bool:
        """Look at objects under names met since the last time; whether any was new."""
        found = False
        before = self._under
        now = NamesMet.of(self.names, self.probed, self._called, makes_up_names=self.makes_up_names)
        fresh = now.since(before)
        first = before.objects if now.makes_up_names == before.makes_up_names else 0  # that was not looked at yet
        now.objects = len(self._objects)
        self._under = now
        for index in range(0 if fresh.names or fresh.probed else first, now.objects):
            value, name, depth, rank, done = self._objects[index]
            under = fresh if index < first else now
            if isinstance(value, type):
                known = self._attributes_of(value) if type(value) is type else self._attributes_of(value, type(value))
                new = known & under.names
                if id(value) in self._handed_on and not is_outside(value.__module__):
                    new |= under.probed
                if under is now:
                    new = new.union(self._special_names(value), self._values_of(value) if self.makes_up_names else ())
                self._rank = rank + 1
            else:
                new = self._names_in_object(value, under)
                self._rank = rank
            new -= done
            there = self._there(value, new)
            if len(there) < len(new):
                missing = new - there
                done |= missing
                if isinstance(value, type):
                    self._class_table(value).lacks(*missing)
                elif (table := table_of(value)) is not None:
                    self.reads.place(table, "dict", name, "attr").lacks(*missing)
            for attribute in in_order(there):
                if isinstance(value, type) and attribute not in self._called and is_method(value, attribute):
                    continue
                done.add(attribute)
                found = self._attribute(value, name, attribute, depth) or found
        return found

    def _there(self, value: Any, names: frozenset[str]) -> frozenset[str] | set[str]:
        """Those of the names that an object or a class has itself, in its table or in a slot."""
        if isinstance(value, type):
            return names & value.__dict__.keys()
        if isinstance(value, threading.local):
            return names - self._attributes_of(threading.local)
        table = table_of(value)
        there = names & self._slots_of(type(value))
        return there if table is None else there | (names & table.keys())

    def _names_in_object(self, value: Any, under: NamesMet) -> frozenset[str]:
        """The attributes of an object that matter by what is known of the code so far."""
        table = table_of(value)
        if isinstance(value, types.FunctionType):
            lacking = under.probed if id(value) in self._handed_on else frozenset()
            return (
                lacking.union(table or ()) if self.makes_up_names else under.names.intersection(table or ()) | lacking
            )
        names = self._attributes_of(type(value)) & under.names | under.probed
        if self.makes_up_names:
            names |= self._slots_of(type(value))
        if table is None:
            return names
        if self.makes_up_names or isinstance(value, BAGS):
            if type(table) is dict and not isinstance(value, threading.local):
                place = self.reads.place(table, "dict", type(value).__name__, "attr")
                place.keys = self.reads.keys_of(table)
            return names.union(table)
        return names | under.names.intersection(table)

    def _attributes_of(self, *classes: type) -> frozenset[str]:
        """What classes and those they inherit from define."""
        known = self._attributes.get(classes)
        if known is None:
            known = frozenset().union(*(base.__dict__ for cls in classes for base in cls.__mro__))
            self._attributes[classes] = known
        return known

    def _special_names(self, cls: type) -> list[str]:
        if cls not in self._special:
            self._special[cls] = special_names(cls)
        return self._special[cls]

    def _values_of(self, cls: type) -> set[str]:
        if cls not in self._values:
            self._values[cls] = values_of(cls)
        return self._values[cls]

    def _slots_of(self, cls: type) -> frozenset[str]:
        known = self._slots.get(cls)
        if known is None:
            known = frozenset(name for name in self._attributes_of(cls) if is_slot(cls, name))
            self._slots[cls] = known
        return known

    def _attribute(self, value: Any, name: str, attribute: str, depth: int = 0) -> bool:
        if isinstance(value, type):
            return self._attribute_of_class(value, name, attribute)
        table = table_of(value)
        if table is not None and attribute in table and not isinstance(value, threading.local):
            place = self.reads.place(table, "dict", name, "attr")
            item = table[attribute]
        else:
            place = self.reads.place(value, "object", name, "attr")
            item = place.look(attribute)
        self.reads.add(place, attribute, item)
        self.visit(item, f"{name}.{attribute}", depth + 1)
        return True

    def _attribute_of_class(self, cls: type, name: str, attribute: str) -> bool:
        item = cls.__dict__[attribute]
        is_code = isinstance(item, CODE_OF_CLASSES)
        if attribute.startswith("__") and not isinstance(item, types.FunctionType):
            if is_code:
                self.function(item, f"{name}.{attribute}")
            return is_code
        self.reads.add(self._class_table(cls), attribute, item)
        if is_code:
            self.function(item, f"{name}.{attribute}")
        else:
            self.visit(item, f"{name}.{attribute}")
        return True

    def _class_table(self, cls: type) -> ReadSite:
        """The dict behind a class's `__dict__`, whose writes CPython counts."""
        return self.reads.place(dict_of_class(cls), "dict", cls.__name__, "attr")

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True


def _is_users(function: types.FunctionType) -> bool:
    """Whether a function is of no library; one made by `exec` may be of no module at all."""
    module = function.__globals__.get("__name__")
    return not (function.__code__.co_filename.startswith("<eval_with_key>") if module is None else is_outside(module))
