"""The tensors that go into the graphs and the fakes that stand for them while the function is captured."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..._torch.engine import is_tracing_functorch
from ..._torch.fakes import FakeTensor, FakeTensorMode
from ..._torch.levels import levels_off
from ..._torch.ops import Args, Kwargs
from ..._torch.stand_ins import become_parameter, is_stand_in
from ..._torch.symbols import TracedInt, has_symbolic, is_ragged, is_symbolic, symbol_made
from ..._torch.tensors import allows_writes, base_of, is_number, is_view, storage_key, version_of, whole_memory
from ..._torch.wrappers import is_wrapper
from ...annexes import given
from ...errors import ForegradWarning, UnsupportedTensorError
from ...frontend.call import FlatCall, check_tensor, is_item, memory_groups
from ...frontend.source import Source
from ...frontend.state import of_python
from ...graph.effect_log import Detach, MarkRequiresGrad
from ...graph.meta import TensorSpec
from ...graph.signature import PartOf, Signature
from ...graph.slots import Closure, Input, Slot
from ...identity import ById, IdSet
from ..aspect import Aspect, Row
from ..heap.alias import Value
from ..heap.records import InputRecord, NumberRecord, is_moved, is_no_grad_view
from ..heap.refusals import changed_with_gradients, past_the_edges
from ..recorder.recorder import Recorder
from ..tape.again import CaptureAgain, SharedClosureFound
from ..tape.origin import user_line
from ..tape.tape import Entry, Learned
from ..values.sizes import SizeSymbols
from .open_inputs import OpenInputs
from .stand_ins import MemoryGroup, StandIns

if TYPE_CHECKING:
    from ...frontend.answers import PlacesRead, WalkedState

aten = torch.ops.aten
_TENSOR: Any = torch.Tensor
Arguments = tuple[Args, Kwargs]
_FLOAT = TensorSpec((), (), torch.float64, torch.device("cpu"))


class Inputs:
    """All inputs of one capture. Call `add_arguments` first; `adopt` then finds stand-ins for the tensors met."""

    def __init__(
        self, call: FlatCall, fake_mode: FakeTensorMode, learned: Learned, symbols: SizeSymbols | None = None
    ) -> None:
        self.call = call
        self.symbols = symbols
        self.fake_mode = fake_mode
        self.unobserved: Callable[[torch.Tensor], torch.Tensor] = self.adopt_plain  # where the program is observed
        self.learned = learned
        self.apart: set[InputRecord] = set()  # of inputs in one memory, see `_may_be_apart`
        self.shared_bases = learned.shared_bases  # views to be seen so, as their memory is written
        self.whole = learned.whole  # tensors to be seen as part of all of their memory
        self.viewed = learned.viewed  # tensors to be seen as views of their bases
        self.as_they_are = learned.as_they_are  # arguments that the function also reaches by itself: the real ones
        self.records: list[InputRecord] = []
        self.by_real: ById[torch.Tensor, InputRecord] = ById()
        self._by_memory: dict[int, InputRecord] = {}  # the first of each memory
        self.by_stand_in: ById[torch.Tensor, InputRecord] = ById()
        self.numbers: list[NumberRecord] = []
        self.memory: list[tuple[InputRecord, list[InputRecord]]] = []  # (the whole memory, the inputs in it)
        self.recorder: Recorder
        self.stand_ins: StandIns
        self.wrappers: OpenInputs
        self.overlapping: list[tuple[InputRecord, InputRecord]] = []  # each with its base, or itself
        self._samples = learned.samples
        self.reached: ById[torch.Tensor, Source] = ById()  # arguments that the function also reached by itself
        self.reads = of_python().Reads(self.as_they_are)
        self.sources = TensorSources(self.reads)

    # ---------------------------------------------------------------- making them

    def add_arguments(self, recorder: Recorder, lifted: list[tuple[torch.Tensor, Source]]) -> list[Any]:
        """Make records for `lifted` tensors, then for the arguments; return the leaves to call the function with."""
        self.recorder, self.stand_ins = recorder, StandIns(recorder)
        self.sources.where = lambda: user_line(recorder.origins.here())
        opened = next(iter(given("inputs that open")), OpenInputs)
        self.wrappers = opened(self._samples, recorder, self.by_stand_in)
        call = self.call
        plain = [pair for pair in _unique(lifted) if not is_wrapper(pair[0])]  # further inputs when they are met
        new = [InputRecord(tensor, source.slot, None, source) for tensor, source in plain]
        known = IdSet(record.real for record in new)
        for index, leaf in enumerate(call.leaves):
            if isinstance(leaf, torch.Tensor) and leaf not in known:
                slot = call.slots.get(index) or Input(call.paths[index])
                known.add(leaf)
                new.append(InputRecord(leaf, slot, index, None))
        groups = [[new[i] for i in group] for group in memory_groups([record.real for record in new])]
        grouped = {record for group in groups for record in group}
        told = self.whole | self.viewed
        if not self.learned.together:
            self.apart.update(record for group in groups if self._may_be_apart(group, told) for record in group)
            groups = [group for group in groups if group[0] not in self.apart]
        groups += [[record] for record in new if record.real in told and record not in grouped]
        in_group = {record for group in groups for record in group}
        for record in new:
            self._add(record)
            if record not in in_group:
                self._with_symbols(record)
                self.stand_ins.alone(record)
        for group in groups:
            shared = MemoryGroup(self.stand_ins, group, self.viewed | self.shared_bases)
            recorder.tape.append(shared.whole.entry)
            self.memory.append((shared.whole, shared.members))
            shared.place_bases(self._add, self._register)
            for record in group:
                shared.place(record)
            self.overlapping += shared.overlapping
        for record in new:
            self._register(record)
        # An argument that the function also reaches by itself is the real tensor, so that both ways give one object.
        both = self.as_they_are | (record.real for record in new if record.argument is None)
        alone = ById((record.real, record.stand_in) for record in new if record.real not in both)
        leaves = [alone.get(leaf, leaf) for leaf in call.leaves]
        for index, leaf in enumerate(call.leaves):
            is_symbol = type(leaf) is torch.SymInt and not is_ragged(leaf)
            if index in call.numbers or (self.symbols is not None and is_symbol):
                leaves[index] = self._number(index)
        return leaves

    def _may_be_apart(self, group: list[InputRecord], told: IdSet[torch.Tensor]) -> bool:
        """Whether tensors in one memory count as separate tensors until a write: arguments with varying sizes do, so
        that the sizes can be symbols.
        """
        inner = self.call.inside_wrappers() | self.call.arrays().keys()
        if any(r.argument is None or isinstance(r.real, torch.nn.Parameter) or r.real in told for r in group):
            return False
        return any(r.argument in self.call.dynamic for r in group) and inner.isdisjoint(r.argument for r in group)

    def check_apart(self, signature: Signature) -> None:
        """Capture again, as tensors in one memory, where a tensor taken for separate is written."""
        changed = {update.input for update in signature.updates} | signature.reshaped | signature.detached
        if any(record in self.apart for number, record in enumerate(self.records) if number in changed):
            self.learned.together = True
            raise CaptureAgain

    def check_reached(self, *, compares_identity: bool) -> None:
        """Capture again where the function also reached an argument by itself, or may and compares by identity."""
        if self.reached:
            raise SharedClosureFound(*self.reached.items())
        if compares_identity:
            self.check_again()
        inside = self.call.inside_wrappers() if compares_identity else ()
        found = next((i for i in inside if self.sources.state.places.is_reached(self.call.leaves[i])), None)
        if found is not None:
            raise UnsupportedTensorError(
                f"`{self.call.paths[found]}` is inside a tensor that is an argument and that the function also "
                "reaches by itself, and the function compares tensors by identity. Pass it or reach it, not both."
            )

    def check_again(self) -> None:
        """Capture again where `meets_again`."""
        if self.meets_again():
            raise CaptureAgain

    def meet_again(self) -> None:
        """Before the arguments are made: tensors that the function reaches by itself are real in this run."""
        if self.meets_again():
            self.reads.give(self.as_they_are)

    def meets_again(self) -> bool:
        """Whether the function reaches an argument by itself that was not the real one, and is from the next run on."""
        reaches, inside = self.sources.state.places.is_reached, self.call.inside_wrappers()
        lifted = of_python().lifted_paths(self.call.function)  # a stand-in is there
        paths = enumerate(self.call.paths)
        leaves = (self.call.leaves[i] for i, path in paths if i not in inside and not path.startswith(lifted))
        found = IdSet(leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and reaches(leaf))
        self.as_they_are.update(found)
        return not self.reads.given.issuperset(map(id, found))

    def arguments(self, array_of: Callable[[Any], object], leaves: list[object], made: dict[int, object]) -> Arguments:
        """The containers that the function is called with, made of the `leaves`; `made` gets them by number."""
        with self.recorder:
            return self.call.arguments(leaves, functools.partial(self.wrappers.of_argument, array_of), made)

    def _number(self, index: int) -> Any:
        """A number that stands for a varying number among the arguments."""
        assert self.symbols is not None
        slot, entry = Input(self.call.paths[index]), Entry(None)
        leaf = self.call.leaves[index]
        if type(leaf) is float:
            return self._float(index, leaf, slot)
        if is_symbolic(leaf):
            self.symbols.given([(None, leaf)], entry)
            number = TracedInt(leaf.node)
        else:
            number = self.symbols.number(leaf, str(slot), entry, is_item=is_item(str(slot)))
        if is_symbolic(number):
            self.numbers.append(NumberRecord(entry, index, slot, number))
            self.recorder.tape.append(entry)
            self.recorder.decisions.numbers.integers[symbol_made(number)] = str(slot)
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
        """Symbols for the sizes of an argument that may vary; otherwise its present sizes."""
        if self.symbols is not None and has_symbolic(record.spec.shape):
            self.symbols.given(enumerate(record.spec.shape), record.entry)
            return
        if self.symbols is None or record.argument is None or isinstance(record.real, torch.nn.Parameter):
            return
        if dims := self.call.dynamic.get(record.argument):
            padded = self.call.padded.get(record.argument, ())
            record.spec = self.symbols.spec(record.spec, dims, str(record.slot), record.entry, padded)
            record.entry.spec = record.spec

    def _add(self, record: InputRecord) -> InputRecord | None:
        """Add an input; returns the first earlier input in its memory."""
        self.records.append(record)
        self.recorder.tape.append(record.entry)
        first = self._by_memory.setdefault(storage_key(record.real), record)
        return None if first is record else first

    def adopt(self, real: torch.Tensor) -> torch.Tensor:
        """The stand-in of a real tensor, making it an input when it is met for the first time."""
        record = self.by_real.get(real)
        if record is not None:
            is_argument = record.argument is not None and real not in self.as_they_are
            if is_argument and (source := self.sources.find(real)):
                self.reached[real] = source
            return record.stand_in
        if is_stand_in(real):
            return real
        if isinstance(real, FakeTensor) and self.sources.find(real) is None:  # not the program's
            return real
        if is_wrapper(real):
            found: torch.Tensor = self.wrappers.adopt(real, self._adopt, self.sources.find, self.adopt)
            return found
        return self.unobserved(real)

    def adopt_plain(self, real: torch.Tensor) -> torch.Tensor:
        """`adopt` for a tensor that is met for the first time and no wrapper: no code of the program runs."""
        way = self.sources.find(real)
        if way is None:
            if is_number(real):  # autograd's C++ asks about it
                return real
            way = self.sources.constant(real)
        try:
            check_tensor(real, str(way.slot))
        except TypeError as error:  # Python takes one of an operator's (`x @ w`) for "not that way round"
            self.recorder.decisions.refuse(error)
            raise
        return self._adopt(real, way)

    def _adopt(self, real: torch.Tensor, source: Source | PartOf) -> torch.Tensor:
        known = self.by_real.get(real)
        if known is not None:
            return known.stand_in
        record = InputRecord(real, source.slot, None, source)
        shared = self._add(record)
        if shared is not None or real in self.whole or real in self.viewed:  # capture again, told so at the start
            raise SharedClosureFound((record.real, source))
        with levels_off() if is_tracing_functorch() else contextlib.nullcontext():  # an input is of no level
            self.stand_ins.alone(record)
            self._register(record)
        return record.stand_in

    def real_of(self, stand_in: torch.Tensor) -> torch.Tensor | None:
        """The real tensor that a stand-in is there for; None for any other tensor."""
        record = self.by_stand_in.get(stand_in)
        return None if record is None else record.real

    def real_behind(self, entry: Entry) -> torch.Tensor | None:
        """The real tensor that an input's entry stands for; None when it is no input's."""
        whole = next((whole for whole, _ in self.memory if whole.entry is entry), None)
        if whole is not None:
            return whole_memory(whole.real, whole.spec.dtype)
        real = next((record.real for record in self.records if record.entry is entry), None)
        return next((number.real for number in self.numbers if number.entry is entry), real)

    def _register(self, record: InputRecord) -> None:
        stand_in, real = record.stand_in, record.real
        if isinstance(real, torch.nn.Parameter):
            become_parameter(stand_in)
        stand_in.__dict__.update(real.__dict__)
        self.by_real[real] = record
        self.by_stand_in[stand_in] = record
        self.recorder.values[stand_in] = record.initial
        if not stand_in.is_inference():
            record.start_version = version_of(stand_in)
        tracked = base_of(stand_in) if is_view(stand_in) else stand_in
        if tracked is not None and tracked.grad_fn is not None:
            record.start_sequence_nr = tracked.grad_fn._sequence_nr()
        self.recorder.late.met(record)

    def whole_memory_needed(self, root: Value) -> None:
        """A write went past the edges of the input that `root` is: capture again with all of its memory."""
        record = next((r for r in self.records if r.initial is root), None)
        if record is None:
            raise past_the_edges()
        self.whole.add(record.real)
        raise again_with(record)

    def check_overlapping(self) -> None:
        """Raise where a view was changed whose gradients differ in place by operators and by memory."""
        fakes = [value.fake for value in self.recorder.values.values()] if self.overlapping else []
        for record, base in self.overlapping:
            views = [fake for fake in fakes if fake is not None and is_view(fake) and base_of(fake) is record.stand_in]
            if (is_moved(base) or is_moved(record)) and (views or record is not base):
                raise past_the_edges(user_line(record.initial.root.read(self.recorder.emit).origin))

    def see_as_views(self, records: list[InputRecord]) -> None:
        """Capture again where a record's stand-in stands for a view and is none."""
        for record in records:
            if not is_view(record.stand_in) and record.real not in self.viewed:
                self.viewed.add(record.real)
                raise again_with(record)


