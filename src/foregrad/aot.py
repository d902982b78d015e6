"""The entry points of AOTAutograd, with its names and parameters: code written for them needs one import changed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from ._torch.fakes import FakeTensor, FakeTensorMode, NewFakeMode, fake_mode_of
from ._torch.graph_tools import activation_budget
from ._torch.graphs import make_code
from ._torch.ops import is_opaque, is_opaque_reference
from ._torch.symbols import new_symbolic_integer, shape_env, symbolic_context_of
from ._torch.tensors import is_wrapper_subclass
from .annexes import the_one
from .api import compile_function, compile_module
from .backends.writes_inside import writing_inside
from .config import config
from .dispatch.dispatcher import Dispatcher
from .dispatch.fallbacks import Refusals
from .dispatch.guard_list import offset_dependent, size_reads
from .dispatch.module import Recipe
from .dispatch.pipeline import Pipeline, Product
from .errors import UnsupportedError, UnsupportedSideEffectError, UnsupportedTensorError
from .extend import module_behind
from .frontend.call import FlatCall, flatten_call
from .frontend.openings import FoundOpenings, Opening, opener
from .frontend.source import Source
from .frontend.tree import Tree
from .graph.effect_log import CheckFailed
from .graph.signature import ConstantOutput, PartOf, Signature
from .graph.slots import Buffer, Param
from .graph.source import Names, compile_source, unpacked
from .identity import attributed
from .partitioners import default_partition, min_cut_rematerialization_partition
from .runtime.decisions import Stop
from .runtime.lines import LineWriter
from .runtime.render import RunLines
from .tracing.capture import Captured

Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


class SharedInputsError(UnsupportedError):
    """Inputs of a function without guards share memory, and one is written to."""


def refuse_unsupported(static_argnums: object = None, disable_functionalization: bool = False) -> None:
    """Raise for arguments of AOTAutograd's that are given and can't be granted."""
    if static_argnums is not None:
        raise RuntimeError("static_argnums is not supported: leave it out, plain values are guarded by themselves.")
    if disable_functionalization:
        raise UnsupportedError("disable_functionalization=True is not supported: graphs are functional. Leave it out.")


def make_pipeline(
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Callable[..., Any] = default_partition,
    decompositions: Any = None,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    lifted: Sequence[Source] = (),
) -> Pipeline:
    """The pipeline for the arguments of `aot_module_simplified`; `decompositions` may be a function giving a table."""
    inference_compiler = inference_compiler or fw_compiler
    if partition_fn is min_cut_rematerialization_partition:
        partition_fn = _within_activation_budget
    if keep_inference_input_mutations:
        inference_compiler = writing_inside(inference_compiler)
    return Pipeline(fw_compiler, bw_compiler or fw_compiler, inference_compiler, partition_fn, decompositions, lifted)


def _within_activation_budget(
    joint: fx.GraphModule, inputs: object, **facts: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The min-cut partition, within `torch._functorch.config.activation_memory_budget` if that is set."""
    budget = activation_budget()
    if budget >= 1:
        return min_cut_rematerialization_partition(joint, inputs, **facts)
    halves: tuple[fx.GraphModule, fx.GraphModule] = the_one("memory budgets").saving_partition(
        joint, inputs, fraction=budget, **facts
    )
    return halves


