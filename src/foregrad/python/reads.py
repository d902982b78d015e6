"""A function's own reach: the places that it read (attributes, globals, cells, containers), and its tensors.

`Reads` keeps, for each place that was looked at (a dict, list, set, cell or object), the value at the first look, in a
form that later looks are compared with: plain values by type and value, tensors by their being tensors (the inputs'
guards test the rest), anything else by identity and without keeping it alive. Mutable containers are places of their
own, with all their items.
"""

from __future__ import annotations

import collections
import gc
import itertools
import operator
import types
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import torch

from .._torch.stand_ins import is_stand_in
from ..errors import UnsupportedOpError
from ..frontend.arrays import is_array
from ..frontend.source import ABSENT, Strong, reference, table_of
from ..frontend.values import describe, holds_classes, is_plain, same_value
from ..graph.source import key_text
from ._torch.recurrent import follows_from_parameters
from .expected import Expected, apart, stored
from .large_state import MOST_ITEMS
from .libraries import is_of_library, referent
from .opaque import asked_of

_CONTAINERS = (dict, list, set, collections.deque)
VIEWS: tuple[Any, ...] = (types.MappingProxyType, type({}.keys()), type({}.values()), type({}.items()))
"""Views of a dict. They refer to it."""


def items_in(container: Any) -> list[tuple[Any, Any]]:
    """The items of a dict or list in order, as stored, past the methods of a subclass."""
    if not isinstance(container, dict):
        return list(enumerate(stored(container)))
    return [(key, dict.get(container, key)) for key in keys_in(container)]


def keys_in(container: Any) -> tuple[Any, ...]:
    """The keys of a dict as stored; None for each item of any other container."""
    if not isinstance(container, dict):
        return (None,) * len(stored(container))
    kind = collections.OrderedDict if isinstance(container, collections.OrderedDict) else dict
    return tuple(kind.keys(container))


def are_numbers_alike(a: Any, b: Any) -> bool:
    """Whether both are integers, or floats, or tuples or lists of equally many numbers."""
    if type(a) is not type(b) or type(a) not in (tuple, list):
        return type(a) is type(b) and type(a) in (int, float)
    return 0 < len(a) == len(b) <= _MOST_TOGETHER and all(map(are_numbers_alike, a, b))


_MOST_TOGETHER = 64


def tensors_in_key(key: Any) -> Iterator[torch.Tensor]:
    """The tensors in an immutable value: a key of a dict, an item of a set, a tuple, a (weak) reference."""
    if isinstance(key, (weakref.ref, Strong)):
        key = referent(key) if isinstance(key, weakref.ref) else key()
    if isinstance(key, torch.Tensor):
        yield key
    elif isinstance(key, (tuple, frozenset)):
        yield from itertools.chain.from_iterable(map(tensors_in_key, stored(key)))
    elif isinstance(key, weakref.ref):
        yield from tensors_in_key(key)


