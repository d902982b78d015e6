"""Nested containers to a flat list of leaves and back: tuples, lists, dicts, dataclasses, registered types, objects.

A `Tree` is the structure without its leaves: immutable, comparable, and able to say the path of each leaf. Dataclasses
need no registration; any type registered with PyTorch's pytree works. `flatten` takes values alone; `open_objects` also
takes plain objects apart, and keeps the identity of containers.
"""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from .._torch.nested import registered_functions
from .._torch.ops import OPAQUE, is_opaque_value
from .._torch.wrappers import is_wrapper
from ..annexes import given
from ..errors import UnknownLeafError
from ..graph.source import a_name, key_text, key_texts
from ..house import is_house_module
from .arrays import is_array, is_number_of_numpy
from .openings import Opening, Unwrap, Wrap, new_samples, wrap

_SCALARS = (int, float, str, bool, complex, bytes, type(None))
# Their state lasts from call to call, and they refer to each other, or only operators know it: like modules, they are
# the same objects in each call.
STEPPERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler, *OPAQUE)
_CONSTANTS = (
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Generator, torch.nn.Module, torch.SymInt,
    torch.SymFloat, torch.SymBool, enum.Enum, slice, range, type(Ellipsis), type, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType,
    *(cls for classes in given("classes of constants") for cls in classes),
)  # fmt: skip


class ObjectsOpened(Protocol):
    """The module that takes plain objects apart. `look_into` gives an object's layout and its values; the layout's
    `empty(cls)` makes an object, `fill(made, values)` fills it, `steps(cls)` are the ways to the values.
    """

    def look_into(self, value: object, /) -> tuple[object, list[object]] | None: ...
    def is_plain_class(self, cls: type, /) -> bool: ...


class _NoObjects:
    def look_into(self, _: object) -> None:
        return None

    def is_plain_class(self, _: type) -> bool:
        return False


def _objects() -> ObjectsOpened:
    found: Sequence[ObjectsOpened] = given("objects taken apart")
    return found[0] if found else _NoObjects()


@dataclasses.dataclass(frozen=True, slots=True)
class Tree:
    """One container: its `kind`, its type, further facts for building it again (`context`), and its children.

    `number`: its number among the containers with kept identity; a `ref` is the container numbered `context`.
    """

    # leaf, tuple, list, dict, namedtuple, structseq, dataclass, registered, wrapper; object, partial, weakref,
    # method, function, cell, array, ref, unread
    kind: str
    type: Any = None
    context: Any = None
    children: tuple[Tree, ...] = ()
    size: int = 1
    number: int = -1

    def unflatten(self, leaves: list[Any], wrap: Wrap = wrap, made: dict[int, Any] | None = None) -> Any:
        """The container of the leaves. `wrap` makes wrapper subclasses, and arrays (of the spec None); `made` has and
        gets the containers by their numbers.
        """
        return self._build(iter(leaves), wrap, {} if made is None else made)

    def _build(self, leaves: Iterator[object], wrap: Wrap, made: dict[int, object]) -> Any:
        if self.kind == "leaf":
            return next(leaves)
        if self.kind in ("ref", "unread"):
            return made[self.context if self.kind == "ref" else self.number]
        empty = None
        if self.number >= 0:  # made first: its items may lead back to the container
            if self.kind == "object":
                empty = made[self.number] = self.context.empty(self.type)
            elif self.kind == "cell":
                empty = made[self.number] = types.CellType()
            elif self.kind in ("list", "dict"):
                empty = made[self.number] = self.type()
        items = [child._build(leaves, wrap, made) for child in self.children]
        if self.kind == "wrapper":
            return wrap(self.context, items)
        if self.kind == "array":
            made[self.number] = wrap(None, items)
            return made[self.number]
        if empty is not None:
            self._fill(empty, items)
            return empty
        built = self._built(items)
        if self.number >= 0:
            made[self.number] = built
        return built

    def _fill(self, empty: Any, items: list[object]) -> None:
        if self.kind == "object":
            self.context.fill(empty, items)
        elif self.kind == "list":
            empty.extend(items)
        elif self.kind == "cell":
            if items:
                empty.cell_contents = items[0]
        else:
            empty.update(zip(self.context, items, strict=True))

    def _built(self, items: list[Any]) -> Any:
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
        if self.kind == "weakref":
            return weakref.ref(items[0])
        if self.kind == "method":
            return types.MethodType(*items)
        if self.kind == "partial":
            function, args, kwargs = items
            return self.type(function, *args, **kwargs)
        if self.kind == "function":
            return self.context.made(items)
        functions = registered_functions(self.type)
        assert functions is not None
        return functions[1](items, self.context)

    def types(self) -> set[type]:
        """The classes of the containers."""
        found = set() if self.type is None else {self.type}
        return found.union(*(child.types() for child in self.children))

    def wrappers(self, first: int = 0) -> Iterator[tuple[int, Opening]]:
        """The wrapper subclasses, each with the number of its first leaf, where that of the first of all is `first`."""
        if self.kind == "wrapper":
            yield first, self.context
            return
        for child in self.children:
            yield from child.wrappers(first)
            first += child.size

    def paths(self, prefix: str) -> list[str]:
        """For each leaf, the expression that reaches it from a variable called `prefix`."""
        return [path for path, node in self.walk(prefix) if node.kind == "leaf"]

    def walk(self, prefix: str) -> Iterator[tuple[str, Tree]]:
        """All nodes from the node down, parents first, each with the expression that reaches the node."""
        yield prefix, self
        if not self.children:
            return
        if self.kind == "wrapper":
            steps = self.context.paths()
        elif self.kind == "object":
            steps = self.context.steps(self.type)
        elif self.kind in _STEPS:
            steps = [*_STEPS[self.kind], *(f".__closure__[{i}]" for i in range(len(self.children)))]
            steps = steps[: len(self.children)]
        elif self.kind == "dict":
            steps = [f"[{text}]" for text in key_texts(self.context)]
        elif self.kind in ("namedtuple", "dataclass"):
            steps = [f".{name if name.isidentifier() else key_text(name)}" for name in self.context]
        else:
            steps = [f"[{index}]" for index in range(len(self.children))]
        for step, child in zip(steps, self.children, strict=True):
            yield from child.walk(prefix + step)


