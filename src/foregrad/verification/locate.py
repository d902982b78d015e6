"""The first operator that differs, and the smallest part of a graph that shows it.

A decomposition is compared with its operator on the very values of the run, one by one. A backend that compiles quickly
compiles the graph once more to return all of its values, and each operator is compared on the values that it got. One
that fuses operators may be right then: it is given the graph in pieces of some thirty operators, which together cost
about one more compilation. From the operator that is wrong, as many before it are taken as it takes to see that, nearest
first; then what is not needed is taken out (delta debugging: Zeller, 2002).

Known weakness: a fault that shows only in the graph as a whole is searched for by halving the whole, which takes more.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.dispatch import ThreadDispatchMode
from .._torch.modules import make_graph_module
from ..backends.boxed import as_boxed
from ..dispatch.compilers import called_bare
from ..graph.joint import JointGraph
from ..graph.printing import user_line
from ..graph.role import GraphRole
from ..passes.aliasing import results_of
from .compare import EQUAL, Gap, Verdict, compare
from .lockstep import evaluate, exact_call, gives_nothing, is_random, steps
from .watched import Execution, Generators, copy_of_tensor

__all__ = ["Culprit", "Piece", "first_by_name", "first_in_backend", "first_in_decompositions", "gap_of"]

_PIECE = 32  # operators in a piece that a backend is given
_QUICK = 1.0  # seconds: a compilation that takes less can be made of a graph that returns all of its values
_SMALL = 20  # operators in a reproducer that need not be made fewer where a compilation is slow
_TESTS = 40  # pieces compiled while operators are taken out
Table = Mapping[Any, Callable[..., Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Part of a graph as a graph of its own, and the values that go in."""

    module: fx.GraphModule
    inputs: list[Any]
    generators: Generators | None = None  # before it, where it draws random numbers

    @property
    def size(self) -> int:
        """How many operators it has."""
        return sum(n.op == "call_function" and n.target is not operator.getitem for n in self.module.graph.nodes)


@dataclasses.dataclass(frozen=True, slots=True)
class Culprit:
    """The first operator that differs: its node, the user's line, how the results differ, the ranges of its operands.

    `piece` shows it, where one does: run by `replacement` in place of the operator, or compiled by `compiler`.
    """

    node: str
    operator: str
    where: str | None
    gap: Gap
    operands: tuple[str, ...]
    piece: Piece | None = None
    replacement: Callable[..., Any] | None = None
    compiler: Callable[..., Any] | None = None


# ---------------------------------------------------------------- decompositions


def first_in_decompositions(
    module: fx.GraphModule, inputs: Sequence[Any], table: Table, generators: Generators
) -> Culprit | None:
    """The first operator of a graph without decompositions whose decomposition is wrong for the values it gets."""
    generators.put_back()
    before: list[Generators] = []

    def note(node: fx.Node) -> None:
        before[:] = [Generators.now()] if is_random(node) and node.target in table else []

    for step in steps(module, inputs, before=note):
        node = step.node
        if node.op != "call_function" or node.target not in table or gives_nothing(node.target):
            continue
        after = Generators.now() if before else None
        if before:
            before[0].put_back()
        found = _in_decomposition(table, node.target, step.args, step.kwargs, step.value)
        if after is not None:
            after.put_back()
        if found is None:
            continue
        piece = _one_call(found.op, found.args, found.kwargs, before[0] if before else None)
        named = _ranges(zip([n.name for n in piece.module.graph.nodes], piece.inputs, strict=False))
        name = str(found.op) if found.op is node.target else f"{found.op}, which {node.target} is decomposed into"
        return Culprit(node.name, name, user_line(node), found.gap, named, piece, table[found.op])
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


