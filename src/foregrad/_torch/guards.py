"""PyTorch's C++ guards, and state of the thread behind private names. Checked on torch 2.13.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .engine import count_function_modes

TensorGuards: Any = torch._C._dynamo.guards.TensorGuards
GlobalStateGuard = torch._C._dynamo.guards.GlobalStateGuard

function_mode: Callable[[int], object] = torch._C._get_function_stack_at
is_inference: Callable[[], bool] = torch.is_inference_mode_enabled
fills_uninitialized: Callable[[], bool] = torch._C._get_deterministic_fill_uninitialized_memory
# The settings that allow kernels of `scaled_dot_product_attention`.
ATTENTION_FLAGS: list[Callable[[], bool]] = [
    torch._C._get_math_sdp_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
]


def matmul_precision() -> str | tuple[str, ...]:
    """The precision of float32 matrix products; one for each backend if it was set for one alone: PyTorch then raises
    when asked for the precision of all.
    """
    try:
        return torch._C._get_float32_matmul_precision()
    except RuntimeError:
        return tuple(torch._C._get_fp32_precision_getter(backend, "matmul") for backend in ("cuda", "mkldnn"))


def current_device() -> Any:
    """The device of `torch.set_default_device` or `with torch.device(...)`; None without either."""
    return getattr(function_mode(0), "device", None) if count_function_modes() else None


def global_state() -> dict[str, object]:
    """The state that a `GlobalStateGuard` compares, for people; slow."""
    state: dict[str, object] = {
        "grad mode": torch.is_grad_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic algorithms: warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "number of threads": torch.get_num_threads(),
        "torch functions": torch._C._is_torch_function_enabled(),
        "float32 matmul precision": matmul_precision(),
        "inference mode": is_inference(),
        "default device": current_device(),
        "filling of uninitialized memory": fills_uninitialized(),
        "attention kernels": [read() for read in ATTENTION_FLAGS],
        "attention fast path": torch.backends.mha.get_fastpath_enabled(),
    }
    for device in torch._C._autocast_supported_devices():
        state[f"autocast of {device}"] = torch.is_autocast_enabled(device)
        state[f"autocast dtype of {device}"] = torch.get_autocast_dtype(device)
    return state
