"""Objects and their classes: an object's contents, and how an object of its class is made with new contents.

An object is plain if its class is written in Python and it is nothing but its attributes (`__dict__`, slots), and
perhaps the items of a built-in container that its class extends. The class's code never runs, neither to look nor to
make an object. Objects with state that only C code sees (locks, files, generators, exceptions) are not plain.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import operator
import os
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ..frontend.source import table_of
from ..frontend.values import is_plain
from ..graph.source import in_order, key_text, key_texts
from .libraries import is_class_outside, keeps_state

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: made at run time, as all classes written in Python are
_POINTER = tuple.__itemsize__
_EXACT = (collections.defaultdict, collections.deque, set, collections.Counter)
_BASES: tuple[Any, ...] = (collections.defaultdict, collections.OrderedDict, dict, list, collections.deque, set)
_NO_OBJECTS = (type, torch.Tensor, torch.nn.Module, torch.Generator, BaseException)


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectLayout:
    """An object without its values. The values come in order: the contents of the `base` (a defaultdict's factory
    first), the attributes `names` of its `__dict__`, the attributes in slots (`slots`: numbers among the members).
    """

    base: Any = None
    keys: tuple[Any, ...] | None = None  # of a dict
    count: int = 0  # of the items of a list or deque
    members: frozenset[Any] = frozenset()  # of a set: it holds nothing else
    limit: int | None = None  # of a deque
    names: tuple[str, ...] | None = None  # None: there is no `__dict__`
    slots: tuple[int, ...] = ()

    @property
    def num_items(self) -> int:
        """The number of the base's values."""
        return (self.base is collections.defaultdict) + (self.count if self.keys is None else len(self.keys))

    def steps(self, cls: type) -> list[str]:
        """How people reach each of the values, from the object."""
        steps = [".default_factory"] if self.base is collections.defaultdict else []
        steps += (
            [f"[{i}]" for i in range(self.count)] if self.keys is None else [f"[{t}]" for t in key_texts(self.keys)]
        )
        names = [*(self.names or ()), *(slot_members(cls)[i].__name__ for i in self.slots)]
        return steps + [f".{name if name.isidentifier() else key_text(name)}" for name in names]

    def empty(self, cls: type) -> Any:
        """A new, empty object of the class."""
        if self.base is None:
            base: Any = types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object
            return base.__new__(cls)
        made = self.base.__new__(cls)
        if self.base is collections.deque:
            collections.deque.__init__(made, (), self.limit)
        return made

    def fill(self, made: Any, values: Sequence[Any]) -> None:
        """Put values into an object from `empty`."""
        base, count = self.base, self.num_items
        items = values[:count]
        if base is collections.defaultdict:
            made.default_factory = items[0]
            items = items[1:]
        if base is set:
            set.update(made, self.members)
        elif self.keys is not None:
            kind: Any = collections.OrderedDict if base is collections.OrderedDict else dict
            for key, item in zip(self.keys, items, strict=True):
                kind.__setitem__(made, key, item)
        elif base is not None:
            base.extend(made, items)
        if self.names is not None:
            end = count + len(self.names)
            object.__getattribute__(made, "__dict__").update(zip(self.names, values[count:end], strict=True))
            count = end
        members = slot_members(type(made))
        for index, value in zip(self.slots, values[count:], strict=True):
            members[index].__set__(made, value)


_known: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def is_plain_class(cls: type) -> bool:
    """Whether objects of a class are nothing but attributes and the items of a built-in container."""
    known = _known.get(cls)
    if known is None:
        known = _known[cls] = _is_plain_class(cls)
    return known


def _is_plain_class(cls: type) -> bool:
    if cls in _EXACT or cls is types.SimpleNamespace:
        return True
    if issubclass(cls, _NO_OBJECTS) or hasattr(cls, "__del__") or (is_class_outside(cls) and not keeps_state(cls)):
        return False
    base: Any = base_of(cls) or (types.SimpleNamespace if issubclass(cls, types.SimpleNamespace) else object)
    if cls.__new__ is not base.__new__:
        return False
    link: Any = cls
    while link is not base:
        own = vars(link)
        slots = own.get("__slots__", ())
        fields = 1 if isinstance(slots, str) else len(tuple(slots))
        fields += ("__dict__" in own) + ("__weakref__" in own)
        if not link.__flags__ & _HEAP_TYPE or link.__basicsize__ - link.__base__.__basicsize__ > fields * _POINTER:
            return False
        link = link.__base__
    return True


def is_plain_object(value: Any) -> bool:
    """Whether an object is nothing but its attributes, so a copy with equal attributes can stand for it."""
    return is_plain_class(type(value)) and base_of(type(value)) is None


def base_of(cls: type) -> Any:
    """The built-in container that a class extends, or is; None where there is none."""
    return next((base for base in _BASES if issubclass(cls, base)), None)