def _one_call(op: Any, args: Any, kwargs: Any, generators: Generators | None) -> Piece:
    """A graph of one operator."""
    graph = fx.Graph()
    values: list[Any] = []

    def given(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"x{len(values)}")
            node.meta["val"] = value
            values.append(value)
            return node
        if isinstance(value, (list, tuple)):
            return type(value)(map(given, value)) if type(value) in (list, tuple) else [given(item) for item in value]
        return value

    inputs = given(tuple(args)), {key: given(value) for key, value in kwargs.items()}
    node = graph.call_function(op, *inputs)
    count = len(op._schema.returns)
    graph.output([node] if count == 1 else [graph.call_function(operator.getitem, (node, i)) for i in range(count)])
    return Piece(make_graph_module(torch.nn.Module(), graph, "Piece"), values, generators)


# ---------------------------------------------------------------- by the names of nodes


def first_by_name(
    actual: fx.GraphModule, inputs: Sequence[Any], expected: Mapping[str, Any], exact: Callable[[], Mapping[str, Any]]
) -> Culprit | None:
    """The first node of a graph whose value is wrong, by that of the node of its name in the graph it was made of."""
    known = functools.cache(exact)
    for step in steps(actual, inputs):
        node = step.node
        if node.op in ("placeholder", "output", "get_attr") or node.name not in expected:
            continue
        gap = gap_of(step.value, expected[node.name], lambda node=node: known().get(node.name))
        if gap.verdict is Verdict.WRONG:
            operands = _ranges([(n.name, v) for n, v in zip(node.all_input_nodes, _tensors(step.args), strict=False)])
            return Culprit(node.name, str(node.target), user_line(node), gap, operands)
    return None


def _tensors(args: Any) -> list[Any]:
    if isinstance(args, torch.Tensor):
        return [args]
    return [t for item in args for t in _tensors(item)] if isinstance(args, (list, tuple)) else []


# ---------------------------------------------------------------- a backend


def first_in_backend(execution: Execution) -> Culprit | None:
    """The part of a graph that a backend gets wrong, as small as it can be made; None where no part is wrong alone."""
    search = _Search(execution)
    units = search.units
    if execution.compile_seconds < _QUICK:
        end = search.watched()
        found = None if end is None else search.grown(end, 0)
        if found is not None:
            return found
    for start in (*range(0, len(units), _PIECE), None):
        piece, first = (units, 0) if start is None else (units[start : start + _PIECE], start)
        if search.gap(piece) is not None:
            count = _least_count(lambda count, piece=piece: search.gap(piece[:count]), len(piece), is_known=True)
            return search.grown(first + count - 1, first)
    return None


