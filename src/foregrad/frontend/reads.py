"""What a function read besides its tensors: attributes of modules, globals, closure cells, options in containers.

`Reads` keeps, for each place that was looked at (a dict, list, set, cell or object), what was found there at the
first look, in a form that a later look can be compared with: plain values by type and value, tensors by their being
tensors (what they are is for the inputs' guards), anything else by identity, without keeping it alive. Mutable
containers are places of their own, with all their items.
"""

from __future__ import annotations

import math
import operator
import types
import weakref
from typing import Any

import torch

__all__ = ["ABSENT", "Expected", "Place", "Reads"]

_MOST_ITEMS = 10_000


class _Absent:
    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()

_PLAIN = {
    int,
    float,
    str,
    bool,
    bytes,
    complex,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    range,
    slice,
}


class Expected:
    """What was found in a place: `holds(now)` says whether another look finds the same."""

    __slots__ = ("kind", "pinned", "text", "value")

    def __init__(self, value: Any) -> None:
        self.value: Any
        self.pinned: Any = None
        if value is ABSENT:
            self.kind, self.value = "absent", None
        elif isinstance(value, torch.Tensor):
            self.kind, self.value = "tensor", type(value)
        elif is_plain(value):
            self.kind, self.value = "equal", value
        else:
            self.kind = "same"
            try:
                self.value = weakref.ref(value)
            except TypeError:
                self.value = _Strong(value)
        self.text = None if self.kind == "equal" else describe(value)

    def holds(self, now: Any) -> bool:
        if self.kind == "equal":
            return same_value(self.value, now)
        if self.kind == "same":
            return now is not None and self.value() is now
        if self.kind == "tensor":
            return type(now) is self.value
        return now is ABSENT

    def pin(self, now: Any) -> None:
        """Keep the plain object found now: it is compared by identity."""
        if self.kind == "equal":
            self.pinned = now

    def describe(self) -> str:
        return self.text if self.text is not None else describe(self.value)