def slot_members(cls: type) -> list[Any]:
    """The slots of a class and its bases."""
    own = [vars(base).values() for base in cls.__mro__ if base.__flags__ & _HEAP_TYPE]
    return [item for values in own for item in values if type(item) is types.MemberDescriptorType]


def look_into(value: Any) -> tuple[ObjectLayout, list[Any]] | None:
    """The layout of a plain object, and its values; None for any other object."""
    cls = type(value)
    if not is_plain_class(cls):
        return None
    base = base_of(cls)
    keys, count, limit = None, 0, None
    members: frozenset[Any] = frozenset()
    values: list[Any] = []
    if base is set:
        members = frozenset(set.__iter__(value))
        if not all(map(is_plain, members)):
            return None
    elif base in (list, collections.deque):
        values = list(base.__iter__(value))
        count, limit = len(values), None if base is list else value.maxlen
    elif base is not None:
        kind = collections.OrderedDict if base is collections.OrderedDict else dict
        keys = tuple(kind.keys(value))
        if any(isinstance(key, torch.Tensor) for key in keys):
            return None
        values = [dict.__getitem__(value, key) for key in keys]
        if base is collections.defaultdict:
            values.insert(0, value.default_factory)
    table = getattr(value, "__dict__", None) if cls in _EXACT else table_of(value)
    names = None if table is None else tuple(table)
    values += [] if table is None else table.values()
    slots = []
    for index, member in enumerate(slot_members(cls)):
        try:
            values.append(member.__get__(value))
            slots.append(index)
        except AttributeError:
            pass
    return ObjectLayout(base, keys, count, members, limit, names, tuple(slots)), values


# -------------------------------------------------------------------- classes
# The parts of a class: methods, special methods, slots, options.

CALLED_BY_AUTOGRAD = ("forward", "backward", "setup_context", "vjp", "jvp", "vmap")
MAKERS = {"__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__setstate__", "__del__"}
CODE_OF_CLASSES = (
    staticmethod,
    classmethod,
    property,
    functools.cached_property,
    functools.partialmethod,
    functools.singledispatchmethod,
    types.FunctionType,
)


_LIKE: Any = (int, complex, list, set, type, types.FunctionType, type(iter(())), os.PathLike, contextlib.nullcontext)
_ASKED_BY_C = (
    "__getattr__ __rmatmul__ __match_args__ __missing__ __set__ __delete__ __bytes__ __copy__ __deepcopy__ __array__ "
    "__array_interface__ __array_ufunc__ __torch_function__"
)
# Special methods: without them the interpreter takes a different way.
SPECIAL = frozenset(
    name
    for table in (*(vars(base) for kind in _LIKE for base in kind.__mro__), vars(operator))
    for name, item in table.items()
    if name[:2] == "__" and callable(item)
).union(_ASKED_BY_C.split())


def special_names(cls: type) -> list[str]:
    """Methods that no code has to name to run them."""
    return [name for name in cls.__dict__ if name.startswith("__") and name not in MAKERS]


def values_of(cls: type) -> set[str]:
    """The options that a class itself holds: neither its code nor its description."""
    return {
        name
        for name, value in cls.__dict__.items()
        if not (name.startswith("__") or isinstance(value, CODE_OF_CLASSES) or hasattr(type(value), "__get__"))
    }


def attributes_of(cls: type) -> frozenset[str]:
    """The names that a class and its bases define."""
    return frozenset().union(*(base.__dict__ for base in cls.__mro__))


def slots_in(cls: type) -> frozenset[str]:
    """The slots of objects of a class, found without `getattr`, and so without the program's own descriptors."""
    items: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        items |= base.__dict__
    return frozenset(name for name, item in items.items() if isinstance(item, types.MemberDescriptorType))


def makers_of(cls: type) -> set[str]:
    """The methods that a class defines itself and that run when it is called, or when autograd calls it."""
    makers = MAKERS.union(CALLED_BY_AUTOGRAD) if issubclass(cls, torch.autograd.Function) else MAKERS
    return makers & cls.__dict__.keys()


def called_by_autograd(functions: Iterable[Any]) -> Iterator[types.FunctionType]:
    """The functions that autograd calls of custom Functions."""
    for cls in functions:
        found = (getattr(cls, name, None) for name in CALLED_BY_AUTOGRAD)
        yield from (function for function in found if isinstance(function, types.FunctionType))


def dict_of_class(cls: type) -> Any:
    """The dict behind `vars(cls)`; CPython counts its writes."""
    return gc.get_referents(type.__dict__["__dict__"].__get__(cls))[0]


def kept_by_c(cls: type) -> list[str]:
    """The attributes of a class of exceptions that C keeps, the traceback apart."""
    kinds = types.MemberDescriptorType, types.GetSetDescriptorType
    found = {name for base in cls.__mro__ for name, item in vars(base).items() if isinstance(item, kinds)}
    return in_order(frozenset(found - {"__dict__", "__weakref__", "__traceback__"}))
