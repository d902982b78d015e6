"""The cheapest choice of residuals, when saving a value and computing it again each have a price.

A value that the backward needs must be saved, or computed again, and then its operands are needed too. The cheapest
choice is a minimum cut (the "project selection" of Rhys, 1970, and Picard, 1976): each value is an arc with the price
of saving as its capacity, recomputation is an arc from the source, and an operand's arc leads into its readers' with a
capacity that is never cut.

Most values need no cut. Values that are certainly needed and can't be computed again are saved; values that follow from
saved values at no price are free. Only the rest becomes a network.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from ..errors import PartitionError
from .classify import Kind
from .index import JointIndex

NEVER = 1 << 120  # the price of a forbidden choice: more than all true prices together


class Dependencies(Protocol):
    """The graph that residuals are chosen for: nodes by number, in topological order. A `JointIndex` or part of one."""

    @property
    def operands(self) -> list[list[int]]: ...

    @property
    def kinds(self) -> list[Kind]: ...

    def __len__(self) -> int: ...

    def describe(self, i: int) -> str: ...


def required_by_backward(index: JointIndex) -> list[int]:
    """The values that the backward reads and the forward can compute, with gradients that need no tangents."""
    needs_tangent, for_backward = index.needs_tangent, index.for_backward
    required = bytearray(len(index))
    for i, operands in enumerate(index.operands):
        if needs_tangent[i] and for_backward[i]:
            for operand in operands:
                required[operand] = 1
    for i in index.gradient_numbers:
        required[i] = 1
    return [i for i, bit in enumerate(required) if bit and not needs_tangent[i]]


def cheapest_residuals(
    index: Dependencies, save: Sequence[int], redo: Sequence[int], required: Iterable[int]
) -> list[int]:
    """The numbers of the nodes to save, at the least sum of `save` over these and `redo` over the recomputed nodes.

    Prices are integers up to 2**100 or `NEVER`. Of equally cheap choices the one that recomputes least is taken.
    Raises `PartitionError`, with the chain of reasons, if a needed value may be neither saved nor recomputed.
    """
    certain = bytearray(len(index))
    for i in required:
        certain[i] = 1
    needed = bytearray(certain)
    chosen = _certainly_saved(index, save, redo, certain)
    free = _free(index, save, redo, chosen)
    for i in range(len(index) - 1, -1, -1):
        if needed[i] or certain[i]:
            needed[i] = not free[i]
            follows = redo[i] == 0 and all(map(free.__getitem__, index.operands[i]))  # at no price
            if free[i] and save[i] == 0 and index.kinds[i] not in _ALWAYS_THERE and not follows:
                chosen.append(i)  # an output, say: kept by the caller, and computed again unless it is listed
            if needed[i] and redo[i] < NEVER:
                for operand in index.operands[i]:
                    needed[operand] = 1
    undecided = [i for i, bit in enumerate(needed) if bit]
    return sorted({*chosen, *(_cut(index, save, redo, undecided, certain) if undecided else ())})


def _certainly_saved(index: Dependencies, save: Sequence[int], redo: Sequence[int], certain: bytearray) -> list[int]:
    """Nodes that can't be recomputed and that every choice needs. Marks in `certain` all that every choice needs."""
    saved = []
    reader: dict[int, int] = {}
    for i in range(len(index) - 1, -1, -1):
        if not certain[i]:
            continue
        if redo[i] >= NEVER:
            if save[i] >= NEVER:
                raise _infeasible(index, i, reader)
            saved.append(i)
        elif save[i] >= NEVER:
            for operand in index.operands[i]:
                certain[operand] = 1
                reader[operand] = i
    saved.reverse()
    return saved


def _free(index: Dependencies, save: Sequence[int], redo: Sequence[int], chosen: list[int]) -> bytearray:
    """A mask of the values that the backward has, or can compute, at no price."""
    free = bytearray(len(index))
    for i in chosen:
        free[i] = 1
    for i, operands in enumerate(index.operands):
        if not free[i]:
            free[i] = save[i] == 0 or (redo[i] == 0 and all(map(free.__getitem__, operands)))
    return free


_ALWAYS_THERE = (Kind.INPUT, Kind.CONSTANT)


def _cut(
    index: Dependencies, save: Sequence[int], redo: Sequence[int], undecided: list[int], certain: bytearray
) -> list[int]:
    """Solve for the undecided values. Sink side: present in the backward (outer), or computed there (inner)."""
    inner: dict[int, int] = {}  # the vertex that stands for computing a value again
    outer: dict[int, int] = {}  # the vertex that stands for having it
    from_source: list[int] = []
    to_sink: list[int] = []
    arcs: list[tuple[int, int, int]] = []
    for i in undecided:
        outer[i] = len(from_source)
        to_sink.append(NEVER if certain[i] else 0)
        if redo[i] >= NEVER:
            from_source.append(save[i])
            continue
        if save[i] < NEVER:
            from_source.append(0)
            to_sink.append(0)
            arcs.append((len(from_source), outer[i], save[i]))
        inner[i] = len(from_source)
        from_source.append(redo[i])
        for operand in index.operands[i]:
            if operand in outer:
                arcs.append((outer[operand], inner[i], NEVER))
    _, is_sink = min_cut(len(from_source), from_source, to_sink, arcs)
    return [i for i in undecided if is_sink[outer[i]] and not (i in inner and is_sink[inner[i]])]


