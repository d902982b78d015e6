"""Inductor's inner compiler: one graph in, a function out. Checked on torch 2.13.0.

Importing Inductor takes seconds, so no part is imported before the first graph is compiled.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import importlib
import operator
import os
import shutil
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..._torch.fakes import FakeTensor, FakeTensorMode, new_fake, new_fake_over, real_constants
from ..._torch.symbols import is_symbolic, shape_env
from ..._torch.tensors import storage_key
from ...identity import attributed
from ...interrupts import runs_compiler
from ...locks import ProcessPatch, Replacements, bound, make_lock, taken, without_user_code
from ...phases import counted, is_counted
from .kernels import kernels_together

REALIZED = "inductor_realize_to_strides"  # in the `meta` of a node whose value gets its own memory in this layout

_alone = make_lock()
Strides = list[tuple[Any, ...] | None]


def cpp_compiler_found() -> bool:
    """Whether a C++ compiler is on the path: a quick test; Inductor's own search may overrule it."""
    asked = os.environ.get("CXX")
    return any(shutil.which(name) for name in ([asked] if asked else ["g++", "clang++", "c++"]))


@functools.cache
def triton_found() -> bool:
    """Whether Triton, needed by Inductor for a GPU, can be imported."""
    from torch.utils._triton import has_triton

    return bool(has_triton())


# Wrong decompositions of PyTorch's, seen on torch 2.13.0: the first counts classes after a target of -1, the others
# round numbers between floats unlike the kernel when integers are asked for.
_WRONG = (torch.ops.aten.multilabel_margin_loss_forward.default,)
_WRONG_FOR_INTEGERS = tuple(getattr(torch.ops.aten.linspace, name) for name in torch.ops.aten.linspace.overloads())


@functools.cache
def _load() -> None:
    """Import the whole of Inductor, as PyTorch's own way into it does.

    Its modules use each other as attributes of `torch._inductor`, and expect all to be imported: the decomposition of
    max pooling uses the lowerings.
    """
    importlib.import_module("torch._inductor.compile_fx")
    _count_kernels()


def get_ready() -> None:
    """Do the work that only the first compiled graph of a process waits for: the import, trials of the processor."""
    _load()
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    pick_vec_isa()
    importlib.import_module("torch.utils.cpp_extension")


def _count_kernels() -> None:
    """Make Inductor's progress bar of kernels report to foregrad, in threads where foregrad compiles."""
    module: Any = importlib.import_module("torch._inductor.async_compile")
    original = getattr(module, "tqdm", None)
    if original is not None:
        module.tqdm = lambda *args, **kwargs: (
            _Kernels(kwargs.get("total") or 0) if is_counted() else original(*args, **kwargs)
        )


class _Kernels:
    """Replacement for Inductor's progress bar."""

    def __init__(self, total: int) -> None:
        self.done, self.total = 0, total
        self.update(0)

    def update(self, count: int = 1) -> None:
        self.done += count
        counted(self.done, self.total, "kernels")

    def set_postfix_str(self, text: str) -> None:
        """Accepted and ignored, as the bar's method."""

    def close(self) -> None:
        """Accepted and ignored, as the bar's method."""


# Kernels of these operators check values (probabilities, deviations); the decompositions do not.
_CHECKING = [torch.ops.aten.binary_cross_entropy.default, torch.ops.aten.bernoulli.default]
_CHECKING += [torch.ops.aten.normal.Tensor_Tensor, torch.ops.aten.normal.float_Tensor]


def decompositions() -> Mapping[Any, Callable[..., Any]]:
    """The decompositions that Inductor requires of a graph; they depend on its settings."""
    _load()
    from torch._inductor.decomposition import select_decomp_table

    aten = torch.ops.aten
    table = select_decomp_table()
    left_out, add = [*_WRONG, *_CHECKING], aten.index_add.default
    added = {op: _unless_of_integers(table[op]) for op in _WRONG_FOR_INTEGERS if op in table}
    if add in table:
        added[add] = functools.partial(_index_add, table[add])
    for op in (aten.index_select.default, aten.index_copy.default):
        if op in table:
            added[op] = functools.partial(_no_negative, table[op])
    if (
        aten._foreach_lerp.Scalar in table
    ):  # PyTorch's reads a number from a tensor, and a fake holds none (torch 2.15.0)
        added[aten._foreach_lerp.Scalar] = _foreach_lerp
    if not draws_as_eager():
        left_out += [aten.bernoulli_.float, aten.bernoulli_.Tensor]  # refuse a generator
        added[aten.bernoulli.p] = _bernoulli
    return {op: function for op, function in table.items() if op not in left_out} | added


