"""What code of the user's finds on a stand-in: the attributes of the tensor it stands for, and none of a fake's own.

A fake tensor has attributes that no other tensor has (`constant`, `fake_mode`, ...). Where the user's code names one,
or asks for all of them (`vars`, `__dict__`, `dir`), the class of fakes answers for the time of a capture by who asks:
PyTorch and foregrad as ever, others as a plain tensor would. What others set under such a name is kept apart.
Checked on torch 2.13.0.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..locks import InPlace
from .fakes import FakeTensor

__all__ = [
    "HIDDEN",
    "MADE_UP",
    "NAMED",
    "PlainAttributes",
    "change_class",
    "drop_own",
    "is_asked_by_user",
    "is_capturing",
    "own_attributes",
    "plain_class",
    "set_own",
]

_MEMOS = [name for name in FakeTensor.__dict__ if name.endswith("_memo")]
_ON_CLASS = {name for name in FakeTensor.__dict__ if not hasattr(torch.Tensor, name)}
HIDDEN: frozenset[str] = frozenset(
    _ON_CLASS
    | set(FakeTensor.__annotations__)
    | {f"_{memo}{part}" for memo in _MEMOS for part in ("", "_vc", "_epoch")}
    | {"_is_param", "_foregrad_meta"}
)
_WHOLE = frozenset({"vars", "__dict__", "dir", "__dir__", "getmembers", "__reduce__", "__reduce_ex__", "__getstate__"})
# The names in code by which it may come upon attributes of a fake's own.
NAMED = HIDDEN | _WHOLE
# Those that code which makes names up may come upon; PyTorch asks for the rest too often.
MADE_UP = NAMED - {"fake_mode", "fake_device", "_fake_device", "_mode_key"}

_USERS = "_foregrad_users"  # in a fake's table: what code of the user's set under a hidden name
_table_of = torch.Tensor.__dict__["__dict__"].__get__

# To assign to an attribute such as `__class__` of a class is to change what that class is of: its table is written to.
_class_table: dict[str, Any] = gc.get_referents(FakeTensor.__dict__)[0]


def change_class(name: str, value: Any) -> None:
    """Give the class of fakes an attribute; None: take it away."""
    if value is None:
        _class_table.pop(name, None)
    else:
        _class_table[name] = value
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(FakeTensor))


def plain_class(stand_in: Any) -> type:
    """The class of the tensor that a fake stands for."""
    return torch.nn.Parameter if _table_of(stand_in).get("_is_param", False) else torch.Tensor


_active = threading.local()


def is_capturing() -> bool:
    """Whether this thread runs a function to capture it: what others ask is answered as ever."""
    return getattr(_active, "on_table", None) is not None


def is_asked_by_user(frames: int = 2) -> bool:
    """Whether the caller's caller is neither PyTorch nor foregrad, on a thread that captures."""
    if not is_capturing():
        return False
    asking = sys._getframe(frames).f_globals.get("__name__", "")
    return asking.partition(".")[0] not in {"torch", "foregrad"}


def own_attributes(stand_in: Any) -> dict[str, Any]:
    """What the user's code set on the tensor, or the tensor came with."""
    table = _table_of(stand_in)
    own = {name: value for name, value in table.items() if name not in HIDDEN and name != _USERS}
    own.update(table.get(_USERS, {}))
    return own


