"""The state of the thread and of the library that a capture was made under, as conditions of a guard."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._torch import guards as torch_guards
from ..graph.joint import JointGraph

__all__ = ["state_conditions"]


def state_conditions(joint: JointGraph, bind: Callable[[str, Any], str]) -> list[str]:
    """Conditions that hold while the state is as it is now.

    One C++ object sees to grad mode, autocast of every device, deterministic algorithms, the default dtype, tf32 and
    reduced precision, the number of threads. The default device is a variable, see `Watch`. Which attention kernels
    may be chosen from matters only to a graph that one may have been chosen for.
    """
    conditions = [f"{bind('global_state', torch_guards.GlobalStateGuard())}.check()"]
    for name, read in (
        ("is_inference", torch_guards.is_inference),
        ("fills_uninitialized", torch_guards.fills_uninitialized),
    ):
        now = read()
        conditions.append(f"{bind(name, read)}() is {now}")
    precision = torch_guards.matmul_precision()
    conditions.append(f"{bind('matmul_precision', torch_guards.matmul_precision)}() == {precision!r}")
    if any("softmax" in str(n.target) or "attention" in str(n.target) for n in joint.graph.nodes):
        flags = torch_guards.attention_flags
        conditions.append(f"{bind('attention_flags', flags)}() == {flags()}")
    return conditions