def aot_function(
    fn: Callable[..., object],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Callable[..., object] = default_partition,
    decompositions: Mapping[object, Callable[..., object]] | None = None,
    num_params_buffers: int = 0,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    *,
    dynamic: bool = False,
    enable_log: bool = True,
    disable_functionalization: bool = False,
    _disable_torch_fn_metadata_mode: bool = False,
    hasher_type: object = None,
    static_argnums: object = None,
) -> Callable[..., Any]:
    """Compile `fn`: its forward with `fw_compiler`, its backward with `bw_compiler` (by default the same compiler).

    A compiler takes (fx.GraphModule of ATen operators, example inputs) and returns a callable, called with a list if
    `make_boxed_func` marked it. Unlike with PyTorch's function, guards check each call, a call that fits no graph is
    captured again, and closed-over tensors and parameters are inputs. A call that can't be compiled raises an
    `Unsupported...Error`. Also called `compiled_function`.

    Args:
        fn: takes and returns tensors and plain values in nested containers.
        partition_fn: splits the joint graph, see `default_partition`.
        decompositions: operators to replace while capturing.
        num_params_buffers: accepted; parameters are recognised without it.
        keep_inference_input_mutations: without gradients, leave the writes to inputs in the graph as `copy_`.
        inference_compiler: for calls without gradients; by default `fw_compiler`.
        dynamic: whether the sizes of arguments are symbolic from the beginning.
        enable_log, _disable_torch_fn_metadata_mode, hasher_type: accepted and ignored.
        disable_functionalization, static_argnums: refused, if given (`UnsupportedError`, `RuntimeError`).

    Examples:
        >>> import torch, foregrad
        >>> def compiler(gm, example_inputs):
        ...     print(len(example_inputs), "inputs")
        ...     return gm
        >>> sine = foregrad.aot_function(lambda x: x.sin(), fw_compiler=compiler)
        >>> x = torch.ones(2, requires_grad=True)
        >>> out = sine(x)
        1 inputs
        >>> out.sum().backward()
        2 inputs
    """
    del num_params_buffers, hasher_type, enable_log, _disable_torch_fn_metadata_mode
    refuse_unsupported(static_argnums, disable_functionalization)
    pipeline = make_pipeline(
        fw_compiler, bw_compiler, partition_fn, decompositions, keep_inference_input_mutations, inference_compiler
    )
    return compile_function(fn, pipeline, dynamic=dynamic, on_unsupported="raise")


def aot_module(mod: nn.Module, *args: object, **kwargs: object) -> nn.Module:
    """Compile a module; `args` and `kwargs` as for `aot_function`. Also called `compiled_module`.

    The result is a module of its class that shares the parameters and buffers, as from `foregrad.compile`; a
    copy has its own. The original is `.orig_module` of the result.

    Examples:
        >>> import torch, foregrad
        >>> linear = torch.nn.Linear(3, 2)
        >>> compiled = foregrad.aot_module(linear, fw_compiler=foregrad.nop)
        >>> compiled(torch.ones(1, 3)).sum().backward()
        >>> linear.bias.grad
        tensor([1., 1.])
    """
    settings = inspect.signature(aot_function).bind_partial(None, *args, **kwargs).arguments
    del settings["fn"]
    return compile_aot_module(mod, settings, functools.partial(aot_module, **settings))


_NOT_OF_THE_PIPELINE = ("fn", "num_params_buffers", "hasher_type", "enable_log", "_disable_torch_fn_metadata_mode")


def compile_aot_module(mod: nn.Module, settings: Mapping[str, Any], recipe: Recipe) -> nn.Module:
    """`mod` compiled with `aot_function`'s arguments in `settings`; `recipe` compiles its copies."""
    bound = inspect.signature(aot_function).bind(mod, **settings)
    bound.apply_defaults()
    settings = dict(bound.arguments)
    dynamic = settings.pop("dynamic")
    refuse_unsupported(settings.pop("static_argnums"), settings.pop("disable_functionalization"))
    for name in _NOT_OF_THE_PIPELINE:
        del settings[name]
    pipeline = make_pipeline(**settings, lifted=named_sources(mod))
    compiled = compile_module(mod, pipeline, recipe, dynamic=dynamic, on_unsupported="raise")
    if not hasattr(mod, "orig_module"):
        attributed(type(compiled), orig_module=property(module_behind))
    return compiled


def named_sources(module: nn.Module) -> list[Source]:
    """All parameters, then all buffers, each under the first name that it has."""
    return [
        Source(slot(name), module, _way(name, table))
        for slot, table, named in (
            (Param, "_parameters", module.named_parameters()),
            (Buffer, "_buffers", module.named_buffers()),
        )
        for name, _ in named
    ]


def _way(name: str, table: str) -> tuple[tuple[str, Any], ...]:
    *parts, last = name.split(".")
    steps = [step for part in parts for step in (("attr", "_modules"), ("item", part))]
    return (*steps, ("attr", table), ("item", last))


