"""`verify`: run a function eagerly and compiled, compare all that can be seen, and each stage by itself."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch

from ..api import pipeline_for
from ..backends.registry import get_backend
from ..config import config
from ..dispatch.dispatcher import Dispatcher
from ..dispatch.module import forward_of
from ..dispatch.pipeline import Pipeline
from ..errors import UnsupportedError
from ..frontend.call import flatten_call
from ..graph.joint import JointGraph
from ..identity import ById, IdSet
from ..phases import compiling, phase
from ..tracing.capture import capture_call
from ..tracing.parts import Options
from ..tracing.tape.collection import paused_collection
from .captured import EagerValues, first_not_eager, with_program
from .compare import Verdict, compare
from .locate import Culprit
from .report import StageResult, Verification
from .reproducer import write_reproducer
from .search import Maker
from .sides import Outcome, Side, make_side, put_back
from .stages import Stages, Values
from .watched import Generators, Log, WatchedPipeline


def verify(
    fn_or_module: Callable[..., Any],
    *args: Any,
    order: int = 1,
    backend: Any = "auto",
    partition: Any = None,
    memory_budget: Any = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    folder: str | None = None,
    **kwargs: Any,
) -> Verification:
    """Compare a function or module, compiled, with eager: values, gradients, strides, aliasing, mutations.

    Both run once for real on copies of the arguments and of the module, from the same random state, which is put back.
    Where they differ, each stage is looked at by itself (capture, decompositions, the backend's passes, partition, each
    compiled half) on eager's kernels and, for what is rounding and what is wrong, in float64. Of the first stage that
    is wrong the first operator is named, and a program is written that shows it.

    Args:
        fn_or_module: a function or module; or what `foregrad.compile` made of one, to verify as it was compiled.
        args: its arguments.
        order: how many times to differentiate: 0 compares values alone, 2 second derivatives too. Gradients are taken
            from all outputs, with random cotangents.
        backend: as for `foregrad.compile`, and so `partition`, `memory_budget` and `decompositions`. Inductor is asked
            to draw eager's random numbers.
        folder: where to write the program; a new folder for temporary files by default.
        kwargs: keyword arguments of the function.

    Returns:
        A `Verification`: `.ok` says whether all is equal or rounding, `str()` is a report.

    Raises:
        UnsupportedError: for a function that can't be compiled.
        BackendError: where the backend fails.

    Example:
        >>> import torch, foregrad
        >>> found = foregrad.verify(lambda x: (x.sin() * x).sum(), torch.randn(4, requires_grad=True), backend="eager")
        >>> found.ok, str(found.verdict)
        (True, 'equal bit for bit')
    """
    begin = time.perf_counter()
    function, pipeline, name = fn_or_module, None, backend if isinstance(backend, str) else None
    dispatcher = getattr(fn_or_module, "foregrad", None)
    if isinstance(dispatcher, Dispatcher):
        function, pipeline = dispatcher.function, dispatcher.pipeline
    if pipeline is None:
        settings = {"fallback_random": True}
        chosen = get_backend(backend)
        name = name or chosen.name
        pipeline = pipeline_for(
            backend=backend,
            partition=partition,
            memory_budget=memory_budget,
            decompositions=decompositions,
            inductor_settings=settings if chosen.with_settings is not None else None,
        )
    generators = Generators.now()
    try:
        with paused_collection():  # it makes many small objects, none of them in cycles
            verifier = _Verifier(function, args, kwargs, order, pipeline, name or "its backend", folder)
            with compiling(verifier.name, verb="verifying"):
                return verifier.run(begin)
    finally:
        generators.put_back()


@dataclasses.dataclass
class _Verifier:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    order: int
    pipeline: Pipeline
    backend: str
    folder: str | None

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def run(self, begin: float) -> Verification:
        generators = Generators.now()
        log = Log()
        start = time.perf_counter()
        side, compiled = self._compiled(self.pipeline, log, generators)
        compile_seconds = time.perf_counter() - start
        with phase("eager run", compiles=False):
            eager = self._eager(side, log, generators)
        comparison = _Comparison.of(eager, compiled)
        stages: list[StageResult] = []
        culprit: Culprit | None = None
        if comparison.verdict is not Verdict.EQUAL and log.executions:
            with phase("stages", compiles=False):
                more, culprit = Stages(log, self.pipeline, self._captured).run()
                if culprit is None:
                    stage, culprit = self._capture(eager, generators)
                else:
                    stage = StageResult("capture", None, "a later stage is wrong")
            stages = [stage, *more]
            comparison = comparison.judged(stages)
        wrong = next((s.name for s in stages if s.verdict is Verdict.WRONG), None)
        path = None
        if culprit is not None:
            with phase("reproducer", compiles=False):
                path = write_reproducer(culprit, self.backend, self.folder)
        stages.append(StageResult("the compiled function", comparison.verdict))
        return Verification(
            self.name,
            self.backend,
            self.order,
            max(comparison.verdict, *(s.verdict for s in stages if s.verdict is not None)),
            tuple(stages),
            tuple(comparison.lines),
            comparison.count,
            culprit,
            wrong,
            path,
            time.perf_counter() - begin,
            compile_seconds,
        )

    def _captured(self) -> JointGraph:
        side = make_side(self.function, self.args, self.kwargs)
        function = forward_of(side.function) if isinstance(side.function, torch.nn.Module) else side.function
        return capture_call(flatten_call(function, side.args, side.kwargs, objects=True), Options("verified")).joint

    def _capture(self, eager: Outcome, generators: Generators) -> tuple[StageResult, Culprit | None]:
        """The graph as it was captured, on eager's kernels; and its first operator that eager does not run."""
        log = Log()
        side, plain = self._compiled(_plain_pipeline(), log, generators)
        comparison, culprit = _Comparison.of(eager, plain), None
        if comparison.verdict is Verdict.WRONG and isinstance(values_of_graph := Values.of(log, None), Values):
            values = EagerValues()
            self._eager(side, log, generators, values)
            generators.put_back()
            culprit = first_not_eager(values_of_graph.module, values_of_graph.inputs, values)
            if culprit is not None:
                culprit = with_program(culprit, values, Maker("capture", _as_captured, None))
        return StageResult("capture", comparison.verdict, "; ".join(comparison.lines[:2])), culprit

    def _compiled(self, pipeline: Pipeline, log: Log, generators: Generators) -> tuple[Side, Outcome]:
        """A side whose function runs through a pipeline that tells `log`, and what it left."""
        side = make_side(self.function, self.args, self.kwargs)
        is_module = isinstance(side.function, torch.nn.Module)
        function = forward_of(side.function) if isinstance(side.function, torch.nn.Module) else side.function
        name = type(side.function).__name__ if is_module else None
        dispatcher = Dispatcher(
            function, WatchedPipeline.watching(pipeline, log), config.value, name, dynamic=False, on_unsupported="raise"
        )
        generators.put_back()
        outcome = side.run(dispatcher, self.order, lambda: _reached(side, log))
        put_back([pair for pair in log.tensors if pair[0] not in _copied(side)])
        if not log.products and outcome.error is None:
            raise UnsupportedError(f"`{dispatcher.name}` ran eagerly: there is nothing to verify")
        return side, outcome

    def _eager(self, other: Side, log: Log, generators: Generators, values: EagerValues | None = None) -> Outcome:
        side = make_side(self.function, self.args, self.kwargs)

        def reached() -> Mapping[str, torch.Tensor]:
            if values is not None:
                values.is_forward = False
            return _mapped(_reached(other, log), other, side)

        generators.put_back()
        with values or nullcontext():
            outcome = side.run(side.function, self.order, reached)
        put_back([pair for pair in log.tensors if pair[0] not in _copied(other)])
        return outcome


