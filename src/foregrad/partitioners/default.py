"""The default partition: operators of the forward run there, once, and the values that the backward reads are saved.

Eager does so too, with three differences that cost nothing: views are taken again rather than kept beside their base,
constants are made again, and if only the sizes of a tensor are needed, only they are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import fx

from .classify import Kind
from .index import JointIndex, is_number, is_tuple
from .policies import Policy, Wish, to_offload, wishes
from .split import backward_needs, split


def default_partition(
    joint_module: fx.GraphModule,
    _joint_inputs: object,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    static_lifetime_input_nodes: object = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward, recomputing only values tagged for recomputation.

    The arguments are as in PyTorch's partitioner; `num_fwd_outputs` is how many of the joint
    graph's outputs are the forward's. Values tagged by `torch.utils.checkpoint` are recomputed as asked.

    Examples:
        >>> import torch, foregrad
        >>> joint = foregrad.capture(lambda x: x.sin(), torch.ones(2, requires_grad=True))
        >>> forward, backward = foregrad.default_partition(joint.module, None, num_fwd_outputs=1)
        >>> [node.name for node in backward.graph.nodes if node.op == "placeholder"]
        ['primals_1', 'tangents_1']
    """
    index = JointIndex(joint_module, num_fwd_outputs)
    return divided(index, choose_default(index))


def policy_partition(
    joint_module: fx.GraphModule, _joint_inputs: object, *, num_fwd_outputs: int, policy: Policy
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph by the answers of `policy`; values without an answer are treated by `default_partition`."""
    index = JointIndex(joint_module, num_fwd_outputs)
    index.policy = policy
    return divided(index, choose_default(index))


def divided(index: JointIndex, residuals: list[fx.Node]) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(forward, backward) where `residuals` are saved, or views in their place, or copies in host memory as wished."""
    away = to_offload(index)
    halves = split(index, prefer_views(index, residuals, away), away)
    return halves.forward, halves.backward


def choose_default(index: JointIndex) -> list[fx.Node]:
    """The values to save: values of the forward that the backward reads, views and constants looked through."""
    kinds, operands, needs_tangent = index.kinds, index.operands, index.needs_tangent
    wish = wishes(index)
    needed = bytearray(len(index))
    for i in [*index.gradient_numbers, *(i for i in index.once if not index.in_forward[i])]:
        needed[i] = 1
    saved: list[int] = []
    numbers: list[int] = []
    for i in range(len(needed) - 1, -1, -1):
        if not needed[i]:
            continue
        kind = kinds[i]
        if needs_tangent[i] or kind is Kind.VIEW:
            pass
        elif kind is Kind.INPUT or kind is Kind.CONSTANT:
            continue
        elif kind is Kind.NUMBER:
            numbers.append(i)
            continue
        elif _ran_in_forward(index, i) and not _is_recomputed(index, i, wish):
            saved.append(i)
            continue
        for operand in operands[i]:
            needed[operand] = 1
    saved += _numbers_to_save(index, numbers, needed, saved)
    return [index.nodes[i] for i in saved]


def _ran_in_forward(index: JointIndex, i: int) -> bool:
    """Whether the forward computes node i. No output need depend on it: a function may keep it for its backward."""
    return index.exists_in_forward(i) or dict.get(index.nodes[i].meta, "partitioner_tag") in {
        "is_forward",
        "must_be_in_forward",
    }


def _is_recomputed(index: JointIndex, i: int, wish: bytearray | None) -> bool:
    if wish is not None and wish[i] == Wish.RECOMPUTE:
        return True
    return index.kinds[i] is Kind.FACTORY and all(index.kinds[o] is Kind.NUMBER for o in index.operands[i])


def _numbers_to_save(index: JointIndex, numbers: list[int], needed: bytearray, saved: list[int]) -> list[int]:
    """The symbolic numbers that the backward needs and can't compute from the values saved in any case."""
    if not numbers:
        return []
    kinds, operands = index.kinds, index.operands
    kept = set(saved)
    available: dict[int, bool] = {}
    for i in range(max(numbers) + 1):
        if kinds[i] is Kind.NUMBER:
            available[i] = all(available.get(operand, False) for operand in operands[i])
        elif kinds[i] is Kind.INPUT:
            available[i] = bool(needed[i]) or is_number(index.nodes[i])
        elif needed[i]:
            available[i] = i in kept or all(available.get(operand, False) for operand in operands[i])
    return [i for i in numbers if not available[i]]


# -------------------------------------------------------------------- views
# Saving a view in place of its base, where the memory is the same and the operators are fewer.
#
# Partitioners choose bases, so several views of one base are saved as one value. But if the backward reads a single
# view (the transpose of a matrix product, for instance), the forward has that view, and the backward need not take it
# again. A compiler that never writes the base to memory then saves no more than the view.


def prefer_views(index: JointIndex, residuals: list[fx.Node], away: Collection[int] = ()) -> list[fx.Node]:
    """The residuals, with each value that is read through a single view of the forward replaced by the view. Values in
    `away` stay: they are copied.
    """
    used, computed = backward_needs(index, [index.number[node] for node in residuals])
    candidates = {i for i in used if index.kinds[i] is not Kind.INPUT}
    only_reader = _only_readers(index, candidates, computed)
    chosen = []
    for i in used:
        best = at = i
        while i not in away and (reader := only_reader.get(at, -1)) >= 0:
            at = reader
            if not is_tuple(index.nodes[at]) and index.bytes_of(at) <= index.bytes_of(i):
                best = at
        chosen.append(index.nodes[best])
    return chosen


def _only_readers(index: JointIndex, candidates: set[int], computed: bytearray) -> dict[int, int]:
    """For each candidate, and each view on the way: its single reader in the backward, if that is a view that the
    forward takes too; -1 if there are other readers.
    """
    kinds, in_forward, operands = index.kinds, index.in_forward, index.operands
    only: dict[int, int] = {}
    followed = set(candidates)
    for i, bit in enumerate(computed):
        if not bit:
            continue
        is_view = kinds[i] is Kind.VIEW and in_forward[i]
        for operand in operands[i]:
            if operand in followed:
                first = operand not in only and is_view
                only[operand] = i if first else -1
                if first:
                    followed.add(i)
    for i in index.gradient_numbers:
        only[i] = -1
    return only
