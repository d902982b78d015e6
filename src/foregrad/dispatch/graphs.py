"""The graphs of one compiled function: their making, the order of trials in a call, the limit on their number.

A program may branch on values of its inputs: each path is a graph, up to a limit. A call tries the graphs with guards
that it passes. Each runs as far as its forward, and its results are dropped if a decision comes out otherwise. So every
further graph makes a call that fits none dearer: past the limit these calls run eagerly, and if most calls run several
graphs in vain, the graphs are given up.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from .._torch.symbols import ClosedSizesError
from ..annexes import given
from ..config import Config
from ..errors import EscapedTensorError, UnsupportedDataDependentError, UnsupportedSideEffectError
from ..extend import CompileStage
from ..frontend.call import FlatCall, StatefulFunction
from ..graph.signature import ConstantOutput, DecisionInfo, Signature
from ..graph.source import Names, compile_source, source_of
from ..identity import ById
from ..interrupts import held, is_interrupt
from ..locks import make_lock
from ..phases import compiling, phase
from ..runtime.compiled import Compiled
from ..runtime.decisions import Stop
from ..runtime.node import NodeSource
from ..runtime.render import RunLines
from ..tracing.tape.again import ArgumentsDiffer, ArgumentsFound, GivenOnce, NumberVaries
from ..tracing.tape.collection import paused_collection
from .explain import Difference, OneWarning, decided, line_last, warn_user
from .guard_list import MISS, GuardList, GuardMaker, KeptGuards
from .guards import CallGuards
from .pipeline import Pipeline, Product, is_of_capture
from .varying import ConstantNumbers, SizesSeen, check_marked, fixed_numbers

Call = Callable[..., Any]


@dataclasses.dataclass(slots=True)
class _Record:
    """One compilation: the `place` of the difference that it was for, None for other reasons, and its use."""

    place: Any
    served_again: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class _Noticing:
    """The function of a graph until its second call. It keeps no graph alive."""

    call: Call
    record: _Record
    graphs: weakref.ref[Graphs]

    def __call__(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Any:
        result, graphs = self.call(args, kwargs), self.graphs()
        if result is not MISS and graphs is not None:
            self.record.served_again = True
            graphs.noticed(self)
        return result


class Graphs:
    """The `specializations`, the oldest first, and `calls`, their functions, the one used last first. `vain_limit`: how
    many graphs may run in vain.
    """

    def __init__(self, vain_limit: float = Config.vain_limit) -> None:
        self.specializations: list[Specialization] = []
        self.calls: tuple[Call, ...] = ()
        self._order = make_lock()  # held to set `calls`, never while anything runs
        self._history: list[_Record] = []
        self._noticing: ById[Call, _Noticing] = ById()  # by a graph's function: its `_Noticing`
        # Graphs that ran in vain since the last was made, less one for each call with a graph; infinite: too many.
        self.vain: float = 0
        self._are_idle = False  # no graph has served a call since `rest`
        self._vain_limit = vain_limit

    def teller(self) -> Callable[[], object]:
        """A function for graphs that have run in vain, which gives their result and does not keep this object alive.
        Where too many graphs run in vain, no graph that branches on values is tried.
        """
        owner = weakref.ref(self)

        def diverged() -> object:
            if (graphs := owner()) is not None:
                graphs.vain += 1
                if graphs.vain > graphs._vain_limit:
                    graphs.vain = math.inf
                    graphs.try_only(lambda s: not s.decides)
            return MISS

        return diverged

    def served(self, call: Call) -> None:
        """Note that a graph served a call, where others ran in vain of late, or were tried before it."""
        self.vain, self._are_idle = max(self.vain - 1, 0), False
        if self._order.acquire(blocking=False):  # if a second thread reorders now, that order is as good
            try:
                if call in self.calls:
                    self.calls = (call, *(c for c in self.calls if c is not call))
            finally:
                self._order.release()

    def add(self, specialization: Specialization, place: object = None) -> None:
        """Add the graph for the call at hand. `place`: the place of the difference that it was made for."""
        self.specializations.append(specialization)
        record, call = _Record(place), specialization.call
        self._history.append(record)
        self.vain = 0
        noticing = _Noticing(call, record, weakref.ref(self))
        with self._order:
            self._noticing[call] = noticing
            self.calls = (noticing, *self.calls)

    def noticed(self, noticing: _Noticing) -> None:
        """Replace the function that waited for a graph's second call by the graph's own, or by its successor's."""
        made = next((s for s in self.specializations if s.call is noticing.call), None)
        new = made if made is None or made.successor is None else made.successor(made)
        if made is not None and new is None:
            return  # there may be a successor later
        with self._order:
            self._noticing.pop(noticing.call, None)
            call = noticing.call if new is None else new.call
            if made in self.specializations and new is not None:
                self.specializations[self.specializations.index(made)] = new
            if noticing in self.calls:
                self.calls = (call, *(c for c in self.calls if c is not noticing))

    def in_a_row(self, place: object) -> int:
        """The number of latest graphs that were made for differences in `place` and served a single call each."""
        count = 0
        for record in reversed(self._history):
            if record.place != place or record.served_again:
                break
            count += 1
        return count

    def serve_few(self, limit: int, *, of_paths: bool = False) -> bool:
        """Whether there are half as many graphs, or paths, as the `limit`, 8 or more, and most served a single call."""
        graphs = [s for s in self.specializations if s.decides or not of_paths]
        is_few = 2 * sum(map(self.has_served_again, graphs)) < len(graphs) and self._vain_limit < math.inf
        return is_few and 2 * len(_ways(graphs) if of_paths else graphs) >= max(limit, 16)

    @property
    def decisions(self) -> list[DecisionInfo]:
        """The decisions of all graphs."""
        return [decision for s in self.specializations for decision in s.signature.stops.decisions]

    def remove(self, specialization: Specialization) -> None:
        call = specialization.call
        with self._order:
            if specialization in self.specializations:
                self.specializations.remove(specialization)
            noticing = self._noticing.pop(call, None)
            self.calls = tuple(c for c in self.calls if c is not call and c is not noticing)

    def drop_dead(self) -> None:
        """Drop graphs of objects that are gone, and let go of parameters that were replaced."""
        for specialization in list(self.specializations):
            if specialization.watch.dead:
                self.remove(specialization)
            specialization.watch.forget()

    def rest(self) -> None:
        """A call past a limit fits none: let calls try none, if no graph has served one since `rest` was called."""
        if self._are_idle:
            self.try_only()
        self.vain, self._are_idle = max(self.vain, 0.5), True  # `served` is told of each call that a graph serves

    def try_only(self, is_meant: Callable[[Specialization], bool] = lambda s: False) -> None:
        """Let calls try only these graphs, the newest first."""
        with self._order:
            meant = filter(is_meant, reversed(self.specializations))
            self.calls = tuple(self._noticing.get(s.call, s.call) for s in meant)

    def has_served_again(self, specialization: Specialization) -> bool:
        """Whether a graph has served a second call."""
        noticing = self._noticing.get(specialization.call)
        return noticing is None or noticing.record.served_again