class ReadSite:
    """One place: `kind` is "dict", "list", "set", "object" (looked at by attribute) or "asked" (through `ask`). `style`
    is how people write it: `name.key`, `name[key]`, `key` alone, or `name` alone.
    """

    __slots__ = ("absent", "ask", "copy", "holder", "items", "keys", "kind", "name", "owner", "style", "volatile")

    def __init__(self, holder: Any, kind: str, name: str, style: str, owner: int | None = None) -> None:
        self.holder = holder
        self.kind = kind
        self.name = name
        self.style = style
        self.owner = owner  # the id of the module that has this table
        self.items: dict[Any, Expected] = {}
        self.absent: set[Any] = set()  # keys of a dict that were asked for and not there
        self.keys: tuple[Any, ...] | None = None  # all keys in order, where all items matter
        self.copy: list[Any] | None = None  # the items themselves, of a container too large to look into
        self.ask: Any = None
        self.volatile = 0  # how often it was written to without a difference that matters

    def lacks(self, keys: Iterable[Any], there: Iterable[Any] = ()) -> None:
        """Note that nothing is under the `keys`, but for keys in `there` and keys noted earlier."""
        self.absent |= frozenset(keys).difference(there, self.items)

    def appeared(self) -> Any:
        """The keys that were absent and are there now."""
        return dict.keys(self.holder) & self.absent if self.absent else ()

    def look(self, key: Any) -> Any:
        """The value under a key now."""
        if self.kind == "object":
            try:
                return getattr(self.holder, key)
            except (AttributeError, ValueError):
                return ABSENT
        if self.kind == "dict":
            return dict.get(self.holder, key, ABSENT)
        if self.kind == "list":
            return self.holder[key] if key < len(self.holder) else ABSENT
        if self.kind == "asked":
            return self.ask(self.holder)
        return frozenset(self.holder)

    def path(self, key: Any) -> str:
        if self.style == "attr":
            return f"{self.name}.{key if isinstance(key, str) else key_text(key)}".lstrip(".")
        if self.style == "item":
            return f"{self.name}[{key_text(key)}]"
        return str(key) if self.style == "key" else self.name

    def difference(self) -> tuple[str, str, str] | None:
        """The first difference: (path, expected, actual)."""
        if self.keys is not None and not same_value(keys := keys_in(self.holder), self.keys):
            if len(keys) != len(self.keys):
                return f"len({self.name})", str(len(self.keys)), str(len(keys))
            return f"keys of {self.name}", describe(self.keys), describe(keys)
        if self.copy is not None:
            now = [item for _, item in items_in(self.holder)]
            if not all(map(operator.is_, self.copy, now)):
                return self.name, f"{len(now)} items", "others"
        for key, expected in self.items.items():
            now = self.look(key)
            if not expected.holds(now):
                return self.path(key), *apart(expected.describe(), describe(now))
        if self.keys is None and (new := self.appeared()):
            key = min(new, key=key_text)
            return self.path(key), describe(ABSENT), describe(self.look(key))
        return None

    def has_grown(self) -> bool:
        """Whether the number of a container's items differs from the number at the look."""
        known = self.items[None].before() if self.kind == "set" else self.keys
        return self.style != "attr" and known is not None and len(known) != len(self.holder)

    def other_numbers(self) -> Iterator[Any]:
        """The keys of changed values that were an integer, a float, or a tuple or list of numbers, and still are."""
        if self.kind not in ("dict", "object") and type(self.holder) is not list:
            return
        for key, expected in self.items.items():
            if expected.kind == "equal" or (expected.kind == "same" and type(expected.before()) is list):
                now = self.look(key)
                if are_numbers_alike(expected.before(), now) and not expected.holds(now):
                    yield key

    def keys_of(self, value: Any) -> Iterator[Any]:
        """The keys of this very object."""
        if self.kind in ("dict", "object"):
            yield from (key for key, expected in self.items.items() if expected.before() is value)

    def other_arrays(self, changed: Container[int]) -> Iterator[Any]:
        """The keys of NumPy arrays that were replaced by an array, or that are in `changed`, by id."""
        if self.kind not in ("dict", "object"):
            return
        for key, expected in self.items.items():
            now = self.look(key)
            before = expected.before()
            if is_array(before) and is_array(now) and (now is not before or id(now) in changed):
                yield key

    def drop_changed(self) -> None:
        """Forget the first item that differs."""
        if self.keys is not None and not same_value(keys_in(self.holder), self.keys):
            self.keys = None
        elif self.copy is not None:
            self.copy = None
        else:
            changed = (key for key, expected in self.items.items() if not expected.holds(self.look(key)))
            key = next(changed, ABSENT)
            if key is not ABSENT:
                del self.items[key]
            else:
                self.absent.discard(min(self.appeared(), key=key_text))


