"""The effect log by hand: its order, the place of the graph in it, and how it reads."""

from __future__ import annotations

import torch

import foregrad
from foregrad.graph.effect_log import (
    BumpVersion,
    Detach,
    Handle,
    InplaceView,
    MarkRequiresGrad,
    Recorded,
    RunGraph,
    SetData,
    TakeView,
    ViewStep,
    Write,
    ordered,
    with_graph,
)

aten = torch.ops.aten
ROW = ViewStep(aten.select.int, (0, 0), (), None, 1, True)
CELL = ViewStep(aten.select.int, (0, 0), (), None, 2, True)


def t_(index):
    return InplaceView(index, aten.t_.default, (), (), True)


def row(index):
    return TakeView(index, "out", steps=(ROW,))


def test_the_log_is_in_program_order():
    entries = [Recorded(3, Detach(0)), Recorded(1, Write(0, 0, True)), Recorded(2, row(0)), Recorded(2, t_(1))]
    assert ordered(entries) == (Write(0, 0, True), row(0), t_(1), Detach(0))


def test_what_happens_to_results_and_views_comes_last():
    marked, of_result = MarkRequiresGrad(0, steps=(ROW,)), Detach(-1, result=1)
    entries = [Recorded(1, marked), Recorded(2, t_(0)), Recorded(0, of_result), Recorded(3, row(1))]
    assert ordered(entries) == (t_(0), row(1), of_result, marked)


def test_a_mark_that_two_results_lead_to_is_made_once():
    marked = MarkRequiresGrad(0, steps=(ROW, CELL))
    entries = [Recorded(2, marked), Recorded(2, marked), Recorded(3, t_(0)), Recorded(4, t_(0))]
    assert ordered(entries) == (t_(0), t_(0), marked)


def test_a_version_that_moves_once_sizes_have_changed_moves_after_the_graph():
    log = [t_(0), row(0), BumpVersion(0)]
    assert with_graph(log, {0}, set(), counts_first=True) == [RunGraph(), *log]


def test_the_graph_runs_first():
    log = [row(0), Write(0, 0, True), Detach(0), MarkRequiresGrad(1)]
    assert with_graph(log, {0}, {0}, counts_first=False) == [RunGraph(), *log]


def test_the_graph_runs_after_the_mark_that_it_needs():
    log = [Write(0, 0, False), MarkRequiresGrad(0)]
    assert with_graph(log, {0}, {0}, counts_first=False) == [log[1], RunGraph(), log[0]]
    assert with_graph(log, set(), set(), counts_first=False) == [RunGraph(), *log]


def test_the_mark_of_a_leaf_after_a_detach_stays_where_it_is():
    log = [Detach(0), MarkRequiresGrad(0)]
    assert with_graph(log, {0}, {0}, counts_first=False) == [RunGraph(), *log]


def test_the_mark_of_what_was_written_and_detached_comes_first_and_again():
    log = [Detach(0), MarkRequiresGrad(0)]
    assert with_graph(log, {0}, set(), counts_first=False) == [log[1], RunGraph(), *log]


def test_versions_move_before_the_graph_where_it_saves_tensors():
    log = [BumpVersion(0), Detach(1)]
    assert with_graph(log, set(), set(), counts_first=True) == [log[0], RunGraph(), log[1]]
    assert with_graph(log, set(), set(), counts_first=False) == [RunGraph(), *log]


def test_a_log_reads_as_lines():
    def f(x, w, plain):
        v = plain[0]
        plain.t_()
        x.mul_(w)
        return v

    x = torch.ones(2, 2, requires_grad=True) * 1
    log = foregrad.capture(f, x, torch.ones((), requires_grad=True), torch.ones(2, 3)).signature.effects.log
    assert [str(effect) for effect in log] == [
        "aten.t_.default on input 2",
        "write output 0 to input 0 with its history",
    ]


def other_memory(index):
    return SetData(index, Handle("out", None, 0))


def test_a_view_taken_between_two_swaps_stays_between_them():
    entries = [Recorded(3, other_memory(0)), Recorded(2, row(0)), Recorded(1, other_memory(0))]
    assert ordered(entries) == (other_memory(0), row(0), other_memory(0))


def test_what_comes_after_a_swap_is_not_done_before_the_graph():
    log = [other_memory(0), row(0), BumpVersion(1)]
    assert with_graph(log, [], [], counts_first=True) == [RunGraph(), *log]
    log = [BumpVersion(1), other_memory(0)]
    assert with_graph(log, [], [], counts_first=True) == [BumpVersion(1), RunGraph(), other_memory(0)]


def test_a_mark_is_made_before_the_graph_though_it_comes_after_a_swap():
    log = [other_memory(0), row(0), MarkRequiresGrad(0)]
    assert with_graph(log, [0], [], counts_first=True) == [MarkRequiresGrad(0), RunGraph(), *log[:2]]


def test_a_swap_reads_as_what_it_is():
    assert str(other_memory(1)) == "input 1 takes the memory of output 0"
