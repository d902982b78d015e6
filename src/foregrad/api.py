"""The everyday door: `compile`, `capture`, `partition`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, ParamSpec, Protocol, TypeVar, overload

import torch
from torch import fx

from ._torch.fakes import is_absent, without_fake_mode
from ._torch.nested import leaves
from .annexes import given, the_one
from .backends.registry import Backend, get_backend
from .config import config
from .dispatch.dispatcher import Dispatcher
from .dispatch.explain import Recompiles
from .dispatch.module import Recipe, make_compiled_module, make_wrapper
from .dispatch.pipeline import Pipeline
from .dispatch.varying import SizesSeen, check_marked
from .errors import EscapedTensorError, UnknownLeafError, did_you_mean
from .extend import CompiledCallable
from .frontend.call import flatten_call, forward_of
from .frontend.openings import GradientKindError
from .graph.effect_log import CheckFailed
from .graph.joint import JointGraph
from .graph.source import check_function, described
from .house import hide_own_frames
from .identity import attributed
from .partitioners import default_partition, fused_partition, min_cut_rematerialization_partition, policy_partition
from .partitioners.policies import Policy
from .partitioners.report import Parts

F = TypeVar("F", bound=Callable[..., Any])
M = TypeVar("M", bound=torch.nn.Module)
P = ParamSpec("P")
R = TypeVar("R")
BackendSpec = str | Backend | Callable[..., Any] | Sequence[Callable[..., Any]]
PartitionFn = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]


class Limit(Protocol):
    """A memory budget with settings: `foregrad.Budget`."""

    @property
    def limit(self) -> int | float | str: ...


_POLICIES: dict[str, PartitionFn] = {
    "default": default_partition,
    "min_cut": min_cut_rematerialization_partition,
    "fused": fused_partition,
}


def _partition_fn(
    policy: str | PartitionFn | Policy | None,
    memory_budget: int | float | str | Limit | None = None,
    keeps_order: bool = False,
) -> PartitionFn:
    if memory_budget is not None:
        if not isinstance(policy, Policy) and policy not in (None, "budget"):
            raise ValueError(f"a memory budget makes the partition: partition={policy!r} can't be asked for beside it")
        own = policy if isinstance(policy, Policy) else None
        within: PartitionFn = the_one("memory budgets").partition_within(memory_budget, policy=own, replay=keeps_order)
        return within
    if isinstance(policy, Policy):
        return functools.partial(policy_partition, policy=policy)
    if policy is None:
        return default_partition
    if policy == "budget":
        raise ValueError("the partition 'budget' needs memory_budget=: bytes, '600 MiB', or a fraction from 0.0 to 1.0")
    if callable(policy):
        return policy
    if policy not in _POLICIES:
        names = [*sorted(_POLICIES), "budget"]
        meant = did_you_mean(str(policy), names, " (did you mean `{}`?)")
        raise ValueError(f"there is no partition policy `{policy}`{meant}; there are {', '.join(names)}")
    return _POLICIES[policy]


class _Decorator(Protocol):
    """What `compile(...)` without a function gives."""

    @overload  # a module is a callable too, and stays one of its class
    def __call__(self, fn_or_module: M, /) -> M: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(self, fn_or_module: Callable[P, R], /) -> CompiledCallable[P, R]: ...


@overload
def compile(  # type: ignore[overload-overlap]
    fn_or_module: M,
    *,
    backend: BackendSpec = ...,
    partition: str | PartitionFn | Policy | None = ...,
    memory_budget: int | float | str | Limit | None = ...,
    dynamic: bool | None = ...,
    decompositions: Mapping[object, Callable[..., object]] | None = ...,
    on_unsupported: Literal["eager", "raise"] | None = ...,
    regions: bool | Literal["auto"] = ...,
) -> M: ...


@overload
def compile(
    fn_or_module: Callable[P, R],
    *,
    backend: BackendSpec = ...,
    partition: str | PartitionFn | Policy | None = ...,
    memory_budget: int | float | str | Limit | None = ...,
    dynamic: bool | None = ...,
    decompositions: Mapping[object, Callable[..., object]] | None = ...,
    on_unsupported: Literal["eager", "raise"] | None = ...,
    regions: bool | Literal["auto"] = ...,
) -> CompiledCallable[P, R]: ...


@overload
def compile(
    fn_or_module: None = None,
    *,
    backend: BackendSpec = ...,
    partition: str | PartitionFn | Policy | None = ...,
    memory_budget: int | float | str | Limit | None = ...,
    dynamic: bool | None = ...,
    decompositions: Mapping[object, Callable[..., object]] | None = ...,
    on_unsupported: Literal["eager", "raise"] | None = ...,
    regions: bool | Literal["auto"] = ...,
) -> _Decorator: ...


def compile(
    fn_or_module: Callable[..., object] | None = None,
    *more: object,
    backend: BackendSpec = "auto",
    partition: str | PartitionFn | Policy | None = None,
    memory_budget: int | float | str | Limit | None = None,
    dynamic: bool | None = None,
    decompositions: Mapping[object, Callable[..., object]] | None = None,
    on_unsupported: str | None = None,
    regions: bool | str = "auto",
    **others: object,
) -> Any:
    """Compile a function or module: it behaves as before, and runs as two graphs.

    The first call captures forward and backward as one graph, splits the graph and compiles the halves. Later calls
    check whether a graph is right for the call, and capture a new graph if none is. Parameters and closed-over
    tensors become inputs, read in each call.

    Args:
        fn_or_module: the function or module. Without it, `compile(...)` is a decorator.
        backend: a name from `list_backends()`, one compiler, or a pair (forward, backward) of compilers
            `(fx.GraphModule, example_inputs) -> callable`. "auto" is "inductor" where that can compile, else "eager";
            on a CPU it begins with eager's kernels while a second process compiles. "eager" gives eager's results bit
            for bit, except in the cases that docs/backends.md names.
        partition: "default" (save the values that the backward reads), "min_cut" (save the fewest bytes), "fused"
            (min-cut that prefers values written by kernels anyway), a `Policy` (`foregrad.dots_saveable`, ...) that
            decides on each value, or a function with the signature of `default_partition`; None for the backend's
            choice. A policy can be combined with `memory_budget`.
        memory_budget: the limit of a step's peak memory, forward to end of backward, gradients included, without
            the arguments and parameters. Bytes as an integer or as text with a unit ("600 MiB"), a float from 0.0
            (the least feasible peak) to 1.0 (the peak of saving everything), or a `Budget` with further settings.
        dynamic: the sizes of arguments that are symbols in graphs. None: sizes that differed between two
            captures, so a function called with many lengths compiles twice. True: all sizes from the beginning.
            False: only sizes marked by `mark_dynamic`.
        decompositions: operators to replace while capturing, `{operator: function}`.
        on_unsupported: the treatment of calls that can't be compiled. "eager" runs the function eagerly, warns once
            with the reason, and counts eager calls in `explain_recompiles`; "raise" raises an
            `Unsupported...Error`, or `BackendError` if the backend fails. None stands for
            `foregrad.config.on_unsupported`, "eager" unless it was set.
        regions: whether repeated parts of the graphs (a model's layers) are compiled once and called at each place.
            True: parts of 16 operators or more that come twice. "auto": parts that come seven times, without
            convolutions, with Inductor and without a memory budget. False: only parts marked by `foregrad.region`.

    Returns:
        A function for a function; for a module, a module of its class that shares the parameters.

    Raises `TypeError`, `ValueError` or `BackendError` for a wrong argument; a call, `BudgetError` for a low budget.

    Examples:
        >>> import torch, foregrad
        >>> @foregrad.compile(backend="eager")
        ... def loss_of(w, x):
        ...     return (x @ w).sin().sum()
        >>> w = torch.ones(3, 2, requires_grad=True)
        >>> loss_of(w, torch.ones(4, 3)).backward()
        >>> w.grad.shape
        torch.Size([3, 2])
    """
    if more:
        raise TypeError(
            "foregrad.compile takes no example inputs: call its result with them, foregrad.compile(model)(*inputs)"
            if any(isinstance(leaf, torch.Tensor) for leaf in leaves(more))
            else f"backend is a keyword: foregrad.compile(model, backend={described(more[0])})"
            if len(more) == 1
            else f"foregrad.compile takes a function or a module alone; the rest are keywords: {', '.join(_KEYWORDS)}"
        )
    check_arguments(fn_or_module, dynamic, on_unsupported, others, regions)
    again = functools.partial(
        compile,
        backend=backend,
        partition=partition,
        memory_budget=memory_budget,
        dynamic=dynamic,
        decompositions=decompositions,
        on_unsupported=on_unsupported,
        regions=regions,
    )
    if fn_or_module is None:
        return again
    if isinstance(fn_or_module, (staticmethod, classmethod)):  # the decorators' order is no matter
        return type(fn_or_module)(again(fn_or_module.__func__))
    compile_loaded = getattr(type(fn_or_module), "_foregrad_compile", None)  # an artifact is captured already
    if compile_loaded is not None:
        return compile_loaded(fn_or_module, backend, {"partition": partition, "memory_budget": memory_budget})
    pipeline = pipeline_for(
        backend=backend,
        partition=partition,
        memory_budget=memory_budget,
        decompositions=decompositions,
        regions=regions,
    )
    if isinstance(fn_or_module, torch.nn.Module):
        return compile_module(fn_or_module, pipeline, again, dynamic=dynamic, on_unsupported=on_unsupported)
    return compile_function(fn_or_module, pipeline, dynamic=dynamic, on_unsupported=on_unsupported)


def pipeline_for(
    *,
    backend: Any = "auto",
    partition: str | PartitionFn | Policy | None = None,
    memory_budget: int | float | str | Limit | None = None,
    decompositions: Any = None,
    inductor_settings: Mapping[str, object] | None = None,
    regions: bool | str = "auto",
) -> Pipeline:
    """The pipeline for the arguments of `compile`. `inductor_settings` are in force while Inductor compiles."""
    chosen = get_backend(backend)
    settings = {**(chosen.budget_settings if memory_budget is not None else {}), **(inductor_settings or {})}
    if settings and chosen.with_settings is not None:
        chosen = chosen.with_settings(settings)
    split = _partition_fn(
        partition if partition is not None or memory_budget is not None else chosen.partition,
        memory_budget,
        chosen.keeps_order,
    )
    is_quick = split in _POLICIES.values()
    # Where no stage takes time, or the backend's results may not be kept, the cache is not even loaded.
    is_kept = config.cache and chosen.cache_key is not None and not (is_quick and chosen.prepare_joint is None)
    makers = given("the cache on disk") if is_kept else ()
    keepers = (make(chosen, split, decompositions, is_quick=is_quick) for make in makers)
    return Pipeline(
        chosen.fw_compiler,
        chosen.bw_compiler,
        chosen.inference_compiler,
        split,
        decompositions if decompositions is not None else chosen.decompositions,
        prepare_joint=chosen.prepare_joint,
        prepare_halves=chosen.prepare_halves,
        keeper=next(keepers, None),
        regions=False if regions == "auto" and memory_budget is not None else regions,
        may_fail=True,
        first=chosen.first if is_quick and decompositions is None else None,
    )


def compile_function(
    function: F, pipeline: Pipeline, *, dynamic: bool | None = False, on_unsupported: str | None = None
) -> F:
    """`function` behind a dispatcher, looking like itself."""
    dispatcher = Dispatcher(function, pipeline, config.value, dynamic=dynamic, on_unsupported=on_unsupported)

    entry: Any = functools.update_wrapper(attributed(dispatcher.make_entry(), foregrad=dispatcher), function)
    compiled: F = entry
    return compiled


def compile_module(
    module: torch.nn.Module,
    pipeline: Pipeline,
    recipe: Recipe,
    *,
    dynamic: bool | None = False,
    on_unsupported: str | None = None,
) -> torch.nn.Module:
    """A module of the original's class and state, with a compiled forward; `recipe` compiles its copies.

    `DistributedDataParallel` communicates in its own forward, so the module that it wraps is compiled.
    """
    if isinstance(module, torch.nn.parallel.DistributedDataParallel):
        inner = compile_module(module.module, pipeline, recipe, dynamic=dynamic, on_unsupported=on_unsupported)
        return make_wrapper(module, inner, recipe)
    dispatcher = Dispatcher(
        forward_of(module),
        pipeline,
        config.value,
        type(module).__name__,
        dynamic=dynamic,
        on_unsupported=on_unsupported,
    )
    return make_compiled_module(module, dispatcher, recipe)


def explain_recompiles(fn: object) -> Recompiles:
    """Every compilation of a compiled function or module so far, with its reasons, and under `.eager` the calls that
    ran eagerly, with reasons and counts; `str()` gives a report.

    The logger "foregrad.recompiles" logs each compilation: at level INFO with the difference of the call from the
    graph made last, at DEBUG with the differences from all. Raises `TypeError` if foregrad did not compile `fn`.

    Examples:
        >>> import torch, foregrad
        >>> double = foregrad.compile(lambda x: x * 2, backend="eager", dynamic=False)
        >>> double(torch.ones(2)), double(torch.ones(3))
        (tensor([2., 2.]), tensor([2., 2., 2.]))
        >>> print(foregrad.explain_recompiles(double))
        <lambda>: compiled 2 times
        graph 1: the first call
        graph 2:
          not graph 1: x.shape was (2,), is (3,)
    """
    dispatcher = getattr(fn, "foregrad", None)
    if not isinstance(dispatcher, Dispatcher):
        instead = f"foregrad.explain_recompiles takes a result of foregrad.compile, not {described(fn)}"
        if hasattr(fn, "get_compiler_config"):
            instead += ', made by torch.compile (TORCH_LOGS="recompiles" shows why it recompiles)'
        raise TypeError(instead)
    return dispatcher.recompiles()


def capture(fn: Callable[..., object], *args: Any, **kwargs: object) -> JointGraph:
    """The joint graph of `fn` for the given arguments. Its `str()` is Python.

    `fn` runs on stand-ins for its tensors. Only eager regions, and the operators of a value that `fn` reads, run on the
    arguments. A branch follows the value; the condition is an output of the graph, `decided at` the line, and
    the graph is right for calls with an equal outcome. A result that is an argument, or a view of an argument, is no
    output: a line at the head of the text names the argument. On `meta` and fakes there are no values, so a branch on
    a value raises `UnsupportedDataDependentError`. Dimensions marked by either `mark_dynamic` are symbols.

    Raises `Unsupported...Error` if `fn` can't be captured, and the errors of `fn`.

    Examples:
        >>> import torch, foregrad
        >>> joint = foregrad.capture(lambda x: x.sin().sum(), torch.ones(3, requires_grad=True))
        >>> [node.name for node in joint.module.graph.nodes if node.op == "call_function"]
        ['sin', 'sum_1', 'cos', 'expand', 'mul']
    """
    from .tracing.capture import capture_call  # late, as in the pipeline
    from .tracing.parts import Options

    check_function(fn, "capture")
    function = fn.forward if isinstance(fn, torch.nn.Module) else fn
    name = getattr(fn, "__name__", type(fn).__name__)
    objects, is_told, fills = False, False, any(map(is_absent, leaves((args, kwargs))))
    with without_fake_mode():
        while True:
            try:
                call = SizesSeen(dynamic=False).seen(flatten_call(function, args, kwargs, objects=objects), ())
                joint = capture_call(dataclasses.replace(call, fills_caches=fills), Options(name)).joint
                if call.dynamic:
                    check_marked(call, joint, name)
                return joint
            except CheckFailed as failure:
                raise failure.error from None
            except Exception as error:
                if isinstance(error, GradientKindError) and not is_told:  # the class's kind of gradient is noted now
                    is_told = True
                elif isinstance(error, UnknownLeafError) and not objects:  # it may be a plain object: taken apart
                    objects = True
                elif isinstance(error, EscapedTensorError) and fills:  # a cache is filled: without values it may run
                    function(*args, **kwargs)
                    fills = False
                else:
                    if not config.full_tracebacks:
                        hide_own_frames(error)
                    raise


def partition(
    joint: JointGraph,
    policy: str | PartitionFn | Policy | None = None,
    *,
    memory_budget: int | float | str | Limit | None = None,
) -> Parts:
    """Split a joint graph: `policy` and `memory_budget` as in `compile`. `.report()` shows memory and recomputation.

    Examples:
        >>> import torch, foregrad
        >>> joint = foregrad.capture(lambda x: x.sin().exp().sum(), torch.ones(3, requires_grad=True))
        >>> foregrad.partition(joint).saved_bytes  # the result of `exp`: three numbers of four bytes
        12
        >>> foregrad.partition(joint, "min_cut").saved_bytes  # the argument is there anyway
        0
    """
    if not isinstance(joint, JointGraph):
        raise TypeError(f"foregrad.partition takes a result of foregrad.capture, not {described(joint)}")
    with without_fake_mode():
        return pipeline_for(backend="nop", partition=policy, memory_budget=memory_budget).split(joint)


# -------------------------------------------------------------------- arguments
# Advice for arguments that have a meaning elsewhere, or none.


_KEYWORDS = "backend partition memory_budget dynamic decompositions on_unsupported regions".split()
_OF_INDUCTOR = (
    'write torch.compile(model, backend="foregrad", {}=...), or hand Inductor\'s settings over: '
    'foregrad.compile(model, backend=InductorCompiler({{"max_autotune": True}})), from foregrad.inductor.backend'
)
# Keywords of torch.compile and similar functions -> the words to write instead.
_ELSEWHERE = {
    "fullgraph": "foregrad makes a single graph of a function, or runs the call eagerly; for an error instead, write "
    'on_unsupported="raise"',
    "mode": _OF_INDUCTOR.format("mode"),
    "options": _OF_INDUCTOR.format("options"),
    "disable": "call the function itself, or mark a part with foregrad.eager_region",
    "model": "the model comes first, without a name: foregrad.compile(model)",
    "fn": "the function comes first, without a name: foregrad.compile(fn)",
    "fw_compiler": "write backend=(fw_compiler, bw_compiler), or call foregrad.aot_function",
    "bw_compiler": "write backend=(fw_compiler, bw_compiler), or call foregrad.aot_function",
    "partition_fn": "write partition=",
    "budget": "write memory_budget=",
}


def check_arguments(
    target: object, dynamic: object, on_unsupported: object, others: Mapping[str, object], regions: object = "auto"
) -> None:
    """Raise `TypeError` or `ValueError` for arguments that `compile` does not take."""
    for name in others:
        instead = _ELSEWHERE.get(name) or did_you_mean(name, _KEYWORDS, "did you mean {}=?")
        instead = instead or f"it has {', '.join(_KEYWORDS)}"
        raise TypeError(f"foregrad.compile has no keyword {name}=: {instead}")
    if not (dynamic is None or isinstance(dynamic, bool)):
        raise ValueError(
            f"dynamic is None (sizes that differed between calls), True (all sizes) or False (none), not {dynamic!r}"
        )
    if on_unsupported not in (None, "eager", "raise"):
        raise ValueError(f"on_unsupported is 'eager' or 'raise', not {on_unsupported!r}")
    if regions not in (True, False, "auto"):
        raise ValueError(f"regions is True (all parts that repeat), False or 'auto' (where it pays), not {regions!r}")
    if isinstance(target, str):
        raise TypeError(
            f"foregrad.compile compiles a function or a module, not {target!r}. If that is a backend, write "
            f"foregrad.compile(model, backend={target!r})"
        )
    if isinstance(target, type):
        raise TypeError(
            f"foregrad.compile compiles a function or a module, and {target.__name__} is a class. Compile an object: "
            f"foregrad.compile({target.__name__}(...)), or put @foregrad.compile() above its forward"
        )
    takes_it = target is None or callable(target) or isinstance(target, classmethod)
    if not takes_it and getattr(type(target), "_foregrad_compile", None) is None:
        raise TypeError(
            f"foregrad.compile compiles a function or a module, not {described(target)}. Write "
            + (
                "@foregrad.compile() below @property"
                if isinstance(target, property)
                else 'foregrad.compile(model), or @foregrad.compile(backend="inductor") above a function'
            )
        )
