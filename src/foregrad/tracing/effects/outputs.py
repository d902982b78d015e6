"""How each output of the function is given back: from the graph, as an input, or as a view taken afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence
from typing import Any

import torch

from ..._torch.stand_ins import is_stand_in
from ..._torch.tensors import base_of, is_marked, is_usable, is_view, leads_to, leads_to_base, share_counters
from ...errors import UnsupportedSideEffectError
from ...frontend.tree import flatten
from ...graph.call_effects import EffectTarget, GiveAttribute, MakeParameter
from ...graph.effect_log import Handle, MarkRequiresGrad, Recorded, ViewStep, Write
from ...graph.meta import TensorSpec
from ...graph.signature import ConstantOutput, OutputInfo, WrapperOutput
from ...graph.slots import Base, Output
from ...identity import ById, IdSet
from ..heap.alias import Storage, Value, chain_of, is_from_custom_function, memory_root
from ..heap.refusals import detached_and_written, of_exchanged_memory, written_by_lists
from ..inputs.inputs import Inputs
from ..recorder.recorder import Recorder
from ..tape.opinfo import CUTS, take_data
from ..tape.origin import user_line
from ..tape.tape import Entry
from .handles import (
    BaseOutput,
    Placing,
    alias_of_input,
    check_taken,
    last_swap,
    marked_at,
    memory_of,
    place_of,
    starts_of,
    steps_between,
)
from .input_effects import add_effects, add_swap, check_histories, replaced
from .results import Returned

aten = torch.ops.aten


def place_results(recorder: Recorder, inputs: Inputs, leaves: list[Any], paths: list[str]) -> Returned:
    """Decide for every written input and every output leaf how the runtime rebuilds it."""
    inputs.wrappers.check()
    views = [(tensor, path) for tensor, path in zip(leaves, paths, strict=True) if is_stand_in(tensor)]
    check_histories(recorder, inputs, views)
    placing = Placing(recorder, inputs, starts_of(recorder, inputs.records))
    add_effects(placing)
    tensors = tensor_outputs(placing, leaves, paths)
    placing.bases = bases = bases_of(placing, tensors)
    inference: dict[int, bool] = {}
    for key, group in tensors.items():
        first = group[0].tensor
        inference[bases[key].output if key in bases else placing.graph.by_fake[first]] = first.is_inference()
    swaps = ById((event.tensor, event.at) for event in recorder.changes.log.events if event.after is not None)
    outputs: list[OutputInfo] = []
    for leaf, path in zip(leaves, paths, strict=True):
        outputs.append(_output(placing, leaf, path))
        if swaps and is_stand_in(leaf):
            _check_exchanged(placing, outputs[-1], leaf, swaps)
    for index in replaced(recorder, inputs.records):
        record = inputs.records[index]
        add_swap(placing, index, memory_of(placing, last_swap(recorder, record), str(record.slot)))
    return Returned(placing.graph, outputs, placing.log, inference, frozenset(bases))


# -------------------------------------------------------------------- outputs


def _output(placing: Placing, leaf: object, path: str) -> OutputInfo:
    inputs = placing.inputs
    if isinstance(leaf, torch.SymFloat):
        value = placing.recorder.decisions.numbers.entry_of(leaf)
        if isinstance(value, Entry):
            return Handle(path, None, placing.graph.add(Output(path), value, value.tensor, None))
        leaf = value
    if not isinstance(leaf, torch.Tensor):
        return ConstantOutput(path, leaf)
    wrapper = inputs.wrappers.returned(leaf, inputs.adopt)
    if wrapper is not None:
        return WrapperOutput(path, wrapper)
    record = inputs.by_stand_in.get(leaf) or inputs.by_real.get(leaf)
    if record is None and not is_stand_in(leaf):
        inputs.adopt(leaf)
        record = inputs.by_real[leaf]
    if record is not None:
        return Handle(path, inputs.records.index(record))
    return _memory(placing, leaf, path)


def _memory(placing: Placing, leaf: torch.Tensor, path: str) -> OutputInfo:
    """The output, be it as before or with a second tensor's memory."""
    recorder = placing.recorder
    value = recorder.value_of(leaf)
    if recorder.writes.listed and leaf.requires_grad and is_view(leaf) and is_usable(leaf):
        _check_view(recorder, leaf, path)
    alias = alias_of_input(placing, value, path)
    if alias is not None:
        return _with_own_history(placing, alias, leaf, value)[0]
    if value.storage.is_input:  # that an input had
        raise of_exchanged_memory(f"the output {path}")
    existing = placing.graph.by_fake.get(leaf)
    if existing is not None:
        handle = Handle(path, None, existing)
        if is_marked(leaf):
            placing.log.append(Recorded(marked_at(recorder, leaf, value), MarkRequiresGrad(**place_of(handle))))
        return handle
    base = placing.bases[value.storage]
    check_taken(recorder, value, base.value, (base.tensor,), path)
    alias = Handle(path, None, base.output, (*base.back, *steps_between(value, base.value)))
    _check_copy(recorder, leaf, placing.graph[base.output].carrier, alias.steps, path)
    alias, has_own = _with_own_history(placing, alias, leaf, value)
    has_history = has_own or base.leaf or placing.graph[base.output].carrier is not None
    if not has_history and leaf.requires_grad:
        raise of_exchanged_memory(f"the output {path}")
    return alias


