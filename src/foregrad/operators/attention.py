"""`flex_attention` in a capture: one operator of the graph, and one of its backward, with the graphs of `score_mod` and
`mask_mod` as arguments, as compilers with kernels expect.

Known weaknesses: it is not differentiated twice, like PyTorch's; under a transform of torch.func, and for tensor
subclasses, it is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import fx

from .._torch.engine import ThreadDispatchMode, is_any_autocast_enabled, single_threaded_backward, without_modes
from .._torch.graphs import GraphWriter, make_graph_module, needed_by
from .._torch.nested import mapped
from .._torch.ops import Args, Kwargs
from .._torch.patches import hooks_off, is_capturing, region_runner
from .._torch.stand_ins import is_stand_in
from .._torch.symbols import map_symbolic
from .._torch.tensors import is_inside_transform
from .._torch.wrappers import is_wrapper
from ..errors import UnsupportedOpError
from ..graph.meta import NodeMeta, TensorSpec, contiguous_strides
from ..identity import ById, IdSet
from ..locks import Bind
from ..tracing.aspect import Aspect, Row, aspect
from ..tracing.heap.recording import Host, Recording
from ..tracing.kernels.plans import QUERIES
from ..tracing.recorder.recorder import Recorder
from ..tracing.tape.opinfo import op_info
from ..tracing.tape.tape import Entry
from ._torch.control_flow import ATTENTION, BACKWARD, indexed_by_tensors, install, strides_like
from ._torch.jagged_attention import attends_by_math, jagged_of, parts_of_jagged
from .branches import Branches

_QUERY_INDICES = 7  # of a block mask's contents


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """Arguments that both operators have behind their tensors and graphs, under PyTorch's names."""

    block_mask: tuple[Any, ...]
    scale: float
    kernel_options: dict[str, Any]
    score_mod_other_buffers: Sequence[Any] = ()
    mask_mod_other_buffers: Sequence[Any] = ()


@aspect
class ByMath(Aspect):
    """`scaled_dot_product_attention` of jagged tensors that only the kernel by math covers: an eager region."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.recorder = recorder

    def resumed(self) -> Aspect:
        return self

    def attend(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        if not is_by_math(*args, **kwargs):
            return function(*args, **kwargs)
        with self.recorder.host.lifting:  # as where a user calls a region
            return attention(*args, **kwargs)

    functions: ClassVar[Mapping[Any, Row]] = {torch.nn.functional.scaled_dot_product_attention: attend}


@aspect
class CastInside(Aspect):
    """Functions with kernels that call operators under autocast, out of a capture's sight."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.recorder = recorder

    def resumed(self) -> Aspect:
        return self

    def run(self, function: Any, args: Args, kwargs: Kwargs) -> Any:
        if is_any_autocast_enabled():
            raise UnsupportedOpError(
                f"the kernel of `{function.__name__}` at {self.recorder.where()} casts inside under autocast, and a "
                "graph can't repeat the cast. Call it under torch.autocast(..., enabled=False), or outside the "
                "compiled function."
            )
        return function(*args, **kwargs)

    functions: ClassVar[Mapping[Any, Row]] = dict.fromkeys((torch.bilinear, torch.linalg.pinv, torch.pinverse), run)


