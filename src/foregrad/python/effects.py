"""Side effects of a call in Python: writes to items, attributes, cells and sequences, as an ordered list of values.

Each entry has a place (`target`) and the position of its value among the written values. A written value is an output
like any other: its leaves are tensors, numbers and constants. A leaf `Kept` stands for an object older than the call:
the very object is written; a leaf `OfArgument` for a container or object among the call's arguments.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import sys
import warnings
from collections.abc import Callable, Sequence
from types import CellType, CodeType, FrameType
from typing import Any

import torch

from .._torch.symbols import TracedSymbol, concrete, map_symbolic
from ..frontend.source import ABSENT
from ..graph.call_effects import ObjectWriter, OldObject
from ..graph.source import literal
from ..house import is_house_code
from .objects import dict_of_class


class Kept(OldObject):
    """A leaf of a written value that is one object in all calls."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def expression(self, writer: ObjectWriter) -> str:
        return writer.bind("kept", self.value)

    def __repr__(self) -> str:
        return f"Kept(a {type(self.value).__name__} at {id(self.value):#x})"  # the object's own repr is the user's code


@dataclasses.dataclass(frozen=True, slots=True)
class OfArgument(OldObject):
    """A container or object among the arguments, different in each call: by its number in the tree of the arguments;
    with `attributes`, its `__dict__`. Used as a leaf of a value, and as the target of a write.
    """

    number: int
    cls: type
    attributes: bool = False

    def expression(self, writer: ObjectWriter) -> str:
        return writer.containers[self.number]


@dataclasses.dataclass(frozen=True, slots=True)
class StatePlace:
    """A place in the state. `kind` is "item" (of a dict, a list) or "attribute", a cell's contents too. `is_array`: of
    NumPy. `dims`: the dimensions of a tensor with varying sizes.
    """

    kind: str
    target: Any
    key: Any
    path: str
    is_array: bool = dataclasses.field(default=False, compare=False)
    dims: frozenset[int] = dataclasses.field(default=frozenset(), compare=False)

    @classmethod
    def of_site(cls, site: Any, key: Any, *, is_array: bool) -> StatePlace:
        """The place of a `ReadSite`'s item."""
        kind = "item" if site.kind in ("dict", "list") else "attribute"
        return cls(kind, site.holder, key, site.path(key), is_array)

    def on(self, target: Any) -> StatePlace:
        """The place, by its class where the target is a class's table."""
        return dataclasses.replace(self, kind="attribute", target=target) if isinstance(target, type) else self

    def put(self, value: Any) -> None:
        if self.kind == "item":
            (list if isinstance(self.target, list) else dict).__setitem__(self.target, self.key, value)
        else:
            setter = type.__setattr__ if isinstance(self.target, type) else object.__setattr__
            setter(self.target, self.key, value)

    def get(self) -> Any:
        """The value there, `ABSENT` where there is none."""
        try:
            if self.kind == "item":
                is_list = isinstance(self.target, list)
                return list.__getitem__(self.target, self.key) if is_list else dict.get(self.target, self.key, ABSENT)
            return getattr(self.target, self.key)
        except (LookupError, AttributeError, ValueError):
            return ABSENT

    def now(self, taken: Any) -> Any:
        return self.get()

    @property
    def is_drawn(self) -> bool:
        return False

    @property
    def identity(self) -> tuple[int, Any]:
        """The place as `Reads` knows it."""
        target = self.target
        if isinstance(target, type):
            target = dict_of_class(target)
        return id(target), self.key


