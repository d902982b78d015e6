"""Lines that turn results into eager's Python objects: parameters, attributes, hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..frontend.tree import flatten
from ..graph.signature import Signature
from .lines import LineWriter
from .pack import pack_expression
from .passed import said_of_hooked, unwatched

__all__ = ["result_lines"]


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