def _plain_pipeline() -> Pipeline:
    return dataclasses.replace(pipeline_for(backend="eager", partition="default"), keeper=None)


def _as_captured(function: Callable[..., Any]) -> Callable[..., Any]:
    return Dispatcher(function, _plain_pipeline(), config.value, dynamic=False, on_unsupported="raise")


def _copied(side: Side) -> IdSet[Any]:
    return IdSet(side.copies.values())


def _reached(side: Side, log: Log) -> dict[str, torch.Tensor]:
    """The tensors that the captures found, by what they are to the function."""
    by_name: dict[str, torch.Tensor] = {}
    for product in log.products:
        captured = product.captured
        for info, tensor in zip(captured.joint.signature.inputs, captured.tensors, strict=False):
            if tensor is not None:
                by_name.setdefault(str(info.slot), tensor)
    return by_name


def _mapped(tensors: Mapping[str, torch.Tensor], one: Side, other: Side) -> dict[str, torch.Tensor]:
    """The tensors of one side as the other has them."""
    originals = ById((copied, original) for original, copied in one.copies.items() if isinstance(copied, torch.Tensor))
    return {
        name: other.copies.get(originals[tensor], tensor) if tensor in originals else tensor
        for name, tensor in tensors.items()
    }


@dataclasses.dataclass(frozen=True)
class _Comparison:
    """Two outcomes compared."""

    verdict: Verdict
    lines: list[str]
    count: int
    layouts_differ: bool

    @classmethod
    def of(cls, eager: Outcome, compiled: Outcome) -> _Comparison:
        if eager.error is not None or compiled.error is not None:
            return cls._of_errors(eager.error, compiled.error)
        lines: list[str] = []
        verdict = Verdict.EQUAL
        for name in dict.fromkeys((*eager.values, *compiled.values)):
            if name not in eager.values or name not in compiled.values:
                lines.append(f"{name}: only {'eager' if name in eager.values else 'the compiled function'} changed it")
                verdict = Verdict.WRONG
                continue
            gap = compare(compiled.values[name], eager.values[name])
            verdict = max(verdict, gap.verdict)
            if gap.verdict is not Verdict.EQUAL:
                lines.append(f"{name}: {gap.described()}")
        others: list[str] = []
        for name in dict.fromkeys((*eager.layouts, *compiled.layouts)):
            pair = eager.layouts.get(name), compiled.layouts.get(name)
            if pair[0] != pair[1]:
                said = (
                    lines if name.startswith("gradient of ") else others
                )  # a backend may lay out gradients as it likes
                said.append(f"{name}: eager {pair[0]}, compiled {pair[1]}")
                verdict = max(verdict, Verdict.ROUNDING)
        for only, whose in (
            (eager.shared - compiled.shared, "eager"),
            (compiled.shared - eager.shared, "the compiled"),
        ):
            others += [f"{a} and {b} share memory in {whose} function only" for a, b in sorted(only)]
        verdict = Verdict.WRONG if others else verdict
        return cls(verdict, [*others, *lines], len(eager.values), bool(others))

    @classmethod
    def _of_errors(cls, eager: Exception | None, compiled: Exception | None) -> _Comparison:
        if eager is None and compiled is not None:
            raise compiled
        if type(eager) is type(compiled):
            return cls(Verdict.EQUAL, [f"both raise {type(eager).__name__}: {eager}"], 0, False)
        said = "nothing" if compiled is None else type(compiled).__name__
        return cls(Verdict.WRONG, [f"eager raises {type(eager).__name__}: {eager}; compiled raises {said}"], 0, True)

    def judged(self, stages: list[StageResult]) -> _Comparison:
        """The verdict on values by the stages, which know float64: tolerances alone can't tell."""
        verdicts = [stage.verdict for stage in stages if stage.verdict is not None]
        if self.layouts_differ or any(stage.verdict is None for stage in stages[1:]) or not verdicts:
            return self
        return dataclasses.replace(self, verdict=max(verdicts))
