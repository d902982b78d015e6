"""Graphs run whole: split by a partition, its halves one after the other; or as a function with its gradients.

Both functions stand in reproducers as they are here: they need nothing but PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch


def run_in_halves(partition: Any, module: Any) -> Any:
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    names, inputs = [node.name for node in placeholders], [node.meta["val"] for node in placeholders]
    late: set[Any] = set()  # what depends on tangents is of the backward
    for node in module.graph.nodes:
        if node.name.startswith("tangents_") or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        node.meta.setdefault("partitioner_tag", "is_backward" if node in late else "is_forward")
    *_, output = module.graph.nodes
    count = sum(node not in late for node in output.args[0])
    forward, backward = partition(module, inputs, num_fwd_outputs=count)

    def run(*values: Any) -> list[Any]:
        by_name = dict(zip(names, values, strict=True))

        def half(part: Any) -> list[Any]:
            part.recompile()
            results = part(*(by_name[node.name] for node in part.graph.nodes if node.op == "placeholder"))
            *_, output = part.graph.nodes
            named = zip((getattr(node, "name", "") for node in output.args[0]), results, strict=True)
            by_name.update(named)
            return list(results)

        return half(forward)[:count] + half(backward)

    return run


def run_with_gradients(function: Any, inputs: Any) -> list[Any]:
    own = [x.detach().clone().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x for x in inputs]
    leaves = [x for x in own if isinstance(x, torch.Tensor) and x.requires_grad]
    results = function(*own)
    roots = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    gradients: Any = ()
    if roots and leaves:
        ones = [torch.ones_like(root) for root in roots]
        gradients = torch.autograd.grad(roots, leaves, ones, allow_unused=True)
    return [torch.zeros(()) if x is None else x for x in (*results, *own, *gradients)]