def _foreach_lerp(starts: Sequence[torch.Tensor], ends: Sequence[torch.Tensor], weight: Any) -> list[torch.Tensor]:
    return [torch.lerp(start, end, weight) for start, end in zip(starts, ends, strict=True)]


def runs_as_eager(node: fx.Node) -> bool:
    """Whether Inductor would compute a call of an operator wrongly, or without its check of values."""
    if node.target in _WRONG_FOR_INTEGERS:
        dtype = node.meta["val"].dtype
        return not (dtype.is_floating_point or dtype.is_complex)
    return node.target in _WRONG or node.target in _CHECKING


def _unless_of_integers(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    def decompose(*args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            return NotImplemented
        return decomposition(*args, dtype=dtype, **kwargs)

    return decompose


def _index_add(decomposition: Callable[..., Any], x: Any, dim: int, index: torch.Tensor, *args: Any, **kw: Any) -> Any:
    """`index_add`; its decomposition fails for an index without dimensions (torch 2.13.0)."""
    index = index.reshape(1) if index.dim() == 0 and x.dim() > 0 else index
    return _no_negative(decomposition, x, dim, index, *args, **kw)


def _no_negative(
    decomposition: Callable[..., Any], x: Any, dim: int, index: torch.Tensor, *args: Any, **kw: Any
) -> Any:
    """A decomposition by indexing of an operator that refuses negative indices: these are moved out of bounds."""
    size = x.shape[dim] if x.dim() > 0 else 1
    return decomposition(x, dim, torch.where(index < 0, size, index), *args, **kw)


def draws_as_eager() -> bool:
    """Whether Inductor's settings ask for eager's random numbers."""
    from torch._inductor import config

    return bool(config.fallback_random)


def _bernoulli(x: torch.Tensor, p: float = 0.5, *, generator: torch.Generator | None = None) -> Any:
    """The draw of dropout on a CPU, as Inductor's own random numbers: they fuse with their readers.

    Inductor's lowering of the operator is wrong: a kernel may read the memory before the numbers are drawn.
    """
    if generator is not None:
        return NotImplemented
    return (torch.rand_like(x, dtype=torch.float32) < p).to(x.dtype)


@contextlib.contextmanager
def patched_config(settings: Mapping[str, Any]) -> Iterator[None]:
    """Context: these settings of `torch._inductor.config` in force, and Inductor this thread's alone."""
    from torch._inductor import config

    with without_user_code(), taken(_alone), config.patch(dict(settings)) if settings else contextlib.nullcontext():
        yield


def setting_names() -> list[str]:
    """The names that `patched_config` takes."""
    from torch._inductor import config

    settings: Mapping[str, Any] = config._config  # type: ignore[attr-defined]
    return sorted(settings)


def environment_key() -> str | None:
    """A digest of everything but the graph that Inductor's results depend on: settings, its sources and PyTorch's.

    None if its caches are off, or it has custom passes without a key.
    """
    _load()
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.codecache import BypassFxGraphCache, FxGraphCache, compiled_fx_graph_hash

    if config.force_disable_caches or not config.fx_graph_cache:
        return None
    graph = fx.Graph()
    graph.output(())
    nothing = fx.GraphModule({}, graph)
    try:
        try:
            FxGraphCache._check_can_cache(nothing, require_shape_env=False)
        except TypeError:  # up to 2.12 it needs an active trace, with symbolic sizes
            with tracing(TracingContext(FakeTensorMode(shape_env=shape_env()))):
                FxGraphCache._check_can_cache(nothing)
        return str(compiled_fx_graph_hash(nothing, [], {}, [])[0])
    except BypassFxGraphCache:
        return None


def uses_cudagraphs() -> bool:
    """Whether Inductor's settings ask for CUDA graphs."""
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def propagate(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    fake_mode: FakeTensorMode,
    settled: Collection[fx.Node] = (),
    key_of: Callable[[fx.Node], Any] = lambda node: None,
) -> None:
    """Give every node a fake value (`meta["val"]`) that shares memory as the real one will.

    Nodes in `settled` keep their value. Nodes with equal keys other than None make tensors of equal layouts: in memory
    of their own, or at equal distances in the memory of their first operand.
    """
    from torch._dispatch.python import enable_python_dispatcher

    with torch.no_grad(), enable_python_dispatcher(), real_constants(fake_mode):
        _propagator()(gm, fake_mode, settled, key_of).propagate_dont_convert_inputs(*inputs)


@functools.cache
def _propagator() -> Any:
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    class Propagator(FakeTensorProp):
        def __init__(
            self,
            gm: fx.GraphModule,
            mode: FakeTensorMode,
            settled: Collection[fx.Node],
            key_of: Callable[[fx.Node], Any],
        ) -> None:
            super().__init__(gm, mode=mode)
            self.mode, self.settled, self.key_of = mode, settled, key_of
            self.made: dict[Any, Any] = {}  # by key, a result and the first operand, if the result is in its memory

        def run_node(self, node: fx.Node) -> Any:
            if node in self.settled:
                return node.meta["val"]
            key = self.key_of(node)
            if key is None:
                return super().run_node(node)
            operand: Any = node.args[0].meta["val"] if node.args and isinstance(node.args[0], fx.Node) else None
            if key not in self.made:
                result = super().run_node(node)
                base = operand if operand is not None and _is_view(result, operand) else None
                if base is None or _can_be_taken(result, base):
                    self.made[key] = result, base
                return result
            result, base = self.made[key]
            again = functools.partial(self.again, operand, base)
            result = node.meta["val"] = torch.utils._pytree.tree_map_only(torch.Tensor, again, result)
            return result

        def again(self, operand: torch.Tensor, base: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
            layout = tuple(value.shape), value.stride(), value.dtype, value.device
            if base is None:
                return new_fake(self.mode, *layout)
            offset: Any = operand.storage_offset() + value.storage_offset() - base.storage_offset()
            return new_fake_over(self.mode, operand.untyped_storage(), *layout, offset)

    return Propagator


def _is_view(result: Any, operand: torch.Tensor) -> bool:
    values = result if isinstance(result, (tuple, list)) else [result]
    memory = storage_key(operand)
    return any(isinstance(value, torch.Tensor) and storage_key(value) == memory for value in values)


def _can_be_taken(result: Any, base: torch.Tensor) -> bool:
    """Whether a view has nothing but sizes, strides and offset of its own: no other dtype, no bit for conjugates."""
    is_plain = isinstance(result, torch.Tensor) and not (result.is_conj() or result.is_neg())
    return is_plain and result.dtype is base.dtype


def joint_passes(gm: fx.GraphModule) -> fx.GraphModule:
    """Inductor's passes over a joint or inference graph, in place: patterns, constants, random numbers.

    Every node needs its `meta["val"]`.
    """
    _load()
    from torch._inductor import config
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    if not config.use_joint_graph_passes:
        return gm
    values = [node.meta.get("val") for node in gm.graph.nodes if node.op == "placeholder"]
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    device = next((d for d in devices if d.type != "cpu"), devices[0] if devices else torch.device("cpu"))
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    with torch.no_grad(), possible_patterns(), V.set_fake_mode(mode) if mode is not None else contextlib.nullcontext():
        result: fx.GraphModule = joint_graph_passes(gm, device)
    return result


def lays_out_convolutions() -> bool:
    """Whether Inductor runs every convolution on a CPU channels last."""
    from torch._inductor import config

    with_mkldnn = torch._C._get_mkldnn_enabled() and torch.backends.mkldnn.is_available()
    return bool(config.layout_optimization and (config.force_layout_optimization or with_mkldnn))


@runs_compiler
def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    is_backward: bool = False,
    is_inference: bool = False,
    static_inputs: Sequence[int] = (),
    visible_outputs: Sequence[int] = (),
    donated: Sequence[int] = (),
    tag: str = "",
) -> tuple[Callable[[list[Any]], Any], Strides]:
    """Compile a functional graph, in place: (boxed callable, the strides of its outputs, None for an output that is no
    tensor).

    `visible_outputs` must have the strides of the graph; `static_inputs` keep their address from call to call. Kernels
    may write into the `donated` inputs of a backward. A graph with symbolic sizes is cached under a `tag` only: the
    caller keeps the conditions on sizes that belong to the tag.
    """
    _load()
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.output_code import CompiledFxGraph

    output = next(iter(reversed(gm.graph.nodes)))
    results = output.args[0]
    output.meta["user_visible_output_idxs"] = [i for i in visible_outputs if isinstance(results[i], fx.Node)]
    inputs = list(example_inputs)
    mode = next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None)
    settings: dict[str, Any] = {}
    if is_backward and _lays_out_convolutions(gm):
        settings["force_layout_optimization"] = True
    # The key of Inductor's cache of graphs leaves out the values that it fixes symbolic sizes to.
    if not tag and any(_has_open_sizes(value) for value in inputs):
        settings["fx_graph_cache"] = False
    cache = contextlib.ExitStack()
    cache.enter_context(patched_config(settings))
    cache.enter_context(_cached_apart(mode, output.meta["user_visible_output_idxs"], donated, tag))
    tracing_context, constants = tracing(_context(mode, donated)), real_constants(mode)
    with cache, tracing_context, constants, kernels_together(), TracingContext.report_output_strides() as strides:
        compiled: Any = compile_fx_inner(
            gm, inputs, static_input_idxs=list(static_inputs), is_backward=is_backward, is_inference=is_inference
        )
        output_strides = list(strides or ())
    function = compiled
    if isinstance(compiled, CompiledFxGraph) and set(compiled.device_types) <= {"cpu"}:
        # Its own __call__ only adds Triton's tuning and the profiler.
        function = compiled.current_callable or compiled
    return _boxed(function, compiled), output_strides


def _lays_out_convolutions(gm: fx.GraphModule) -> bool:
    """Whether Inductor would choose the layout of a backward graph's convolutions if they were a forward's.

    Inductor looks for forward convolutions only, and lays out a backward convolution like the saved input and weight.
    Here both are the user's own, not the forward's copies in another layout.
    """
    from torch._inductor.graph import GraphLowering

    convolution, backward = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    stand_ins = []
    for node in list(gm.graph.nodes):
        if node.target is backward:
            _, x, weight, _, *settings = node.args
            with gm.graph.inserting_before(node):
                stand_ins.append(gm.graph.call_function(convolution, (x, weight, None, *settings[:6])))
    if not stand_ins:
        return False
    try:
        return bool(GraphLowering.decide_layout_opt(gm, is_inference=False))
    finally:
        for node in stand_ins:
            gm.graph.erase_node(node)


@contextlib.contextmanager
def _cached_apart(
    mode: FakeTensorMode | None, visible: Sequence[int], donated: Sequence[int], own: str
) -> Iterator[None]:
    """Context: the keys of Inductor's cache of graphs contain the `visible` outputs, the `donated` inputs and the tag
    `own`.

    Inductor's own key leaves them out, though elsewhere equal outputs may be residuals, in any layout.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    settings: Any = torch.compiler.config
    tag = f"{settings.cache_key_tag};foregrad:{','.join(map(str, visible))};{','.join(map(str, donated))};{own}"
    lent = mode if mode is not None and mode.shape_env is None else None
    try:
        if lent is not None:
            lent.shape_env = ShapeEnv()  # without one, nothing is cached
        with settings.patch(cache_key_tag=tag):
            yield
    finally:
        if lent is not None:
            lent.shape_env = None


def _has_open_sizes(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return bool(value._has_symbolic_sizes_strides)
    return is_symbolic(value)


_OUT_OF_BOUNDS = "index out of bounds"


class IndexOutOfBoundsError(IndexError, RuntimeError):
    """A kernel's check of an index failed. Eager's operators raise one of the two base classes."""


def _boxed(function: Callable[[list[Any]], Any], owner: Any) -> Callable[[list[Any]], Any]:
    def call(inputs: list[Any]) -> Any:
        try:
            return function(inputs)
        except RuntimeError as error:
            if _OUT_OF_BOUNDS not in str(error):
                raise
            raise IndexOutOfBoundsError(_OUT_OF_BOUNDS + str(error).partition(_OUT_OF_BOUNDS)[2]) from error

    return attributed(call, _boxed_call=True, inductor_graph=owner)


def _context(mode: FakeTensorMode | None, donated: Sequence[int]) -> Any:
    """A tracing context for this graph: one of Dynamo's would describe the graph that it captured."""
    from torch._guards import TracingContext

    context: Any = TracingContext(mode)
    context.fakify_first_call = True  # symbolic strides are reported as symbols, not as this call's numbers
    if donated:
        context.fw_metadata = types.SimpleNamespace(bw_donated_idxs=list(donated))  # the only field read here
    return context


# -------------------------------------------------------------------- patterns
# Inductor's patterns, tried on a graph only if it has their operators. Checked on torch 2.13.0.
#
# Inductor tries every pattern at each node that may be its last. Some fifty are attentions that the graph of a model
# does not have; to learn that at each node is half the time of its passes over a joint graph.
#
# Known weakness: an operator that a replacement brings into the graph counts from the next pass on.


_active = threading.local()
_replaced = Replacements()


@contextlib.contextmanager
def possible_patterns() -> Iterator[None]:
    """Context: on this thread, Inductor tries only a pass's patterns with all operators in the graph."""
    with _patches, bound(_active, "on", True):
        yield


def _install() -> None:
    from torch._inductor.pattern_matcher import PatternMatcherPass

    original = PatternMatcherPass.apply

    def apply(self: Any, gm: Any) -> int:
        return original(_narrowed(self, gm) if getattr(_active, "on", False) else self, gm)

    _replaced.bind(PatternMatcherPass, "apply", apply)


_patches = ProcessPatch(_install, _replaced.restore)


def _narrowed(matcher: Any, gm: Any) -> Any:
    """A pass with the patterns that have their operators in the graph. Other threads use the pass itself."""
    graph = gm.graph if isinstance(gm, fx.GraphModule) else gm
    present = {node.target for node in graph.nodes if node.op == "call_function"}
    narrowed = copy.copy(matcher)
    narrowed.patterns = collections.defaultdict(list)
    for key, entries in matcher.patterns.items():
        narrowed.patterns[key] = [entry for entry in entries if _is_possible(entry.pattern, present)]
    return narrowed


def _is_possible(pattern: Any, present: set[Any]) -> bool:
    return not any(present.isdisjoint(targets) for targets in _needed(pattern))


@functools.cache
def _needed(pattern: Any) -> frozenset[frozenset[Any]]:
    """Sets of functions: a pattern needs one of each in the graph. Optional and repeated parts are left out."""
    return frozenset(_functions_in(pattern))


def _functions_in(pattern: Any) -> Iterator[frozenset[Any]]:
    from torch._inductor.pattern_matcher import CallFunction, CallFunctionVarArgs, MultiOutputPattern

    if isinstance(pattern, (list, tuple)):
        parts = pattern
    elif isinstance(pattern, MultiOutputPattern):
        parts = pattern.outputs
    elif isinstance(pattern, (CallFunction, CallFunctionVarArgs)):
        yield frozenset(pattern.fns_set)
        parts = [*pattern.args, *pattern.kwargs.values()] if isinstance(pattern, CallFunction) else []
    else:
        parts = []
    for part in parts:
        yield from _functions_in(part)


# -------------------------------------------------------------------- flex_attention

_ATTENTION = torch.ops.higher_order.flex_attention
_BACKWARD = torch.ops.higher_order.flex_attention_backward
_OPTIONS = {_ATTENTION: 6, _BACKWARD: 11}  # the position of the kernel's options among the arguments


def has_kernel(node: fx.Node) -> bool:
    """Whether Inductor has a kernel for this call: always on accelerators; on the CPU, for the output alone."""
    if node.target not in _OPTIONS:
        return False
    arguments: Any = node.args
    options = arguments[_OPTIONS[node.target]]
    if "OUTPUT_LOGSUMEXP" not in options:  # the bare operator, without the options that `flex_attention` adds
        return False
    if arguments[0].meta["val"].device.type != "cpu":
        return True
    if node.target is _BACKWARD or options["OUTPUT_LOGSUMEXP"] or not torch.cpu._is_avx2_supported():
        return False
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


def convolves_image_by_image(image: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a convolution on a CPU, as threads are now, multiplies matrices for each image. A fake image will do."""
    backend = torch._C._select_conv_backend(image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return bool(backend.name == "Slow2d")
