"""Containers as Python expressions, by which rendered code builds the function's result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..frontend.tree import Tree
from ..graph.spelling import literal

__all__ = ["build_expression", "has_objects", "pack_expression"]


def has_objects(tree: Tree) -> bool:
    """Whether a container holds an object that is made before its contents."""
    return any(node.kind in _MADE_FIRST for _, node in tree.walk(""))


_MADE_FIRST = {"object", "ref", "weakref", "method", "partial", "function", "cell", "shared"}


def build_expression(tree: Tree, values: list[str], made: str, bind: Callable[[str, Any], str]) -> str:
    """The expression that builds a container with objects in it; `made`: the variable of a dict that collects them."""
    return f"{bind('build', tree.unflatten)}([{', '.join(values)}], made={made})"


def pack_expression(tree: Tree, values: list[str], bind: Callable[[str, Any], str]) -> str:
    """The expression that builds a container of structure `tree` from the expressions of its leaves."""
    if tree.kind == "leaf":
        return values[0]
    parts, at = [], 0
    for child in tree.children:
        parts.append(pack_expression(child, values[at : at + child.size], bind))
        at += child.size
    if tree.kind == "list":
        return f"[{', '.join(parts)}]"
    if tree.kind == "tuple":
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if tree.kind == "dict" and tree.type is dict:
        items = []
        for key, part in zip(tree.context, parts, strict=True):
            items.append(f"{literal(key) or bind('key', key)}: {part}")
        return "{" + ", ".join(items) + "}"
    if tree.kind == "namedtuple":
        return f"{bind(tree.type.__name__, tree.type)}({', '.join(parts)})"
    # Anything else is opened one level and built by the tree itself.
    flat = Tree(tree.kind, tree.type, tree.context, tuple(Tree("leaf") for _ in tree.children), len(tree.children))
    return f"{bind('build', flat.unflatten)}([{', '.join(parts)}])"