@dataclasses.dataclass(frozen=True, slots=True)
class PythonWrite:
    """A write to `target`, the object itself or an `OfArgument`; `path` is the place for people. `counts`: a number
    replaces a number, or a container replaces one of equal structure.
    """

    target: Any = dataclasses.field(repr=False)  # its own repr is the user's code
    path: str
    counts: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def is_to_argument(self) -> bool:
        return isinstance(self.target, OfArgument)

    @property
    def place(self) -> StatePlace | None:
        """The single place that the write sets."""
        return None

    @property
    def is_said(self) -> bool:
        return self.target is CONSOLE

    @property
    def is_print(self) -> bool:
        return self.is_said and getattr(self, "name", "").startswith("print")

    def line(self, writer: ObjectWriter, values: Sequence[str]) -> str:
        """The line of the rendered call, with the expressions of all written `values`."""
        raise NotImplementedError

    def _table(self, writer: ObjectWriter) -> str:
        target = self.target
        if type(target) is not OfArgument:
            return writer.bind("state", target)
        name = target.expression(writer)
        if not target.attributes:
            return name
        return f"{writer.bind('attribute_of', object.__getattribute__)}({name}, '__dict__')"

    @property
    def _class(self) -> type:
        """The class of the target."""
        target = self.target
        if type(target) is not OfArgument:
            return type(target)
        return dict if target.attributes else target.cls

    def _unbound(self, writer: ObjectWriter, method: str) -> str:
        """A method of the built-in class behind the target, even if its own class overrides it."""
        bases = (collections.OrderedDict, dict, list, collections.deque, set)
        base = next(base for base in bases if issubclass(self._class, base))
        return writer.bind(f"{base.__name__}_{method.strip('_')}", getattr(base, method))


@dataclasses.dataclass(frozen=True, slots=True)
class SetPlace(PythonWrite):
    """A place gets a value; `value` None: the place is emptied. `kind` is "item" (of a dict or list as it is stored:
    attributes of objects are items of their `__dict__`), or "attribute": of a class, in a slot, a cell's contents.
    """

    kind: str
    key: Any
    value: int | None

    @property
    def place(self) -> StatePlace | None:
        return None if self.is_to_argument else StatePlace(self.kind, self.target, self.key, self.path)

    def line(self, writer: ObjectWriter, values: Sequence[str]) -> str:
        value = None if self.value is None else values[self.value]
        if isinstance(self.target, CellType):
            contents = f"{writer.bind('cell', self.target)}.cell_contents"
            return f"del {contents}" if value is None else f"{contents} = {value}"
        table, key = self._table(writer), _spelled(writer, self.key)
        if self.kind == "attribute":
            of = type if isinstance(self.target, type) else object
            if value is None:
                return f"{writer.bind('delete_attribute', of.__delattr__)}({table}, {key})"
            return f"{writer.bind('set_attribute', of.__setattr__)}({table}, {key}, {value})"
        if value is None:
            return f"{self._unbound(writer, 'pop')}({table}, {key}, None)"
        if self._class is dict:
            return f"{table}[{key}] = {value}"
        return f"{self._unbound(writer, '__setitem__')}({table}, {key}, {value})"


@dataclasses.dataclass(frozen=True, slots=True)
class CallMethod(PythonWrite):
    """A call of a container's method without a result, with any contents. The container is the target itself or its
    content under `key`, by `kind`: "item", "attribute" or "self".
    """

    kind: str
    key: Any
    name: str
    args: tuple[int, ...]

    def line(self, writer: ObjectWriter, values: Sequence[str]) -> str:
        container = self._table(writer)
        if self.kind != "self":
            own = f"[{_spelled(writer, self.key)}]" if self.kind == "item" else f".{self.key}"
            container = f"{container}{own}"
        if self.name == "__setitem__":
            key, value = (values[at] for at in self.args)
            return f"{container}[{key}] = {value}"
        return f"{container}.{self.name}({', '.join(values[at] for at in self.args)})"


@dataclasses.dataclass(frozen=True, slots=True)
class SetItems(PythonWrite):
    """The items of a list or deque from `start` on. Negative numbers among `items` are former items: -1 the first."""

    start: int
    items: tuple[int, ...]

    def line(self, writer: ObjectWriter, values: Sequence[str]) -> str:
        sequence = self._table(writer)
        items = ", ".join(values[item] if item >= 0 else f"{sequence}[{-1 - item}]" for item in self.items)
        if issubclass(self._class, collections.deque):
            return f"{writer.bind('set_deque', put_back_deque)}({sequence}, [{items}])"
        if self._class is list:
            return f"{sequence}[{self.start}:] = [{items}]"
        return f"{self._unbound(writer, '__setitem__')}({sequence}, slice({self.start}, None), [{items}])"


