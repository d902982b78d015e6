"""`verify`: run a function eagerly and compiled, compare all that can be seen, and each stage by itself."""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

import foregrad
from foregrad.errors import UnsupportedError
from foregrad.extend import CompiledFunction, as_compiled, compiling, phase
from foregrad.graph.joint import JointGraph
from foregrad.graph.source import check_function
from foregrad.tools._torch.tools import leaves_of, named_leaves, storage_key, version_of

from .compare import Verdict, compare
from .locate import Culprit
from .report import StageResult, Verification
from .reproducer import write_reproducer
from .search import Maker
from .stages import EagerValues, Stages, Values, first_not_eager, with_program
from .watched import GlobalGenerators, Log, compiled_with, copied


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

    Both run once for real on copies of the arguments and the module, from an equal random state, restored afterwards.
    If results differ, each stage's graph (capture, decompositions, the backend's passes, partition, each compiled half)
    runs on eager's kernels and, to tell rounding from faults, in float64. The report names the first operator with a
    wrong result in the first wrong stage, and a file has a program that reproduces the fault.

    Args:
        fn_or_module: a function or module; or a result of `foregrad.compile`, to verify as it was compiled.
        args: its arguments.
        order: how many times to differentiate: 0 compares values alone, 2 second derivatives too. Gradients are taken
            from all outputs, with random cotangents.
        backend, partition, memory_budget, decompositions: as for `foregrad.compile`. Inductor is set to draw eager's
            random numbers.
        folder: where to write the program; a new folder for temporary files by default.
        kwargs: keyword arguments of the function.

    Returns:
        A `Verification`: `.ok` is True if all results are equal or differ by rounding, `str()` is a report. If both
        raise equal errors, or there is no result, the verdict is `Verdict.NOTHING`: not ok.

    Raises:
        ValueError: for arguments or parameters on the meta device: they have no values. UnsupportedError: for a
        function that can't be compiled. BackendError: where the backend fails.

    Example:
        >>> import torch, foregrad
        >>> found = foregrad.verify(lambda x: (x.sin() * x).sum(), torch.randn(4, requires_grad=True), backend="eager")
        >>> found.ok, str(found.verdict)
        (True, 'equal bit for bit')
    """
    check_function(fn_or_module, "verify")
    begin = time.perf_counter()
    _check_values(fn_or_module, args, kwargs)
    function, name = fn_or_module, backend if isinstance(backend, str) else None
    compiled = as_compiled(fn_or_module)
    if compiled is not None:
        function = compiled.function
    else:
        chosen = foregrad.get_backend(backend)
        name = name or chosen.name
        if chosen.with_settings is not None:
            settings = chosen.budget_settings if memory_budget is not None else {}
            chosen = chosen.with_settings({**settings, "fallback_random": True})
            chosen = dataclasses.replace(chosen, budget_settings={})
        compiled = compiled_with(
            backend=chosen, partition=partition, memory_budget=memory_budget, decompositions=decompositions
        )
    generators = GlobalGenerators.now()
    try:
        verifier = _Verifier(function, args, kwargs, order, compiled, name or "its backend", folder)
        with compiling(verifier.name, verb="verifying"):
            return verifier.run(begin)
    finally:
        generators.put_back()


def _check_values(function: Any, args: Any, kwargs: Any) -> None:
    named = (*named_leaves(args, "args"), *named_leaves(kwargs, "kwargs"))
    if isinstance(function, torch.nn.Module):
        named += (*function.named_parameters(), *function.named_buffers())
    for name, value in named:
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise ValueError(f"verify compares values, and `{name}` is on the meta device, without values")


@dataclasses.dataclass
class _Verifier:
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    order: int
    like: CompiledFunction
    backend: str
    folder: str | None
    calls_before: int = 0  # eager calls to fill caches, before the first compiled call

    @property
    def name(self) -> str:
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def run(self, begin: float) -> Verification:
        generators = GlobalGenerators.now()
        log = Log()
        start = time.perf_counter()
        side, compiled = self._compiled(self.like, log, generators)
        compile_seconds = time.perf_counter() - start
        with phase("eager run", compiles=False):
            eager = self._eager(side, log, generators)
        comparison = Comparison.of(eager, compiled)
        stages: list[StageResult] = []
        culprit: Culprit | None = None
        if comparison.verdict > Verdict.EQUAL and log.executions:
            with phase("stages", compiles=False):
                more, culprit = Stages(log, self.like.view().decompositions, self._captured).run()
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
        side = self._side()
        return _as_captured(side.function).graph_for(side.args, side.kwargs).joint

    def _capture(self, eager: CallOutcome, generators: GlobalGenerators) -> tuple[StageResult, Culprit | None]:
        """The graph as it was captured, on eager's kernels; and its first operator that eager does not run."""
        log = Log()
        side, plain = self._compiled(_plainly_compiled(), log, generators)
        comparison, culprit = Comparison.of(eager, plain), None
        if comparison.verdict is Verdict.WRONG and isinstance(values_of_graph := Values.of(log, None), Values):
            values = EagerValues()
            self._eager(side, log, generators, values)
            generators.put_back()
            culprit = first_not_eager(values_of_graph.module, values_of_graph.inputs, values)
            if culprit is not None:
                culprit = with_program(culprit, values, Maker("capture", _as_captured))
        return StageResult("capture", comparison.verdict, "; ".join(comparison.lines[:2])), culprit

    def _compiled(self, like: CompiledFunction, log: Log, generators: GlobalGenerators) -> tuple[Side, CallOutcome]:
        """A side with a compiled function that `log` hears of, and its outcome. Nothing is cached on disk."""
        while True:
            side = self._side()
            compiled = like.like(side.function, on_unsupported="raise", watcher=log, cached=False)
            generators.put_back()
            outcome = side.run(compiled, self.order, functools.partial(_reached, side, log))
            put_back([pair for pair in log.tensors if id(pair[0]) not in _copied(side)])
            if log.captured or outcome.error is not None:
                return side, outcome
            if self.calls_before == _MOST_CALLS_BEFORE:
                raise UnsupportedError(f"`{compiled.name}` ran eagerly: there is nothing to verify")
            self.calls_before += 1

    def _side(self) -> Side:
        """A side in the state after the calls that run eagerly in any case."""
        side = make_side(self.function, self.args, self.kwargs)
        for _ in range(self.calls_before):
            side.function(*side.args, **side.kwargs)
        return side

    def _eager(
        self, other: Side, log: Log, generators: GlobalGenerators, values: EagerValues | None = None
    ) -> CallOutcome:
        side = self._side()

        def reached() -> Mapping[str, torch.Tensor]:
            if values is not None:
                values.is_forward = False
            return _mapped(_reached(other, log), other, side)

        generators.put_back()
        with values or nullcontext():
            outcome = side.run(side.function, self.order, reached)
        put_back([pair for pair in log.tensors if id(pair[0]) not in _copied(other)])
        return outcome