class Paths:
    """The paths of a function that branches on values, and the limit on their number."""

    def __init__(self, name: str, config: Config, once: OneWarning) -> None:
        self.name, self.once = name, once
        self.config = config
        self.reason = ""  # once the limit was met
        self.diverged = 0  # fresh graphs with decisions that differed from their capture

    def at_limit(self, specializations: Sequence[Specialization]) -> bool:
        """Whether no graph is to be made for a further path."""
        if self.diverged >= self.config.single_use_limit:
            return True
        return _says_values(specializations) or len(_ways(specializations)) >= self.config.path_limit

    def past_limit(self, specializations: Sequence[Specialization]) -> None:
        """Warn, or raise if the settings say so."""
        if self.config.error_on_recompile_limit or not self.reason:
            self.reason = line_last(self._message(specializations))
            if self.config.error_on_recompile_limit:
                raise UnsupportedDataDependentError(self.reason)
            self.once.warn(self.reason + " Calls like this run eagerly from now on.")

    def _message(self, specializations: Sequence[Specialization]) -> str:
        values: dict[str, set[str]] = {}
        for specialization in specializations:
            for decision in specialization.signature.stops.decisions:
                values.setdefault(decision.where, set()).add(repr(decision.value))
        where = max(values, key=lambda line: len(values[line]), default="a line outside the function")
        if _says_values(specializations):
            return (
                f"`{self.name}` prints, logs or warns, and makes text of a value that it reads at {where}, or "
                "branches on the value: each value needs its own graph. Make the text by an f-string, not by `%`, in "
                'the call that prints or logs it (`print(f"loss {loss.item():.3f}")`), or print the function\'s result.'
            )
        count, end = len(_ways(specializations)), "the limit"
        if not self.at_limit(specializations):
            count = sum(s.decides for s in specializations)
            end = "and most calls fit none or run several of these graphs in vain"
        return (
            f"`{self.name}` was compiled {count} times for values that it reads from its inputs, {end}. Most values "
            f"were read at {where}. Keep the value a tensor (torch.where, masking), compute it outside and pass it, "
            "or raise foregrad.config.path_limit."
        )


