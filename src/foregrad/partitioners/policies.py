"""Policies: the user's word on each value of the forward: save it, compute it again, keep it in host memory.

A policy is asked about every value that the forward computes and the backward may want, views and tuples apart. Its
answers become wishes; every partitioner grants them like wishes of checkpointed regions.
"""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import PartitionError
from ..graph.meta import TensorSpec, value_of
from ..graph.printing import user_line
from .classify import Kind
from .index import JointIndex, is_tuple, value_bytes
from .instead import can_offload

SAVE, RECOMPUTE, OFFLOAD = "save", "recompute", "offload"

_MEANING: dict[object, str | None] = {
    None: None,
    True: SAVE,
    False: RECOMPUTE,
    SAVE: SAVE,
    RECOMPUTE: RECOMPUTE,
    OFFLOAD: OFFLOAD,
    CheckpointPolicy.MUST_SAVE: SAVE,
    CheckpointPolicy.PREFER_SAVE: SAVE,
    CheckpointPolicy.MUST_RECOMPUTE: RECOMPUTE,
    CheckpointPolicy.PREFER_RECOMPUTE: RECOMPUTE,
    CheckpointPolicy.MUST_CPU_OFFLOAD: OFFLOAD,
    CheckpointPolicy.PREFER_CPU_OFFLOAD: OFFLOAD,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """A value of the forward about which a policy decides. `names`: its names from `checkpoint_name`.

    Examples:
        >>> import torch, foregrad
        >>> seen = []
        >>> policy = foregrad.Policy(lambda candidate: seen.append(candidate.nbytes))
        >>> joint = foregrad.capture(lambda x: x.sin().exp().sum(), torch.ones(4, requires_grad=True))
        >>> parts = foregrad.partition(joint, policy)
        >>> seen[:2]  # `sin` and `exp`: four numbers of four bytes each
        [16, 16]
    """

    node: fx.Node
    names: tuple[str, ...]

    @property
    def op(self) -> Any:
        """The operator that makes the value; for one result of several, the operator with all."""
        node = self.node
        while node.target is operator.getitem:
            node = node.all_input_nodes[0]
        return node.target

    @property
    def spec(self) -> TensorSpec:
        """Shape, strides, dtype and device."""
        value = value_of(self.node)
        return value if isinstance(value, TensorSpec) else TensorSpec.of(value)

    @property
    def nbytes(self) -> int:
        return value_bytes(self.spec)

    @property
    def line(self) -> str | None:
        """The user's line: `model.py:41 in forward: x = self.fc(x)`."""
        return user_line(self.node)

    @property
    def module(self) -> str:
        """The path of the innermost module that makes it, "layers.3.mlp"; "" outside of modules."""
        stack = self.node.meta.get("nn_module_stack") or {}
        return str(next(reversed(stack.values()))[0]) if stack else ""


@dataclasses.dataclass(frozen=True)
class Policy:
    """A policy from a function of a `Candidate` that answers "save", "recompute", "offload", or None (no
    preference).

    True and False mean the first two, and a `CheckpointPolicy` of PyTorch's counts by its name. Values answered by None
    are left to the partition: to the solver if there is a memory budget, else they are saved if the backward reads
    them. Four policies have names: `everything_saveable`, `nothing_saveable`, `dots_saveable` (saves products of
    matrices, and attention) and `dots_with_no_batch_dims_saveable` (saves products without a batch dimension).

    Examples:
        >>> import torch, foregrad
        >>> large = foregrad.Policy(lambda candidate: "recompute" if candidate.nbytes > 2**20 else None)
        >>> f = foregrad.compile(lambda x: x.sin().exp().sum(), backend="eager", partition=large)
        >>> f(torch.zeros(2, requires_grad=True)).item()
        2.0
    """

    function: Callable[[Candidate], Any]

    def __call__(self, candidate: Candidate) -> str | None:
        """The answer, in words. Raises `PartitionError` if the function answers anything else."""
        answer = self.function(candidate)
        try:
            return _MEANING[answer]
        except (KeyError, TypeError):
            raise PartitionError(
                f"a policy answered {answer!r} for {candidate.node.name} ({candidate.op}) at {candidate.line}; answer "
                '"save", "recompute", "offload", or None.'
            ) from None


@dataclasses.dataclass(frozen=True)
class _Constant:
    """A policy with one answer for all nodes."""

    answer: str

    def __call__(self, candidate: Candidate) -> str:
        return self.answer


@dataclasses.dataclass(frozen=True)
class _Operators:
    """Results of the operators are saved, and nothing else."""

    names: frozenset[str]

    def __call__(self, candidate: Candidate) -> str:
        schema = getattr(candidate.op, "_schema", None)
        return SAVE if schema is not None and schema.name in self.names else RECOMPUTE


@dataclasses.dataclass(frozen=True)
class _Names:
    """Values of the names are kept, and nothing else."""

    saved: frozenset[str]
    offloaded: frozenset[str] = frozenset()

    def __call__(self, candidate: Candidate) -> str:
        if self.saved.intersection(candidate.names):
            return SAVE
        return OFFLOAD if self.offloaded.intersection(candidate.names) else RECOMPUTE


_UNBATCHED = frozenset({"aten::mm", "aten::addmm", "aten::mv", "aten::addmv", "aten::dot", "aten::_scaled_mm"})
_BATCHED = frozenset(
    {
        "aten::bmm",
        "aten::baddbmm",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_attention_math",
    }
)


def _documented(policy: Policy, text: str) -> Policy:
    object.__setattr__(policy, "__doc__", text)  # the class is frozen; `inspect.getdoc` and editors show this text
    return policy


everything_saveable = _documented(Policy(_Constant(SAVE)), "Save every value that the backward reads.")
nothing_saveable = _documented(
    Policy(_Constant(RECOMPUTE)),
    "Save no value that the forward computes: the backward computes them again from the inputs. Results of random "
    "operators and of effects are saved, since these run once.",
)
dots_saveable = _documented(
    Policy(_Operators(_UNBATCHED | _BATCHED)),
    "Save the results of matrix products (`mm`, `addmm`, `mv`, `dot`, `bmm`, `baddbmm`) and of attention; compute all "
    "else again.",
)
dots_with_no_batch_dims_saveable = _documented(
    Policy(_Operators(_UNBATCHED)),
    "Save the results of matrix products without a batch dimension (`mm`, `addmm`, `mv`, `addmv`, `dot`), those of "
    "linear layers; compute all else again, attention included.",
)


def save_only_these_names(*names: str) -> Policy:
    """Save values that `checkpoint_name` named in `names`; compute all else again.

    Examples:
        >>> import foregrad
        >>> foregrad.save_only_these_names("scores") == foregrad.save_only_these_names("scores")
        True
    """
    return Policy(_Names(frozenset(names)))


def offload_names(*names: str, saved: Collection[str] = ()) -> Policy:
    """Keep values that `checkpoint_name` named in `names` in host memory, save `saved`; compute all else again.

    Examples:
        >>> import torch, foregrad
        >>> def f(x):
        ...     return foregrad.checkpoint_name(x.exp(), "large").sin().sum()
        >>> joint = foregrad.capture(f, torch.ones(2, requires_grad=True))
        >>> foregrad.partition(joint, foregrad.offload_names("large")).report().summary().count("host memory")
        1
    """
    return Policy(_Names(frozenset(saved), frozenset(names)))


def answers(index: JointIndex) -> dict[int, str]:
    """The answers of the policy of `index`, by node; nodes without an answer are left out."""
    policy = index.policy
    if policy is None:
        return {}
    if index.answers is not None:
        return index.answers
    by_node = index.answers = {}
    for i, node in enumerate(index.nodes):
        if (
            node.op != "call_function"
            or index.needs_tangent[i]
            or not isinstance(value_of(node), (TensorSpec, torch.Tensor))
        ):
            continue
        nodes = [node, *index.duplicates.get(i, ())]
        names = dict.fromkeys(name for one in nodes for name in dict.get(one.meta, "checkpoint_names", ()))
        answer = policy(Candidate(node, tuple(names)))
        if answer is not None:
            by_node[i] = answer
    return by_node


# -------------------------------------------------------------------------------------------------------------- wishes
# The user's wishes for each value, from `torch.utils.checkpoint` or a policy: save it, or compute it again.
#
# Captures leave a `CheckpointPolicy` under ``"recompute"`` in the metadata of nodes that ran in a checkpointed
# region, and the region's number under ``"ac_graph_id"``. A MUST of a region always holds; a PREFER gives way to the
# answer of a policy for the whole function.


class Wish(enum.IntEnum):
    """The choice that a partitioner has for a value that the backward needs."""

    NONE = 0
    SAVE = 1
    RECOMPUTE = 2


# A value in host memory is saved; `to_offload` says where.
_WISH: dict[str | None, Wish] = {None: Wish.NONE, SAVE: Wish.SAVE, RECOMPUTE: Wish.RECOMPUTE, OFFLOAD: Wish.SAVE}

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
        wish_by_node[i] = _WISH[_MEANING.get(policy)]
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
    """The nodes with values that the user wants in host memory, if saved at all.

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


def _ask_policy(index: JointIndex, asked: dict[int, str], policies: list[object], wish_by_node: bytearray) -> None:
    """Put the answers of the function's policy into `wish_by_node`, unless a region says otherwise."""
    for i, answer in asked.items():
        is_item = index.kinds[i] is Kind.ITEM
        source = index.operands[i][0] if is_item else i
        if policies[i] in _MUST or policies[source] in _MUST:
            continue
        wish_by_node[i] = _WISH[answer]
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
