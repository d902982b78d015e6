"""The Inductor backend: each half through PyTorch's own kernel compiler, C++ on a CPU, Triton on a GPU.

Inductor's own stages run in order: its decompositions during the capture, its joint-graph passes before the partition
(`prepare_joint`), then its inner compiler for each half. It knows the outputs that the user sees, so it may lay out all
other values as it likes; its strides for residuals go on to the backward.

A graph is compiled around operators that Inductor does not know: they run as in eager. If the graph also has symbolic
sizes, all of it runs on eager's kernels, and is logged. A graph that Inductor fails on runs on eager's kernels
(`auto`), or raises `BackendError` (`inductor`). Random numbers are Inductor's, not eager's, unless
`torch._inductor.config.fallback_random` is set.

Known weakness: Inductor gives up bitwise equality with eager, as `torch.compile` does.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import operator
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.cache_folder import why_no_folder
from .._torch.fakes import FakeTensor
from .._torch.graphs import copied, is_random, make_graph_module, symbols_in
from .._torch.ops import OpOverload, depends_on_values
from .._torch.symbols import ClosedSizesError
from .._torch.tracing_context import own_tracing_context
from ..backends.eager import eager_compiler
from ..backends.in_place import tell_of_writes
from ..backends.registry import Backend, Family, get_backend
from ..backends.results import promised
from ..errors import BackendError, did_you_mean, headline
from ..graph.joint import Partitioned
from ..graph.meta import TensorSpec, respecify, spec_of
from ..graph.role import LAID_OUT, PREPARED, GraphRole, called_region, role_of
from ..identity import attributed
from ..interrupts import deliver
from ..passes.aliasing import results_of, written_inputs
from ..passes.decompose import decompose
from ._torch import inductor
from ._torch.kernels import kernels_together
from .convolutions import (
    SETTINGS,
    is_convolution,
    lay_out_as_before,
    with_products,
    with_weights_laid_out,
    with_whole_laid_out,
)
from .copies import copied_early, copy_shared_results
from .numbers import ONE_BY_ONE, fill_in_constants, known_first, numbers_in_a_tensor
from .regions import outlined, sums_first
from .repeats import has_marked_calls, is_view, layout_key
from .segments import OtherStridesError, checked_once, compile_around, overwritable

log = logging.getLogger("foregrad.backends")
_say_once = functools.cache(log.warning)
_say_choice = functools.cache(log.log)
aten = torch.ops.aten

# Inductor keeps a buffer that is not read any more until a later one of its size is made, if its own estimate of the
# peak, from before results are written into operands, allows that. The measured peak is then above the plan.
BUDGET_SETTINGS = types.MappingProxyType({"allow_buffer_reuse": False})

Boxed = Callable[[list[Any]], Any]


def why_not(devices: Sequence[torch.device] = ()) -> str | None:
    """The reason why Inductor can't compile for these devices (by default the CPU) here; None if it can."""
    no_folder = why_no_folder()
    if no_folder is not None:
        return no_folder
    types = {device.type for device in devices} or {"cpu"}
    for kind in sorted(types):
        if kind == "cpu" and not inductor.cpp_compiler_found():
            return "no C++ compiler was found: install g++ or clang++, or name one by the variable CXX"
        if kind in ("cuda", "xpu") and not inductor.triton_found():
            return f"Triton is not installed, and it needs Triton for {kind}"
        if kind not in ("cpu", "cuda", "xpu", "mps"):
            return f"it is not known to compile for the device type `{kind}`"
    return None


def _check_names(settings: Mapping[str, Any]) -> None:
    """Raise `BackendError` for a setting that Inductor does not have."""
    names = inductor.setting_names()
    for name in settings:
        if name not in names:
            hint = did_you_mean(name, names)
            raise BackendError(f"Inductor has no setting `{name}`.{hint} torch._inductor.config lists them.")


