"""The stages, each by itself, and the first operator of the first that is wrong."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import operator
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import fx

from foregrad.extend import CompileStage, is_house_file
from foregrad.graph.joint import JointGraph
from foregrad.graph.printing import user_line
from foregrad.partitioners import op_info
from foregrad.tools._torch.tools import (
    OpOverload,
    ThreadDispatchMode,
    make_graph_module,
    mapped,
    storage_key,
    tensors_in,
)

from .compare import Gap, Verdict
from .locate import Culprit, Piece, first_in_decompositions, gap_of, ranges_of
from .lockstep import evaluate, gives_nothing, steps
from .report import StageResult
from .search import Maker, made_gap, needed_of, smallest_wrong
from .watched import Execution, GlobalGenerators, Log, copied

# Namespaces with operators that run Python, or talk to further processes.
_NAMESPACES = ("foregrad", "c10d", "_c10d_functional")


@dataclasses.dataclass
class Stages:
    """The compiled stages of one call, with `decompositions`. `capture()` captures without decompositions."""

    log: Log
    decompositions: Any
    capture: Callable[[], JointGraph]

    def run(self) -> tuple[list[StageResult], Culprit | None]:
        """Each stage's verdict, and the first operator of the first stage that is wrong."""
        results: list[StageResult] = []
        culprit: Culprit | None = None
        try:
            for stage, suspect in self._of_joint_graph():
                results.append(stage)
                culprit = culprit or suspect
        except Exception as error:  # a backend's passes may make operators that eager's kernels don't take
            results.append(StageResult("decompositions and partition", None, _no_run(error)))
        for execution in self.log.executions:
            try:
                stage = self._of_half(execution)
            except Exception as error:
                stage = StageResult(_name_of(execution), None, _no_run(error))
            results.append(stage)
            if stage.verdict is Verdict.WRONG and culprit is None:
                made = execution.stage
                assert made.compiler is not None
                maker = Maker("compiler", made.compiler, made.again, made.seconds)
                culprit = smallest_wrong(execution.module, execution.inputs, execution.generators, maker)
        return results, culprit

    # ---------------------------------------------------------------- the joint graph

    def _of_joint_graph(self) -> list[tuple[StageResult, Culprit | None]]:
        """Decompositions, the backend's passes and the partition, where the first execution was of a whole function."""
        table = self.decompositions
        table = dict((table() if callable(table) else table) or {})
        values = Values.of(self.log, self.capture if table else None)
        if isinstance(values, str):
            return [(StageResult("decompositions and partition", None, values), None)]
        results: list[tuple[StageResult, Culprit | None]] = []
        if table:
            # Each decomposition is judged by itself: if each differs only by rounding, all together do.
            generators = self.log.executions[0].generators
            culprit = first_in_decompositions(values.joint.module, values.inputs, table, generators)
            gap, verdict = (None, Verdict.EQUAL) if culprit is None else (culprit.gap, Verdict.WRONG)
            if culprit is None and (gap := values.differs(values.run(values.module))) is not None:
                verdict = Verdict.ROUNDING
            elif culprit is not None:
                values.before = values.run(values.module)
            results.append((_result("decompositions", verdict, gap), culprit))
        if values.prepared is not None:
            verdict, gap = values.judge(values.run(values.prepared.after))
            culprit = (
                values.culprit(values.module, "passes", values.prepared.compiler) if verdict is Verdict.WRONG else None
            )
            results.append((_result("the backend's passes", verdict, gap), culprit))
        if values.halves is not None:
            verdict, gap = values.judge(values.split())
            module = values.module if values.prepared is None else values.prepared.after
            partition = self.log.partitioned[0].compiler
            culprit = values.culprit(module, "partition", partition) if verdict is Verdict.WRONG else None
            results.append((_result("partition", verdict, gap), culprit))
        return results

    # ---------------------------------------------------------------- compiled halves

    def _of_half(self, execution: Execution) -> StageResult:
        name = _name_of(execution)
        if _runs_python(execution.module):
            return StageResult(name, None, "it runs Python or talks to other processes")

        def exact() -> Any:
            execution.generators.put_back()
            return list(steps(execution.module, execution.inputs, exactly=True))[-1].exact()

        return _result(name, *_worst(execution.results, execution.expected(), exact))