def _with_own_history(placing: Placing, alias: Handle, leaf: torch.Tensor, value: Value) -> tuple[Handle, bool]:
    """The handle of a view, and whether the view is a leaf or is given a history of its own.

    A view cut off its base has no history, but for a result of a custom Function, to autograd no view. A write with
    gradients gives such a view a history: it is refused.
    """
    if not leaf.requires_grad:
        return alias, False
    is_cut = any(step.op in CUTS for step in alias.steps)
    if is_usable(leaf) and leaf.is_leaf:
        has_own = is_cut or placing.recorder.changes.log.requires_itself(leaf)
        if has_own:
            at = marked_at(placing.recorder, leaf, value)
            placing.log.append(Recorded(at, MarkRequiresGrad(**place_of(alias))))
        return alias, has_own
    is_made = is_usable(leaf) and is_from_custom_function(value, leaf)
    if (is_cut and not is_made) or (is_made and value.spec.overlaps_itself):
        raise detached_and_written(f"the output {alias.path}", user_line(value.taken_at))
    if not is_made:
        return alias, False
    cut = ViewStep(aten.detach.default, (), (), None, id(value), True)
    steps = (cut, *(dataclasses.replace(step, grad_enabled=True) for step in alias.steps))
    alias = dataclasses.replace(alias, steps=steps)
    if leaf not in placing.graph.by_fake:
        output = placing.graph.add(Output(alias.path), value.read(placing.recorder.emit), value.spec, leaf)
        write = Write(output=output, differentiable=True, counted=False, **place_of(alias))
        placing.log.append(Recorded(value.storage.written_at, write))
    return alias, True


# -------------------------------------------------------------------- views that are refused


def _check_copy(
    recorder: Recorder, leaf: torch.Tensor, base: torch.Tensor | None, steps: tuple[ViewStep, ...], path: str
) -> None:
    """What `reshape` copied is to autograd no view of the copy: once written, it has a history of its own."""
    if base is None or not leaf.requires_grad or not is_usable(leaf) or leaf.is_leaf:
        return
    if any(step.op is aten._unsafe_view.default for step in steps) and not leads_to(leaf, base):
        raise detached_and_written(f"the output {path}", recorder.changes.where(leaf))


