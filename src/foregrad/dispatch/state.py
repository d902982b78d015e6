"""The state of the thread and of the library during a capture, as conditions of a guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._torch import engine
from .._torch import guards as torch_guards
from ..graph.joint import JointGraph

__all__ = ["state_conditions"]


def state_conditions(joint: JointGraph, bind: Callable[[str, Any], str], *, tensors: bool) -> list[str]:
    """Conditions that hold while the state is as it is now.

    One C++ object tests grad mode, autocast of every device, deterministic algorithms, the default dtype, tf32 and
    reduced precision, the number of threads. Filling of new memory matters only to deterministic algorithms, and the
    choice of attention kernels only to a graph for which one may have been chosen.

    `tensors`: a tensor that autograd records is checked too. Its dispatch keys are those of the thread, so autograd's
    are missing in inference mode, and others are present in functorch transforms.
    """
    conditions = [f"{bind('global_state', torch_guards.GlobalStateGuard())}.check()"]
    if not tensors or torch_guards.is_inference():
        conditions.append(f"{bind('is_inference', torch_guards.is_inference)}() is {torch_guards.is_inference()}")
    if not tensors:
        conditions.append(f"not {bind('transforms_active', engine.transforms_active)}()")
    device = torch_guards.current_device()
    if device is None:
        conditions.append(f"not {bind('count_function_modes', torch_guards.count_function_modes)}()")
    else:
        conditions += [
            f"{bind('count_function_modes', torch_guards.count_function_modes)}() == 1",
            f"{bind('default_device_is_the_mode', engine.default_device_is_the_mode)}()",
            f"{bind('current_device', torch_guards.current_device)}() == {bind('device', device)}",
        ]
    if torch.are_deterministic_algorithms_enabled():
        fills = torch_guards.fills_uninitialized
        conditions.append(f"{bind('fills_uninitialized', fills)}() is {fills()}")
    precision = torch_guards.matmul_precision()
    if precision != "highest":  # tf32 is allowed with any other
        conditions.append(f"{bind('matmul_precision', torch_guards.matmul_precision)}() == {precision!r}")
    if any("softmax" in str(n.target) or "attention" in str(n.target) for n in joint.graph.nodes):
        for number, read in enumerate(torch_guards.ATTENTION_FLAGS):
            conditions.append(f"{bind(f'attention_kernel_{number}', read)}() is {read()}")
    return conditions