class _Search:
    def __init__(self, execution: Execution) -> None:
        self.execution = execution
        self.values: dict[fx.Node, Any] = {}
        self.before: dict[fx.Node, Generators] = {}  # the random state at nodes that draw
        execution.generators.put_back()

        def note(node: fx.Node) -> None:
            if is_random(node):
                self.before[node] = Generators.now()

        for step in steps(execution.module, execution.inputs, keep=True, before=note):
            self.values[step.node] = step.value
        self.units = _units(execution.module)

    def piece(self, units: Sequence[list[fx.Node]], last: Sequence[fx.Node] = ()) -> Piece | None:
        """The graph of these nodes, others' values as its inputs; None where something else than these goes in.

        Its results are what others use of it; with `last`, those of this unit, and what no unit of the piece uses.
        """
        nodes = [node for unit in units for node in unit]
        inside = set(nodes)
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        inputs: list[fx.Node] = []
        for node in nodes:
            for used in node.all_input_nodes:
                if used in inside or used in made:
                    continue
                if used.op == "get_attr":
                    made[used] = graph.node_copy(used)
                    continue
                made[used] = graph.placeholder(used.name)
                made[used].meta = {k: used.meta[k] for k in ("val", "spec") if k in used.meta}
                inputs.append(used)
        for node in nodes:
            made[node] = graph.node_copy(node, made.__getitem__)
        used = (
            {n for n in nodes if inside.intersection(n.users)}
            if last
            else {n for n in nodes if n.users and inside.issuperset(n.users)}
        )
        results = [n for n in (*last, *(n for n in nodes if n not in used and n not in last)) if self._is_result(n)]
        if not results or any(not _is_value(self.values[n]) for n in inputs):
            return None
        graph.output([made[node] for node in results])
        module = make_graph_module(self.execution.module, graph, "Piece")
        first = next((self.before[n] for n in nodes if n in self.before), None)
        return Piece(module, [self.values[n] for n in inputs], first)

    def _is_result(self, node: fx.Node) -> bool:
        """Whether a node gives a value that a compiler has to give too: memory that nobody has written has none."""
        return _is_value(self.values[node]) and not gives_nothing(node.target)

    def gap(self, units: Sequence[list[fx.Node]], last: Sequence[fx.Node] = ()) -> Gap | None:
        """The worst of what is wrong in these nodes, compiled by themselves; None where nothing is.

        With `last`, of what is wrong in the results of this unit.
        """
        piece = self.piece(units, last)
        if piece is None:
            return None
        results = [n for n in last if self._is_result(n)]
        known = [self.values[n] for n in results] if results and piece.generators is None else None
        return compiled_gap(piece, self.execution.compiler, self.execution.joint, len(results) or None, known)

    def watched(self) -> int | None:
        """The number of the first unit that is wrong where the whole graph is compiled to return all of its values.

        Each operator is compared with eager's on the values that the compiled graph gives it.
        """
        execution = self.execution
        graph = fx.Graph()
        made: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(execution.module.graph, made)
        shown = [
            n for unit in self.units for n in unit if self._is_result(n) and isinstance(self.values[n], torch.Tensor)
        ]
        graph.output([made[node] for node in shown])
        execution.generators.put_back()
        values = dict(self.values)
        whole = Piece(make_graph_module(execution.module, graph, "Watched"), execution.inputs, execution.generators)
        values.update(zip(shown, compiled_results(whole, execution.compiler, execution.joint), strict=True))
        given = set(shown)
        for number, unit in enumerate(self.units):
            parts = [node for node in unit if node in given]
            if parts and unit[0].op == "call_function" and not is_random(unit[0]) and _is_wrong(unit[0], parts, values):
                return number
        return None

    def grown(self, end: int, floor: int) -> Culprit | None:
        """As few units as show that number `end` is wrong; None where it takes more than those from `floor` on."""
        last = self.units[end]
        gaps: dict[tuple[int, ...], Gap | None] = {}

        def gap_of_units(numbers: Sequence[int]) -> Gap | None:
            key = tuple(sorted((*numbers, end)))
            if key not in gaps:
                gaps[key] = self.gap([self.units[i] for i in key], last)
            return gaps[key]

        is_slow = self.execution.compile_seconds >= _QUICK
        needed = _needed(gap_of_units, self._nearest_first(end, floor), _SMALL if is_slow else 1)
        gap = None if needed is None else gap_of_units(needed)
        if needed is None or gap is None:
            return None
        piece = self.piece([self.units[i] for i in sorted((*needed, end))], last)
        node, compiler = last[0], self.execution.compiler
        operands = [(n.name, self.values[n]) for n in node.all_input_nodes]
        return Culprit(node.name, str(node.target), user_line(node), gap, _ranges(operands), piece, compiler=compiler)

    def _nearest_first(self, end: int, floor: int) -> list[int]:
        """The numbers of the units from `floor` to `end`: those that lead to it by distance, then all others."""
        number_of = {node: i for i, unit in enumerate(self.units) for node in unit}
        found = {end: None}
        queue = [end]
        for number in queue:
            for used in self.units[number][0].all_input_nodes:
                source = number_of.get(used)
                if source is not None and source >= floor and source not in found:
                    found[source] = None
                    queue.append(source)
        return [*queue[1:], *(i for i in range(end - 1, floor - 1, -1) if i not in found)]


