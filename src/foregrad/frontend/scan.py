"""What functions can see, found from their code without running it: globals, closure cells, options of objects.

`scan(function, reads)` walks from a callable through every function that its code names (in globals, cells,
defaults, attributes of modules and classes) and notes each name's value in `Reads`. A name in code that did not run
is noted as well: the price is a capture too many, never a wrong result. Attributes of plain objects are noted when
any code that was found names them; when some code makes names up (`getattr`, `vars`, `__dict__`), all attributes of
those objects are that code can get at directly.

Known weaknesses: what the standard library, NumPy and PyTorch keep in their own globals is not looked at, nor what C
extensions, files, clocks and the environment hold.
"""

from __future__ import annotations

import dis
import functools
import itertools
import sys
import types
from typing import Any

import torch

from .reads import ABSENT, Expected, Reads, is_plain

__all__ = ["Scan"]

_LIBRARIES = (
    "torch numpy foregrad torchgen functorch sympy pytest _pytest pluggy hypothesis coverage IPython ipykernel rich "
    "huggingface_hub httpx httpx2 httpcore httpcore2 requests urllib3 idna certifi anyio yaml tqdm filelock packaging "
    "safetensors tokenizers regex PIL jinja2 typing_extensions"
)
_OUTSIDE = set(sys.stdlib_module_names) - {"__main__"} | set(_LIBRARIES.split())
_NAMES_ANYTHING = {"getattr", "vars", "__dict__", "__getattribute__", "attrgetter", "asdict", "fields", "to_dict"}
_MAKERS = {"__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__setstate__", "__del__"}
_MOST_FUNCTIONS = 20_000
_LOADS = {dis.opmap[name] for name in ("LOAD_GLOBAL", "LOAD_NAME") if name in dis.opmap}
_GLOBAL_SHIFT = 1 if sys.version_info >= (3, 11) else 0


def is_outside(module: Any) -> bool:
    """Whether a module's name says that its globals are not the user's."""
    return not isinstance(module, str) or module.partition(".")[0] in _OUTSIDE