@dataclasses.dataclass(frozen=True, slots=True)
class ChangeSet(PythonWrite):
    """An element is added to a set, or taken out: `method` is "add" or "discard"."""

    method: str
    value: int

    def line(self, writer: ObjectWriter, values: Sequence[str]) -> str:
        return f"{self._unbound(writer, self.method)}({self._table(writer)}, {values[self.value]})"


def _spelled(writer: ObjectWriter, key: Any) -> str:
    key = map_symbolic(key, concrete)  # the capture has decided on it: a key has a hash
    return literal(key) or writer.bind("key", key)


# ------------------------------------------------------------------------------------------- prints, logs and warnings
# A program's prints, logs and warnings: effects of a call that each compiled call says again.
#
# Each is a `CallMethod` on `CONSOLE`, with plain values. The text of any further object is made in the capture.

Said = tuple[str, tuple[Any, ...]]
"""A method of the console, and its arguments."""
Piece = tuple[str, str]
"""How the text of a value is made: conversion and specification, as in a format; or for a tensor `dtype@device`, and
the end of the text.
"""
Place = tuple[int, Any]
"""A place for text: a key of a table, by the table's id; or the `RESULT`."""
RESULT: Place = 0, None
NOTES = "_foregrad_notes"  # the only attribute of a container's stand-in
Told = Callable[[Any], Any]
"""Gives a `Text` for a value whose text each call makes, any other value as it is."""


class Text(tuple[Any, ...]):
    """A text with numbers of the call in it, in a capture: its parts (literals, and a piece for each number), and the
    numbers. A call makes the text of both: `Text(parts, numbers)`.
    """

    __slots__ = ()
    _fields = ("parts", "numbers")  # as a named tuple is taken apart

    def __new__(cls, parts: tuple[str | Piece, ...], numbers: tuple[Any, ...]) -> Any:
        left = iter(numbers)
        return "".join(part if type(part) is str else _text_of(next(left), *part) for part in parts)

    @classmethod
    def later(cls, parts: list[Any]) -> Text:
        """`parts`: literals, and pairs of a piece and its number."""
        pieces = tuple(part if type(part) is str else part[0] for part in parts)
        return tuple.__new__(cls, (pieces, tuple(part[1] for part in parts if type(part) is not str)))


class Console:
    """The target of output effects."""

    def print(self, stream: str, sep: Any, end: Any, flush: Any, *values: Any) -> None:
        print(*values, sep=sep, end=end, flush=bool(flush), file=getattr(sys, stream))

    def log(self, place: tuple[Any, ...], function: str, extra: tuple[tuple[str, Any], ...], *said: Any) -> None:
        """`place`: the logger's name, level, path and line. `said`: the message and its arguments."""
        name, level, path, line = place
        logger = logging.getLogger(name)
        logger.handle(logger.makeRecord(name, level, path, line, said[0], said[1:], None, function, dict(extra)))

    def warn(self, text: str, category: type[Warning], module: str, path: str, line: int) -> None:
        """`module`: the line's module; "": the line is the caller's of the compiled function."""
        if not module:
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and is_house_code(frame.f_code):
                frame = frame.f_back
            if frame is None:
                return
            module, path, line = frame.f_globals.get("__name__", "<string>"), frame.f_code.co_filename, frame.f_lineno
            registry = frame.f_globals.setdefault("__warningregistry__", {})
        else:
            registry = vars(sys.modules[module]).setdefault("__warningregistry__", {})
        warnings.warn_explicit(text, category, path, line, module, registry)


CONSOLE = Console()


def _text_of(value: Any, conversion: str, rest: str) -> str:
    dtype, at, device = conversion.partition("@")
    if at:
        return str(torch.tensor(value, dtype=getattr(torch, dtype), device=device))[:-1] + rest
    return format(repr(value) if conversion == "r" else value, rest)


def print_of(
    told: Told, values: tuple[Any, ...], sep: Any = None, end: Any = None, file: Any = None, flush: Any = False
) -> Said | None:
    """A `print`; None where no call could do it again."""
    stream = "stderr" if file is sys.stderr and file is not sys.stdout else "stdout"
    if file not in (None, sys.stdout, sys.stderr) or any(type(v) not in _SPELLED for v in (sep, end, flush)):
        return None
    return "print", (stream, sep, end, flush, *(_value(told(value)) for value in values))


