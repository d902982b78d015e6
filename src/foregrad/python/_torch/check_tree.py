"""PyTorch's C++ checks on objects, and versions of dicts. Checked on torch 2.13.0."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.modules import module as nn_module

dict_version: Callable[[dict[Any, Any]], int] = torch._C._dynamo.guards.dict_version

# Hooks that run around the call of every module.
GLOBAL_HOOKS: list[dict[int, Any]] = [
    nn_module._global_backward_pre_hooks,
    nn_module._global_backward_hooks,
    nn_module._global_forward_pre_hooks,
    nn_module._global_forward_hooks,
]


class _Probe:
    value: int


def _counts_attributes() -> bool:
    """Whether an assignment to an attribute is a write that the version of the object's `__dict__` counts.

    CPython 3.13.0 keeps attributes beside the `__dict__` of their object, and does not count writes to the attributes:
    https://github.com/python/cpython/issues/125608.
    """
    probe = _Probe()
    probe.value = 0
    before = dict_version(vars(probe))
    probe.value = 1
    return dict_version(vars(probe)) != before


_ATTRIBUTES_ARE_COUNTED = _counts_attributes()
_MUTABLE = _Probe()
_MOST_BESIDE = 30  # attributes that CPython keeps beside an object's `__dict__`; with more, the dict has them itself


def versions_tell(table: dict[object, object]) -> bool:
    """Whether the version of a dict counts every write to it."""
    return _ATTRIBUTES_ARE_COUNTED or len(table) > _MOST_BESIDE


def functions_of_c(names: Iterable[str]) -> list[Callable[..., object]]:
    """PyTorch's own functions of C with the `names`, as far as they exist."""
    return [function for name in names if callable(function := getattr(torch._C, name, None))]


_PART = 1000


def _in_parts(objects: tuple[object, ...]) -> tuple[tuple[object, ...], ...]:
    return tuple(objects[start : start + _PART] for start in range(0, len(objects), _PART))


class CheckTree:
    """Checks on a tuple of objects, made once, run by one call into C++ (`check(objects)`)."""

    def __init__(self, objects: tuple[object, ...]) -> None:
        from torch._dynamo.guards import GuardManagerType

        self._kind = GuardManagerType.GUARD_MANAGER
        self._root: Any = torch._C._dynamo.guards.RootGuardManager()
        self._objects = objects
        # PyTorch searches all children for a node, so many objects are split into parts with a node each.
        self._parts: dict[int, Any] | None = {} if len(objects) > _PART else None
        self.check: Callable[[tuple[Any, ...]], bool] = self._root.check if self._parts is None else self._check_parts

    def _check_parts(self, objects: tuple[object, ...]) -> bool:
        return bool(self._root.check(_in_parts(objects)))

    def of(self, index: int) -> Any:
        """The node of the object at `index`."""
        if self._parts is None:
            return self._root.tuple_getitem_manager(index, "", self._objects[index], self._kind)
        number, at = divmod(index, _PART)
        if number not in self._parts:
            part = self._objects[number * _PART : (number + 1) * _PART]
            self._parts[number] = self._root.tuple_getitem_manager(number, "", part, self._kind)
        return self._parts[number].tuple_getitem_manager(at, "", self._objects[index], self._kind)

    def key(self, node: Any, holder: Any, key: object) -> Any:
        """The node of `holder[key]`, for dicts."""
        # PyTorch checks an immutable item only if the version of the dict has changed.
        example = holder[key] if versions_tell(holder) else _MUTABLE
        return node.dict_getitem_manager(key, "", example, self._kind)

    def item(self, node: Any, holder: Any, index: int) -> Any:
        """The node of `holder[index]`, for lists."""
        return node.list_getitem_manager(index, "", holder[index], self._kind)

    def attribute(self, node: Any, holder: Any, name: str) -> Any:
        return node.getattr_manager(name, "", getattr(holder, name), self._kind)

    @staticmethod
    def unchanged(node: Any, holder: dict[object, object]) -> None:
        """Guard on the dict being unwritten from now on."""
        node.add_dict_version_guard(holder, [], None)

    @staticmethod
    def lacks(node: Any, key: object) -> None:
        node.add_dict_contains_guard(False, key, [], None)

    @staticmethod
    def counts(node: Any, holder: Any) -> None:
        if isinstance(holder, dict):
            node.add_dict_length_check_guard(len(holder), [], None)
        else:
            node.add_length_check_guard(len(holder), [], None)

    @staticmethod
    def equals(node: Any, value: object) -> None:
        """Guard on equality with `value`, and on the type."""
        node.add_equals_match_guard(value, [], None)

    @staticmethod
    def is_(node: Any, value: object) -> None:
        """Guard on the identity of an object, as long as that lives."""
        node.add_id_match_guard(id(value), [], None)

    @staticmethod
    def type_is(node: Any, cls: type) -> None:
        node.add_type_match_guard(id(cls), [], None)

    def shape(self, index: int, value: object, cls: type, table: dict[str, object]) -> None:
        """Guard on the class and the `__dict__` of the object behind the weak reference at `index`, `value` now."""
        node = self.of(index).weakref_call_manager("", value, self._kind)
        self.type_is(node, cls)
        self.is_(node.get_generic_dict_manager("", table, self._kind), table)