def aot_module_simplified(
    mod: nn.Module,
    args: Sequence[object],
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    partition_fn: Callable[..., object] = default_partition,
    decompositions: Mapping[object, Callable[..., object]] | None = None,
    keep_inference_input_mutations: bool = False,
    inference_compiler: Compiler | None = None,
    compiler_config_extra: object = None,
    ignore_shape_env: bool = False,
    disable_functionalization: bool = False,
    pre_grad_passes: Callable[..., Any] | None = None,
    compile_region_name: str | None = None,
    *,
    cudagraphs: object = None,
    boxed_forward_device_index: object = None,
    hasher_type: object = None,
    static_argnums: object = None,
) -> Callable[..., Any]:
    """Compile `mod` at once for example arguments (real or fake), without guards: for front ends with their own guards.

    `mod` takes tensors and numbers without nesting and must return a tuple or list of tensors. Parameters and
    buffers are read from the module on each call. A tensor with a different `storage_offset()` makes a new
    graph, if the graph depends on the offset. Where inputs share memory and one is written, calls are guarded, and the
    first call compiles.

    `pre_grad_passes(mod, args)` gives the module to capture. `compile_region_name` is the graph's name in messages.
    `compiler_config_extra`, `cudagraphs`, `boxed_forward_device_index`, `ignore_shape_env` and `hasher_type` are
    accepted and ignored: sizes of real example arguments are plain numbers anyway. `disable_functionalization` and
    `static_argnums` are refused, if given (`UnsupportedError`, `RuntimeError`).

    Examples:
        >>> import torch, foregrad
        >>> class Double(torch.nn.Module):
        ...     def forward(self, x):
        ...         return (x * 2,)
        >>> run = foregrad.aot_module_simplified(Double(), (torch.ones(2),), fw_compiler=foregrad.nop)
        >>> run(torch.ones(2))
        (tensor([2., 2.]),)
    """
    refuse_unsupported(static_argnums, disable_functionalization)
    del compiler_config_extra, cudagraphs, boxed_forward_device_index, ignore_shape_env, hasher_type
    if pre_grad_passes is not None:
        mod = pre_grad_passes(mod, args)
    make_code(mod)
    pipeline = make_pipeline(
        fw_compiler,
        bw_compiler,
        partition_fn,
        decompositions,
        keep_inference_input_mutations,
        inference_compiler,
        lifted=named_sources(mod),
    )
    function = returning_sequence(mod, "aot_module_simplified")
    name = compile_region_name or type(mod).__name__
    forward = None
    if not any(map(is_opaque_reference, args)):
        with contextlib.suppress(SharedInputsError):
            forward, _ = compile_unguarded(flatten_call(function, tuple(args), {}), pipeline, name)
    if forward is None:  # their identity, and their shared memory, are guarded
        dispatcher = Dispatcher(function, pipeline, config.value, name, on_unsupported="raise")
        forward = functools.partial(Dispatcher.__call__, dispatcher)
    of_module = "zero_grad", "named_parameters", "named_buffers"
    attributed(forward, **{name: getattr(mod, name) for name in of_module})
    return forward