class InductorCompiler:
    """A compiler for forward, backward and inference graphs alike: it asks their `role_of`.

    Args:
        settings: of `torch._inductor.config`, in force while it compiles.
        fallback: run a graph that can't be compiled on eager's kernels, saying why once, in place of an error.
    """

    def __init__(self, settings: Mapping[str, Any] | None = None, *, fallback: bool = False) -> None:
        self.settings = dict(settings or {})
        if self.settings:
            _check_names(self.settings)
        self.fallback = fallback
        self.__name__ = "inductor"

    def decompositions(self) -> Mapping[Any, Callable[..., Any]]:
        """The decompositions that Inductor needs; they depend on its settings."""
        with inductor.patched_config(self.settings):
            return inductor.decompositions()

    def prepare_joint(self, gm: fx.GraphModule) -> fx.GraphModule:
        """A copy of a joint graph after Inductor's joint-graph passes."""
        try:
            with inductor.patched_config(self.settings):
                return _after_joint_passes(gm)
        except Exception as error:
            deliver(anywhere=True)  # an interrupt ends compilers that run beside this process too
            if self.fallback:
                log.warning("Inductor's passes failed on a joint graph, and are skipped: %s", headline(error))
                return gm
            raise _failure("joint", error, ()) from error

    def prepare_halves(self, partitioned: Partitioned) -> Partitioned:
        """Halves that share values instead of making them twice."""
        with inductor.patched_config(self.settings):
            return with_weights_laid_out(partitioned) if inductor.lays_out_convolutions() else partitioned

    def cache_key(self) -> Any:
        """Everything but the graphs that the results depend on; None if Inductor must not keep anything."""
        with inductor.patched_config(self.settings):
            key = inductor.environment_key()
        return None if key is None else [key, self.fallback]

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Boxed:
        """Compile a graph. The result empties its one list; `output_strides` are its outputs'."""
        nodes = [node for node in gm.graph.nodes if node.op == "call_function"]
        if not nodes:
            return eager_compiler(gm, example_inputs)
        with inductor.patched_config(self.settings):
            foreign = _foreign(gm)
        reason = self._reason_for_eager(gm, example_inputs, foreign)
        if reason is not None:
            log.info("the %s graph runs on eager's kernels: %s", role_of(gm).phase, reason)
            return eager_compiler(gm, example_inputs)
        reason = why_not([value.device for value in example_inputs if isinstance(value, torch.Tensor)])
        if reason is not None and self.fallback:
            log.warning("a graph runs on eager's kernels, because Inductor can't compile it: %s", reason)
            return eager_compiler(gm, example_inputs)
        try:
            with inductor.patched_config(self.settings):
                return _compile(gm, example_inputs, role_of(gm))
        except Exception as error:
            deliver(anywhere=True)  # an interrupt ends compilers that run beside this process too
            if ClosedSizesError.is_behind(error):
                raise
            if self.fallback:
                log.warning(
                    ("Inductor failed on a graph; the graph runs on eager's kernels instead: %s"), headline(error)
                )
                return eager_compiler(gm, example_inputs)
            raise _failure(role_of(gm).phase, error, example_inputs) from error

    def _reason_for_eager(self, gm: fx.GraphModule, example_inputs: Sequence[Any], foreign: set[fx.Node]) -> str | None:
        """The reason why a graph is not compiled by Inductor at all; None if it is."""
        if not foreign:
            return None
        named = [node for node in gm.graph.nodes if node in foreign and node.target is not operator.getitem]
        called = ", ".join(dict.fromkeys(map(_title, named)))
        if all(node in foreign for node in gm.graph.nodes if node.op == "call_function"):
            return f"Inductor knows none of {called}"
        if any(symbols_in(value) for value in example_inputs):
            return f"Inductor does not know {called}, and some of its sizes are symbolic"
        log.info("the %s graph is compiled around %s, unknown to Inductor", role_of(gm).phase, called)
        return None


def _failure(phase: str, error: Exception, example_inputs: Sequence[Any]) -> BackendError:
    lacking = why_not([value.device for value in example_inputs if isinstance(value, torch.Tensor)])
    said = lacking or headline(error)
    return BackendError(
        f'Inductor failed on the {phase} graph: {said}\n  backend="auto" runs graphs like this on eager\'s kernels; '
        'backend="eager" runs all graphs on eager\'s kernels.'
    )


