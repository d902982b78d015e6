"""PyTorch's own tools for graphs, pictures and the search for a small graph that fails; what compilers ask of a graph.

Checked on torch 2.11.0, 2.13.0, 2.15.0.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def facts_at_hand() -> Any:
    """What the compiler that runs may ask of its function: `TracingContext.fw_metadata`; None outside of any."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    return None if context is None else context.fw_metadata


def activation_budget() -> float:
    """`torch._functorch.config.activation_memory_budget`: 1.0 where nobody has set it."""
    from torch._functorch import config

    return float(config.activation_memory_budget)
