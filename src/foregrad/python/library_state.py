"""State in modules: the program's own, and libraries' own as far as code that ran names it.

- Names that code looks up in a module, in modules inside and, of a library, in classes and objects there: options, and
  functions that may be replaced.
- Plain globals and context variables named by a library's code that ran; of functions of the standard library that the
  program called, tables too.
- Results of functions without arguments, chosen by their names (`is_...`, `get_...`): each call asks them again.

Known weaknesses: other tables that a library's code names (a registry, a cache), functions that ask with arguments,
and methods of classes.
"""

from __future__ import annotations

import abc
import contextvars
import decimal
import dis
import enum
import functools
import logging
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from ..frontend.source import ABSENT, reference, table_of
from ..frontend.values import is_plain
from ..graph.source import in_order
from ..house import is_house_code
from ..locks import Replacements
from ._torch.check_tree import functions_of_c
from .code import instructions_of, look_at
from .expected import Expected
from .holders import read_decimals
from .libraries import FIXED, is_installed, is_outside, is_standard
from .objects import attributes_of, dict_of_class
from .opaque import asked_of
from .reads import Reads

_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format, torch.device)
_NUMBERS = {"e", "inf", "nan", "pi"}  # asked of `math`, they would be looked up in `torch` too
_FILLS = {"add", "append", "clear", "pop", "setdefault", "update"}
_STORE, _SET = dis.opmap["STORE_SUBSCR"], dis.opmap["STORE_GLOBAL"]
_READS_ALL = {"__getstate__", "__reduce_ex__"}  # as copies do, in C
_TELLS = re.compile(r"_?(are|get|has|is)_?|.*_enabled$")


