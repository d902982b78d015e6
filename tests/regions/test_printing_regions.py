"""A printed graph shows a part that comes again and again once, as a function, and is still a program."""

from __future__ import annotations

import torch
from torch import fx

import foregrad
from foregrad.graph.printing import print_graph
from foregrad.graph.role import outlined

LAYERS = 9
WEIGHTS = [torch.randn(8, 8, requires_grad=True) for _ in range(LAYERS)]


def layer(x, w, half):
    x = (x @ w).view(2, 2, 8).transpose(0, 1)
    for _ in range(4):
        x = (x.sin() * half + x.cos()).tanh()
    return x.transpose(0, 1).reshape(4, 8)


def model(x, layers=LAYERS):
    half = torch.tensor([0.5])  # a constant of the graph
    for w in WEIGHTS[:layers]:
        x = layer(x, w, half)
    return x.sum()


def run(text, name, *args):
    namespace = {}
    exec(text, namespace)
    return namespace[name](*args)


def made(gm):
    """Tensors for the placeholders of a graph."""
    values = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return [torch.empty_strided(value.shape, value.stride()).normal_() for value in values]


def same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a is b is None or torch.equal(a, b)


def test_the_joint_graph_shows_a_layer_once_and_runs():
    joint = foregrad.capture(model, torch.randn(4, 8, requires_grad=True))
    text, args = str(joint), made(joint.module)
    assert text.count("aten.mm.default") < LAYERS
    assert text.count("def region_") == 2
    assert text.count("= region_0(") >= 7
    assert len(text.splitlines()) < len(print_graph(joint.module).splitlines()) / 2
    same(run(text, "joint", joint.module, *args), fx.Interpreter(joint.module).run(*args))


def test_the_halves_show_a_layer_once_and_run():
    parts = foregrad.partition(foregrad.capture(model, torch.randn(4, 8, requires_grad=True)))
    texts = str(parts).split("# backward of ")
    for title, text, half in zip(("forward", "backward"), texts, (parts.forward, parts.backward), strict=True):
        args = made(half)
        assert "def region_0(" in text
        same(run("# " + text, title, half, *args), fx.Interpreter(half).run(*args))


def test_a_short_model_is_printed_as_it_is():
    joint = foregrad.capture(model, torch.randn(4, 8), 2)
    assert outlined(joint.module) is joint.module
    assert "region_0" not in str(joint)


def calls(inner, root_constant):
    """A graph that calls the graph module `inner` twice, where each reads a constant `c`."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    again = graph.call_module("block", (graph.call_module("block", (x,)),))
    graph.output(again)
    gm = fx.GraphModule({"block": inner, "c": root_constant}, graph)
    gm.c = root_constant
    return gm


def block(constant, function=torch.add):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(function, (x, graph.get_attr("c"))))
    module = fx.GraphModule({"c": constant}, graph)
    module.c = constant
    return module


def test_a_module_with_the_same_constants_is_a_function_another_stays_a_module():
    constant, x = torch.ones(3), torch.randn(3)
    gm = calls(block(constant), constant)
    assert "def block_2(" in print_graph(gm)
    assert torch.equal(run(print_graph(gm), "forward", gm, x), x + 2)
    gm = calls(block(constant * 5), constant)
    assert "self.block(x)" in print_graph(gm)
    assert torch.equal(run(print_graph(gm), "forward", gm, x), x + 10)


def test_a_value_without_a_spelling_inside_of_a_function_is_a_parameter_of_the_whole():
    def c(a, b):  # takes the name of what it is called with
        return a * b

    constant, x = torch.full((3,), 2.0), torch.randn(3)
    gm = calls(block(constant, c), constant)
    text = print_graph(gm)
    (name,) = [line.split(",")[0].strip() for line in text.split("    *,\n")[1].splitlines()[:1]]
    namespace = {}
    exec(text, namespace)
    assert torch.equal(namespace["forward"](gm, x, **{name: c}), x * 4)
