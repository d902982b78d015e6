"""From a call to the graph with guards that it passes; a call that passes none is compiled."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._torch import engine
from ..annexes import given
from ..config import Config
from ..config import config as settings
from ..errors import EscapedTensorError, ForegradError, UnknownLeafError, UnsupportedError, UnsupportedSideEffectError
from ..extend import CompiledFunction, FunctionView, GraphView, RefusalView, Watcher
from ..frontend.call import LeadingPlace, StatefulFunction, flatten_call, forward_of, may_have_a_form, renewed
from ..frontend.openings import GradientKindError, OtherFormError
from ..frontend.state import of_python
from ..graph.attempts import attempts
from ..graph.joint import JointGraph, Partitioned
from ..graph.source import source_of
from ..house import hide_own_frames
from ..interrupts import held
from ..locks import Turn
from ..tracing.tape.again import AdditionsFound, ArgumentsDiffer, ArgumentsFound
from .explain import Difference, OneWarning, Recompile, Recompiles, is_float_text, reason_of, split_reason
from .fallbacks import FORMS_ASKED, Fallbacks, Refusals, Transformed
from .graphs import Graphs, Paths, Specialization, Specializer
from .guard_list import MISS
from .pipeline import Pipeline
from .varying import SizesSeen, numbers_read
from .view import graph_view


def sizes_of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """The sizes of the arguments of a call, and the integers among them."""
    values = *args, *kwargs.values()
    return tuple(v.shape if isinstance(v, torch.Tensor) else v if type(v) is int else None for v in values)


# -------------------------------------------------------------------- forms
# The forms of a function: further functions for calls that the function's own graphs can't serve.
#
# Each form has a dispatcher of its own: the form named by the error that refused a call, and the function with some of
# its state, or its draws, as an argument. Calls that draw otherwise have a form, and graphs, of their own: a call takes
# the draws of one form after the other, with the generators put back, until a graph serves it.


@dataclasses.dataclass(frozen=True, slots=True)
class Outer:
    """Facts that the dispatcher of a form gets from the function's dispatcher.

    `why`: for each graph of the function, the reason why it was not right before this state became an argument.
    `only_written`: containers that calls add to and do not read; `unread`: see `FlatCall`. `varied`: lines that read
    numbers that vary. `once`, `turn`: the warning and the turn of all.
    """

    why: tuple[Difference, ...] = ()
    only_written: set[tuple[int, object]] = dataclasses.field(default_factory=set)
    unread: dict[tuple[str, type], bool] = dataclasses.field(default_factory=dict)
    varied: frozenset[str] = frozenset()
    once: OneWarning = dataclasses.field(default_factory=OneWarning)
    turn: Turn = dataclasses.field(default_factory=Turn)


_log = logging.getLogger("foregrad.recompiles")


class Dispatcher:
    """The compiled form of `function`: callable with its arguments."""

    def __init__(
        self,
        function: Callable[..., object],
        pipeline: Pipeline,
        config: Config,
        name: str | None = None,
        *,
        dynamic: bool | None = False,
        open_sizes: Mapping[str, frozenset[int]] | None = None,
        on_unsupported: str | None = None,
        outer: Outer | None = None,
    ) -> None:
        """`on_unsupported`: the treatment of calls that can't be compiled; None for `config`'s. `outer`: the dispatcher
        compiles a form of a function; forms are called under no torch.func transform and without dual numbers.
        """
        self.function: Any = function
        self.pipeline = pipeline
        self.config = dataclasses.replace(config, on_unsupported=on_unsupported or config.on_unsupported)
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.graphs = Graphs(math.inf if config.error_on_recompile_limit else config.vain_limit)
        self.compilations: list[Recompile] = []
        self._levels, self._outer = outer is None, outer or Outer()
        self._turn = self._outer.turn  # held to make graphs, never while one or the function runs
        made, mode = weakref.ref(self.graphs), self.config.on_unsupported  # a graph's function keeps the refusals
        self.refusals = Refusals(function, self.name, mode, self._outer.once, config.refusal_limit, made)
        self.fallbacks = Fallbacks(function, self.name, self.config, self.refusals, self.graphs)
        self._named: tuple[Dispatcher, ...] = ()  # of the form that an error named, for the calls that `_takes`
        self._takes: Callable[..., bool] = bool
        self._plans: tuple[Dispatcher, ...] = ()  # of the forms with state, or draws, as an argument
        # Of a form: a function of (args, kwargs, entry) that hands a call to the entry, and the calls' sizes.
        self.handing: Callable[..., Any] = bool
        self.made_for: set[object] = set()
        self._fixed: set[tuple[int, object]] = set()  # places of arrays whose numbers are needed
        self._sizes = SizesSeen(dynamic, open_sizes)
        self._sizes.varied = self._outer.varied
        ends = self.refusals.again, self.graphs.teller()
        self.specializer = Specializer(function, pipeline, self.config, self.name, self._sizes, ends)
        self._paths = Paths(self.name, config, self._outer.once)
        made_as = self.config, self.name
        # Calls under transforms: a function of tensors is compiled for them, and called outside of transforms.
        self.transformed: Transformed = next(iter(given("calls under transforms")), Transformed)(
            function, lambda flat, name: Dispatcher(flat, pipeline, made_as[0], name, outer=Outer()), *made_as
        )
        self.entry = self.make_entry()

    def __call__(self, *args: object, **kwargs: object) -> Any:
        return self.entry(*args, **kwargs)

    def make_entry(self) -> Callable[..., object]:
        """The function that users call: a single frame between them and the graph, with its state at hand. The entry
        does not keep the dispatcher alive: without one it runs the function.
        """
        function, owner, levels = self.function, weakref.ref(self), self._levels
        dispatch_modes, function_modes = engine.count_dispatch_modes, engine.count_function_modes
        transforms_active, forward_ad = engine.transforms_active, engine.forward_ad
        transformed, refusals, graphs = self.transformed if levels else None, self.refusals, self.graphs

        def entry(*args: Any, **kwargs: object) -> Any:
            if dispatch_modes():
                return function(*args, **kwargs)  # inside a capture: that sees our operators
            try:
                if forward_ad._current_level >= 0 and transformed is not None:
                    return transformed(args, kwargs)
                tried = graphs.calls
                for call in tried:
                    result = call(args, kwargs)
                    if result is not MISS:
                        if graphs.vain or call is not tried[0]:
                            graphs.served(call)
                        return result
                # The guards of every graph refuse these arguments.
                if transformed is not None and transforms_active():
                    return transformed(args, kwargs)
                if engine.is_tracing() or (function_modes() and engine.is_foreign_mode_on()):
                    return function(*args, **kwargs)
                if refusals and (eager := refusals.covers(args, kwargs)):
                    with attempts().give_up():
                        return eager.call(function, args, kwargs)
                me = owner()
                return function(*args, **kwargs) if me is None else me._call_unmatched(args, kwargs, tried)
            except Exception as error:
                if not settings.full_tracebacks:
                    __tracebackhide__ = True  # IPython and pytest skip a frame of this name
                    hide_own_frames(error)
                raise

        return entry

    @property
    def specializations(self) -> list[Specialization]:
        """The compiled graphs, the oldest first."""
        return self.graphs.specializations

    def source(self) -> str:
        """The rendered Python of every specialization."""
        parts = [] if self._plans else [s.source() for s in self.specializations]
        parts += [source_of(plan.handing) for plan in self._plans]
        return "\n\n".join([*parts, *(inner.source() for inner in self.inner())])

    def view(self) -> FunctionView:
        """The view of the function: see `foregrad.extend.view`."""
        recompiles, graphs, pipeline = self.recompiles(), list(self.all_specializations()), self.pipeline
        return FunctionView(
            self.name,
            tuple(map(graph_view, graphs)),
            tuple(map(str, recompiles.entries)),
            tuple(map(str, recompiles.eager)),
            pipeline.fw_compiler,
            pipeline.partition,
            pipeline.decompositions,
        )

    def graph_for(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> GraphView:
        """See `foregrad.extend.CompiledFunction`, for this method and the next three."""
        try:
            call = flatten_call(self.function, args, kwargs, objects=True)
            call = dataclasses.replace(call, fills_caches=self.fallbacks.may_fill)
            made = self.specializer.specialize(call, [], may_wait=False)
        except Exception:
            attempts().give_up()
            raise
        self.graphs.add(made)
        return graph_view(made)

    def refusal(self, error: BaseException, name: str = "") -> RefusalView:
        return RefusalView(*split_reason(reason_of(self.function, name or self.name, error)))

    def split(self, joint: JointGraph, partition: Callable[..., Any]) -> Partitioned:
        return dataclasses.replace(self.pipeline, partition=partition, keeper=None).split(joint)

    def like(
        self, function: Any, name: str = "", *, on_unsupported: str, watcher: Watcher | None = None, cached: bool = True
    ) -> CompiledFunction:
        if isinstance(function, torch.nn.Module):
            function, name = forward_of(function), name or type(function).__name__
        watchers = self.pipeline.watchers if watcher is None else (watcher,)
        keeper = self.pipeline.keeper if cached else None
        pipeline = dataclasses.replace(self.pipeline, keeper=keeper, watchers=watchers, first=None, _failures={})
        return Dispatcher(function, pipeline, self.config, name, on_unsupported=on_unsupported)

    def all_specializations(self) -> Iterator[Specialization]:
        """The compiled graphs, those of the function's forms included."""
        yield from self.specializations
        for inner in self.inner():
            yield from inner.all_specializations()

    def inner(self) -> list[Dispatcher]:
        """The dispatchers of the function's forms."""
        return [*self._named, *self._plans]

    def recompiles(self) -> Recompiles:
        """Every compilation so far with its reasons, and the calls that ran eagerly."""
        both = self.refusals, self.transformed.refusals
        eager = tuple(dataclasses.replace(entry) for refusals in both for entry in refusals.entries)
        filling = tuple(dataclasses.replace(entry) for refusals in both for entry in refusals.filling)
        own = Recompiles(self.name, tuple(self.compilations), eager, filling)
        for inner in self.inner():
            own = own.then(inner.recompiles())
        return own

    # ---------------------------------------------------------------- compiling

    def _call_unmatched(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], tried: tuple[Callable[..., object], ...]
    ) -> object:
        result = self._call_forms(args, kwargs)
        if result is not MISS:
            self.refusals.forms_asked += self.refusals.forms_asked > 0
            return result
        if eager := self.fallbacks.past.covers() or (self.refusals.forms_asked and self.refusals.covers(args, kwargs)):
            with attempts().give_up():
                return eager.call(self.function, args, kwargs)
        if self.fallbacks.only_raises:
            return self.fallbacks.run(args, kwargs, None)
        return self._compile_and_call(args, kwargs, tried)

    def _call_forms(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """The result of a call from the first form that takes it, or `MISS`. A single plan may make a graph."""
        if self._named and self._takes(args, kwargs):
            return self._named[0].handing(args, kwargs, self._named[0].entry)
        plans: Sequence[Dispatcher] = self._plans
        if has_several := len(plans) > 1:
            sizes = sizes_of(args, kwargs)
            plans = sorted(plans, key=lambda plan: sizes not in plan.made_for)
        for plan in plans:
            result = plan.handing(args, kwargs, plan.look if has_several else plan.entry)
            if result is not MISS:
                return result
        return self._call_anew(plans[0], args, kwargs) if len(plans) == 1 else MISS

    def look(self, *args: object, **kwargs: object) -> object:
        """The result of a call from a graph that there is. Raises `ArgumentsDiffer` if none serves the call."""
        of_plans = tuple(functools.partial(plan.handing, inner=plan.look) for plan in self._plans)
        for call in self.graphs.calls + of_plans:
            result = call(args, kwargs)
            if result is not MISS:
                self.graphs.served(call)
                return result
        raise ArgumentsDiffer(f"no graph of `{self.name}` takes these draws")

    def _compile_and_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, object], tried: tuple[Callable[..., object], ...]
    ) -> Any:
        with attempts().in_one_call():
            if (lifts := not self._plans) and not self._is_full() and self._lift(args, kwargs):
                result = self._call_forms(args, kwargs)
                return self._compile_and_call(args, kwargs, self.graphs.calls) if result is MISS else result
            while True:
                with held, self._turn.taken() as has_turn:
                    args = renewed(self.function, args)
                    made_meanwhile = tuple(call for call in self.graphs.calls if call not in tried)  # elsewhere
                    first = self._make(args, kwargs) if has_turn and not made_meanwhile else None
                args = renewed(self.function, args)
                for call in made_meanwhile:
                    result = call(args, kwargs)
                    if result is not MISS:
                        return result
                tried += made_meanwhile
                if not made_meanwhile:
                    break
            if isinstance(first, ArgumentsFound):
                refused = first.refusal(self._plans[0].function.places if self._plans else ())
                plan = self._plan_for(first)
                first = self.fallbacks.after(refused) if plan is None else None
                result = MISS if plan is None else self._call_plan(plan, args, kwargs)
                if result is MISS and plan is not None:  # a second thread has drawn meanwhile
                    self.fallbacks.past.reached(self.refusals.count_only(str(refused)))
            else:
                result = self._call_forms(args, kwargs) if lifts or self._named else MISS
            if result is not MISS:
                return result
            if not isinstance(first, Specialization):
                self.refusals.forms_asked = FORMS_ASKED * any(plan.serves_again for plan in self._plans)
                try:
                    return self.fallbacks.run(args, kwargs, first)
                finally:
                    del first  # an error's traceback leads to this frame
            result = first.call(args, kwargs)
            if result is not MISS:
                return result
            # State that the function reads changed during the capture: a cache filled, a module imported. Once more.
            with held, self._turn.taken() as has_turn:
                self.graphs.remove(first)
                second = self._try_to_specialize(args, kwargs) if has_turn else None
            args = renewed(self.function, args)
            if not isinstance(second, Specialization):
                return self.fallbacks.run(args, kwargs, None if isinstance(second, ArgumentsFound) else second)
            result = second.call(args, kwargs)
            if result is MISS and first.makes_the_same_of_it(second):
                second.leave_unrepeated(self.name)
                result = second.call(args, kwargs)
            if result is MISS:
                if second.decides:  # a backend that rounds otherwise, or an error that eager raises too
                    self.graphs.remove(second)
                    self._paths.diverged += 1
                    with attempts().give_up():
                        return self.function(*args, **kwargs)
                return self.fallbacks.run(args, kwargs, self.fallbacks.unguardable(args, kwargs, second))
            return result

    def _is_full(self) -> bool:
        """Whether a comparison of a call with the graphs would hardly lead to a further one."""
        return self.graphs.vain == math.inf or len(self.specializations) >= self.config.recompile_limit

    def _lift(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], draws: tuple[LeadingPlace, ...] = ()
    ) -> bool:
        """Make state an argument of the function: numbers that differ in each call, and its draws. Whether some state
        is an argument now.
        """
        if not self._plans and may_have_a_form(self.function):
            known = self.function, self.name, self.specializations, self._fixed
            places = draws or of_python().state_that_varies(*known)
            if places:
                self._take(places, () if draws else self._why(args, kwargs))
                if not draws:  # graphs so far draw nothing
                    self.graphs.try_only()
        return bool(self._plans)

    def _take(self, places: tuple[LeadingPlace, ...], why: tuple[Difference, ...] = ()) -> Dispatcher:
        lifted: StatefulFunction = of_python().Lifted(self.function, places)
        varied = self._sizes.varied | numbers_read(self.graphs.decisions)
        inner = self._compiling(
            lifted,
            Outer(why, self._outer.only_written, self._outer.unread, varied, once=self._outer.once, turn=self._turn),
            open_sizes={**self._sizes.open, **{place.path: place.dims for place in places}},
            dynamic=self._sizes.dynamic,
        )
        inner.handing = of_python().render_stateful(self.name, lifted)
        self._plans += (inner,)
        return inner

    def _compiling(self, function: Callable[..., object], outer: Outer, **sizes: Any) -> Dispatcher:
        return Dispatcher(function, self.pipeline, self.config, self.name, outer=outer, **sizes)

    def _plan_for(self, found: ArgumentsFound) -> Dispatcher | None:
        """The plan for the draws of a call; None at a limit."""
        known = next((plan for plan in reversed(self._plans) if found.fits(plan.function.places)), None)
        is_vain = sum(not plan.serves_again for plan in self._plans) >= self.config.single_use_limit // 2
        drawn = ", ".join(place.path.partition("(")[0] for place in found.taken)
        why = tuple(Difference("the sequence of draws", "another", drawn) for _ in self.all_specializations())
        is_full = is_vain or len(why) >= self.config.recompile_limit
        return self._take(found.taken, why) if known is None and not is_full else known

    @property
    def serves_again(self) -> bool:
        """Whether a graph has served a second call, or some state varies."""
        return bool(self._plans) or any(map(self.graphs.has_served_again, self.specializations))

    def _call_plan(self, plan: Dispatcher, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """The result of a call that takes the draws of a plan, by a further graph; `MISS` if it draws otherwise."""
        plan.made_for.add(sizes_of(args, kwargs))
        graphs, eager = [*plan.all_specializations()], plan.refusals.entries
        result = plan.handing(args, kwargs, plan.entry)
        if result is MISS:
            return self._call_anew(plan, args, kwargs)
        if self._plans[1:] and eager and graphs == [*plan.all_specializations()]:
            self.refusals.by_kind[self.refusals.kind(args, kwargs)] = eager[-1]
            self.refusals.forms_asked = FORMS_ASKED
        return result

    def _call_anew(self, plan: Dispatcher, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
        """The result of a call by the plan that the capture for this one found; `MISS` if it found none. A plan that
        takes arrays whose numbers are needed is dropped.
        """
        arrays, found, plan.function.found = _arrays_of(plan.function), plan.function.found, ()
        if arrays or (found and not plan.specializations):
            self._fixed |= arrays
            self._plans = tuple(other for other in self._plans if other is not plan)
        return self._call_plan(self._take(found), args, kwargs) if found else MISS

    def _make(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Specialization | BaseException | None:
        """A graph for a call that fits no graph so far. If the call runs eagerly instead: the error that is the reason,
        or None.
        """
        is_full = self._is_full()
        reasons = () if is_full else self._why(args, kwargs)
        self.graphs.drop_dead()
        in_vain = self.graphs.vain == math.inf
        is_over = in_vain or self.graphs.serve_few(self.config.path_limit, of_paths=True)
        if is_over or self._paths.at_limit(self.specializations):
            self._paths.past_limit(self.specializations)
            self.fallbacks.past.reached(self.refusals.count_only(self._paths.reason), for_good=in_vain)
            return None
        if self.fallbacks.fills_too_often:
            self.fallbacks.past.reached(self.refusals.count_only(_PAST_THE_FILLS))
            return None
        limit, last = self.config.recompile_limit, reasons[-1] if reasons else None
        varies = last is not None and (last.is_length or last.name in self._sizes.open)  # or is a number in the state
        if len(self.specializations) >= limit or (varies and self.graphs.serve_few(limit)):
            self.fallbacks.past_the_limit(args, kwargs)
            return None
        if is_full:  # of objects that are gone
            reasons = self._why(args, kwargs)
            last = reasons[-1] if reasons else None
        place = None
        if last is not None and self._is_of_one_call(last):
            # Items differ by turns; the kind of a call tells lengths.
            place = _AN_INDEX.sub("[]", last.name), last.is_length or self.refusals.kind(args, kwargs)
            if self.graphs.in_a_row(place) >= self.config.single_use_limit - 1:
                return self.fallbacks.never_again(last)
        self._tell(reasons)
        return self._try_to_specialize(args, kwargs, place)

    def _is_of_one_call(self, difference: Difference) -> bool:
        """Whether the value that differs may change in each call: a part of the state, the length of an argument that
        calls add to, or a float.
        """
        is_open = difference.name.startswith(tuple(self._sizes.open))
        grows = difference.is_length and any(self._outer.unread.values())
        return difference.of_state or is_open or grows or is_float_text(difference.now)

    def _try_to_specialize(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], place: object = None
    ) -> Specialization | BaseException | None:
        """A graph for a call, made since the value at `place` differs. None if the call alone runs eagerly: it fills a
        cache, asks for the text of a tensor, or fails a check. The error if all calls of its kind run eagerly.
        """
        try:
            specialization = self._specialized(args, kwargs)
        except BaseException as error:
            self.compilations.pop()  # no graph
            if isinstance(error, OtherFormError) and self._takes_form(error, args, kwargs):
                return None
            return self._without_graph(error)
        self.fallbacks.note_graph()
        self._outer.only_written.update(of_python().only_written_by(specialization))
        self.graphs.add(specialization, place)
        return specialization

    def _specialized(
        self, args: tuple[object, ...], kwargs: Mapping[str, object], tries: int = 3, *, grown: bool = True
    ) -> Specialization:
        call, known = flatten_call(self.function, args, kwargs, objects=True), self._outer.unread
        if unread := [value for value, path in call.containers if known.get((path, type(value))) is False]:
            call = flatten_call(self.function, args, kwargs, objects=True, unread=unread)
        more_written = map(of_python().only_written_by, self.specializations) if grown else ()
        fills, written = self.fallbacks.may_fill, frozenset(self._outer.only_written.union(*more_written))
        call = dataclasses.replace(call, fills_caches=fills, only_written=written, unread=known)
        try:
            return self.specializer.specialize(call, self.graphs.decisions)
        except AdditionsFound as more:
            known.update(more.found)
            return self._specialized(args, kwargs, tries, grown=grown)
        except UnsupportedSideEffectError as error:  # backwards may write to a container that has grown
            if written == self._outer.only_written or isinstance(error, ArgumentsFound):
                raise
            return self._specialized(args, kwargs, tries, grown=False)
        except GradientKindError:  # the class is noted now
            if not tries:
                raise
        return self._specialized(args, kwargs, tries - 1, grown=grown)

    def _takes_form(self, error: OtherFormError, args: tuple[object, ...], kwargs: Mapping[str, object]) -> bool:
        """Make the form that an error names, if it takes this call. Whether it does."""
        form = error.form(self.function)
        if (
            not self._levels
            or isinstance(self.function, (type(form), StatefulFunction))
            or not error.takes(args, kwargs)
        ):
            return False
        self._takes = error.takes
        if not self._named:
            outer, sizes = Outer(once=self._outer.once, turn=self._turn), self._sizes
            inner = self._compiling(form, outer, open_sizes=sizes.open, dynamic=sizes.dynamic)
            inner.handing = functools.partial(_called_in_form, form, self.fallbacks)
            self._named = (inner,)
        return True

    def _without_graph(self, error: BaseException) -> BaseException | None:
        """The result of `_try_to_specialize` after a capture raised `error`. Raises errors meant for the caller."""
        if isinstance(error, ArgumentsFound):
            if error.taken[0].is_drawn and may_have_a_form(self.function):
                return error
            if not self._plans and self._lift((), {}, error.taken):
                return None
            error = error.refusal()
        places = getattr(error, "places", ())  # the next capture takes these as arguments
        if places and self._fixed.isdisjoint(place.identity for place in places) and self._lift((), {}, places):
            return None
        is_refusal = isinstance(error, (UnsupportedError, UnknownLeafError))
        if is_refusal and not isinstance(error, EscapedTensorError) and _arrays_of(self.function):
            raise ArgumentsDiffer(str(error)) from None
        return self.fallbacks.after(error)

    def _why(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[Difference, ...]:
        """For each graph, the reason why it is not right for a call; empty for a call that can't be compiled."""
        try:
            return tuple(s.difference(args, kwargs) for s in self.specializations)
        except ForegradError:
            return ()

    def _tell(self, reasons: tuple[Difference, ...]) -> None:
        """Record and log the reasons for a further graph."""
        lifted: tuple[str, ...] = ()
        if not self.compilations and isinstance(self.function, StatefulFunction):
            reasons = self._outer.why
            lifted = tuple(place.path for place in self.function.places if not place.is_drawn)
        entry = Recompile(len(self.compilations) + 1, reasons, lifted)
        self.compilations.append(entry)
        if reasons:
            _log.info("%s is compiled again, graph %d: %s", self.name, entry.number, reasons[-1])
            if self._sizes.dynamic and reasons[0].fixed and len(reasons) == 1:
                reasons[0].warn(self.name)
            for number, reason in enumerate(reasons, 1):
                _log.debug("%s: not graph %d: %s", self.name, number, reason)


def _arrays_of(function: object) -> frozenset[tuple[int, object]]:
    """The places of arrays that are arguments of a function, by identity."""
    return function.arrays if isinstance(function, StatefulFunction) else frozenset()


def _called_in_form(
    form: Any, fallbacks: Fallbacks, args: tuple[object, ...], kwargs: Mapping[str, object], entry: Callable[..., Any]
) -> object:
    try:
        return form.called(entry, args, kwargs)
    except (UnsupportedError, UnknownLeafError) as error:
        refused = fallbacks.after(error)
    return fallbacks.run(args, kwargs, refused)


_AN_INDEX = re.compile(r"\[-?\d+\]")
_PAST_THE_FILLS = "it fills a cache in every call. Fill it before the first call, or outside of the function."
