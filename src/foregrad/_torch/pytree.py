"""Containers registered with PyTorch's pytree. Checked on torch 2.13.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree


def registered_functions(cls: type) -> tuple[Callable[[Any], tuple[Any, Any]], Callable[[Any, Any], Any]] | None:
    """(flatten, unflatten) of a registered container type, or None."""
    node = pytree.SUPPORTED_NODES.get(cls)
    return None if node is None else (node.flatten_fn, node.unflatten_fn)


def refuse_flattening(cls: type, refuse: Callable[..., Any]) -> None:
    """Make PyTorch's pytree call `refuse` for objects of a class, which it would take for leaves."""
    pytree.register_pytree_node(cls, refuse, refuse)


def spec_of_structure(value: Any) -> Any:
    """PyTorch's `TreeSpec` of a container."""
    return pytree.tree_structure(value)


def leaves_of(value: Any) -> list[Any]:
    """The leaves of nested containers, in order."""
    return pytree.tree_leaves(value)


def named_leaves(value: Any, name: str) -> list[tuple[str, Any]]:
    """The leaves, each with its path from `name`: `out[0]['x']`."""
    return [(name + pytree.keystr(path), leaf) for path, leaf in pytree.tree_leaves_with_path(value)]