def _check_exchanged(placing: Placing, info: OutputInfo, leaf: torch.Tensor, swaps: ById[torch.Tensor, int]) -> None:
    """What was taken of a tensor before it was given other memory shares with it what a call can't put together: it is
    a view of it, or counts its writes with it.
    """
    recorder, value = placing.recorder, placing.recorder.value_of(leaf)
    of = info.input if isinstance(info, Handle) else None
    for tensor, at in swaps.items():
        was_taken = value.born < at
        is_apart = of is None or placing.inputs.records[of].stand_in is not tensor
        if (is_view(leaf) and base_of(leaf) is tensor and was_taken) or (
            leaf is not tensor and is_apart and share_counters(leaf, tensor)
        ):
            raise of_exchanged_memory(f"the output {info.path}", recorder.changes.where(tensor))


def _check_view(recorder: Recorder, leaf: torch.Tensor, path: str) -> None:
    """Autograd loses track of a view when an operator on lists writes both to it and to what it shares memory with."""
    base, listed = base_of(leaf), recorder.writes.listed
    ways = [value.fake for value in chain_of(recorder.value_of(leaf)) if value.fake is not None]
    is_listed = any(fake in listed and is_view(fake) for fake in ways)
    if is_listed and not leaf.is_leaf and base is not None and base.requires_grad and not leads_to_base(leaf):
        raise written_by_lists(f"the output {path}", recorder.writes.where_lists())


# -------------------------------------------------------------------- results that are objects of their own
# Results as Python objects: parameters among them, and attributes that the function set on them.


def parameters_made(results: Sequence[object], known: Container[object]) -> list[MakeParameter]:
    """Effects for the results that are parameters which the function made; `known`: results that are inputs."""
    return [MakeParameter(EffectTarget(at)) for at, t in _made(results, known) if type(t) is torch.nn.Parameter]


def attributes_set(
    name: str, results: Sequence[object], paths: Sequence[str], known: Container[object]
) -> list[GiveAttribute]:
    """An effect for each attribute that the function set on a result which it made."""
    found = [(at, key, value) for at, t in _made(results, known) for key, value in t.__dict__.items()]
    for at, key, value in found:
        if any(isinstance(leaf, (torch.Tensor, torch.SymInt, torch.SymFloat)) for leaf in flatten(value)[0]):
            raise UnsupportedSideEffectError(
                f"`{name}` sets the attribute {key} of {paths[at]}, a result, to a tensor; a compiled call would "
                "not. Return the tensor as well."
            )
    return [GiveAttribute(EffectTarget(at), key, value) for at, key, value in found]


def _made(results: Sequence[object], known: Container[object]) -> list[tuple[int, torch.Tensor]]:
    first = ById((t, at) for at, t in reversed(list(enumerate(results))) if is_stand_in(t))
    return [(at, t) for t, at in first.items() if t not in known]


# -------------------------------------------------------------------- outputs that share memory
# Outputs in memory that is no input's: the graph output that gives each such memory.


@dataclasses.dataclass(frozen=True, slots=True)
class _Member:
    """An output."""

    tensor: torch.Tensor
    path: str
    value: Value


def tensor_outputs(placing: Placing, leaves: list[object], paths: list[str]) -> dict[Storage, list[_Member]]:
    """Outputs in memory that is no input's, by their storage; each tensor once."""
    recorder, inputs = placing.recorder, placing.inputs
    by_storage: dict[Storage, list[_Member]] = {}
    seen: IdSet[torch.Tensor] = IdSet()
    for record in map(inputs.records.__getitem__, replaced(recorder, inputs.records)):
        value = last_swap(recorder, record)
        if not value.storage.is_input:
            member = _Member(record.stand_in, str(record.slot), value)
            by_storage.setdefault(value.storage, []).append(member)
    for leaf, path in zip(leaves, paths, strict=True):
        if not is_stand_in(leaf) or leaf in seen or leaf in inputs.by_stand_in:
            continue
        seen.add(leaf)
        value = recorder.value_of(leaf)
        if not value.storage.is_input:
            by_storage.setdefault(value.storage, []).append(_Member(leaf, path, value))
    return by_storage


