"""TorchScript, as a compiler of captured graphs; and the decompositions that PyTorch has. Checked on torch 2.13.0."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

__all__ = ["decomposition_table", "scripted"]


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """All of PyTorch's decompositions that need no backend's say."""
    from torch._decomp import decomposition_table as table

    return dict(table)


def scripted(gm: fx.GraphModule, warm_up: Sequence[Any]) -> Any:
    """A graph of operators as an optimized TorchScript function; run once, when `warm_up` are real tensors.

    TorchScript keeps autocast rules of its own, which a captured graph has applied already, so they are off here.
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