LEAF = Tree("leaf")
_STEPS: dict[str, list[str]] = {
    "weakref": ["()"],
    "method": [".__func__", ".__self__"],
    "partial": [".func", ".args", ".keywords"],
    "function": [".__defaults__", ".__kwdefaults__", ".__dict__"],
    "cell": [".cell_contents"],
    "array": [""],
}


@dataclasses.dataclass(frozen=True, eq=False)
class _Code:
    """The parts that all functions of one `def` share."""

    code: types.CodeType
    globals: dict[str, Any]
    name: str
    qualname: str
    module: Any
    doc: Any

    def made(self, items: list[Any]) -> types.FunctionType:
        defaults, keyword_defaults, attributes, *cells = items
        function = types.FunctionType(self.code, self.globals, self.name, defaults, tuple(cells))
        function.__kwdefaults__ = keyword_defaults
        function.__qualname__, function.__module__, function.__doc__ = self.qualname, self.module, self.doc
        function.__dict__.update(attributes)
        return function


def _make_dataclass(cls: Any, names: tuple[str, ...], values: list[object]) -> Any:
    base = types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object
    instance = base.__new__(cls)  # not through __init__: it may compute or refuse
    for name, value in zip(names, values, strict=True):
        object.__setattr__(instance, name, value)
    return instance


def open_container(value: Any) -> tuple[str, Any, Any, list[Any]] | None:
    """Kind, class, context and items of a container that is no plain object; None for any other value."""
    cls = type(value)
    if cls is tuple:
        return "tuple", tuple, None, list(value)
    if cls is list:
        return "list", list, None, value
    if cls is dict or cls is collections.OrderedDict:
        return "dict", cls, tuple(value), list(value.values())
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


def is_as_opened(value: object, opened: tuple[str, object, object, list[object]] | None) -> bool:
    """Whether a container equals `open_container`'s earlier answer; a registered class may make the items."""
    now = open_container(value)
    if now is None or opened is None or now[2] != opened[2] or len(now[3]) != len(opened[3]):
        return False
    return all(
        item is before or (now[0] == "registered" and is_as_opened(item, open_container(before)))
        for item, before in zip(now[3], opened[3], strict=True)
    )


def flatten(value: object, unwrap: Unwrap | None = None) -> tuple[list[Any], Tree]:
    """The leaves of a nested container, in order, and its structure.

    `unwrap` gives the plain tensors of wrapper subclasses, or None for one that is a leaf; see `new_samples`.
    """
    leaves: list[object] = []
    return leaves, _flatten(value, leaves, unwrap or new_samples())


