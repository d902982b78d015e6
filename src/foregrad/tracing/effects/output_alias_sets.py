"""Memories that are no input's and that outputs are in: which graph output gives each of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..._torch.stand_ins import is_stand_in
from ..._torch.tensors import base_of, is_marked, is_usable, is_view
from ...graph.effect_log import Detach, MarkRequiresGrad, SetData, ViewStep
from ...graph.meta import TensorSpec
from ...graph.slots import Base, Output
from ..heap.alias import Value
from ..heap.inplace_detach import keeps_history
from ..heap.refusals import of_exchanged_memory
from ..heap.view_chain import chain_of, is_from_custom_function, memory_root
from ..inputs.inputs import Inputs
from ..recorder.recorder import Recorder
from ..tape.opinfo import take_data
from .analysis import Analysis
from .handles import BaseOutput, as_it_was, marked_at

__all__ = [
    "bases_of",
    "has_been_another",
    "tensor_outputs",
]

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class _Member:
    """An output, or what it was: one that has another tensor's memory by now stays to autograd what it was."""

    tensor: torch.Tensor
    path: str
    value: Value
    was: bool = False


def tensor_outputs(
    recorder: Recorder, inputs: Inputs, leaves: list[Any], paths: list[str], swaps: list[tuple[int, int]]
) -> dict[int, list[_Member]]:
    """Outputs in memory that is no input's, by the id of their storage; each tensor once."""
    by_storage: dict[int, list[_Member]] = {}
    seen: set[int] = set()
    for index, at in swaps:
        record = inputs.records[index]
        value = recorder.changes.log.of(record.stand_in, SetData)[at].after
        if value is not None and not value.storage.is_input:
            member = _Member(record.stand_in, str(record.slot), value)
            by_storage.setdefault(id(value.storage), []).append(member)
    for leaf, path in zip(leaves, paths, strict=True):
        if not is_stand_in(leaf) or id(leaf) in seen or id(leaf) in inputs.by_stand_in:
            continue
        seen.add(id(leaf))
        value = recorder.value_of(leaf)
        if not value.storage.is_input:
            by_storage.setdefault(id(value.storage), []).append(_Member(leaf, path, value))
        old, _ = recorder.changes.replaced.get(id(leaf), (None, False))
        if old is not None and has_been_another(leaf, old) and not old.storage.is_input:
            by_storage.setdefault(id(old.storage), []).append(_Member(leaf, path, old, was=True))
    return {key: group for key, group in by_storage.items() if len(group) > 1 or not group[0].was}


def has_been_another(tensor: torch.Tensor, old: Value) -> bool:
    """Whether a tensor that has another memory than `old` may still be to autograd what that was."""
    return old.storage.is_input or tensor.requires_grad


