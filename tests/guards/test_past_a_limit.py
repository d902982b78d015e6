"""Calls past a limit on graphs run eagerly, and compare no graphs but now and then."""

import warnings

import pytest
import torch

import foregrad
from foregrad.dispatch.graphs import Graphs, Specialization

LIMIT = 4


def as_many_as_come(*tensors):
    return sum(tensor.sum() for tensor in tensors)


def mixture_of_experts(x, w):
    chosen = (x @ w).argmax(-1)
    out = torch.zeros_like(x)
    for expert in range(w.shape[1]):
        rows = chosen == expert
        if rows.any():
            out[rows] = x[rows] * (expert + 1)
    return out


class Averaged(torch.nn.BatchNorm1d):
    def __init__(self):
        super().__init__(3, momentum=None)  # the average of all batches: reads how many there were


def arguments_of(function, i):
    generator = torch.Generator().manual_seed(i)
    if function is as_many_as_come:
        return tuple(torch.randn(2 + i % 61, 3, generator=generator))
    if function is mixture_of_experts:
        return torch.randn(6, 8, generator=generator), torch.randn(8, 4, generator=generator)
    return (torch.randn(5, 3, generator=generator),)


@pytest.mark.parametrize("made", [as_many_as_come, mixture_of_experts, Averaged])
def test_the_graphs_are_compared_in_few_of_the_calls(made, monkeypatch):
    function, eager = (made(), made()) if isinstance(made, type) else (made, made)
    compared = 0
    difference = Specialization.difference

    def counting(self, args, kwargs):
        nonlocal compared
        compared += 1
        return difference(self, args, kwargs)

    monkeypatch.setattr(Specialization, "difference", counting)
    with warnings.catch_warnings(), foregrad.config.override(recompile_limit=LIMIT, path_limit=LIMIT):
        warnings.simplefilter("ignore")
        compiled = foregrad.compile(function, backend="eager")
        for i in range(60):
            assert torch.equal(compiled(*arguments_of(made, i)), eager(*arguments_of(made, i)))
        before, calls = compared, calls_in(compiled)
        for i in range(60, 260):
            assert torch.equal(compiled(*arguments_of(made, i)), eager(*arguments_of(made, i)))
    assert compared - before <= 3 * LIMIT, "three looks in 200 calls"
    assert calls_in(compiled) - calls > 150


def test_a_call_that_has_a_graph_still_uses_it():
    with warnings.catch_warnings(), foregrad.config.override(recompile_limit=LIMIT):
        warnings.simplefilter("ignore")
        compiled = foregrad.compile(as_many_as_come, backend="eager")
        for i in range(40):
            compiled(*arguments_of(as_many_as_come, i))
        eager = compiled.foregrad.recompiles().eager[0].count
        for _ in range(40):
            compiled(*arguments_of(as_many_as_come, 0))
    assert compiled.foregrad.recompiles().eager[0].count <= eager + 15, "one call in 16 tries the graphs"


def test_room_for_a_graph_is_found_again():
    """A graph of an object that is gone makes room: the next look finds it."""
    held = [torch.nn.Linear(3, 3) for _ in range(LIMIT + 1)]

    def chosen(x, i):
        return held[i](x)

    x = torch.ones(2, 3)
    with warnings.catch_warnings(), foregrad.config.override(recompile_limit=LIMIT):
        warnings.simplefilter("ignore")
        compiled = foregrad.compile(chosen, backend="eager")
        for _ in range(3):
            for i in range(LIMIT + 1):
                compiled(x, i)
        assert len(compiled.foregrad.specializations) == LIMIT
        for graph in compiled.foregrad.specializations[:2]:
            compiled.foregrad.graphs.remove(graph)
        for _ in range(80):
            compiled(x, LIMIT)
        assert len(compiled.foregrad.specializations) == LIMIT - 1


def test_a_limit_that_is_an_error_is_one_in_each_call():
    with foregrad.config.override(recompile_limit=2, error_on_recompile_limit=True):
        compiled = foregrad.compile(as_many_as_come, backend="eager")
        raised = 0
        for i in range(8):
            try:
                compiled(*arguments_of(as_many_as_come, i))
            except foregrad.errors.UnsupportedError:
                raised += 1
    assert raised == 6


def steps_by_number(x, w):
    """Nine ways, by a number that only Python can use."""
    return [lambda y, k=k: y * (k + 2) for k in range(9)][int(x[0])]((x * w).cumsum(0))


def two_ways(x, w):
    return (x * w).sum() if x[0].item() > 4 else (x * w).prod()