def _needed(wrong: Callable[[Sequence[int]], Any], items: Sequence[int], enough: int) -> list[int] | None:
    """Few of the items that are wrong together; None where all of them are not. `enough`: no fewer are looked for.

    Parts of the items are tried first, each by itself: one of them holds all that is needed as a rule. Where none does,
    the last item of the shortest beginning that is wrong is needed, and what else is needed stands before it.
    """
    needed: list[int] = []
    if wrong(()):
        return needed
    parts = [items[start // 2 : start] for start in (2**i for i in range(len(items).bit_length() + 1))]
    is_known, tests = False, 0
    while True:
        tests += len(parts)
        part = next((part for part in parts if part and wrong((*needed, *part))), None)
        if part is None:
            count = _least_count(lambda count: wrong((*needed, *items[:count])), len(items), is_known=is_known)
            if count is None:
                return None
            needed.append(items[count - 1])
            part = items[: count - 1]
            if wrong(needed):
                return needed
        items, is_known = part, True
        if len(needed) + len(items) <= enough or tests > _TESTS:
            return [*needed, *items]
        middle = len(items) // 2
        parts = [items[:middle], items[middle:]] if middle else []


def _least_count(wrong: Callable[[int], Any], most: int, *, is_known: bool) -> int | None:
    """The least count from 1 to `most` that is wrong; None where none is. `is_known`: that `most` is."""
    if not is_known and not wrong(most):
        return None
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wrong(middle) else (middle + 1, high)
    return high


@torch.no_grad()
def _is_wrong(node: fx.Node, parts: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> bool:
    """Whether an operator's results, itself or items of it, are wrong for its operands' values."""
    operands: Any = [fx.map_arg(a, values.__getitem__) for a in (node.args, node.kwargs)]
    target: Any = node.target
    value = target(*operands[0], **operands[1])

    def own(result: Any, part: fx.Node) -> Any:
        return result if part is node else result[part.args[1]]

    exact = functools.cache(lambda: exact_call(target, operands[0], operands[1], value))
    return any(
        compare(values[part], own(value, part), lambda part=part: own(exact(), part)).verdict is Verdict.WRONG
        for part in parts
    )


def compiled_results(piece: Piece, compiler: Callable[..., Any], joint: JointGraph) -> list[Any]:
    """What a piece gives, compiled by itself."""
    count = len(results_of(piece.module))
    compiled = as_boxed(called_bare(compiler, piece.module, joint, GraphRole("inference", (), tuple(range(count))))[0])
    if piece.generators is not None:
        piece.generators.put_back()
    with torch.no_grad():
        return compiled([copy_of_tensor(v) if isinstance(v, torch.Tensor) else v for v in piece.inputs])


def compiled_gap(
    piece: Piece,
    compiler: Callable[..., Any],
    joint: JointGraph,
    count: int | None = None,
    expected: list[Any] | None = None,
) -> Gap | None:
    """What is wrong with the first `count` results of a piece that `compiler` compiled; None where nothing is.

    `expected`: these results on eager's kernels, where they are known.
    """
    if expected is None:
        if piece.generators is not None:
            piece.generators.put_back()
        expected = evaluate(piece.module, piece.inputs)[:count]
    actual = compiled_results(piece, compiler, joint)[:count]

    def exactly() -> Any:
        if piece.generators is not None:
            piece.generators.put_back()
        return list(steps(piece.module, piece.inputs, exactly=True))[-1].exact()[:count]

    gap = gap_of(actual, expected, exactly)
    return gap if gap.verdict is Verdict.WRONG else None


def gap_of(actual: Any, expected: Any, exact: Callable[[], Any]) -> Gap:
    """The worst difference of a value, or of a list of them; `exact()` is asked where bits differ."""
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
    known = exact()
    return None if known is None else known[index]


def _units(module: fx.GraphModule) -> list[list[fx.Node]]:
    """The operators in order; one with several results together with what takes these apart."""
    units: dict[fx.Node, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "output", "get_attr"):
            continue
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in units:
            units[source].append(node)
        else:
            units[node] = [node]
    return list(units.values())


def _is_value(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, int, float, bool))


def _ranges(named: Any) -> tuple[str, ...]:
    """For each operand its kind and the range of what it holds."""
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
