"""The operator `local_map_hop`, which runs a graph on the local parts of its arguments. Checked on torch 2.13.0.

PyTorch makes the two graphs of the operator, of its forward and its backward, itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops import local_map
from torch._inductor import (
    compile_fx,  # noqa: F401 - what a first import of it does is no effect of a program
    compiler_bisector,  # noqa: F401
)

LOCAL_MAP: Any = local_map.local_map_hop


def stays_one_operator() -> bool:
    """Whether the operator is not replaced by the operators of its graph now."""
    return bool(local_map._DEFER_INLINING)


def halves(gm: fx.GraphModule, fakes: Sequence[Any]) -> tuple[fx.GraphModule, fx.GraphModule, int, Sequence[int]]:
    """(graph of the forward, graph of the backward, how many results of the first are not for the second, the results
    that carry gradients).
    """
    forward, backward, _, outputs, differentiable = local_map.create_hop_fw_bw(gm, *fakes)
    return forward, backward, outputs, sorted(differentiable)


def fake_results(gm: fx.GraphModule, fakes: Sequence[Any], mode: Any) -> Any:
    """What the operator gives for fakes."""
    with mode, torch._C._AutoDispatchBelowAutograd():
        return LOCAL_MAP(gm, *fakes)


def operator_of(gm: fx.GraphModule) -> Callable[..., Any]:
    """The operator on this graph, as graphs of PyTorch's call it."""

    def call_local_map(*args: Any) -> Any:
        return LOCAL_MAP(gm, *args)

    return call_local_map


@contextlib.contextmanager
def plain_python() -> Iterator[None]:
    """Context: no function modes and no dispatch modes."""
    from torch import overrides
    from torch.utils._python_dispatch import _disable_current_modes

    stack: Any = overrides
    modes = [stack._pop_mode() for _ in range(stack._len_torch_function_stack())]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            stack._push_mode(mode)
