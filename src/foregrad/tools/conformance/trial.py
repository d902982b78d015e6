"""One case tried on a compiler or a partitioner: the outcome, the operator at fault, a program that shows the fault."""

from __future__ import annotations

import dataclasses
import functools
import gc
import glob
import inspect
import operator
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

import foregrad
from foregrad.errors import BackendError, ForegradError, UnsupportedError, first_line, headline
from foregrad.extend import CompileStage, Watcher, watching
from foregrad.graph.role import GraphRole
from foregrad.tools._torch.tools import is_random, named_leaves
from foregrad.tools.verification.compare import Gap
from foregrad.tools.verification.compare import Verdict as Closeness
from foregrad.tools.verification.locate import Culprit, Piece, gap_of
from foregrad.tools.verification.lockstep import evaluate, gives_nothing, steps
from foregrad.tools.verification.reproducer import write_reproducer
from foregrad.tools.verification.search import Maker, smallest_wrong
from foregrad.tools.verification.verify import CallOutcome, Comparison, make_side

from .cases import BrokenContractError, Case, CaseProgram
from .models import NoTransformersError
from .names import name_for
from .probe import Compiler, GraphCall, Probe, copy_of_graph
from .report import CaseVerdict, Finding


@dataclasses.dataclass(frozen=True)
class TrialSubject:
    """The subject: a compiler, or a partition of joint graphs (its halves run on eager's kernels).

    `backend`: the name that the compiler is registered by, if it is. `folder`: where programs are written.
    """

    name: str
    compiler: Compiler
    partition: Callable[..., Any] | None = None
    decompositions: Any = None
    backend: str = ""
    folder: str | None = None
    about_to: Callable[[fx.GraphModule, list[Any] | None], None] = lambda module, inputs: None

    def compiled(self, probe: Probe, function: Any, **settings: Any) -> Any:
        """The function compiled, its graphs by the probe."""
        door = foregrad.aot_module if isinstance(function, nn.Module) else foregrad.aot_function
        settings = {"decompositions": self.decompositions, **settings}
        if self.partition is not None:
            settings["partition_fn"] = probe.noting_refusals(self.partition)
        return door(function, probe.as_compiler, **settings)


@dataclasses.dataclass
class _FaultError(Exception):
    """A verdict that is no `PASSED`."""

    verdict: CaseVerdict
    detail: str
    graph: str = ""
    culprit: Culprit | None = None


def tried(case: Case, subject: TrialSubject) -> Finding:
    """Try a case. The random state is equal for each, and put back."""
    begin = time.perf_counter()
    finding = Finding(case.name, CaseVerdict.PASSED)
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), foregrad.config.override(check=True):
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            _try_all(case, subject)
        except NoTransformersError as reason:
            finding = Finding(case.name, CaseVerdict.SKIPPED, str(reason))
        except _FaultError as fault:
            program, operator = None, ""
            if fault.culprit is not None:
                operator = fault.culprit.operator
                # Each case has a folder: two programs may have one name.
                folder = None if subject.folder is None else str(Path(subject.folder, stem_of(case.name)))
                program = write_reproducer(fault.culprit, subject.backend or subject.name, folder)
            elif fault.verdict is not CaseVerdict.SKIPPED and case.count == 1:
                program = write_rerun(case, subject, fault.detail)
            finding = Finding(case.name, fault.verdict, fault.detail, fault.graph, operator, program)
    return dataclasses.replace(finding, seconds=time.perf_counter() - begin)


@dataclasses.dataclass
class _Partitions(Watcher):
    """Keeps a partition's arguments and results."""

    split: list[CompileStage] = dataclasses.field(default_factory=list)

    def stage(self, stage: CompileStage) -> None:
        if stage.name == "partition" and not stage.joint.signature.is_inference:
            self.split.append(stage)


