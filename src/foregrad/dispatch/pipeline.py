"""The pipeline on one screen: from a flattened call to compiled halves, stage by stage."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import fx

from .._torch import engine
from .._torch.fakes import new_fake
from .._torch.graphs import ends_of, is_random, needed_by, piece, trace_artifact
from .._torch.levels import is_legacy_batched
from .._torch.symbols import Size, same_numbers
from ..annexes import given, the_one
from ..backends.boxed import as_boxed
from ..backends.eager import eager_compiler
from ..backends.registry import Backend
from ..backends.results import Failures
from ..config import Config
from ..extend import CompileStage, Watcher, tell, wrapped
from ..frontend.call import FlatCall
from ..frontend.source import Source
from ..graph.joint import JointGraph, Partitioned
from ..graph.meta import TensorSpec, spec_of
from ..graph.role import LAID_OUT, PREPARED, STAYS, GraphRole
from ..graph.signature import Signature
from ..graph.slots import Buffer, Param, Updated
from ..graph.tangents import BackwardCase
from ..interrupts import held
from ..locks import make_lock, taken
from ..partitioners import default_partition
from ..partitioners.report import Parts
from ..passes.aliasing import results_of
from ..passes.keep import also_saved, results_read
from ..passes.mutations import donated_inputs, writes_for_the_graph
from ..passes.opaque import opaque_values
from ..passes.zeros import only_gradients, without_tangents
from ..phases import compiling, phase
from ..runtime.compiled import AtHand, Boxed, Compiled, Derived, NeedsInputGrad, Partial, overwriting, owned_among
from ..tracing.tape.collection import paused_collection
from .compilers import CompiledGraph, call_compiler, called_bare, is_own
from .explain import warn_user
from .varying import check_numbers

if TYPE_CHECKING:
    from ..tracing.capture import Captured
    from ..tracing.derivatives.resumable_trace import Derivative, ResumableTrace


Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]
_Halves = tuple[fx.GraphModule, fx.GraphModule]


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """The pipeline's result for one call: capture and compiled halves."""

    captured: Captured
    compiled: Compiled

    def without_tensors(self) -> Product:
        """The product without references to tensors and modules of the call."""
        captured = dataclasses.replace(self.captured, tensors=(), modules=(), reads=None, facts=())
        return dataclasses.replace(self, captured=captured)