def _leaf(value: object, leaves: list[object], unwrap: Unwrap) -> Tree:
    unwrapped = unwrap(value) if is_wrapper(value) else None
    if unwrapped is None:
        leaves.append(value)
        return LEAF
    spec, parts = unwrapped
    leaves += parts
    return Tree("wrapper", spec.cls, spec, (LEAF,) * spec.count, spec.count)


def _flatten(value: object, leaves: list[object], unwrap: Unwrap) -> Tree:
    opened = open_container(value)
    if opened is None:
        return _leaf(value, leaves, unwrap)
    kind, cls, context, items = opened
    children = tuple(_flatten(item, leaves, unwrap) for item in items)
    return Tree(kind, cls, context, children, sum(child.size for child in children))


@dataclasses.dataclass(frozen=True, slots=True)
class Opened:
    """Values taken apart: `leaves` and `tree`, and the numbered `containers`, by number."""

    leaves: list[Any]
    tree: Tree
    containers: tuple[object, ...]


def open_objects(values: Sequence[object], instead: Callable[[object], object], unwrap: Unwrap) -> Opened:
    """The leaves of nested containers and plain objects, and the structure of the list of `values`; an object met twice
    is one. `instead(value)` gives a leaf that replaces the value, or None; `unwrap`: see `flatten`.
    """
    opener = _Opener(instead, unwrap, makes=True)
    tree = list_of([opener.open(value) for value in values])
    return Opened(opener.leaves, tree, tuple(opener.containers))


def list_of(trees: Sequence[Tree]) -> Tree:
    """The structure of a list of containers."""
    return Tree("list", list, None, tuple(trees), sum(tree.size for tree in trees))


def open_arguments(
    args: tuple[object, ...],
    kwargs: dict[str, Any],
    array: Callable[[Any], torch.Tensor | None],
    unread: Sequence[object] = (),
) -> Opened:
    """Open the arguments of a call, but for the containers that are `unread`. A stepper (see `STEPPERS`) is a leaf."""
    opener = _Opener(
        lambda value: value if isinstance(value, STEPPERS) else None,
        new_samples(),
        makes=False,
        array=array,
        unread=unread,
    )
    trees = list(map(opener.open, args))
    positional = Tree("tuple", tuple, None, tuple(trees), sum(tree.size for tree in trees))
    children = tuple(map(opener.open, kwargs.values()))
    keyword = Tree("dict", dict, tuple(kwargs), children, sum(child.size for child in children))
    tree = Tree("tuple", tuple, None, (positional, keyword), positional.size + keyword.size)
    return Opened(opener.leaves, tree, tuple(opener.containers))


_MOST_CONTAINERS = 2000  # beyond so many no further plain object is taken apart: they are a program's state


def _nothing(_: object) -> None:
    pass


def is_kept_whole(value: object) -> bool:
    """Whether an argument is told apart by its identity, and not by its value (as members of an `Enum` are). Guards
    don't keep these objects alive.
    """
    return isinstance(value, (torch.nn.Module, *STEPPERS)) and not is_opaque_value(value)