def again_with(record: InputRecord) -> CaptureAgain:
    """The exception that starts the capture over. A tensor that is no argument is an input from the beginning then."""
    return CaptureAgain() if record.argument is not None else SharedClosureFound((record.real, record.source))


def _unique(lifted: list[tuple[torch.Tensor, Source]]) -> list[tuple[torch.Tensor, Source]]:
    seen: ById[torch.Tensor, Source] = ById()
    for tensor, source in lifted:
        seen.setdefault(tensor, source)
    return list(seen.items())


# -------------------------------------------------------------------- sources
# Where a function can read the tensors that it reaches by itself, in every call.


class GradientSource(Source):
    """Where the gradient is that an input has in `.grad` when the call begins: at the tensor `owner`."""

    __slots__ = ("owner",)

    def __init__(self, slot: Slot, owner: torch.Tensor) -> None:
        super().__init__(slot, owner, (("attr", "grad"),))
        self.owner = owner


class TensorSources:
    """The sources of tensors that one run brings in. `where()`: the user's line; `state`: the run's reach."""

    def __init__(self, reads: PlacesRead) -> None:
        self.reads = reads
        self.where: Callable[[], str]
        self.state: WalkedState
        self._added: ById[torch.Tensor, Source] = ById()

    def add(self, real: torch.Tensor, source: Source) -> None:
        """Note the source of a tensor that was found by other means."""
        self._added[real] = source

    def known(self, real: torch.Tensor) -> Source | None:
        """Where the function can read a tensor; None for one that was made in the call."""
        # A tensor that the function has moved is looked for in its place from before.
        return self._added.get(real) or self.state.places.source_of(real)

    def find(self, real: torch.Tensor) -> Source | None:
        """The source of a tensor, also as a kept result of a function; None without any source."""
        if (source := self.known(real)) is not None:
            return source
        function = self.state.result_of(real)
        if function is None:
            return None
        self.reads.contents(
            function, function.__name__
        )  # guarded: it gives this very tensor as long as it isn't cleared
        return self._constant(real)

    def constant(self, real: torch.Tensor) -> Source:
        """A tensor without a source, see `find`: one and the same in every call, and a warning says so."""
        warnings.warn(
            f"a tensor {TensorSpec.of(real)} used at {self.where()} can't be reached from the compiled function; "
            "this very tensor object will be used on every call, even if the program rebinds it.",
            ForegradWarning,
            stacklevel=2,
        )
        return self._constant(real)

    def _constant(self, real: torch.Tensor) -> Source:
        return Source(Closure(f"tensor at {self.where()}"), real, ())