def bases_of(placing: Placing, by_storage: dict[Storage, list[_Member]]) -> dict[Storage, BaseOutput]:
    """Graph outputs for every memory; {storage: its base} where outputs are views of one."""
    recorder, inputs = placing.recorder, placing.inputs
    bases: dict[Storage, BaseOutput] = {}
    for key, group in by_storage.items():
        first, path, value = group[0].tensor, group[0].path, group[0].value
        _separate(recorder, value.root)
        if all(member.tensor in inputs.by_stand_in for member in group) or _owns_more(inputs, group):
            root = value.root  # an input comes to own the whole memory
            whole = Base(tuple(Output(member.path) for member in group))
            output = placing.graph.add(whole, root.read(recorder.emit), root.spec, None)
            bases[key] = BaseOutput(root, output, ())
            continue
        is_plain = not (is_view(first) and first.requires_grad and base_of(first) is not None)
        if len(group) == 1 and (is_plain or is_from_custom_function(value, first)):
            entry = value.read(recorder.emit)
            is_view_here = value.parent is not None and isinstance(entry.spec, TensorSpec)
            if is_view_here and (entry.tensor.offset != value.spec.offset or not value.spec.is_dense):
                value.generation = -1  # a write to a view, seen where the view is
                entry = value.read(recorder.emit)
            is_data = any(above.view is not None and above.view.op is take_data for above in chain_of(value))
            if is_data and not first.requires_grad:
                # A tensor that autograd saved of this memory keeps a version counter of its own.
                output = placing.graph.add(Base((Output(path),)), entry, value.spec, None)
                bases[key] = BaseOutput(value, output, (ViewStep(take_data, (), (), None, id(value), True),))
                continue
            placing.graph.add(Output(path), entry, value.spec, first)
            continue
        base = _common_base(recorder, [member.value for member in group])
        assert base.fake is not None
        entry = base.read(recorder.emit)
        own = [member.path for member in group if member.tensor is base.fake]
        slot = Output(own[0]) if own else Base(tuple(Output(member.path) for member in group))
        leaf = is_marked(base.fake)
        if leaf and base.parent is not None:  # not of the tensor from before a resize: that tensor is no leaf
            entry = recorder.emit(aten.detach.default, entry, spec=base.spec)
        bases[key] = BaseOutput(base, placing.graph.add(slot, entry, base.spec, base.fake), (), leaf, base.fake)
        if leaf:
            placing.log.append(
                Recorded(marked_at(recorder, base.fake, base), MarkRequiresGrad(-1, result=bases[key].output))
            )
    return bases


def _owns_more(inputs: Inputs, group: list[_Member]) -> bool:
    """Whether an input takes memory over that has more than its elements."""
    owners = [member for member in group if member.tensor in inputs.by_stand_in]
    if len(group) > 1 and any(member.tensor.requires_grad for member in group):
        return False
    return any(owner.value.root.spec.nbytes != owner.value.spec.nbytes for owner in owners)


def _separate(recorder: Recorder, root: Value) -> None:
    """A value that `copy_` passed on unchanged is its source's and may be saved; the user may write to the copy."""
    sources = {memory_root(entry) for entry in recorder.writes.copied.get(root, ())}
    if sources and memory_root(root.read(recorder.emit)) in sources:
        root.separate(recorder.emit)


def _common_base(recorder: Recorder, values: list[Value]) -> Value:
    """The nearest value that all of `values` are views of, and that autograd takes for a tensor of its own."""
    chains = [list(reversed(chain_of(value))) for value in values]
    common, own = None, None
    for level in zip(*chains, strict=False):
        if any(value is not level[0] for value in level):
            break
        fake = level[0].fake
        if fake is not None and recorder.values.get(fake) is level[0]:
            common, own = level[0], base_of(fake) if is_view(fake) else None
    current = None if own is None else recorder.values.get(own)
    if common is not None and current is not None and current.storage is common.storage:
        common = current if current in chains[0] else None
    if common is None:  # its sizes have changed in place since
        raise of_exchanged_memory("an output")
    return common
