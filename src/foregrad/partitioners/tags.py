"""What the user asked of each value, with `torch.utils.checkpoint` or a policy: keep it, or compute it again.

Captures leave a `CheckpointPolicy` under ``"recompute"`` in the metadata of what ran in a checkpointed region, and
the region's number under ``"ac_graph_id"``. What a region says must be, is so; what it prefers gives way to the answer
of a policy for the whole function.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from .classify import Kind
from .hosts import can_offload
from .index import JointIndex, is_tuple, value_of
from .policies import OFFLOAD, RECOMPUTE, answers

__all__ = ["Wish", "to_offload", "wishes"]


class Wish(enum.IntEnum):
    """What a partitioner may do with a value that the backward needs."""

    NONE = 0
    SAVE = 1
    RECOMPUTE = 2


# What is kept in host memory is kept; where, `to_offload` says.
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
    """The wish for each node, or None when the graph has no tags. Wishes that can't be granted are left out:

    random operators and effects run once, so their results are saved, and what reads an input that the call then
    overwrites is not computed from it again.
    """
    get = dict.get
    policies = [get(node.meta, "recompute") for node in index.nodes]
    asked = answers(index)
    if not asked and not any(policy is not None for policy in policies):
        return None
    found = bytearray(len(index))
    for i, policy in enumerate(policies):
        if index.needs_tangent[i] or index.kinds[i] is Kind.INPUT:
            continue
        found[i] = _WISH_BY_POLICY.get(policy, Wish.NONE)
        if index.kinds[i] is Kind.ITEM and found[i] != Wish.SAVE:
            # One result of several comes with its operator.
            found[i] = found[index.operands[i][0]]
    _save_borders(index, found)
    for i, policy in enumerate(policies):
        if policy is CheckpointPolicy.MUST_SAVE and index.kinds[i] is Kind.VIEW:
            # A view can't be kept without the memory it looks at.
            found[index.root[i]] = Wish.SAVE
    _ask_policy(index, asked, policies, found)
    for i, wish in enumerate(found):
        if index.kinds[i] in _ALWAYS_AGAIN:
            found[i] = Wish.NONE
        elif wish == Wish.RECOMPUTE and _runs_once(index, i, found):
            found[i] = Wish.SAVE
    return found


_CPU = torch.device("cpu")
_OFFLOADED = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


def to_offload(index: JointIndex) -> set[int]:
    """The nodes whose values the user wants in host memory, where they are saved at all.

    What a checkpointed region wants on the CPU is left there, if that is where it is.
    """
    asked = answers(index)
    found = set()
    for i, node in enumerate(index.nodes):
        policy = dict.get(node.meta, "recompute")
        answer = None if policy in _MUST else asked.get(i)
        elsewhere = policy in _OFFLOADED and getattr(value_of(node), "device", _CPU) != _CPU
        if answer == OFFLOAD or (elsewhere and (answer is None or policy is _OFFLOADED[0])):
            found.add(index.root[i])
    return can_offload(index, found) if found else found


_MUST = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.MUST_CPU_OFFLOAD)


def _ask_policy(index: JointIndex, asked: dict[int, str], policies: list[Any], found: bytearray) -> None:
    """Put the answers of the function's policy into `found`, save where a region says otherwise."""
    for i, answer in asked.items():
        is_item = index.kinds[i] is Kind.ITEM
        source = index.operands[i][0] if is_item else i
        if policies[i] in _MUST or policies[source] in _MUST:
            continue
        found[i] = Wish.RECOMPUTE if answer == RECOMPUTE else Wish.SAVE
        if is_item and answer == RECOMPUTE and is_tuple(index.nodes[source]):
            found[source] = Wish.RECOMPUTE  # which leaves other results of it to be saved


def _save_borders(index: JointIndex, found: bytearray) -> None:
    """Between one checkpointed region and the next, the value that the next starts from is kept.

    Otherwise regions in a row would be one region. So is a region's result when a hook waits for its gradient: the
    hook may be what makes the recomputation possible (it gathers the parameters), and that gradient comes first.
    """
    users = index.users
    for i, node in enumerate(index.nodes):
        if found[i] != Wish.RECOMPUTE:
            continue
        readers = [user for user in users[i] if found[user] == Wish.RECOMPUTE]
        region = dict.get(node.meta, "ac_graph_id")
        later = region is not None and any(
            (other := dict.get(index.nodes[user].meta, "ac_graph_id")) is not None and other > region
            for user in readers
        )
        if later or (not readers and dict.get(node.meta, "has_backward_hook", False)):
            root = index.root[i]
            if found[root] != Wish.NONE:
                found[root] = Wish.SAVE


def _runs_once(index: JointIndex, i: int, found: bytearray) -> bool:
    """Whether running node i again is wrong, or is impossible because of what it reads."""
    if index.kinds[i] is Kind.ITEM:
        return found[index.operands[i][0]] != Wish.RECOMPUTE
    if index.runs_once_in_forward(i):
        return True
    return bool(index.written) and any(index.root[operand] in index.written for operand in index.operands[i])
