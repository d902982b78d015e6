"""The operator `local_map_hop`, functions that are not traced, containers. Checked on torch 2.11.0, 2.13.0, 2.15.0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx
from torch._higher_order_ops import local_map
from torch.utils import _pytree as pytree

LOCAL_MAP: Any = local_map.local_map_hop


def stays_one_operator() -> bool:
    """Whether the operator is not replaced by the operators of its graph now."""
    return bool(local_map._DEFER_INLINING)


def local_arguments(gm: fx.GraphModule, fakes: Sequence[Any]) -> tuple[Any, ...]:
    """The local parts of the arguments of a forward, by the graph's placements."""
    kwargs = gm.meta["local_map_kwargs"]
    return tuple(local_map.redistribute_fw_inputs(fakes, kwargs["in_placements"], kwargs["device_mesh"]))


def fake_results(gm: fx.GraphModule, fakes: Sequence[Any], mode: Any) -> Any:
    """The operator's results for fakes. The operator itself knows no subclass of the fake mode."""
    kwargs, saved = gm.meta["local_map_kwargs"], gm.meta["num_activations"]
    place: Any = local_map
    enter, leave = place.redistribute_fw_inputs, place.redistribute_fw_outputs
    if gm.meta["is_backward"]:
        enter, leave = place.redistribute_bw_inputs, place.redistribute_bw_outputs
    with mode:
        local = enter(fakes, kwargs["in_placements"], kwargs["device_mesh"], saved)
        return leave(gm(*local), kwargs["out_placements"], kwargs["device_mesh"], saved)


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


def traced_as_it_runs(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, one call in Dynamo's graph; its operators are traced later."""
    from torch._dynamo import nonstrict_trace

    result: Callable[..., Any] = nonstrict_trace(function)
    return result


def flat_arguments(args: tuple[object, ...], kwargs: dict[str, object], spec: Any) -> list[object]:
    """The leaves of a call's arguments, for a `spec` of (args, kwargs): keywords may come in any order."""
    if kwargs:
        names = spec.children()[1].context if hasattr(spec, "children") else spec.children_specs[1].context
        if set(names) == set(kwargs):
            kwargs = {name: kwargs[name] for name in names}
        else:
            raise TypeError(f"the call takes the keywords {list(names)}, not {list(kwargs)}")
    return pytree.tree_leaves((args, kwargs))


def mapped_leaves(function: Callable[[object], object], value: object) -> Any:
    """A container with `function` applied to each leaf, as PyTorch's pytree knows them."""
    return pytree.tree_map(function, value)
