"""foregrad behind `torch.compile`: the backend "foregrad", and `aot_autograd`: it makes a backend of a compiler.

Dynamo captures a frame's tensor code and guards its assumptions; each graph comes here and runs through the pipeline
without further guards. Four facts that Dynamo does not guard are handled here:

* sizes that it left open (`dynamic=True`, or a second shape): the graph goes behind a dispatcher of foregrad's, with
  guards and with symbolic sizes from the first call;
* inputs that share memory, one of them written: these calls go to a dispatcher too;
* an input's offset in its memory: so do calls with a new offset, if the graph depends on it;
* Python floats that it turned into inputs: a dispatcher too; the graph computes with the floats, or there is a graph
  for each value that an operator needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import engine
from .._torch.fakes import FakeTensor
from .._torch.graph_tools import activation_budget
from .._torch.ops import is_opaque_reference
from .._torch.symbols import is_ragged
from .._torch.tensors import storage_key
from .._torch.wrappers import is_wrapper
from ..annexes import the_one
from ..aot import SharedInputsError, compile_unguarded, make_pipeline, refuse_unsupported, returning_sequence
from ..api import pipeline_for
from ..backends.boxed import nop
from ..config import config
from ..dispatch.dispatcher import Dispatcher
from ..dispatch.explain import OneWarning
from ..dispatch.pipeline import Pipeline
from ..dispatch.varying import EVERY_LINE
from ..errors import BackendError, UnsupportedError, did_you_mean
from ..frontend.call import flatten_call
from ..frontend.state import of_python
from ..frontend.tree import flatten
from ..graph.slots import Buffer, Param, Slot
from ..tracing.tape.origin import stands_for
from ._torch import dynamo
from ._torch.dynamo import restore_data_assignments
from ._torch.function_bodies import has_lost_marks, restore_grad_mode

log = logging.getLogger("foregrad")

# ---------------------------------------------------------------------------------------------- backend="foregrad"

_OPTIONS = {
    "backend": "a name from foregrad.list_backends(), a compiler, or a pair of compilers",
    "partition": '"default", "min_cut", "fused", a policy, or a partitioner',
    "memory_budget": "the most bytes that a step may have alive: an integer, '600 MiB', or a fraction from 0.0 to 1.0",
    "decompositions": "a table {operator: function}",
    "check": "check every stage's result (slow)",
    "on_unsupported": "'eager' runs a graph that can't be compiled as it is, and warns; 'raise' raises",
    "regions": "True compiles parts that repeat, as a model's layers, once each; 'auto' does where it pays; or False",
    "inductor": "settings of torch._inductor.config, in force while Inductor compiles: {name: value}",
}
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "on_unsupported": (lambda value: value in ("eager", "raise"), "'eager' or 'raise'"),
    "regions": (lambda value: value in (True, False, "auto"), "True, False or 'auto'"),
    "check": (lambda value: isinstance(value, bool), "True or False"),
    "decompositions": (
        lambda value: callable(value) or isinstance(value, Mapping),
        "a table {operator: function}, or a function that gives one",
    ),
    "inductor": (lambda value: isinstance(value, Mapping), "a table {name: value}"),
}
_MODES = {
    "reduce-overhead": {"triton.cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True},
    "max-autotune": {"max_autotune": True, "triton.cudagraphs": True},
}


def foregrad_backend(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any] | None = None, **others: Any
) -> Callable[..., Any]:
    """The function that `torch.compile(model, backend="foregrad", options={...}, mode=...)` calls with each graph.

    Raises `BackendError` for an unknown option or mode.
    """
    mode = others.pop("mode", None)
    if others:
        raise BackendError(f"torch.compile passed {_quoted(others)}; the backend `foregrad` does not take it")
    settings = _options(options or {}, mode)
    check = settings.pop("check", config.check)
    on_unsupported = settings.pop("on_unsupported", None) or config.on_unsupported
    with config.override(check=check, on_unsupported=on_unsupported):
        return compile_graph_module(gm, example_inputs, pipeline_for(**settings))


def _options(options: Mapping[str, Any], mode: str | None) -> dict[str, Any]:
    """Options as arguments of `pipeline_for`."""
    for name in options:
        if name not in _OPTIONS:
            listing = "".join(f"\n  {key}: {meaning}" for key, meaning in _OPTIONS.items())
            hint = did_you_mean(str(name), _OPTIONS)
            raise BackendError(f"the backend `foregrad` has no option `{name}`.{hint} There are:{listing}")
    for name, (fits, expected) in _VALUES.items():
        if options.get(name) is not None and not fits(options[name]):
            raise BackendError(f"the option `{name}` of the backend `foregrad` is {expected}, not {options[name]!r}")
    settings = dict(options)
    if settings.keys().isdisjoint(("memory_budget", "partition")) and (budget := activation_budget()) < 1:
        settings["memory_budget"] = budget
    inductor = dict(settings.pop("inductor", None) or {})
    if mode is not None:
        if mode not in _MODES:
            raise BackendError(f"the backend `foregrad` has no mode `{mode}`; there are default, {', '.join(_MODES)}")
        inductor = {**_MODES[mode], **inductor}
    if inductor:
        chosen = settings.get("backend", "auto")
        if chosen not in ("auto", "inductor"):
            raise BackendError(
                f"mode= and the option `inductor` are settings of Inductor, but the backend asked for is {chosen!r}"
            )
        settings["inductor_settings"] = inductor
    return settings


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# ------------------------------------------------------------------------------------------------- graphs of Dynamo's


def compile_graph_module(gm: fx.GraphModule, example_inputs: Sequence[Any], pipeline: Pipeline) -> Callable[..., Any]:
    """A graph of Dynamo's compiled as a function of its inputs, one by one."""
    dynamo.skip_foregrad()
    if dynamo.of_compiled_autograd(example_inputs):
        _tell_eager("belongs to compiled autograd (backwards compiled at their run)")
        return gm.forward
    if isinstance(gm, fx.GraphModule) and has_lost_marks(gm):
        _tell_eager("has lost the `mark_dirty` of a custom Function (not from PyTorch 2.13 on)")
        raise _skip()
    only_overrides = the_one("tensor subclasses").only_overrides
    of_class = [i for i, cls in enumerate(map(type, example_inputs)) if only_overrides(cls)]
    if of_class:  # the operators of the class are in the graph
        plain = _plain_at(of_class, example_inputs)
        if plain is not None:
            return _of_plain(of_class, compile_graph_module(gm, plain, pipeline), gm)
    compiler, is_graph = _shielded_compiler(pipeline.bw_compiler), dynamo.is_dynamo_graph(gm)
    pipeline = dataclasses.replace(pipeline, bw_compiler=compiler, of_dynamo=is_graph, first=None)
    function = returning_sequence(gm, 'torch.compile(backend="foregrad")')
    if isinstance(gm, fx.GraphModule):  # or any module, with `aot_autograd`
        of_python().note_settings(function, gm.graph)
        restore_grad_mode(gm)
        restore_data_assignments(gm)
        for part in gm.modules():  # its operators take functions as graphs
            learn_lines(part)
    if any(is_wrapper(v) or is_opaque_reference(v) for v in example_inputs):  # guards on metadata, on identity
        varies = None if any(map(_has_open_sizes, dynamo.known_inputs(gm, example_inputs))) else False
        dispatcher = Dispatcher(function, pipeline, config.value, type(gm).__name__, dynamic=varies)
        unused = [i for i in dynamo.unused_inputs(gm) if is_ragged(example_inputs[i])]
        return _without(unused, dispatcher) if unused else dispatcher
    call = flatten_call(function, tuple(example_inputs), {})
    open_sizes = dict(_open_sizes(call.paths, dynamo.known_inputs(gm, example_inputs)))
    has_floats = dynamo.takes_floats(gm)
    dynamic = None if open_sizes or has_floats else False
    # Dynamo guards the level: a graph captured under a level may be called with dual numbers each time.
    is_dual = engine.forward_ad._current_level >= 0
    if is_dual and dynamo.is_dynamo_graph(gm) and torch.is_grad_enabled() and _requires_grad(example_inputs):
        # A gradient that is taken outside, through the graph's results, must have a tangent as well. A node would take
        # it from saved dual numbers, and saved tensors have no tangents.
        return gm.forward
    guarded = is_dual or bool(open_sizes) or has_floats or dynamo.branches_on_values(gm)  # a graph for each way through
    dispatcher = Dispatcher(function, pipeline, config.value, type(gm).__name__, dynamic=dynamic, open_sizes=open_sizes)
    if has_floats:
        dispatcher.specializer.sizes.varied = EVERY_LINE
    if guarded:
        return dispatcher
    graph_inputs = dynamo.graph_inputs(gm, example_inputs)
    slots = {i: slot for i, slot in enumerate(map(_slot, graph_inputs)) if slot is not None}
    call = dataclasses.replace(call, slots=slots)
    try:
        forward, product = compile_unguarded(call, pipeline, type(gm).__name__, dispatcher)
    except SharedInputsError:
        return dispatcher
    except UnsupportedError as error:
        if config.on_unsupported == "raise":
            raise
        dispatcher.refusals.tell(dispatcher.refusals.note(tuple(example_inputs), {}, error))
        # In the graph, buffers are arguments of a checkpointed part, and a write to a buffer there raises.
        if dynamo.has_checkpoints(gm):
            raise _skip() from None
        return gm.forward
    signature = product.captured.joint.signature
    written = {signature.inputs[update.input].argument for update in signature.updates}
    may_share = [i for i, value in enumerate(example_inputs) if isinstance(value, torch.Tensor)]
    may_share = [i for i in may_share if i in written or graph_inputs[i].kind == "argument"]
    if written and len(may_share) > 1:
        forward = _unless(
            lambda args: len({storage_key(args[i]) for i in may_share}) < len(may_share), dispatcher, forward
        )
    if _has_fakes(example_inputs):  # some first run it on fakes to learn its outputs' layouts, as DDP's splitter does
        forward = _unless(_has_fakes, gm, forward)
    return forward