def _compile(gm: fx.GraphModule, example_inputs: Sequence[Any], role: GraphRole) -> Boxed:
    """Compile a copy: the graph itself may be printed, or cut to fewer tangents, later."""
    if role.phase == "inference" and PREPARED not in gm.meta:
        copy = _after_joint_passes(gm)
    else:
        copy = make_graph_module(gm, copied(gm.graph), "GraphModule")
    foreign = _foreign(copy)
    regions = role.regions
    is_laid_out = any(LAID_OUT in node.meta for node in copy.graph.nodes)
    if _may_have_regions(copy, role) and (not is_laid_out or _laid_out(copy, example_inputs)):
        sums_first(copy.graph)
        # Inductor chooses one layout for all convolutions that it sees; a region's results keep the graph's strides.
        convolutions = filter(is_convolution, copy.graph.nodes) if regions == "auto" else ()
        whole = outlined(copy, foreign.union(convolutions), regions=regions)
        if whole is not copy:
            try:
                with kernels_together():
                    return _compile_regions(whole, role)
            except OtherStridesError as error:
                log.info("the %s graph is compiled without regions: `%s` has other strides", role.phase, error)
    if role.phase == "inference" and inductor.lays_out_convolutions():
        copy, foreign = _with_convolutions_laid_out(copy, example_inputs, foreign)
    updated = _with_writes(copy, role, foreign)
    written = written_inputs(copy)
    donated = () if inductor.uses_cudagraphs() else role.donated  # CUDA graphs own their memory
    if foreign:
        around = _writing(compile_around(copy, foreign, _compile_segment, donated=donated), written)
        return _telling(around, updated=updated, writes_into=donated)
    static: tuple[int, ...] = ()
    if inductor.uses_cudagraphs():
        static = role.static_inputs
        if not any(isinstance(value, torch.Tensor) and value.device.type == "cuda" for value in example_inputs):
            _say_once(
                "CUDA graphs were asked for (mode=, or Inductor's setting `triton.cudagraphs`) for a graph that "
                "is not on a CUDA device; it is compiled without"
            )
    compiled, strides = _compile_graph(
        copy,
        example_inputs,
        is_backward=role.phase == "backward",
        is_inference=role.phase == "inference",
        static_inputs=static,
        visible_outputs=role.visible_outputs,
        donated=donated,
        tag=role.tag,
    )
    return _telling(_writing(compiled, written), output_strides=strides, writes_into=donated, updated=updated)


def _telling(run: Boxed, **facts: Any) -> Boxed:
    """A compiled graph with attributes for its caller, see `GraphRole`."""
    for name, value in facts.items():
        setattr(run, name, value)
    return run


def _compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], **facts: Any) -> tuple[Any, inductor.Strides]:
    """`inductor.compile_graph`, with convolutions as products where these are faster."""
    is_static = not any(map(symbols_in, example_inputs))
    fill_in_constants(gm)
    as_products = is_static and inductor.lays_out_convolutions() and with_products(gm)
    with inductor.patched_config(SETTINGS if as_products else {}):
        return inductor.compile_graph(gm, example_inputs, **facts)


def _may_have_regions(gm: fx.GraphModule, role: GraphRole) -> bool:
    if inductor.uses_cudagraphs() or written_inputs(gm):
        return False
    # A graph that writes its updates itself, as one of a whole training step does, is compiled whole unless asked.
    return role.regions is True or (not role.updates and (bool(role.regions) or has_marked_calls(gm.graph)))