def _infeasible(index: Dependencies, i: int, reader: dict[int, int]) -> PartitionError:
    reasons = {
        Kind.RANDOM: "draws random numbers, and must not run twice",
        Kind.EFFECT: "has an effect, and must not run twice",
    }
    why = reasons.get(index.kinds[i], "may not be computed again")
    lines = [f"{index.describe(i)} {why}, and its value can't be saved"]
    while i in reader:
        i = reader[i]
        lines.append(f"{index.describe(i)}, which must be computed again in the backward, needs it")
    lines.append("the backward needs that value")
    return PartitionError("no partition exists:\n  " + "\n  ".join(lines))


# ---------------------------------------------------------------------------------------------- the minimum cut itself
# Exact minimum cuts on flat lists of Python integers: no overflow, no recursion, no graph library.
#
# `min_cut` first removes, one by one, every vertex with at most two neighbours, and folds what the best choice for it
# costs into the capacities between its neighbours and to the terminals. That is exact: the least cost over one
# vertex's side, as a function of two neighbours' sides, is again a sum of such capacities, because the costs of cuts
# are submodular (Kolmogorov and Zabih, "What Energy Functions Can Be Minimized via Graph Cuts?", 2004, say which
# functions are). Chains vanish, and so do all series-parallel graphs, residual networks among them, in linear time.
#
# What remains goes to `max_flow`, the algorithm of Dinic ("Algorithm for Solution of a Problem of Maximum Flow in
# Networks with Power Estimation", 1970): shortest augmenting paths, one breadth-first search for each length.
#
# Known weakness: one search per path length. Thousands of vertices with three neighbours each, in a long row, and a
# price on every one, take seconds.

Arc = tuple[int, int, int]


def min_cut(
    num_vertices: int, from_source: Sequence[int], to_sink: Sequence[int], arcs: Iterable[Arc]
) -> tuple[int, bytearray]:
    """The least cost of dividing vertices into a source and a sink side, and for each vertex whether it is on the
    sink's. `from_source[v]` is paid when v is on the sink's side, `to_sink[v]` when it is on the source's, and the
    third of an arc (u, v, capacity) when u is on the source's and v on the sink's.

    Of all cheapest cuts, it is the one with the fewest vertices on the sink's side (there is a least one).
    """
    source, sink = list(from_source), list(to_sink)
    neighbours: list[dict[int, int]] = [{} for _ in range(num_vertices)]
    for u, v, capacity in arcs:
        if u != v and capacity:
            neighbours[u][v] = neighbours[u].get(v, 0) + capacity
            neighbours[v].setdefault(u, 0)
    elimination = _Elimination(source, sink, neighbours)
    cost = elimination.run()
    is_sink = bytearray(num_vertices)
    core = [v for v in range(num_vertices) if not elimination.gone[v]]
    if core:
        cost += _solve_core(core, source, sink, neighbours, is_sink)
    elimination.decide(is_sink)
    return cost, is_sink


class _Elimination:
    """Removes vertices with at most two neighbours, remembering how to choose their sides later."""

    def __init__(self, source: list[int], sink: list[int], neighbours: list[dict[int, int]]) -> None:
        self.source = source
        self.sink = sink
        self.neighbours = neighbours
        self.gone = bytearray(len(source))
        self.steps: list[tuple[int, int, int, tuple[tuple[int, int, int], ...]]] = []

    def run(self) -> int:
        """Eliminate all that can be; the constant part of the cost."""
        neighbours, gone = self.neighbours, self.gone
        pending = [v for v in range(len(gone)) if len(neighbours[v]) <= 2]
        constant = 0
        while pending:
            v = pending.pop()
            if gone[v]:
                continue
            gone[v] = 1
            # (neighbour, capacity from there, capacity to there)
            links = tuple([(u, neighbours[u].pop(v), capacity) for u, capacity in neighbours[v].items()])
            self.steps.append((v, self.source[v], self.sink[v], links))
            constant += self._fold(v, links)
            for u, _, _ in links:
                if len(neighbours[u]) <= 2:
                    pending.append(u)
        return constant

    def _fold(self, v: int, links: tuple[tuple[int, int, int], ...]) -> int:
        """Add the best cost of v, for each choice of its neighbours' sides, to their capacities."""
        if_sink, if_source = self.source[v], self.sink[v]
        if not links:
            return min(if_sink, if_source)
        u, from_u, to_u = links[0]
        if len(links) == 1:
            both_source = min(if_source, if_sink + from_u)
            return both_source + self._charge(u, min(if_source + to_u, if_sink) - both_source)
        w, from_w, to_w = links[1]
        both_source = min(if_source, if_sink + from_u + from_w)
        w_sink = min(if_source + to_w, if_sink + from_u)
        u_sink = min(if_source + to_u, if_sink + from_w)
        both_sink = min(if_source + to_u + to_w, if_sink)
        between = w_sink + u_sink - both_source - both_sink
        neighbours = self.neighbours
        if between or w in neighbours[u]:
            neighbours[u][w] = neighbours[u].get(w, 0) + between
            neighbours[w].setdefault(u, 0)
        return both_source + self._charge(u, u_sink - both_source) + self._charge(w, both_sink - u_sink)

    def _charge(self, v: int, price: int) -> int:
        """Make the sink's side for v dearer by `price`, perhaps negative; returns the price to be paid either way."""
        if price >= 0:
            self.source[v] += price
            return 0
        self.sink[v] -= price
        return price

    def decide(self, is_sink: bytearray) -> None:
        """Choose the sides of eliminated vertices, last first: then their neighbours' sides are known."""
        for v, if_sink, if_source, links in reversed(self.steps):
            for u, from_u, to_u in links:
                if is_sink[u]:
                    if_source += to_u
                else:
                    if_sink += from_u
            is_sink[v] = if_sink < if_source


