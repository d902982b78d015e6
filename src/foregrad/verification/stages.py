"""The stages after capture, each by itself, and the first operator of the first that is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import fx

from ..dispatch.pipeline import Pipeline
from ..graph.joint import JointGraph
from .compare import Gap, Verdict
from .locate import Culprit, first_in_decompositions, gap_of
from .lockstep import evaluate, steps
from .report import StageResult
from .search import Maker, smallest_wrong
from .watched import Execution, Log

# Whose operators run Python, or talk to other processes.
_NAMESPACES = ("foregrad", "c10d", "_c10d_functional")


@dataclasses.dataclass
class Stages:
    """What a pipeline did for one call. `capture()` captures the function without decompositions."""

    log: Log
    pipeline: Pipeline
    capture: Callable[[], JointGraph]

    def run(self) -> tuple[list[StageResult], Culprit | None]:
        """Each stage's verdict, and the first operator of the first stage that is wrong."""
        results: list[StageResult] = []
        culprit: Culprit | None = None
        try:
            for stage, suspect in self._of_joint_graph():
                results.append(stage)
                culprit = culprit or suspect
        except Exception as error:  # a backend's passes may make what no kernel of eager's takes
            results.append(StageResult("decompositions and partition", None, _no_run(error)))
        for execution in self.log.executions:
            try:
                stage = self._of_half(execution)
            except Exception as error:
                stage = StageResult(f"{execution.role.phase} of {execution.joint.name}", None, _no_run(error))
            results.append(stage)
            if stage.verdict is Verdict.WRONG and culprit is None:
                maker = Maker("compiler", execution.compiler, execution.joint, execution.compile_seconds)
                culprit = smallest_wrong(execution.module, execution.inputs, execution.generators, maker)
        return results, culprit

    # ---------------------------------------------------------------- the joint graph

    def _of_joint_graph(self) -> list[tuple[StageResult, Culprit | None]]:
        """Decompositions, the backend's passes and the partition, where the first execution was of a whole function."""
        table = self.pipeline.decompositions
        table = dict((table() if callable(table) else table) or {})
        values = Values.of(self.log, self.capture if table else None)
        if isinstance(values, str):
            return [(StageResult("decompositions and partition", None, values), None)]
        results: list[tuple[StageResult, Culprit | None]] = []
        if table:
            # Each decomposition is judged by itself: what these give together is rounding where each of them is.
            generators = self.log.executions[0].generators
            culprit = first_in_decompositions(values.joint.module, values.inputs, table, generators)
            gap, verdict = (None, Verdict.EQUAL) if culprit is None else (culprit.gap, Verdict.WRONG)
            if culprit is None and (gap := values.differs(values.run(values.module))) is not None:
                verdict = Verdict.ROUNDING
            elif culprit is not None:
                values.before = values.run(values.module)
            results.append((_result("decompositions", verdict, gap), culprit))
        if values.prepared is not None:
            verdict, gap = values.judge(values.run(values.prepared))
            culprit = (
                values.culprit(values.module, "passes", self.pipeline.prepared) if verdict is Verdict.WRONG else None
            )
            results.append((_result("the backend's passes", verdict, gap), culprit))
        if values.halves is not None:
            verdict, gap = values.judge(values.split())
            module, partition = values.prepared or values.module, self.pipeline.partition
            culprit = values.culprit(module, "partition", partition) if verdict is Verdict.WRONG else None
            results.append((_result("partition", verdict, gap), culprit))
        return results

    # ---------------------------------------------------------------- compiled halves

    def _of_half(self, execution: Execution) -> StageResult:
        name = f"{execution.role.phase} of {execution.joint.name}"
        if _runs_python(execution.module):
            return StageResult(name, None, "it runs Python or talks to other processes")

        def exact() -> Any:
            execution.generators.put_back()
            return list(steps(execution.module, execution.inputs, exactly=True))[-1].exact()

        return _result(name, *_worst(execution.results, execution.expected(), exact))


@dataclasses.dataclass
class Values:
    """The inputs of one call's joint graph, and what that gives in float64."""

    joint: JointGraph  # without decompositions
    module: fx.GraphModule  # with them
    prepared: fx.GraphModule | None
    halves: tuple[fx.GraphModule, fx.GraphModule] | None
    inputs: list[Any]
    log: Log
    before: list[Any] = dataclasses.field(default_factory=list)
    exactly: list[Any] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, log: Log, capture: Callable[[], JointGraph] | None) -> Values | str:
        """The values; or why there are none. `capture`: None where there are no decompositions."""
        if len(log.products) != 1:
            return "the call made several graphs"
        product = log.products[0]
        other = product.captured.joint
        joint = other if capture is None else capture()
        if [str(i.slot) for i in joint.signature.inputs] != [str(i.slot) for i in other.signature.inputs]:
            return "the graph takes other inputs"
        if _runs_python(joint.module):
            return "the graph runs Python or talks to other processes"
        forward = log.executions[0]
        backward = next((e for e in log.executions[1:] if e.joint is forward.joint), None)
        by_name = dict(_named_inputs(forward))
        if backward is not None:
            by_name |= {n: v for n, v in _named_inputs(backward) if n.startswith("tangents_")}
        has_backward = not joint.signature.is_inference and joint.backward_error is None
        names = [node.name for node in other.placeholders()]
        if has_backward and any(name not in by_name for name in names):
            return "the backward did not run as a whole"
        inputs = [by_name[name] for name in names if name in by_name]
        prepared = next((after for _, after in log.prepared), None)
        partitioned = product.compiled.partitioned
        halves = (partitioned.forward, partitioned.backward) if has_backward else None
        return cls(joint, other.module, prepared, halves, inputs, log)

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
        """How results differ from those of the stage before; None where they do not."""
        before = self.before or self.run(self.joint.module)
        self.before = results
        return _worst(results, before, lambda: None)[1]

    def judge(self, results: list[Any]) -> tuple[Verdict, Gap | None]:
        """How results are to those of the stage before."""
        before = self.before or self.run(self.joint.module)
        self.before = results
        return _worst(results, before, self._exact)

    def _exact(self) -> list[Any]:
        if not self.exactly:
            self.log.executions[0].generators.put_back()
            self.exactly = list(steps(self.joint.module, self.inputs, exactly=True))[-1].exact()
        return self.exactly

    def culprit(self, module: fx.GraphModule, kind: Any, function: Callable[..., Any]) -> Culprit | None:
        """The operator that a stage gets wrong."""
        maker = Maker(kind, function, self.joint)
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