class StageCache(Protocol):
    """A cache of a pipeline's results."""

    def halves(self, joint: JointGraph, about: Sequence[object], make: Callable[[], tuple[_Halves, bool]]) -> _Halves:
        """The halves from the cache, else from `make`; it also tells whether they are to be kept."""

    def compiled(
        self,
        module: fx.GraphModule,
        joint: JointGraph,
        role: GraphRole,
        compile_as: Callable[[GraphRole], CompiledGraph],
    ) -> CompiledGraph:
        """The result of `compile_as` for a graph, with the cache's `tag` in the role."""


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The stages' settings: compilers, partitioner, decompositions."""

    fw_compiler: Compiler
    bw_compiler: Compiler
    inference_compiler: Compiler
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
    # A table, or a function that gives it, called for each capture: a table may depend on settings.
    decompositions: Mapping[Any, Callable[..., Any]] | Callable[[], Mapping[Any, Callable[..., Any]]] | None = None
    lifted: Sequence[Source] = ()  # tensors that become inputs ahead of the arguments, used or not
    prepare_joint: Callable[[fx.GraphModule], fx.GraphModule] | None = None  # a copy, after a backend's own passes

    prepare_halves: Callable[[Partitioned], Partitioned] | None = None
    keeper: StageCache | None = None
    regions: bool | str = False  # whether a repeated region is compiled once: True, False, "auto" (where it pays)
    watchers: tuple[Watcher, ...] = ()
    may_fail: bool = False  # a compiler's failure is treated by `on_unsupported`; else it is the caller's
    of_dynamo: bool = False  # the functions are graphs of Dynamo's: Dynamo ran the program with symbols itself
    first: Backend | None = None  # see `Backend`
    _failures: dict[str, Failures] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def build(self, call: FlatCall, name: str, config: Config) -> Product:
        """Capture, partition, compile."""
        with held, paused_collection(), compiling(name):
            return self._build(call, name, config)

    def _build(self, call: FlatCall, name: str, config: Config) -> Product:
        from ..tracing.capture import capture_call  # late: a third of the time that importing foregrad would take
        from ..tracing.parts import Options

        # One run on fakes: forward and backward as one functional graph.
        lifted = [(source.get(), source) for source in self.lifted]
        table = self.decompositions() if callable(self.decompositions) else self.decompositions
        options = Options(name, table or {}, config.higher_order, live_hooks=True, takes_output=True)
        capture = functools.partial(capture_call, options=options, lifted=lifted)
        begin = time.perf_counter()
        with phase("capture"):
            captured = capture(call)
            if call.numbers:
                check_numbers(call, captured.joint, None if self.of_dynamo else capture)
            joint = captured.joint
            if config.check:
                joint.check()
        seconds = time.perf_counter() - begin
        self.tell(CompileStage("capture", name, call.leaves, joint, seconds, joint, captured.tensors))
        for stages in given("stages of backwards"):
            joint = stages.in_buckets(joint)
        # Forward and backward, and the residuals between them.
        begin = time.perf_counter()
        with phase("partition"):
            parts = self.split(joint, (call, captured.reads, captured.facts))
        seconds = time.perf_counter() - begin
        self.tell(CompileStage("partition", name, joint, parts, seconds, joint, compiler=self.partition))
        # Each half to its compiler; the backward only when it is first needed.
        partitioned = self.prepared_halves(parts, kept_for_derivatives(joint, captured.resumable), config)
        self.tell(CompileStage("halves", name, parts, partitioned, 0.0, joint, captured.tensors))
        return Product(captured, self.compile(partitioned, captured.resumable, config))

    def prepared_halves(self, parts: Partitioned, kept: Collection[str], config: Config) -> Partitioned:
        """The halves as they are compiled, with the values of the nodes called `kept` saved too."""
        inference = parts.joint.signature.is_inference
        if config.check and not inference:
            parts.check()
        halves = also_saved(parts, kept)
        return self.prepare_halves(halves) if self.prepare_halves is not None and not inference else halves

    def tell(self, stage: CompileStage) -> None:
        """Tell the logs and the watchers that a stage ended."""
        tell((_LOGS, *self.watchers), stage)

    def split(self, joint: JointGraph, about: Sequence[object] = ()) -> Parts:
        """The two halves; for a function without gradients the joint graph is the forward.

        `about`: the call and its capture's reads, for the key of a cache.
        """
        if self.keeper is None:
            (forward, backward), _ = self._halves(joint)
        else:
            forward, backward = self.keeper.halves(joint, about, functools.partial(self._halves, joint))
        return Parts(joint, forward, backward)

    def _halves(self, joint: JointGraph) -> tuple[tuple[fx.GraphModule, fx.GraphModule], bool]:
        """Forward and backward, and whether the backend's passes succeeded."""
        signature = joint.signature
        if signature.is_inference or joint.backward_error is not None:
            forward = _forward_only(joint)
            prepared = self.prepared(forward, joint)
            return (prepared, _EMPTY), prepared is not forward
        module = self.prepared(joint.module, joint)
        facts: dict[str, object] = {"num_fwd_outputs": signature.num_forward_outputs}
        if is_own(getattr(self.partition, "func", self.partition)):
            module.meta[STAYS] = True
        elif _takes(self.partition, "static_lifetime_input_indices"):
            facts["static_lifetime_input_indices"] = static_inputs(signature)
        halves = self.partition(module, joint.example_inputs(), **facts)
        module.meta.pop(STAYS, None)
        return halves, self.prepare_joint is None or module is not joint.module

    def prepared(self, module: fx.GraphModule, joint: JointGraph | None = None) -> fx.GraphModule:
        """A graph after the backend's own passes. `joint`: the stage's graph, for watchers."""
        if self.prepare_joint is None:
            return module
        begin = time.perf_counter()
        with torch.no_grad(), engine.disable_autocast():
            prepared = opaque_values().around(module, self.prepare_joint)
        if prepared is not module:
            prepared.meta[PREPARED] = True
            if joint is not None:
                seconds = time.perf_counter() - begin
                self.tell(CompileStage("prepare", joint.name, module, prepared, seconds, joint, compiler=self.prepared))
        return prepared

    def compile(
        self, partitioned: Partitioned, resumable: ResumableTrace | None, config: Config, *, may_retry: bool = True
    ) -> Compiled:
        """The halves compiled; the backward lazily, and its derivatives too if `resumable`. `may_retry`: with symbolic
        sizes a failure is raised, for a further capture with plain sizes.
        """
        joint, backward = partitioned.joint, partitioned.backward
        inference, num_saved = joint.signature.is_inference, len(partitioned.saved_nodes)
        graphs = _GraphsOf(self, joint, partitioned.saved_nodes, config)
        compiler = self.inference_compiler if inference else self.fw_compiler
        role = graphs.inference() if inference else graphs.forward()
        forward = graphs.compiled(compiler, partitioned.forward, role, may_retry=may_retry)
        if forward.output_strides is not None:
            _lay_out_saved(partitioned, forward.output_strides)

        lock = make_lock()
        backwards: list[Boxed] = []

        def make_backward(values: list[object] | None = None) -> Boxed:
            if not backwards and joint.signature.gradients.stages:
                stages = the_one("stages of backwards")
                backwards.append(stages.in_stages(backward, joint.signature, graphs.stage))
            if not backwards:
                if self.bw_compiler is eager_compiler:
                    values = None  # eager's kernels write into no donated input
                donated = owned_among(donated_inputs(partitioned), values) if values else ()
                backwards.append(graphs.late(backward, graphs.backward(donated)))
            return backwards[0]

        @functools.cache
        def make_partial_backward(mask: tuple[bool, ...], needs_input_grad: NeedsInputGrad) -> Partial:
            module = backward
            if not all(mask):
                module = without_tangents(module, num_saved, mask, joint.signature.gradients.reached_from)
            if needs_input_grad is not None:
                module = only_gradients(module, needs_input_grad)
            read = tuple(bool(node.users) for node in module.graph.nodes if node.op == "placeholder")[:num_saved]
            return Partial(graphs.late(module, graphs.backward()), read)

        checked = joint.symbols.num_found() if joint.symbols is not None else 0

        def make_derived(case: BackwardCase, at_hand: AtHand) -> Derived:
            assert resumable is not None
            derived = self.derive(partitioned, resumable, case, config, at_hand)
            # The check of the arguments was written before: later conditions on sizes are checked by themselves.
            conditions = joint.symbols.guards(checked) if joint.symbols is not None else ()
            return dataclasses.replace(derived, conditions=tuple(conditions))

        return Compiled(
            partitioned,
            forward.run,
            _one_at_a_time(make_backward, lock),
            _one_at_a_time(make_partial_backward, lock),
            disable_autocast=engine.is_any_autocast_enabled(),
            needs_grad_mode=not inference and not torch.is_grad_enabled(),
            make_derived=None if resumable is None else make_derived,
            native=config.native,
            hooked=resumable is not None and resumable.session.has_hooks,
            path_limit=config.path_limit,
        )

    def failures(self, mode: str) -> Failures | None:
        """The treatment of a compiler's failures, in a mode of `on_unsupported`; None: they are the caller's."""
        if not self.may_fail:
            return None
        return self._failures.setdefault(mode, Failures(warn_user if mode == "eager" else None))

    def derive(
        self,
        partitioned: Partitioned,
        resumable: ResumableTrace,
        case: BackwardCase,
        config: Config,
        at_hand: AtHand = lambda: ((), ()),
    ) -> Derived:
        """The backward of a compiled function through the same stages, starting from its forward's residuals."""
        written = frozenset(update.input for update in partitioned.joint.signature.updates)
        from ..tracing.derivatives.higher_order import Differentiation  # late: see `build`

        with held, taken(resumable.session.lock), torch.set_grad_enabled(case.create_graph):
            _ = partitioned.forward.graph  # made, so that nodes of the joint graph are saved
            saved = [None if i in case.gone else node for i, node in enumerate(partitioned.saved_nodes)]
            results = list(partitioned.saved_results)
            derivative = Differentiation(resumable, partitioned.forward, saved, results, written, case, at_hand).run()
            if config.check:
                derivative.joint.check()
            split: Partitioned = self.split(derivative.joint)
            if not derivative.joint.signature.is_inference:
                split = also_saved(split, self._kept_by_derived(derivative))
            compiled = self.compile(split, derivative.resumable, config, may_retry=False)
        return Derived(derivative, dataclasses.replace(compiled, disable_autocast=True))

    def _kept_by_derived(self, derivative: Derivative) -> set[str]:
        """Values that the next derivative may read: results, and all inputs unless the partition saves as eager does.

        The inputs are in memory anyway: parameters, or residuals of the differentiated function.
        """
        kept = set(derivative.resumable.read_again) | results_read(derivative.joint)
        inputs = derivative.joint.placeholders()[: len(derivative.feeds)]
        kept.update(n.name for n, feed in zip(inputs, derivative.feeds, strict=True) if feed.kind == "result")
        if self.partition is not default_partition:
            valueless = derivative.resumable.valueless
            kept.update(node.name for i, node in enumerate(inputs) if i not in valueless)
        return kept


