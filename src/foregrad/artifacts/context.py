"""Settings of the thread and of the library that a captured graph depends on, and under which alone it holds."""

from __future__ import annotations

from typing import Any

import torch

from .._torch import engine
from .._torch.guards import count_function_modes, current_device, is_inference

__all__ = ["context_now", "state_to_refuse"]

_DEVICES = ("cpu", "cuda", "mps", "xpu")


def context_now() -> dict[str, Any]:
    """The settings in force, by name."""
    settings: dict[str, Any] = {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": is_inference(),
        "default dtype": torch.get_default_dtype(),
        "default device": current_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    for device in _DEVICES:
        on = torch.is_autocast_enabled(device)
        settings[f"autocast of {device}"] = torch.get_autocast_dtype(device) if on else False
    return settings


def state_to_refuse() -> str | None:
    """The mode in force under which no artifact can be called, in words; None if there is none."""
    if engine.transforms_active():
        return "a transform of torch.func (vmap, grad, jvp) is active"
    if engine.forward_ad._current_level >= 0:
        return "forward-mode differentiation is active"
    if count_function_modes() and not (count_function_modes() == 1 and engine.default_device_is_the_mode()):
        return "a torch function mode is active"
    return None