# -------------------------------------------------------------------- history changes
# `requires_grad_()` and `detach_()`: where a stand-in must be a view for them, as the tensor that it stands for is.


class HistoryChanges(Aspect):
    """Stand-ins are views only where gradients need it: each method starts over where one must be a view."""

    def __init__(self, inputs: Inputs, recorder: Recorder) -> None:
        self.inputs, self.recorder = inputs, recorder

    def set_requires_grad(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`requires_grad_(value)`, or an assignment to `requires_grad`."""
        tensor, requires_grad = args[0], bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
        if is_wrapper(tensor):
            if tensor.requires_grad is requires_grad:
                return tensor
            self.inputs.wrappers.check_history(tensor, "requires_grad_()", user_line(self.recorder.origins.here()))
            return function(*args, **kwargs)
        value = self.recorder.values.get(tensor)
        if value is not None:  # no transform's own
            effect = MarkRequiresGrad(-1) if requires_grad else Detach(-1, in_place=False)
            self.recorder.changes.log.note(effect, tensor, value)
            self.recorder.changes.changed_at[tensor] = self.recorder.origins.here()
        self._check_mark(tensor)
        return function(*args, **kwargs)

    def detach(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`detach_()`."""
        tensor = args[0]
        if not is_wrapper(tensor):
            self._check_detach(tensor)
            self.recorder.changes.detach(tensor)
        elif tensor.requires_grad:
            self.inputs.wrappers.check_history(tensor, "detach_()", user_line(self.recorder.origins.here()))
        return function(*args, **kwargs)

    functions: ClassVar[Mapping[Any, Row]] = {
        torch.Tensor.requires_grad_: set_requires_grad,
        _TENSOR.requires_grad.__set__: set_requires_grad,
        torch.Tensor.detach_: detach,
    }

    def _check_mark(self, stand_in: torch.Tensor) -> None:
        """Let stand-ins of marked views, and of views of the marked tensor, be views too."""
        marked = self.inputs.by_stand_in.get(stand_in)
        if marked is not None and is_no_grad_view(marked):
            raise changed_with_gradients(str(marked.slot), user_line(self.recorder.origins.here()))
        if marked is None or marked.real.requires_grad:
            return
        for record in self.inputs.records:
            is_concerned = record is marked or base_of(record.real) is marked.real
            if is_concerned and is_view(record.real) and not record.real.requires_grad:
                self.inputs.see_as_views([record])

    def _check_detach(self, stand_in: torch.Tensor) -> None:
        """Raise eager's error for a view, because few stand-ins are views; or for a tensor with views among inputs."""
        record = self.inputs.by_stand_in.get(stand_in)
        if record is not None and is_view(record.real):
            raise RuntimeError("Can't detach views in-place. Use detach() instead.")
        if record is None or not stand_in.requires_grad:
            return
        for other in self.inputs.records:
            if base_of(other.real) is record.real:
                raise changed_with_gradients(str(other.slot), user_line(self.recorder.origins.here()))

    def returned(self, results: Sequence[object], paths: Sequence[str]) -> None:
        """Capture again where views that autograd bars writes to, made under no_grad or several at once, are written
        themselves: autograd then bars most of their uses. And where an operator on lists wrote to a view twice: its
        history then differs from its base's.
        """
        listed = self.recorder.writes.listed
        barred = [r for r in self.inputs.records if r.real.requires_grad and not allows_writes(r.real) and is_moved(r)]
        twice = [r for r in self.inputs.records if r.stand_in in listed and r.stand_in.requires_grad]
        self.inputs.see_as_views([*barred, *(record for record in twice if is_view(record.real))])
