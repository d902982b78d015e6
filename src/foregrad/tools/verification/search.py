"""The smallest part of a graph that shows a fault of its compiled form.

A `Maker` turns a graph into a callable: a backend's compiler, a backend's passes, a partition, or a capture. A quick
maker gets the graph once more to return all of its values, and each operator is compared on its own operands. A maker
that fuses operators may be right then: it gets the graph in pieces of some thirty operators, in all about one more
compilation. Then the earlier operators needed to show the fault are searched for, nearest first (delta debugging:
Zeller, 2002).

Known weakness: a fault that shows only in the graph as a whole is searched for by halving the whole, at greater cost.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import fx

from foregrad.graph.printing import user_line
from foregrad.tools._torch.tools import is_random, make_graph_module

from .compare import Gap, Verdict
from .locate import Culprit, Piece, gap_of, ranges_of
from .lockstep import evaluate, exact_call, gives_nothing, steps
from .watched import GlobalGenerators, copied

_PIECE = 32  # operators in a piece that a backend is given
_QUICK = 1.0  # seconds: a compilation that takes less can be made of a graph that returns all of its values
_SMALL = 20  # operators in a reproducer that need not be made fewer where a compilation is slow
_TESTS = 40  # pieces compiled while operators are taken out


@dataclasses.dataclass(frozen=True, slots=True)
class Maker:
    """Turns a graph into a callable, in about `seconds`. `again`: a compiler's way to a graph by itself."""

    kind: Literal["compiler", "passes", "partition", "capture"]
    function: Callable[..., Any]
    again: Callable[[fx.GraphModule], Callable[[list[Any]], Any]] | None = None
    seconds: float = 0.0

    @property
    def is_slow(self) -> bool:
        return self.seconds >= _QUICK

    def results(self, piece: Piece) -> list[Any]:
        """The results of a piece from its made form."""
        module = piece.module
        inputs = piece.inputs
        if self.kind != "capture":
            inputs = list(map(copied, inputs))
        run: Callable[[list[Any]], list[Any]]
        if self.kind == "capture":
            run = functools.partial(run_with_gradients, self.function(module.forward))
        elif self.kind == "compiler":
            assert self.again is not None
            run = self.again(module)
        elif self.kind == "passes":
            run = functools.partial(evaluate, self.function(module))
        else:
            run = _of_list(run_in_halves(self.function, module))
        if piece.generators is not None:
            piece.generators.put_back()
        with torch.set_grad_enabled(self.kind == "capture"):
            return run(inputs)


def _of_list(function: Callable[..., Any]) -> Callable[[list[Any]], Any]:
    return lambda values: function(*values)


def made_gap(piece: Piece, maker: Maker, expected: list[Any] | None = None) -> Gap | None:
    """The fault in the judged results of a piece made by `maker`; None where there is none.

    `expected`: these results on eager's kernels, where they are known.
    """

    def judged(results: list[Any]) -> list[Any]:
        return results if piece.judged is None else [results[i] for i in piece.judged]

    if expected is None:
        if piece.generators is not None:
            piece.generators.put_back()
        is_capture = maker.kind == "capture"
        run = run_with_gradients if is_capture else evaluate
        expected = judged(run(piece.module, piece.inputs))

    def exactly() -> Any:
        if maker.kind == "capture":
            return None
        if piece.generators is not None:
            piece.generators.put_back()
        return judged(list(steps(piece.module, piece.inputs, exactly=True))[-1].exact())

    gap = gap_of(judged(maker.results(piece)), expected, exactly)
    return gap if gap.verdict is Verdict.WRONG else None


def smallest_wrong(
    module: fx.GraphModule, inputs: list[Any], generators: GlobalGenerators, maker: Maker
) -> Culprit | None:
    """The part of a graph that a maker gets wrong, as small as it can be made; None where no part is wrong alone."""
    search = _Search(module, inputs, generators, maker)
    units = search.units
    if not maker.is_slow:
        end = search.watched()
        culprit = None if end is None else search.grown(end, 0)
        if culprit is not None:
            return culprit
    for start in (*range(0, len(units), _PIECE), None):
        piece, first = (units, 0) if start is None else (units[start : start + _PIECE], start)
        if search.gap(piece) is not None:
            return search.grown(first + _least_count(search.gap, piece) - 1, first)
    return None


