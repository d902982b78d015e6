"""The answer to `type(x)` in the user's code for stand-ins of arrays, generators, iterators and containers.

Stand-ins of tensors are of the tensors' own type. Stand-ins of other objects are not, and no object can answer
`type(x)` for itself. So in a module whose code calls `type`, the name `type` in its globals is bound during a capture
to a class that answers the type of the object behind a stand-in, and is like `type` otherwise.

Known weakness: in a module that also calls `type`, `C is type` is False during a capture if `C` comes from elsewhere
than `type(...)` and that name: `x.__class__`, a default, another module. `==` is right.
"""

from __future__ import annotations

import builtins
import functools
import types
from collections.abc import Callable
from typing import Any

from ..locks import make_lock
from .asked import ReboundNames, is_capturing

__all__ = ["PlainTypes", "own_names", "tell_type"]


class _AsType(type):
    """The class of `_Type`: calls and checks of it are those of `type`."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not _Type:
            return super().__call__(*args, **kwargs)
        if len(args) == 1 and not kwargs:
            kind = type(args[0])
            if kind is type or kind is _AsType:
                return _Type  # the object that the calling code finds under that name
            answer = _answers.get(kind)
            return kind if answer is None or not is_capturing() else answer(args[0])
        return type(*args, **kwargs)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, type if cls is _Type else cls)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, type) if cls is _Type else super().__subclasscheck__(subclass)

    def __eq__(cls, other: object) -> bool:
        return other is cls or (cls is _Type and other is type)

    def __hash__(cls) -> int:
        return hash(type) if cls is _Type else super().__hash__()

    def __repr__(cls) -> str:
        return repr(type) if cls is _Type else super().__repr__()

    def __getitem__(cls, item: Any) -> Any:
        return type[item] if cls is _Type else super().__class_getitem__(item)  # type: ignore[misc]

    def __or__(cls, other: Any) -> Any:
        return type | other if cls is _Type else super().__or__(other)

    def __ror__(cls, other: Any) -> Any:
        return other | type if cls is _Type else super().__ror__(other)


class _Type(type, metaclass=_AsType):
    pass


_Type.__name__ = _Type.__qualname__ = type.__name__
_Type.__module__ = type.__module__

_answers: dict[type, Callable[[Any], type]] = {}
_lock = make_lock()
_bound: dict[int, tuple[dict[str, Any], int]] = {}  # by id of the globals: the number of captures that bind there


def tell_type(kind: type, answer: Callable[[Any], type]) -> None:
    """Register the answer to `type(x)` in the user's code for stand-ins of this kind."""
    _answers[kind] = answer


def _bind(namespace: dict[str, Any]) -> None:
    with _lock:
        _, count = _bound.get(id(namespace), (namespace, 0))
        if not count:
            namespace["type"] = _Type
        _bound[id(namespace)] = namespace, count + 1


def _unbind(namespace: dict[str, Any]) -> None:
    with _lock:
        _, count = _bound.pop(id(namespace))
        if count > 1:
            _bound[id(namespace)] = namespace, count - 1
        elif namespace.get("type") is _Type:
            del namespace["type"]


def own_names(namespace: dict[str, Any]) -> dict[str, Any]:
    """A module's globals without the names that a capture has bound there."""
    return {name: value for name, value in namespace.items() if value is not _Type}


class PlainTypes:
    """Context of one capture: the modules whose code it runs and calls `type`."""

    def __init__(self) -> None:
        self._namespaces: dict[int, dict[str, Any]] = {}
        self._rebound = ReboundNames()

    def __enter__(self) -> PlainTypes:
        return self

    def __exit__(self, *_: object) -> None:
        self._rebound.unbind()
        for namespace in self._namespaces.values():
            _unbind(namespace)
        self._namespaces.clear()

    def unbind(self) -> None:
        """Restore the names, after the function has returned."""
        self._rebound.unbind()

    def namespace(self, namespace: dict[str, Any]) -> None:
        """Bind `type` for code that has these globals and may run."""
        taken = "type" in namespace or getattr(namespace.get("__builtins__"), "type", type) is not builtins.type
        if id(namespace) not in self._namespaces and not taken:
            self._namespaces[id(namespace)] = namespace
            _bind(namespace)

    def runs(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        """Bind names for code that has these globals and begins to run."""
        if _asks(code):
            self.namespace(namespace)
        self._rebound.bind(namespace, code.co_names)


@functools.lru_cache(maxsize=16384)
def _asks(code: types.CodeType) -> bool:
    """Whether code names `type`."""
    return "type" in code.co_names or any(isinstance(c, types.CodeType) and _asks(c) for c in code.co_consts)
