"""Advice, each piece tried on the graphs at hand: all figures were computed for the function itself."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from foregrad import eager_region
from foregrad.errors import EscapedTensorError, PartitionError
from foregrad.extend import CompiledFunction, GraphView, RefusalView
from foregrad.graph.joint import JointGraph
from foregrad.partitioners import Report, in_bytes

from .tree import Advice, EagerPart, Findings, SavedTensor

Split = Callable[[str], Report]
_WORTH = 0.05  # share of the saved bytes or of the peak: a smaller one is not worth a word
_LEAST = 4 << 10  # bytes saved: of less there is nothing to say
_MOST_NODES = 6_000  # of graphs that other partitions are tried on


def advice_on(
    findings: Findings, joint: JointGraph, split: Split, compilations: Sequence[Any], opens: Callable[[str, int], str]
) -> Iterator[Advice]:
    """Changes that would lower the figures, the largest first. `opens`: the change that gives one graph for all sizes
    of an argument's dimension, or "".
    """
    memory = findings.memory
    assert memory is not None
    if memory.predicted_saved >= _LEAST and len(list(joint.graph.nodes)) <= _MOST_NODES:
        yield from _partitions(findings, split)
    if findings.program is not None and findings.program.unused:
        names = findings.program.unused
        shown = ", ".join(f"`{name}`" for name in names[:6]) + (", ..." if len(names) > 6 else "")
        yield Advice(
            f"{len(names)} parameter{('s get' if len(names) > 1 else ' gets')} no gradient from this call: {shown}. "
            "Freeze parameters that you don't train, or check that the loss depends on them."
        )
    yield from _recompilations(compilations, opens)


def _partitions(findings: Findings, split: Split) -> Iterator[Advice]:
    """Other partitions, made and simulated for this graph."""
    memory, work = findings.memory, findings.work
    assert memory is not None
    assert work is not None
    tried: list[tuple[str, Report]] = []
    for policy in ("min_cut", "0.5", "0.0"):
        if policy == findings.partition:
            continue
        try:
            tried.append((policy, split(policy)))
        except (PartitionError, ValueError):
            continue
    best_peak = memory.predicted_peak
    for policy, report in tried:
        saves, lower = memory.predicted_saved - report.saved_bytes, best_peak - report.peak
        if lower < _WORTH * best_peak and (saves < _WORTH * memory.predicted_saved or policy != "min_cut"):
            continue
        change = f'partition="{policy}"' if policy == "min_cut" else f"memory_budget={policy}"
        more = report.cost / (report.work or 1)
        count = len(report.recomputed)
        again = f" and compute {count} operator{'s' if count > 1 else ''} twice (+{more:.1%} work)" if count else ""
        peak = f"peak {in_bytes(report.peak)} instead of {in_bytes(memory.predicted_peak)}"
        if report.peak >= memory.predicted_peak:
            peak = f"the peak stays at {in_bytes(report.peak)}"
        now, then = in_bytes(memory.predicted_saved), in_bytes(report.saved_bytes)
        kept = f"{then} for the backward instead of {now}" if then != now else f"an equal {now} for the backward"
        yield Advice(f"`{change}` would keep {kept} ({peak}){again}.", change)
        best_peak = min(best_peak, report.peak)


def _recompilations(compilations: Sequence[Any], opens: Callable[[str, int], str]) -> Iterator[Advice]:
    """Sizes and numbers that a graph was compiled again for."""
    by_name: dict[str, list[tuple[str, str]]] = {}
    for entry in compilations:
        for reason in entry.reasons[-1:]:
            by_name.setdefault(reason.name, []).append((reason.before, reason.now))
    for name, changes in by_name.items():
        values = ", ".join(dict.fromkeys(value for pair in changes for value in pair))
        text = f"It was compiled {len(changes)} more time{'s' if len(changes) > 1 else ''} for `{name}`: {values}."
        if name.endswith(".shape"):
            dim = _varying(changes[-1])
            tensor = name.removesuffix(".shape")
            if dim is not None and (change := opens(tensor, dim)):
                yield Advice(f"{text} `{change}` makes a single graph for all these sizes.", change)
            else:
                yield Advice(
                    f"{text} Each size keeps its own graph: the program needs the number, or writes to memory that "
                    "arguments share (pass a `.clone()` of one)."
                )
        elif len(changes) > 1:
            yield Advice(f"{text} Hand it over as a tensor, and one graph serves all values.")


def _varying(change: tuple[str, str]) -> int | None:
    one, two = ([int(n) for n in re.findall(r"\d+", shape)] for shape in change)
    dims = [at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b]
    return dims[0] if len(one) == len(two) and len(dims) == 1 else None


def as_regions(parts: Sequence[EagerPart], operators: int | None) -> Iterator[Advice]:
    """The result of making eager regions of the parts that can't be compiled: how many operators compile then, None if
    none do.
    """
    if operators is not None and parts:
        names = ", ".join(f"`{part.name}`" for part in parts[:6])
        yield Advice(
            f"With {names} marked as {('an eager region' if len(parts) == 1 else 'eager regions')}, the rest "
            f"compiles: {operators} operators in a single graph. Mark each with `foregrad.eager_region`.",
            f"foregrad.eager_region(model.{parts[0].name})",
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Saved values that a user's line makes, in one module or several."""

    what: str
    place: str
    modules: tuple[str, ...]
    nbytes: int
    count: int

    @property
    def first_and_last(self) -> str:
        """The first and the last of the modules."""
        named = [module for module in self.modules if module]
        return " to ".join(dict.fromkeys((named[0], named[-1]))) if named else ""


