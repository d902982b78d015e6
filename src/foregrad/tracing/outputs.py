"""How each output of the function is given back: from the graph, as an input, or as a view taken afterwards."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .._torch.fakes import FakeTensor
from .._torch.tensors import base_of, history_of, is_usable, is_view, leads_to_base, share_counters, version_of
from ..errors import UnsupportedAliasError, UnsupportedMutationError
from ..graph.meta import TensorSpec
from ..graph.signature import (
    AliasOutput,
    ConstantOutput,
    DecisionInfo,
    GraphOutput,
    InputOutput,
    MetadataWrite,
    OutputInfo,
    Replacement,
    Update,
    ViewStep,
    When,
)
from ..graph.slots import Base, Decision, Output, Slot, Updated
from .alias import Value, View
from .decisions import Decided
from .inputs import InputRecord, Inputs
from .opinfo import CUTS, set_to
from .recorder import Recorder
from .replaced import in_order, is_barred, is_set_again, is_written_with_history, replacement_of
from .roots import chain_of, is_from_custom_function
from .tape import Entry

__all__ = ["Analysis", "analyze"]

aten = torch.ops.aten


@dataclasses.dataclass(slots=True)
class Analysis:
    """What `analyze` finds. `fakes[i]` is the autograd tensor of graph output i, when it carries gradients."""

    slots: list[Slot] = dataclasses.field(default_factory=list)
    entries: list[Entry] = dataclasses.field(default_factory=list)
    specs: list[TensorSpec] = dataclasses.field(default_factory=list)
    fakes: list[torch.Tensor | None] = dataclasses.field(default_factory=list)
    updates: list[Update] = dataclasses.field(default_factory=list)
    whole_updates: list[tuple[InputRecord, int]] = dataclasses.field(default_factory=list)  # of shared memories
    metadata_writes: list[MetadataWrite] = dataclasses.field(default_factory=list)
    replaced: list[int] = dataclasses.field(default_factory=list)  # inputs that are other tensors now
    replacements: list[Replacement] = dataclasses.field(default_factory=list)
    counted: list[int] = dataclasses.field(default_factory=list)
    outputs: list[OutputInfo] = dataclasses.field(default_factory=list)
    aliases: list[tuple[int, torch.Tensor]] = dataclasses.field(default_factory=list)  # those of `outputs`, fakes
    decisions: list[DecisionInfo] = dataclasses.field(default_factory=list)
    by_fake: dict[int, int] = dataclasses.field(default_factory=dict)  # id of a fake -> graph output

    def carrying_gradients(self) -> list[int]:
        """The graph outputs that autograd has a history of."""
        return [i for i, fake in enumerate(self.fakes) if fake is not None]

    def add(self, slot: Slot, entry: Entry, spec: TensorSpec, fake: torch.Tensor | None) -> int:
        """One more graph output."""
        self.slots.append(slot)
        self.entries.append(entry)
        self.specs.append(spec)
        self.fakes.append(fake if fake is not None and _carries_gradients(fake) else None)
        if fake is not None:
            self.by_fake[id(fake)] = len(self.slots) - 1
        return len(self.slots) - 1

    def add_decisions(self, made: list[Decided]) -> None:
        """Values that the program read become graph outputs, behind all others."""
        for decided in made:
            out = self.add(Decision(decided.where, decided.symbol is not None), decided.entry, decided.entry.spec, None)  # type: ignore[arg-type]
            info = DecisionInfo(out, decided.value, decided.where, decided.is_tensor, decided.symbol)
            self.decisions.append(info)


@dataclasses.dataclass(frozen=True, slots=True)
class _BaseOutput:
    """A value that outputs are views of, the graph output that gives it, and the steps from that to the value."""

    value: Value
    output: int
    back: tuple[ViewStep, ...]
    leaf: bool = False


def _carries_gradients(fake: torch.Tensor) -> bool:
    return fake.requires_grad and history_of(fake) is not None


def analyze(recorder: Recorder, inputs: Inputs, leaves: list[Any], paths: list[str]) -> Analysis:
    """Decide for every written input and every output leaf how the runtime rebuilds it."""
    found = Analysis()
    through_bases = _written_through_bases(inputs)
    for index, record in enumerate(inputs.records):
        if id(record) in through_bases:
            _metadata(recorder, found, index, record)
        else:
            _updates(recorder, found, index, record, id(record) in through_bases.values())
    found.counted = [i for i in found.counted if not _counted_with_another(found, inputs.records, i)]
    for whole, _ in inputs.memory:
        if whole.initial.storage.is_written_outside:
            out = found.add(Updated(whole.slot), whole.initial.read(recorder.emit), whole.spec, None)
            found.whole_updates.append((whole, out))
    stand_ins = [inputs.records[i].stand_in for i in found.replaced]
    tensors = _tensor_outputs(recorder, inputs, leaves, paths, stand_ins)
    bases = _bases(recorder, inputs, found, tensors)
    number = {id(r): i for i, r in enumerate(inputs.records)}
    for leaf, path in zip(leaves, paths, strict=True):
        found.outputs.append(_output(recorder, inputs, found, number, bases, leaf, path))
        if isinstance(found.outputs[-1], AliasOutput):
            found.aliases.append((len(found.outputs) - 1, leaf))
    for index, stand_in in zip(found.replaced, stand_ins, strict=True):
        info = _tensor_output(recorder, inputs, found, number, bases, stand_in, str(inputs.records[index].slot))
        found.replacements.append(replacement_of(recorder, found, index, inputs.records, info))
    found.replacements = in_order(found.replacements)
    return found


# -------------------------------------------------------------------- inputs that were written


def _written_through_bases(inputs: Inputs) -> dict[int, int]:
    """{record: the record of the tensor it is a view of}, where writing to that gives the view its new history too."""
    through: dict[int, int] = {}
    for record in inputs.records:
        stand_in = record.stand_in
        base = inputs.by_stand_in.get(id(base_of(stand_in))) if is_view(stand_in) else None
        if (
            base is not None
            and _is_written(record)
            and is_written_with_history(record)
            and is_written_with_history(base)
        ):
            through[id(record)] = id(base)
    return through


def _is_written(record: InputRecord) -> bool:
    initial, storage = record.initial, record.initial.storage
    in_group = initial.parent is not None
    return (initial.is_written_through or storage.is_written_anywhere) if in_group else storage.is_written


def _metadata(recorder: Recorder, found: Analysis, index: int, record: InputRecord) -> bool:
    """Note changes of the input's sizes; whether it was replaced by another tensor."""
    writes = [w for w in recorder.writes.metadata_log if w[0] == id(record.stand_in)]
    current = recorder.values[id(record.stand_in)]
    if any(op in ("data", "set_") for _, op, _, _, _ in writes) or current.storage is not record.initial.storage:
        found.replaced.append(index)
        return True
    for _, op, args, kwargs, grad_enabled in writes:
        found.metadata_writes.append(MetadataWrite(index, op, args, tuple(kwargs.items()), grad_enabled))
    return False