class Reads:
    """All places a function looked at."""

    def __init__(self, given: Iterable[torch.Tensor] = ()) -> None:
        self.give(given)
        self.places: dict[int, ReadSite] = {}
        self.made_here: dict[int, torch.nn.Module] = {}  # made by the function: their attributes follow from the rest
        self._noted: set[tuple[int, str]] = set()
        self.shapes: dict[int, tuple[Any, type, Any]] = {}  # (weak reference, class, table) of objects
        self.modules: dict[int, tuple[Any, type, dict[str, Any]]] = {}  # likewise for modules
        self.lifted: set[tuple[int, Any]] = set()  # places, by holder and key, that are arguments: they may vary
        self.class_attributes: dict[tuple[type, str], Any] = {}
        self.stand_ins: dict[int, Any] = {}  # stand-ins in the state during the run, and the objects behind them
        self.unread: dict[int, bool] = {}  # containers only written to, and whether they may be replaced

    def give(self, given: Iterable[torch.Tensor]) -> None:
        """The arguments that the function also reaches by itself, and is given as they are."""
        self.given = frozenset(map(id, given))
        self.compares_identity = bool(self.given)  # code asks whether two objects are one

    def place(self, holder: Any, kind: str, name: str, style: str, owner: int | None = None) -> ReadSite:
        site = self.places.get(id(holder))
        if site is None:
            site = self.places[id(holder)] = ReadSite(holder, kind, name, style, owner)
        return site

    def add(self, place: ReadSite, key: Any, value: Any) -> bool:
        """Note that a place has `value` under a key. Returns whether that is news."""
        if key in place.items or key in place.absent or (id(place.holder), key) in self.lifted:
            return False
        value = self.stand_ins.get(id(value), value)
        if self.unread.get(id(value)):
            place.items[key] = Expected.of_type(value)
            return True
        expected = place.items[key] = Expected(value)
        if expected.kind != "equal" and _may_hold(type(value)):  # else the path would be written in vain
            self.contents(value, place.path(key))
        return True

    def expect(self, holder: Any, before: Mapping[Any, Any]) -> None:
        """Expect a place's contents from `before`, not its present contents."""
        site = self.places.get(id(holder))
        for key, expected in [*site.items.items()] if site is not None else ():
            was = before.get(key, ABSENT)
            if site is not None and site.look(key) is not was and not expected.holds(was):
                del site.items[key]
                site.lacks(key) if was is ABSENT else self.add(site, key, was)

    def contents(self, value: Any, name: str) -> None:
        """Note the items of a container, or the answer of an object without attributes."""
        if is_plain(value) or not _may_hold(type(value)):
            return
        if isinstance(value, tuple):
            for index, item in enumerate(stored(value)):
                self.contents(item, f"{name}[{index}]")
        if id(value) in self.places or id(value) in self.unread:
            return
        if isinstance(value, VIEWS):
            value = gc.get_referents(value)[0]  # the dict behind it
        if not isinstance(value, _CONTAINERS):
            if (ask := asked_of(value)) is not None:
                self.ask(value, name, ask)
            return
        kind = "dict" if isinstance(value, dict) else "set" if isinstance(value, set) else "list"
        place = self.place(value, kind, name, "item" if kind != "set" else "self")
        if kind == "set":
            place.items[None] = Expected(frozenset(value))
            return
        place.keys = keys_in(value)
        items = items_in(value)
        if len(items) > MOST_ITEMS:
            place.copy = [item for _, item in items]
            return
        for key, item in items:
            self.add(place, key, item)

    def ask(self, value: Any, name: str, ask: Callable[[Any], Any]) -> None:
        """Note the result of `ask(value)`."""
        if id(value) not in self.places:
            place = self.place(value, "asked", name, "self")
            place.ask = ask
            answer = ask(value)
            place.items[None] = Expected(answer)
            self.contents(answer, name)

    def release(self) -> None:
        """Let go of the tensors: the capture is over."""
        for place in self.places.values():
            for expected in place.items.values():
                if expected.kind in ("tensor", "type"):
                    expected.pinned = None

    def shape(self, value: Any) -> None:
        """Note that an object must keep its class and its table of attributes."""
        self.shapes.setdefault(id(value), (reference(value), type(value), table_of(value)))

    # ---------------------------------------------------------------- modules

    def is_news(self, module: torch.nn.Module, name: str) -> bool:
        """Whether an attribute of a module is to be noted. For hooks see Watch: all hooks of all modules."""
        return name not in HOOKS and (id(module), name) not in self._noted and id(module) not in self.made_here

    def note(self, module: torch.nn.Module, name: str) -> None:
        """Note an attribute of a module that is about to be read: one that is news."""
        if issubclass(type(module), torch.jit.ScriptModule):
            if name != "__class__":
                raise UnsupportedOpError(
                    "the function uses a module of TorchScript; a capture can't look inside. Use the Python source, "
                    "or call it in a function that `foregrad.eager_region` marks."
                )
            return
        own = object.__getattribute__(module, "__dict__")
        if name == "call_super_init" or "_modules" not in own:  # the first thing that a module's constructor reads
            self.made_here[id(module)] = module
            return
        self._noted.add((id(module), name))
        if name[0] == "_" and follows_from_parameters(module, name):
            return
        if id(module) not in self.modules:
            self.modules[id(module)] = (weakref.ref(module), type(module), own)
        if name == "__dict__":
            self._whole_table(module, own)
            return
        place = self.place(own, "dict", type(module).__name__, "attr", id(module))
        if name in own:
            value = own[name]
            if name not in TABLES:  # a property of that name would hide the attribute
                self.class_attributes.setdefault((type(module), name), None)
            if is_stand_in(value):
                return  # the function wrote to it before
            if name in TABLES:
                place.items.setdefault(name, Expected(value))
                self._whole_table(module, value)
            else:
                self.add(place, name, value)
            return
        for table_name in TABLES:
            table = own.get(table_name)
            if table is not None and name in table:
                place.items.setdefault(table_name, Expected(table))
                self.add(self.place(table, "dict", type(module).__name__, "attr", id(module)), name, table[name])
                return
        self.class_attributes.setdefault((type(module), name), None)
        if name not in place.items:
            place.absent.add(name)

    def _whole_table(self, module: torch.nn.Module, table: dict[str, Any]) -> None:
        place = self.place(table, "dict", type(module).__name__, "attr", id(module))
        place.keys = tuple(table)
        for key, value in [*table.items()]:
            if key not in HOOKS and key not in TABLES and not follows_from_parameters(module, key):
                self.add(place, key, value)

    def objects_of_modules(self) -> list[tuple[Any, str]]:
        """Objects (functions, options, ...) that were read as attributes of modules, with their names."""
        return [
            (expected.before(), place.path(key))
            for place in self.places.values()
            if place.owner is not None
            for key, expected in place.items.items()
            if key not in TABLES
            and (
                expected.kind in ("same", "bound")
                or (expected.kind == "equal" and holds_classes(expected.value))
                or (expected.kind == "tensor" and not is_of_library(expected.value))
            )
        ]

    def name_modules(self, names: dict[int, str]) -> None:
        """Give the modules' places the names that people know them by."""
        for place in self.places.values():
            if place.owner is not None and place.owner in names:
                place.name = names[place.owner]


