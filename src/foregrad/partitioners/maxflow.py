"""Exact minimum cuts on flat lists of Python integers: no overflow, no recursion, no graph library.

`min_cut` first removes, one by one, every vertex with at most two neighbours, and folds what the best choice for it
costs into the capacities between its neighbours and to the terminals. That is exact: the least cost over one
vertex's side, as a function of two neighbours' sides, is again a sum of such capacities, because the costs of cuts
are submodular (Kolmogorov and Zabih, "What Energy Functions Can Be Minimized via Graph Cuts?", 2004, say which
functions are). Chains vanish, and so do all series-parallel graphs, residual networks among them, in linear time.

What remains goes to `max_flow`, the algorithm of Dinic ("Algorithm for Solution of a Problem of Maximum Flow in
Networks with Power Estimation", 1970): shortest augmenting paths, one breadth-first search for each length.

Known weakness: one search per path length. Thousands of vertices with three neighbours each, in a long row, and a
price on every one, take seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    """Removes vertices with at most two neighbours, remembering what is needed to choose their sides later."""

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
            # (neighbour, capacity from it, capacity to it)
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
        """Make the sink's side for v dearer by `price`, which may be negative; what has to be paid either way."""
        if price >= 0:
            self.source[v] += price
            return 0
        self.sink[v] -= price
        return price

    def decide(self, is_sink: bytearray) -> None:
        """Choose the sides of eliminated vertices, last first: then those of their neighbours are known."""
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
    """The greatest flow from source to sink, and which vertices can still reach the sink: the smallest sink side
    of a minimum cut.
    """
    arcs_of: list[list[int]] = [[] for _ in range(num_vertices)]
    to: list[int] = []
    left: list[int] = []  # what an arc can still carry; arc e's reverse is e ^ 1
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