@functools.lru_cache(maxsize=4096)
def _names_of(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """(globals that code loads, attribute names and strings in it), with all functions made in it."""
    loaded: set[str] = set()
    others: set[str] = set(code.co_names)
    extended = 0
    text = code.co_code
    for at in range(0, len(text), 2):
        op, argument = text[at], text[at + 1] | extended
        extended = argument << 8 if op == dis.EXTENDED_ARG else 0
        if op in _LOADS:
            index = argument >> _GLOBAL_SHIFT if dis.opname[op] == "LOAD_GLOBAL" else argument
            loaded.add(code.co_names[index])
    for constant in code.co_consts:
        if isinstance(constant, str) and constant.isidentifier():
            others.add(constant)
        elif isinstance(constant, types.CodeType):
            inner = _names_of(constant)
            loaded |= inner[0]
            others |= inner[1]
    return frozenset(loaded), frozenset(others)


class Scan:
    """One walk: `function(f)` adds a callable that may run; `finish()` follows everything to its end."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self.names: set[str] = set()
        self._called: set[str] = set()  # the names in code at most one method away from what was given
        self._rank = 0  # how many methods lie between what was given and what is being looked at
        self._functions: list[tuple[types.FunctionType, int]] = []
        self._seen: dict[int, Any] = {}  # by id; the values keep the ids theirs
        self._objects: list[
            tuple[Any, str, int, int, set[str]]
        ] = []  # (object or class, name, depth, rank, names done)
        self.modules: dict[int, tuple[torch.nn.Module, str]] = {}
        self._count = 0
        self._named = 0  # how many of `modules` are in `_paths`
        self._paths: dict[int, str] = {}
        self._attributes: dict[type, frozenset[str]] = {}

    @property
    def module_names(self) -> dict[int, str]:
        """By id: what people call a module that was found or is part of one, `model.layers.0`."""
        if self._named < len(self.modules):
            for root, prefix in itertools.islice(self.modules.values(), self._named, None):
                for path, module in root.named_modules(prefix=prefix):
                    self._paths.setdefault(id(module), path)
            self._named = len(self.modules)
        return self._paths

    # ---------------------------------------------------------------- callables

    def function(self, value: Any, name: str = "") -> None:
        """A callable that may run."""
        if isinstance(value, functools.partial):
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
            self.function(value.__func__, name)
        elif isinstance(value, property):
            for part in (value.fget, value.fset):
                self.function(part, name)
        elif isinstance(value, functools.cached_property):
            self.function(value.func, name)
        elif isinstance(value, types.FunctionType):
            if not self._is_new(value):
                return
            if not is_outside(value.__globals__.get("__name__")):
                self._functions.append((value, self._rank))
                return
            if value.__closure__:
                self._cells(value)  # a decorator of theirs around a function of the user's
            self.function(getattr(value, "__wrapped__", None), name)
        elif hasattr(value, "__wrapped__"):
            self.visit(value.__wrapped__, name)

    def finish(self) -> None:
        """Follow everything found so far to its end."""
        while True:
            while self._functions:
                function, self._rank = self._functions.pop()
                self._open(function)
            if not self._objects_again():
                return

    def _open(self, function: types.FunctionType) -> None:
        self._count += 1
        if self._count > _MOST_FUNCTIONS:
            return
        loaded, others = _names_of(function.__code__)
        self.names |= others
        if self._rank <= 1:
            self._called |= others
        namespace = function.__globals__
        place = self.reads.place(namespace, "dict", "", "key")
        for name in loaded:
            if name in namespace:
                value = namespace[name]
                self.reads.add(place, name, value)
                if isinstance(value, types.ModuleType):
                    self._module_names(value, others)
                else:
                    self.visit(value, name)
        self._cells(function, others)
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

    def _cells(self, function: types.FunctionType, names: frozenset[str] = frozenset()) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = self.reads.place(cell, "object", name, "self")
            try:
                value = cell.cell_contents
            except ValueError:
                value = ABSENT
            if self.reads.add(place, "cell_contents", value):
                if isinstance(value, types.ModuleType):
                    self._module_names(value, names)
                self.visit(value, name)

    def _module_names(self, module: types.ModuleType, names: frozenset[str]) -> None:
        """What code names in a module that it imported."""
        if is_outside(module.__name__):
            return
        place = self.reads.place(vars(module), "dict", module.__name__, "attr")
        for name in names & vars(module).keys():
            value = vars(module)[name]
            if self.reads.add(place, name, value):
                if isinstance(value, types.ModuleType):
                    self._module_names(value, names)
                else:
                    self.visit(value, f"{module.__name__}.{name}")

    # ---------------------------------------------------------------- values

    def visit(self, value: Any, name: str, depth: int = 0) -> None:
        """A value that code can get at: go on from it. `depth`: how many objects it was reached through."""
        if is_plain(value) or isinstance(value, (torch.Tensor, types.ModuleType, types.BuiltinFunctionType)):
            return
        if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
            self.function(value, name)
        elif isinstance(value, (dict, list, tuple, set)) and type(value).__module__ in ("builtins", "collections"):
            if self._is_new(value):
                self.reads.contents(value, name)
                for item in value.values() if isinstance(value, dict) else value:
                    self.visit(item, f"{name}[...]", depth)
        elif isinstance(value, torch.nn.Module):
            self.modules.setdefault(id(value), (value, name))  # their attributes are noted as they are read
        elif isinstance(value, type):
            self._class(value)
            for base in value.__mro__:  # it may be called
                if not is_outside(base.__module__):
                    for maker in _MAKERS & base.__dict__.keys():
                        self.function(base.__dict__[maker], f"{name}.{maker}")
        elif not is_outside(type(value).__module__) and self._is_new(value):
            self._objects.append((value, name, depth, self._rank, set()))
            self._class(type(value))
        elif hasattr(value, "__wrapped__"):
            self.function(value, name)

    def _class(self, cls: type) -> None:
        """The methods of a class that code names, and its special ones; its options."""
        for base in cls.__mro__:
            if not is_outside(base.__module__) and self._is_new(base):
                self._objects.append((base, base.__name__, 0, self._rank, set()))

    def attribute_of_class(self, cls: type, name: str) -> None:
        """An attribute that was read on an instance and is not the instance's own."""
        for base in cls.__mro__:
            if name in base.__dict__:
                if not is_outside(base.__module__):
                    self._attribute(base, None, base.__name__, name)
                return

    def _objects_again(self) -> bool:
        """Look at objects under names met since the last time; whether any was new."""
        found = False
        for value, name, depth, rank, done in list(self._objects):
            is_class = isinstance(value, type)
            table = vars(value) if hasattr(value, "__dict__") else None
            names = self.names
            if is_class:
                new = names.intersection(value.__dict__).union(_special_names(value))
            else:
                new = names.intersection(self._attributes_of(type(value)))
                if table is not None:
                    everything = depth == 0 and not names.isdisjoint(_NAMES_ANYTHING)
                    new.update(table if everything else names.intersection(table))
            self._rank = rank + is_class
            for attribute in sorted(new - done):
                if is_class and attribute not in self._called and _is_method(value, attribute):
                    continue
                done.add(attribute)
                found = self._attribute(value, table, name, attribute, depth) or found
        return found

    def _attributes_of(self, cls: type) -> frozenset[str]:
        """What a class and those it inherits from define."""
        known = self._attributes.get(cls)
        if known is None:
            known = self._attributes[cls] = frozenset().union(*(base.__dict__ for base in cls.__mro__))
        return known

    def _attribute(self, value: Any, table: Any, name: str, attribute: str, depth: int = 0) -> bool:
        if isinstance(value, type):
            item = value.__dict__[attribute]
            if isinstance(item, (staticmethod, classmethod, property, functools.cached_property, types.FunctionType)):
                if not attribute.startswith("__") or isinstance(item, types.FunctionType):
                    self._class_item(value, name, attribute, item)
                self.function(item, f"{name}.{attribute}")
                return True
            if attribute.startswith("__"):
                return False
            self._class_item(value, name, attribute, item)
            self.visit(item, f"{name}.{attribute}")
            return True
        if table is not None and (attribute in table or not _is_slot(type(value), attribute)):
            place = self.reads.place(table, "dict", name, "attr")
            if attribute in table:
                self.reads.add(place, attribute, table[attribute])
                self.visit(table[attribute], f"{name}.{attribute}", depth + 1)
                return True
            if hasattr(type(value), attribute):
                place.items.setdefault(attribute, Expected(ABSENT))
            return False
        if _is_slot(type(value), attribute):
            place = self.reads.place(value, "object", name, "attr")
            item = place.look(attribute)
            self.reads.add(place, attribute, item)
            self.visit(item, f"{name}.{attribute}", depth + 1)
            return True
        return False

    def _class_item(self, cls: type, name: str, attribute: str, item: Any) -> None:
        place = self.reads.place(cls, "object", name, "attr")
        value = place.look(attribute)
        if isinstance(value, types.MethodType) or isinstance(item, (property, functools.cached_property)):
            return  # made anew at each look
        self.reads.add(place, attribute, value)

    def _is_new(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen[id(value)] = value
        return True


def _special_names(cls: type) -> list[str]:
    """Methods that no code has to name to run them."""
    return [name for name in cls.__dict__ if name.startswith("__") and name not in _MAKERS]


def _is_method(cls: type, name: str) -> bool:
    """Whether it is an ordinary method, which runs only where code names it."""
    return isinstance(cls.__dict__[name], types.FunctionType) and not name.startswith("__")


def _is_slot(cls: type, name: str) -> bool:
    return isinstance(getattr(cls, name, None), types.MemberDescriptorType)