class Head(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if y.sum() > -1000 else y


def calls_in(compiled):
    return sum(entry.count for entry in compiled.foregrad.recompiles().eager)


def counting_graphs_in_vain(monkeypatch):
    count, teller = [0], Graphs.teller

    def counting(self):
        diverged = teller(self)

        def counted():
            count[0] += 1
            return diverged()

        return counted

    monkeypatch.setattr(Graphs, "teller", counting)
    return count


def test_graphs_that_run_in_vain_in_most_calls_are_given_up(monkeypatch):
    """Each value but the last has a graph, and each call would run most of them before its own."""
    in_vain = counting_graphs_in_vain(monkeypatch)
    w = torch.randn(3, requires_grad=True)
    with pytest.warns(foregrad.errors.ForegradWarning, match="compiled 8 times .* run several of these graphs in vain"):
        compiled = foregrad.compile(steps_by_number, backend="eager")
        for i in range(60):
            x = torch.tensor([float(i % 9), 1.0, 2.0])
            ours, theirs = compiled(x, w), steps_by_number(x, w)
            assert torch.equal(ours, theirs)
            assert torch.equal(*(torch.autograd.grad(y.sum(), w)[0] for y in (ours, theirs)))
    assert len(compiled.foregrad.specializations) == 8
    assert calls_in(compiled) > 40
    assert in_vain[0] <= 36 + 48, "36 while the graphs are made, then those of some six calls"


def test_two_ways_that_calls_take_in_turn_are_compiled_for_good():
    compiled, w = foregrad.compile(two_ways, backend="eager"), torch.randn(3, requires_grad=True)
    for call in range(200):
        x = torch.tensor([9.0 * (call % 2), 1.0, 2.0])
        assert torch.equal(compiled(x, w), two_ways(x, w))
    assert len(compiled.foregrad.specializations) == 2
    assert not compiled.foregrad.recompiles().eager


def test_graphs_of_other_modules_that_branch_run_never_in_vain(monkeypatch):
    """The guards of the other graphs say no before they run: these cost little, and the graphs stay."""
    in_vain, heads = counting_graphs_in_vain(monkeypatch), [Head(3, 3) for _ in range(8)]
    compiled = foregrad.compile(lambda i, x: heads[i](x), backend="eager")
    for call in range(120):
        x = torch.randn(2, 3)
        assert torch.equal(compiled(call % 8, x), heads[call % 8](x))
    assert in_vain == [0]
    assert len(compiled.foregrad.specializations) == 8
    assert not compiled.foregrad.recompiles().eager


def test_no_graph_is_given_up_where_a_limit_is_an_error():
    with foregrad.config.override(error_on_recompile_limit=True):
        compiled, w = foregrad.compile(steps_by_number, backend="eager"), torch.ones(3)
        for i in range(60):
            compiled(torch.tensor([float(i % 9), 1.0, 2.0]), w)
    assert not compiled.foregrad.recompiles().eager


def counting_trials(compiled):
    """The graphs that each call tries, as a list that grows."""
    graphs, trials = compiled.foregrad.graphs, []

    def counted(function):
        def call(*args):
            trials.append(len(graphs.calls))
            return function(*args)

        return call

    return counted(compiled), trials


class Last:
    text, names = "", ["a"]


def keeps_text(x):
    Last.text = f"loss {x.sum().item():.3f}"
    return x * 2


def steps_by_number_alone(x):
    return [lambda y, k=k: y * (k + 2) for k in range(200)][int(x[0])](x)


def reads_a_list(x):
    Last.names = ["a", str(x.shape[0])]
    return x * len(Last.names)


@pytest.mark.parametrize("function", [keeps_text, steps_by_number_alone, reads_a_list])
def test_graphs_that_serve_no_call_are_not_tried(function):
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counted, trials = counting_trials(compiled)
        for call in range(150):
            x = torch.full((2,), float(call))
            assert torch.equal(counted(x), function(x))
    assert sum(trials[-64:]) <= 6 * 8
    assert max(trials) <= 8


def test_graphs_that_serve_some_calls_are_tried():
    with warnings.catch_warnings(), foregrad.config.override(recompile_limit=LIMIT):
        warnings.simplefilter("ignore")
        compiled = foregrad.compile(as_many_as_come, backend="eager", on_unsupported="eager")
        counted, trials = counting_trials(compiled)
        for call in range(80):
            tensors = [torch.ones(2)] * (call + 8 if call % 4 else 1)
            assert torch.equal(counted(*tensors), as_many_as_come(*tensors))
    assert set(trials[-60:]) == {LIMIT}
