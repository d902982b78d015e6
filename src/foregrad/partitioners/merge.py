"""Equal computations made one (common subexpressions), before the cheapest residuals are chosen.

Mixed precision, for instance, casts an activation anew for each of its readers; each cast would be saved.

Left alone are operators that run once, and values that share memory with an output or gradient: two equal outputs
must stay two tensors, and a caller's writes to an output must not reach a residual.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from .._torch.nested import frozen
from .classify import Kind
from .index import JointIndex

_KEPT_APART = (Kind.INPUT, Kind.RANDOM, Kind.EFFECT)


def merge_equal(index: JointIndex) -> int:
    """Let each node stand for its later equals, in `index` alone, not in the joint graph; returns how many went."""
    nodes, kinds, root, number = index.nodes, index.kinds, index.root, index.number
    visible = {root[i] for i in (*index.output_numbers, *index.gradient_numbers)}
    first: dict[Any, int] = {}
    stands_for: dict[int, int] = {}
    for i, node in enumerate(nodes):
        if stands_for:
            index.operands[i] = [stands_for.get(operand, operand) for operand in index.operands[i]]
            root[i] = root[stands_for.get(root[i], root[i])]
        if kinds[i] in _KEPT_APART or root[i] in visible or not (index.in_forward[i] or index.for_backward[i]):
            continue
        key = _key(node, number)
        kept = first.setdefault(key, i)
        if kept != i:
            _merge(index, kept, i)
            stands_for[i] = kept
    return len(stands_for)


def _merge(index: JointIndex, kept: int, gone: int) -> None:
    node = index.nodes[gone]
    index.number[node] = kept
    index.duplicates.setdefault(kept, []).append(node)
    index.in_forward[kept] |= index.in_forward[gone]
    index.for_backward[kept] |= index.for_backward[gone]
    index.in_forward[gone] = index.for_backward[gone] = 0


def _key(node: fx.Node, number: dict[fx.Node, int]) -> Any:
    """A key that is equal for nodes with equal computations and equal tags."""
    get = dict.get
    meta = node.meta
    if "empty" in getattr(node.target, "__name__", ""):
        return id(node)  # its elements are whatever is there
    return (
        node.op,
        node.target,
        frozen(node.args, fx.Node, number.__getitem__),
        frozen(node.kwargs, fx.Node, number.__getitem__) if node.kwargs else None,
        get(meta, "recompute"),
        get(meta, "ac_graph_id"),
        get(meta, "partitioner_tag") in {"must_be_in_forward", "must_be_in_backward"},
    )