def _name_of(execution: Execution) -> str:
    stage = execution.stage
    return f"{stage.name.removeprefix('compile ')} of {stage.joint.name}"


@dataclasses.dataclass
class Values:
    """The inputs of one call's joint graph, and its results in float64."""

    joint: JointGraph  # without decompositions
    module: fx.GraphModule  # with all
    prepared: CompileStage | None
    halves: tuple[fx.GraphModule, fx.GraphModule] | None
    inputs: list[Any]
    log: Log
    before: list[Any] = dataclasses.field(default_factory=list)
    exactly: list[Any] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, log: Log, capture: Callable[[], JointGraph] | None) -> Values | str:
        """The values; or why there are none. `capture`: None where there are no decompositions."""
        if len(log.captured) != 1:
            return "the call made several graphs"
        halves = log.captured[0]
        other = halves.joint
        joint = other if capture is None else capture()
        if [str(i.slot) for i in joint.signature.inputs] != [str(i.slot) for i in other.signature.inputs]:
            return "the graph takes other inputs"
        if _runs_python(joint.module):
            return "the graph runs Python or talks to other processes"
        forward = log.executions[0]
        backward = next((e for e in log.executions[1:] if e.stage.joint is forward.stage.joint), None)
        by_name = dict(_named_inputs(forward))
        if backward is not None:
            by_name |= {n: v for n, v in _named_inputs(backward) if n.startswith("tangents_")}
        has_backward = not joint.signature.is_inference and joint.backward_error is None
        names = [node.name for node in other.placeholders()]
        if has_backward and any(name not in by_name for name in names):
            return "the backward did not run as a whole"
        inputs = [by_name[name] for name in names if name in by_name]
        prepared = next(iter(log.prepared), None)
        pair = (halves.after.forward, halves.after.backward) if has_backward else None
        return cls(joint, other.module, prepared, pair, inputs, log)

    def run(self, module: fx.GraphModule) -> list[Any]:
        """The results of a joint graph."""
        self.log.executions[0].generators.put_back()
        return evaluate(module, self.inputs)

    def split(self) -> list[Any]:
        """The results of the halves, one after the other."""
        assert self.halves is not None
        forward, backward = self.halves
        first, *later = self.log.executions
        count = self.joint.signature.num_forward_outputs
        results = first.expected()  # of the forward half, on these inputs
        nodes = next(iter(reversed(forward.graph.nodes))).args[0]
        values = {node.name: value for node, value in zip(nodes, results, strict=True) if isinstance(node, fx.Node)}
        values |= {n.name: v for n, v in zip(self.joint.placeholders(), self.inputs, strict=True)}
        taken = [values[node.name] for node in backward.graph.nodes if node.op == "placeholder"]
        execution = next((e for e in later if e.module is backward), None)
        if execution is not None and _worst(taken, execution.inputs, lambda: None)[1] is None:
            return results[:count] + execution.expected()
        return results[:count] + evaluate(backward, taken)

    def differs(self, results: list[Any]) -> Gap | None:
        """The difference of results from the previous stage's; None where they are equal."""
        before = self.before or self.run(self.joint.module)
        self.before = results
        return _worst(results, before, lambda: None)[1]

    def judge(self, results: list[Any]) -> tuple[Verdict, Gap | None]:
        """The results judged beside the previous stage's."""
        before = self.before or self.run(self.joint.module)
        self.before = results
        return _worst(results, before, self._exact)

    def _exact(self) -> list[Any]:
        if not self.exactly:
            self.log.executions[0].generators.put_back()
            self.exactly = list(steps(self.joint.module, self.inputs, exactly=True))[-1].exact()
        return self.exactly

    def culprit(self, module: fx.GraphModule, kind: Any, function: Callable[..., Any] | None) -> Culprit | None:
        """The operator that a stage gets wrong."""
        assert function is not None
        maker = Maker(kind, function)
        return smallest_wrong(module, self.inputs, self.log.executions[0].generators, maker)