def _counted_with_another(found: Analysis, records: list[InputRecord], index: int) -> bool:
    """Whether writing to another input moves this one's version, too."""
    writes = (records[update.input].real for update in found.updates if update.counted)
    return any(share_counters(real, records[index].real) for real in writes if not real.is_inference())


def _updates(
    recorder: Recorder, found: Analysis, index: int, record: InputRecord, is_written_through_views: bool
) -> None:
    stand_in, initial = record.stand_in, record.initial
    current = recorder.values[id(stand_in)]
    written = _is_written(record) or is_written_through_views
    counted = not stand_in.is_inference() and version_of(stand_in) != record.start_version
    differentiable = written and is_written_with_history(record)
    resized = any(w[0] == id(stand_in) for w in recorder.writes.metadata_log)
    if _metadata(recorder, found, index, record):
        differentiable = False  # what it was before has no history any more
        counted = counted and not is_set_again(recorder, record)
    if not written:
        if counted and (index in found.replaced or not resized):
            found.counted.append(index)
        return
    if differentiable and current.spec.numel != record.spec.numel:
        raise UnsupportedMutationError(
            f"{record.slot} is both resized in place and written with gradients; write to a copy and return it instead."
        )
    value = current if differentiable else initial
    out = found.add(Updated(record.slot), value.read(recorder.emit), value.spec, stand_in if differentiable else None)
    found.updates.append(Update(index, out, differentiable=differentiable, counted=counted or stand_in.is_inference()))


# -------------------------------------------------------------------- outputs