class LibraryState:
    """The part of `scan` that is about modules. `entered` is the code that ran."""

    def __init__(self, reads: Reads, scan: Any, entered: Collection[types.CodeType]) -> None:
        self.reads, self.scan, self.entered = reads, scan, entered
        self.gone_through: set[str] = set()  # tables of the process from which code asks more than single items
        self.own: dict[int, types.ModuleType] = {}  # modules of the program's that code names
        self._done: set[tuple[int, frozenset[str]]] = set()
        self._abstract: dict[int, _Registered] = {}  # by the id of an abstract class
        self._named: dict[int, set[str]] = {}  # by a module's id: names looked up in the module
        self._objects: dict[int, tuple[Any, str, set[str]]] = {}  # objects, classes and modules; names that were asked

    def named(self, module: types.ModuleType, names: frozenset[str], probed: set[str]) -> None:
        """Code looks these names up in a module or below; `probed`: without knowing whether they exist."""
        if module.__name__.startswith("torch.ops") or (id(module), names) in self._done:
            return
        self._done.add((id(module), names))
        for known, text, ask in _SWITCHES.get(module.__name__, ()):
            if not names.isdisjoint(known):
                self.reads.ask(ask, text, ask)
        table, done = vars(module), self._named.setdefault(id(module), set())
        is_own, name = not is_outside(module.__name__), module.__name__
        if is_own and not is_installed(table):  # modules of packages have thousands of items
            self.own[id(module)] = module
        has_getattr = is_own and "__getattr__" in table
        names |= {"__getattr__"} if has_getattr else set()
        new = names - done
        done |= new
        if missing := (new if has_getattr else new & probed) - table.keys():
            self.reads.place(table, "dict", name, "attr").lacks(missing)
        if module is os and not names.isdisjoint({"environ", "getenv", "environb"}):
            self._environment(names)
        for attribute in in_order(names & table.keys()):
            value = table[attribute]
            if attribute in new and (is_own or _may_change(module, attribute, value)):
                self.reads.add(self.reads.place(table, "dict", name, "attr"), attribute, value)
            if isinstance(value, types.ModuleType):
                self.named(value, names, probed)
            elif is_own and attribute in new:
                self.scan.visit(value, f"{name}.{attribute}")
            elif attribute in new:
                self.abstract(value)
                self.object(getattr(value, "__self__", value), f"{name}.{attribute}")
        self.object(module, name)
        if module is logging:
            self.scan.visit(logging.root, "logging.root")

    def _environment(self, names: frozenset[str]) -> None:
        is_whole = "environ" in self.gone_through or type(os.environ).__iter__.__code__ in self.entered
        table: dict[Any, Any] = vars(os.environ)["_data"]
        place = self.reads.place(table, "dict", "os.environ", "item")
        place.keys = tuple(table) if is_whole else place.keys
        for key in {*map(os.environ.encodekey, names), *(table if is_whole else ())}:
            place.items.setdefault(key, Expected(table.get(key, ABSENT)))

    def modules(self, imported: dict[str, types.ModuleType], missing: set[str]) -> None:
        """Code imports `imported`, and would import `missing`."""
        is_whole = "modules" in self.gone_through
        place = self.reads.place(sys.modules, "dict", "sys.modules", "item")
        place.lacks(missing)
        place.keys = tuple(sys.modules) if is_whole else place.keys
        for name, module in (sys.modules.copy() if is_whole else imported).items():
            if is_whole or not is_outside(name):
                self.reads.add(place, name, module)

    def abstract(self, value: Any) -> None:
        """An abstract class: `isinstance` asks its registered classes."""
        if isinstance(value, abc.ABCMeta) and value is not abc.ABC and id(value) not in self._abstract:
            ask = self._abstract[id(value)] = _Registered(value)
            self.reads.ask(ask, f"classes registered with {value.__name__}", ask)

    def object(self, value: Any, name: str) -> None:
        """A library's object, class or module, with attributes that code may name."""
        of = value if isinstance(value, type) else type(value)
        root = str(of.__module__).partition(".")[0]
        if value is os.environ:
            self.gone_through.add("environ")
            self._environment(frozenset())
        elif root == "torch" or (of is not types.ModuleType and root in sys.stdlib_module_names - FIXED):
            is_known = isinstance(value, (torch.Tensor, torch.nn.Module, enum.Enum, types.FunctionType))
            if not is_known and asked_of(value) is None:
                self._objects.setdefault(id(value), (value, name, set()))

    def again(self, names: frozenset[str], probed: set[str]) -> None:
        """Code names these: look at the attributes of objects."""
        for value, name, done in [*self._objects.values()]:
            if isinstance(value, type) and (missing := probed - attributes_of(value)):
                self.reads.place(dict_of_class(value), "dict", value.__name__, "attr").lacks(missing)
            for attribute in in_order(_names_in(value, names) - done):
                done.add(attribute)
                try:
                    item = getattr(value, attribute)
                except Exception:  # noqa: S112 (a library's own property may raise anything)
                    continue
                if is_plain(item) and not isinstance(item, _CONSTANTS):
                    ask = functools.partial(_attribute, reference(value), attribute)  # without keeping the object alive
                    self.reads.ask(ask, f"{name}.{attribute}", ask)
                elif not isinstance(item, type):
                    self.object(item, f"{name}.{attribute}")

    def ran(self, code: types.CodeType, namespace: dict[str, Any], *, has_tables: bool = False) -> None:
        """Code of a library ran: track the switches that it names, and perhaps the tables. A name that the code sets is
        no switch: it counts calls, or is made once.
        """
        is_set = _SET in code.co_code[::2]
        own = {part.value for part in instructions_of(code) if part.name == "STORE_GLOBAL"} if is_set else ()
        for name in code.co_names:
            if name in own:
                continue
            value = namespace.get(name, ABSENT)
            is_table = has_tables and type(value) in (dict, list, set)
            is_switch = (is_plain(value) and name[:2] != "__") or type(value) is contextvars.ContextVar
            if (is_switch or is_table) and not isinstance(value, _CONSTANTS):
                self.reads.add(self.reads.place(namespace, "dict", namespace["__name__"], "attr"), name, value)
                self.scan.visit(value, name)

    def options_of_optimizer(self, table: dict[str, Any], names: frozenset[str]) -> frozenset[str]:
        """The attributes of an optimizer under `names`, the program's, and names in libraries' code that ran: an
        optimizer is all Python, and `zero_grad` does not read the state.
        """
        ran = names.union(*(look_at(code).names for code in self.entered if not is_house_code(code)))
        return frozenset(table) if ran & _READS_ALL else ran.intersection(table)

    def told(self, functions: Iterable[Any]) -> None:
        """The program has called the `functions`: ask them again if they report state, and so with their questions to
        PyTorch's C++. A function of the standard library counts as a reader of the tables that it does not fill.
        """
        for function in functions:
            code = getattr(function, "__code__", None)
            if code is None:
                self._tells(function)
                continue
            if not code.co_argcount and code.co_names:
                self._tells(function)
            for asked in functions_of_c(code.co_names):
                self._tells(asked)
            if is_standard(code.co_filename):
                parts = (function.__globals__.get(name) for name in code.co_names)
                for read in (code, *(part.__code__ for part in parts if type(part) is types.FunctionType)):
                    is_filled = _STORE in read.co_code[::2] or not _FILLS.isdisjoint(read.co_names)
                    self.ran(read, function.__globals__, has_tables=not is_filled)

    def _tells(self, function: Any) -> None:
        if id(function) not in self._objects and _TELLS.match(getattr(function, "__name__", "")):
            self._objects[id(function)] = function, "", set()
            ask = functools.partial(_told, function)
            answer = ask(None)
            if answer is not ABSENT and not isinstance(answer, torch.Tensor) and Expected(answer).holds(ask(None)):
                self.reads.ask(ask, f"{function.__module__}.{function.__name__}()", ask)