F = TypeVar("F", bound=Callable[..., Any])


def kept_for_derivatives(joint: JointGraph, resumable: ResumableTrace | None) -> frozenset[str]:
    """The nodes of a joint graph with values that are saved for further derivatives alone."""
    return frozenset() if resumable is None else resumable.read_again | results_read(joint)


def _compiled_alone(compiler: Compiler, joint: JointGraph, module: fx.GraphModule) -> Boxed:
    """A graph made of `joint`, compiled as one that no backward follows."""
    role = GraphRole("inference", (), tuple(range(len(results_of(module)))))
    return as_boxed(called_bare(compiler, module, joint, role)[0])


def _one_at_a_time(make: F, lock: object) -> F:
    """`make` behind a lock: several threads that need a backward at once compile it once."""

    @functools.wraps(make)
    def locked(*args: object) -> object:
        with held, taken(lock), paused_collection():
            return make(*args)

    return locked  # type: ignore[return-value]


def _takes(function: Callable[..., object], name: str) -> bool:
    """Whether `function` has a parameter of the name, or takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return any(parameter.name == name or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def static_inputs(signature: Signature) -> list[int]:
    """The inputs that live on from call to call: parameters and buffers."""
    return [i for i, info in enumerate(signature.inputs) if isinstance(info.slot, (Param, Buffer))]


_EMPTY = fx.GraphModule(torch.nn.Module(), fx.Graph())
_EMPTY.graph.output([])


def _forward_only(joint: JointGraph) -> fx.GraphModule:
    """The joint graph without tangents and gradients."""
    results = joint.outputs()[: joint.signature.num_forward_outputs]
    needed = reachable([node for node in results if node is not None], joint)
    inputs = [node for node in joint.placeholders() if not node.name.startswith("tangents_")]
    nodes = [node for node in joint.graph.nodes if node in needed and node.op not in ("placeholder", "get_attr")]
    return piece(joint.module, inputs, nodes, results, "Forward")


def reachable(outputs: list[fx.Node], joint: JointGraph) -> set[fx.Node]:
    """The nodes that `outputs` need, all random nodes, and all with effects; the backward's too if it has an output."""
    halves = {node.meta.get("partitioner_tag") for node in outputs}
    random = [
        n
        for n in joint.graph.nodes
        if n.op == "call_function" and (is_random(n) or n.is_impure(impure_random=False))
        if n.meta.get("partitioner_tag") != "is_backward" or "is_backward" in halves
    ]
    return needed_by([*outputs, *random])