def _try_all(case: Case, subject: TrialSubject) -> None:
    """Try the programs of a case, or its script. Raises `_FaultError` for the first that does not pass.

    A case of several programs is skipped where all are.
    """
    if case.programs is None:
        return _Trial(case, subject).run()
    skipped: list[_FaultError] = []
    programs = list(case.programs())
    for program in programs:
        try:
            with torch.enable_grad():
                _Trial(case, subject, program).run()
        except _FaultError as fault:
            fault.detail += f" ({program.title})" if program.title else ""
            if fault.verdict is not CaseVerdict.SKIPPED:
                raise
            skipped.append(fault)
    if not programs:
        raise _FaultError(CaseVerdict.SKIPPED, "PyTorch's database has no sample of this operator")
    if len(skipped) == len(programs):
        raise skipped[0]
    return None


class _Trial:
    def __init__(self, case: Case, subject: TrialSubject, program: CaseProgram | None = None) -> None:
        self.case, self.subject, self.program = case, subject, program
        self.probe = Probe(subject.compiler, subject.about_to)
        self.partitions = _Partitions()

    def run(self) -> None:
        """Raises `_FaultError` unless the case passes."""
        with watching(self.partitions):
            error = self._called()
        if self.probe.refused is not None:
            raise self._refused(self.probe.refused[1], self.probe.refused[2])
        for call in self.probe.calls:
            if call.error is not None and not _raises_on_eager(call, call.error):
                raise self._crashed(call, call.error)
        for call in self.probe.calls:
            if call.changed:
                raise self._of_graph(
                    call, f"it writes to its argument {', '.join(call.changed)}, and the graph only reads the argument"
                )
            if call.reused:
                numbers = ", ".join(map(str, call.reused))
                text = f"a later call changes result {numbers} of the graph's first call: its memory is used again"
                raise _FaultError(CaseVerdict.WRONG, text, call.role.phase)
        closeness = [self._judged(call) for call in self.probe.calls if call.error is None]
        if error is not None:
            raise error
        self._versus_eager(closeness)

    # ---------------------------------------------------------------- running

    def _called(self) -> _FaultError | None:
        """Run the case; its findings that are no fault of one graph."""
        compile = functools.partial(self.subject.compiled, self.probe)
        self.outcome: CallOutcome | None = None
        try:
            if self.program is not None:
                return self._called_twice(compile, self.program)
            if self.case.script is not None:
                self.case.script(compile)
        except _FaultError:
            raise
        except BrokenContractError as reason:
            return _FaultError(CaseVerdict.WRONG, str(reason))
        except Exception as error:
            return self._raised(error)
        return None

    def _raised(self, error: BaseException) -> _FaultError:
        if isinstance(error, UnsupportedError):
            return _FaultError(CaseVerdict.SKIPPED, f"foregrad does not capture it: {first_line(error)}")
        if isinstance(error, BackendError) or self.subject.partition is not None:
            return _FaultError(CaseVerdict.WRONG, headline(error))
        if isinstance(error, ForegradError):
            return _FaultError(CaseVerdict.SKIPPED, headline(error))
        return _FaultError(CaseVerdict.CRASHED, headline(error))

    def _called_twice(self, compile: Callable[..., Any], program: CaseProgram) -> _FaultError | None:
        """Two calls with equal arguments: the second gives equal results, and leaves the first call's unchanged."""
        function = program.function
        is_module = isinstance(function, nn.Module)
        run: Any = None if is_module else compile(function, **program.settings)
        results: list[list[tuple[str, Any]]] = []
        outcomes: list[CallOutcome] = []
        for _ in range(2):
            side = make_side(function, program.args, program.kwargs)
            own = compile(side.function, **program.settings) if is_module else run

            def call(*args: Any, own: Any = own, **kwargs: Any) -> Any:
                out = own(*args, **kwargs)
                results.append(named_leaves(out, "out"))
                return out

            torch.manual_seed(0)
            outcomes.append(side.run(call, 1, dict))
            error = outcomes[-1].error
            if error is not None:
                eager = self._eager(program)
                return None if type(eager.error) is type(error) else self._raised(error)
        self.outcome = outcomes[0]
        del side, own, call
        for name in _changed(results[0], outcomes[0]):
            return _FaultError(
                CaseVerdict.WRONG, f"the second call changes {name} of the first: its memory is used again"
            )
        results.clear()
        if not is_module and (kept := self._kept()):
            return _FaultError(CaseVerdict.WRONG, f"it keeps arguments of calls that are over: {', '.join(kept[:4])}")
        return None

    def _kept(self) -> list[str]:
        if self.probe.kept():
            gc.collect()
        return self.probe.kept()

    def _eager(self, program: CaseProgram) -> CallOutcome:
        side = make_side(program.function, program.args, program.kwargs)
        torch.manual_seed(0)
        return side.run(side.function, 1, dict)

    # ---------------------------------------------------------------- judging

    def _judged(self, call: GraphCall) -> Closeness | None:
        """How a graph's results are to eager's kernels'; None where these say nothing."""
        nodes = call.module.graph.nodes
        if any(gives_nothing(node.target) for node in nodes) or (any(map(is_random, nodes)) and _draws(call)):
            return None

        def exact() -> Any:
            call.generators.put_back()
            return list(steps(call.module, call.inputs, exactly=True))[-1].exact()

        results = next(iter(reversed(nodes))).args[0]
        skipped = {output for _, output in call.role.updates} | {i for i, r in enumerate(results) if _has_gaps(r)}
        expected = call.expected()
        actual = [e if i in skipped else a for i, (a, e) in enumerate(zip(call.results, expected, strict=False))]
        if len(call.results) != len(expected):
            text = f"the graph has {len(expected)} results, and the compiled graph gives {len(call.results)}"
            culprit = _whole(call, Maker("compiler", self.subject.compiler, self._alone), text)
            raise _FaultError(CaseVerdict.WRONG, text, call.role.phase, culprit)
        gap = gap_of(actual, expected, exact)
        if gap.verdict is Closeness.WRONG:
            raise self._of_graph(call, gap.described())
        return gap.verdict

    def _versus_eager(self, closeness: Sequence[Closeness | None]) -> None:
        """Compare the caller's results: numbers only where each graph gives eager's bits and none was decomposed."""
        if self.program is None or self.outcome is None:
            return
        is_partition = self.subject.partition is not None
        if not self.program.versus_eager and not is_partition:
            return
        comparison = Comparison.of(self._eager(self.program), self.outcome)
        is_exact = not self.subject.decompositions and all(verdict is Closeness.EQUAL for verdict in closeness)
        if comparison.verdict is Closeness.WRONG and (comparison.layouts_differ or is_exact):
            culprit = self._of_partition() if is_partition else None
            raise _FaultError(CaseVerdict.WRONG, "\n".join(comparison.lines[:4]), culprit=culprit)

    # ---------------------------------------------------------------- the program that shows a fault

    def _of_graph(self, call: GraphCall, text: str) -> _FaultError:
        """A fault of one compiled graph, narrowed to its smallest part."""
        again = self._alone
        return _FaultError(CaseVerdict.WRONG, text, call.role.phase, self._smallest(call, again, text))

    def _refused(self, role: GraphRole, error: Exception) -> _FaultError:
        if self.subject.partition is not None:
            return _FaultError(CaseVerdict.REFUSED, headline(error), role.phase)
        eager = Probe(_as_it_is)
        other = _Trial(self.case, dataclasses.replace(self.subject, compiler=_as_it_is), self.program)
        other.probe = eager
        other._called()
        call = next((c for c in eager.calls if c.role.phase == role.phase), None)
        culprit = None
        if call is not None:
            culprit = self._smallest(call, functools.partial(self._failing, type(error)), headline(error))
        return _FaultError(CaseVerdict.REFUSED, headline(error), role.phase, culprit)

    def _crashed(self, call: GraphCall, error: BaseException) -> _FaultError:
        again = functools.partial(self._failing, type(error))
        verdict = CaseVerdict.WRONG if isinstance(error, BackendError) else CaseVerdict.CRASHED
        return _FaultError(verdict, headline(error), call.role.phase, self._smallest(call, again, headline(error)))

    def _smallest(self, call: GraphCall, again: Callable[..., Any], text: str) -> Culprit | None:
        if self.case.count > 1:  # each case is tried by itself next
            return None
        maker = Maker("compiler", self.subject.compiler, again)
        try:
            found = smallest_wrong(call.module, call.inputs, call.generators, maker)
        except Exception:  # parts of the graph are no programs that the compiler takes
            found = None
        if found is None:
            return _whole(call, maker, text)
        # Where no number differs, the text names the difference.
        return dataclasses.replace(found, gap=Gap(Closeness.WRONG, text)) if found.gap.what else found

    def _alone(self, module: fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
        """A part of a graph compiled by itself; a forbidden write is a wrong result."""
        run = compiled_alone(self.subject.compiler, module)

        def call(values: list[Any]) -> list[Any]:
            copies = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
            held = list(values)
            results = run(values)
            for value, copy in zip(held, copies, strict=True):
                if isinstance(value, torch.Tensor) and gap_of(value, copy, lambda: None).verdict is Closeness.WRONG:
                    return [f"argument {value.shape} written to"] * len(results)
            return results

        return call

    def _failing(self, kind: type[BaseException], module: fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
        """A part of a graph, counted wrong where the compiler fails as before, and right elsewhere."""

        def call(values: list[Any]) -> list[Any]:
            copies = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
            try:
                compiled_alone(self.subject.compiler, module)(values)
            except kind as error:
                return [error] * len(next(iter(reversed(module.graph.nodes))).args[0])
            except Exception:  # a failure of a different kind
                return evaluate(module, copies)
            return evaluate(module, copies)

        return call

    def _of_partition(self) -> Culprit | None:
        """The operator that a partition loses; None where the whole is needed to see it."""
        forward = next((call for call in self.probe.calls if call.role.phase == "forward"), None)
        backward = next((call for call in self.probe.calls if call.role.phase == "backward"), None)
        if not self.partitions.split or forward is None or backward is None or self.subject.partition is None:
            return None
        joint = self.partitions.split[0].joint
        by_name: dict[str, Any] = {}
        for call in (backward, forward):
            names = [node.name for node in call.module.graph.nodes if node.op == "placeholder"]
            by_name |= dict(zip(names, call.inputs, strict=True))
        try:
            inputs = [by_name[node.name] for node in joint.placeholders()]
            maker = Maker("partition", self.subject.partition)
            return smallest_wrong(joint.module, inputs, forward.generators, maker)
        except Exception:
            return None


def stem_of(name: str) -> str:
    """A case's name for files."""
    return "".join(c if c.isalnum() else "_" for c in name)


def write_rerun(case: Case, subject: TrialSubject, text: str) -> str | None:
    """Write a program that runs the case alone, for a fault that no graph shows by itself; its path."""
    try:
        name = subject.backend if subject.partition is None else ""
        name = name or name_for(subject.compiler if subject.partition is None else subject.partition)
    except ValueError:
        return None
    folder = Path(subject.folder or tempfile.mkdtemp(prefix="foregrad_check_"))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"reproduce_{stem_of(case.name)}.py"
    check = "check_compiler" if subject.partition is None else "check_partitioner"
    said = " ".join(text.replace("\\", "/").replace('"' * 3, "'" * 3).split())
    path.write_text(
        f'"""{case.name}: {said}\n\nExits with 1 while that is so."""\n\nimport sys\n\n'
        f"from foregrad.testing import {check}\n\n{_source_of(case)}"
        f"report = {check}({name!r}, only={glob.escape(case.name)!r}, size='full')\nprint(report)\n"
        "sys.exit(not report.ok)\n",
        encoding="utf-8",
    )
    return str(path)


def _source_of(case: Case) -> str:
    """The case's source, as a comment."""
    if case.script is None:
        return ""
    text = inspect.getsource(case.script)
    return "# What it does:\n#\n" + "".join(f"# {line}\n" for line in text.splitlines()[1:]) + "\n"


def _raises_on_eager(call: GraphCall, error: BaseException) -> bool:
    """Whether eager's kernels raise the error of a compiled graph, too."""
    try:
        call.expected()
    except type(error):
        return True
    return False


def _has_gaps(result: Any) -> bool:
    """Whether a kernel leaves memory of the result unwritten, where any value is right."""
    is_part = isinstance(result, fx.Node) and result.target is operator.getitem
    return is_part and result.args[1] == 1 and "_ctc_loss" in str(result.args[0].target)


def _draws(call: GraphCall) -> bool:
    """Whether results depend on random numbers: attention without dropout is an operator that may, and does not."""
    torch.manual_seed(1)
    other = evaluate(call.module, call.inputs)
    return gap_of(other, call.expected(), lambda: None).verdict is not Closeness.EQUAL


def _changed(results: Sequence[tuple[str, Any]], outcome: CallOutcome) -> list[str]:
    """The results that changed after their call's end, but for arguments that it wrote to."""
    return [
        name
        for name, value in results
        if isinstance(value, torch.Tensor) and f"{name} afterwards" not in outcome.values
        if gap_of(value, outcome.values[name], lambda: None).verdict is Closeness.WRONG
    ]


def compiled_alone(compiler: Compiler, module: fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    """A graph compiled by itself, without gradients, as a function of one list."""
    graph = copy_of_graph(module)
    count = len(next(iter(reversed(graph.graph.nodes))).args[0])
    GraphRole("inference", (), tuple(range(count))).put_on(graph)
    examples = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        made = compiler(graph, examples)
    if isinstance(made, fx.GraphModule):
        made.recompile()

    def run(values: list[Any]) -> list[Any]:
        results = made(values) if getattr(made, "_boxed_call", False) else made(*values)
        return list(results) if isinstance(results, (list, tuple)) else [results]

    return run


def _as_it_is(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    module = copy_of_graph(gm)
    return lambda *values: evaluate(module, values)


def _whole(call: GraphCall, maker: Maker, text: str) -> Culprit:
    """The whole graph as the program, where no part shows the fault by itself."""
    operators = [n for n in call.module.graph.nodes if n.op == "call_function"]
    named = str(operators[0].target) if len(operators) == 1 else ""
    piece = Piece(call.module, call.inputs, call.generators)
    return Culprit("graph", named, None, Gap(Closeness.WRONG, text), (), piece, maker=maker)


def write_whole(
    subject: TrialSubject, backend: str, module: fx.GraphModule, inputs: list[Any] | None, folder: str
) -> str | None:
    """Write the program of a graph that is about to be compiled, or called with `inputs`; its path.

    Before there are inputs, sizes and dtypes of the graph's own make some; a symbolic size has its value at capture.
    """
    if inputs is None:
        inputs = [_drawn(node.meta["val"]) for node in module.graph.nodes if node.op == "placeholder"]
    text = "the process ended, or stood still, at this graph"
    maker = Maker("compiler", subject.compiler)
    piece = Piece(module, inputs, None)
    culprit = Culprit("graph", "graph", None, Gap(Closeness.WRONG, text), (), piece, maker=maker)
    return write_reproducer(culprit, backend, folder, tries=False)


def _drawn(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return int(value) if isinstance(value, torch.SymInt) else value
    shape, strides = ([int(n) for n in numbers] for numbers in (value.shape, value.stride()))
    tensor = torch.empty_strided(shape, strides, dtype=value.dtype)
    return tensor.fill_(1)
