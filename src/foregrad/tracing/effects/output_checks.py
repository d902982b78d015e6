"""Returned views that are refused: PyTorch gives them, when they are next looked at, a history that no view has."""

from __future__ import annotations

from typing import NoReturn

import torch

from ..._torch.tensors import base_of, is_usable, leads_to, leads_to_base, share_counters
from ...graph.effect_log import Handle, OutputInfo, ViewStep
from ..heap.refusals import detached_and_written, of_exchanged_memory, written_by_lists
from ..inputs.inputs import Inputs
from ..recorder.recorder import Recorder

__all__ = ["check_copy", "check_memory", "check_view", "counts_with_input", "refuse_former"]

aten = torch.ops.aten


def check_copy(
    recorder: Recorder, leaf: torch.Tensor, base: torch.Tensor | None, steps: tuple[ViewStep, ...], path: str
) -> None:
    """What `reshape` copied is to autograd no view of the copy: once written, it has a history of its own."""
    if base is None or not leaf.requires_grad or not is_usable(leaf) or leaf.is_leaf:
        return
    if any(step.op is aten._unsafe_view.default for step in steps) and not leads_to(leaf, base):
        raise detached_and_written(f"the output {path}", recorder.changes.where(leaf))


def check_memory(recorder: Recorder, inputs: Inputs, leaf: torch.Tensor, path: str) -> None:
    """Autograd takes a view of a tensor that was given other memory for one of what this was, once it is detached."""
    base = base_of(leaf)
    is_detached = id(base) in recorder.changes.replaced and id(base) in recorder.detached.twins
    if is_detached and id(base) not in inputs.by_stand_in:
        raise of_exchanged_memory(f"the output {path}", recorder.changes.where(base))


def counts_with_input(recorder: Recorder, inputs: Inputs, info: OutputInfo, leaf: torch.Tensor) -> bool:
    """Whether an output shares the version counter, but not the memory, of an input: it was taken of a view of that,
    which `.data = ...` gave other memory.
    """
    is_of_input = isinstance(info, Handle) and info.input is not None
    is_known = id(leaf) in recorder.changes.replaced and isinstance(info, Handle) and info.steps
    if is_of_input or is_known or leaf.is_inference():
        return False
    storage = recorder.value_of(leaf).storage
    others = [r.stand_in for r in inputs.records if recorder.value_of(r.stand_in).storage is not storage]
    return any(not other.is_inference() and share_counters(leaf, other) for other in others)


def check_view(recorder: Recorder, leaf: torch.Tensor, path: str) -> None:
    """Autograd loses track of a view when an operator on lists writes both to it and to what it shares memory with."""
    base = base_of(leaf)
    if not leaf.is_leaf and base is not None and base.requires_grad and not leads_to_base(leaf):
        raise written_by_lists(f"the output {path}", recorder.writes.where_lists())


def refuse_former(path: str) -> NoReturn:
    """Raise for a view of memory that an input had."""
    raise of_exchanged_memory(f"the output {path}")