def is_of_capture(error: BaseException) -> bool:
    """Whether an exception was raised while a function was captured, before any compiler saw it."""
    from ..tracing.capture import capture_call  # late: see `build`

    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not capture_call.__code__:
        trace = trace.tb_next
    return trace is not None


@dataclasses.dataclass(frozen=True, slots=True)
class _GraphsOf:
    """Compiles graphs made of `joint`, each in its role. `saved`: the residuals."""

    pipeline: Pipeline
    joint: JointGraph
    saved: Sequence[fx.Node]
    config: Config

    @property
    def signature(self) -> Signature:
        return self.joint.signature

    def compiled(
        self, compiler: Compiler, module: fx.GraphModule, role: GraphRole, *, may_retry: bool = False
    ) -> CompiledGraph:
        pipeline, joint, config = self.pipeline, self.joint, self.config
        keeper, failures = pipeline.keeper, pipeline.failures(config.on_unsupported)
        always = config.check

        def compile_as(role: GraphRole) -> CompiledGraph:
            return call_compiler(compiler, module, joint, role, always=always, failures=failures, may_retry=may_retry)

        role = dataclasses.replace(role, regions=pipeline.regions)
        begin, name = time.perf_counter(), f"compile {role.phase}"
        with phase(name):
            graph = compile_as(role) if keeper is None else keeper.compiled(module, joint, role, compile_as)
        seconds = time.perf_counter() - begin
        again = functools.partial(_compiled_alone, compiler, joint)
        stage = CompileStage(name, joint.name, module, graph.run, seconds, joint, (), role, compiler, again)
        run = wrapped(pipeline.watchers, stage)
        return graph if run is graph.run else dataclasses.replace(graph, run=run)

    def late(self, module: fx.GraphModule, role: GraphRole) -> Boxed:
        """Compile a backward after the check of the arguments was written: the check takes no further conditions on
        sizes.

        A compiler that adds conditions on a symbolic size is not used for this graph; our own adds none.
        """
        joint, compiler = self.joint, self.pipeline.bw_compiler
        num_guards = joint.num_guards()
        with compiling(joint.name, "the backward"):
            graph = self.compiled(compiler, module, role)
        compiled = graph.run
        if compiler is eager_compiler:
            return compiled
        if graph.writes_into:
            careful = dataclasses.replace(role, donated=())
            make_careful = functools.cache(lambda: self.compiled(compiler, module, careful).run)
            compiled = overwriting(compiled, graph.writes_into, _one_at_a_time(make_careful, make_lock()))

        @functools.cache
        def in_operators() -> Boxed:
            return call_compiler(eager_compiler, module, joint, role).run

        if joint.num_guards() > num_guards:
            return in_operators()
        return _by_tangents(compiled, in_operators, sum(n.name.startswith("tangents_") for n in ends_of(module)[0]))

    def stage(self, module: fx.GraphModule, num_results: int) -> Boxed:
        return self.late(module, GraphRole("backward", (), tuple(range(num_results))))

    # ---------------------------------------------------------------- the role of each half, as its compiler is told

    def forward(self) -> GraphRole:
        role, first = self.inference(), len(self.signature.graph_outputs.slots)
        # A saved input is kept itself, also if the graph returns a value for it; unless an alias is saved too, because
        # the alias may be a copy in a new layout.
        aliased = {node.args[0] for node in self.saved if node.target is torch.ops.aten.alias.default}
        inputs = [first + i for i, node in enumerate(self.saved) if node.op == "placeholder" and node not in aliased]
        return dataclasses.replace(role, phase="forward", visible_outputs=(*role.visible_outputs, *inputs))

    def inference(self) -> GraphRole:
        static = static_inputs(self.signature)
        visible = [i for i, slot in enumerate(self.signature.graph_outputs.slots) if not isinstance(slot, Updated)]
        return GraphRole("inference", tuple(static), tuple(visible), updates=self._updates())

    def _updates(self) -> tuple[tuple[int, int], ...]:
        """Writes to inputs that the graph may carry out; see `graph_arguments` for writes that move no version."""
        writes, hides_versions = writes_for_the_graph(self.signature), self.signature.is_inference
        return tuple((update.input, update.output) for update in writes if update.counted or hides_versions)

    def backward(self, donated: tuple[int, ...] = ()) -> GraphRole:
        visible = [i for i, has in enumerate(self.signature.gradients.returned) if has]
        return GraphRole("backward", tuple(range(len(self.saved))), tuple(visible), donated)


