"""The eager backend frees each value as soon as the last line that uses it has run."""

from __future__ import annotations

import gc
import linecache
import operator
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foregrad.backends import eager
from foregrad.backends.eager import eager_compiler

aten = torch.ops.aten
MIB = 1 << 20


@pytest.fixture(autouse=True, params=[4000, 2], ids=["whole", "in parts"])
def longest(request, monkeypatch):
    monkeypatch.setattr(eager, "_LONGEST", request.param)
    monkeypatch.setattr(eager, "_PART", request.param)


def graph_of(build, root=None) -> torch.fx.GraphModule:
    """A graph module from a function that fills a graph and returns what it outputs."""
    graph = torch.fx.Graph()
    graph.output(build(graph))
    return torch.fx.GraphModule(root or torch.nn.Module(), graph)


def picks_of(g, op, args, indices):
    node = g.call_function(op, args)
    return [g.call_function(operator.getitem, (node, index)) for index in indices]


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors made under it that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0

    def _remove(self, nbytes):
        self.now -= nbytes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(item, torch.Tensor) and not any(item is arg for arg in args):
                self.now += item.nbytes
                self.peak = max(self.peak, self.now)
                weakref.finalize(item, self._remove, item.nbytes)
        return result


def chain(count, keep=False):
    def build(g):
        values = [g.placeholder("x")]
        for _ in range(count):
            values.append(g.call_function(aten.sin.default, (values[-1],)))
        return values[1:] if keep else values[-1:]

    return graph_of(build)


def test_a_chain_never_holds_more_than_one_step():
    compiled = eager_compiler(chain(8))
    with LiveBytes() as live:
        compiled([torch.ones(MIB // 4)])
    assert live.peak == 2 * MIB


def test_saved_values_are_freed_one_by_one_in_the_backward():
    def build(g):
        saved = [g.placeholder(f"s{i}") for i in range(8)]
        gradient = g.placeholder("tangents_1")
        for value in reversed(saved):
            gradient = g.call_function(aten.mul.Tensor, (gradient, g.call_function(aten.cos.default, (value,))))
        return (gradient,)

    compiled = eager_compiler(graph_of(build))
    with LiveBytes() as live:
        args = [torch.ones(MIB // 4) for _ in range(9)]
        assert live.now == 9 * MIB
        out = compiled(args)
        assert live.now == MIB
    assert live.peak == 10 * MIB
    del out
    assert live.now == 0


def test_unused_inputs_die_before_the_first_operator():
    alive = []
    died = []

    def build(g):
        x, _ = g.placeholder("x"), g.placeholder("unused")
        g.call_function(lambda value: alive.append(not died), (x,))
        return (x,)

    unused = torch.ones(1)
    weakref.finalize(unused, died.append, True)
    args = [torch.ones(1), unused]
    del unused
    eager_compiler(graph_of(build))(args)
    assert alive == [False]


def test_outputs_picked_from_a_tuple_die_apart():
    sizes = []

    def build(g):
        x = g.placeholder("x")
        out, mean, _ = picks_of(g, aten.native_layer_norm.default, (x, [MIB // 4], None, None, 1e-5), [0, 1, 2])
        kept = g.call_function(aten.neg.default, (mean,))
        total = g.call_function(aten.sum.default, (out,))
        g.call_function(lambda: sizes.append(live.now))
        return kept, total

    compiled = eager_compiler(graph_of(build))
    with LiveBytes() as live:
        compiled([torch.ones(4, MIB // 4)])
    assert sizes == [4 * 4 + 4], "only the two results are alive: four means and one sum"


def test_generated_code_and_constants_die_with_the_function():
    gc.collect()  # what other tests left behind
    before = {name for name in linecache.cache if name.startswith("<foregrad")}
    root = torch.nn.Module()
    root.register_buffer("c", torch.ones(3))
    alive = weakref.ref(root.c)
    compiled = eager_compiler(graph_of(lambda g: (g.call_function(aten.sin.default, (g.get_attr("c"),)),), root))
    root.c = None
    gc.collect()  # graph modules are cycles of their own
    assert alive() is not None
    gc.disable()
    try:
        del compiled
        assert alive() is None
    finally:
        gc.enable()
    left = {name for name in linecache.cache if name.startswith("<foregrad")} - before
    assert not left
