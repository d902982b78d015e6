"""A pass: a graph goes in, a graph comes out. This one drops double negations, forward and backward at once.

A pass over a joint graph is `prepare_joint` of a backend: it gives a changed copy, before the partition splits it.
Here an existing backend gets the pass; `register_backend(..., prepare_joint=...)` gives one to a new backend.
"""

import copy
import dataclasses

import torch

import foregrad
from foregrad.extend import view

NEG = torch.ops.aten.neg.default


def without_double_negation(module):
    """`-(-x)` is `x`."""
    module = copy.deepcopy(module)
    for node in module.graph.nodes:
        if node.target is NEG and node.args[0].target is NEG:
            node.replace_all_uses_with(node.args[0].args[0])
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


eager = foregrad.get_backend("eager")
backend = dataclasses.replace(eager, name="eager-no-negations", prepare_joint=without_double_negation)


def negations(graph):
    return sum(node.target is NEG for node in graph.nodes)


if __name__ == "__main__":
    f = foregrad.compile(lambda x: x.neg().neg().sin(), backend=backend)
    x = torch.zeros(2, requires_grad=True)
    f(x).sum().backward()
    print(x.grad)  # tensor([1., 1.])
    (graph,) = view(f).graphs
    print(negations(graph.joint.graph))  # 4
    print(negations(graph.halves.forward.graph), negations(graph.halves.backward.graph))  # 0 0
