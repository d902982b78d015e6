"""Iterators older than the call. What is taken from one is gone: a run finds in its place what refuses to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from ..._torch.plain_types import tell_type

__all__ = ["UntouchedIterator"]


class UntouchedIterator:
    """Stands for an iterator. `refuse` raises: it is called where something is to be taken, or asked of it."""

    __slots__ = ("_of", "_refuse")

    def __init__(self, of: Any, refuse: Callable[[], NoReturn]) -> None:
        self._of = of
        self._refuse = refuse

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._of)

    def __iter__(self) -> UntouchedIterator:
        return self

    def __next__(self) -> Any:
        self._refuse()

    def __length_hint__(self) -> int:
        self._refuse()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse()

    def __getattr__(self, name: str) -> Any:
        self._refuse()


tell_type(UntouchedIterator, lambda iterator: type(iterator._of))