def _may_hold(cls: type) -> bool:
    """Whether objects of a class may be containers, or tell their contents. A module is asked attribute by attribute,
    unless it is a container or of a further C type.
    """
    if issubclass(cls, (types.FunctionType, type, torch.Tensor)):
        return False
    return not issubclass(cls, torch.nn.Module) or cls.__basicsize__ != torch.nn.Module.__basicsize__


# -------------------------------------------------------------------- tables of modules
# Where a module keeps its attributes.

TABLES = ("_parameters", "_buffers", "_modules")
HOOKS = frozenset(
    "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _forward_hooks_with_kwargs "
    "_forward_hooks_always_called _forward_pre_hooks_with_kwargs _is_full_backward_hook".split()
)


def hooks_of(modules: Iterable[torch.nn.Module], *, in_backward: bool = False) -> Iterator[Any]:
    """The hooks that calls of modules call, the hooks on all modules first; or the hooks of their backwards."""
    direction = "backward" if in_backward else "forward"
    names = f"_{direction}_pre_hooks", f"_{direction}_hooks"
    for name in names:
        yield from vars(torch.nn.modules.module)[f"_global{name}"].values()
    for module in modules:
        own = object.__getattribute__(module, "__dict__")
        for name in names:
            yield from own.get(name, {}).values()