def _worst(actual: list[Any], expected: list[Any], exact: Any) -> tuple[Verdict, Gap | None]:
    gap = gap_of(actual, expected, exact)
    return gap.verdict, gap if gap.verdict is not Verdict.EQUAL else None


def _result(name: str, verdict: Verdict, gap: Gap | None) -> StageResult:
    if gap is None:
        return StageResult(name, verdict)
    return StageResult(
        name, verdict, gap.what or f"up to {gap.absolute:.3g}" + (f", {gap.ulps:,} ULPs" * bool(gap.ulps))
    )


def _no_run(error: Exception) -> str:
    return f"it does not run on eager's kernels: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _named_inputs(execution: Execution) -> list[tuple[str, Any]]:
    nodes = [node for node in execution.module.graph.nodes if node.op == "placeholder"]
    return [(node.name, value) for node, value in zip(nodes, execution.inputs, strict=True)]


def _runs_python(module: fx.GraphModule) -> bool:
    return any(str(getattr(node.target, "namespace", "")) in _NAMESPACES for node in module.graph.nodes)


# --------------------------------------------------------------------------------------------------------- the capture
# The first operator of a captured graph that eager does not run.
#
# Eager runs once more under a mode that notes each result by its content. A node of the graph, run on eager's kernels,
# whose value eager never had is where the capture went wrong; the report adds the first eager operator with a value
# that the graph lacks.
#
# The operators of eager's forward are a program as well. A few operators that are captured wrong by themselves are the
# reproducer. A fault that needs Python has no reproducer.
#
# Known weakness: a value that eager has twice, once where the graph has it and once where it lacks it, is not missed.

_TORCH = os.path.dirname(torch.__file__)
_DETACH = torch.ops.aten.detach.default
Content = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _NotedCall:
    """A call of an operator; `before`: copies of its tensors from before it."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    before: dict[int, torch.Tensor]  # by the ids of the tensors


class EagerValues(ThreadDispatchMode):
    """Notes operators' results: `by_content` has the operator and the user's line for each content, in order.

    `calls` are the forward's; it ends when `is_forward` is set to False.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_content: dict[Content, tuple[str, str]] = {}
        self.calls: list[_NotedCall] = []
        self.is_forward = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before: dict[int, torch.Tensor] = {}
        is_noted = self.is_forward and func is not _DETACH  # autograd calls it for saved tensors
        if is_noted:
            tensors = _tensors((args, kwargs))
            before = {id(t): copied(t).requires_grad_(t.requires_grad) for t in tensors}
        result = func(*args, **kwargs)
        if is_noted:
            self.calls.append(_NotedCall(func, args, kwargs, result, before))
        info = op_info(func)
        is_cotangent = not self.is_forward and "generator" in kwargs  # drawn by `verify`
        if not gives_nothing(func) and not is_cotangent:
            for tensor in _tensors((result, args) if info.writes else result):
                for memory in (tensor, tensor._base):
                    if memory is not None:
                        name = "" if info.is_view else str(func)
                        self.by_content.setdefault(_content(memory), (name, _user_place()))
        return result