class _Search:
    def __init__(self, module: fx.GraphModule, inputs: list[Any], generators: GlobalGenerators, maker: Maker) -> None:
        self.module, self.inputs, self.generators, self.maker = module, inputs, generators, maker
        self.values: dict[fx.Node, Any] = {}
        self.before: dict[fx.Node, GlobalGenerators] = {}  # the random state at nodes that draw
        self.late: set[fx.Node] = set()  # nodes that depend on tangents
        generators.put_back()

        def note(node: fx.Node) -> None:
            if is_random(node):
                self.before[node] = GlobalGenerators.now()

        for step in steps(module, inputs, keep=True, before=note):
            self.values[step.node] = step.value
            if step.node.name.startswith("tangents_") or not self.late.isdisjoint(step.node.all_input_nodes):
                self.late.add(step.node)
        self.units = _units(module)

    def piece(self, units: Sequence[list[fx.Node]], last: Sequence[fx.Node] = ()) -> Piece | None:
        """The graph of the units' nodes, with outside values as its inputs; None where anything but values goes in.

        Its results are the values used outside; with `last`, the judged results of the last unit, and values that no
        unit of the piece uses. For a partition inputs are named as it knows them, and the forward's results come first.
        """
        nodes = [node for unit in units for node in unit]
        inside, is_joint = set(nodes), self.maker.kind == "partition"
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        inputs: list[fx.Node] = []
        for used in dict.fromkeys(used for node in nodes for used in node.all_input_nodes if used not in inside):
            if used.op == "get_attr":
                copies[used] = graph.node_copy(used)
                continue
            inputs.append(used)
            kind = "tangents" if used in self.late else "primals"
            copies[used] = graph.placeholder(f"{kind}_{len(inputs)}" if is_joint else used.name)
            copies[used].meta = {k: used.meta[k] for k in ("val", "spec") if k in used.meta}
        for node in nodes:
            copies[node] = graph.node_copy(node, copies.__getitem__)
        shown = [n for n in nodes if self._is_result(n) and (n in last or self._is_shown(n, inside, bool(last)))]
        shown = self._ordered(shown)
        if not shown or any(not _is_value(self.values[n]) for n in inputs):
            return None
        if is_joint and shown[-1] not in self.late:
            return None  # no backward, so nothing to split
        graph.output([copies[node] for node in shown])
        module = make_graph_module(self.module, graph, "Piece")
        first = next((self.before[n] for n in nodes if n in self.before), None)
        judged = tuple(shown.index(n) for n in last if n in shown) if last else None
        return Piece(module, [self.values[n] for n in inputs], first, judged)

    @staticmethod
    def _is_shown(node: fx.Node, inside: set[fx.Node], is_needed_only: bool) -> bool:
        """Whether a piece returns a node: one without users inside, or, unless `is_needed_only`, with users outside."""
        return inside.isdisjoint(node.users) if is_needed_only else not node.users or not inside.issuperset(node.users)

    def _ordered(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        return sorted(nodes, key=self.late.__contains__) if self.maker.kind == "partition" else list(nodes)

    def _is_result(self, node: fx.Node) -> bool:
        """Whether a node gives a value that a compiler has to give too: memory that nobody has written has none."""
        return _is_value(self.values[node]) and not gives_nothing(node.target)

    def gap(self, units: Sequence[list[fx.Node]], last: Sequence[fx.Node] = ()) -> Gap | None:
        """The worst fault in the units, made by themselves; with `last`, in the last unit. None where there is none."""
        piece = self.piece(units, last)
        if piece is None:
            return None
        is_known = last and piece.generators is None
        return made_gap(piece, self.maker, [self.values[n] for n in last if self._is_result(n)] if is_known else None)

    def watched(self) -> int | None:
        """The number of the first unit that is wrong where the whole graph is made to return all of its values.

        Each operator is compared with eager's on the values that it is given there.
        """
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(self.module.graph, copies)
        nodes = [n for unit in self.units for n in unit]
        shown = self._ordered([n for n in nodes if self._is_result(n) and isinstance(self.values[n], torch.Tensor)])
        graph.output([copies[node] for node in shown])
        values = dict(self.values)
        whole = Piece(make_graph_module(self.module, graph, "Watched"), self.inputs, self.generators)
        values.update(zip(shown, self.maker.results(whole), strict=True))
        results = set(shown)
        for number, unit in enumerate(self.units):
            parts = [node for node in unit if node in results]
            if parts and unit[0].op == "call_function" and not is_random(unit[0]) and _is_wrong(unit[0], parts, values):
                return number
        return None

    def grown(self, end: int, floor: int) -> Culprit | None:
        """As few units as show that number `end` is wrong; None where units before `floor` are needed too."""
        last = self.units[end]
        gaps: dict[tuple[int, ...], Gap | None] = {}

        def gap_of_units(numbers: Sequence[int]) -> Gap | None:
            key = tuple(sorted((*numbers, end)))
            if key not in gaps:
                gaps[key] = self.gap([self.units[i] for i in key], last)
            return gaps[key]

        needed = needed_of(gap_of_units, self._nearest_first(end, floor), _SMALL if self.maker.is_slow else 1)
        gap = None if needed is None else gap_of_units(needed)
        if needed is None or gap is None:
            return None
        piece, node = self.piece([self.units[i] for i in sorted((*needed, end))], last), last[0]
        operands = ranges_of((n.name, self.values[n]) for n in node.all_input_nodes)
        return Culprit(node.name, str(node.target), user_line(node), gap, operands, piece, maker=self.maker)

    def _nearest_first(self, end: int, floor: int) -> list[int]:
        """The numbers of the units from `floor` to `end`: leading units by distance, then all others."""
        number_of = {node: i for i, unit in enumerate(self.units) for node in unit}
        numbers = {end: None}
        queue = [end]
        for number in queue:
            for used in self.units[number][0].all_input_nodes:
                source = number_of.get(used)
                if source is not None and source >= floor and source not in numbers:
                    numbers[source] = None
                    queue.append(source)
        return [*queue[1:], *(i for i in range(end - 1, floor - 1, -1) if i not in numbers)]


def needed_of(wrong: Callable[[Sequence[int]], Any], items: Sequence[int], enough: int) -> list[int] | None:
    """A few items that are wrong together; None where all items together are right. `enough`: the search stops at this
    number.

    Parts of the items are tried first, each by itself: a part holds all needed items as a rule. Where none does, the
    last item of the shortest wrong beginning is needed, and the other needed items stand before it.
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
            if not is_known and not wrong((*needed, *items)):
                return None
            count = _least_count(wrong, items, needed)
            needed.append(items[count - 1])
            part = items[: count - 1]
            if wrong(needed):
                return needed
        items, is_known = part, True
        if len(needed) + len(items) <= enough or tests > _TESTS:
            return [*needed, *items]
        middle = len(items) // 2
        parts = [items[:middle], items[middle:]] if middle else []


def _least_count(wrong: Callable[[Any], Any], items: Sequence[Any], needed: Sequence[Any] = ()) -> int:
    """The number of items, from the first on, that are wrong with `needed`. All items are."""
    low, high = 1, len(items)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if wrong((*needed, *items[:middle])) else (middle + 1, high)
    return high


@torch.no_grad()
def _is_wrong(node: fx.Node, parts: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> bool:
    """Whether an operator's results, itself or its items, are wrong for its operands' values."""
    operands: Any = [fx.map_arg(a, values.__getitem__) for a in (node.args, node.kwargs)]
    target: Any = node.target
    value = target(*operands[0], **operands[1])

    def own(result: Any) -> list[Any]:
        return [result if part is node else result[part.args[1]] for part in parts]

    def exact() -> list[Any]:
        return own(exact_call(target, operands[0], operands[1], value))

    return gap_of([values[part] for part in parts], own(value), exact).verdict is Verdict.WRONG


def _units(module: fx.GraphModule) -> list[list[fx.Node]]:
    """The operators in order; an operator with several results together with the nodes that pick them."""
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


# -------------------------------------------------------------------- whole graphs
# Graphs run whole: split by a partition, its halves one after the other; or as a function with its gradients.
#
# Both functions stand in reproducers as they are here: they need nothing but PyTorch.


def run_in_halves(partition: Any, module: Any) -> Any:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    names, inputs = [node.name for node in placeholders], [node.meta["val"] for node in placeholders]
    late: set[Any] = set()  # operators that depend on tangents belong to the backward
    for node in module.graph.nodes:
        if node.name.startswith("tangents_") or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        node.meta.setdefault("partitioner_tag", "is_backward" if node in late else "is_forward")
    *_, output = module.graph.nodes
    count = sum(node not in late for node in output.args[0])
    forward, backward = partition(module, inputs, num_fwd_outputs=count)

    def run(*values: Any) -> list[Any]:
        by_name = dict(zip(names, values, strict=True))

        def half(part: Any) -> list[Any]:
            part.recompile()
            results = part(*(by_name[node.name] for node in part.graph.nodes if node.op == "placeholder"))
            *_, output = part.graph.nodes
            named = zip((getattr(node, "name", "") for node in output.args[0]), results, strict=True)
            by_name.update(named)
            return list(results)

        return half(forward)[:count] + half(backward)

    return run


def run_with_gradients(function: Any, inputs: Any) -> list[Any]:
    own = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    leaves = [x for x in own if isinstance(x, torch.Tensor) and x.requires_grad]
    results = function(*own)
    roots = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    gradients: Any = ()
    if roots and leaves:
        ones = [torch.ones_like(root) for root in roots]
        gradients = torch.autograd.grad(roots, leaves, ones, allow_unused=True)
    return [torch.zeros(()) if x is None else x for x in (*results, *own, *gradients)]
