"""PyTorch's pictures of graphs, search for a small graph that fails, decompositions, and TorchScript as a compiler.

Checked on torch 2.11.0, 2.13.0, 2.15.0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx


def draw(graph: fx.GraphModule, path: str, title: str, program: Any = None, **settings: Any) -> None:
    """Write a picture of a graph to `path`; its ending says the format, `.svg` if there is none."""
    from torch.fx.passes.graph_drawer import FxGraphDrawer

    base, ending = os.path.splitext(path)
    ending = ending or ".svg"
    picture = FxGraphDrawer(graph, title, **settings).get_main_dot_graph()
    if ending == ".dot":
        picture.write(path)  # as text: Graphviz would lay it out first
    else:
        getattr(picture, f"write_{ending[1:]}")(base + ending, **({} if program is None else {"prog": program}))


def minified(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    fails: Callable[[fx.GraphModule, Sequence[Any]], bool],
    settings: Mapping[str, Any],
) -> tuple[fx.GraphModule, Sequence[Any]]:
    """PyTorch's minifier: (a smaller graph that fails, inputs for it)."""
    from torch._functorch.fx_minifier import minifier

    smaller: tuple[fx.GraphModule, Sequence[Any]] = minifier(graph, inputs, fails, **settings)
    return smaller


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """All decompositions of PyTorch's that do not depend on a backend."""
    from torch._decomp import decomposition_table as table

    return dict(table)


def scripted(gm: fx.GraphModule, warm_up: Sequence[Any]) -> Any:
    """A graph of operators as an optimized TorchScript function; run once if `warm_up` are real tensors.

    TorchScript's own autocast rules are off here: a captured graph has applied autocast already.
    """
    before = torch._C._jit_set_autocast_mode(False)
    try:
        function: Any = torch.jit.script(gm)
        torch._C._jit_pass_remove_mutation(function.graph)
        function = torch.jit.optimize_for_inference(torch.jit.freeze(function.eval()))
        if warm_up:
            function(*warm_up)
    finally:
        torch._C._jit_set_autocast_mode(before)
    return function
