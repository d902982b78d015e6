"""Signatures as data and back, by the types of their fields: one rule for every class that a signature holds.

An object is `{"is": class name, field: value, ...}` without the fields that have their defaults. Only the classes
listed here can be named, and each field must be of the type that the class says.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from typing import Any

from ..errors import ArtifactError
from ..frontend.tree import Tree
from ..graph import effect_log, effects, signature, slots
from ..graph.meta import TensorSpec
from ..serialize.values import Reader, Writer, checked
from ..tracing.derivatives.resumable_trace import ValueRef
from .containers import tree_from, tree_to


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """Source of an input that the artifact holds: a parameter, a buffer or a constant, by its name."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """Source of an input that each call passes by name: a tensor that the function closed over."""

    name: str


# Format 1 has the names that these classes had when it was made.
_FORMAT_NAMES = {"Reach": signature.GradientPaths, "Place": ValueRef}
# Three classes were one each; what is written is the last.
_FORMAT_NAMES |= dict.fromkeys(("GraphOutput", "InputOutput", "AliasOutput"), effect_log.Handle)


def _classes() -> dict[str, type]:
    class_by_name: dict[str, type] = {"Stored": Stored, "Named": Named}
    for module in (effect_log, signature, slots, effects):
        classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
        own = {name: cls for name, cls in classes.items() if cls.__module__ == module.__name__}
        class_by_name |= {name: cls for name, cls in own.items() if _is_record(cls)}
    return {name: cls for name, cls in class_by_name.items() if cls not in _FORMAT_NAMES.values()} | _FORMAT_NAMES


def _is_record(cls: type) -> bool:
    return dataclasses.is_dataclass(cls)


_CLASSES = _classes()
_NAMES = {cls: name for name, cls in _CLASSES.items()}


@functools.cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def _required(cls: Any) -> tuple[str, ...]:
    missing = dataclasses.MISSING
    fields = dataclasses.fields(cls)
    return tuple(f.name for f in fields if f.default is missing and f.default_factory is missing)


def record_to(value: Any, writer: Writer) -> Any:
    """An object of one of the classes as data; any other value as `Writer.value` gives it."""
    cls: Any = type(value)
    if cls in _NAMES:
        data: dict[str, Any] = {"is": _NAMES[cls]}
        required = _required(cls)
        for field in dataclasses.fields(cls):
            content = getattr(value, field.name)
            if field.name == "call" and cls is effect_log.ViewStep:
                content = writer.calls.setdefault(content, len(writer.calls))
            if field.name not in required:
                default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
                if type(content) is type(default) and content == default:
                    continue
            data[field.name] = record_to(content, writer)
        return data
    if isinstance(value, enum.IntEnum):
        return int(value)
    if isinstance(value, Tree):
        return {"tree": tree_to(value, writer, "its result")}
    if cls is tuple:
        return [record_to(item, writer) for item in value]
    if isinstance(value, list):
        return {"list": [record_to(item, writer) for item in value]}
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    if isinstance(value, type):
        raise ArtifactError(f"an artifact can't hold the class {value.__qualname__}")
    if getattr(value, "is_Symbol", False) is True:
        return {"expression": writer.expression(value)}
    return writer.value(value)


def record_from(data: Any, hint: Any, reader: Reader) -> Any:
    """The value of type `hint` from the data of `record_to`. Raises `ArtifactError` for any other data."""
    if hint is Any:
        return _anything(data, reader)
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if data is None else record_from(data, options[0], reader)
    if origin is tuple:
        return _tuple(data, typing.get_args(hint), reader)
    if origin is frozenset:
        (item,) = typing.get_args(hint)
        return frozenset(checked(number, item) for number in checked(data, list))
    if hint in (int, bool, str):
        return checked(data, hint)
    if hint is TensorSpec:
        if type(data) is not dict or set(data) != {"tensor"}:
            raise ArtifactError("no layout of a tensor")
        return reader.layout(data["tensor"])
    if isinstance(hint, type) and issubclass(hint, enum.IntEnum):
        return hint(checked(data, int))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _record(data, hint, reader)
    raise ArtifactError(f"a value of {hint} can't be read")


def _tuple(data: Any, hints: tuple[Any, ...], reader: Reader) -> tuple[Any, ...]:
    items = checked(data, list)
    if len(hints) == 2 and hints[1] is ...:
        return tuple(record_from(item, hints[0], reader) for item in items)
    if len(items) != len(hints):
        raise ArtifactError(f"{len(items)} values where there are {len(hints)}")
    return tuple(record_from(item, hint, reader) for item, hint in zip(items, hints, strict=True))


def _record(data: Any, base: Any, reader: Reader) -> Any:
    cls: Any = _CLASSES.get(data["is"]) if type(data) is dict else None
    if cls is None or not issubclass(cls, base):
        raise ArtifactError(f"no {base.__name__}: {str(data)[:80]}")
    hints: dict[str, Any] = _hints(cls)
    fields = {name: content for name, content in data.items() if name != "is"}
    if not fields.keys() <= hints.keys() or not fields.keys() >= set(_required(cls)):
        raise ArtifactError(f"{cls.__name__} has no fields {sorted(fields)}"[:200])
    return cls(**{name: record_from(content, hints[name], reader) for name, content in fields.items()})


def _anything(data: Any, reader: Reader) -> Any:
    if type(data) is list:  # only tuples are written as lists
        return tuple(_anything(item, reader) for item in data)
    if type(data) is dict:
        if "is" in data:
            return _record(data, object, reader)
        if "tree" in data:
            return tree_from(data["tree"], reader)
        if "expression" in data:
            return reader.expression(data["expression"])
        if "list" in data:
            return [_anything(item, reader) for item in checked(data["list"], list)]
    return reader.value(data)