def _in_the_order_of_2_11(function: Callable[..., object]) -> Callable[..., Any]:
    """`function` with the positional parameters of PyTorch 2.11."""
    signature = inspect.signature(function)
    ahead = [*signature.parameters][: list(signature.parameters).index("compiler_config_extra")]
    names = [*ahead, "cudagraphs", "boxed_forward_device_index", "ignore_shape_env", "disable_functionalization"]
    positional = [signature.parameters[n].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    named = [p.replace(kind=p.KEYWORD_ONLY) for name, p in signature.parameters.items() if name not in names]
    signature = signature.replace(parameters=[*positional, *named])

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> Any:
        return function(**signature.bind(*args, **kwargs).arguments)

    return attributed(call, __signature__=signature)


if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
    aot_module_simplified = _in_the_order_of_2_11(aot_module_simplified)


def returning_sequence(mod: Callable[..., object], entry_point: str) -> Callable[..., Any]:
    """`mod` with a check that its result is a tuple or list, as front ends with their own guards promise."""

    def call_module(*inner: object) -> object:
        out = mod(*inner)
        if not isinstance(out, (tuple, list)):
            raise RuntimeError(
                f"{entry_point} needs a module that returns a tuple or list, {type(mod).__name__} returned a "
                f"{type(out).__name__}. Return a tuple, or use aot_module."
            )
        return out

    return call_module


def compile_unguarded(
    call: FlatCall, pipeline: Pipeline, name: str, guarded: Dispatcher | None = None
) -> tuple[Callable[..., Any], Product]:
    """(a function of the call's leaves, one by one, without guards; the pipeline's product).

    `guarded` compiles calls with a tensor that begins elsewhere in its memory, where the graph depends on that: front
    ends do not guard it.
    """
    try:
        product = pipeline.build(call, name, config.value)
    except CheckFailed as failure:
        raise failure.error from None
    signature = product.captured.joint.signature
    _check_counters(signature, name)
    names = Names(["args", "call_module", "again", "error", "fault", "forward"])
    inputs = _UnguardedInputs(call, product.captured, names)
    reads, symbols = size_reads(signature, inputs.variables, names)
    lines, globals_ = inputs.lines + reads, inputs.globals
    offsets = {inputs.variables[i]: signature.inputs[i].spec.offset for i in offset_dependent(product.captured.joint)}
    if offsets:
        other = names.fresh("guarded")
        globals_[other] = guarded or Dispatcher(call.function, pipeline, config.value, name, on_unsupported="raise")
        differs = " or ".join(f"{variable}.storage_offset() != {offset}" for variable, offset in offsets.items())
        lines += [f"if {differs}:", f"    return {other}(*args)"]
    eagerly = "return call_module(*args)"
    stop = Stop(eagerly, eagerly, "return again(args, {}, fault)")
    run = RunLines(product.compiled, inputs.variables, names, stop, symbols, inputs.wrappers)
    body = "\n".join("    " + line for line in (*lines, *run.lines))
    refusals = Refusals(call.function, name, "raise") if guarded is None else guarded.refusals
    globals_ |= run.globals | {"call_module": call.function, "again": refusals.again}
    forward = compile_source(f"def forward(*args):\n{body}\n", "forward", globals_, label=name)
    return forward, product


def _check_counters(signature: Signature, name: str) -> None:
    """Raise `UnsupportedSideEffectError` for a write of a number: without guards every call would write one number."""
    ends = list(itertools.accumulate((child.size for child in signature.structure.written_spec.children), initial=0))
    written = signature.structure.outputs[signature.structure.output_spec.size :]
    for write in signature.effects.python_writes:
        at = getattr(write, "value", None) if write.counts else None
        leaves = () if at is None else written[ends[at] : ends[at + 1]]
        if any(isinstance(leaf, ConstantOutput) and type(leaf.value) in (int, float) for leaf in leaves):
            raise UnsupportedSideEffectError(
                f"`{name}` writes {write.path}, a number that changes in each call; a function without guards can't "
                "repeat the write. Count outside, in a tensor, or compile it with aot_module or aot_function."
            )


class _UnguardedInputs(LineWriter):
    """`variables` of the inputs, the `lines` that set them, the lines' `globals`, and the variables of wrappers."""

    def __init__(self, call: FlatCall, captured: Captured, names: Names) -> None:
        super().__init__(names)
        self.wrapper_specs = captured.wrappers or FoundOpenings((), {})
        self.wrappers: list[str] = []
        leaves = self._leaves(call.tree.children[0].children)
        parts = [self._parts(self._read(w.source), w.spec, w.gradient) for w in self.wrapper_specs.reached]
        self.variables = []
        for info in captured.joint.signature.inputs:
            if info.argument is not None:
                self.variables.append(leaves[info.argument])
            elif isinstance(info.source, PartOf):
                self.variables.append(parts[info.source.wrapper][info.source.part])
            elif isinstance(info.source, Source):
                self.variables.append(self._read(info.source))
            else:
                raise SharedInputsError(
                    "aot_module_simplified with inputs that share memory and are written to: use aot_function"
                )

    def _leaves(self, trees: Sequence[Tree]) -> list[str]:
        """A variable for each plain tensor and number."""
        arguments = [self.names.fresh(f"args_{i}") for i in range(len(trees))]
        self.lines += [f"{unpacked(arguments)}args"] if arguments else []
        leaves: list[str] = []
        for name, tree in zip(arguments, trees, strict=True):
            spec, gradient = self.wrapper_specs.arguments.get(len(leaves), (tree.context, None))
            leaves += self._parts(name, spec, gradient) if tree.kind == "wrapper" else [name]
        return leaves

    def _parts(self, name: str, spec: Opening, gradient: Opening | None) -> list[str]:
        self.wrappers.append(name)
        parts = [self.names.fresh(f"{name}_{i}") for i in range(spec.count)]
        self.lines.append(f"{unpacked(parts)}{self.bind('unwrap', opener().unwrapping(spec, gradient))}({name})")
        return parts

    def _read(self, source: Source) -> str:
        name, root = self.names.fresh("param"), self.bind("root", source.root)
        self.lines.append(f"{name} = {source.expression(root, self.bind)}")
        return name


compiled_function = aot_function
compiled_module = aot_module


# -------------------------------------------------------------------- fakes
# What comes in from a front end, made into fakes: `construct_fake_mode`, `process_inputs`.
#
# The names and parameters are AOTAutograd's. The fakes may be given to `aot_module_simplified`, whose graphs are then
# right for every call that meets the conditions in the mode's `ShapeEnv`; the front end checks these conditions.


@dataclasses.dataclass(frozen=True, slots=True)
class AOTConfig:
    """The settings that the functions here read; any object with the attributes will do.

    num_params_buffers: how many of the inputs, from the first, are parameters and buffers: their sizes are static.
    is_export: Python integers are parts of the program, not inputs.
    dynamic_shapes: a fake mode made here has a `ShapeEnv`.
    static_weight_shapes: False lets the sizes of parameters and buffers be symbolic as well.
    """

    num_params_buffers: int = 0
    is_export: bool = False
    dynamic_shapes: bool = False
    static_weight_shapes: bool = True


class FakifiedFlatArgs(list[Any]):
    """Flat inputs, with a fake for every tensor."""


def construct_fake_mode(flat_args: Sequence[object], aot_config: Any) -> tuple[FakeTensorMode, object]:
    """A fake mode and its `ShapeEnv` or None: of the given fakes, else of the running trace, else a new mode.

    Examples:
        >>> import torch, foregrad
        >>> from foregrad.aot import AOTConfig
        >>> mode, symbols = foregrad.construct_fake_mode([torch.ones(2)], AOTConfig())
        >>> symbols is None
        True
    """
    mode = fake_mode_of(list(flat_args))
    if mode is None:
        mode = NewFakeMode(shape_env=shape_env() if aot_config.dynamic_shapes else None)
    return mode, mode.shape_env


def process_inputs(
    flat_args: Sequence[object],
    aot_config: object,
    fake_mode: FakeTensorMode,
    shape_env: object,
    ignore_shape_env: bool = False,
) -> FakifiedFlatArgs:
    """A fake of `fake_mode` for each tensor and, with a `shape_env`, a symbolic integer for each Python integer.

    Fakes and other values stay unchanged. A tensor that the current trace has made fake already keeps its symbolic
    sizes. With `ignore_shape_env`, every size is a plain number. Raises `UnsupportedTensorError` for a fake of a
    different mode, and `UnsupportedError` for an opaque object (a TorchScript object, say); it names the class.

    Examples:
        >>> import torch, foregrad
        >>> from foregrad.aot import AOTConfig
        >>> inputs = [torch.ones(2), 3]
        >>> mode, symbols = foregrad.construct_fake_mode(inputs, AOTConfig())
        >>> fakes = foregrad.process_inputs(inputs, AOTConfig(), mode, symbols)
        >>> fakes[0].shape, fakes[1]
        (torch.Size([2]), 3)
    """
    env = None if ignore_shape_env else shape_env
    with fake_mode:
        return FakifiedFlatArgs(
            _converted(index, value, aot_config, fake_mode, env) for index, value in enumerate(flat_args)
        )


def _converted(index: int, value: object, config: Any, mode: FakeTensorMode, env: object) -> object:
    if type(value) is int and env is not None and not config.is_export:
        return new_symbolic_integer(env, value, f"sym_{index}")
    if not isinstance(value, torch.Tensor):
        if is_opaque(value):
            raise UnsupportedError(
                f"input {index} is a {_class_name(value)}, an opaque object, which can't be captured. Let the "
                "function reach it by itself, or keep operators on the object outside the function."
            )
        return value
    if isinstance(value, FakeTensor):
        if value.fake_mode is not mode:
            raise UnsupportedTensorError(
                f"input {index} is a fake tensor of a second fake mode. Make all fakes under a single mode."
            )
        return value
    if is_wrapper_subclass(value):
        wrapper: Any = value
        names, _ = wrapper.__tensor_flatten__()
        parts = [getattr(value, name) for name in names]
        if all(isinstance(part, FakeTensor) and part.fake_mode is mode for part in parts):
            return value
    context = symbolic_context_of(value)
    if context is None and index < config.num_params_buffers and getattr(config, "static_weight_shapes", True):
        return mode.from_tensor(value, static_shapes=True)
    return mode.from_tensor(
        value,
        static_shapes=env is None,
        symbolic_context=context,
        source=None if context is None else context.tensor_source,
    )


def _class_name(value: object) -> str:
    name = getattr(value, "_type", None)
    return str(name().qualified_name()) if callable(name) else f"{type(value).__module__}.{type(value).__qualname__}"
