"""The user's wishes for each value, from `torch.utils.checkpoint` or a policy: save it, or compute it again.

Captures leave a `CheckpointPolicy` under ``"recompute"`` in the metadata of nodes that ran in a checkpointed region,
and the region's number under ``"ac_graph_id"``. A MUST of a region always holds; a PREFER gives way to the answer of a
policy for the whole function.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ..graph.meta import value_of
from .classify import Kind
from .index import JointIndex, is_tuple
from .instead import can_offload
from .policies import OFFLOAD, RECOMPUTE, answers


class Wish(enum.IntEnum):
    """The choice that a partitioner has for a value that the backward needs."""

    NONE = 0
    SAVE = 1
    RECOMPUTE = 2


# A value in host memory is saved; `to_offload` says where.
_WISH_BY_POLICY: dict[Any, Wish] = {
    CheckpointPolicy.MUST_SAVE: Wish.SAVE,
    CheckpointPolicy.PREFER_SAVE: Wish.SAVE,
    CheckpointPolicy.MUST_RECOMPUTE: Wish.RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: Wish.RECOMPUTE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: Wish.SAVE,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: Wish.SAVE,
}

# Computing these again costs nothing, so there is nothing to wish.
_ALWAYS_AGAIN = (Kind.VIEW, Kind.NUMBER, Kind.CONSTANT)


def wishes(index: JointIndex) -> bytearray | None:
    """The wish for each node, or None if the graph has no tags. Wishes that can't be granted are left out.

    Random operators and effects run once, so their results are saved. A value computed from an input that the call
    then overwrites is saved too.
    """
    get = dict.get
    policies = [get(node.meta, "recompute") for node in index.nodes]
    asked = answers(index)
    if not asked and not any(policy is not None for policy in policies):
        return None
    wish_by_node = bytearray(len(index))
    for i, policy in enumerate(policies):
        if index.needs_tangent[i] or index.kinds[i] is Kind.INPUT:
            continue
        wish_by_node[i] = _WISH_BY_POLICY.get(policy, Wish.NONE)
        if index.kinds[i] is Kind.ITEM and wish_by_node[i] != Wish.SAVE:
            # One result of several comes with its operator.
            wish_by_node[i] = wish_by_node[index.operands[i][0]]
    _save_borders(index, wish_by_node)
    for i, policy in enumerate(policies):
        if policy is CheckpointPolicy.MUST_SAVE and index.kinds[i] is Kind.VIEW:
            # A view can't be kept without the memory it looks at.
            wish_by_node[index.root[i]] = Wish.SAVE
    _ask_policy(index, asked, policies, wish_by_node)
    for i, wish in enumerate(wish_by_node):
        if index.kinds[i] in _ALWAYS_AGAIN:
            wish_by_node[i] = Wish.NONE
        elif wish == Wish.RECOMPUTE and _runs_once(index, i, wish_by_node):
            wish_by_node[i] = Wish.SAVE
    return wish_by_node


_CPU = torch.device("cpu")
_OFFLOADED = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


def to_offload(index: JointIndex) -> set[int]:
    """The nodes whose values the user wants in host memory, if they are saved at all.

    Values of a checkpointed region that are on the CPU already are not moved.
    """
    asked = answers(index)
    roots = set()
    for i, node in enumerate(index.nodes):
        policy = dict.get(node.meta, "recompute")
        if policy is None and not asked:
            continue
        answer = None if policy in _MUST else asked.get(i)
        elsewhere = policy in _OFFLOADED and getattr(value_of(node), "device", _CPU) != _CPU
        if answer == OFFLOAD or (elsewhere and (answer is None or policy is _OFFLOADED[0])):
            roots.add(index.root[i])
    return can_offload(index, roots) if roots else roots


_MUST = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_CPU_OFFLOAD)


def _ask_policy(index: JointIndex, asked: dict[int, str], policies: list[Any], wish_by_node: bytearray) -> None:
    """Put the answers of the function's policy into `wish_by_node`, unless a region says otherwise."""
    for i, answer in asked.items():
        is_item = index.kinds[i] is Kind.ITEM
        source = index.operands[i][0] if is_item else i
        if policies[i] in _MUST or policies[source] in _MUST:
            continue
        wish_by_node[i] = Wish.RECOMPUTE if answer == RECOMPUTE else Wish.SAVE
        if is_item and answer == RECOMPUTE and is_tuple(index.nodes[source]):
            wish_by_node[source] = Wish.RECOMPUTE  # its other results can still be saved


def _save_borders(index: JointIndex, wish_by_node: bytearray) -> None:
    """Save the values that pass from one checkpointed region to the next, else regions in a row would be one region.

    A region's result is saved too if a hook waits for its gradient: the hook may make the recomputation possible (it
    gathers the parameters), and that gradient comes first.
    """
    users = index.users
    for i, node in enumerate(index.nodes):
        if wish_by_node[i] != Wish.RECOMPUTE:
            continue
        readers = [user for user in users[i] if wish_by_node[user] == Wish.RECOMPUTE]
        region = dict.get(node.meta, "ac_graph_id")
        later = region is not None and any(
            (other := dict.get(index.nodes[user].meta, "ac_graph_id")) is not None and other > region
            for user in readers
        )
        if later or (not readers and dict.get(node.meta, "has_backward_hook", False)):
            root = index.root[i]
            if wish_by_node[root] != Wish.NONE:
                wish_by_node[root] = Wish.SAVE


def _runs_once(index: JointIndex, i: int, wish_by_node: bytearray) -> bool:
    """Whether running node i again is wrong, or its operands are gone."""
    if index.kinds[i] is Kind.ITEM:
        return wish_by_node[index.operands[i][0]] != Wish.RECOMPUTE
    if index.runs_once_in_forward(i):
        return True
    return bool(index.written) and any(index.root[operand] in index.written for operand in index.operands[i])
