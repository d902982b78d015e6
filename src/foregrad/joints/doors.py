"""Capture a module's joint graph with descriptors, and compile such a graph: two doors with PyTorch's parameters."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from .._torch import engine
from .._torch.descriptors import joint_pass
from .._torch.fakes import FakeTensor, fake_mode_of
from .._torch.graphs import trace_artifact
from .._torch.nested import tensors_in
from ..annexes import the_one
from ..aot import make_pipeline, named_sources
from ..backends.boxed import nop
from ..config import config
from ..dispatch.pipeline import Pipeline
from ..errors import UnsupportedError
from ..extend import CompileStage
from ..frontend.call import FlatCall, flatten_call
from ..frontend.openings import GradientKindError
from ..graph.effect_log import CheckFailed
from ..graph.joint import JointGraph, Partitioned
from ..identity import attributed
from ..interrupts import held
from ..partitioners import default_partition
from ..phases import compiling, phase
from ..runtime.compiled import Compiled
from ..tracing.capture import Captured, capture_call
from ..tracing.parts import Options
from ..tracing.tape.collection import paused_collection
from ._torch import flat_arguments, mapped_leaves, traced_as_it_runs
from .back import joint_of
from .calls import rendered_call
from .exports import inexpressible
from .graph import written_graph
from .held import HeldCapture, JointWithDescriptors
from .layout import layout_of
from .writes import with_effects_inside, with_mutations_inside

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def aot_export_joint_with_descriptors(
    stack: contextlib.ExitStack,
    mod: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    *,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    keep_inference_input_mutations: bool = False,
    ignore_shape_env: bool = False,
    disable_functionalization: bool = False,
    _record_nn_module_stack: bool = False,
    _disable_torch_fn_metadata_mode: bool = False,
) -> JointWithDescriptors:
    """Capture the forward and backward of a module as one graph to be edited.

    The inputs are parameters, buffers and arguments, used or not, then tangents. The outputs are new values of tensors
    that the module writes to, its results, then a gradient or None for each input of the forward. `meta["desc"]` of
    each placeholder and of the output node is its meaning, see `foregrad.descriptors`. Parameters and arguments may be
    fake tensors, parameters also on the meta device. If no gradient is needed, the graph has the forward alone.

    Args:
        stack: the graph's fake mode is active until you leave the stack. Leave it before you call the compiled
            function.
        args, kwargs: example arguments, nested as the module takes them.
        decompositions: `{operator: function}`, used while capturing.
        keep_inference_input_mutations: a graph without gradients writes to its inputs by `copy_`.
        ignore_shape_env: sizes of the arguments are plain numbers.
        disable_functionalization: refused (`UnsupportedError`): graphs are functional.

    Raises:
        UnsupportedError: one graph can't express the module: it branches on values of tensors, writes to Python
            objects, or writes to a tensor that shares memory with a second input.

    Examples:
        >>> import contextlib, torch, foregrad
        >>> model = torch.nn.Linear(3, 2)
        >>> with contextlib.ExitStack() as stack:
        ...     jd = foregrad.aot_export_joint_with_descriptors(stack, model, (torch.ones(1, 3),))
        ...     run = foregrad.aot_compile_joint_with_descriptors(jd)
        >>> run(*model.parameters(), torch.ones(1, 3)).shape
        torch.Size([1, 2])
    """
    if disable_functionalization:
        raise UnsupportedError("graphs are functional: pass disable_functionalization=False")
    mode = fake_mode_of([*mod.parameters(), *mod.buffers(), *tensors_in((args, kwargs))])
    args, kwargs = _arguments(mode, tuple(args), dict(kwargs or {}), plain=ignore_shape_env)
    call = _call(mod, args, kwargs)
    name = type(mod).__name__
    grad_enabled, autocast = torch.is_grad_enabled(), engine.is_any_autocast_enabled()
    options = Options(name, decompositions or {}, higher_order=False, fake_mode=mode, keeps_branches=True)
    captured = _captured(mod, call, options)
    signature = captured.joint.signature
    inside = keep_inference_input_mutations
    with captured.joint.fake_mode:
        layout = layout_of(mod, call, signature, captured.wrappers, writes_inside=inside)
    module = written_graph(captured.joint, layout, writes_inside=inside)
    stack.enter_context(captured.joint.fake_mode)
    held_ = HeldCapture(captured.joint, layout, inside, grad_enabled, autocast, call.function)
    return JointWithDescriptors(module, held_)


def aot_compile_joint_with_descriptors(
    jd: JointWithDescriptors,
    *,
    partition_fn: Callable[..., Any] = default_partition,
    fw_compiler: Compiler = nop,
    bw_compiler: Compiler | None = nop,
    serializable: bool = False,
) -> Callable[..., Any]:
    """Split and compile a joint graph, as it was captured or edited, both halves at once.

    Call the result as `fn(*params, *buffers, *args, **kwargs)`, or with one flat list of these values, parameters and
    buffers in the order of `jd.params_spec` and `jd.buffers_spec`. The result checks nothing: a call must have the
    shapes and dtypes of the graph. It has no second derivatives. Code under `torch.compile` may call it.

    Args:
        partition_fn: splits the graph, as in `aot_function`.
        fw_compiler, bw_compiler: take (graph, example inputs), and return a callable. None: `fw_compiler` for both.
        serializable: the result has an attribute `artifact`, a `foregrad.Artifact` of the graphs that can be saved. The
            loaded module takes the arguments of the result.

    Raises:
        ValueError: the edited graph has a different number of inputs or outputs.

    Examples:
        >>> import contextlib, torch, foregrad
        >>> model, x = torch.nn.Linear(3, 2), torch.ones(1, 3)
        >>> with contextlib.ExitStack() as stack:
        ...     jd = foregrad.aot_export_joint_with_descriptors(stack, model, (x,))
        ...     run = foregrad.aot_compile_joint_with_descriptors(jd)
        >>> torch.equal(run([*model.parameters(), x]), model(x))
        True
    """
    pipeline = make_pipeline(fw_compiler, bw_compiler, partition_fn)
    captured = jd.captured
    joint = joint_of(jd)
    if (custom := joint_pass()) is not None:
        joint = dataclasses.replace(joint, module=custom(joint.module, joint.example_inputs()))
    with torch.set_grad_enabled(captured.grad_enabled), held, paused_collection(), compiling(joint.name):
        halves = _split(pipeline, joint, writes_inside=captured.writes_inside)
        artifact = None
        if serializable:
            artifact = the_one("artifacts of joint graphs")(jd, halves)
        compiled = dataclasses.replace(
            _compiled(pipeline, halves),
            disable_autocast=captured.autocast,
            needs_grad_mode=not joint.signature.is_inference and not captured.grad_enabled,
        )
        run = rendered_call(joint, compiled, captured.layout)
    spec = jd.in_spec

    def call_joint(*args: Any, **kwargs: Any) -> Any:
        return run(flat_arguments(args, kwargs, spec))

    call_joint.__name__ = call_joint.__qualname__ = joint.name
    result = traced_as_it_runs(call_joint)
    return result if artifact is None else attributed(result, artifact=artifact)


def _split(pipeline: Pipeline, joint: JointGraph, *, writes_inside: bool) -> Partitioned:
    with phase("partition"):
        parts: Partitioned = pipeline.split(joint)
    pipeline.tell(CompileStage("partition", joint.name, joint, parts, 0.0, joint, compiler=pipeline.partition))
    return with_mutations_inside(parts) if writes_inside and joint.signature.is_inference else parts


def _compiled(pipeline: Pipeline, halves: Partitioned) -> Compiled:
    # Without the C++ part: a trace of code that calls the result goes through its operators.
    compiled = pipeline.compile(halves, None, dataclasses.replace(config.value, native=False), may_retry=False)
    if not halves.joint.signature.is_inference:
        compiled.make_backward()
    return compiled


def _call(mod: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
    for part in mod.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        if any(getattr(node.target, "__name__", "") == "local_map_hop" for node in part.graph.nodes):
            from . import local_maps  # noqa: F401 - a subject of captures from now on
        the_one("lines of Dynamo's graphs")(part)

    self = mod  # paths of modules begin with this name, as in graphs of `aot_module`

    def call_module(*args: Any, **kwargs: Any) -> Any:
        return self(*args, **kwargs)

    return flatten_call(call_module, args, kwargs)


def _arguments(
    mode: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, plain: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as fakes of a mode, if there is one."""
    if mode is None:
        return args, kwargs

    def fake(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):
            return mode.from_tensor(value, static_shapes=plain or mode.shape_env is None or None)
        return value

    given: tuple[tuple[Any, ...], dict[str, Any]] = mapped_leaves(fake, (args, kwargs))
    return given


def _captured(mod: nn.Module, call: FlatCall, options: Options) -> Captured:
    lifted = [(source.get(), source) for source in named_sources(mod)]
    name = options.name
    try:
        with phase("capture"):
            captured = _once_kinds_are_known(lambda: capture_call(call, options, lifted=lifted))
    except CheckFailed as found:
        raise found.error from None
    joint = captured.joint
    if joint.error is not None:
        raise joint.error
    trace_artifact("foregrad_joint_with_descriptors", lambda: str(joint))
    joint = with_effects_inside(joint)
    what = inexpressible(joint.signature, checks=bool(joint.signature.stops.checks))
    if what:
        raise UnsupportedError(f"`{name}` can't be a single graph with descriptors: it {what}")
    return dataclasses.replace(captured, joint=joint)


def _once_kinds_are_known(capture: Callable[[], Captured]) -> Captured:
    """A capture, begun again while it learns what gradients of tensor subclasses are like."""
    for _ in range(_MOST_KINDS):
        with contextlib.suppress(GradientKindError):
            return capture()
    return capture()


_MOST_KINDS = 1000  # each is learned once
