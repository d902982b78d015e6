"""Calls past a limit on graphs run eagerly, and compare no graphs but now and then."""

import warnings

import pytest
import torch

import foregrad
from foregrad.dispatch.graphs import Specialization

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
        before, calls = compared, sum(entry.count for entry in compiled.foregrad.recompiles().eager)
        for i in range(60, 260):
            assert torch.equal(compiled(*arguments_of(made, i)), eager(*arguments_of(made, i)))
    assert compared - before <= 3 * LIMIT, "three looks in 200 calls"
    assert sum(entry.count for entry in compiled.foregrad.recompiles().eager) - calls > 150


def test_a_call_that_has_a_graph_still_uses_it():
    with warnings.catch_warnings(), foregrad.config.override(recompile_limit=LIMIT):
        warnings.simplefilter("ignore")
        compiled = foregrad.compile(as_many_as_come, backend="eager")
        for i in range(40):
            compiled(*arguments_of(as_many_as_come, i))
        eager = compiled.foregrad.recompiles().eager[0].count
        for _ in range(10):
            compiled(*arguments_of(as_many_as_come, 0))
    assert compiled.foregrad.recompiles().eager[0].count == eager


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