def _solve_core(
    core: list[int], source: list[int], sink: list[int], neighbours: list[dict[int, int]], is_sink: bytearray
) -> int:
    place = {v: i for i, v in enumerate(core)}
    s, t = len(core), len(core) + 1
    tails: list[int] = []
    heads: list[int] = []
    capacities: list[int] = []
    cost = 0
    for i, v in enumerate(core):
        either = min(source[v], sink[v])
        cost += either
        ends = [(s, i, source[v] - either), (i, t, sink[v] - either)]
        ends += [(i, place[w], capacity) for w, capacity in neighbours[v].items()]
        for tail, head, capacity in ends:
            if capacity:
                tails.append(tail)
                heads.append(head)
                capacities.append(capacity)
    flow, reaches_sink = max_flow(len(core) + 2, tails, heads, capacities, s, t)
    for i, v in enumerate(core):
        is_sink[v] = reaches_sink[i]
    return cost + flow


def max_flow(
    num_vertices: int, tails: Sequence[int], heads: Sequence[int], capacities: Sequence[int], source: int, sink: int
) -> tuple[int, bytearray]:
    """The greatest flow from source to sink, and the vertices that can still reach the sink: the smallest sink side of
    a minimum cut.
    """
    arcs_of: list[list[int]] = [[] for _ in range(num_vertices)]
    to: list[int] = []
    left: list[int] = []  # an arc's remaining capacity; arc e's reverse is e ^ 1
    for tail, head, capacity in zip(tails, heads, capacities, strict=True):
        arcs_of[tail].append(len(to))
        arcs_of[head].append(len(to) + 1)
        to += (head, tail)
        left += (capacity, 0)
    flow = 0
    while True:
        distance = _distances_to(sink, arcs_of, to, left)
        if distance[source] < 0:
            return flow, bytearray(d >= 0 for d in distance)
        flow += _blocking_flow(arcs_of, to, left, distance, source, sink)


def _distances_to(sink: int, arcs_of: list[list[int]], to: list[int], left: list[int]) -> list[int]:
    distance = [-1] * len(arcs_of)
    distance[sink] = 0
    queue = [sink]
    for v in queue:
        further = distance[v] + 1
        for arc in arcs_of[v]:
            u = to[arc]
            if distance[u] < 0 and left[arc ^ 1]:
                distance[u] = further
                queue.append(u)
    return distance


def _blocking_flow(
    arcs_of: list[list[int]], to: list[int], left: list[int], distance: list[int], source: int, sink: int
) -> int:
    """Push flow along shortest paths until each is blocked: depth-first, never trying an arc twice."""
    tried = [0] * len(arcs_of)
    path: list[int] = []
    flow = 0
    v = source
    while True:
        if v == sink:
            amount = min([left[arc] for arc in path])
            flow += amount
            blocked = len(path)
            for place in range(len(path) - 1, -1, -1):
                arc = path[place]
                left[arc] -= amount
                left[arc ^ 1] += amount
                if not left[arc]:
                    blocked = place
            v = to[path[blocked] ^ 1]
            del path[blocked:]
            continue
        arcs, closer = arcs_of[v], distance[v] - 1
        at = tried[v]
        while at < len(arcs) and not (left[arcs[at]] and distance[to[arcs[at]]] == closer):
            at += 1
        tried[v] = at
        if at < len(arcs):
            path.append(arcs[at])
            v = to[arcs[at]]
        elif path:
            v = to[path.pop() ^ 1]
            tried[v] += 1
        else:
            return flow
