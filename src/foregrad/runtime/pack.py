"""Containers and objects as lines of Python, by which rendered code builds the function's result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..frontend.tree import Tree, flatten
from ..graph.signature import Signature
from ..graph.spelling import literal
from .lines import LineWriter
from .passed import said_of_hooked, unwatched

__all__ = ["build_expression", "has_objects", "pack_expression", "result_lines"]


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


# -------------------------------------------------------------------- results that are objects
# Lines that turn results into eager's Python objects: parameters, attributes, hooks.


def result_lines(
    writer: LineWriter, signature: Signature, name: str, values: Sequence[str], *, sees_watchers: bool
) -> list[str]:
    """`values`: expressions of the results. `sees_watchers`: the node is told of who watches its outputs."""
    bind = writer.bind
    lines = [f"{values[at]}.__class__ = {bind('Parameter', torch.nn.Parameter)}" for at in signature.parameters]
    for at, key, value in signature.attributes:
        leaves, tree = flatten(value)
        built = pack_expression(tree, [bind("value", leaf) for leaf in leaves], bind)
        lines.append(f"{bind('set_attribute', _set_attribute)}({values[at]}, {bind('attribute', key)}, {built})")
    lines += [f"{values[at]}.register_hook({bind('hook', hook)})" for at, hook in signature.hooks]
    for at in () if sees_watchers else signature.hooked_inside:
        message = bind("said", said_of_hooked(signature, name, at))
        lines.append(f"{bind('unwatched', unwatched)}({values[at]}, {message})")
    return lines


def _set_attribute(result: torch.Tensor, name: str, value: Any) -> None:
    setattr(result, name, value)
