"""The fakes that stand for inputs while the function is captured, with the leaves that their gradients are taken at."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..._torch.stand_ins import new_stand_in, new_stand_in_over
from ..._torch.tensors import (
    allows_writes,
    as_dtype,
    base_of,
    copy_creation_meta,
    history_of,
    is_usable,
    kind_of,
    leads_to_base,
    share_counters,
    view_again,
)
from ...graph.meta import TensorSpec
from ...graph.slots import Closure
from ...identity import ById, IdSet
from ..heap.alias import Value
from ..heap.records import InputRecord
from ..heap.views import View, without_bits
from ..recorder.recorder import Recorder
from ..tape.tape import Entry

aten = torch.ops.aten


class NonLeaf(torch.autograd.Function):
    """A non-leaf twin of a leaf: it looks like a non-leaf argument, with its gradient taken at the leaf."""

    @staticmethod
    def forward(ctx: object, leaf: torch.Tensor, twin: list[torch.Tensor]) -> torch.Tensor:
        return twin[0]

    @staticmethod
    def backward(ctx: object, *gradients: object) -> tuple[object, None]:
        return gradients[0], None


class StandIns:
    """Makes them, one at a time."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def alone(self, record: InputRecord) -> None:
        """A stand-in with memory of its own."""
        spec = record.spec
        with torch.inference_mode(mode=record.real.is_inference()):
            fake = new_stand_in(spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)
        self.stand_for(record, self.with_bits(fake, spec))
        record.initial = Value(record.stand_in, record.entry, spec)
        record.initial.storage.is_input = True

    def with_bits(self, fake: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """Conjugate and negative tensors keep their bit (their strides are the tensor's own)."""
        if spec.conj:
            fake = self.recorder.run_fake(aten._conj.default, (fake,), {})
        if spec.neg:
            fake = self.recorder.run_fake(aten._neg_view.default, (fake,), {})
        return fake

    def stand_for(self, record: InputRecord, fake: torch.Tensor, *, counted: bool = False) -> None:
        """`counted`: a write to the stand-in is to move the version counter of `fake`."""
        real = record.real
        record.leaf = record.stand_in = fake
        if real.requires_grad:
            with torch.inference_mode(mode=fake.is_inference()):
                fake.requires_grad_()
                if not real.is_leaf:
                    twin = fake.detach() if counted else self._twin(fake, record.spec)
                    with torch.enable_grad():
                        record.stand_in = NonLeaf.apply(fake, [twin])

    def _twin(self, fake: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        twin = new_stand_in_over(fake, spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)
        return self.with_bits(twin, spec)

    def over(self, whole: torch.Tensor, record: InputRecord) -> torch.Tensor:
        """A stand-in for a record over shared memory."""
        spec = record.spec
        with torch.inference_mode(mode=record.real.is_inference()):
            return new_stand_in_over(whole, spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)


# -------------------------------------------------------------------- shared memory
# Stand-ins of inputs that share memory: over one fake memory, and as views of each other where autograd needs it.


class MemoryGroup:
    """Inputs in one memory; the memory is itself an input, `whole`, used once a part is written.

    `group`: the known inputs; `views`: the real tensors to be seen as views of their bases. `members`: the inputs with
    stand-ins. Call `place_bases`, then `place` with each of `group`.
    """

    def __init__(self, stand_ins: StandIns, group: list[InputRecord], views: IdSet[torch.Tensor]) -> None:
        storage, specs = group[0].real.untyped_storage(), [record.spec for record in group]
        dtype = specs[0].dtype if len({spec.dtype for spec in specs}) == 1 else torch.uint8
        spec = TensorSpec((storage.nbytes() // dtype.itemsize,), (1,), dtype, specs[0].device)
        self._memory = new_stand_in((storage.nbytes(),), (1,), torch.uint8, spec.device)
        whole = new_stand_in_over(self._memory, spec.shape, (1,), dtype, spec.device, 0)
        self.whole = InputRecord.of_memory(group, spec, whole)
        self.members: list[InputRecord] = []
        self.overlapping: list[tuple[InputRecord, InputRecord]] = []  # each with its base, or itself
        self._stand_ins, self._group, self._views = stand_ins, group, views
        self._bases: ById[torch.Tensor, InputRecord] = ById()  # by a tensor that members are differentiable views of

    def place_bases(self, add: Callable[[InputRecord], object], register: Callable[[InputRecord], None]) -> None:
        """Stand-ins of the members' bases. Bases that are no inputs yet are handed to `add`, and to `register` once
        they have stand-ins.
        """
        by_real = ById((record.real, record) for record in self._group)
        for record in self._group:
            base = base_of(record.real)
            is_view = base is not None and record.real in self._views and not record.real.is_inference()
            if base is None or not is_view or base in self._bases:
                continue
            if base.requires_grad and not record.real.requires_grad:  # taken without gradients
                continue
            found = by_real.get(base)
            if found is None:
                found = InputRecord(base, Closure(f"{record.slot}._base"), None, record)
                add(found)
                self._stand_for(found)
                self._enter(found)
                register(found)
            else:
                self._stand_for(found)
            self._bases[base] = found

    def place(self, record: InputRecord) -> None:
        """Make the stand-in of a member, as a view of its base's where it is to be seen so."""
        base = self._bases.get(base_of(record.real)) if record.real in self._views else None
        if base is not None and base is not record and not self._is_told_otherwise(record, base):
            # A view made under no_grad is a leaf, and its own views lead to it: its gradient is its own.
            is_leaf = record.real.requires_grad and is_usable(record.real) and not leads_to_base(record.real)
            with torch.inference_mode(mode=False), torch.set_grad_enabled(not is_leaf):  # in this order
                record.stand_in = view_like(record.real, base.stand_in)
                if is_leaf and not record.real.is_leaf:  # a view of a view made under no_grad: its history ends there
                    with torch.enable_grad():
                        record.stand_in = record.stand_in.view_as(record.stand_in)
                copy_creation_meta(record.stand_in, record.real)
                if record.real.requires_grad is False and record.stand_in.requires_grad:
                    record.stand_in = record.stand_in.detach()
            record.leaf = record.stand_in if is_leaf or not record.real.requires_grad else None
        elif not hasattr(record, "stand_in"):
            self._stand_for(record)
        if record.spec.overlaps_itself and record.real.requires_grad:
            self.overlapping.append((record, record))
        self._enter(record)

    def _is_told_otherwise(self, record: InputRecord, base: InputRecord) -> bool:
        """Whether its gradients go to different elements than by its place: then it is no view, and must not change."""
        real = record.real
        if not (base.real.requires_grad and real.requires_grad and is_usable(real) and allows_writes(real)):
            return False
        if not spreads_otherwise(real, base.real):
            return False
        self.overlapping.append((record, base))
        return True

    def _stand_for(self, record: InputRecord) -> None:
        fake = self._with_counter_of_others(record)
        counted = fake is not None
        fake = self._stand_ins.over(self._memory, record) if fake is None else fake
        self._stand_ins.stand_for(record, self._stand_ins.with_bits(fake, record.spec), counted=counted)

    def _enter(self, record: InputRecord) -> None:
        record.initial = member_of(self.whole.initial, record.spec, record.stand_in, record.entry)
        self.members.append(record)

    def _with_counter_of_others(self, record: InputRecord) -> torch.Tensor | None:
        """A fake that shares a member's version counter, where the real tensors share a counter."""
        spec = record.spec
        for other in [*self.members, *self._bases.values()]:
            seen_as_it_is = not (other.spec.conj or other.spec.neg)
            if seen_as_it_is and share_counters(other.real, record.real):
                with torch.inference_mode(mode=False), torch.no_grad():
                    fake = as_dtype(other.stand_in, spec.dtype)
                    return None if fake is None else fake.as_strided(spec.shape, spec.stride, spec.offset).detach()
        return None


# -------------------------------------------------------------------- members
# Inputs that share memory: each is a view of one value, the whole memory.


def member_of(whole: Value, spec: TensorSpec, fake: torch.Tensor, entry: Entry) -> Value:
    """An input's tensor as a view of the whole memory that it shares; `entry` stands for it until a write."""
    parent = whole
    call = object()
    if spec.dtype is not whole.spec.dtype:
        size = whole.spec.shape[0] // spec.dtype.itemsize
        cut = size * spec.dtype.itemsize
        if cut != whole.spec.shape[0]:
            cut_spec = TensorSpec((cut,), (1,), whole.spec.dtype, spec.device)
            parent = Value(None, None, cut_spec, parent, View(aten.slice.Tensor, (0, 0, cut), {}, None, call, False))
            parent.generation = -1
        typed = TensorSpec((size,), (1,), spec.dtype, spec.device)
        parent = Value(None, None, typed, parent, View(aten.view.dtype, (spec.dtype,), {}, None, call, False))
        parent.generation = -1
    layout = (list(spec.shape), list(spec.stride), spec.offset)
    view = View(aten.as_strided.default, layout, {}, None, call, False, is_member=True)
    value = Value(fake, entry, without_bits(spec), parent, view)
    for bit, op in ((spec.conj, aten._conj.default), (spec.neg, aten._neg_view.default)):
        if bit:
            value.entry, value.generation = None, -1
            so_far = TensorSpec(
                spec.shape, spec.stride, spec.dtype, spec.device, spec.offset, spec.conj, op is aten._neg_view.default
            )
            value = Value(fake, entry, so_far, value, View(op, (), {}, None, call, False))
    return value


# -------------------------------------------------------------------- views among the inputs


def view_like(real: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """A view of `base` at the place that `real` has in its own base, as eager regenerates it."""
    if kind_of(real) == kind_of(base):
        return base.as_strided(real.shape, real.stride(), real.storage_offset())
    return view_again(real, base)


def spreads_otherwise(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a gradient of the view may go to different elements of the base than by strides: the view was taken by
    strides of a view, or in a base with several elements in one place.
    """
    steps: list[str] = []
    node = history_of(view)
    while node is not None and node is not history_of(base) and not hasattr(node, "variable"):
        steps.append(node.name())
        node = node.next_functions[0][0] if node.next_functions else None
    by_strides = [step.startswith("AsStrided") for step in steps]
    return any(by_strides[:-1]) or (TensorSpec.of(base).overlaps_itself and by_strides != [True])
