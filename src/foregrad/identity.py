"""Tables of objects that are told apart by identity, and that stay alive as long as the table: no id is taken again.

Tensors, and objects of the program's, can't be keys of a dict or items of a set: both ask `__hash__` and `__eq__`, and
these may be the program's, or missing. Objects of foregrad's own are compared by identity anyway.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, MutableMapping, MutableSet, ValuesView
from typing import Any, TypeVar, overload

K = TypeVar("K")
V = TypeVar("V")
T = TypeVar("T")


def class_property(answer: Callable[[Any], type]) -> property:
    """A property that answers `__class__`, of objects that stand for an object of a different class."""
    return property(answer)


def attributed(value: T, **attributes: object) -> T:
    """A function or tensor, with attributes for its users."""
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


class ById(MutableMapping[K, V]):
    """A dict by the identity of its keys."""

    __slots__ = ("_pairs",)

    def __init__(self, pairs: Iterable[tuple[K, V]] = ()) -> None:
        self._pairs: dict[int, tuple[K, V]] = {id(pair[0]): pair for pair in pairs}

    def __getitem__(self, key: K) -> V:
        return self._pairs[id(key)][1]

    def __setitem__(self, key: K, value: V) -> None:
        self._pairs[id(key)] = key, value

    def __delitem__(self, key: K) -> None:
        del self._pairs[id(key)]

    def __contains__(self, key: object) -> bool:
        return id(key) in self._pairs

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self._pairs.values())

    def __reversed__(self) -> Iterator[K]:
        return (key for key, _ in reversed(self._pairs.values()))

    def __len__(self) -> int:
        return len(self._pairs)

    def __or__(self, other: ById[Any, Any]) -> ById[Any, Any]:
        return ById((*self.items(), *other.items()))

    @overload
    def get(self, key: object) -> V | None: ...
    @overload
    def get(self, key: object, default: T) -> V | T: ...
    def get(self, key: object, default: object = None) -> Any:
        pair = self._pairs.get(id(key))
        return default if pair is None else pair[1]

    # Plain lists are quicker than the views of an abstract mapping.

    def values(self) -> ValuesView[V]:
        return [value for _, value in self._pairs.values()]  # type: ignore[return-value]

    def items(self) -> ItemsView[K, V]:
        return list(self._pairs.values())  # type: ignore[return-value]


class IdSet(MutableSet[K]):
    """A set by the identity of its items, in their order of arrival."""

    __slots__ = ("_items",)

    def __init__(self, items: Iterable[K] = ()) -> None:
        self._items: dict[int, K] = {id(item): item for item in items}

    def __contains__(self, item: object) -> bool:
        return id(item) in self._items

    def __iter__(self) -> Iterator[K]:
        return iter(self._items.values())

    def __len__(self) -> int:
        return len(self._items)

    def add(self, item: K) -> None:
        self._items[id(item)] = item

    def discard(self, item: K) -> None:
        self._items.pop(id(item), None)

    def update(self, items: Iterable[K]) -> None:
        self._items.update((id(item), item) for item in items)

    def __or__(self, items: Iterable[object]) -> IdSet[Any]:
        return IdSet((*self, *items))
