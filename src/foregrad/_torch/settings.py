"""Settings of the thread and of the library that code turns on or off for what comes after it.

Checked on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import guards

__all__ = ["apply_settings", "set_by", "settings", "unfinished"]

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]

_SETTINGS: dict[str, _Setting] = {
    "grad mode": (torch.is_grad_enabled, torch._C._set_grad_enabled),
    "forward gradients": (torch._C._is_fwd_grad_enabled, torch._C._set_fwd_grad_enabled),
    "view replay": (torch._C._is_view_replay_enabled, torch._C._set_view_replay_enabled),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (guards.current_device, torch.set_default_device),
    "anomaly mode": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "filling of uninitialized memory": (
        guards.fills_uninitialized,
        lambda value: setattr(torch.utils.deterministic, "fill_uninitialized_memory", value),
    ),
    "the autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "float32 matmul precision": (guards.matmul_precision, torch.set_float32_matmul_precision),
    "flash attention": (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    "memory-efficient attention": (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    "plain attention": (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    "attention's fast path": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "cuDNN's benchmarks": (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    "deterministic cuDNN": (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    "cuDNN": (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    "oneDNN": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "repeated warnings": (torch.is_warn_always_enabled, torch.set_warn_always),
}


def _autocast_of(device: str) -> dict[str, _Setting]:
    return {
        f"autocast of {device}": (
            lambda: torch.is_autocast_enabled(device),
            lambda value: torch.set_autocast_enabled(device, value),
        ),
        f"autocast's dtype of {device}": (
            lambda: torch.get_autocast_dtype(device),
            lambda value: torch.set_autocast_dtype(device, value),
        ),
    }


for _device in torch._C._autocast_supported_devices():
    _SETTINGS |= _autocast_of(_device)


# Functions that graphs of Dynamo's call to change a setting, which Dynamo has changed already when they are compiled.
_SETTERS: dict[str, str] = {
    "_set_grad_enabled": "grad mode",
    "_set_deterministic_algorithms": "deterministic algorithms",
    "_set_default_dtype": "the default dtype",
    "set_default_dtype": "the default dtype",
    "_set_float32_matmul_precision": "float32 matmul precision",
    "set_float32_matmul_precision": "float32 matmul precision",
    "use_deterministic_algorithms": "deterministic algorithms",
    "enable_flash_sdp": "flash attention",
    "enable_mem_efficient_sdp": "memory-efficient attention",
    "enable_math_sdp": "plain attention",
    "set_warn_always": "repeated warnings",
    "set_fastpath_enabled": "attention's fast path",
    "set_num_threads": "the number of threads",
    "set_autocast_cache_enabled": "the autocast cache",
    "_set_sdp_use_flash": "flash attention",
    "_set_sdp_use_mem_efficient": "memory-efficient attention",
    "_set_sdp_use_math": "plain attention",
    "_set_cudnn_benchmark": "cuDNN's benchmarks",
    "_set_cudnn_deterministic": "deterministic cuDNN",
    "_set_cudnn_enabled": "cuDNN",
    "_set_mkldnn_enabled": "oneDNN",
    "_set_warnAlways": "repeated warnings",
    "set_anomaly_enabled": "anomaly mode",
}


def set_by(graph: torch.fx.Graph) -> frozenset[str]:
    """The settings that a graph of Dynamo's changes."""
    calls = (node.target for node in graph.nodes if node.op == "call_function")
    names = (getattr(target, "__name__", "") for target in calls)
    return frozenset(_SETTERS[name] for name in names if name in _SETTERS)


def settings() -> dict[str, Any]:
    """The values of all settings, by name."""
    return {name: read() for name, (read, _) in _SETTINGS.items()}


def apply_settings(values: dict[str, Any]) -> None:
    """Give settings these values."""
    for name, value in values.items():
        _SETTINGS[name][1](value)


def unfinished(was_inference: bool) -> str | None:
    """A context that code has entered and not left, of those that are no settings; asked where there was none before,
    inference mode apart.
    """
    if torch.is_inference_mode_enabled() is not was_inference:
        return "inference mode"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks for saved tensors"
    return None
