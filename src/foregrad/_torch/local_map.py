"""The operator `local_map_hop`, which runs a graph on the local parts of its arguments. Checked on torch 2.13.0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx
from torch._higher_order_ops import local_map

LOCAL_MAP: Any = local_map.local_map_hop


def stays_one_operator() -> bool:
    """Whether the operator is not replaced by the operators of its graph now."""
    return bool(local_map._DEFER_INLINING)


def local_arguments(gm: fx.GraphModule, fakes: Sequence[Any]) -> tuple[Any, ...]:
    """The local parts of the arguments, by the graph's placements."""
    kwargs = gm.meta["local_map_kwargs"]
    return tuple(local_map.redistribute_fw_inputs(fakes, kwargs["in_placements"], kwargs["device_mesh"]))


def fake_results(gm: fx.GraphModule, fakes: Sequence[Any], mode: Any) -> Any:
    """What the operator gives for fakes."""
    with mode:
        return local_map.fake_mode_key(gm, *fakes)  # not the operator, which knows no subclass of the mode


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