def _laid_out(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> bool:
    """Give values the strides that follow from the inputs' strides (of residuals laid out by Inductor, say) and from
    copies in new layouts. False: PyTorch can't take a view that Inductor would make by a copy.
    """
    before = {node: dict(node.meta) for node in gm.graph.nodes}
    try:
        inductor.propagate(gm, example_inputs, _fake_mode(example_inputs), _with_values(gm), layout_key)
    except (RuntimeError, ValueError) as error:
        log.info("the %s graph is not laid out anew: %s", role_of(gm).phase, headline(error))
        for node, meta in before.items():
            node.meta = meta
        return False
    respecify(gm.graph)
    return True


def _with_convolutions_laid_out(
    gm: fx.GraphModule, example_inputs: Sequence[Any], foreign: set[fx.Node]
) -> tuple[fx.GraphModule, set[fx.Node]]:
    """The graph, with `foreign` nodes of its own, after `with_whole_laid_out`, or as it is."""
    draws = inductor.draws_as_eager() and any(map(is_random, gm.graph.nodes))  # eager draws in the order of memory
    whole = None if draws or any(map(symbols_in, example_inputs)) else with_whole_laid_out(gm, foreign)
    if whole is None or not _laid_out(whole, example_inputs):
        return gm, foreign
    updated = {place for _, place in role_of(gm).updates}
    visible = [at for at in range(len(results_of(gm))) if at not in updated]
    return (whole, _foreign(whole)) if lay_out_as_before(whole, gm, visible) else (gm, foreign)


def _with_writes(gm: fx.GraphModule, role: GraphRole, foreign: Collection[fx.Node]) -> tuple[tuple[int, int], ...]:
    """Let the graph write its `updates` itself, and return None in place of the new values. So kernels write new values
    over old ones, and a gradient that was read is freed. Returns the pairs of an input and an output. The runtime still
    writes tensors without dimensions.
    """
    if role.phase != "inference" or inductor.uses_cudagraphs():
        return ()
    results, inputs = results_of(gm), [node for node in gm.graph.nodes if node.op == "placeholder"]
    written = {inputs[number] for number, _ in role.updates}
    done = []
    for number, place in role.updates:
        new, old = results[place], inputs[number]
        if not isinstance(new, fx.Node) or new in foreign or old in results or not old.meta["val"].ndim:
            continue
        if _may_become(new) not in written - {old}:  # of two tensors that swap values, one would be lost
            done.append((number, place))
    copied_early(gm.graph, done)
    places = {place for _, place in done}
    gm.graph.output_node().args = ([None if i in places else result for i, result in enumerate(results)],)
    return tuple(done)


def _may_become(value: fx.Node) -> fx.Node:
    """The node that Inductor may put in place of `value`, if all operators between turn out to change nothing."""
    while value.op == "call_function":
        operands = value.all_input_nodes[-1:] if value.target is aten.copy.default else value.all_input_nodes
        if len(operands) != 1:
            break
        value = operands[0]
    return value


def _writing(compiled: Boxed, written: Sequence[int]) -> Boxed:
    """The compiled graph with two effects of eager's kernels: the versions of the `written` inputs move, and an error
    says that these inputs may have been written.
    """
    if not written:
        return compiled

    def run(args: list[Any]) -> Any:
        inputs = [args[i] for i in written]
        try:
            return compiled(args)
        except BaseException as error:
            tell_of_writes(error, f"up to {len(written)} writes to parameters or other tensors of the caller were made")
            raise
        finally:
            torch.autograd.graph.increment_version(inputs)

    return attributed(run, _boxed_call=True)


def _compile_regions(gm: fx.GraphModule, role: GraphRole) -> Boxed:
    """Compile a graph with calls of regions: each region once, and the operators around them.

    Results have the graph's own strides, except for residuals from regions that nothing else reads: these have the
    strides that Inductor chose for the region's first copy.
    """
    results = results_of(gm)
    strides = [spec.stride if isinstance(spec := _spec(result), TensorSpec) else None for result in results]
    calls = {node: region for node in gm.graph.nodes if (region := called_region(gm, node)) is not None}
    seen = set(role.visible_outputs) if role.phase == "forward" else set(range(len(results)))
    hidden = {node for node in gm.graph.nodes if all(user.op == "output" for user in node.users)}
    hidden -= {result for i, result in enumerate(results) if i in seen}
    runs: dict[fx.GraphModule, Boxed] = {}
    for region in dict.fromkeys(calls.values()):
        mine = [node for node, called in calls.items() if called is region]
        each = [set(overwritable(gm, node.args, {node}, role.donated)) for node in mine]
        taken = [user for node in mine for user in node.users]
        visible = {user.args[1] for user in taken if user not in hidden}
        promises = promised(region, [str(node) for node in results_of(region)], sorted(visible), None)
        run, laid_out = _compile_graph(
            make_graph_module(region, copied(region.graph), "Region"),
            [node.meta["val"] for node in region.graph.nodes if node.op == "placeholder"],
            is_backward=role.phase == "backward",
            is_inference=role.phase == "inference",
            visible_outputs=sorted(visible),
            donated=sorted(set.intersection(*each)),
            tag=role.tag,
        )
        told = _telling(run, output_strides=laid_out, writes_into=set.intersection(*each))
        runs[region] = checked_once(told, region, promises)
        chosen = {user: laid_out[user.args[1]] for user in taken if laid_out and user.args[1] not in visible}
        strides = [chosen.get(result, stride) for result, stride in zip(results, strides, strict=True)]
    compiled = compile_around(gm, _beside_regions(gm, calls), _compile_segment, runs, donated=role.donated)
    return _telling(compiled, output_strides=strides, writes_into=role.donated)


def _spec(result: Any) -> Any:
    return spec_of(result) if isinstance(result, fx.Node) else None


def _beside_regions(gm: fx.GraphModule, calls: Collection[fx.Node]) -> set[fx.Node]:
    """Nodes not to compile: calls of regions, and numbers and views for these, or for the caller."""
    foreign = _foreign(gm)
    aside = {*calls, *foreign}
    placeholders = {node for node in gm.graph.nodes if node.op == "placeholder"}
    for node in gm.graph.nodes:
        is_light = is_view(node) or isinstance(node.meta.get("val"), torch.SymInt)
        is_known = all(operand in placeholders or operand in aside for operand in node.all_input_nodes)
        is_result = node.target is operator.getitem and node.args[0] in calls
        if is_result or (node.op == "call_function" and is_light and is_known):
            aside.add(node)
    for node in reversed(gm.graph.nodes):
        is_read = any(user.op == "output" or user in aside for user in node.users)
        if node in aside and node not in foreign and is_view(node) and not is_read:
            aside.remove(node)
    return aside


def _compile_segment(gm: fx.GraphModule, example_inputs: list[Any], donated: Sequence[int]) -> Boxed:
    count = len(next(iter(reversed(gm.graph.nodes))).args[0])
    run, strides = _compile_graph(
        gm, example_inputs, is_backward=bool(donated), visible_outputs=range(count), donated=donated
    )  # Inductor heeds the donated inputs of a backward alone
    return _telling(run, output_strides=strides, writes_into=donated)


def _after_joint_passes(gm: fx.GraphModule) -> fx.GraphModule:
    inputs = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    mode = _fake_mode(inputs)
    if mode is None:
        return make_graph_module(gm, copied(gm.graph), "GraphModule")
    with own_tracing_context(mode):  # Dynamo's context, if we are inside it, has a different fake mode
        copy = _through_joint_passes(gm, inputs, mode)
        if copy is None:  # rare, and constants cost no more inside of kernels
            with inductor.patched_config({"joint_graph_constant_folding": False}):
                copy = _through_joint_passes(gm, inputs, mode)
        assert copy is not None
        copy_shared_results(copy, gm, mode)
    respecify(copy.graph)
    return copy


def _scalars_beside_products(graph: fx.Graph) -> None:
    """Move scalars on the CPU to the GPU of the matrix product that they are added to: Inductor makes one kernel of
    both, with operands on one device.
    """
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        for scalar, product in (node.args[:2], node.args[1::-1]):
            if not isinstance(scalar, fx.Node) or getattr(product, "target", None) is not aten.mm.default:
                continue
            device = product.meta["val"].device
            if scalar.meta["val"].device != device:
                with graph.inserting_before(node):
                    moved = graph.call_function(aten._to_copy.default, (scalar,), {"device": device})
                node.replace_input_with(scalar, moved)


def _through_joint_passes(gm: fx.GraphModule, inputs: Sequence[Any], mode: Any) -> fx.GraphModule | None:
    """A copy of `gm` after decompositions and passes; None if constant folding changed a value's layout.

    `ones * x.t()` is contiguous, `x.t()` is not. The passes replace the product by the view and put the product's
    metadata on the view, though the view has further users.
    """
    copy = make_graph_module(gm, copied(gm.graph), "GraphModule")
    decompose(copy, ONE_BY_ONE, mode)
    numbers_in_a_tensor(copy, _numbers(copy), mode)
    _scalars_beside_products(copy.graph)
    table = inductor.decompositions()
    for name, graph in [*copy.named_children()]:  # functions that are arguments of operators
        if isinstance(graph, fx.GraphModule):
            inner = make_graph_module(graph, copied(graph.graph), name)
            decompose(inner, table, mode)
            copy.add_module(name, inner)
    decompose(copy, table, mode, leave=_foreign(copy))
    inductor.propagate(copy, inputs, mode, _with_values(copy), layout_key)
    values = {node: node.meta["val"] for node in copy.graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)}
    copy = inductor.joint_passes(copy)
    for node in copy.graph.nodes:
        before, after = values.get(node), node.meta.get("val")
        if node.target is torch.ops.prims.convert_element_type.default and before is None:
            before = node.args[0].meta.get("val")
        if before is None or before is after or not isinstance(after, torch.Tensor) or before.shape != after.shape:
            continue
        if before.stride() != after.stride():
            return None
        if node in values and before.dtype is after.dtype:
            node.meta["val"] = before  # it shares memory as the real value does
    if any("val" not in node.meta for node in copy.graph.nodes if node.op == "call_function"):
        inductor.propagate(copy, inputs, mode, _with_values(copy), layout_key)
    return copy