def _tensor_outputs(
    recorder: Recorder, inputs: Inputs, leaves: list[Any], paths: list[str], replaced: list[torch.Tensor]
) -> dict[int, list[tuple[torch.Tensor, str]]]:
    """Outputs in memory that is no input's, by the id of their storage; each tensor once."""
    by_storage: dict[int, list[tuple[torch.Tensor, str]]] = {}
    seen: set[int] = set()
    for leaf in replaced:
        value = recorder.value_of(leaf)
        if not value.storage.is_input:
            by_storage.setdefault(id(value.storage), []).append((leaf, str(inputs.by_stand_in[id(leaf)].slot)))
            seen.add(id(leaf))
    for leaf, path in zip(leaves, paths, strict=True):
        if not isinstance(leaf, FakeTensor) or id(leaf) in seen or id(leaf) in inputs.by_stand_in:
            continue
        seen.add(id(leaf))
        value = recorder.value_of(leaf)
        if not value.storage.is_input:
            by_storage.setdefault(id(value.storage), []).append((leaf, path))
    return by_storage


def _bases(
    recorder: Recorder, inputs: Inputs, found: Analysis, by_storage: dict[int, list[tuple[torch.Tensor, str]]]
) -> dict[int, _BaseOutput]:
    """Graph outputs for every memory; {storage: its base} where outputs are views of one."""
    bases: dict[int, _BaseOutput] = {}
    for key, group in by_storage.items():
        first, path = group[0]
        value = recorder.value_of(first)
        if len(group) == 1 and id(first) in inputs.by_stand_in and value.root.spec.nbytes != value.spec.nbytes:
            root = value.root  # the input comes to own all of this memory
            output = found.add(Base((Output(path),)), root.read(recorder.emit), root.spec, None)
            bases[key] = _BaseOutput(root, output, ())
            continue
        if len(group) == 1 and _is_barred(first):
            bases[key] = _barred_base(found, Base((Output(path),)), value, value, value.read(recorder.emit), ())
            continue
        is_plain = not (is_view(first) and first.requires_grad and base_of(first) is not None)
        has_own = id(first) in recorder.writes.replaced or is_from_custom_function(value, first)
        if len(group) == 1 and (is_plain or has_own):
            entry = value.read(recorder.emit)
            is_view_here = value.parent is not None and isinstance(entry.spec, TensorSpec)
            if is_view_here and (entry.spec.offset != value.spec.offset or not value.spec.is_dense):  # type: ignore[union-attr]
                value.generation = -1  # what was written to a view, seen where the view is
                entry = value.read(recorder.emit)
            found.add(Output(path), entry, value.spec, first)
            continue
        start, base = _common_base(recorder, [tensor for tensor, _ in group])
        back: tuple[ViewStep, ...] = ()
        if start is not base:
            back = (_as_it_was(start),)
        assert base.fake is not None
        entry = base.read(recorder.emit)
        own = [p for t, p in group if t is base.fake]
        slot = Output(own[0]) if own else Base(tuple(Output(p) for _, p in group))
        if _is_barred(base.fake):
            bases[key] = _barred_base(found, slot, start, base, entry, back)
            continue
        leaf = base.fake.requires_grad and is_usable(base.fake) and base.fake.is_leaf
        bases[key] = _BaseOutput(start, found.add(slot, entry, base.spec, base.fake), back, leaf)
    return bases


def _is_barred(tensor: torch.Tensor) -> bool:
    return tensor.requires_grad and is_barred(history_of(tensor))


def _barred_base(
    found: Analysis, slot: Slot, start: Value, base: Value, entry: Entry, back: tuple[ViewStep, ...]
) -> _BaseOutput:
    """A tensor that `set_` left without a derivative: that does not concern what else the graph gives."""
    barred = ViewStep(set_to, (True,), (), None, id(base), True)
    return _BaseOutput(start, found.add(slot, entry, base.spec, None), (barred, *back))


def _common_base(recorder: Recorder, tensors: list[torch.Tensor]) -> tuple[Value, Value]:
    """The nearest value that all of `tensors` are views of, and that autograd takes for a tensor of its own.

    And what that tensor is by now: its sizes may have changed in place.
    """
    chains = []
    for tensor in tensors:
        chains.append(list(reversed(chain_of(recorder.value_of(tensor)))))
    common: Value | None = None
    for values in zip(*chains, strict=False):
        if any(v is not values[0] for v in values):
            break
        fake = values[0].fake
        if fake is not None and recorder.values.get(id(fake)) is values[0]:
            common = values[0]
    if common is None or common.fake is None:
        start = chains[0][0]
        return start, start if start.fake is not None else _after_resizing(recorder, start)
    own = base_of(common.fake) if is_view(common.fake) else None
    current = None if own is None else recorder.values.get(id(own))
    if current is None or current.storage is not common.storage:
        return common, common
    earlier = chain_of(current)
    return next(value for value in reversed(chains[0]) if value in earlier), current