_MOST_CALLS_BEFORE = 2


def _plainly_compiled() -> CompiledFunction:
    return compiled_with(backend="eager", partition="default")


def _as_captured(function: Callable[..., Any]) -> CompiledFunction:
    return _plainly_compiled().like(function, on_unsupported="raise")


def _copied(side: Side) -> set[int]:
    """The ids of the copies that the side keeps."""
    return {id(copied) for copied in side.copies.values()}


def _reached(side: Side, log: Log) -> dict[str, torch.Tensor]:
    """The tensors that the captures found, by their role in the function."""
    by_name: dict[str, torch.Tensor] = {}
    for stage in log.captured:
        for info, tensor in zip(stage.joint.signature.inputs, stage.tensors, strict=False):
            if tensor is not None:
                by_name.setdefault(str(info.slot), tensor)
    return by_name


def _mapped(tensors: Mapping[str, torch.Tensor], one: Side, other: Side) -> dict[str, torch.Tensor]:
    """The other side's tensors for one side's."""
    originals = {id(copied): original for original, copied in one.copies.items() if isinstance(copied, torch.Tensor)}
    return {name: other.copies.get(originals.get(id(tensor), 0), tensor) for name, tensor in tensors.items()}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two outcomes compared."""

    verdict: Verdict
    lines: list[str]
    count: int
    layouts_differ: bool

    @classmethod
    def of(cls, eager: CallOutcome, compiled: CallOutcome) -> Comparison:
        if eager.error is not None or compiled.error is not None:
            return cls._of_errors(eager.error, compiled.error)
        lines: list[str] = []
        results = (*eager.values.values(), *compiled.values.values())
        verdict = Verdict.NOTHING if all(value is None for value in results) else Verdict.EQUAL
        for name in dict.fromkeys((*eager.values, *compiled.values)):
            if name not in eager.values or name not in compiled.values:
                lines.append(f"{name}: only {'eager' if name in eager.values else 'the compiled function'} changed it")
                verdict = Verdict.WRONG
                continue
            gap = compare(compiled.values[name], eager.values[name])
            if gap.verdict is not Verdict.EQUAL:
                verdict = max(verdict, gap.verdict)
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
        return cls(verdict, [*others, *lines], len(eager.values) if verdict else 0, bool(others))

    @classmethod
    def _of_errors(cls, eager: Exception | None, compiled: Exception | None) -> Comparison:
        if eager is None and compiled is not None:
            raise compiled
        if type(eager) is type(compiled):
            return cls(Verdict.NOTHING, [f"both raise {type(eager).__name__}: {eager}"], 0, False)
        said = "nothing" if compiled is None else type(compiled).__name__
        return cls(Verdict.WRONG, [f"eager raises {type(eager).__name__}: {eager}; compiled raises {said}"], 0, True)

    def judged(self, stages: list[StageResult]) -> Comparison:
        """The verdict on values by the stages: they know float64, and tolerances alone can't tell."""
        verdicts = [stage.verdict for stage in stages if stage.verdict is not None]
        if self.layouts_differ or any(stage.verdict is None for stage in stages[1:]) or not verdicts:
            return self
        return dataclasses.replace(self, verdict=max(verdicts))


