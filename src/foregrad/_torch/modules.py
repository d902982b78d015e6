"""Graph modules whose Python code is made when first called. Checked on torch 2.13.0."""

from __future__ import annotations

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

__all__ = ["make_graph_module", "with_nested_arguments"]


def make_graph_module(root: torch.nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    """A `GraphModule` that generates its code only when somebody calls it or reads its code."""
    return _LazyGraphModule(root, graph, name)


def with_nested_arguments(module: fx.GraphModule, primals: int, tangents: int) -> fx.GraphModule:
    """The same graph, called as `(list of primals, list of tangents)`, which returns a list."""
    output = next(iter(reversed(module.graph.nodes)))
    _, spec = pytree.tree_flatten((([0] * primals, [0] * tangents), {}))
    _, out_spec = pytree.tree_flatten([0] * len(output.args[0]))
    module.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(["primals", "tangents"], spec, out_spec)))
    module.recompile()
    return module