def _after_resizing(recorder: Recorder, value: Value) -> Value:
    """What the tensor is now that held `value` before its sizes were changed in place."""
    for tensor in recorder.kept:
        current = recorder.values[id(tensor)]
        if value in chain_of(current):
            return current
    raise UnsupportedAliasError(
        "outputs share memory through a tensor that was replaced in place; return copies instead."
    )


def _as_it_was(value: Value) -> ViewStep:
    """The step back to the sizes `value` had, from any tensor in the same memory."""
    spec = value.spec
    where = (list(spec.shape), list(spec.stride), spec.offset)
    return ViewStep(aten.as_strided.default, where, (), None, id(value), True)


def _output(
    recorder: Recorder,
    inputs: Inputs,
    found: Analysis,
    number: dict[int, int],
    bases: dict[int, _BaseOutput],
    leaf: Any,
    path: str,
) -> OutputInfo:
    if isinstance(leaf, torch.SymFloat):
        number = recorder.decisions.numbers.entry_of(leaf)
        if isinstance(number, Entry):
            return GraphOutput(path, found.add(Output(path), number, None, None))
        leaf = number
    if not isinstance(leaf, torch.Tensor):
        return ConstantOutput(path, leaf)
    record = inputs.by_stand_in.get(id(leaf)) or inputs.by_real.get(id(leaf))
    if record is None and not isinstance(leaf, FakeTensor):
        inputs.adopt(leaf)
        record = inputs.by_real[id(leaf)]
        number[id(record)] = len(inputs.records) - 1
    if record is not None:
        return InputOutput(path, number[id(record)])
    return _tensor_output(recorder, inputs, found, number, bases, leaf, path)


def _tensor_output(
    recorder: Recorder,
    inputs: Inputs,
    found: Analysis,
    number: dict[int, int],
    bases: dict[int, _BaseOutput],
    leaf: torch.Tensor,
    path: str,
) -> OutputInfo:
    old, is_set = recorder.writes.replaced.get(id(leaf), (None, False))
    if old is not None and old.storage.is_input and id(leaf) not in inputs.by_stand_in:
        alias = _input_alias(recorder, inputs, found, number, old, path)
        memory = _memory(recorder, inputs, found, number, bases, leaf, path)
        return dataclasses.replace(
            alias, memory=memory, memory_is_set=is_set, memory_is_barred=is_set and _is_barred(leaf)
        )
    return _memory(recorder, inputs, found, number, bases, leaf, path)


def _memory(
    recorder: Recorder,
    inputs: Inputs,
    found: Analysis,
    number: dict[int, int],
    bases: dict[int, _BaseOutput],
    leaf: torch.Tensor,
    path: str,
) -> OutputInfo:
    """The output, whatever it was before it took another tensor's memory over."""
    value = recorder.value_of(leaf)
    is_input = id(leaf) in inputs.by_stand_in
    if recorder.writes.has_lists and leaf.requires_grad and is_view(leaf) and is_usable(leaf):
        _check_view(leaf, path)
    replaced = {id(recorder.values[id(inputs.records[index].stand_in)]): index for index in found.replaced}
    for above in chain_of(value)[1:]:
        index = replaced.get(id(above))
        if index is not None:
            alias = AliasOutput(path, index, None, _steps(value, above), after_replacement=True)
            return alias if is_input else _with_own_history(recorder, found, alias, leaf, value)
    if value.storage.is_input:
        alias = _input_alias(recorder, inputs, found, number, value, path, at_last=is_input)
        return alias if is_input else _with_own_history(recorder, found, alias, leaf, value)
    existing = found.by_fake.get(id(leaf))
    if existing is not None:
        return GraphOutput(path, existing, leaf=leaf.requires_grad and is_usable(leaf) and leaf.is_leaf)
    base = bases[id(value.storage)]
    steps = (*base.back, *_steps(value, base.value, marked=base.leaf))
    leaf_too = leaf.requires_grad and is_usable(leaf) and leaf.is_leaf
    return AliasOutput(path, None, base.output, steps, leaf=leaf_too, leaf_base=base.leaf)