@aspect
class Attention(Aspect):
    """Records calls of the operators. `keeps`: see `KeptOperators`."""

    def __init__(self, host: Host, recorder: Any) -> None:
        self.recorder, self.graphs = recorder, ScalarGraphs(recorder)
        self.keeps = Branches(recorder).operators() if host.keeps_branches else {}

    @staticmethod
    def install(bind: Bind, current: Callable[[], Any]) -> None:
        install(bind, is_capturing, region_runner, current)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, *rest: Any, **named: Any
    ) -> Any:
        """The result of `torch.ops.higher_order.flex_attention`. `rest` and `named`: see `_Given`."""
        query, key, value = map(self._stand_in, (query, key, value))
        given = _Given(*rest, **named)
        buffers = tuple(map(self._stand_in, given.score_mod_other_buffers))
        differentiated = _requires_grad((query, key, value, *buffers))
        scores = self.graphs.score(score_mod, query, buffers, differentiated=differentiated)
        if not differentiated and _requires_grad(scores[2]):  # that the function reaches by itself
            scores = self.graphs.score(score_mod, query, buffers, differentiated=True)
        if scores[1] is not None and given.block_mask[_QUERY_INDICES] is None:
            raise RuntimeError(
                "BlockMask q_indices is None. Backward pass requires q_indices to be computed. "
                "Please create the BlockMask with compute_q_blocks=True"
            )
        return _Attention.apply(self._call(query, scores, given), query, key, value, *scores[2])

    def backward(self, *args: Any) -> Any:
        """The result of `torch.ops.higher_order.flex_attention_backward`, from seven tensors, the graphs of the scores
        and of their derivative, and the arguments in `_Given`.
        """
        tensors, given = [self._stand_in(t) for t in args[:7]], _Given(*args[9:])
        buffers = tuple(map(self._stand_in, given.score_mod_other_buffers))
        with torch.enable_grad():
            scores = self.graphs.score(args[7], tensors[0], buffers, differentiated=True)
        call = self._call(tensors[0], scores, given)
        with torch.no_grad():
            gradients = call.gradients(tensors)
        return *gradients[:3], tuple(gradients[3 : 3 + len(buffers)])

    def _call(self, query: torch.Tensor, scores: Any, given: _Given) -> _AttentionCall:
        """`scores`: their graph, their derivative's, and the tensors that both reach by themselves."""
        score, joint, others = scores
        masked = tuple(map(self._stand_in, given.mask_mod_other_buffers))
        mask, mask_others = self.graphs.mask(given.block_mask[-1], query, masked)
        blocks = (*map(self._stand_in, given.block_mask[:-1]), mask)
        return _AttentionCall(self, score, joint, blocks, given.scale, dict(given.kernel_options), others, mask_others)

    def _stand_in(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if is_inside_transform(value) or is_wrapper(value):
            where = "under a transform of torch.func" if is_inside_transform(value) else f"on a {type(value).__name__}"
            raise UnsupportedOpError(
                f"`flex_attention` is called at {self.recorder.where()} {where}; this can't be compiled. Keep the "
                "part outside the compiled function, or use `scaled_dot_product_attention`."
            )
        return value if is_stand_in(value) else self.recorder.adopt(value)


def _requires_grad(values: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


@dataclasses.dataclass(eq=False, slots=True)
class _AttentionCall:
    """One call. `joint` is None where nothing is differentiated."""

    attention: Attention
    score: fx.GraphModule
    joint: fx.GraphModule | None
    blocks: tuple[Any, ...]
    scale: float
    options: dict[str, Any]
    others: tuple[torch.Tensor, ...]
    mask_others: tuple[torch.Tensor, ...]

    def results(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """(output, logarithms of sums, largest scores)"""
        recorder = self.attention.recorder
        args = (query, key, value, self.score, self.blocks, self.scale, self.options, self.others, self.mask_others)
        entry = recorder.entry(ATTENTION, recorder.to_entries(args), {}, is_random=False)
        rows = tuple(query.shape[:-1])
        shape = (*rows, value.shape[-1])
        kind = torch.float64 if query.dtype is torch.float64 else torch.float32
        row = TensorSpec(rows, contiguous_strides(rows), kind, query.device)
        entry.spec = (TensorSpec(shape, strides_like(shape, query.stride()), query.dtype, query.device), row, row)
        return self._bound(entry)

    def gradients(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Gradients of query, key and value, and of each other tensor that requires one."""
        recorder, (query, key, value) = self.attention.recorder, tensors[:3]
        rest = (self.score, self.joint, self.blocks, self.scale, self.options, self.others, self.mask_others)
        entry = recorder.entry(BACKWARD, recorder.to_entries((*tensors, *rest)), {}, is_random=False)
        specs = []
        for tensor in (query, key, value):
            shape = (query.shape[0], *tensor.shape[1:])
            like = TensorSpec(shape, strides_like(shape, tensor.stride()), tensor.dtype, tensor.device)
            if tensor.shape[0] != query.shape[0]:  # one for all of the batch: the sum of theirs
                total = recorder.run_fake(torch.ops.aten.sum.dim_IntList, (recorder.fake_of(like), [0], True), {})
                like = recorder.spec_of(total)
            specs.append(like)
        shapes = [tuple(t.shape) if t.requires_grad else None for t in self.others]
        buffers = tuple(
            None if shape is None else TensorSpec(shape, contiguous_strides(shape), t.dtype, t.device)
            for t, shape in zip(self.others, shapes, strict=True)
        )
        entry.spec = (*specs, buffers)
        *found, others = self._bound(entry)
        return *found, *others

    def _bound(self, entry: Entry) -> Sequence[Any]:
        recorder = self.attention.recorder
        found: Sequence[Any] = recorder.bind_results(entry, recorder.fakes_like(entry.spec))
        return found


class _Attention(torch.autograd.Function):
    """Links the results to their operands."""

    @staticmethod
    def forward(ctx: Any, call: _AttentionCall, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        results = call.results(*tensors[:3])
        ctx.mark_non_differentiable(results[2])
        ctx.save_for_backward(*tensors, *results[:2])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        *tensors, out, sums = ctx.saved_tensors
        found = _Gradient.apply(ctx.call, (*tensors[:3], out, sums, *gradients[:2]), *tensors, *gradients[:2])
        return None, *found


class _Gradient(torch.autograd.Function):
    """The gradients; they depend on `tensors`."""

    @staticmethod
    def forward(ctx: Any, call: _AttentionCall, given: Sequence[Any], *tensors: Any) -> Any:
        return tuple(call.gradients(given))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("Autograd not implemented for flex_attention_backward")


# -------------------------------------------------------------------- functions of scores
# Functions of single scores, as `flex_attention` takes them, each as a graph of its own.
#
# The function runs once on scalars under a mode of its own, with the capture's recorder off. A table or a parameter
# that the function reads becomes one more input of the graph.
#
# Known weakness: a graph of scores holds this call's sizes, and so serves these sizes alone.


class _ScoreWriter(ThreadDispatchMode):
    """Runs operators on fakes and writes them into a graph. `others` are the tensors that the function brought in."""

    def __init__(self, recorder: Recorder, inputs: Sequence[tuple[str, torch.Tensor]], what: str) -> None:
        super().__init__()
        self.recorder, self.what = recorder, what
        self.writer = GraphWriter()
        self.nodes: ById[torch.Tensor, fx.Node] = ById()
        self.others: list[torch.Tensor] = []
        self.viewed: IdSet[torch.Tensor] = IdSet()
        self.inputs = [self._input(name, tensor) for name, tensor in inputs]

    def _input(self, wanted: str, tensor: torch.Tensor) -> fx.Node:
        name = self.writer.name(wanted)
        node = self.writer.add(name, "placeholder", name, (), {}, self._meta(tensor))
        self._bind(tensor, node)
        return node

    def _meta(self, value: Any) -> NodeMeta:
        return NodeMeta({"val": self.recorder.fakes.fake_of(value) if is_stand_in(value) else value})

    def _bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self.nodes[tensor] = node

    def add_input(self, name: str, tensor: torch.Tensor) -> None:
        """A further input, behind the present inputs."""
        self.inputs.append(self._input(name, tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in QUERIES:
            return self.recorder.kernels(func, args, kwargs or {})
        info, kwargs = op_info(func), kwargs or {}
        if info.is_composite:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        args, kwargs = map_symbolic(args, _number), map_symbolic(kwargs, _number)
        if func is torch.ops.aten.lift_fresh.default:
            return self._adopted(self.recorder.constant(args[0]))
        args, kwargs = self._adopted(args), self._adopted(kwargs)
        if info.is_random:
            raise self._refused(f"draws random numbers (`{func}`)")
        target = func
        if info.writes:
            written = args[info.writes[0]] if len(info.writes) == 1 else None
            is_own = written is not None and not any(written is other for other in self.others)
            if not is_own or written in self.viewed or info.functional is None:
                raise self._refused(f"writes to a tensor in place (`{func}`)")
            target = info.functional
        result = self.recorder.kernels(target, args, kwargs)
        name = self.writer.name(target.overloadpacket.__name__.strip("_"))
        given = self._as_nodes(args), self._as_nodes(kwargs)
        node = self.writer.add(name, "call_function", target, *given, self._meta(result))
        if info.writes:
            self.nodes[args[info.writes[0]]] = node
            return args[info.writes[0]]
        if isinstance(result, torch.Tensor):
            self._bind(result, node)
        elif isinstance(result, (tuple, list)):
            raise self._refused(f"calls an operator with several results (`{func}`)")
        if info.is_view:
            self.viewed.update((result, args[0]))
        return result

    def _refused(self, why: str) -> UnsupportedOpError:
        return UnsupportedOpError(
            f"the {self.what} of `flex_attention` called at {self.recorder.where()} {why}; this can't be compiled. "
            f"Compute the values outside, and let the {self.what} look them up."
        )

    def _adopted(self, value: Any) -> Any:
        """The arguments, with the graph's own tensors in place of all tensors."""
        return mapped(value, torch.Tensor, self._of_graph)

    def _of_graph(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor in self.nodes:
            return tensor
        tensor = tensor if is_stand_in(tensor) else self.recorder.adopt(tensor)
        if tensor not in self.nodes:
            self.others.append(tensor)
            self.add_input("buffer", tensor)
        return tensor

    def _as_nodes(self, value: Any) -> Any:
        return mapped(value, torch.Tensor, lambda tensor: self.nodes[tensor])

    def module(self, results: Any, name: str) -> fx.GraphModule:
        """The graph up to now, with the `results`, and without unneeded nodes."""
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        found = self._as_nodes(results)
        needed = needed_by([node for node in (found if isinstance(found, list) else [found]) if node is not None])
        for node in (*self.inputs, *(n for n in self.writer.graph.nodes if n.op != "placeholder" and n in needed)):
            made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(fx.map_arg(found, made.__getitem__))
        return make_graph_module(torch.nn.Module(), graph, name)


def _number(value: Any) -> Any:
    """A symbolic number's value in the present call, guarded."""
    kind = int if isinstance(value, torch.SymInt) else float if isinstance(value, torch.SymFloat) else bool
    return kind(value)


class ScalarGraphs:
    """Makes graphs of functions of scores, in one capture."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def mask(self, function: Callable[..., Any], query: torch.Tensor, given: Sequence[Any]) -> Any:
        """(graph, other inputs) of a function of (batch, head, query position, key position, *given)."""
        with self._written(self._indices(query), given, "mask_mod") as writer:
            result = function(*(tensor for _, tensor in self.scalars), *given)
        return writer.module(self._checked(writer, result), "mask_graph"), tuple(writer.others)

    def score(
        self, function: Callable[..., Any], query: torch.Tensor, given: Sequence[Any], *, differentiated: bool
    ) -> Any:
        """(graph, graph of its derivative or None, other inputs) of a function of (score, batch, head, query position,
        key position, *given).
        """
        score = self._scalar(query, query.dtype).requires_grad_(differentiated)
        with self._written([("score", score), *self._indices(query)], given, "score_mod") as writer:
            with torch.set_grad_enabled(differentiated):
                result = self._checked(writer, function(*(tensor for _, tensor in self.scalars), *given))
            forward = writer.module(result, "score_graph")
            joint = self._joint(writer, score, result) if differentiated else None
        return forward, joint, tuple(writer.others)

    def _joint(self, writer: _ScoreWriter, score: torch.Tensor, result: torch.Tensor) -> fx.GraphModule:
        gradient = self._scalar(result, result.dtype)
        inputs, count = list(writer.inputs), 5
        writer.add_input("gradient", gradient)
        wanted = [score, *(t for t in writer.others if t.requires_grad)]
        found: Sequence[Any] = [None] * len(wanted)
        if result.requires_grad:
            with hooks_off(), single_threaded_backward():
                found = torch.autograd.grad(result, wanted, gradient, allow_unused=True)
        first = torch.zeros_like(score) if found[0] is None else found[0]
        rest = iter(found[1:])
        buffers = tuple(next(rest) if t.requires_grad else None for t in writer.others)
        writer.inputs[:] = [*inputs[:count], writer.inputs[-1], *inputs[count:]]
        return writer.module([first, None, None, None, None, *buffers], "joint_graph")

    @contextlib.contextmanager
    def _written(self, scalars: list[tuple[str, torch.Tensor]], given: Sequence[Any], what: str) -> Any:
        self.scalars = scalars
        writer = _ScoreWriter(self.recorder, scalars, what)
        for value in given:
            if isinstance(value, torch.Tensor):
                writer._adopted(value)
        lifting = self.recorder.host.lifting  # swaps the tensors that functions reach by themselves
        with without_modes(lifting, self.recorder), lifting, indexed_by_tensors(), writer:
            yield writer

    def _checked(self, writer: _ScoreWriter, result: Any) -> torch.Tensor:
        if not isinstance(result, torch.Tensor):
            raise RuntimeError(f"Expected output of {writer.what} to be a tensor. Got type {type(result)}.")
        found: torch.Tensor = writer._adopted(result)  # one that the function only looked up, too
        return found

    def _indices(self, query: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(name, self._scalar(query, torch.int32)) for name in ("b", "h", "m", "n")]

    def _scalar(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.recorder.fake_of(TensorSpec((), (), dtype, like.device))


# -------------------------------------------------------------------- attention of jagged tensors
# Attention of jagged tensors where PyTorch has no fused kernel: it goes by lengths that only real tensors have.
#
# `scaled_dot_product_attention` then makes nested tensors of a second kind, and nothing can capture these. The
# attention is an eager region here, over the plain tensors inside; the operators around it stay in the graph.


def is_by_math(query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **options: Any) -> bool:
    """Whether these are arguments of `scaled_dot_product_attention` that it has no fused kernel for."""
    return attn_mask is None and attends_by_math(query, key, value, *rest, **options)


def attention(query: Any, key: Any, value: Any, attn_mask: None = None, *rest: Any, **options: Any) -> Any:
    """`scaled_dot_product_attention` of stand-ins."""
    tensors: list[torch.Tensor] = []
    places = []
    for jagged in (query, key, value):
        found = parts_of_jagged(jagged)
        places.append((_place(tensors, found.values), _place(tensors, found.offsets), found.ragged))
    of_query = parts_of_jagged(query)
    run, given = region_runner(), (tensors, tuple(places), rest, tuple(options.items()))
    rows = _region(*given) if run is None else run(_region, given, {})
    return jagged_of(rows, of_query.offsets, 1, of_query.least, of_query.most).transpose(1, 2)


def _place(tensors: list[torch.Tensor], tensor: torch.Tensor) -> int:
    """A tensor's position in a list without repeats: equal offsets are one tensor."""
    for index, other in enumerate(tensors):
        if other is tensor:
            return index
    tensors.append(tensor)
    return len(tensors) - 1


def _region(tensors: Any, places: Any, rest: Any, options: Any) -> torch.Tensor:
    given = [jagged_of(tensors[values], tensors[offsets], ragged) for values, offsets, ragged in places]
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    result = attend(*given, None, *rest, **dict(options))
    rows: torch.Tensor = result.transpose(1, 2).values()
    return rows