# -------------------------------------------------------------------------------------------- one side of a comparison
# One side of a comparison: a copy of the function and its arguments, called and differentiated.
#
# A module and the arguments are copied, so that the user's stay as they are; a tensor that is no leaf becomes a leaf.
# Objects that a plain function reaches by itself are not copied: tensors that it writes to are put back afterwards,
# further objects are not.


@dataclasses.dataclass(frozen=True, slots=True)
class CallOutcome:
    """A call's outcome: tensors by name, other results, facts about tensors, and the error that it raised, if any.

    `layouts`: for each tensor its visible facts besides values; `shared`: the pairs of names that share memory.
    """

    values: Mapping[str, Any]
    layouts: Mapping[str, str]
    shared: frozenset[tuple[str, str]]
    error: Exception | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """A function with arguments of its own. `copies`: by the id of an original, its copy."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    copies: dict[int, Any]

    def tensors(self) -> dict[str, torch.Tensor]:
        """The arguments, the parameters and buffers, by name."""
        named = (*named_leaves(self.args, "args"), *named_leaves(self.kwargs, "kwargs"))
        by_name = {name: value for name, value in named if isinstance(value, torch.Tensor)}
        if isinstance(self.function, torch.nn.Module):
            by_name |= {f"parameter {name}": value for name, value in self.function.named_parameters()}
            by_name |= {f"buffer {name}": value for name, value in self.function.named_buffers()}
        return by_name

    def run(
        self, call: Callable[..., Any], order: int, reached: Callable[[], Mapping[str, torch.Tensor]]
    ) -> CallOutcome:
        """Call `call` (the function, or its compiled form) with the arguments, and differentiate `order` times.

        `reached()`: after the call, the tensors that the function reaches by itself.
        """
        inputs = self.tensors()
        versions = {name: _version(tensor) for name, tensor in inputs.items()}
        try:
            results = call(*self.args, **self.kwargs)
            own = {id(tensor) for tensor in inputs.values()}
            inputs |= {name: tensor for name, tensor in reached().items() if id(tensor) not in own}
            leaves = {name: tensor for name, tensor in inputs.items() if tensor.requires_grad and tensor.is_leaf}
            outputs = dict(named_leaves(results, "out"))
            layouts = {name: _layout(value) for name, value in outputs.items() if isinstance(value, torch.Tensor)}
            shared = _shared({**outputs, **inputs})
            values: dict[str, Any] = {name: copied(value) for name, value in outputs.items()}
            layouts |= {f"{n} afterwards": _layout(t) for n, t in inputs.items()}
            gradients = _differentiated(outputs, leaves, order)
        except Exception as error:
            return CallOutcome({}, {}, frozenset(), error)
        values |= gradients
        for name, tensor in inputs.items():
            if name not in versions or _version(tensor) != versions[name]:
                values[f"{name} afterwards"] = copied(tensor)
        layouts |= {
            n: f"strides {tuple(g.stride())}"
            for n, g in gradients.items()
            if g is not None and g.layout is torch.strided
        }
        return CallOutcome(values, layouts, shared)


def make_side(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Side:
    """A side with copies of the arguments, and of the function where that is a module."""
    memo: dict[int, Any] = {}
    is_module = isinstance(function, torch.nn.Module)
    for tensor in leaves_of((args, kwargs)):
        if not isinstance(tensor, torch.Tensor):
            continue
        has_no_storage = type(tensor) is torch.Tensor and tensor.layout is not torch.strided
        if has_no_storage or not tensor.is_leaf:
            memo[id(tensor)] = copied(tensor).requires_grad_(tensor.requires_grad)
    own: Any = function if is_module else None
    own, own_args, own_kwargs = copy.deepcopy((own, tuple(args), dict(kwargs)), memo)
    return Side(own if is_module else function, own_args, own_kwargs, memo)


def put_back(saved: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give tensors that were written the content of their copies."""
    with torch.no_grad():
        for tensor, content in saved:
            if not torch.is_inference(tensor) and not _same(tensor, content):
                tensor.copy_(content)