def _check_view(leaf: torch.Tensor, path: str) -> None:
    """Autograd loses track of a view when an operator on lists writes both to it and to what it shares memory with."""
    base = base_of(leaf)
    if not leaf.is_leaf and base is not None and base.requires_grad and not leads_to_base(leaf):
        raise UnsupportedAliasError(
            f"the output {path} is a view that a `_foreach_` operator wrote to together with another tensor in its "
            "memory, with gradients: PyTorch gives the view gradients of one of the writes only. Write to them one by "
            "one, or return a copy."
        )


def _with_own_history(
    recorder: Recorder, found: Analysis, alias: AliasOutput, leaf: torch.Tensor, value: Value
) -> AliasOutput:
    """The alias as it is where its history is the input's; else with what gives it, or its base, another."""
    if not leaf.requires_grad or not is_usable(leaf):
        return alias
    if leaf.is_leaf:
        return dataclasses.replace(alias, leaf=True)
    if is_from_custom_function(value, leaf):  # no view to autograd, however it was made
        cut = ViewStep(aten.detach.default, (), (), None, id(value), True)
        alias = dataclasses.replace(
            alias, steps=(cut, *(dataclasses.replace(step, grad_enabled=True) for step in alias.steps))
        )
        own = found.add(Output(alias.path), value.read(recorder.emit), value.spec, leaf)
        return dataclasses.replace(alias, history=own, history_at=len(alias.steps))
    cuts = [at for at, step in enumerate(alias.steps) if step.op in CUTS]
    owner = base_of(leaf) if is_view(leaf) else leaf
    if not cuts or is_barred(history_of(owner) if owner is not None else None):
        return alias
    current = recorder.values.get(id(owner))
    if current is None or owner is None or not owner.requires_grad or owner.is_leaf or current not in chain_of(value):
        owner, current = leaf, value
    at = len(alias.steps) - chain_of(value).index(current)
    if at <= cuts[-1]:
        owner, current, at = leaf, value, len(alias.steps)
    output = found.by_fake.get(id(owner))
    if output is None:
        output = found.add(Output(alias.path), current.read(recorder.emit), current.spec, owner)
    steps = (*alias.steps[:at], *(dataclasses.replace(step, when=When.AT_LAST) for step in alias.steps[at:]))
    return dataclasses.replace(alias, steps=steps, history=output, history_at=at)


def _input_alias(
    recorder: Recorder,
    inputs: Inputs,
    found: Analysis,
    number: dict[int, int],
    value: Value,
    path: str,
    *,
    at_last: bool = False,
) -> AliasOutput:
    """A view of an input, from what the input is after the call; `at_last`: all of its steps are taken then."""
    starts: dict[int, tuple[InputRecord, bool]] = {}
    for record in inputs.records:
        current = recorder.values[id(record.stand_in)]
        starts.setdefault(id(record.initial), (record, current is record.initial))
        if current.storage is record.initial.storage and number[id(record)] not in found.replaced:
            starts[id(current)] = (record, True)
    at: Value | None = value
    while at is not None and id(at) not in starts:
        at = at.parent
    if at is None:
        raise UnsupportedAliasError(f"the output {path} is a view of memory that is no input any more; return a copy.")
    record, is_current = starts[id(at)]
    steps = _steps(value, at, record)
    # The input's own sizes have changed since: start from the memory layout it had.
    if not is_current and (at_last or not steps or steps[0].when > When.BEFORE_WRITES):
        steps = (_as_it_was(at), *steps)
    return AliasOutput(path, number[id(record)], None, steps)


def _steps(
    value: Value, base: Value, record: InputRecord | None = None, *, marked: bool = False
) -> tuple[ViewStep, ...]:
    """The way from `base`, the tensor of an input where `record` is given, to `value`.

    `marked`: the function calls `requires_grad_()` on the base.
    """
    marked = marked or (record is not None and record.stand_in.requires_grad and not record.real.requires_grad)
    steps = []
    while value is not base:
        view = value.view
        assert isinstance(view, View)
        assert value.parent is not None
        steps.append(
            ViewStep(
                view.op,
                view.args,
                tuple(view.kwargs.items()),
                view.index,
                id(view.call),
                view.grad_enabled,
                When.AT_LAST if record is None and not marked else _when(value, marked=marked),
            )
        )
        value = value.parent
    return tuple(reversed(steps))


def _when(value: Value, *, marked: bool) -> When:
    if marked and not value.of_differentiable:
        return When.BEFORE_MARKS if value.born else When.AT_FIRST
    return When.BEFORE_WRITES if value.born < min(value.storage.clock, 1) else When.AT_LAST
