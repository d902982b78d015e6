"""Graph breaks: the places at which Dynamo breaks a function into several graphs. Checked on torch 2.13.0.

`torch._dynamo.explain` finds these too, but makes Dynamo drop everything that it compiled in the process.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["GraphBreak", "compiled_by_dynamo", "graph_breaks"]


@dataclasses.dataclass(frozen=True, slots=True)
class GraphBreak:
    """A place where Dynamo ends a graph: the user's line, and Dynamo's reason."""

    line: str
    reason: str


def compiled_by_dynamo(function: Any) -> Any:
    """The function or module behind a result of `torch.compile`; None for any other function."""
    inner = getattr(function, "_orig_mod", None)
    if isinstance(function, torch.nn.Module) and isinstance(inner, torch.nn.Module):
        return inner
    disabled = getattr(function, "_torchdynamo_disable", False)
    return None if disabled else getattr(function, "_torchdynamo_orig_callable", None)


def graph_breaks(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, list[GraphBreak]]:
    """(the number of graphs that Dynamo makes of a call, its graph breaks). The function really runs."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own reads of tensors warn
        torch.compile(function, backend=keep)(*args, **kwargs)
    reasons = [getattr(gm, "compile_subgraph_reason", None) for gm in graphs]
    return len(graphs), [_break(reason) for reason in reasons if reason is not None and reason.graph_break]


def _break(reason: Any) -> GraphBreak:
    frames = [frame for frame in reason.user_stack if frame is not None]
    line = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line}" if frames else ""
    return GraphBreak(line, str(reason.reason))
