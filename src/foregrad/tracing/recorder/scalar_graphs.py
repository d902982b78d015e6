"""Functions of single scores, as `flex_attention` takes them, each as a graph of its own.

The function runs once on scalars under a mode of its own, with the capture's recorder off. Whatever else it uses (a
table that it looks into, a parameter) becomes one more input of the graph.

Known weakness: sizes that vary are those of this call in such a graph, which is then for them alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ..._torch.dispatch import ThreadDispatchMode, single_threaded_backward, without_modes
from ..._torch.flex import indexed_by_tensors
from ..._torch.graphs import GraphWriter
from ..._torch.modules import make_graph_module
from ..._torch.patches import hooks_off
from ..._torch.stand_ins import is_stand_in
from ..._torch.symbols import map_symbolic
from ...errors import UnsupportedOpError
from ...graph.meta import NodeMeta, TensorSpec
from ..kernels.plans import QUERIES
from ..tape.opinfo import op_info
from .recorder import Recorder

__all__ = ["ScalarGraphs"]


class _Writer(ThreadDispatchMode):
    """Runs operators on fakes and writes them into a graph. `others` are the tensors that the function brought in."""

    def __init__(self, recorder: Recorder, inputs: Sequence[tuple[str, torch.Tensor]], what: str) -> None:
        super().__init__()
        self.recorder, self.what = recorder, what
        self.writer = GraphWriter()
        self.nodes: dict[int, fx.Node] = {}
        self.kept: list[Any] = []  # so that ids stay those of one tensor
        self.others: list[torch.Tensor] = []
        self.viewed: set[int] = set()
        self.inputs = [self._input(name, tensor) for name, tensor in inputs]

    def _input(self, wanted: str, tensor: torch.Tensor) -> fx.Node:
        name = self.writer.name(wanted)
        node = self.writer.add(name, "placeholder", name, (), {}, self._meta(tensor))
        self._bind(tensor, node)
        return node

    def _meta(self, value: Any) -> NodeMeta:
        return NodeMeta({"val": self.recorder.fakes.fake_of(value) if is_stand_in(value) else value})

    def _bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self.kept.append(tensor)
        self.nodes[id(tensor)] = node

    def add_input(self, name: str, tensor: torch.Tensor) -> None:
        """A further input, behind those that there are."""
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
            if not is_own or id(written) in self.viewed or info.functional is None:
                raise self._refused(f"writes to a tensor in place (`{func}`)")
            target = info.functional
        result = self.recorder.kernels(target, args, kwargs)
        name = self.writer.name(target.overloadpacket.__name__.strip("_"))
        given = self._as_nodes(args), self._as_nodes(kwargs)
        node = self.writer.add(name, "call_function", target, *given, self._meta(result))
        if info.writes:
            self.nodes[id(args[info.writes[0]])] = node
            return args[info.writes[0]]
        if isinstance(result, torch.Tensor):
            self._bind(result, node)
        elif isinstance(result, (tuple, list)):
            raise self._refused(f"calls an operator with several results (`{func}`)")
        if info.is_view:
            self.viewed |= {id(result), id(args[0])}
        return result

    def _refused(self, why: str) -> UnsupportedOpError:
        return UnsupportedOpError(
            f"the {self.what} of `flex_attention` called at {self.recorder.where()} {why}, which can't be compiled. "
            "Compute that outside of it, and let it look the values up."
        )

    def _adopted(self, value: Any) -> Any:
        """Arguments in which each tensor is one that the graph has."""
        if isinstance(value, torch.Tensor):
            if id(value) in self.nodes:
                return value
            recorder = self.recorder
            value = value if is_stand_in(value) else recorder.adopt(value)
            if id(value) not in self.nodes:
                self.others.append(value)
                self.add_input("buffer", value)
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(self._adopted(item) for item in value)
        if isinstance(value, dict):
            return {key: self._adopted(item) for key, item in value.items()}
        return value

    def _as_nodes(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.nodes[id(value)]
        if isinstance(value, (list, tuple)):
            return type(value)(self._as_nodes(item) for item in value)
        if isinstance(value, dict):
            return {key: self._as_nodes(item) for key, item in value.items()}
        return value

    def module(self, results: Any, name: str) -> fx.GraphModule:
        """The graph up to now, with these results, and nothing that they do not need."""
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        found = self._as_nodes(results)
        needed = _needed([node for node in (found if isinstance(found, list) else [found]) if node is not None])
        for node in (*self.inputs, *(n for n in self.writer.graph.nodes if n.op != "placeholder" and n in needed)):
            made[node] = graph.node_copy(node, made.__getitem__)
        graph.output(fx.map_arg(found, made.__getitem__))
        return make_graph_module(torch.nn.Module(), graph, name)


def _number(value: Any) -> Any:
    """A symbolic number as what it is in this call, which is guarded."""
    kind = {torch.SymInt: int, torch.SymFloat: float}.get(type(value), bool)
    return kind(value)


def _needed(results: Sequence[fx.Node]) -> set[fx.Node]:
    needed: set[fx.Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes
    return needed


class ScalarGraphs:
    """Makes graphs of functions of scores, in one capture. `lifting` swaps what functions reach by themselves."""

    def __init__(self, recorder: Recorder, lifting: Any) -> None:
        self.recorder, self.lifting = recorder, lifting

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

    def _joint(self, writer: _Writer, score: torch.Tensor, result: torch.Tensor) -> fx.GraphModule:
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
        writer = _Writer(self.recorder, scalars, what)
        for value in given:
            if isinstance(value, torch.Tensor):
                writer._adopted(value)
        with without_modes(self.lifting, self.recorder), self.lifting, indexed_by_tensors(), writer:
            yield writer

    def _checked(self, writer: _Writer, result: Any) -> torch.Tensor:
        if not isinstance(result, torch.Tensor):
            raise RuntimeError(f"Expected output of {writer.what} to be a tensor. Got type {type(result)}.")
        found: torch.Tensor = writer._adopted(result)  # one that the function only looked up, too
        return found

    def _indices(self, query: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return [(name, self._scalar(query, torch.int32)) for name in ("b", "h", "m", "n")]

    def _scalar(self, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.recorder.fake_of(TensorSpec((), (), dtype, like.device))
