"""Nested containers to a flat list of leaves and back: tuples, lists, dicts, dataclasses, registered types.

A `Tree` is the structure without its leaves: immutable, comparable, and able to say the path of each leaf.
Dataclasses need no registration; any type registered with PyTorch's pytree works.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .._torch.pytree import registered_functions
from ..errors import UnknownLeafError
from ..graph.python_effects import Made
from ..graph.spelling import key_text, key_texts
from ..subclasses.conversion import Samples, wrap
from ..subclasses.spec import WrapperSpec, is_wrapper
from .opaque import is_number_of_numpy

__all__ = ["LEAF", "Tree", "Unwrap", "Wrap", "check_leaves", "flatten"]

Unwrap = Callable[[Any], "tuple[WrapperSpec, Sequence[torch.Tensor]] | None"]
Wrap = Callable[[WrapperSpec, "list[torch.Tensor]"], Any]
_SCALARS = (int, float, str, bool, complex, bytes, type(None))
_CONSTANTS = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Generator,
    torch.nn.Module,
    torch.SymInt,
    torch.SymFloat,
    torch.SymBool,
    enum.Enum,
    slice,
    range,
    type(Ellipsis),
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """One container: its `kind`, its type, what else is needed to build it again (`context`), and its children."""

    kind: str  # leaf, tuple, list, dict, namedtuple, dataclass, registered, wrapper
    type: Any = None
    context: Any = None
    children: tuple[Tree, ...] = ()
    size: int = 1

    def unflatten(self, leaves: list[Any], wrap: Wrap = wrap) -> Any:
        """The container with these leaves in it; `wrap` makes wrapper subclasses."""
        return self._build(iter(leaves), wrap)

    def _build(self, leaves: Iterator[Any], wrap: Wrap) -> Any:
        if self.kind == "leaf":
            return next(leaves)
        items = [child._build(leaves, wrap) for child in self.children]
        if self.kind == "wrapper":
            return wrap(self.context, items)
        if self.kind == "list":
            return items
        if self.kind == "tuple":
            return tuple(items)
        if self.kind == "dict":
            return self.type(zip(self.context, items, strict=True))
        if self.kind == "namedtuple":
            return self.type(*items)
        if self.kind == "structseq":
            return self.type(items)
        if self.kind == "dataclass":
            return _make_dataclass(self.type, self.context, items)
        functions = registered_functions(self.type)
        assert functions is not None
        return functions[1](items, self.context)

    def types(self) -> set[type]:
        """The classes of the containers."""
        found = set() if self.type is None else {self.type}
        return found.union(*(child.types() for child in self.children))

    def wrappers(self, first: int = 0) -> Iterator[tuple[int, WrapperSpec]]:
        """The wrapper subclasses, each with the number of its first leaf, where that of the first of all is `first`."""
        if self.kind == "wrapper":
            yield first, self.context
            return
        for child in self.children:
            yield from child.wrappers(first)
            first += child.size

    def paths(self, prefix: str) -> list[str]:
        """For each leaf, the expression that reaches it from a variable called `prefix`."""
        if self.kind == "leaf":
            return [prefix]
        if self.kind == "wrapper":
            steps = self.context.paths()
        elif self.kind == "dict":
            steps = [f"[{text}]" for text in key_texts(self.context)]
        elif self.kind in ("namedtuple", "dataclass"):
            steps = [f".{name if name.isidentifier() else key_text(name)}" for name in self.context]
        else:
            steps = [f"[{index}]" for index in range(len(self.children))]
        return [path for step, child in zip(steps, self.children, strict=True) for path in child.paths(prefix + step)]


LEAF = Tree("leaf")


def _make_dataclass(cls: Any, names: tuple[str, ...], values: list[Any]) -> Any:
    base: Any = types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object
    instance = base.__new__(cls)  # not through __init__, which may compute or refuse
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


def _open(value: Any) -> tuple[str, Any, Any, list[Any]] | None:
    cls = type(value)
    if cls is tuple:
        return "tuple", tuple, None, list(value)
    if cls is list:
        return "list", list, None, value
    if cls is dict or cls is collections.OrderedDict:
        return "dict", cls, tuple(value), list(value.values())
    if cls is Made:
        return "dataclass", value.cls, tuple(value.attributes), list(value.attributes.values())
    if cls is torch.Size or isinstance(value, torch.Tensor):
        return None
    functions = registered_functions(cls)
    if functions is not None:
        children, context = functions[0](value)
        return "registered", cls, context, list(children)
    if issubclass(cls, tuple):
        if hasattr(cls, "_fields"):
            return "namedtuple", cls, cls._fields, list(value)
        if hasattr(cls, "n_sequence_fields"):
            return "structseq", cls, None, list(value)
    if dataclasses.is_dataclass(cls):
        names = tuple(f.name for f in dataclasses.fields(cls) if hasattr(value, f.name))
        return "dataclass", cls, names, [getattr(value, name) for name in names]
    return None


def flatten(value: Any, unwrap: Unwrap | None = None) -> tuple[list[Any], Tree]:
    """The leaves of a nested container, in order, and its structure.

    `unwrap` gives the plain tensors of wrapper subclasses, or None for one that is a leaf; see `Samples`.
    """
    leaves: list[Any] = []
    return leaves, _flatten(value, leaves, unwrap or Samples())


def _flatten(value: Any, leaves: list[Any], unwrap: Unwrap) -> Tree:
    opened = _open(value)
    if opened is None:
        unwrapped = unwrap(value) if is_wrapper(value) else None
        if unwrapped is not None:
            spec, parts = unwrapped
            leaves += parts
            return Tree("wrapper", spec.cls, spec, (LEAF,) * spec.count, spec.count)
        leaves.append(value)
        return LEAF
    kind, cls, context, items = opened
    children = tuple(_flatten(item, leaves, unwrap) for item in items)
    return Tree(kind, cls, context, children, sum(child.size for child in children))


def check_leaves(leaves: list[Any], paths: list[str], what: str) -> None:
    """Raise `UnknownLeafError` for a leaf that is neither a tensor nor a plain value."""
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, (torch.Tensor, *_SCALARS, *_CONSTANTS, torch.Size)) or is_number_of_numpy(leaf):
            continue
        cls = type(leaf)
        raise UnknownLeafError(
            f"{what} `{path}` is a {cls.__module__}.{cls.__qualname__}, which is neither a tensor, a plain value nor a "
            "container foregrad can look into. If it holds tensors, register it with "
            f"torch.utils._pytree.register_pytree_node({cls.__name__}, flatten, unflatten) or make it a dataclass; "
            "otherwise pass it by closure."
        )
