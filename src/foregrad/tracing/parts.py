"""The parts of a capture, their tasks, and their questions to each other."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from .._torch.cache_folder import why_no_folder
from .._torch.fakes import FakeTensor, FakeTensorMode, NewFakeMode
from .._torch.symbols import has_symbolic
from ..annexes import given, the_one
from ..frontend.call import FlatCall
from ..frontend.state import of_python
from ..interrupts import runs_user_code
from .aspect import Aspect, Aspects, aspect_classes
from .derivatives.backward import Backward, InnerGradients
from .effects.attribute_guards import Facts
from .heap.recording import Host
from .heap.records import InputRecord
from .inputs.inputs import HistoryChanges, Inputs
from .inputs.lifting import Lifting
from .recorder.recorder import Recorder, Unrecorded
from .tape.origin import Origins, user_line
from .tape.tape import Learned
from .values.decisions import Decisions
from .values.numbers import Numbers
from .values.sizes import OpenSizes, SizeSymbols

if TYPE_CHECKING:
    from ..frontend.answers import DrawsOfRun


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """The tasks of a capture.

    `higher_order`: keep the trace for differentiating the function again. `around`: makes a context for each run of the
    function. `live_hooks`: hooks may stay Python functions that each call puts on its results. `takes_output`: the
    function's output is an effect, and not written now; `runs_regions`: an eager region is called now, and not refused.
    `fake_mode`: the mode of its fakes (None: the mode of fakes among the arguments). `keeps_branches`: `torch.cond` and
    `while_loop` on tensors are operators of the graph; else the function is run with the branch taken.
    """

    name: str = "function"
    decompositions: Mapping[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    higher_order: bool = True
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    live_hooks: bool = False
    takes_output: bool = False
    runs_regions: bool = True
    fake_mode: FakeTensorMode | None = None
    keeps_branches: bool = False


CALLED = "Python that graphs call"


def _refuse(*_: Any) -> Any:
    return the_one(CALLED)


class CalledPython:
    """Python that one run's graph calls: none here, refused by the seam's name. `call`: of an eager region. `inside`:
    results with hooks in the backward; `made`: objects behind operators.
    """

    aspects: Sequence[Aspect] = ()
    inside: Sequence[int] = ()
    made: Sequence[Any] = ()
    call = on_hook = instead = on_node = on_numpy = staticmethod(_refuse)

    def __init__(self, run: CaptureParts) -> None: ...

    def is_region(self, cls: Any) -> bool:
        return not of_python().is_of_library(cls) and bool(_refuse())

    def applied(self, cls: object, node: Any) -> None: ...

    def settle(self, results: Sequence[object], returned: Any) -> bool:
        """Divide hooks between the backward and each call. Whether the backward, not traced yet, runs hooks."""
        return False

    def after_backward(self) -> None:
        """Raise where the backward did not come to a hook that eager's may call."""

    def check_absent(self, tangents: int) -> None:
        """Raise where a Function learns of results without a gradient, and a caller may leave some out."""


