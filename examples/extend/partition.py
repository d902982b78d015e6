"""A partition: which values the forward saves for the backward. This one saves the inputs of matrix products only.

A partition is `(joint module, example inputs, *, num_fwd_outputs) -> (forward, backward)`. A choice of residuals is
any set of values that the forward can compute; `split` makes both halves of it, in an order that is good for memory.
"""

import torch

import foregrad
from foregrad.extend import view
from foregrad.partitioners import JointIndex, split

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default}


def save_inputs_of_products(module, example_inputs, *, num_fwd_outputs):
    index = JointIndex(module, num_fwd_outputs)
    forward = [node for node, late in zip(index.nodes, index.needs_tangent, strict=True) if not late]
    halves = split(index, {value for node in forward if node.target in PRODUCTS for value in node.all_input_nodes})
    return halves.forward, halves.backward


def f(x, w):
    return torch.tanh(torch.tanh(x @ w).exp() @ w).sum()


if __name__ == "__main__":
    x, w = torch.ones(8, 8, requires_grad=True), torch.full((8, 8), 0.1)
    everything = foregrad.compile(f, backend="eager", partition="default")
    products = foregrad.compile(f, backend="eager", partition=save_inputs_of_products)
    (expected,) = torch.autograd.grad(everything(x, w), x)
    (gradient,) = torch.autograd.grad(products(x, w), x)
    print(torch.equal(gradient, expected))  # True
    print(view(everything).graphs[0].halves.saved_bytes)  # 768
    print(view(products).graphs[0].halves.saved_bytes)  # 256