def log_of(told: Told, record: logging.LogRecord, logger: logging.Logger) -> Said | None:
    """A record that is logged; None where no call could log it again."""
    others = vars(record).keys() - vars(logging.makeLogRecord({})).keys()
    extra = tuple((name, value) for name, value in vars(record).items() if name in others)
    is_whole = all(_is_number(value) for _, value in extra) and logging.getLogger(record.name) is logger
    if not is_whole or record.exc_info or record.stack_info:
        return None
    args, message = record.args or (), str(record.msg)
    if type(args) is tuple and all(map(_is_said_as_it_is, args)):
        args = tuple(map(_value, args))
    elif type(record).getMessage is not logging.LogRecord.getMessage:
        return None
    else:
        args, message = (), message % args  # without arguments it is no format
    place = record.name, record.levelno, record.pathname, record.lineno
    return "log", (place, record.funcName, extra, message if args else told(message), *args)


def warn_of(
    message: Any, category: Any, stacklevel: int, frame: FrameType | None, *, outermost: CodeType
) -> Said | None:
    """A `warnings.warn` by the code of a frame; None where no call could do it again. `outermost` calls the program."""
    text = message if type(message) is Text else str(message)
    if isinstance(message, Warning):
        category = type(message) if message.args == (text,) else None
    elif category is None:
        category = UserWarning
    is_outside = False
    for _ in range(max(stacklevel, 1) - 1):
        if is_outside or frame is None:
            return None  # a frame above the compiled function does not belong to the program
        code, frame = frame.f_code, frame.f_back
        while frame is not None and not is_outside:
            back = frame.f_back
            if is_house_code(frame.f_code):
                is_outside = frame.f_code is outermost
            elif frame.f_code is _CALLS_AGAIN and back is not None and back.f_code is code:
                back = back.f_back  # a function of PyTorch's that the capture's mode has called again
            else:
                break
            frame = back
    if category is None or frame is None:
        return None
    if is_outside:
        return "warn", (text, category, "", "", 0)
    module = str(frame.f_globals.get("__name__"))
    is_known = vars(sys.modules.get(module, sys)) is frame.f_globals
    return ("warn", (text, category, module, frame.f_code.co_filename, frame.f_lineno)) if is_known else None


def would_raise(said: tuple[Any, ...]) -> bool:
    """Whether a warning is an error by the filters in force; without a text: whether some text would be."""
    return action_for(said) == "error"


def action_for(said: tuple[Any, ...]) -> str:
    """The action of the filters in force for a warning."""
    text, category, module, _, line = said
    for action, message, kind, at, number in warnings.filters:
        is_meant = message is None or (text is None and action == "error")
        if message is not None and text is not None:
            is_meant = message == text if isinstance(message, str) else bool(message.match(text))
        if is_meant and issubclass(category, kind) and (at is None or at.match(module)) and number in (0, line):
            return action
    return str(vars(warnings)["defaultaction"])


def warnings_recorded() -> list[Any] | None:
    """The list that warnings come to, as within `catch_warnings(record=True)`."""
    found = getattr(vars(warnings).get("_showwarnmsg_impl"), "__self__", None)
    return found if isinstance(found, list) else None


def _value(value: Any) -> Any:
    """A printed value in its present state: numbers stay numbers of the call, also in lists and tuples."""
    if type(value) in (list, tuple) and _is_said_as_it_is(value):
        return type(value)(value)
    return value if _is_number(value) or type(value) is Text else str(value)


def _is_said_as_it_is(value: Any) -> bool:
    return _is_number(value) or (type(value) in (list, tuple) and all(map(_is_number, value)))


def _is_number(value: Any) -> bool:
    return type(value) in _NUMBERS or isinstance(value, (torch.SymInt, TracedSymbol))


_CALLS_AGAIN = torch.overrides.handle_torch_function.__code__
_SPELLED = (type(None), str, bool, int)
_NUMBERS: tuple[type, ...] = (str, int, float, bool, type(None), complex)


def put_back_deque(items: Any, before: list[Any]) -> None:
    """Put what a deque had before in its place."""
    collections.deque.clear(items)
    collections.deque.extend(items, before)