def _lay_out_saved(partitioned: Partitioned, strides: Sequence[tuple[Size, ...] | None]) -> None:
    """Give the backward's placeholders the strides that the forward's compiler chose for residuals."""
    saved = partitioned.saved_nodes
    by_name = {node.name: node for node in partitioned.backward.graph.nodes if node.op == "placeholder"}
    for node, stride in zip(saved, strides[len(strides) - len(saved) :], strict=True):
        placeholder = by_name[node.name]
        spec = spec_of(placeholder)
        if node.op == "placeholder":
            continue
        if isinstance(spec, TensorSpec) and stride is not None and not same_numbers(spec.stride, stride):
            chosen = spec.fresh(spec.shape, stride)
            placeholder.meta.pop("tensor_meta", None)
            placeholder.meta[LAID_OUT] = spec
            placeholder.meta["spec"] = chosen
            placeholder.meta["val"] = new_fake(
                partitioned.joint.fake_mode, chosen.shape, chosen.stride, chosen.dtype, chosen.device
            )


def _by_tangents(compiled: Boxed, in_operators: Callable[[], Boxed], count: int) -> Boxed:
    """A backward for tangents that may be batched or dual: kernels take plain memory only, operators take all."""
    transforms_active, forward_ad = engine.transforms_active, engine.forward_ad

    def backward(values: list[object]) -> list[Any]:
        if transforms_active() or forward_ad._current_level >= 0 or any(map(is_legacy_batched, values[-count:])):
            return in_operators()(values)
        return compiled(values)

    return backward


# -------------------------------------------------------------------- logs
# Logs of a compilation, and its texts in PyTorch's structured trace (`tlparse` shows the trace).


_graphs_log, _partition_log, _guards_log = (
    logging.getLogger(f"foregrad.{name}") for name in ("graphs", "partition", "guards")
)


class _Logs(Watcher):
    """Logs the graph of a capture, its split, and the code around a graph."""

    def stage(self, stage: CompileStage) -> None:
        joint, after = stage.joint, stage.after
        if stage.name == "capture":
            if _graphs_log.isEnabledFor(logging.INFO):
                _graphs_log.info("%s", joint)
            trace_artifact("foregrad_joint_graph", lambda: str(joint))
        elif stage.name == "partition" and not joint.signature.is_inference and joint.backward_error is None:
            if _partition_log.isEnabledFor(logging.INFO):
                _partition_log.info("%s: %s", joint.name, after.report())
                _partition_log.debug("%s", after)
            trace_artifact("foregrad_partition", lambda: f"{after.report()}\n\n{after}")
        elif stage.name == "guards":
            _guards_log.info("%s:\n%s", stage.function, after)
            trace_artifact("foregrad_guards", lambda: after)


_LOGS = _Logs()