def _attribute(get: Callable[[], Any], name: str, _: Any) -> Any:
    return getattr(get(), name, ABSENT)


_dump: Any = vars(abc)["_get_dump"]  # registered classes, and answers given to `isinstance`


class _Registered:
    """The classes registered with an abstract class or its subclasses, looked at anew after any registration: each
    import may register some.
    """

    def __init__(self, cls: type) -> None:
        self._get, self._found = reference(cls), 0
        self._token: Any = None

    def __call__(self, _: Any) -> int:
        if (token := abc.get_cache_token()) != self._token:
            found: set[int] = set()
            waiting, seen = [self._get()], set[int]()
            for cls in waiting:
                if cls is not None and id(cls) not in seen:
                    seen.add(id(cls))
                    own = [one() for one in _dump(cls)[0]] if isinstance(cls, abc.ABCMeta) else []
                    found.update(map(id, own))
                    waiting += [*type.__subclasses__(cls), *own]
            self._found, self._token = hash(frozenset(found)), token  # in this order, for readers on further threads
        return self._found


def _told(function: Any, _: Any) -> Any:
    """A function's result; a dict as a tuple of its items."""
    try:
        told = function()
    except Exception:  # it takes arguments, or nothing is there to be told
        return ABSENT
    return tuple(sorted(told.items())) if type(told) is dict else told


def _may_change(module: types.ModuleType, name: str, value: Any) -> bool:
    """Whether a value in a module is looked at: no constant, and nothing that captures replace."""
    is_number = module is torch and name in _NUMBERS
    is_fixed = is_number or isinstance(value, (*_CONSTANTS, types.ModuleType)) or value is sys.modules
    return not is_fixed and (id(module), name) not in Replacements.names


def _names_in(value: Any, names: frozenset[str]) -> frozenset[str]:
    """The part of `names` that an object may have attributes under."""
    table, cls = table_of(value) or {}, value if isinstance(value, type) else type(value)
    settings = table.get("_config") if isinstance(value, types.ModuleType) else None
    own = attributes_of(cls).union(table, settings if type(settings) is dict else ())
    return names if "__getattr__" in own and cls.__module__.startswith("torch.backends") else names & own


def _autocast(_: Any) -> Any:
    return tuple((torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)) for device in ("cpu", "cuda"))


_OF_AUTOCAST = set("get_autocast_dtype get_autocast_cpu_dtype get_autocast_gpu_dtype is_autocast_enabled".split())
# State that is neither an attribute nor the result of a function without arguments: names, words for people, how to
# ask.
_SWITCHES: dict[str, tuple[tuple[set[str], str, Callable[[Any], Any]], ...]] = {
    "torch": ((_OF_AUTOCAST, "the dtype of torch.autocast", _autocast),),
    "decimal": (
        ({"Decimal", "getcontext"}, "decimal.getcontext()", lambda _: read_decimals(decimal.getcontext())),
        ({"flags"}, "decimal.getcontext().flags", lambda _: tuple(decimal.getcontext().flags.values())),
    ),
}
