"""Values in nested lists, tuples and dicts, as operators take and return."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._pytree as pytree


def leaves(value: object) -> Iterator[Any]:
    """The items of a value's lists, tuples and dicts, in order; any other value alone."""
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors among the `leaves` of a value."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def mapped(value: Any, kind: Any, fn: Callable[[Any], object]) -> Any:
    """A value with `fn` applied to each inner object of a kind (or of several). All tuples become plain tuples."""
    if isinstance(value, kind):
        return fn(value)
    if isinstance(value, (list, tuple)):
        items = [mapped(item, kind, fn) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return {key: mapped(item, kind, fn) for key, item in value.items()} if isinstance(value, dict) else value


def frozen(value: Any, kinds: Any, name: Callable[[Any], object]) -> Any:
    """An argument as a hashable value, equal for equal arguments; `name` gives the substitute for a value of the
    `kinds`.

    Numbers carry their type, and text where equal ones differ: 1, 1.0 and True are three, 0.0 and -0.0 two.
    """
    kind = type(value)
    if kind is int or kind is str:
        return kind, value
    if value is None:
        return None
    if isinstance(value, kinds):
        return name(value)
    if isinstance(value, (tuple, list)):
        return tuple([frozen(item, kinds, name) for item in value])
    if isinstance(value, dict):
        return tuple([(key, frozen(item, kinds, name)) for key, item in value.items()])
    if isinstance(value, slice):
        return slice, frozen((value.start, value.stop, value.step), kinds, name)
    if kind is float or kind is bool or kind is complex:
        return kind, repr(value)
    try:
        hash(value)
    except TypeError:
        return kind, id(value)
    return kind, value


# -------------------------------------------------------------------- pytree
# Containers registered with PyTorch's pytree. Checked on torch 2.13.0.


def registered_functions(cls: type) -> tuple[Callable[[Any], tuple[Any, Any]], Callable[[Any, Any], Any]] | None:
    """(flatten, unflatten) of a registered container type, or None."""
    node = pytree.SUPPORTED_NODES.get(cls)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


def refuse_flattening(cls: type, refuse: Callable[..., Any]) -> None:
    """Make PyTorch's pytree call `refuse` for objects of a class, instead of taking them for leaves."""
    pytree.register_pytree_node(cls, refuse, refuse)


def spec_of_structure(value: object) -> Any:
    """PyTorch's `TreeSpec` of a container."""
    return pytree.tree_structure(value)


def flattened(value: object) -> tuple[list[Any], Any]:
    """The leaves of a container in the order of PyTorch's pytree, and its `TreeSpec`."""
    return pytree.tree_flatten(value)
