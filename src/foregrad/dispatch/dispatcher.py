"""From a call to the compiled function that is right for it: try the guards, compile when none fits."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from .._torch import engine
from ..config import Config
from ..errors import (
    EscapedTensorError,
    ForegradError,
    ForegradWarning,
    ProgramOutputError,
    TensorTextError,
    UnknownLeafError,
    UnsupportedError,
    UnsupportedSideEffectError,
)
from ..frontend.call import FlatCall, flatten_call
from ..frontend.lifted import Lifted, Place, StatePlace, may_lift_more, numbered
from ..graph.eager_regions import finish, give_up, in_one_call
from ..graph.effects import CheckFailed
from ..graph.source import Names, compile_source, source_of
from ..interrupts import held, is_interrupt
from ..locks import Turn, make_lock
from ..runtime.render import render_run
from ..subclasses.spec import GradientKindError
from ..tracing.values.draws import DrawsDiffer, DrawsFound
from .by_sizes import BySizes
from .explain import Difference, Fingerprint, Recompile, Recompiles
from .guards import MISS, render_guards
from .numbers import ConstantNumbers, fixed_numbers
from .paths import Paths
from .pipeline import Pipeline, Product, is_of_capture
from .refusals import Refusals
from .shapes import SizesSeen, check_marked, numbers_read
from .specialization import Specialization
from .stateful import check_draws, only_written_by, render_stateful, state_that_varies
from .transformed import Transformed

__all__ = ["Dispatcher"]

_log = logging.getLogger("foregrad.recompiles")


class Dispatcher:
    """The compiled form of `function`: callable with its arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        pipeline: Pipeline,
        config: Config,
        name: str | None = None,
        *,
        dynamic: bool | None = False,
        open_sizes: Mapping[str, frozenset[int]] | None = None,
        levels: bool = True,
        on_unsupported: str | None = None,
        why_lifted: tuple[Difference, ...] = (),
        most_forms: int | None = None,
    ) -> None:
        """`levels`: calls come under torch.func transforms and with dual numbers too. `on_unsupported`: what is done
        with calls that can't be compiled; None is as `config` says. `why_lifted`: for each graph of the function that
        takes less of its state as an argument, why that was not right. `most_forms`: see `BySizes`.
        """
        self.function = function
        self.pipeline = pipeline
        self.config = dataclasses.replace(config, on_unsupported=on_unsupported or config.on_unsupported)
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.specializations: list[Specialization] = []
        self.compilations: list[Recompile] = []
        self._calls: tuple[Callable[..., Any], ...] = ()  # the one used last comes first
        self._order = make_lock()  # held to set `_calls`, never while anything runs
        self._turn = Turn()  # held to make graphs, never while one or the function runs
        self._warned = False
        self.refusals = Refusals(function, self.name, self.config.on_unsupported)
        self._why_lifted = why_lifted
        self._has_output = False  # a capture was given up as the function prints or logs
        self.inner: Dispatcher | None = None  # of the function that takes some of its state as an argument
        self._stateful: Callable[..., Any] = self._compile_and_call
        self._by_sizes = BySizes(self._of_other_sizes, config.recompile_limit if most_forms is None else most_forms)
        self._only_written: set[tuple[int, Any]] = set()  # containers that calls add to and do not read
        self._fills_in_a_row = 0
        self._fills = 0  # calls that filled a cache, or changed a state
        self._sizes = SizesSeen(dynamic, open_sizes)
        self._paths = Paths(self.name, config)
        self.transformed = Transformed(function, self._flat, self.config, self.name)
        self.entry = self._entry(levels)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.entry(*args, **kwargs)

    def _flat(self, function: Callable[..., Any], name: str) -> Dispatcher:
        """What is compiled of this function for its calls under transforms: one of tensors, called under none."""
        return Dispatcher(function, self.pipeline, self.config, name, levels=False, on_unsupported=self.refusals.mode)

    def _entry(self, levels: bool) -> Callable[..., Any]:
        """What users call: one frame between them and the graph, with everything that it reads at hand."""
        function, compile_and_call = self.function, self._compile_and_call
        dispatch_modes, function_modes = engine.count_dispatch_modes, engine.count_function_modes
        transforms_active, forward_ad = engine.transforms_active, engine.forward_ad
        transformed, refusals = self.transformed if levels else None, self.refusals

        def entry(*args: Any, **kwargs: Any) -> Any:
            if dispatch_modes():
                return function(*args, **kwargs)  # inside a capture: that sees our operators
            if forward_ad._current_level >= 0 and transformed is not None:
                return transformed(args, kwargs)
            tried = self._calls
            for call in tried:
                result = call(args, kwargs)
                if result is not MISS:
                    if call is not tried[0]:
                        self._to_front(call)
                    return result
            # The guards of every graph say no to these.
            if transformed is not None and transforms_active():
                return transformed(args, kwargs)
            if function_modes() and engine.is_foreign_mode_on():
                return function(*args, **kwargs)
            if refusals and refusals.covers(args, kwargs):
                finish()
                return function(*args, **kwargs)
            if self.inner is not None:
                return self._stateful(args, kwargs)
            return compile_and_call(args, kwargs, tried)

        return entry

    def source(self) -> str:
        """The rendered Python of every specialization."""
        parts = [s.source() for s in self.specializations]
        return "\n\n".join(parts if self.inner is None else [source_of(self._stateful), self.inner.source()])

    def recompiles(self) -> Recompiles:
        """Every compilation so far, and what each was for."""
        entries = [*self.refusals.entries, *self.transformed.refusals.entries]
        eager = tuple(map(dataclasses.replace, entries))
        own = Recompiles(self.name, tuple(self.compilations), eager)
        for other in (*filter(None, [self.inner]), *self._by_sizes.others.values()):
            own = own.then(other.recompiles())
        return own

    # ---------------------------------------------------------------- the list of graphs

    def _to_front(self, call: Callable[..., Any]) -> None:
        if self._order.acquire(blocking=False):  # another thread does the like: its order is as good
            try:
                if call in self._calls:
                    self._calls = (call, *(c for c in self._calls if c is not call))
            finally:
                self._order.release()

    def _add(self, specialization: Specialization) -> None:
        self.specializations.append(specialization)
        with self._order:
            self._calls = (specialization.call, *self._calls)

    def _remove(self, specialization: Specialization) -> None:
        with self._order:
            if specialization in self.specializations:
                self.specializations.remove(specialization)
            self._calls = tuple(c for c in self._calls if c is not specialization.call)

    # ---------------------------------------------------------------- compiling

    def _compile_and_call(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tried: tuple[Callable[..., Any], ...],
        *,
        lifts: bool = True,
    ) -> Any:
        with in_one_call():
            return self._captured_and_called(args, kwargs, tried, lifts=lifts)

    def _captured_and_called(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tried: tuple[Callable[..., Any], ...], *, lifts: bool
    ) -> Any:
        if lifts and self._lift(args, kwargs):
            return self._stateful(args, kwargs)
        while True:
            with held, self._turn.taken() as is_ours:
                made_meanwhile = tuple(call for call in self._calls if call not in tried)  # by another thread
                first = self._make(args, kwargs) if is_ours and not made_meanwhile else None
            for call in made_meanwhile:
                result = call(args, kwargs)
                if result is not MISS:
                    return result
            tried += made_meanwhile
            if not made_meanwhile:
                break
        if lifts and self.inner is not None:
            return self._stateful(args, kwargs)
        if not isinstance(first, Specialization):
            return self._run_eagerly(args, kwargs, first)
        result = first.call(args, kwargs)
        if result is not MISS:
            return result
        # What the function looks at changed while it was captured: a cache was filled, a module imported. Once more.
        with held, self._turn.taken() as is_ours:
            self._remove(first)
            second = self._try_to_specialize(args, kwargs) if is_ours else None
        if not isinstance(second, Specialization):
            return self._run_eagerly(args, kwargs, second)
        result = second.call(args, kwargs)
        if result is MISS and first.makes_the_same_of_it(second):
            second.leave_unrepeated(self.name)
            result = second.call(args, kwargs)
        if result is MISS:
            if second.decides:  # a backend that rounds otherwise, or an error that eager raises too
                self._remove(second)
                self._paths.diverged += 1
                return self.function(*args, **kwargs)
            return self._run_eagerly(args, kwargs, self._unguardable(args, kwargs, second))
        return result

    def _lift(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], draws: tuple[Place, ...] = ()) -> bool:
        """Whether the function takes some of its state as an argument from now on: numbers that differ in each call,
        and what it draws.
        """
        if self.inner is None and may_lift_more(self.function):
            places = draws or state_that_varies(self.function, self.name, self.specializations)
            if places:
                self._take(places, () if draws else self._why(args, kwargs))
                if not draws:  # the graphs that there are draw nothing
                    with self._order:
                        self._calls = ()
        return self.inner is not None

    def _take(self, places: tuple[Place, ...], why: tuple[Difference, ...] = ()) -> None:
        lifted = Lifted(self.function, places)
        inner = Dispatcher(
            lifted,
            self.pipeline,
            self.config,
            self.name,
            dynamic=self._sizes.dynamic,
            open_sizes={**self._sizes.open, **{place.path: frozenset() for place in places}},
            levels=False,
            why_lifted=why,
        )
        inner._only_written = self._only_written
        inner._sizes.varied = self._sizes.varied | numbers_read(self.specializations)
        stateful = render_stateful(self.name, lifted, inner.entry, self._differently)
        self._stateful = self._by_sizes.call(stateful) if self._by_sizes.others else stateful
        self.inner = inner

    def _differently(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A call that draws otherwise than is an argument by now, or makes a tensor of another array that it drew."""
        lifted: Any = self.inner.function if self.inner is not None else None
        if lifted is not None and lifted.missing and len(lifted.places) < _MOST_PLACES:
            self._take((*lifted.places, *numbered((), lifted.missing, len(lifted.places))))
            return self._stateful(args, kwargs)
        has_others, other = bool(self._by_sizes.others), self._by_sizes.other(args, kwargs)
        if other is None:
            return self._compile_and_call(args, kwargs, self._calls, lifts=False)
        if not has_others:
            self._stateful = self._by_sizes.call(self._stateful)
        return other.entry(*args, **kwargs)

    def _of_other_sizes(self) -> Dispatcher:
        return Dispatcher(self.function, self.pipeline, self.config, self.name, levels=False, most_forms=0)

    def _run_eagerly(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: Exception | None) -> Any:
        """A call for which there is no graph, for `error` if it is to be spoken of."""
        give_up()
        if error is None or isinstance(error, ForegradError):
            if error is not None:
                self.refusals.note(args, kwargs, error)
            return self.function(*args, **kwargs)
        result = self.function(*args, **kwargs)  # which raises where the error is the program's own
        self.refusals.stumbled(args, kwargs, error)
        return result

    def _make(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Specialization | Exception | None:
        """A graph for a call that fits none of those that there are; where the call runs eagerly, the error for which
        it does, or None.
        """
        for specialization in list(self.specializations):
            if specialization.watch.dead:
                self._remove(specialization)
            specialization.watch.forget()  # lets go of parameters that were replaced
        if self._paths.at_limit(self.specializations):
            if self._paths.past_limit(self.specializations):
                with self._order:
                    self._calls = tuple(s.call for s in self.specializations if not s.decides)
            self.refusals.count_only(_PAST_THE_PATHS)
            return None
        if self._fills > self.config.recompile_limit and not self.config.error_on_recompile_limit:
            self.refusals.count_only(_PAST_THE_FILLS)
            return None
        if len(self.specializations) >= self.config.recompile_limit:
            self._past_the_limit(args, kwargs)
            return None
        self._tell(self._why(args, kwargs))
        return self._try_to_specialize(args, kwargs)

    def _try_to_specialize(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Specialization | Exception | None:
        """A graph for a call; None where the call fills a cache, which later calls find filled, asks for the text of a
        tensor, or a check fails; the error for which it can't be compiled where such calls run eagerly.
        """
        try:
            specialization = self._specialized(args, kwargs)
        except Exception as error:
            self.compilations.pop()  # no graph
            return self._without_graph(error)
        self._fills_in_a_row = 0
        self._only_written |= only_written_by(specialization)
        self._add(specialization)
        return specialization

    def _specialized(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tries: int = 3) -> Specialization:
        fills = self._fills_in_a_row < _MOST_FILLS
        call = flatten_call(self.function, args, kwargs, objects=True)
        call = dataclasses.replace(call, fills_caches=fills, only_written=frozenset(self._only_written))
        try:
            return self.specialize(call)
        except GradientKindError:  # now it is known of the class
            if not tries:
                raise
        return self._specialized(args, kwargs, tries - 1)

    def _without_graph(self, error: Exception) -> Exception | None:
        """What `_try_to_specialize` gives where the capture raised `error`, if that is not for the caller."""
        if isinstance(error, DrawsFound):
            if self.inner is None and self._lift((), {}, numbered(error.draws, error.converted)):
                return None
            error = error.refusal()
        if isinstance(error, CheckFailed):  # eager raises, or the function catches it
            return None
        if isinstance(error, EscapedTensorError):
            self._fills_in_a_row += 1
            self._note_eager(error)
            return None
        if isinstance(error, TensorTextError) and self.refusals.mode == "raise":
            self._note_eager(error)
            return None
        if isinstance(error, DrawsDiffer) or not self._is_refusal(error):
            raise error
        if isinstance(error, ProgramOutputError) and not self._has_output:
            self._has_output = True  # perhaps only the first call says something
            self.refusals.count_only(str(error))
            return None
        return error

    def _is_refusal(self, error: Exception) -> bool:
        """Whether calls that lead to this error run eagerly: it says that the function can't be compiled, or the
        capture stumbled over something.
        """
        if isinstance(error, ForegradError):
            return self.refusals.mode == "eager" and isinstance(error, (UnsupportedError, UnknownLeafError))
        return not is_interrupt(error) and is_of_capture(error)

    def _note_eager(self, found: UnsupportedError) -> None:
        """A call can't be compiled for what it does each time, or, where it fills a cache, perhaps this once."""
        self._fills += 1
        is_over = self._fills > self.config.recompile_limit
        if is_over and self.config.error_on_recompile_limit:
            raise found
        if not self._warned and (is_over or isinstance(found, TensorTextError)):
            self._warned = True
            warnings.warn(f"{found} Such calls run eagerly.", ForegradWarning, stacklevel=7)

    def specialize(self, call: FlatCall) -> Specialization:
        """Capture, partition, compile and render for this call."""
        call = self._sizes.observe(call, self.specializations)
        call, product = self._build(call)
        check_draws(self.name, call, self._sizes.constants)
        captured = product.captured
        if call.dynamic:
            check_marked(call, captured.joint, self.name)
        while True:
            names = Names(["args", "kwargs", "MISS", "call", "error", "eagerly"])
            guards = render_guards(call, captured, names, native=self.config.native)
            known = captured.joint.num_guards()
            eagerly = "return eagerly(*args, **kwargs)"
            given = guards.symbols, eagerly, guards.wrappers, guards.containers
            run = render_run(product.compiled, guards.inputs, names, "return MISS", *given)
            if captured.joint.num_guards() == known:  # nothing more was found out about symbolic sizes
                break
        body = "\n".join("    " + line for line in (*guards.lines, *run.lines))
        source = f"def call(args, kwargs):\n{body}\n"
        globals_ = {**guards.globals, **run.globals}
        if captured.joint.signature.checks:
            globals_["eagerly"] = self.function
        function = compile_source(source, "call", globals_, label=f"runtime of {self.name}")
        fingerprint = Fingerprint(call, captured.joint.signature, captured.tensors, guards.watch)
        return Specialization(function, run.node, product.without_tensors(), guards.watch, fingerprint)

    def _why(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Difference, ...]:
        """For each graph, why it is not right for a call; nothing of a call that can't be compiled."""
        try:
            return tuple(s.fingerprint.difference(self.function, args, kwargs) for s in self.specializations)
        except ForegradError:
            return ()

    def _tell(self, reasons: tuple[Difference, ...]) -> None:
        """Remember why another graph is made, and tell who listens."""
        lifted: tuple[str, ...] = ()
        if not self.compilations and isinstance(self.function, Lifted):
            reasons = self._why_lifted
            lifted = tuple(place.path for place in self.function.places if isinstance(place, StatePlace))
        entry = Recompile(len(self.compilations) + 1, reasons, lifted)
        self.compilations.append(entry)
        if reasons:
            _log.info("%s is compiled again, graph %d: %s", self.name, entry.number, reasons[-1])
            for number, reason in enumerate(reasons, 1):
                _log.debug("%s: not graph %d: %s", self.name, number, reason)

    def _build(self, call: FlatCall) -> tuple[FlatCall, Product]:
        """What the pipeline makes of a call: with symbolic sizes and numbers where that works, else without."""
        while call.numbers:
            try:
                product = self.pipeline.build(call, self.name, self.config)
                constants = fixed_numbers(product.captured.joint)
                self._sizes.make_constant(call.paths[i] for i in constants)
                if product.captured.joint.error is None:
                    return call, product
                constants = call.numbers
            except ConstantNumbers as found:
                constants = found.leaves
            except DrawsDiffer:
                raise
            except Exception:  # whatever is wrong apart from symbols, the next try raises
                constants = call.numbers
            self._sizes.make_constant(call.paths[i] for i in constants)
            call = dataclasses.replace(call, numbers=call.numbers - constants)
        closed = dataclasses.replace(call, sizes=None)
        static = dataclasses.replace(closed, dynamic={}, varied=frozenset())
        # What is tried, and what is known to be hopeless where only a later try works.
        tries: list[tuple[FlatCall, Callable[[], None]]] = []
        if call.may_open_sizes:
            tries.append((call, self._sizes.close))
        if call.dynamic or call.varied:
            tries.append((closed, self._sizes.give_up))  # some operator takes plain numbers only
        for tried, _ in tries:
            made = self._try_symbols(tried)
            if made is not None:
                product = made
                break
        else:
            tried, product = static, self.pipeline.build(static, self.name, self.config)
        if product.captured.joint.error is None:
            for failed, give_up in tries:
                if failed is tried:
                    break
                give_up()
        return tried, product

    def _try_symbols(self, call: FlatCall) -> Product | None:
        """What the pipeline makes of a call with symbolic sizes, or None where that does not work."""
        try:
            product = self.pipeline.build(call, self.name, self.config)
        except Exception:  # whatever is wrong apart from symbols, the next try raises
            return None
        return product if product.captured.joint.error is None else None

    def _past_the_limit(self, args: Any, kwargs: Any) -> None:
        if self._warned and not self.config.error_on_recompile_limit:
            self.refusals.count_only(_PAST_THE_LIMIT)
            return
        message = (
            f"`{self.name}` was compiled {len(self.specializations)} times, which is the limit; this call fits none of "
            f"them: {self.specializations[-1].fingerprint.difference(self.function, args, kwargs)}. "
            if self.specializations
            else f"`{self.name}` may not be compiled at all: the limit is {self.config.recompile_limit}. "
        )
        message += "Raise foregrad.config.recompile_limit, or pass what changes from call to call as a tensor."
        if self.config.error_on_recompile_limit:
            raise UnsupportedError(message)
        if not self._warned:
            self._warned = True
            self.refusals.count_only(_PAST_THE_LIMIT)
            warnings.warn(message + " It runs eagerly from now on.", ForegradWarning, stacklevel=5)

    def _unguardable(self, args: Any, kwargs: Any, specialization: Specialization) -> Exception:
        self._remove(specialization)
        difference = specialization.fingerprint.difference(self.function, args, kwargs)
        error = UnsupportedSideEffectError(
            f"`{self.name}` changes something that it depends on, which a compiled call would not repeat: {difference}."
            " Move that change out of the compiled function."
        )
        if not self._is_refusal(error):
            raise error
        return error


_MOST_FILLS = 2  # calls in a row that fill a cache; what changes after these is a state
_MOST_PLACES = 24  # that a function takes from Python's state and from what it draws
_PAST_THE_LIMIT = "more graphs than the recompile limit allows"
_PAST_THE_PATHS = "more graphs for values that it reads from its inputs than the path limit allows"
_PAST_THE_FILLS = "caches that it fills in each call"