class _Strong:
    """Like a weak reference, for what has none (lists, dicts, built-in methods)."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self) -> Any:
        return self.value


def is_plain(value: Any) -> bool:
    """Whether a value is immutable and compared by what it is, not by which object it is."""
    cls = type(value)
    if cls is tuple or cls is frozenset:
        return all(isinstance(item, type) or is_plain(item) for item in value)
    return cls in _PLAIN


def same_value(a: Any, b: Any) -> bool:
    """Equal, of the same type, down to the items of tuples; NaN is NaN and -0.0 is not 0.0."""
    if type(a) is not type(b):
        return False
    if isinstance(a, type):
        return a is b
    if type(a) is float:
        return (a == b and math.copysign(1.0, a) == math.copysign(1.0, b)) or (math.isnan(a) and math.isnan(b))
    if type(a) is tuple:
        return len(a) == len(b) and all(map(same_value, a, b))
    if type(a) is complex:
        return same_value(a.real, b.real) and same_value(a.imag, b.imag)
    if type(a) is frozenset:
        return a == b and {(type(x), x) for x in a} == {(type(x), x) for x in b}
    if type(a) is slice:
        return same_value((a.start, a.stop, a.step), (b.start, b.stop, b.step))
    return bool(a == b)


def describe(value: Any) -> str:
    """Short text for messages."""
    if isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    if isinstance(value, (types.FunctionType, type)):
        return f"{value.__qualname__} (at {id(value):#x})"
    if not is_plain(value) and value is not ABSENT:
        return f"a {type(value).__name__} (at {id(value):#x})"  # its repr may run code of the user's
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class Place:
    """One place: `kind` is "dict", "list", "set" or "object" (looked at by attribute). `style` is how people write it:
    `name.key`, `name[key]`, `key` alone, or `name` alone.
    """

    __slots__ = ("copy", "holder", "items", "keys", "kind", "name", "owner", "style", "volatile")

    def __init__(self, holder: Any, kind: str, name: str, style: str, owner: int | None = None) -> None:
        self.holder = holder
        self.kind = kind
        self.name = name
        self.style = style
        self.owner = owner  # the id of the module whose table this is
        self.items: dict[Any, Expected] = {}
        self.keys: tuple[Any, ...] | None = None  # all keys in order, where all items matter
        self.copy: list[Any] | None = None  # the items themselves, of a container too large to look into
        self.volatile = 0  # how often it was written to without a difference that matters

    def look(self, key: Any) -> Any:
        """What is there now."""
        if self.kind == "object":
            try:
                return getattr(self.holder, key)
            except (AttributeError, ValueError):
                return ABSENT
        if self.kind == "dict":
            return dict.get(self.holder, key, ABSENT)
        if self.kind == "list":
            return self.holder[key] if key < len(self.holder) else ABSENT
        return frozenset(self.holder)

    def path(self, key: Any) -> str:
        if self.style == "attr":
            return f"{self.name}.{key}".lstrip(".")
        if self.style == "item":
            return f"{self.name}[{key!r}]"
        return str(key) if self.style == "key" else self.name

    def difference(self) -> tuple[str, str, str] | None:
        """(path, what was there, what is there now) of the first item that is not as it was."""
        if self.keys is not None and len(self.holder) != len(self.keys):
            return f"len({self.name})", str(len(self.keys)), str(len(self.holder))
        if self.kind == "dict" and self.keys is not None and tuple(self.holder) != self.keys:
            return f"keys of {self.name}", describe(self.keys), describe(tuple(self.holder))
        if self.copy is not None:
            now = list(self.holder.values()) if self.kind == "dict" else self.holder
            if not all(map(operator.is_, self.copy, now)):
                return self.name, f"{len(now)} items", "others"
        for key, expected in self.items.items():
            now = self.look(key)
            if not expected.holds(now):
                return self.path(key), expected.describe(), describe(now)
        return None

    def drop_changed(self) -> None:
        """Forget the first item that differs."""
        if self.keys is not None and (
            len(self.holder) != len(self.keys) or (self.kind == "dict" and tuple(self.holder) != self.keys)
        ):
            self.keys = None
        elif self.copy is not None:
            self.copy = None
        else:
            self.items.pop(next(key for key, expected in self.items.items() if not expected.holds(self.look(key))))


class Reads:
    """All places a function looked at."""

    def __init__(self) -> None:
        self.places: dict[int, Place] = {}
        self.modules: dict[int, torch.nn.Module] = {}
        self._made_here: dict[int, torch.nn.Module] = {}  # by the function: what they are follows from the rest
        self._noted: set[tuple[int, str]] = set()
        self.class_attributes: dict[tuple[type, str], Any] = {}

    def place(self, holder: Any, kind: str, name: str, style: str, owner: int | None = None) -> Place:
        found = self.places.get(id(holder))
        if found is None:
            found = self.places[id(holder)] = Place(holder, kind, name, style, owner)
        return found

    def add(self, place: Place, key: Any, value: Any) -> bool:
        """Note that `value` was found there; whether that is news."""
        if key in place.items:
            return False
        place.items[key] = Expected(value)
        self.contents(value, place.path(key))
        return True

    def contents(self, value: Any, name: str) -> None:
        """Note all that is in a container, if it is one."""
        if type(value) is tuple and not is_plain(value):
            for index, item in enumerate(value):
                self.contents(item, f"{name}[{index}]")
            return
        if id(value) in self.places or not isinstance(value, (dict, list, set)):
            return
        kind = "dict" if isinstance(value, dict) else "list" if isinstance(value, list) else "set"
        place = self.place(value, kind, name, "item" if kind != "set" else "self")
        if kind == "set":
            place.items[None] = Expected(frozenset(value))
            return
        place.keys = tuple(value) if isinstance(value, dict) else (None,) * len(value)
        if len(value) > _MOST_ITEMS:
            place.copy = list(value.values()) if isinstance(value, dict) else list(value)
            return
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            self.add(place, key, item)

    # ---------------------------------------------------------------- modules

    def note(self, module: torch.nn.Module, name: str) -> None:
        """The attribute of a module is about to be read."""
        if (id(module), name) in self._noted or id(module) in self._made_here:
            return
        own = object.__getattribute__(module, "__dict__")
        if name == "call_super_init" or "_modules" not in own:  # the first thing that a module's constructor reads
            self._made_here[id(module)] = module
            return
        self._noted.add((id(module), name))
        self.modules[id(module)] = module
        if name == "__dict__":
            self._whole_table(module, own)
            return
        if name in _HOOKS:
            return  # see Watch: all hooks of all modules
        place = self.place(own, "dict", type(module).__name__, "attr", id(module))
        if name in own:
            value = own[name]
            if name in _TABLES:
                place.items.setdefault(name, Expected(value))
                self._whole_table(module, value)
            else:
                self.add(place, name, value)
            return
        for table_name in _TABLES:
            table = own.get(table_name)
            if table is not None and name in table:
                place.items.setdefault(table_name, Expected(table))
                self.add(self.place(table, "dict", type(module).__name__, "attr", id(module)), name, table[name])
                return
        self.class_attributes.setdefault((type(module), name), None)
        place.items.setdefault(name, Expected(ABSENT))

    def _whole_table(self, module: torch.nn.Module, table: dict[str, Any]) -> None:
        place = self.place(table, "dict", type(module).__name__, "attr", id(module))
        place.keys = tuple(table)
        for key, value in table.items():
            if key not in _HOOKS and key not in _TABLES:
                self.add(place, key, value)

    def objects_of_modules(self) -> list[tuple[Any, str]]:
        """Objects (functions, options, ...) that were read as attributes of modules, with their names."""
        return [
            (expected.value(), place.path(key))
            for place in self.places.values()
            if place.owner is not None
            for key, expected in place.items.items()
            if expected.kind == "same" and key not in _TABLES
        ]

    def name_modules(self, names: dict[int, str]) -> None:
        """Give the modules' places the names that people know them by."""
        for place in self.places.values():
            if place.owner is not None and place.owner in names:
                place.name = names[place.owner]


_TABLES = ("_parameters", "_buffers", "_modules")
_HOOKS = {
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs",
    "_is_full_backward_hook",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
    "_non_persistent_buffers_set",
}
