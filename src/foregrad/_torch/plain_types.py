"""The answer to `type(x)` in the user's code for stand-ins of arrays, generators, iterators and containers.

Stand-ins of tensors are of the tensors' own type. Stand-ins of other objects are not, and no object can answer
`type(x)` for itself. So in a module whose code calls `type`, the name `type` in its globals is bound during a capture
to a class that answers the type of the object behind a stand-in, and is like `type` otherwise.

Known weakness: in a module that also calls `type`, `C is type` is False during a capture if `C` comes from elsewhere
than `type(...)` and that name: `x.__class__`, a default, another module. `==` is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .asked import is_capturing, tell

__all__ = ["tell_type"]


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
tell("type", _Type)


def tell_type(kind: type, answer: Callable[[Any], type]) -> None:
    """Register the answer to `type(x)` in the user's code for stand-ins of this kind."""
    _answers[kind] = answer