class _Attributes(dict):  # type: ignore[type-arg]
    """What `x.__dict__` gives: writes reach the tensor."""

    def __init__(self, stand_in: Any) -> None:
        super().__init__(own_attributes(stand_in))
        self._stand_in = stand_in

    def __setitem__(self, name: Any, value: Any) -> None:
        super().__setitem__(name, value)
        set_own(self._stand_in, name, value)

    def __delitem__(self, name: Any) -> None:
        super().__delitem__(name)
        table = _table_of(self._stand_in)
        (table[_USERS] if name in HIDDEN else table).pop(name)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def setdefault(self, name: Any, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def pop(self, name: Any, *default: Any) -> Any:
        if name not in self and default:
            return default[0]
        value = self[name]
        del self[name]
        return value

    def clear(self) -> None:
        for name in list(self):
            del self[name]


def set_own(stand_in: Any, name: str, value: Any) -> None:
    """Set an attribute as the user's code does."""
    table = _table_of(stand_in)
    (table.setdefault(_USERS, {}) if name in HIDDEN else table)[name] = value


def drop_own(stand_in: Any, attributes: dict[str, Any]) -> None:
    """Take away those of these attributes that were not set to others."""
    table = _table_of(stand_in)
    for found in (table, table.get(_USERS, {})):
        for name, value in attributes.items():
            if name in found and found[name] is value and (found is not table or name not in HIDDEN):
                del found[name]


class _Hidden:
    """The attribute of a fake under that name, for PyTorch; the user's, for others."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.on_class = FakeTensor.__dict__.get(name)

    def __get__(self, stand_in: Any, owner: Any = None) -> Any:
        is_users = is_asked_by_user()
        if stand_in is None:
            if is_users or self.on_class is None:
                raise AttributeError(f"type object 'Tensor' has no attribute '{self.name}'")
            return self.on_class.__get__(None, owner) if hasattr(self.on_class, "__get__") else self.on_class
        table = _table_of(stand_in)
        if is_users:
            users = table.get(_USERS)
            if users is not None and self.name in users:
                return users[self.name]
        elif self.on_class is None:
            if self.name in table:
                return table[self.name]
        elif hasattr(self.on_class, "__get__"):
            return self.on_class.__get__(stand_in, owner)
        else:
            return self.on_class
        raise AttributeError(f"'Tensor' object has no attribute '{self.name}'", name=self.name, obj=stand_in)

    def __set__(self, stand_in: Any, value: Any) -> None:
        if is_asked_by_user():
            set_own(stand_in, self.name, value)
        elif hasattr(self.on_class, "__set__"):
            self.on_class.__set__(stand_in, value)  # type: ignore[union-attr]
        else:
            _table_of(stand_in)[self.name] = value

    def __delete__(self, stand_in: Any) -> None:
        users = is_asked_by_user()
        table = _table_of(stand_in)
        found = table.get(_USERS, {}) if users else table
        if self.name not in found:
            raise AttributeError(self.name)
        del found[self.name]


def _asked_for_all(stand_in: Any) -> None:
    on_table: Callable[[Any], None] | None = getattr(_active, "on_table", None)
    if on_table is not None:
        on_table(stand_in)


def _dict(stand_in: Any) -> Any:
    if not is_asked_by_user():
        return _table_of(stand_in)
    _asked_for_all(stand_in)
    return _Attributes(stand_in)


def _dir(stand_in: Any) -> Iterable[str]:
    if not is_asked_by_user():
        return list(torch.Tensor.__dir__(stand_in))
    _asked_for_all(stand_in)
    with torch._C.DisableTorchFunction():
        names = set(dir(_LIKE[plain_class(stand_in)])) - {"__getattr__"}  # see patches.py
    return names.union(own_attributes(stand_in))


def _getstate(stand_in: Any) -> Any:
    if not is_asked_by_user():
        return object.__getstate__(stand_in)  # type: ignore[attr-defined]
    _asked_for_all(stand_in)
    return own_attributes(stand_in) or None


_LIKE: dict[type, torch.Tensor] = {type(like): like for like in (torch.empty(0), torch.nn.Parameter(torch.empty(0)))}


def _replaced(name: str, value: Any) -> InPlace:
    before = FakeTensor.__dict__.get(name)
    return InPlace(lambda: change_class(name, value), lambda: change_class(name, before))


_hidden = {name: _replaced(name, _Hidden(name)) for name in sorted(HIDDEN)}
_whole = [_replaced("__dict__", property(_dict)), _replaced("__dir__", _dir), _replaced("__getstate__", _getstate)]


class PlainAttributes:
    """Context of one capture: what is answered so far. `on_table` is told of stand-ins asked for all attributes."""

    def __init__(self, on_table: Callable[[Any], None]) -> None:
        self.on_table = on_table
        self._done: set[str] = set()
        self._entered: list[InPlace] = []
        self._before: Any = None

    def __enter__(self) -> PlainAttributes:
        self._before, _active.on_table = getattr(_active, "on_table", None), self.on_table
        return self

    def __exit__(self, *_: object) -> None:
        _active.on_table = self._before
        while self._entered:
            self._entered.pop().__exit__(None, None, None)
        self._done.clear()

    def named(self, names: Iterable[str]) -> None:
        """Code may run that has these names."""
        new = NAMED.intersection(names) - self._done
        contexts = [_hidden[name] for name in new & HIDDEN]
        if new & _WHOLE and not self._done & _WHOLE:
            contexts += _whole
        self._done |= new
        for context in contexts:
            context.__enter__()
            self._entered.append(context)
