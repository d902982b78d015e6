"""Containers of arguments and results as data. A loaded artifact has no classes of the user's, so it makes stand-ins.

A named tuple becomes one of the same name and fields, a dataclass an object with the same attributes, a registered
kind of dict (the outputs of Hugging Face's models) a dict whose items are attributes too.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any

import torch

from ..errors import ArtifactError
from ..frontend.tree import LEAF, Tree
from ..graph.spelling import is_name
from ..serialize.values import Reader, Writer, checked, described

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
def _record(name: str, fields: tuple[str, ...]) -> type:
    return type(name, (Record,), {"_fields": fields})


@functools.cache
def _named_tuple(name: str, fields: tuple[str, ...]) -> Any:
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
            raise ArtifactError(f"an artifact can't hold {what}: {cls!r} has fields that are no Python names")
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
            raise ArtifactError("a dict whose keys and values differ in number")
        kind = "dict"
    elif kind in ("namedtuple", "dataclass"):
        context = tuple(checked(name, str) for name in checked(data["fields"], list))
        name = checked(data["name"], str)
        good = all(is_name(n) and not n.startswith("_") for n in context) and is_name(name)
        if not good or len(set(context)) != len(context) or len(context) != len(children):
            raise ArtifactError("a container with fields that are no Python names")
        cls = (_named_tuple if kind == "namedtuple" else _record)(name, context)
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
