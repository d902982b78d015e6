"""Signatures and containers as data and back, by the types of their fields: one rule for every class in a signature.

An object is `{"is": class name, field: value, ...}` without the fields that have their defaults. Only the classes
listed here can be named, and each field must be of the type that the class says.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import types
import typing
from typing import Any

import torch

from ...annexes import given
from ...dispatch.guard_list import Sharing
from ...errors import ArtifactError
from ...frontend.tree import LEAF, Tree
from ...graph import effect_log, signature, slots
from ...graph.call_effects import KINDS, CallEffect, EffectTarget, kind_name
from ...graph.meta import TensorSpec
from ...graph.source import is_name
from ...tracing.derivatives.resumable_trace import ValueRef
from ..serialize.values import Reader, Writer, checked, described


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
# Three classes have become one each; the last name is written.
_FORMAT_NAMES |= dict.fromkeys(("GraphOutput", "InputOutput", "AliasOutput"), effect_log.Handle)


def _classes() -> dict[str, type]:
    class_by_name: dict[str, type] = {cls.__name__: cls for cls in (EffectTarget, Named, Sharing, Stored)}
    for module in (effect_log, signature, slots):
        classes = {name: value for name, value in vars(module).items() if isinstance(value, type)}
        own = {name: cls for name, cls in classes.items() if cls.__module__ == module.__name__}
        class_by_name |= {name: cls for name, cls in own.items() if dataclasses.is_dataclass(cls)}
    return {name: cls for name, cls in class_by_name.items() if cls not in _FORMAT_NAMES.values()} | _FORMAT_NAMES


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
    if cls in _NAMES or isinstance(value, CallEffect):
        data: dict[str, Any] = {"is": _NAMES.get(cls) or kind_name(cls)}
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
    name: Any = data.get("is") if type(data) is dict else None
    if name not in _CLASSES and name not in KINDS:
        given("effects in files")  # their modules name them
    cls: Any = _CLASSES.get(name, KINDS.get(name))
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


# -------------------------------------------------------------------- containers
# Containers of arguments and results as data. A loaded artifact has no classes of the user's, so it makes stand-ins.
#
# A named tuple becomes a named tuple with this name and these fields, a dataclass an object with these attributes, a
# registered kind of dict (the outputs of Hugging Face's models) a dict whose items are attributes too.

_DEEPEST = 32


class AttributeDict(collections.OrderedDict[str, Any]):
    """A dict whose items are attributes too; positions and slices give its values."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getitem__(self, key: Any) -> Any:
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]


class Record:
    """Stand-in for an object of a dataclass."""

    _fields: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in self._fields)})"


@functools.cache
def _record_class(name: str, fields: tuple[str, ...]) -> type:
    return type(name, (Record,), {"_fields": fields})


@functools.cache
def _named_tuple_class(name: str, fields: tuple[str, ...]) -> Any:
    return collections.namedtuple(name, fields)


def tree_to(tree: Tree, writer: Writer, what: str) -> Any:
    """The structure of a container as data; `what` names it in errors. Raises `ArtifactError` for other classes."""
    if tree.kind == "leaf":
        return None
    cls: type = tree.type
    data: dict[str, Any] = {"kind": tree.kind, "children": [tree_to(child, writer, what) for child in tree.children]}
    if tree.kind == "dict":
        data["ordered"] = tree.type is collections.OrderedDict
        data["keys"] = [writer.value(key) for key in tree.context]
    elif tree.kind in ("namedtuple", "dataclass"):
        data |= {"name": cls.__name__, "fields": list(tree.context)}
        if not all(map(is_name, (data["name"], *data["fields"]))):
            raise ArtifactError(
                f"an artifact can't hold {what}: {cls!r} has field names that are not Python identifiers"
            )
    elif cls is getattr(torch.return_types, cls.__name__, None):
        data |= {"kind": "structseq", "name": cls.__name__}
    elif tree.kind == "registered":
        keys = tree.context
        if not (issubclass(cls, dict) and isinstance(keys, (list, tuple)) and len(keys) == len(tree.children)):
            raise ArtifactError(
                f"an artifact can't hold {what}, a container of the registered class {cls.__qualname__}: "
                "take and return tuples, lists, dicts, named tuples or dataclasses."
            )
        data |= {"kind": "mapping", "name": cls.__name__, "keys": [writer.value(key) for key in keys]}
    elif tree.kind not in ("tuple", "list"):
        raise ArtifactError(f"an artifact can't hold {what}, {described(tree)}")
    return data


def tree_from(data: Any, reader: Reader, depth: int = 0) -> Tree:
    """The structure from the data of `tree_to`."""
    if data is None:
        return LEAF
    if depth > _DEEPEST:
        raise ArtifactError("containers nested too deeply")
    kind = data["kind"]
    children = tuple(tree_from(child, reader, depth + 1) for child in checked(data["children"], list))
    cls: Any = {"tuple": tuple, "list": list}.get(kind)
    context: Any = None
    if kind in ("dict", "mapping"):
        cls = AttributeDict if kind == "mapping" else collections.OrderedDict if data["ordered"] else dict
        context = tuple(reader.value(key) for key in checked(data["keys"], list))
        if len(set(context)) != len(children) or (kind == "mapping" and not all(type(k) is str for k in context)):
            raise ArtifactError("a dict with more or fewer keys than values")
        kind = "dict"
    elif kind in ("namedtuple", "dataclass"):
        context = tuple(checked(name, str) for name in checked(data["fields"], list))
        name = checked(data["name"], str)
        good = all(is_name(n) and not n.startswith("_") for n in context) and is_name(name)
        if not good or len(set(context)) != len(context) or len(context) != len(children):
            raise ArtifactError("a container with fields that are no Python names")
        cls = (_named_tuple_class if kind == "namedtuple" else _record_class)(name, context)
    elif kind == "structseq":
        cls = getattr(torch.return_types, checked(data["name"], str), None)
        if not (isinstance(cls, type) and issubclass(cls, tuple) and cls.n_sequence_fields == len(children)):  # type: ignore[attr-defined]
            raise ArtifactError("no result type of PyTorch's")
    elif cls is None:
        raise ArtifactError(f"a container of the unknown kind {str(kind)[:40]!r}")
    return Tree(kind, cls, context, children, sum(child.size for child in children))


def fields_of(value: Any) -> tuple[str, ...] | None:
    """The fields of a dataclass's object, or of a `Record`."""
    if isinstance(value, Record):
        return value._fields
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return tuple(f.name for f in dataclasses.fields(value) if hasattr(value, f.name))
    return None
