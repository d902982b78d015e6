"""Where Dynamo breaks a function into several graphs, and why. Checked on torch 2.13.0.

`torch._dynamo.explain` says the same, and has Dynamo forget everything that it compiled in the process.
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
    """A place where Dynamo ends a graph: the user's line, and what Dynamo says of it."""

    line: str
    reason: str


def compiled_by_dynamo(function: Any) -> Any:
    """The function or module that `torch.compile` made this one of; None for any other."""
    inner = getattr(function, "_orig_mod", None)
    if isinstance(function, torch.nn.Module) and isinstance(inner, torch.nn.Module):
        return inner
    disabled = getattr(function, "_torchdynamo_disable", False)
    return None if disabled else getattr(function, "_torchdynamo_orig_callable", None)


def graph_breaks(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[int, list[GraphBreak]]:
    """How many graphs Dynamo makes of a call, which runs for real, and where it breaks them."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo's own looks at tensors warn
        torch.compile(function, backend=keep)(*args, **kwargs)
    reasons = [getattr(gm, "compile_subgraph_reason", None) for gm in graphs]
    return len(graphs), [_break(reason) for reason in reasons if reason is not None and reason.graph_break]


def _break(reason: Any) -> GraphBreak:
    frames = [frame for frame in reason.user_stack if frame is not None]
    line = f"{frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line}" if frames else ""
    return GraphBreak(line, str(reason.reason))