def _fake_mode(inputs: Sequence[Any]) -> Any:
    return next((value.fake_mode for value in inputs if isinstance(value, FakeTensor)), None)


def _foreign(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes that are hidden from Inductor: calls of functions other than operators and arithmetic on sizes, operators
    with result sizes that depend on values, nodes that make or take a number that depends on a tensor's contents, draws
    of `bernoulli` with eager's numbers, and calls that Inductor would compute wrongly.
    """
    numbers = _numbers(gm)
    foreign = known_first(gm, numbers) if numbers else set()
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node in numbers or not numbers.isdisjoint(node.all_input_nodes):
            foreign.add(node)
        elif node.target is operator.getitem:
            if node.args[0] in foreign:
                foreign.add(node)
        elif isinstance(node.target, OpOverload):
            by_values = depends_on_values(node.target) and not _takes_by_numbers(node)
            if by_values or inductor.runs_as_eager(node) or _is_drawn_by_eager(node):
                foreign.add(node)
        elif getattr(node.target, "__module__", "") not in _ARITHMETIC and not inductor.has_kernel(node):
            foreign.add(node)
    return foreign


def _numbers(gm: fx.GraphModule) -> set[fx.Node]:
    nodes = [node for node in gm.graph.nodes if node.op in ("placeholder", "call_function")]
    return {node for node in nodes if _is_number_of_data(node)}


def _with_values(gm: fx.GraphModule) -> set[fx.Node]:
    """Nodes that keep `meta["val"]`, since it can't be computed from their operands' values."""
    return _foreign(gm) | {node for node in gm.graph.nodes if inductor.has_kernel(node)}


def _takes_by_numbers(node: fx.Node) -> bool:
    """Whether a node is `x[i, j]` with integer indices: only masks make a size that depends on their contents."""
    if node.target is not aten.index.Tensor:
        return False
    indices: Any = node.args[1]
    values = [index.meta["val"] for index in indices if index is not None]
    return not any(value.dtype in (torch.bool, torch.uint8) for value in values)


def _is_drawn_by_eager(node: fx.Node) -> bool:
    """Whether a node draws from a generator among its arguments (Inductor would ignore it), or is a `bernoulli` with
    eager's numbers (Inductor would lower it wrongly).
    """
    if any(isinstance(operand.meta.get("val"), torch.Generator) for operand in node.all_input_nodes):
        return True
    return node.target is aten.bernoulli.p and inductor.draws_as_eager()


def _is_number_of_data(node: fx.Node) -> bool:
    value = node.meta.get("val", node)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return not all(symbol.is_integer for symbol in symbols_in(value))
    return node.op == "call_function" and (value is None or isinstance(value, (bool, int, float, complex)))


def _title(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


_ARITHMETIC = {"_operator", "math", "builtins", "torch"}


# -------------------------------------------------------------------------------------------------------- as a backend


def inductor_backend(settings: Mapping[str, Any] | None = None, *, name: str = "inductor") -> Backend:
    """Inductor with its own settings; called `auto`, it leaves graphs that it can't compile to eager's kernels."""
    compiler = InductorCompiler(settings, fallback=name == "auto")
    return Backend(
        name,
        compiler,
        compiler,
        compiler,
        compiler.decompositions,
        "PyTorch's kernel compiler: C++ on a CPU, Triton on a GPU",
        "fused",
        compiler.prepare_joint,
        functools.partial(inductor_backend, name=name),
        compiler.prepare_halves,
        compiler.cache_key,
        budget_settings=BUDGET_SETTINGS,
        why_not=why_not,
    )


def auto() -> Backend:
    """Inductor if it can compile here, else eager's kernels; logs which, once."""
    reason = why_not()
    if reason is None:
        _say_choice(logging.INFO, 'backend "auto" is Inductor')
        return dataclasses.replace(inductor_backend(name="auto"), first=get_backend("eager"))
    _say_choice(logging.WARNING, f'backend="auto" uses "eager", since Inductor can\'t compile here: {reason}')
    return get_backend("eager")


BACKENDS = {
    "inductor": Family(inductor_backend, None, "PyTorch's kernel compiler: C++ on a CPU, Triton on a GPU"),
    "auto": Family(auto, None, "inductor, after eager's kernels while it compiles; or eager"),
}