def _ways(specializations: Sequence[Specialization]) -> set[tuple[str, ...]]:
    """The distinct decisions of the graphs that decide anything: graphs for other shapes may share a path."""
    return {tuple(f"{d.where} {d.value!r}" for d in s.signature.stops.decisions) for s in specializations if s.decides}


def _says_values(specializations: Sequence[Specialization]) -> bool:
    """Whether two graphs print, log or warn, and the texts differ because of a number."""
    saying = [s for s in specializations if any(write.is_said for write in s.signature.effects.python_writes)]
    return len(_ways(saying)) > 1 and len({tuple(_constants(s)) for s in saying}) > 1


def _constants(specialization: Specialization) -> list[str]:
    outputs = specialization.signature.structure.outputs
    return [repr(info.value) for info in outputs if isinstance(info, ConstantOutput)]


@dataclasses.dataclass(eq=False, repr=False)
class Specialization:
    """One compiled graph with its guards: `call(args, kwargs)` returns the result, or `MISS`."""

    call: Callable[..., Any]
    node: NodeSource | None
    product: Product
    watch: Any  # a `Watch` of Python's state
    guards: GuardList
    # After each call from the second on: the specialization for later calls (this one, if it stays), None to ask again.
    successor: Callable[[Specialization], Specialization | None] | None = None

    @property
    def signature(self) -> Signature:
        return self.product.captured.joint.signature

    @property
    def decides(self) -> bool:
        return bool(self.signature.stops.decisions)

    def difference(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> Difference:
        """The reason why the graph is not right for a call with the arguments, made now."""
        found = self.guards.first_difference(args, kwargs) or decided(self.signature.stops.decisions)
        tensor, _, fact = found.name.rpartition(".")
        return dataclasses.replace(found, fixed=tensor in self.guards.fixed and fact in ("shape", "stride()"))

    def makes_the_same_of_it(self, other: Specialization) -> bool:
        """Whether the other capture has an equal graph, and equal outputs besides tensors."""
        one, two = self.product.captured.joint, other.product.captured.joint
        numbers = [
            [(output.path, repr(getattr(output, "value", None))) for output in joint.signature.structure.outputs]
            for joint in (one, two)
        ]
        return numbers[0] == numbers[1] and str(one) == str(two)

    def leave_unrepeated(self, name: str) -> None:
        """Stop watching state that the function changes on every run, if two runs gave equal graphs; warns once."""
        changed = self.watch.drop_changed()
        if changed:
            warn_user(
                f"`{name}` changes {'; '.join(changed)}. The change was made while it was captured; compiled calls do "
                "not repeat it, and do not check it. Move it out of the compiled function."
            )

    def source(self) -> str:
        """The rendered Python: guards, runtime, and the autograd node."""
        text = source_of(self.call)
        return text if self.node is None else f"{self.node.source}\n\n{text}"


# -------------------------------------------------------------------- making one
# From one call to its specialization: capture, partition, compile, render; with symbolic sizes if that works.


class Specializer:
    """Makes the specializations of one function. `sizes`: of its calls so far; `ends` as in `rendered`."""

    def __init__(
        self, function: Call, pipeline: Pipeline, config: Config, name: str, sizes: SizesSeen, ends: tuple[Call, Call]
    ) -> None:
        self.function, self.pipeline, self.config, self.name, self.sizes = function, pipeline, config, name, sizes
        self.ends = ends
        self._now = pipeline  # of the capture at hand
        self._errors: set[tuple[type, str]] = set()  # that backwards raise without symbols too
        self._of_compiler = ""  # a compiler's error in this capture, where sizes or numbers were symbolic
        self._once = OneWarning()

    def specialize(self, call: FlatCall, decisions: Sequence[DecisionInfo], *, may_wait: bool = True) -> Specialization:
        """Capture, partition, compile and render for the call. `decisions`: of the graphs so far. `may_wait`: graphs of
        the backend's `first` may serve calls meanwhile.
        """
        self._of_compiler = ""
        makers = given("graphs compiled elsewhere") if may_wait and self.pipeline.first is not None else ()
        later = next((found for make in makers if (found := make(self.pipeline)) is not None), None)
        self._now = self.pipeline if later is None else later.first
        with compiling(self.name):
            call = self.sizes.seen(call, decisions)
            while True:
                try:
                    call, product = self._build(call)
                    self._tell()
                    break
                except NumberVaries as found:
                    self.sizes.varied |= {found.where}
                    call = dataclasses.replace(call, varied=self.sizes.varied)
            begin = time.perf_counter()
            with phase("guards"):
                check_draws(self.name, call, self.sizes.constants)
                if call.dynamic:
                    check_marked(call, product.captured.joint, self.name)
                make_guards = functools.partial(CallGuards, call, product.captured, native=self.config.native)
                function, guards, node = rendered(self.name, product.compiled, make_guards, self.function, self.ends)
            joint, seconds = product.captured.joint, time.perf_counter() - begin
            self.pipeline.tell(CompileStage("guards", self.name, joint, source_of(function), seconds, joint))
        successor = None if later is None else functools.partial(later.after_call, self._anew, guards.kept())
        return Specialization(function, node, product.without_tensors(), guards.watch, guards.list, successor)

    def _anew(
        self, pipeline: Pipeline, kept: Collection[str], guards: KeptGuards, made: Specialization
    ) -> Specialization:
        """The graph of a specialization, split and compiled once more, by a further pipeline. `kept`: its nodes with
        values that are saved for further derivatives alone.
        """
        before, captured = made.product.compiled, made.product.captured
        with held, paused_collection(), compiling(self.name):
            with phase("partition"):
                halves = pipeline.prepared_halves(pipeline.split(before.partitioned.joint), kept, self.config)
            compiled = dataclasses.replace(
                pipeline.compile(halves, captured.resumable, self.config, may_retry=False),
                disable_autocast=before.disable_autocast,
                needs_grad_mode=before.needs_grad_mode,
            )
            with phase("guards"):
                function, _, node = rendered(self.name, compiled, lambda _: guards, self.function, self.ends)
        return Specialization(function, node, Product(captured, compiled), made.watch, made.guards)

    def _build(self, call: FlatCall) -> tuple[FlatCall, Product]:
        """The pipeline's product for a call: with symbolic sizes and numbers if that works, else without."""
        needed: list[str] = []  # numbers with values that are needed, unless the program raises anyway
        while call.numbers:
            try:
                product = self._now.build(call, self.name, self.config)
                constants = fixed_numbers(product.captured.joint)
                if not self._is_of_symbols(product, call):
                    needed += [call.paths[i] for i in constants if repr(call.leaves[i]) not in "01"]
                    self.sizes.make_constant(needed, (call.paths[i] for i in call.numbers - constants))
                    return call, product
                constants = call.numbers
            except ConstantNumbers as error:
                constants = error.leaves
            except (ArgumentsDiffer, EscapedTensorError):
                raise
            except Exception as error:  # the next try raises errors that symbols did not cause
                self._note(error)
                constants = call.numbers
            needed += [call.paths[i] for i in constants if repr(call.leaves[i]) not in "01"]  # further values may do
            call = dataclasses.replace(call, numbers=call.numbers - constants)
        closed = dataclasses.replace(call, sizes=None)
        static = dataclasses.replace(closed, dynamic={}, varied=None if call.varied else call.varied)
        # Each try, and the note of hopelessness for the case that only a later try works.
        tries: list[tuple[FlatCall, Callable[[], None]]] = []
        if call.may_open_sizes:
            tries.append((call, self.sizes.close))
        if call.dynamic or call.varied:
            tries.append((closed, self.sizes.give_up))  # some operator takes plain numbers only
        for tried, _ in tries:
            attempt = self._try_symbols(tried)
            if attempt is not None:
                product = attempt
                break
        else:
            tried, product = static, self._now.build(static, self.name, self.config)
        self.sizes.make_constant(needed)
        if product.captured.joint.error is None:
            for failed, give_up in tries:
                if failed is tried:
                    break
                give_up()
        return tried, product

    def _try_symbols(self, call: FlatCall) -> Product | None:
        """The pipeline's product for a call with symbolic sizes, or None if that does not work."""
        try:
            product = self._now.build(call, self.name, self.config)
        except Exception as error:  # the next try raises errors that symbols did not cause
            self._note(error)
            return None
        return None if self._is_of_symbols(product, call) else product

    def _note(self, error: Exception) -> None:
        if is_interrupt(error) or isinstance(error, (ArgumentsFound, GivenOnce)):
            raise error
        if not is_of_capture(error) and not ClosedSizesError.is_behind(error):
            self._of_compiler = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"

    def _tell(self) -> None:
        """Say once that a compiler failed with symbolic sizes alone."""
        if self._of_compiler:
            self._once.warn(
                f"a compiler failed on a graph of `{self.name}` with symbolic sizes or numbers: {self._of_compiler}. "
                "Each size or number gets a graph of its own instead, up to the limit of graphs. "
                "(foregrad.compile(..., dynamic=False) asks for that from the start.)"
            )

    def _is_of_symbols(self, product: Product, call: FlatCall) -> bool:
        """Whether a backward raises because of symbolic sizes and numbers, not because eager's does."""
        error = _error_of(product)
        if error is None or (type(error), str(error)) in self._errors:
            return False
        static = dataclasses.replace(call, sizes=None, dynamic={}, varied=None, numbers=frozenset())
        try:
            plain = _error_of(self._now.build(static, self.name, self.config))
        except Exception as failure:
            self._note(failure)
            return True
        if plain is not None:
            self._errors.add((type(plain), str(plain)))
        return (type(error), str(error)) not in self._errors


def _error_of(product: Product) -> Exception | None:
    joint = product.captured.joint
    return joint.error or next(iter(joint.failing.values()), None)


G = TypeVar("G", bound=GuardMaker)


def rendered(
    name: str,
    compiled: Compiled,
    make_guards: Callable[[Names], G],
    eagerly: Call,
    ends: tuple[Call | None, Call] = (None, lambda: MISS),
) -> tuple[Callable[..., Any], G, NodeSource | None]:
    """(a function of (args, kwargs) that tests the guards and runs a graph, or returns `MISS`; the guards; the graph's
    node). It calls `eagerly` where a check of the graph fails, and of the `ends` the first, if that is given, where the
    graph raises, the second where a decision differs.
    """
    (again, diverged), joint = ends, compiled.partitioned.joint
    faulted = "raise fault" if again is None else "return again(args, kwargs, fault)"
    stop = Stop("return diverged()", "return eagerly(*args, **kwargs)", faulted)
    draws = isinstance(eagerly, StatefulFunction) and eagerly.uses_up
    while True:
        own = "args kwargs MISS call error fault eagerly again diverged difference differs"
        names = Names(own.split())
        guards = make_guards(names)
        lines, num_guards = guards.lines(), joint.num_guards()
        around = guards.symbols, guards.wrappers, guards.containers
        run = RunLines(compiled, guards.inputs, guards.names, stop, *around, draws=draws)
        if joint.num_guards() == num_guards:  # rendering added no condition on symbolic sizes
            break
    body = "\n".join("    " + line for line in (*lines, *run.lines))
    globals_ = {**guards.list.globals, **run.globals}
    if run.ends is not None:
        globals_ |= {"eagerly": eagerly, "again": again, "diverged": diverged}
    source = f"def call(args, kwargs):\n{body}\n"
    return compile_source(source, "call", globals_, label=f"runtime of {name}"), guards, run.node


def check_draws(name: str, call: FlatCall, constants: Collection[str]) -> None:
    """Raise `UnsupportedSideEffectError` if the program needs the value of a drawn float: no graph is right twice."""
    places = call.function.places if isinstance(call.function, StatefulFunction) else ()
    for place, value in zip(places, call.leaves, strict=False):
        if place.is_drawn and place.path in constants and type(value) is float:
            raise UnsupportedSideEffectError(
                f"`{name}` needs the value of the number from {place.path.partition('(')[0]} (`float()`, text). "
                "Compute with the number as with a tensor, or draw it before the call and pass it."
            )