class CaptureParts(Host):
    """The parts of one run of the function, each with its needs from the rest."""

    notes_reads = True
    aspects: Aspects
    learned: Learned
    draws: DrawsOfRun  # when the stand-ins of the arguments are there, as `state`

    def __init__(self, call: FlatCall, options: Options, learned: Learned) -> None:
        super().__init__()
        self.python = python = of_python()
        self.takes_output, self.keeps_branches = options.takes_output, options.keeps_branches
        self.call, self.options, self.learned, self.name = call, options, learned, options.name
        self.symbols = symbols_of(call)
        self.fake_mode = options.fake_mode or fake_mode_of(call, self.symbols)
        self.inputs = inputs = Inputs(call, self.fake_mode, learned, self.symbols)
        self.origins = Origins(run_function.__code__)
        self.written = learned.late
        self.recorder = recorder = Recorder(self.fake_mode, self.origins, self, options.decompositions, self._decisions)
        self.aspects = Aspects((cls, cls(self, recorder)) for cls in aspect_classes())
        self.unrecorded = Unrecorded(recorder)
        self.reads = inputs.reads
        self.inner = InnerGradients(inputs, recorder, self.name)
        self.facts = Facts(inputs, self.where)
        apart = [*python.called_by_autograd(learned.regions), *filter(None, learned.hooks.values())]
        self.code = python.SeenCode(call, self.name, self.reads, python.ReboundNames(), self.origins, apart)
        self.observed = python.Observed(self, self.code.rebound.runs)
        self.lifting = Lifting(self, recorder)
        self.backward = Backward(recorder, self.lifting, inputs)
        self.called = next(iter(given(CALLED)), CalledPython)(self)
        self.functions, self.region = self.called, self.observed.unobserved(self.called.call)
        inputs.unobserved = self.observed.unobserved(inputs.adopt_plain)
        self._note_read = self.observed.unobserved(self.reads.note)
        parts = *self.called.aspects, self.inner, self.facts.gradients, HistoryChanges(inputs, recorder)
        self.aspects.join((type(part), part) for part in parts)
        # Asked of the capture, answered by one part.
        self.pause, self.go_on = self.observed.pause, self.observed.go_on
        self.enter_region, self.leave_region = self.origins.begin, self.origins.end
        self.leave_module = self.origins.leave
        self.real_of, self.looks_up = inputs.real_of, inputs.check_again
        self.past_the_edges = inputs.whole_memory_needed
        self.ask, self.missing = self.facts.ask, self.facts.missing
        self.accumulating = self.facts.gradients.accumulating
        self.on_hook, self.hook_instead, self.on_numpy = self.called.on_hook, self.called.instead, self.called.on_numpy
        self.node_hook = self.called.on_node

    def adopt(self, real: torch.Tensor) -> torch.Tensor:
        return self.inputs.adopt(real)

    def read(self, module: torch.nn.Module, name: str) -> None:
        if self.reads.is_news(module, name):
            self._note_read(module, name)

    def changed_since(self) -> Callable[[], str | None]:
        versions = {record: self._writes_to(record) for record in self.inputs.records}
        changed, drawn = self.state.changed_since(), self.draws.taken

        def written() -> str | None:
            if self.draws.taken != drawn:
                return "draws from a random generator of Python's or NumPy's, or reads a clock"
            found = (r for r in self.inputs.records if self._writes_to(r) != versions.get(r, 0))
            record = next(found, None)
            what = changed() if record is None else str(record.slot)
            return None if what is None else f"writes to {what}"

        return written

    def _writes_to(self, record: InputRecord) -> int:
        value = self.recorder.values.get(record.stand_in)
        return 0 if value is None else value.storage.generation

    def _decisions(self, recorder: Recorder) -> Decisions:
        """The record of the values that the program reads."""
        call, numbers = self.call, Numbers(recorder, self.symbols.table if self.symbols else None)
        sizes, real_of = OpenSizes(numbers, call.sizes, always=call.every_size), self.inputs.real_behind
        return Decisions(recorder.tape, real_of, numbers, sizes, checks=recorder.checks, varied=call.varied)

    def where(self) -> str:
        return user_line(self.origins.here())

    def knows(self, value: object) -> bool:
        return self.state.knows(value)

    def varies(self, value: object) -> bool:
        return self.state.varies(value)

    def gives_back(self, value: object) -> bool:
        return value in self.state.given_back

    def met(self, value: object) -> bool:
        return bool(self.state.before.knows(value))

    def enter_module(self, module: torch.nn.Module) -> None:
        self.pause()
        try:
            self.state.enter(module)
            self.code.enter(module)
        finally:
            self.go_on()


@runs_user_code
def run_function(function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    # The frame of this function ends the user's part of a stack trace.
    return function(*args, **kwargs)


def symbols_of(call: FlatCall) -> SizeSymbols | None:
    """For the sizes that are to be symbolic, or are so in fake tensors that were given."""
    for leaf in call.leaves:
        if has_symbolic(leaf.shape if isinstance(leaf, torch.Tensor) else leaf):
            return SizeSymbols(fake_mode_of(call, None).shape_env)
    return SizeSymbols() if call.dynamic or call.numbers else None


def fake_mode_of(call: FlatCall, symbols: SizeSymbols | None) -> FakeTensorMode:
    """The mode of the fake tensors that were given, or else a new one."""
    for leaf in call.leaves:
        if isinstance(leaf, FakeTensor):
            return leaf.fake_mode
    why_no_folder()  # PyTorch imports its compilers for fake tensors
    mode = NewFakeMode(shape_env=None if symbols is None else symbols.table.env)
    mode.cache_enabled = False  # `Metadata` remembers the operators' results; once is enough
    return mode