class _Opener:
    """`makes`: values made in a call, functions with variables of their own included, are to be made in each call.

    `array(value)` is the tensor over an array, or None for any other value.
    """

    def __init__(
        self,
        instead: Callable[[object], object],
        unwrap: Unwrap,
        *,
        makes: bool,
        array: Callable[[object], torch.Tensor | None] = _nothing,
        unread: Sequence[object] = (),
    ) -> None:
        self.instead, self.array, self.unread = instead, array, unread
        self.unwrap = unwrap
        self.makes = makes
        self.leaves: list[Any] = []
        self.containers: list[object] = []
        self._number: dict[int, int] = {}
        self._begun: set[int] = set()  # numbers of containers that can't be referred to before they are made

    def open(self, value: Any) -> Tree:
        cls = type(value)
        number = self._number.get(id(value))
        if number is not None and number not in self._begun:
            return Tree("ref", context=number, size=0)
        stands = None if cls in _SCALARS or issubclass(cls, torch.Tensor) else self.instead(value)
        opened = None if stands is not None or number is not None else self._look(value)
        if opened is None:
            return _leaf(value if stands is None else stands, self.leaves, self.unwrap)
        kind, cls, context, items = opened
        number = -1
        if kind not in _BY_VALUE:
            number = self._number[id(value)] = len(self.containers)
            self.containers.append(value)
            if kind not in ("object", "list", "dict", "cell"):
                self._begun.add(number)
        children = tuple(map(self.open, items))
        self._begun.discard(number)
        return Tree(kind, cls, context, children, sum(child.size for child in children), number)

    def _is_made(self, value: object) -> bool:
        return self.makes and _objects().is_plain_class(type(value))

    def _look(self, value: Any) -> tuple[str, Any, Any, list[Any]] | None:
        cls = type(value)
        if any(value is one for one in self.unread):
            return "unread", cls, None, []
        if cls is weakref.ref:
            target = value()
            # An object that nothing else holds would be gone.
            is_held = id(target) in self._number and value.__callback__ is None
            return ("weakref", cls, None, [target]) if is_held else None
        if cls is types.MethodType and (id(value.__self__) in self._number or self._is_made(value.__self__)):
            return "method", cls, None, [value.__func__, value.__self__]
        if cls is functools.partial and not value.__dict__:
            return "partial", cls, None, [value.func, value.args, value.keywords]
        if self.makes and cls is types.FunctionType and value.__closure__:
            code = _Code(
                value.__code__, value.__globals__, value.__name__, value.__qualname__, value.__module__, value.__doc__
            )
            return "function", cls, code, [value.__defaults__, value.__kwdefaults__, vars(value), *value.__closure__]
        if self.makes and cls is types.CellType:
            return "cell", cls, None, _contents(value)
        opened = None
        if cls in (list, tuple, dict) or is_leaf(value):
            opened = open_container(value)
        elif cls in _OBJECTS or registered_functions(cls) is None:
            found = _objects().look_into(value)
            opened = open_container(value) if found is None else ("object", cls, *found)
        else:
            opened = open_container(value)
        if opened is None and (over := self.array(value)) is not None:
            return "array", cls, None, [over]
        if opened is not None and opened[0] == "object" and len(self.containers) >= _MOST_CONTAINERS:
            return None
        return opened


def _contents(cell: Any) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


_OBJECTS = (collections.OrderedDict, collections.defaultdict, collections.deque)  # registered by PyTorch
_RUNS_LATER = (collections.abc.Iterator, collections.abc.Coroutine, collections.abc.AsyncIterator)
_BY_VALUE = ("tuple", "namedtuple", "structseq", "weakref", "method", "partial")


def is_leaf(leaf: object) -> bool:
    """Whether a value is a tensor or a plain value."""
    plain = isinstance(leaf, (torch.Tensor, *_SCALARS, *_CONSTANTS, torch.Size))
    return plain or is_number_of_numpy(leaf) or is_opaque_value(leaf)


def check_leaves(leaves: list[object], paths: list[str], what: str, others: tuple[type, ...] = ()) -> None:
    """Raise `UnknownLeafError` for a leaf that is no tensor, no plain value, and of no type in `others`."""
    for leaf, path in zip(leaves, paths, strict=True):
        if is_leaf(leaf) or isinstance(leaf, others):
            continue
        cls = leaf.__class__ if is_house_module(type(leaf).__module__) else type(leaf)  # the object behind a stand-in
        if is_array(leaf) and what == "output":
            raise UnknownLeafError(f"output `{path}` is an array of NumPy: return a tensor, or a list of numbers.")
        if isinstance(leaf, _RUNS_LATER) and cls.__module__ in ("builtins", "itertools"):
            remedy = "it gives each item once. Pass a list."
            if what != "argument":
                remedy = "its code runs after the call. Compile the functions that it calls, or return a list."
            raise UnknownLeafError(f"{what} `{path}` is {a_name(cls.__name__.replace('_', ' '))}: {remedy}")
        raise UnknownLeafError(
            f"{what} `{path}` is of the class {cls.__module__}.{cls.__qualname__}: foregrad can't flatten it. "
            "Tensors, plain values, tuples, lists, dicts, and plain objects (attributes alone) can be flattened. If "
            f"it holds tensors, {('return' if what == 'output' else 'pass')} the tensors, or register the class with "
            f"torch.utils._pytree.register_pytree_node({cls.__name__}, flatten, unflatten)"
            + ("." if what == "output" else "; otherwise let the function reach it by closure.")
        )
