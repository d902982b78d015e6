from __future__ import annotations

import itertools
import random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foregrad.partitioners.cut import max_flow, min_cut

CAPACITIES = [0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**41 + 1, 2**53 + 1, 2**64 + 3, 1 << 120]


@st.composite
def networks(draw, most=8):
    """(number of vertices, prices from the source, to the sink, arcs)"""
    count = draw(st.integers(1, most))
    prices = st.lists(st.sampled_from(CAPACITIES), min_size=count, max_size=count)
    vertex = st.integers(0, count - 1)
    arcs = st.lists(st.tuples(vertex, vertex, st.sampled_from(CAPACITIES)), max_size=3 * count)
    return count, draw(prices), draw(prices), draw(arcs)


def cost(network, is_sink):
    count, from_source, to_sink, arcs = network
    ends = sum(from_source[v] if is_sink[v] else to_sink[v] for v in range(count))
    return ends + sum(c for u, v, c in arcs if not is_sink[u] and is_sink[v])


def by_networkx(network):
    count, from_source, to_sink, arcs = network
    graph = nx.DiGraph()
    graph.add_nodes_from(["s", "t", *range(count)])
    ends = [("s", v, from_source[v]) for v in range(count)] + [(v, "t", to_sink[v]) for v in range(count)]
    for u, v, capacity in [*ends, *arcs]:
        known = graph.get_edge_data(u, v, {"capacity": 0})["capacity"]
        graph.add_edge(u, v, capacity=known + capacity)
    return nx.minimum_cut(graph, "s", "t")[0]


def random_network(seed, count, degree, capacities=(1, 5, 2**45, 2**50 + 1)):
    rng = random.Random(seed)
    ends = [[rng.choice((0, 0, *capacities)) for _ in range(count)] for _ in range(2)]
    arcs = [(rng.randrange(count), rng.randrange(count), rng.choice(capacities)) for _ in range(count * degree)]
    return count, *ends, arcs


@given(networks())
def test_the_cut_is_a_cheapest_one_with_the_fewest_on_the_sinks_side(network):
    value, is_sink = min_cut(*network)
    choices = list(itertools.product((0, 1), repeat=network[0]))
    least = min(cost(network, choice) for choice in choices)
    assert value == least == cost(network, is_sink)
    smallest = min((choice for choice in choices if cost(network, choice) == least), key=sum)
    assert tuple(is_sink) == smallest


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_the_value_is_networkxs(seed, degree):
    network = random_network(seed, 60, degree)
    value, is_sink = min_cut(*network)
    assert value == by_networkx(network) == cost(network, is_sink)


def as_flow(network):
    """The same network with its terminals as vertices."""
    count, from_source, to_sink, arcs = network
    source, sink = count, count + 1
    every = [
        *((source, v, from_source[v]) for v in range(count)),
        *((v, sink, to_sink[v]) for v in range(count)),
        *arcs,
    ]
    tails, heads, capacities = zip(*every, strict=True)
    return count + 2, tails, heads, capacities, source, sink


@given(networks())
def test_elimination_changes_nothing(network):
    flow, reaches_sink = max_flow(*as_flow(network))
    value, is_sink = min_cut(*network)
    assert value == flow
    assert is_sink == reaches_sink[: network[0]]


@pytest.mark.parametrize("seed", range(3))
def test_max_flow_is_networkxs_where_nothing_can_be_eliminated(seed):
    network = random_network(seed, 40, 6, capacities=(3, 2**40 + 7, 2**62 + 1))
    flow, _ = max_flow(*as_flow(network))
    assert flow == by_networkx(network)


def test_no_flow_without_a_path():
    assert max_flow(3, [0], [1], [5], 0, 2) == (0, bytearray([0, 0, 1]))


def test_one_vertex_takes_the_cheaper_side():
    assert min_cut(1, [3], [5], []) == (3, bytearray([1]))
    assert min_cut(1, [5], [3], []) == (3, bytearray([0]))
    assert min_cut(1, [5], [5], []) == (5, bytearray([0])), "a tie stays with the source"


def priced_chain(length):
    """Values in a row: computing one again costs 1, saving one costs 4096, the last is needed."""
    never = 1 << 60
    from_source, to_sink, arcs = [], [], []
    for i in range(length):
        from_source += [1, 0]
        to_sink += [0, 0]
        arcs.append((2 * i, 2 * i + 1, 4096))
        if i:
            arcs.append((2 * i - 1, 2 * i, never))
    to_sink[-1] = never
    return 2 * length, from_source, to_sink, arcs


def test_a_long_priced_chain_is_solved_without_recursion():
    """Paths of up to 8,192 arcs: breadth-first phases would take minutes, recursion would end in an error."""
    value, is_sink = min_cut(*priced_chain(20_000))
    assert value == 4096
    assert not any(is_sink[:-1]), "saving the last is as cheap as recomputing the 4,096 before it, and recomputes less"
    value, is_sink = min_cut(*priced_chain(4_000))
    assert value == 4_000
    assert all(is_sink)
