"""Which outputs have a path of autograd nodes to which inputs.

When only some outputs are differentiated, eager gives None for an input that none of them leads to, and a tensor
(of zeros, it may be) for every other: the joint graph alone can't tell the two apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["other_leaves", "reached_from"]


# Their weights get a gradient from the first output only.
_NORMS = {"NativeLayerNormBackward0", "NativeGroupNormBackward0", "NativeBatchNormBackward0"}


def reached_from(outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor | None]) -> list[frozenset[int]]:
    """For each leaf, the positions in `outputs` that lead to it. One walk over the autograd graph."""
    roots: list[Any] = [output.grad_fn for output in outputs]
    order = _consumers_first(roots)
    masks: dict[int, int] = dict.fromkeys(map(id, order), 0)
    through_first: dict[int, int] = dict.fromkeys(map(id, order), 0)  # by way of the node's first output
    for position, (root, output) in enumerate(zip(roots, outputs, strict=True)):
        masks[id(root)] |= 1 << position
        if output.output_nr == 0:
            through_first[id(root)] |= 1 << position
    of_leaf = {id(leaf): 0 for leaf in leaves if leaf is not None}
    for node in order:
        mask = masks[id(node)]
        is_norm = node.name() in _NORMS
        for at, (following, output_nr) in enumerate(node.next_functions):
            if following is not None:
                passed = through_first[id(node)] if is_norm and at > 0 else mask
                masks[id(following)] |= passed
                if output_nr == 0:
                    through_first[id(following)] |= passed
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) in of_leaf:
            of_leaf[id(leaf)] |= mask
    count = range(len(roots))
    return [
        frozenset() if leaf is None else frozenset(i for i in count if of_leaf[id(leaf)] >> i & 1) for leaf in leaves
    ]


def other_leaves(outputs: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves that gradients of `outputs` reach, apart from those known."""
    roots = [output.grad_fn for output in outputs if output.grad_fn is not None]
    leaves = [getattr(node, "variable", None) for node in _consumers_first(roots)]
    ids = set(map(id, known))
    return [leaf for leaf in leaves if leaf is not None and id(leaf) not in ids]


def _consumers_first(roots: Sequence[Any]) -> list[Any]:
    """Every node that can be reached, each before those that it passes gradients on to."""
    order: list[Any] = []
    seen: set[int] = set()
    stack: list[tuple[Any, bool]] = [(root, False) for root in roots]
    while stack:
        node, done = stack.pop()
        if done:
            order.append(node)
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((following, False) for following, _ in node.next_functions if following is not None)
    order.reverse()
    return order