def bases_of(
    recorder: Recorder, inputs: Inputs, analysis: Analysis, by_storage: dict[int, list[_Member]]
) -> dict[int, BaseOutput]:
    """Graph outputs for every memory; {storage: its base} where outputs are views of one."""
    bases: dict[int, BaseOutput] = {}
    for key, group in by_storage.items():
        first, path, value = group[0].tensor, group[0].path, group[0].value
        _separate(recorder, value.root)
        if _is_given_only(inputs, group) or _owns_more(inputs, group):
            root = value.root  # an input comes to own all of this memory
            whole = Base(tuple(Output(member.path) for member in group))
            output = analysis.add(whole, root.read(recorder.emit), root.spec, None)
            bases[key] = BaseOutput(root, output, ())
            continue
        is_plain = not (is_view(first) and first.requires_grad and base_of(first) is not None)
        has_own = id(first) in recorder.changes.replaced or is_from_custom_function(value, first)
        if len(group) == 1 and (is_plain or has_own):
            entry = value.read(recorder.emit)
            is_view_here = value.parent is not None and isinstance(entry.spec, TensorSpec)
            if is_view_here and (entry.spec.offset != value.spec.offset or not value.spec.is_dense):  # type: ignore[union-attr]
                value.generation = -1  # what was written to a view, seen where the view is
                entry = value.read(recorder.emit)
            is_data = any(above.view is not None and above.view.op is take_data for above in chain_of(value))
            if is_data and not first.requires_grad:
                # What autograd has saved of this memory keeps a version counter of its own.
                output = analysis.add(Base((Output(path),)), entry, value.spec, None)
                bases[key] = BaseOutput(value, output, (ViewStep(take_data, (), (), None, id(value), True),))
                continue
            analysis.add(Output(path), entry, value.spec, first)
            continue
        start, base = _common_base(recorder, [member.value for member in group])
        back: tuple[ViewStep, ...] = ()
        if start is not base:
            back = (as_it_was(start),)
        assert base.fake is not None
        entry = base.read(recorder.emit)
        own = [member.path for member in group if member.tensor is base.fake]
        known = analysis.by_fake.get(id(base.fake))
        slot = Output(own[0]) if own else Base(tuple(Output(member.path) for member in group))
        twin = recorder.detached.twin_of(base.fake)
        if twin is not None and any(_keeps_history(recorder, member) for member in group):
            bases[key] = BaseOutput(start, analysis.add(slot, entry, base.spec, twin), back, detached=True)
            at = recorder.changes.log.detached(base.fake)[-1].at
            analysis.happens(at, Detach(-1, result=bases[key].output))
            analysis.by_fake[id(base.fake)] = bases[key].output
            continue
        leaf = is_marked(base.fake)
        if leaf and base.parent is not None:  # no view of what it was before its sizes changed: that is no leaf
            entry = recorder.emit(aten.detach.default, entry, spec=base.spec)
        bases[key] = BaseOutput(start, analysis.add(slot, entry, base.spec, base.fake), back, leaf)
        if leaf:
            analysis.happens(marked_at(recorder, base.fake, base), MarkRequiresGrad(-1, result=bases[key].output))
        if recorder.values.get(id(base.fake)) is not base:
            analysis.by_fake.pop(id(base.fake))  # that is what it was
            analysis.by_fake |= {} if known is None else {id(base.fake): known}
    return bases


def _is_given_only(inputs: Inputs, group: list[_Member]) -> bool:
    """Whether nobody but inputs has this memory."""
    return all(id(member.tensor) in inputs.by_stand_in for member in group)


def _owns_more(inputs: Inputs, group: list[_Member]) -> bool:
    """Whether an input takes memory over that has more than its elements."""
    owners = [member for member in group if id(member.tensor) in inputs.by_stand_in]
    if len(group) > 1 and any(member.tensor.requires_grad for member in group):
        return False
    return any(owner.value.root.spec.nbytes != owner.value.spec.nbytes for owner in owners)


def _separate(recorder: Recorder, root: Value) -> None:
    """What `copy_` gave a tensor as it is stays another's, which may be saved, and the user may write to this one."""
    sources = {id(memory_root(entry)) for entry in recorder.writes.copied.get(id(root), ())}
    if sources and id(memory_root(root.read(recorder.emit))) in sources:
        root.separate(recorder.emit)


def _keeps_history(recorder: Recorder, member: _Member) -> bool:
    """Whether this is a view taken before its base was detached in place."""
    if not (member.tensor.requires_grad and is_usable(member.tensor)):
        return False
    if not keeps_history(member.tensor):
        raise recorder.detached.stale(member.tensor, member.path)
    return True


def _common_base(recorder: Recorder, values: list[Value]) -> tuple[Value, Value]:
    """The nearest value that all of `values` are views of, and that autograd takes for a tensor of its own.

    And what that tensor is by now: its sizes may have changed in place.
    """
    chains = [list(reversed(chain_of(value))) for value in values]
    common: Value | None = None
    for level in zip(*chains, strict=False):
        if any(value is not level[0] for value in level):
            break
        fake = level[0].fake
        if fake is not None and recorder.values.get(id(fake)) is level[0]:
            common = level[0]
    if common is None or common.fake is None:
        start = chains[0][0]
        return start, start if start.fake is not None else _after_resizing(start)
    own = base_of(common.fake) if is_view(common.fake) else None
    current = None if own is None else recorder.values.get(id(own))
    if current is None or current.storage is not common.storage:
        return common, common
    earlier = chain_of(current)
    return next(value for value in reversed(chains[0]) if value in earlier), current


def _after_resizing(value: Value) -> Value:
    """What the tensor is now that held `value` before its sizes were changed in place."""
    if value.became is None:
        raise of_exchanged_memory("an output")
    while value.became is not None:
        value = value.became
    return value
