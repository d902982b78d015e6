"""The tensors that go into the graphs and the fakes that stand for them while the function is captured."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from ..._torch.dispatch import is_tracing_functorch
from ..._torch.fakes import FakeTensor, FakeTensorMode, meta_storage, new_fake, new_fake_over
from ..._torch.plain_attributes import set_own
from ..._torch.symbols import TracedInt, has_symbolic, is_symbolic
from ..._torch.tensors import (
    as_dtype,
    base_of,
    copy_creation_meta,
    is_marked,
    is_usable,
    is_view,
    kind_of,
    leads_to_base,
    share_counters,
    storage_key,
    version_of,
    view_again,
    whole_memory,
)
from ..._torch.transforms import levels_off
from ...errors import ForegradWarning, UnsupportedAliasError, UnsupportedMutationError
from ...frontend.call import FlatCall, check_tensor, memory_groups
from ...frontend.reads import Reads
from ...frontend.sources import Source, find_sources
from ...graph.meta import TensorSpec
from ...graph.slots import Closure, Input, SharedMemory, Slot
from ..heap.alias import PAST_THE_EDGES, Value, member_of
from ..heap.event_log import now
from ..heap.records import InputRecord, NumberRecord, is_moved, is_no_grad_view
from ..recorder.recorder import Recorder
from ..tape.origin import Origin, user_line
from ..tape.symbols import SizeSymbols
from ..tape.tape import Entry

__all__ = ["CaptureAgain", "Inputs", "SharedClosureFound"]

aten = torch.ops.aten
_FLOAT = TensorSpec((), (), torch.float64, torch.device("cpu"))


class _StandIn(torch.autograd.Function):
    """A non-leaf twin of a leaf: what a non-leaf argument looks like, with its gradient taken at the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, twin: list[torch.Tensor]) -> torch.Tensor:
        return twin[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class Inputs:
    """All inputs of one capture. Call `add_arguments` first; `adopt` then finds stand-ins for the tensors met."""

    def __init__(
        self,
        call: FlatCall,
        fake_mode: FakeTensorMode,
        *,
        shared_bases: set[int],
        whole: set[int],
        viewed: set[int],
        symbols: SizeSymbols | None = None,
    ) -> None:
        self.call = call
        self.symbols = symbols
        self.fake_mode = fake_mode
        self.shared_bases = shared_bases  # ids of views to be seen so, as their memory is written
        self.whole = whole  # ids of tensors to be seen as part of all of their memory
        self.viewed = viewed  # ids of tensors to be seen as views of their bases
        self.records: list[InputRecord] = []
        self.by_real: dict[int, InputRecord] = {}
        self._by_memory: dict[int, InputRecord] = {}  # the first of each memory
        self.by_stand_in: dict[int, InputRecord] = {}
        self.numbers: list[NumberRecord] = []
        self.memory: list[tuple[InputRecord, list[InputRecord]]] = []  # (the whole memory, those in it)
        self.recorder: Recorder
        self._sources: dict[int, Source] | None = None
        self._kept: list[torch.Tensor] = []  # so that ids stay theirs
        self.marked: dict[int, Origin | None] = {}  # by id, other tensors that `requires_grad_` was called on: where
        self.reads = Reads()
        self.source_in_state: Callable[[torch.Tensor], Source | None] = lambda _: None

    # ---------------------------------------------------------------- making them

    def add_arguments(self, recorder: Recorder, lifted: list[tuple[torch.Tensor, Source]]) -> list[Any]:
        """Make records for `lifted` tensors, then for the arguments; return the leaves to call the function with."""
        self.recorder = recorder
        call = self.call
        new = [InputRecord(tensor, source.slot, None, source) for tensor, source in _unique(lifted)]
        known = {id(record.real): record for record in new}
        for index, leaf in enumerate(call.leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in known:
                known[id(leaf)] = record = InputRecord(
                    leaf, call.slots.get(index) or Input(call.paths[index]), index, None
                )
                new.append(record)
        groups = [[new[i] for i in group] for group in memory_groups([record.real for record in new])]
        grouped = {id(record) for group in groups for record in group}
        groups += [
            [record] for record in new if id(record.real) in self.whole | self.viewed and id(record) not in grouped
        ]
        in_group = {id(record) for group in groups for record in group}
        for record in new:
            self._add(record)
            if id(record) not in in_group:
                self._with_symbols(record)
                self._stand_in_alone(record)
        for group in groups:
            self._stand_in_group(group)
        for record in new:
            self._register(record)
        # A tensor that the function reaches by itself as well is to be the same object on both ways.
        reached = self._found_sources()
        leaves = [
            x if id(x) in reached else known[id(x)].stand_in if isinstance(x, torch.Tensor) else x for x in call.leaves
        ]
        for index, leaf in enumerate(call.leaves):
            if index in call.numbers or (self.symbols is not None and type(leaf) is torch.SymInt):
                leaves[index] = self._number(index)
        return leaves

    def _number(self, index: int) -> Any:
        """A number that stands for an argument which is another number in other calls."""
        assert self.symbols is not None
        slot, entry = Input(self.call.paths[index]), Entry(None)
        leaf = self.call.leaves[index]
        if type(leaf) is float:
            return self._float(index, leaf, slot)
        if is_symbolic(leaf):
            self.symbols.given([(None, leaf)], entry)
            number = TracedInt(leaf.node)
        else:
            number = self.symbols.number(leaf, str(slot), entry)
        if is_symbolic(number):
            self.numbers.append(NumberRecord(entry, index, slot, number))
            self.recorder.tape.append(entry)
        return number

    def _float(self, index: int, value: float, slot: Slot) -> Any:
        recorder = self.recorder
        entry = recorder.tape.append(Entry(None, spec=_FLOAT))
        read = recorder.emit_number(aten._local_scalar_dense.default, entry)
        number = recorder.decisions.numbers.float(read, value, str(slot))
        real = torch.tensor(value, dtype=_FLOAT.dtype, device=_FLOAT.device)
        self.numbers.append(NumberRecord(entry, index, slot, number, real))
        return number

    def _with_symbols(self, record: InputRecord) -> None:
        """Symbols for the sizes of an argument that may vary; those that it has."""
        if self.symbols is not None and has_symbolic(record.spec.shape):
            self.symbols.given(enumerate(record.spec.shape), record.entry)
            return
        if self.symbols is None or record.argument is None or isinstance(record.real, torch.nn.Parameter):
            return
        dims = self.call.dynamic.get(record.argument)
        if dims:
            record.spec = self.symbols.spec(record.spec, dims, str(record.slot), record.entry)
            record.entry.spec = record.spec

    def _add(self, record: InputRecord) -> InputRecord | None:
        """One more input; the first other that is in the same memory."""
        self.records.append(record)
        self.recorder.tape.append(record.entry)
        first = self._by_memory.setdefault(storage_key(record.real), record)
        return None if first is record else first

    def adopt(self, real: torch.Tensor) -> torch.Tensor:
        """The stand-in of a real tensor, making it an input when it is met for the first time."""
        record = self.by_real.get(id(real))
        if record is not None:
            return record.stand_in
        if isinstance(real, FakeTensor):
            return real
        source = self._source_of(real)
        check_tensor(real, str(source.slot))
        record = InputRecord(real, source.slot, None, source)
        shared = self._add(record)
        if shared is not None or id(real) in self.whole | self.viewed:  # capture again, told so at the start
            raise SharedClosureFound(record.real, record.source)
        with levels_off() if is_tracing_functorch() else contextlib.nullcontext():  # an input is of no level
            self._stand_in_alone(record)
            self._register(record)
        return record.stand_in

    def real_of(self, stand_in: torch.Tensor) -> torch.Tensor | None:
        """The real tensor that a stand-in is there for; None for any other tensor."""
        record = self.by_stand_in.get(id(stand_in))
        return None if record is None else record.real

    def real_behind(self, entry: Entry) -> torch.Tensor | None:
        """The real tensor that an input's entry stands for; None when it is no input's."""
        for record in self.records:
            if record.entry is entry:
                return record.real
        for whole, _ in self.memory:
            if whole.entry is entry:
                return whole_memory(whole.real, whole.spec.dtype)
        return next((number.real for number in self.numbers if number.entry is entry), None)

    def add_source(self, real: torch.Tensor, source: Source) -> None:
        """Where a tensor is found that was come by in another way."""
        self._found_sources()[id(real)] = source
        self._kept.append(real)

    def _found_sources(self) -> dict[int, Source]:
        if self._sources is None:
            named = zip(self.call.paths, self.call.leaves, strict=True)
            modules = tuple((path, leaf) for path, leaf in named if isinstance(leaf, torch.nn.Module))
            self._sources = find_sources(self.call.function, modules)
        return self._sources

    def known_source(self, real: torch.Tensor) -> Source | None:
        """Where the function can read a tensor; None for one that was made in the call."""
        # A tensor that the function has moved to another place is looked for where it was before.
        return self._found_sources().get(id(real)) or self.source_in_state(real) or self.reads.source_of(real)

    def _source_of(self, real: torch.Tensor) -> Source:
        source = self.known_source(real)
        if source is None:
            where = self.recorder.origins.here()
            warnings.warn(
                f"a tensor {TensorSpec.of(real)} used at {user_line(where)} can't be reached from the compiled "
                "function; this very tensor object will be used on every call, even if the program rebinds it.",
                ForegradWarning,
                stacklevel=2,
            )
            source = Source(Closure(f"tensor at {user_line(where)}"), real, ())
        return source

    # ---------------------------------------------------------------- stand-ins

    def _stand_in_alone(self, record: InputRecord) -> None:
        spec = record.spec
        with torch.inference_mode(mode=record.real.is_inference()):
            fake = new_fake(self.fake_mode, spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)
        self._set_stand_in(record, self._with_bits(fake, spec))
        record.initial = Value(record.stand_in, record.entry, spec)
        record.initial.storage.is_input = True

    def _with_bits(self, fake: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """Conjugate and negative tensors keep their bit (their strides are those of the tensor as it is)."""
        if spec.conj:
            fake = self.recorder.run_fake(aten._conj.default, (fake,), {})
        if spec.neg:
            fake = self.recorder.run_fake(aten._neg_view.default, (fake,), {})
        return fake

    def _set_stand_in(self, record: InputRecord, fake: torch.Tensor, *, counted: bool = False) -> None:
        """`counted`: a write to the stand-in is to move the version counter of `fake`."""
        real = record.real
        record.leaf = record.stand_in = fake
        if real.requires_grad:
            with torch.inference_mode(mode=fake.is_inference()):
                fake.requires_grad_()
                if not real.is_leaf:
                    twin = fake.detach() if counted else self._twin(fake, record.spec)
                    with torch.enable_grad():
                        record.stand_in = _StandIn.apply(fake, [twin])

    def _twin(self, fake: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        memory = fake.untyped_storage()
        twin = new_fake_over(self.fake_mode, memory, spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)
        return self._with_bits(twin, spec)

    def _register(self, record: InputRecord) -> None:
        stand_in, real = record.stand_in, record.real
        if isinstance(real, torch.nn.Parameter):
            stand_in._is_param = True
        for key, value in real.__dict__.items():
            set_own(stand_in, key, value)
        self.by_real[id(real)] = record
        self.by_stand_in[id(stand_in)] = record
        self.recorder.values[id(stand_in)] = record.initial
        if not stand_in.is_inference():
            record.start_version = version_of(stand_in)
        tracked = base_of(stand_in) if is_view(stand_in) else stand_in
        if tracked is not None and tracked.grad_fn is not None:
            record.start_sequence_nr = tracked.grad_fn._sequence_nr()
        self.recorder.late.met(record)

    # ---------------------------------------------------------------- shared memory

    def _stand_in_group(self, group: list[InputRecord]) -> None:
        """Stand-ins over one fake memory, which is itself an input used once something in it is written."""
        storage = group[0].real.untyped_storage()
        dtype = group[0].spec.dtype if len({r.spec.dtype for r in group}) == 1 else torch.uint8
        size = storage.nbytes() // dtype.itemsize
        spec = TensorSpec((size,), (1,), dtype, group[0].spec.device)
        whole = InputRecord.__new__(InputRecord)
        whole.real, whole.argument, whole.source = group[0].real, None, None
        whole.slot = SharedMemory(tuple(r.slot for r in group))
        whole.spec = spec
        whole.entry = Entry(None, spec=spec)
        whole.initial = Value(None, whole.entry, spec)
        whole.initial.storage.is_input = True
        whole.start_version, whole.start_sequence_nr = 0, None
        whole.is_marked = False
        whole.detached_at = None
        self.recorder.tape.append(whole.entry)
        memory = meta_storage(storage.nbytes())
        whole.leaf = whole.stand_in = new_fake_over(self.fake_mode, memory, (size,), (1,), dtype, spec.device, 0)
        self.memory.append((whole, []))
        bases = self._common_bases(group, memory)
        for record in group:
            self._place(record, whole, memory, bases)

    def _place(
        self, record: InputRecord, whole: InputRecord, memory: torch.UntypedStorage, bases: dict[int, InputRecord]
    ) -> None:
        base = bases.get(id(base_of(record.real))) if self._is_seen_as_view(record) else None
        if base is not None and base is not record:
            # A view made under no_grad is a leaf, which views of it lead to: its gradient is its own.
            is_leaf = record.real.requires_grad and is_usable(record.real) and not leads_to_base(record.real)
            with torch.inference_mode(mode=False), torch.set_grad_enabled(not is_leaf):  # in this order
                record.stand_in = _view_like(record.real, base.stand_in)
                if is_leaf and not record.real.is_leaf:  # a view of such a view: its history ends there
                    with torch.enable_grad():
                        record.stand_in = record.stand_in.view_as(record.stand_in)
                copy_creation_meta(record.stand_in, record.real)
                if record.real.requires_grad is False and record.stand_in.requires_grad:
                    record.stand_in = record.stand_in.detach()
            record.leaf = record.stand_in if is_leaf or not record.real.requires_grad else None
        elif not hasattr(record, "stand_in"):
            self._set_member(record, memory, bases)
        record.initial = member_of(whole.initial, record.spec, record.stand_in, record.entry)
        self.memory[-1][1].append(record)

    def _is_seen_as_view(self, record: InputRecord) -> bool:
        return id(record.real) in self.viewed or id(record.real) in self.shared_bases

    def _set_member(self, record: InputRecord, memory: torch.UntypedStorage, bases: dict[int, InputRecord]) -> None:
        fake = self._with_counter_of_others(record, bases)
        counted = fake is not None
        fake = self._over(memory, record) if fake is None else fake
        self._set_stand_in(record, self._with_bits(fake, record.spec), counted=counted)

    def _over(self, memory: torch.UntypedStorage, record: InputRecord) -> torch.Tensor:
        """A fake for a record over the memory that it shares with others."""
        spec = record.spec
        with torch.inference_mode(mode=record.real.is_inference()):
            return new_fake_over(self.fake_mode, memory, spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)

    def _with_counter_of_others(self, record: InputRecord, bases: dict[int, InputRecord]) -> torch.Tensor | None:
        """A fake that shares the version counter of another member, where the real tensors share theirs."""
        spec = record.spec
        if record.real.is_inference():
            return None
        for other in [*self.memory[-1][1], *bases.values()]:
            seen_as_it_is = not (other.spec.conj or other.spec.neg)
            if seen_as_it_is and not other.real.is_inference() and share_counters(other.real, record.real):
                with torch.inference_mode(mode=False), torch.no_grad():
                    fake = as_dtype(other.stand_in, spec.dtype)
                    return None if fake is None else fake.as_strided(spec.shape, spec.stride, spec.offset).detach()
        return None

    def _common_bases(self, group: list[InputRecord], memory: torch.UntypedStorage) -> dict[int, InputRecord]:
        """For each tensor that members are differentiable views of: its record, added as an input if it is none."""
        by_real = {id(r.real): r for r in group}
        bases: dict[int, InputRecord] = {}
        for record in group:
            base = base_of(record.real)
            if base is None or not self._is_seen_as_view(record) or record.real.is_inference() or id(base) in bases:
                continue
            if base.requires_grad and not record.real.requires_grad:  # taken without gradients
                continue
            found = by_real.get(id(base))
            if found is None:
                found = InputRecord(base, Closure(f"{record.slot}._base"), None, record)
                self._add(found)
                self._set_member(found, memory, bases)
                found.initial = member_of(self.memory[-1][0].initial, found.spec, found.stand_in, found.entry)
                self.memory[-1][1].append(found)
                self._register(found)
            else:
                self._set_member(found, memory, bases)
            bases[id(base)] = found
        return bases

    def whole_memory_needed(self, root: Value) -> None:
        """A write went past the edges of the input that `root` is: capture again with all of its memory."""
        record = next((r for r in self.records if r.initial is root), None)
        if record is None:
            raise UnsupportedMutationError(PAST_THE_EDGES)
        self.whole.add(id(record.real))
        raise SharedClosureFound(record.real, record.source if record.argument is None else None)

    def check_mark(self, stand_in: torch.Tensor) -> None:
        """A view that is made to require grad: so are views of it then, as views of its base are not."""
        marked = self.by_stand_in.get(id(stand_in))
        if marked is None:
            self.marked[id(stand_in)] = self.recorder.origins.here()
            self._kept.append(stand_in)
        if marked is not None and marked.real.requires_grad:
            self.see_as_views([marked] if is_no_grad_view(marked) else [])
            marked.is_marked = is_view(marked.real)
            for value in self.recorder.values.values() if marked.is_marked and is_marked(marked.real) else ():
                value.of_differentiable &= value.storage is not marked.initial.storage  # gradients went nowhere so far
        if marked is None or marked.real.requires_grad:
            return
        for record in self.records:
            is_concerned = record is marked or base_of(record.real) is marked.real
            if is_concerned and is_view(record.real) and not record.real.requires_grad:
                self.see_as_views([record])

    def see_as_views(self, records: list[InputRecord]) -> None:
        """Capture again where one of these stands for a view and is none."""
        for record in records:
            if not is_view(record.stand_in) and id(record.real) not in self.viewed:
                self.viewed.add(id(record.real))
                raise SharedClosureFound(record.real, record.source if record.argument is None else None)

    def is_own_leaf(self, tensor: torch.Tensor) -> bool:
        """Whether it is a leaf that gradients arrive at: not so a view made under no_grad, marked through its base."""
        base = base_of(tensor) if is_view(tensor) else None
        through_base = base is not None and base.requires_grad and id(tensor) not in self.marked
        return is_marked(tensor) and not through_base

    def check_detach(self, stand_in: torch.Tensor) -> None:
        """Raise what `detach_` raises for a view; stand-ins are views only where gradients need it."""
        record = self.by_stand_in.get(id(stand_in))
        if record is not None and is_view(record.real):
            raise RuntimeError("Can't detach views in-place. Use detach() instead.")
        if record is None:
            return
        if record.detached_at is None:  # writes that its version does not count leave views of it what they are
            changes = self.recorder.value_of(stand_in).storage.changes
            record.detached_at = changes[0] if changes and is_moved(record) else now()
        for other in self.records:  # views taken under no_grad require grad as long as their base does
            real = other.real
            if base_of(real) is not record.real:
                continue
            if is_moved(record) and is_usable(real) and leads_to_base(real) and is_view(other.stand_in):
                raise UnsupportedAliasError(
                    f"{record.slot} is written to and then detached in place (`detach_`) at "
                    f"{user_line(self.recorder.origins.here())}, and {other.slot} is a view of it, which may keep the "
                    "history that it had: use `x = x.detach()`."
                )
            if is_view(other.stand_in):
                continue
            if is_marked(real) or self._has_marked_views(other.stand_in):
                self.see_as_views([other])

    def check_detached(self, error: Exception) -> None:
        """Capture again where views of what was detached are barred: those made under no_grad are not, by then."""
        detached = [id(r.real) for r in self.records if r.detached_at is not None]
        barred = "created in no_grad mode" in str(error) or "cannot resize variables" in str(error)
        for record in self.records if barred else ():
            real = record.real
            if id(base_of(real)) in detached:
                self.see_as_views([record])

    def check_unlinked(self) -> None:
        """Capture again where views made under no_grad are written, by themselves: autograd bars most uses of them."""
        self.see_as_views([record for record in self.records if is_no_grad_view(record) and is_moved(record)])

    def _has_marked_views(self, base: torch.Tensor) -> bool:
        """Whether the function took views of it under no_grad."""
        fakes = [v.fake for v in list(self.recorder.values.values()) if v.fake is not None]
        views = [fake for fake in fakes if is_view(fake) and base_of(fake) is base and fake.requires_grad]
        return any(not is_usable(view) or view.is_leaf for view in views)


class CaptureAgain(BaseException):
    """Raised to start capture over, knowing more. No error, and nothing for the user's code to catch."""


class SharedClosureFound(CaptureAgain):
    """Raised to start capture over with one more tensor lifted from the beginning."""

    def __init__(self, tensor: torch.Tensor, source: Source | None) -> None:
        super().__init__("closed-over tensor shares memory with an input")
        self.tensor = tensor
        self.source = source


def _view_like(real: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The same view of `base` that `real` is of its own base."""
    if kind_of(real) == kind_of(base):
        return base.as_strided(real.shape, real.stride(), real.storage_offset())
    return view_again(real, base)


def _unique(lifted: list[tuple[torch.Tensor, Source]]) -> list[tuple[torch.Tensor, Source]]:
    seen: dict[int, tuple[torch.Tensor, Source]] = {}
    for tensor, source in lifted:
        seen.setdefault(id(tensor), (tensor, source))
    return list(seen.values())