def _same(tensor: torch.Tensor, content: torch.Tensor) -> bool:
    return tensor.shape != content.shape or bool(((tensor == content) | (tensor.isnan() & content.isnan())).all())


def _differentiated(outputs: Mapping[str, Any], leaves: Mapping[str, torch.Tensor], order: int) -> dict[str, Any]:
    """Gradients of the leaves, and of the gradients' random combination, up to `order`; None where there is none."""
    values: dict[str, Any] = {}
    roots = [t for t in outputs.values() if isinstance(t, torch.Tensor) and t.requires_grad]
    generator = torch.Generator().manual_seed(0)
    prefix = ""
    for depth in range(1, order + 1):
        if not roots or not leaves:
            break
        tangents = [_tangent(root, generator) for root in roots]
        gradients = torch.autograd.grad(
            roots, list(leaves.values()), tangents, allow_unused=True, create_graph=depth < order
        )
        prefix = "gradient of " + prefix
        values |= {
            prefix + name: None if gradient is None else copied(gradient)
            for name, gradient in zip(leaves, gradients, strict=True)
        }
        roots = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
    return values


def _tangent(root: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The cotangent of a root, equal on each side: 1 for a single number, as for `backward()`."""
    if root.dim() == 0:
        return torch.ones_like(root)
    drawn = torch.randn(root.shape, generator=generator, dtype=torch.float64)
    return drawn.to(root.device, root.dtype).contiguous()


def _version(tensor: torch.Tensor) -> int:
    return 0 if torch.is_inference(tensor) else version_of(tensor)


def _layout(tensor: torch.Tensor) -> str:
    strides = f"strides {tuple(tensor.stride())}" if tensor.layout is torch.strided else str(tensor.layout)
    return (
        f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, {strides}, "
        f"requires_grad={tensor.requires_grad}, is_leaf={tensor.is_leaf}"
    )


def _shared(tensors: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """The pairs of tensors that share memory, and, as `(name, "is NAME")`, the pairs that are one object."""
    groups: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided and tensor.numel():
            try:
                groups.setdefault(storage_key(tensor), []).append((name, tensor))
            except (RuntimeError, NotImplementedError):  # wrapper subclasses have none
                continue
    pairs = set()
    for members in groups.values():
        for i, (name, tensor) in enumerate(members):
            for other_name, other in members[i + 1 :]:
                pairs.add((name, f"is {other_name}" if other is tensor else other_name))
    return frozenset(pairs)