def first_not_eager(module: fx.GraphModule, inputs: Sequence[Any], eager: EagerValues) -> Culprit | None:
    """The first node with a value that eager does not have; None where eager has all."""
    input_contents = {_content(value) for value in inputs if isinstance(value, torch.Tensor)}
    culprit: Culprit | None = None
    graph: set[Content] = set(input_contents)
    for step in steps(module, inputs):
        contents = [_content(tensor) for tensor in _tensors(step.value)]
        graph.update(contents)
        node = step.node
        is_left = node.op != "call_function" or node.target is operator.getitem or gives_nothing(node.target)
        if culprit is not None or is_left or (isinstance(node.target, OpOverload) and op_info(node.target).is_view):
            continue
        if any(content not in eager.by_content and content not in input_contents for content in contents):
            operands = zip(node.all_input_nodes, _tensors((step.args, step.kwargs)), strict=False)
            named = ranges_of((operand.name, value) for operand, value in operands)
            culprit = Culprit(node.name, str(node.target), user_line(node), Gap(Verdict.WRONG), named)
    lacking = next((noted for content, noted in eager.by_content.items() if noted[0] and content not in graph), None)
    if culprit is None and lacking is None:
        return None
    what = "eager has all of the graph's values" if culprit is None else "eager never has this value"
    if lacking is not None:
        place = f" at {lacking[1]}" if lacking[1] else ""
        what += f"; the first of eager's that the graph lacks is that of {lacking[0]}{place}"
    if culprit is None:
        return Culprit("nothing", "no operator of the graph", None, Gap(Verdict.WRONG, what), ())
    return Culprit(culprit.node, culprit.operator, culprit.where, Gap(Verdict.WRONG, what), culprit.operands)


def with_program(culprit: Culprit, eager: EagerValues, maker: Maker) -> Culprit:
    """The culprit with a piece: few of the forward's operators that `maker` gets wrong. Without one where none are."""

    def gap(numbers: Sequence[int]) -> Gap | None:
        piece = _piece([eager.calls[i] for i in sorted(numbers)])
        try:
            return None if piece is None else made_gap(piece, maker)
        except Exception:  # a part of a program may not run
            return None

    numbers = needed_of(gap, range(len(eager.calls) - 1, -1, -1), 1)
    if numbers is None:
        return culprit
    piece = _piece([eager.calls[i] for i in sorted(numbers)])
    return dataclasses.replace(culprit, piece=piece, maker=maker)


def _piece(calls: Sequence[_NotedCall]) -> Piece | None:
    """Calls as a graph. A tensor from outside is an input, with its content from before its first use."""
    graph = fx.Graph()
    inputs: list[torch.Tensor] = []
    nodes: dict[Any, fx.Node] = {}  # by a tensor's id, and by its place: autograd makes a second object of a view

    def note(tensor: torch.Tensor, node: fx.Node) -> None:
        nodes[id(tensor)] = nodes[_place(tensor)] = node

    def operand(call: _NotedCall, value: torch.Tensor) -> fx.Node:
        if id(value) not in nodes and _place(value) not in nodes:
            with graph.inserting_before(None):  # ahead of all others
                note(value, graph.placeholder(f"x{len(inputs)}"))
            inputs.insert(0, call.before[id(value)])
        return nodes.get(id(value)) or nodes[_place(value)]

    for call in calls:
        args, kwargs = mapped((call.args, call.kwargs), torch.Tensor, functools.partial(operand, call))
        node = graph.call_function(call.op, args, kwargs)
        if isinstance(call.result, torch.Tensor):
            note(call.result, node)
        elif isinstance(call.result, (list, tuple)):
            for i, item in enumerate(call.result):
                if isinstance(item, torch.Tensor):
                    note(item, graph.call_function(operator.getitem, (node, i)))
    results = dict.fromkeys(node for node in nodes.values() if node.op == "call_function" and not node.users)
    if not results:
        return None
    graph.output(list(results))
    return Piece(make_graph_module(torch.nn.Module(), graph, "Piece"), inputs, GlobalGenerators.now())


def _place(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return id(tensor)
    flags = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), flags


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_in(value) if tensor.layout is torch.strided)


@torch.no_grad()
def _content(tensor: torch.Tensor) -> Content:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    content = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""
    return tensor.dtype, tuple(tensor.shape), hash(content)


def _user_place() -> str:
    """The user's line that runs, `model.py:41`; nothing in a backward that we called."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not is_house_file(path := frame.f_code.co_filename):
        if not path.startswith((_TORCH, "<")):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