def _skip() -> Exception:
    _, skip = dynamo.restarts()
    return skip("the frame runs eagerly: its graph and its code have different effects")


def _tell_eager(reason: str) -> None:
    """Warn once that a graph runs eagerly, or raise."""
    message = f"a graph of Dynamo's {reason}: foregrad does not compile it."
    if config.on_unsupported == "raise":
        raise UnsupportedError(message)
    _once[reason].warn(f"{message} Graphs like this run eagerly: the results are eager's, only not compiled.")


_once: dict[str, OneWarning] = defaultdict(OneWarning)


def _plain_at(positions: Sequence[int], inputs: Sequence[Any]) -> list[Any] | None:
    """Inputs with plain tensors for tensors of classes with `__torch_function__` alone; None if one has none."""
    plain = list(inputs)
    for index in positions:
        plain[index] = the_one("tensor subclasses").plain_alias(plain[index])
    return None if any(plain[index] is None for index in positions) else plain


def _of_plain(positions: Sequence[int], forward: Callable[..., Any], gm: fx.GraphModule) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        plain = _plain_at(positions, args)
        return gm(*args) if plain is None else forward(*plain)

    return call


def _without(unused: Sequence[int], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with None for inputs that its graph does not use: ragged sizes, different in each batch."""

    def call(*args: Any) -> Any:
        inputs = list(args)
        for index in unused:
            inputs[index] = None
        return function(*inputs)

    return call


def _requires_grad(inputs: Sequence[Any]) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs)


def learn_lines(graph: torch.nn.Module) -> None:
    """Let the nodes and errors of later captures name the user's lines behind a graph's generated code."""
    if (lines := dynamo.source_lines(graph)) is not None:
        stands_for(*lines)


def _shielded_compiler(compiler: Callable[..., Any]) -> Callable[..., Any]:
    """A backward's compiler that Dynamo traces neither itself nor by its result.

    A backward may be compiled, and run, in code that Dynamo traces.
    """
    quiet = dynamo.shielded(compiler, "foregrad compiles a backward graph")

    @functools.wraps(compiler)
    def compile_backward(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        result = quiet(gm, inputs)
        if isinstance(result, fx.GraphModule) or not callable(result):
            return result
        silent = dynamo.shielded(result, "a backward graph compiled by foregrad")
        for name in ("_boxed_call", "returns_list"):
            if hasattr(result, name):
                setattr(silent, name, getattr(result, name))
        return silent

    return compile_backward


def _slot(graph_input: dynamo.GraphInput) -> Slot | None:
    """The slot of an input that keeps its address: a parameter, a buffer, the state of a compiled optimizer."""
    if graph_input.kind == "argument" and not graph_input.is_static:
        return None
    return (Param if graph_input.kind == "parameter" else Buffer)(graph_input.source or graph_input.name)


def _open_sizes(paths: Sequence[str], inputs: Sequence[Any]) -> Iterator[tuple[str, frozenset[int]]]:
    """(path, dimensions) of each input that Dynamo left open; a number has none."""
    for path, value in zip(paths, inputs, strict=True):
        if isinstance(value, torch.Tensor):
            sizes: Sequence[Any] = value.shape
            dims = frozenset(dim for dim, size in enumerate(sizes) if isinstance(size, torch.SymInt))
            strides: Sequence[Any] = value.stride()
            if dims or any(isinstance(stride, torch.SymInt) for stride in strides):
                yield path, dims
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            yield path, frozenset()


def _has_open_sizes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def _has_fakes(args: Sequence[Any]) -> bool:
    return any(isinstance(value, FakeTensor) for value in args)


def _unless(
    is_other: Callable[[Sequence[Any]], bool], other: Callable[..., Any], forward: Callable[..., Any]
) -> Callable[..., Any]:
    """`forward`, or `other` for the arguments that are of the other kind."""

    def run(*args: Any) -> Any:
        return other(*args) if is_other(args) else forward(*args)

    return run


# ------------------------------------------------------------------------------------------------------ aot_autograd


# Arguments of `aot_module_simplified` that decide nothing here.
_IGNORED = {
    "boxed_forward_device_index",
    "compile_region_name",
    "compiler_config_extra",
    "cudagraphs",
    "hasher_type",
    "ignore_shape_env",
}


class AotAutograd:
    """A backend for `torch.compile` made of compilers: `aot_autograd(fw_compiler=..., bw_compiler=...)`.

    The arguments are `aot_module_simplified`'s; `decompositions` may also be a function that gives the table. With
    `nop` as forward compiler, every stage is checked. Inputs in containers are flattened.

    Examples:
        >>> import torch, foregrad
        >>> backend = foregrad.AotAutograd(fw_compiler=foregrad.nop)
        >>> torch.compile(lambda x: x * 2, backend=backend)(torch.ones(2))
        tensor([2., 2.])
    """

    def __init__(self, **kwargs: Any) -> None:
        self.__name__ = "compiler_fn"
        self.kwargs = kwargs

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        if kwargs:
            log.warning("a backend made by aot_autograd takes no options; %s ignored", _quoted(kwargs))
        if any(isinstance(value, (list, tuple, dict)) for value in example_inputs):
            return self._flattened(gm, example_inputs)
        counters = dynamo.compiler_counters()
        counters["total"] += 1
        settings = {name: value for name, value in self.kwargs.items() if name not in _IGNORED}
        refuse_unsupported(settings.pop("static_argnums", None), settings.pop("disable_functionalization", False))
        checked, passes = settings.get("fw_compiler") is nop, settings.pop("pre_grad_passes", None)
        try:
            gm = gm if passes is None else passes(gm, example_inputs)
            with config.override(check=True) if checked else contextlib.nullcontext():
                compiled = compile_graph_module(gm, example_inputs, make_pipeline(**settings))
        except dynamo.restarts():
            raise
        except Exception:
            counters["not_ok"] += 1
            raise
        counters["ok"] += 1
        return dynamo.shielded(compiled, "a graph compiled by foregrad")

    def _flattened(self, gm: Callable[..., Any], example_inputs: Sequence[Any]) -> Callable[..., Any]:
        leaves, tree = flatten(tuple(example_inputs))

        class Flat(torch.nn.Module):
            def forward(self, *flat: Any) -> Any:
                return gm(*tree.unflatten(list(flat)))

        compiled = self(Flat(), leaves)  # type: ignore[arg-type]

        def call(*args: Any) -> Any:
            flat, structure = flatten(args)
            if structure != tree:
                raise BackendError("the structure of the inputs' containers differs from the compiled call's")
            del args
            return compiled(*flat)

        return call


def aot_autograd(**kwargs: Any) -> AotAutograd:
    """A backend for `torch.compile` from `fw_compiler=`, `bw_compiler=`, ...; see `AotAutograd`.

    Examples:
        >>> import torch, foregrad
        >>> backend = foregrad.aot_autograd(fw_compiler=foregrad.nop)
        >>> torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
        tensor([2., 2.])
    """
    return AotAutograd(**kwargs)


# --------------------------------------------------------------------------------------------- helpers for backends


def fake_tensor_unsupported(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator for a backend `(gm, inputs, **kwargs)` that needs real tensors: fakes become zeros of their layout.

    Examples:
        >>> import torch, foregrad
        >>> @foregrad.fake_tensor_unsupported
        ... def backend(gm, inputs):
        ...     print(type(inputs[0]).__name__)
        ...     return gm.forward
        >>> torch.compile(lambda x: x - 1, backend=backend)(torch.ones(2))
        Tensor
        tensor([0., 0.])
    """

    @functools.wraps(fn)
    def backend(model: Any, inputs: Sequence[Any], **kwargs: Any) -> Any:
        with engine.all_modes_off():
            return fn(model, dynamo.real_inputs(inputs), **kwargs)

    return backend


def device_from_inputs(example_inputs: Iterable[Any]) -> torch.device:
    """The device of the first input that has one; the CPU if none has.

    Examples:
        >>> import torch, foregrad
        >>> foregrad.device_from_inputs([3, torch.ones(2)])
        device(type='cpu')
    """
    return next((value.device for value in example_inputs if hasattr(value, "device")), torch.device("cpu"))


def dtype_from_inputs(example_inputs: Iterable[Any]) -> torch.dtype:
    """The dtype of the first input that has one; float32 if none has.

    Examples:
        >>> import torch, foregrad
        >>> foregrad.dtype_from_inputs([3, torch.ones(2, dtype=torch.float64)])
        torch.float64
    """
    return next((value.dtype for value in example_inputs if hasattr(value, "dtype")), torch.float32)
