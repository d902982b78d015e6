"""Graph modules whose Python code is made when first called. Checked on torch 2.13.0."""

from __future__ import annotations

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule

__all__ = ["make_graph_module"]


def make_graph_module(root: torch.nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    """A `GraphModule` that generates its code only when somebody calls it or reads its code."""
    return _LazyGraphModule(root, graph, name)
