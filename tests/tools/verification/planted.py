"""A model of some 500 operators, and faults for `verify` to find: decompositions and compilers that are wrong."""

from __future__ import annotations

import torch
from torch import fx, nn

from foregrad import default_partition
from foregrad.backends.eager import eager_compiler
from foregrad.tools.cli import demo_package

aten = torch.ops.aten


def gpt(layers=3):
    """(model, arguments): a small GPT with dropout, 479 operators in its joint graph."""
    demo = demo_package()
    torch.manual_seed(0)
    model = demo.gpt.GPT(demo.gpt.GPTConfig(layers=layers, width=64, context=32))
    return model, (torch.randint(0, 256, (2, 32)), torch.randint(0, 256, (2, 32)))


def gelu_by_a_sigmoid(x, approximate="none"):
    return torch.sigmoid(1.702 * x) * x


def layer_norm_of_another_epsilon(x, shape, weight, bias, eps):
    var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    rstd = torch.rsqrt(var + 1e-4)
    return (x - mean) * rstd * weight + bias, mean, rstd


def silu_through_a_wrong_sigmoid(x):
    return x * torch.sigmoid(x)


def sigmoid_that_saturates(x):
    return (1 / (1 + torch.exp(-x))).clamp(max=0.875)


def rounding_otherwise(x):
    return x * torch.sigmoid(x)


def changed(gm, change):
    """A graph module with every node changed."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in list(graph.nodes):
        change(node)
    return fx.GraphModule(gm, graph)


def miscompiles_gelu(gm, inputs):
    """Compiles gelu as the approximation that was not asked for."""

    def change(node):
        if node.target is aten.gelu.default:
            node.kwargs = {**node.kwargs, "approximate": "tanh"}

    return eager_compiler(changed(gm, change), inputs)


def miscompiles_the_second_gelu(gm, inputs):
    """Wrong only where there are two: no operator shows it alone."""
    seen = []

    def change(node):
        if node.target is aten.gelu.default:
            seen.append(node)
            if len(seen) == 2:
                node.kwargs = {**node.kwargs, "approximate": "tanh"}

    return eager_compiler(changed(gm, change), inputs)


def miscompiles_a_pattern(gm, inputs):
    """Loses the negation of a product that is negated."""

    def change(node):
        if node.target is aten.neg.default and node.args[0].target is aten.mul.Tensor:
            node.replace_all_uses_with(node.args[0])

    return eager_compiler(changed(gm, change), inputs)


def lays_out_otherwise(gm, inputs):
    """Right values; a compiler that says so may lay out what nobody sees as it likes."""
    return eager_compiler(gm, inputs)


def passes_that_lose_a_sign(module):
    """A backend's passes on the joint graph, which drop the negation of a product."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        if node.target is aten.neg.default and node.args[0].target is aten.mul.Tensor:
            node.replace_all_uses_with(node.args[0])
    return fx.GraphModule(module, graph)


def partition_that_changes_a_gradient(module, inputs, *, num_fwd_outputs):
    """Divides as the default does, and takes another derivative of gelu in the backward."""
    forward, backward = default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs)
    for node in backward.graph.nodes:
        if node.target is aten.gelu_backward.default:
            node.kwargs = {**node.kwargs, "approximate": "tanh"}
    return forward, backward


def partition_that_saves_another_value(module, inputs, *, num_fwd_outputs):
    """Hands the backward the argument of `tanh` where its result is asked for."""
    forward, backward = default_partition(module, inputs, num_fwd_outputs=num_fwd_outputs)
    *_, output = forward.graph.nodes
    saved = list(output.args[0])
    for i, node in enumerate(saved[num_fwd_outputs:], num_fwd_outputs):
        if node.target is aten.tanh.default:
            saved[i] = node.args[0]
            taken = next(n for n in backward.graph.nodes if n.name == node.name)
            taken.name = taken.target = saved[i].name
    output.args = (saved,)
    return forward, backward


class Chain(nn.Module):
    """Elementwise operators, one after the other."""

    def forward(self, x, y):
        for _ in range(12):
            x = torch.tanh(x + y)
        z = -(x * y)
        for _ in range(12):
            z = torch.sin(z) + x
        return z