def groups(saved: Sequence[SavedTensor]) -> list[Group]:
    """Saved values by the line that makes them, largest first."""
    by_name: dict[str, list[SavedTensor]] = {}
    for one in saved:
        if one.kind == "saved" and one.nbytes:
            by_name.setdefault(one.line or f"{re.sub('[0-9]+', '*', one.module)} {one.op}", []).append(one)
    rows = []
    for line, members in by_name.items():
        names = dict.fromkeys(one.variable or one.op for one in sorted(members, key=lambda one: -one.nbytes))
        what = ", ".join(list(names)[:3]) + (", ..." if len(names) > 3 else "")
        place = line.partition(" in ")[0] if " in " in line else ""
        modules = tuple(dict.fromkeys(member.module for member in members))
        rows.append(Group(what, place, modules, sum(member.nbytes for member in members), len(members)))
    return sorted(rows, key=lambda group: -group.nbytes)


# -------------------------------------------------------------------- what runs eagerly
# The parts of a model that run eagerly: why each can't be captured, its cost, and the change that would compile it.
#
# A capture ends at the first operation that it can't hold. So the modules of a model are captured one by one, with the
# arguments that an eager call gives them; then the model is captured with the failed modules as eager regions.
#
# Known weakness: in one forward only the first reason is found.


@dataclasses.dataclass(slots=True)
class _ModuleCall:
    """The first call of a module in an eager run, and the time of all its calls."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    count: int = 0
    seconds: float = 0.0
    begun: float = 0.0


def graph_or_error(compiled: CompiledFunction, args: Any, kwargs: Any) -> GraphView | Exception:
    """The graph for a call, or the exception that its capture ends with. The function does not run for real."""
    try:
        return compiled.graph_for(args, kwargs)
    except Exception as error:
        return error


def graph_after_calls(
    compiled: CompiledFunction, args: Any, kwargs: Any, error: Exception
) -> tuple[GraphView | Exception, list[Exception]]:
    """(the graph, or the exception of the last capture; the exceptions of earlier calls that filled caches), for a call
    with a capture that raised `error`. The function runs.
    """
    filled: list[Exception] = []
    while True:
        compiled(*args, **kwargs)
        if graphs := compiled.view().graphs:
            return graphs[0], filled
        if not isinstance(error, EscapedTensorError):
            return error, filled
        filled.append(error)
        result = graph_or_error(compiled, args, kwargs)
        if not isinstance(result, Exception):
            return result, filled
        error = result


def parts_of_module(
    module: torch.nn.Module, args: Any, kwargs: Any, like: CompiledFunction
) -> tuple[tuple[EagerPart, ...], int | None]:
    """(the parts of a model, a copy, that can't be captured; how many operators compile when these are eager regions,
    None if none do).
    """
    names = {id(part): name for name, part in module.named_modules()}
    calls = calls_of(module, args, kwargs)
    refused: dict[torch.nn.Module, RefusalView] = {}

    def visit(part: torch.nn.Module) -> None:
        call = calls.get(part)
        if call is None:
            return
        compiled = _compiled(part, like)
        error = graph_or_error(compiled, call.args, call.kwargs)
        if isinstance(error, EscapedTensorError):
            error, _ = graph_after_calls(compiled, call.args, call.kwargs, error)
        if not isinstance(error, Exception):
            return
        before = len(refused)
        for child in part.children():
            visit(child)
        if len(refused) > before:
            with _as_regions(refused):
                error = graph_or_error(compiled, call.args, call.kwargs)
        if isinstance(error, Exception):
            refused[part] = compiled.refusal(error, names[id(part)])

    visit(module)
    parts = []
    for part, why in refused.items():
        call = calls[part]
        name = names[id(part)] or type(part).__name__
        parts.append(EagerPart(name, why.why, why.change, why.line, call.count, call.seconds / max(call.count, 1)))
    return tuple(parts), _operators_besides(module, refused, args, kwargs, like)


def _operators_besides(
    module: torch.nn.Module, refused: Any, args: Any, kwargs: Any, like: CompiledFunction
) -> int | None:
    if not refused or module in refused:
        return None
    with _as_regions(refused):
        rest = graph_or_error(_compiled(module, like), args, kwargs)
    return None if isinstance(rest, Exception) else sum(n.op == "call_function" for n in rest.joint.graph.nodes)


def _compiled(module: torch.nn.Module, like: CompiledFunction) -> CompiledFunction:
    return like.like(module, on_unsupported="eager")


@contextmanager
def _as_regions(modules: Mapping[torch.nn.Module, Any]) -> Iterator[None]:
    before = [(module, set(vars(module))) for module in modules]
    marks = [(eager_region(module), vars(module).keys() - names) for module, names in before]
    try:
        yield
    finally:
        for module, names in marks:
            for name in names:
                vars(module).pop(name, None)


def calls_of(module: torch.nn.Module, args: Any, kwargs: Any) -> dict[torch.nn.Module, _ModuleCall]:
    """The arguments of each module in an eager run, and how long its calls take."""
    calls: dict[torch.nn.Module, _ModuleCall] = {}

    def before(part: torch.nn.Module, args: Any, kwargs: Any) -> None:
        call = calls.setdefault(part, _ModuleCall(args, kwargs))
        call.count += 1
        call.begun = time.perf_counter()

    def after(part: torch.nn.Module, _args: Any, _result: Any) -> None:
        calls[part].seconds += time.perf_counter() - calls[part].begun

    handles = []
    for part in module.modules():
        handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(part.register_forward_hook(after))
    try:
        module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls
