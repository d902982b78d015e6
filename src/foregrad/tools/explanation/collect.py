"""`foregrad.explain`: one call that finds everything out, on copies, and leaves nothing behind.

One part of the report is here too: the values that are saved for the backward, in the user's words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

import foregrad
from foregrad.errors import ForegradWarning, UnknownLeafError, UnsupportedError, first_line, headline
from foregrad.extend import GraphView, compiling, phase
from foregrad.graph.joint import Partitioned
from foregrad.graph.meta import TensorSpec, paddings
from foregrad.graph.slots import Checked, Decision, Updated
from foregrad.graph.source import check_function
from foregrad.partitioners import Report, SavedValue, make_report
from foregrad.tools._torch.tools import graph_breaks, is_absent, leaves_of, without_fake_mode

from ..verification.watched import GlobalGenerators, compiled_with
from .advice import advice_on, as_regions, calls_of, graph_after_calls, graph_or_error, parts_of_module
from .graphs import Rows, own_source, rows_of, sources_of, work_of
from .measure import Subject, held_by, operators_of, packed_by, peak_of, step_of, subject_of, times_of
from .program import program_of, writes_to_arguments, written_outside
from .text import Explanation
from .tree import Advice, Again, EagerPart, Memory, Operator, SavedTensor, Time


def explain(
    fn: Any,
    /,
    *args: Any,
    backend: Any = None,
    partition: Any = None,
    memory_budget: Any = None,
    measure: bool = True,
    **kwargs: Any,
) -> Explanation:
    """Report how a function or module is compiled for the given arguments, and the cost of the call.

    The explanation prints (as tables where rich is installed, as HTML in notebooks), and `save("report.html")` writes
    the report. It lists the graph, writes, shared memory, reads and guards; values saved for the backward and why;
    operators that run twice; the peak of memory, operations and bytes, foreseen and measured; a step's time, eager and
    compiled; compilations and why; parts that run eagerly, with a remedy; and advice that was tried.

    Everything runs on copies of the module and the arguments, so they need their memory once more. Parameters,
    buffers, `.grad`, the training mode and the state of random generators are as before afterwards. A call that would
    write to something that can't be copied is not run, and the explanation says so under `not_measured`.

    Args:
        fn: a function or module, plain or compiled. For a result of `foregrad.compile` the report has the compilations
            so far, and uses its backend and partition by default; for a result of `torch.compile`, the places where
            Dynamo breaks the graph.
        *args: its positional arguments.
        backend: as in `compile`; None is the backend of a compiled `fn`, or "auto".
        partition: as in `compile`.
        memory_budget: as in `compile`.
        measure: run steps to measure memory and time. If False, the function is captured, and no step runs.
        **kwargs: its keyword arguments, except the names above.

    Raises:
        The errors that the function raises for its arguments.

    Example:
        >>> import torch, foregrad
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
        >>> found = foregrad.explain(model, torch.randn(64, 8), backend="eager")
        >>> found.memory.predicted_saved == found.memory.measured_saved
        True
    """
    check_function(fn, "explain")
    asked = {"backend": backend, "partition": partition, "memory_budget": memory_budget}
    with warnings.catch_warnings(), without_fake_mode(), contextlib.ExitStack() as afterwards:
        afterwards.callback(GlobalGenerators.now().put_back)
        warnings.simplefilter("ignore", ForegradWarning)
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by the copies of fakes
        subject = subject_of(fn, args, kwargs)
        with compiling(subject.name, verb="explaining"):
            return _Explainer(subject, asked, measure=measure).run()


class _Explainer:
    """Finds out about one call. Used once."""

    def __init__(self, subject: Subject, asked: Mapping[str, Any], *, measure: bool) -> None:
        """`asked`: the backend, the partition and the budget that the caller asks for, or None."""
        self.subject, self.measure = subject, measure
        user = subject.compiled
        if user is not None and all(value is None for value in asked.values()):
            settings = user.view()
            self.backend, self.partition = _called(settings.compiler).removesuffix("_compiler"), ""
        else:
            backend, budget = "auto" if asked["backend"] is None else asked["backend"], asked["memory_budget"]
            user = compiled_with(**{**asked, "backend": backend})
            settings = user.view()
            self.backend, self.partition = _called(backend), f"budget {budget}" if budget is not None else ""
        self.partition = self.partition or _called(asked["partition"] or settings.partition)
        self.compiled = user.like(subject.function, subject.name, on_unsupported="eager")
        self.filled: list[Exception] = []  # of the calls that come before the graph: each fills a cache

    def run(self) -> Explanation:
        start = time.perf_counter()
        result = graph_or_error(self.compiled, self.subject.args, self.subject.kwargs)
        if isinstance(result, Exception):
            result = self._through_a_call(result)
        if isinstance(result, Exception):
            return self._of_eager(result)
        return self._of_graph(result, time.perf_counter() - start)

    def _through_a_call(self, error: Exception) -> GraphView | Exception:
        """A function that a call makes a form of (with its draws as an argument, say), or with first calls that fill
        caches; or its own error.
        """
        if not self._why_not_measured(None, None):
            with _quiet():
                found, self.filled = graph_after_calls(self.compiled, self.subject.args, self.subject.kwargs, error)
            return found
        if not isinstance(error, (UnsupportedError, UnknownLeafError)):
            raise error
        return error

    # ---------------------------------------------------------------- a function with a graph

    def _of_graph(self, graph: GraphView, compile_s: float) -> Explanation:
        joint, parts = graph.joint, graph.halves
        report = make_report(parts)
        rows = rows_of(parts, report)
        memory = memory_of(parts, report, rows)
        outside = written_outside(graph, self.subject)
        why_not = self._why_not_measured(outside, joint.error)
        seconds = None
        if not why_not:
            try:
                with _quiet(), phase("measurements", compiles=False):
                    memory, seconds = self._measured(graph, memory, compile_s)
            except Exception as error:  # a second backward through the first call's writes, say
                why_not = f"a step failed with {headline(error)}"
        explanation = self._explanation(
            program=program_of(graph),
            memory=memory,
            work=work_of(rows),
            time=seconds,
            eager=(*self._first_calls(), *self._regions(joint), *self._breaks(why_not)),
            not_measured=why_not,
            modules=rows.modules,
            lines=rows.lines,
            operators=rows.operators,
            sources=(*sources_of(parts, graph.source), own_source(rows, memory.saved)),
            module_seconds=() if why_not else self._module_seconds(),
            operator_seconds=() if why_not else self._operator_seconds(),
        )
        made = self._compilations()
        with phase("advice", compiles=False):
            entries, opens = made.entries if made else (), functools.partial(self._opens, graph)
            advice = advice_on(explanation, joint, lambda policy: self._split(joint, policy), entries, opens)
        return dataclasses.replace(explanation, advice=tuple(advice))

    def _explanation(self, **findings: Any) -> Explanation:
        names = self.subject.name, self.backend, self.partition
        made = self._compilations()
        lines = () if made is None else tuple(made.lines())
        return Explanation(*names, compilations=lines, versions=_versions(), **findings)

    def _split(self, joint: Any, policy: str) -> Any:
        """The report of a second partition of the graph, after the backend's own passes as well."""
        backend = self.backend if self.backend in foregrad.list_backends() else "nop"
        asked = {"memory_budget": float(policy)} if policy[0].isdigit() else {"partition": policy}
        return make_report(self.compiled.split(joint, compiled_with(backend=backend, **asked).view().partition))

    def _opens(self, graph: GraphView, name: str, dim: int) -> str:
        """The change that gives a graph for all sizes of a dimension of an argument, as tried; "" if none does."""
        parameters = list(inspect.signature(self.subject.function).parameters)
        root, bracket, rest = name.partition("[")
        own = [f"args[{parameters.index(root)}]{bracket}{rest}"] if root in parameters else []
        inputs = graph.joint.signature.inputs
        named = {place.name: info.argument for info, place in zip(inputs, graph.inputs, strict=True)}
        argument = next((named[path] for path in (name, *own) if named.get(path) is not None), None)
        if argument is None:
            return ""
        for change in (f"foregrad.mark_dynamic({name}, {dim})", "dynamic=True"):
            args, kwargs = self.subject.renewed()
            for number, leaf in enumerate(leaves_of((args, dict(kwargs)))):
                if isinstance(leaf, torch.Tensor) and (number == argument or change == "dynamic=True"):
                    for one in [dim] if number == argument else range(leaf.dim()):
                        foregrad.mark_dynamic(leaf, one)
            found = graph_or_error(self.compiled.like(self.subject.function, on_unsupported="raise"), args, kwargs)
            if isinstance(found, Exception):
                continue
            signature = found.joint.signature
            symbols = {(signature.inputs[one.input].argument, one.dim) for one in signature.symbols}
            specs = [info.spec for info in signature.inputs if isinstance(info.spec, TensorSpec)]
            # Strides of a slice hold the graph to one size.
            if (argument, dim) in symbols and not any(any(paddings(one.shape, one.stride)) for one in specs):
                return change
        return ""

    def _why_not_measured(self, outside: str | None, error: Exception | None) -> str:
        if not self.measure:
            return "measure=False"
        if self.subject.why_not_copied is not None:
            return self.subject.why_not_copied
        if any(map(is_absent, self.subject.copies.values())):
            return "it has tensors without values (on `meta`, or fake)"
        if outside is not None:
            return f"a call writes to {outside}, and this can't be copied"
        return "" if error is None else f"its backward raises: {error}"

    def _measured(self, graph: GraphView, memory: Memory, compile_s: float) -> tuple[Memory, Time | None]:
        subject, device, renews = self.subject, self._device(), writes_to_arguments(graph)

        def call_of(function: Any) -> functools.partial[Any]:
            args, kwargs = subject.renewed() if renews else (subject.args, subject.kwargs)
            return functools.partial(function, *args, **kwargs)

        def make_step(function: Any) -> Any:
            return lambda: step_of(call_of(function), subject.forget_gradients)

        present, compiled, eager = (self._given(graph), call_of(self.compiled), call_of(subject.function))
        start = time.perf_counter()
        held = held_by(compiled(), [present, compiled.args, compiled.keywords])
        compile_s += time.perf_counter() - start
        packed = packed_by(eager, [present, eager.args, eager.keywords])
        steps = {"eager": make_step(subject.function), "compiled": make_step(self.compiled)}
        seconds, rounds = times_of(steps, device)
        return dataclasses.replace(
            memory,
            measured_peak=peak_of(steps["compiled"](), device),
            measured_saved=held,
            eager_peak=peak_of(steps["eager"](), device),
            eager_saved=packed,
        ), Time(seconds["eager"], seconds["compiled"], compile_s, rounds)

    def _module_seconds(self) -> tuple[tuple[str, float], ...]:
        """The least seconds of each module's forward in a few eager calls."""
        module, least = self.subject.module, dict[str, float]()
        if module is None:
            return ()
        names = {part: name for name, part in module.named_modules()}
        for _ in range(_CALLS_TIMED):
            args, kwargs = self.subject.renewed()
            with _quiet():
                for part, call in calls_of(module, args, kwargs).items():
                    least[names[part]] = min(call.seconds, least.get(names[part], call.seconds))
        return tuple(least.items())

    def _operator_seconds(self) -> tuple[tuple[str, int, float], ...]:
        """The operators of an eager step, with the time of each; none where the step fails under a mode."""
        with _quiet(), contextlib.suppress(Exception):
            return tuple(operators_of(self._eager_step(), self._device()))
        return ()

    def _given(self, graph: GraphView) -> list[Any]:
        """The tensors that are there before a call."""
        tensors = self.subject.tensors()
        for info in graph.joint.signature.inputs:
            if info.argument is None and hasattr(info.source, "get"):
                tensors.append(info.source.get())
        return tensors

    def _device(self) -> torch.device | None:
        return next((tensor.device for tensor in self.subject.tensors() if tensor.is_cuda), None)

    # ---------------------------------------------------------------- what runs eagerly

    def _of_eager(self, error: Exception) -> Explanation:
        """A function without a graph. Its own errors are for the caller."""
        subject, why = self.subject, self.compiled.refusal(error)
        seconds, why_not = None, self._why_not_measured(None, None)
        if not why_not:
            with _quiet():
                seconds = times_of({"eager": self._eager_step}, self._device())[0]["eager"]
        parts: tuple[EagerPart, ...] = (EagerPart(subject.name, why.why, why.change, why.line, seconds=seconds),)
        advice: tuple[Advice, ...] = ()
        if subject.module is not None and not why_not:
            with _quiet():
                of_module, operators = parts_of_module(subject.module, subject.args, subject.kwargs, self.compiled)
            parts, advice = of_module or parts, tuple(as_regions(of_module, operators))
        return self._explanation(eager=(*parts, *self._breaks(why_not)), advice=advice, not_measured=why_not)

    def _eager_step(self) -> Any:
        args, kwargs = self.subject.renewed()
        return step_of(functools.partial(self.subject.function, *args, **kwargs), self.subject.forget_gradients)

    def _first_calls(self) -> Iterator[EagerPart]:
        """The calls that run eagerly before there is a graph."""
        for number, error in enumerate(self.filled, 1):
            why, which = self.compiled.refusal(error), "The first call" if number == 1 else f"Call {number}"
            yield EagerPart(self.subject.name, f"{which} runs eagerly: {why.why}", line=why.line, kind="first call")

    def _regions(self, joint: Any) -> Iterator[EagerPart]:
        """Eager regions in the graph."""
        for region in joint.signature.stops.eager_regions:
            function = getattr(region, "function", region)
            name = str(getattr(function, "__qualname__", type(function).__name__))
            yield EagerPart(name, "It is marked as an eager region.", kind="region")

    def _breaks(self, why_not: str) -> Iterator[EagerPart]:
        """Where Dynamo breaks the graph of a function that `torch.compile` made."""
        if not self.subject.is_dynamo or why_not:
            return
        try:
            with _quiet():
                _, breaks = graph_breaks(self.subject.function, self.subject.args, self.subject.kwargs)
        except Exception as error:
            yield EagerPart("Dynamo", f"It fails: {first_line(error)}", kind="graph break")
            return
        for one in breaks:
            lines = [line.strip() for line in one.reason.splitlines() if line.strip()]
            hints = [line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")]
            why = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
            hint = hints[0] if hints else ""
            yield EagerPart("graph break", " ".join([lines[0], *why]), hint, one.line, kind="graph break")

    def _compilations(self) -> Any:
        """The user's compilations so far, and the calls that ran eagerly: `Recompiles`, or None."""
        return None if self.subject.compiled is None else foregrad.explain_recompiles(self.subject.asked)


_CALLS_TIMED = 3


def _quiet() -> AbstractContextManager[Any]:
    """Context: the function's output is dropped, since it runs more often than anybody asked for."""
    return contextlib.redirect_stdout(io.StringIO())


def _called(value: Any) -> str:
    """A backend or partition by its name."""
    if isinstance(value, str):
        return value
    if isinstance(value, functools.partial):
        return _called(value.keywords.get("policy", value.func))
    if isinstance(value, foregrad.Policy):
        named = (name for name in foregrad.__all__ if name.endswith("_saveable"))
        return next((name for name in named if getattr(foregrad, name) is value), "a policy")
    name = str(getattr(value, "__name__", None) or value)
    return _POLICIES.get(name, name)


_POLICIES: Mapping[str, str] = {
    "default_partition": "default",
    "min_cut_rematerialization_partition": "min_cut",
    "fused_partition": "fused",
    "budget_partition": "budget",
}


def _versions() -> str:
    return f"foregrad {foregrad.__version__}, PyTorch {torch.__version__}, Python {sys.version.split()[0]}"


# -------------------------------------------------------------------- what is kept
# Values saved for the backward, in the user's words: their names, the lines that make them, and their readers.


_CODE = re.compile(r":\d+ in [^:]*: (.*)$")
_ASSIGNED = re.compile(r"^\s*([A-Za-z_][\w.]*)(?:\s*:[^=]+)?\s*=[^=]")
_MOST_READERS = 8


def memory_of(parts: Partitioned, report: Report, rows: Rows) -> Memory:
    """The memory of a step as the graphs foresee it."""
    by_key = rows.by_key()
    readers: dict[str, list[str]] = {}
    for one in rows.operators:
        for key in one.reads:
            readers.setdefault(key, []).append(one.key)
    forward = len(report.forward)
    slots = parts.joint.slot_texts()
    own = _own_results(parts)
    values = [dataclasses.replace(v, kind="saved") if v.name in own else v for v in report.saved]
    saved = [_saved(value, by_key, readers, rows, forward, slots.get(value.name, "")) for value in values]
    work = report.work or 1
    again = [
        Again(
            one.name,
            by_key[f"b:{one.name}"].op,
            _module(by_key.get(f"b:{one.name}"), rows),
            one.line or "",
            one.flops,
            one.cost / work,
        )
        for one in report.recomputed
    ]
    return Memory(
        report.peak,
        report.peak_at,
        sum(value.nbytes for value in values if value.kind == "saved"),
        tuple(saved),
        tuple(again),
        tuple(live for _, live in (*report.forward, *report.backward)),
        forward,
    )


def _own_results(parts: Partitioned) -> set[str]:
    """Results that the caller does not get: new values of inputs, whose elements it gets, and values looked at. The
    backward alone keeps them.
    """
    *_, output = parts.forward.graph.nodes
    pairs = list(zip(output.args[0], parts.joint.signature.graph_outputs.slots, strict=False))
    seen = {node for node, slot in pairs if not isinstance(slot, (Updated, Decision, Checked))}
    return {node.name for node, _ in pairs if node not in seen and node.op != "placeholder"}


def _saved(
    value: SavedValue, by_key: dict[str, Operator], readers: dict[str, list[str]], rows: Rows, forward: int, slot: str
) -> SavedTensor:
    key = f"f:{value.name}"
    one = by_key.get(key)
    read_by = _readers(key, by_key, readers)
    line = value.line or (rows.lines[one.line] if one is not None else "") or ""
    variable = ", ".join(value.names) or slot
    variable = variable or (variable_in(line) if one and _is_last(one, by_key, readers, rows) else "")
    maker = None if one is None else _maker(one, by_key)
    op, module = "" if maker is None else maker.op, _module(maker, rows)
    is_output = maker is not None and _is_output(maker, by_key, readers, rows)
    return SavedTensor(
        name=value.name,
        variable=variable,
        op=op,
        type="" if value.spec is None else repr(value.spec),
        nbytes=value.nbytes,
        kind=value.kind,
        module=module,
        line=line,
        why=_why(read_by, by_key, rows),
        readers=tuple(read_by[:_MOST_READERS]),
        born=value.span[0],
        dies=forward + value.span[1],
        label=_label(value.name, variable, "" if slot else module, op, is_output=is_output),
    )


def _label(name: str, variable: str, module: str, op: str, *, is_output: bool) -> str:
    if variable and not (module and is_output):
        return f"{variable} in {module}" if module else variable
    made = variable or op.removeprefix("aten.").partition(".")[0]
    what = f"{module}{' output' if is_output else ''}" if module else name
    return f"{what} ({made})" if made else what


def _is_output(one: Operator, by_key: dict[str, Operator], readers: dict[str, list[str]], rows: Rows) -> bool:
    """Whether no operator of the forward in its own module reads a value: the module gives it."""
    own, waiting = rows.modules[one.module][0], [one.key]
    while waiting:
        for reader in (by_key[key] for key in readers.get(waiting.pop(), ())):
            if reader.half == "forward" and reader.view_of:
                waiting.append(reader.key)
            elif reader.half == "forward" and f"{rows.modules[reader.module][0]}.".startswith(f"{own}."):
                return False
    return bool(own)


def _maker(one: Operator, by_key: dict[str, Operator]) -> Operator:
    """The operator that made a value's memory, through views."""
    while one.view_of in by_key:
        one = by_key[one.view_of]
    return one


def _is_last(one: Operator, by_key: dict[str, Operator], readers: dict[str, list[str]], rows: Rows) -> bool:
    """Whether its line computes nothing more from a value in the forward: then it is the line's result.

    The line may call modules; the line in a further layer is a further call.
    """
    own = rows.modules[one.module][0]
    return not any(
        (other.line, other.half) == (one.line, one.half) and _is_inside(own, rows.modules[other.module][0])
        for other in (by_key[key] for key in readers.get(one.key, ()))
    )


def _is_inside(one: str, other: str) -> bool:
    """Whether one of two modules, by their paths, is in the other."""
    short, long = sorted((one, other), key=len)
    return not short or long == short or long.startswith(f"{short}.")


def _readers(key: str, by_key: dict[str, Operator], readers: dict[str, list[str]]) -> list[str]:
    """The operators that read a value, through its views."""
    found: dict[str, None] = {}
    waiting = [key]
    while waiting:
        for reader in readers.get(waiting.pop(), ()):
            if by_key[reader].half == "forward":
                continue
            if by_key[reader].role == "view":
                waiting.append(reader)
            else:
                found.setdefault(reader)
    return list(found)


def _why(read_by: list[str], by_key: dict[str, Operator], rows: Rows) -> str:
    if not read_by:
        return "a derivative of the backward may read it"
    first = by_key[read_by[0]]
    what = "runs again in the backward and reads it" if first.role == "again" else "reads it"
    line = rows.lines[first.line]
    more = f", and {len(read_by) - 1} more" if len(read_by) > 1 else ""
    return f"{first.op} {what}{more}{f': the backward of {line}' if line and first.role != 'again' else ''}"


def _module(one: Operator | None, rows: Rows) -> str:
    return "" if one is None else rows.modules[one.module][0]


def variable_in(line: str) -> str:
    """The variable that the user's line assigns: `scores` of `model.py:3 in forward: scores = q @ k`."""
    code = _CODE.search(line)
    match = _ASSIGNED.match(code[1]) if code else None
    return match[1] if match else ""
