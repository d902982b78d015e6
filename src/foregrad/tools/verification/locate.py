"""The first operator that differs, and of decompositions the first that is wrong.

A decomposition is compared with its operator on the very values of the run, one by one.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from foregrad.graph.printing import user_line
from foregrad.tools._torch.tools import ThreadDispatchMode, is_random, make_graph_module, mapped

from .compare import EQUAL, Gap, Verdict, compare
from .lockstep import exact_call, gives_nothing, steps
from .watched import GlobalGenerators

Table = Mapping[Any, Callable[..., Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Part of a graph as a graph of its own, and the values that go in."""

    module: fx.GraphModule
    inputs: list[Any]
    generators: GlobalGenerators | None = None  # before it, where it draws random numbers
    judged: tuple[int, ...] | None = None  # the results that may be wrong; None: all

    @property
    def size(self) -> int:
        """How many operators it has."""
        return sum(n.op == "call_function" and n.target is not operator.getitem for n in self.module.graph.nodes)


@dataclasses.dataclass(frozen=True, slots=True)
class Culprit:
    """The first operator that differs: its node, the user's line, how the results differ, the ranges of its operands.

    `piece` shows it, where one does: run by `replacement` in place of the operator, or changed by `maker`.
    """

    node: str
    operator: str
    where: str | None
    gap: Gap
    operands: tuple[str, ...]
    piece: Piece | None = None
    replacement: Callable[..., Any] | None = None
    maker: Any = None  # a `search.Maker`


# ---------------------------------------------------------------- decompositions


def first_in_decompositions(
    module: fx.GraphModule, inputs: Sequence[Any], table: Table, generators: GlobalGenerators
) -> Culprit | None:
    """The first operator of a graph without decompositions that has a wrong decomposition for its values."""
    generators.put_back()
    before: list[GlobalGenerators] = []

    def note(node: fx.Node) -> None:
        before[:] = [GlobalGenerators.now()] if is_random(node) and node.target in table else []

    for step in steps(module, inputs, before=note):
        node = step.node
        if node.op != "call_function" or node.target not in table or gives_nothing(node.target):
            continue
        after = GlobalGenerators.now() if before else None
        if before:
            before[0].put_back()
        wrong = _in_decomposition(table, node.target, step.args, step.kwargs, step.value)
        if after is not None:
            after.put_back()
        if wrong is None:
            continue
        piece = _one_call(wrong.op, wrong.args, wrong.kwargs, before[0] if before else None)
        named = ranges_of(zip([n.name for n in piece.module.graph.nodes], piece.inputs, strict=False))
        name = str(wrong.op) if wrong.op is node.target else f"{wrong.op}, a part of the decomposition of {node.target}"
        return Culprit(node.name, name, user_line(node), wrong.gap, named, piece, table[wrong.op])
    return None


@dataclasses.dataclass(slots=True)
class _Wrong:
    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    gap: Gap


class _Decomposing(ThreadDispatchMode):
    """Runs decompositions, nested ones too, and compares each with its operator; keeps the innermost that is wrong."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table
        self.running: list[Any] = []
        self.wrong: _Wrong | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.table or func in self.running or self.wrong is not None or _is_left(func):
            return func(*args, **kwargs)
        return self.checked(func, args, kwargs, func(*args, **kwargs))

    def checked(self, func: Any, args: Any, kwargs: Any, value: Any) -> Any:
        self.running.append(func)
        try:
            with self:
                result = self.table[func](*args, **kwargs)
        except NotImplementedError:
            result = NotImplemented
        finally:
            self.running.pop()
        if result is NotImplemented:
            return value
        if self.wrong is None:
            gap = gap_of(result, value, lambda: exact_call(func, args, kwargs, value))
            if gap.verdict is Verdict.WRONG:
                self.wrong = _Wrong(func, args, kwargs, gap)
        return result


def _in_decomposition(table: Table, op: Any, args: Any, kwargs: Any, value: Any) -> _Wrong | None:
    mode = _Decomposing(table)
    with torch.no_grad():
        try:
            mode.checked(op, args, kwargs, value)
        except Exception as error:  # the decomposition's own
            return mode.wrong or _Wrong(
                op, args, kwargs, Gap(Verdict.WRONG, f"it raises {type(error).__name__}: {error}")
            )
    return mode.wrong


def _is_left(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags or gives_nothing(func)


def _one_call(op: Any, args: Any, kwargs: Any, generators: GlobalGenerators | None) -> Piece:
    """A graph of one operator."""
    graph = fx.Graph()
    values: list[Any] = []

    def given(value: torch.Tensor) -> fx.Node:
        node = graph.placeholder(f"x{len(values)}")
        node.meta["val"] = value
        values.append(value)
        return node

    args, kwargs = mapped((tuple(args), kwargs), torch.Tensor, given)
    node = graph.call_function(op, args, kwargs)
    count = len(op._schema.returns)
    graph.output([node] if count == 1 else [graph.call_function(operator.getitem, (node, i)) for i in range(count)])
    return Piece(make_graph_module(torch.nn.Module(), graph, "Piece"), values, generators)


def gap_of(actual: Any, expected: Any, exact: Callable[[], Any]) -> Gap:
    """The worst difference of a value, or of a list of values; `exact()` is asked where bits differ."""
    if not isinstance(expected, (list, tuple)):
        return compare(actual, expected, exact)
    if not isinstance(actual, (list, tuple)) or len(actual) != len(expected):
        return Gap(Verdict.WRONG, f"{len(expected)} results were expected")
    worst, exact = EQUAL, functools.cache(exact)
    for i, (one, other) in enumerate(zip(actual, expected, strict=True)):
        gap = gap_of(one, other, functools.partial(_item, exact, i))
        if (gap.verdict, gap.ulps) > (worst.verdict, worst.ulps):
            worst = gap
    return worst


def _item(exact: Callable[[], Any], index: int) -> Any:
    results = exact()
    return None if results is None else results[index]


def ranges_of(named: Any) -> tuple[str, ...]:
    """For each operand its kind and the range of its values."""
    lines = []
    for name, value in named:
        if not isinstance(value, torch.Tensor):
            lines.append(f"{name} = {value!r}")
            continue
        kind = f"{name}: {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if value.numel() and not value.is_complex() and value.layout is torch.strided:
            low, high = value.double().aminmax()
            bad = int((~value.isfinite()).sum()) if value.is_floating_point() else 0
            kind += f" from {float(low):.4g} to {float(high):.4g}" + (f", {bad} not finite" if bad else "")
        lines.append(kind)
    return tuple(lines)
