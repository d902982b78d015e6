"""Settings of the thread and of the library that code turns on or off for what comes after it.

A table: how each is read, and how it is written. Checked on torch 2.13.0; what another version lacks is left out.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from . import guards

__all__ = [
    "ARITHMETIC",
    "apply_settings",
    "arithmetic",
    "changes_between_operators",
    "matters_to",
    "partitioner_settings",
    "set_by",
    "settings",
    "under_settings",
    "unfinished",
]

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
_C = torch._C
_functorch: Any = _C._functorch


def _by_name(read: str, write: str) -> list[_Setting]:
    """Both functions of `torch._C`, where it has them."""
    return [(getattr(_C, read), getattr(_C, write))] if hasattr(_C, read) and hasattr(_C, write) else []


def _variable(holder: Any, name: str) -> list[_Setting]:
    """A setting that is a variable of a module, a class or an object."""
    setting = (lambda: getattr(holder, name)), (lambda value: setattr(holder, name, value))
    return [setting] if hasattr(holder, name) else []


def _parts(read: str) -> list[_Setting]:
    """Of `torch._C`: what it reads as a tuple is written as several arguments."""
    found = _by_name(read, read.replace("_get", "_set"))
    if not found:
        return []
    ((get, put),) = found
    return [(get, lambda value: put(*value) if isinstance(value, tuple) else put(value))]


# --------------------------------------------------------------------------------------- those of several parts

# What inherits from another comes after it: writing `generic` changes those that were never written to themselves.
_PRECISIONS = [
    ("generic", "all"),
    *(("cuda", op) for op in ("all", "matmul", "conv", "rnn")),
    *(("mkldnn", op) for op in ("all", "matmul", "conv", "rnn")),
]


def _precisions() -> tuple[str, ...]:
    return tuple(_C._get_fp32_precision_getter(*key) for key in _PRECISIONS)


def _set_precisions(values: tuple[str, ...]) -> None:
    for key, value in zip(_PRECISIONS, values, strict=True):
        if _C._get_fp32_precision_getter(*key) != value:
            _C._set_fp32_precision_setter(*key, value)


def _matmul_precision() -> str | None:
    """None where a precision was set for one backend alone: PyTorch tells none for all of them then."""
    found = guards.matmul_precision()
    return found if isinstance(found, str) else None


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _cudnn_tf32() -> bool | None:
    try:
        return _C._get_cudnn_allow_tf32()
    except RuntimeError:
        return None


def _set_cudnn_tf32(value: bool | None) -> None:
    if value is not None:
        _C._set_cudnn_allow_tf32(value)


def _numpy_errors() -> dict[str, Any] | None:
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.geterr()


def _set_numpy_errors(values: dict[str, Any] | None) -> None:
    if values is not None:
        sys.modules["numpy"].seterr(**values)


_TINY, _ONE = [5e-324], [1.0]


def _flushes_denormals() -> bool:
    """Whether this thread takes the smallest numbers for zeros; nothing of PyTorch's tells."""
    return _TINY[0] * _ONE[0] == 0.0


def _print_options() -> dict[str, Any]:
    return dict(vars(torch._tensor_str.PRINT_OPTS))


def _set_print_options(values: dict[str, Any]) -> None:
    vars(torch._tensor_str.PRINT_OPTS).update(values)


def _optimized_einsum() -> tuple[Any, ...]:
    chosen = torch.backends.opt_einsum
    return chosen.enabled, chosen.strategy


def _set_optimized_einsum(values: tuple[Any, ...]) -> None:
    chosen: Any = torch.backends.opt_einsum
    for name, value in zip(("enabled", "strategy"), values, strict=True):
        if getattr(chosen, name) != value:  # where the library is missing it can't be written to
            setattr(chosen, name, value)


# --------------------------------------------------------------------------------------- the table

_SETTINGS: dict[str, _Setting] = {
    "grad mode": (torch.is_grad_enabled, _C._set_grad_enabled),
    "forward gradients": (_C._is_fwd_grad_enabled, _C._set_fwd_grad_enabled),
    "view replay": (_C._is_view_replay_enabled, _C._set_view_replay_enabled),
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
    "threads of the backward": (_C._is_multithreading_enabled, _C._set_multithreading_enabled),
    "the autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "flushing of denormal numbers": (_flushes_denormals, torch.set_flush_denormal),
    "float32 matmul precision": (_matmul_precision, _set_matmul_precision),
    "TF32 in cuDNN": (_cudnn_tf32, _set_cudnn_tf32),
    "float32 precisions": (_precisions, _set_precisions),  # after the two, which write to some of them
    "flash attention": (_C._get_flash_sdp_enabled, _C._set_sdp_use_flash),
    "memory-efficient attention": (_C._get_mem_efficient_sdp_enabled, _C._set_sdp_use_mem_efficient),
    "plain attention": (_C._get_math_sdp_enabled, _C._set_sdp_use_math),
    "attention's fast path": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "cuDNN's benchmarks": (_C._get_cudnn_benchmark, _C._set_cudnn_benchmark),
    "deterministic cuDNN": (_C._get_cudnn_deterministic, _C._set_cudnn_deterministic),
    "cuDNN": (_C._get_cudnn_enabled, _C._set_cudnn_enabled),
    "oneDNN": (_C._get_mkldnn_enabled, _C._set_mkldnn_enabled),
    "repeated warnings": (torch.is_warn_always_enabled, torch.set_warn_always),
    "print options": (_print_options, _set_print_options),
    "einsum's order": (_optimized_einsum, _set_optimized_einsum),
    "the recursion limit": (sys.getrecursionlimit, sys.setrecursionlimit),
    "NumPy's handling of errors": (_numpy_errors, _set_numpy_errors),
}

# By name: what some versions lack is no setting there.
_MORE: dict[str, list[_Setting]] = {
    "cuDNN's attention": _by_name("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
    "flash attention 3": _by_name("_get_fa3_sdp_enabled", "_set_sdp_use_fa3"),
    "attention of other devices": _by_name("_get_overrideable_sdp_enabled", "_set_sdp_use_overrideable"),
    "the order of attention kernels": _by_name("_get_sdp_priority_order", "_set_sdp_priority_order"),
    "half precision sums in attention": _by_name(
        "_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"
    ),
    "half precision sums on the CPU": _by_name(
        "_get_cpu_allow_fp16_reduced_precision_reduction", "_set_cpu_allow_fp16_reduced_precision_reduction"
    ),
    "float16 sums in cuBLAS": _parts("_get_cublas_allow_fp16_reduced_precision_reduction"),
    "bfloat16 sums in cuBLAS": _parts("_get_cublas_allow_bf16_reduced_precision_reduction"),
    "half precision accumulation": _by_name(
        "_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"
    ),
    "the limit of cuDNN's benchmarks": _by_name("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit")
    or _variable(torch.backends.cudnn, "benchmark_limit"),
    "cuDNN's depthwise kernel": _by_name("_get_cudnn_depthwise_kernel", "_set_cudnn_depthwise_kernel"),
    "MIOpen's immediate mode": _by_name("_get_miopen_immediate", "_set_miopen_immediate"),
    "deterministic oneDNN": _by_name("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
    "NNPACK": _by_name("_get_nnpack_enabled", "_set_nnpack_enabled"),
    "the engine of quantized operators": _by_name("_get_qengine", "_set_qengine"),
    "the library for linear algebra": _by_name("_get_linalg_preferred_backend", "_set_linalg_preferred_backend"),
    "the library for matrix products": _by_name("_get_blas_preferred_backend", "_set_blas_preferred_backend"),
    "the library for attention": _by_name("_get_rocm_fa_preferred_backend", "_set_rocm_fa_preferred_backend"),
    "multiprocessors left to others": _by_name("_get_sm_carveout_experimental", "_set_sm_carveout_experimental"),
    "checks of sparse tensors": _by_name("_check_sparse_tensor_invariants", "_set_check_sparse_tensor_invariants"),
    "kernels without derivatives": _by_name("_get_autograd_fallback_mode", "_set_autograd_fallback_mode"),
    "parameters overwritten in conversions": _variable(torch.__future__, "_overwrite_module_params_on_conversion"),
    "parameters swapped in conversions": _variable(torch.__future__, "_swap_module_params_on_conversion"),
    "checks of distributions": _variable(torch.distributions.Distribution, "_validate_args"),
    "debugging of checkpoints": _variable(torch.utils.checkpoint, "_checkpoint_debug_enabled"),
    "early stops of checkpoints": _variable(torch.utils.checkpoint, "_enable_checkpoint_early_stop"),
    "how processes share tensors": [
        (torch.multiprocessing.get_sharing_strategy, torch.multiprocessing.set_sharing_strategy)
    ],
    "fallbacks of vmap": [(_functorch._is_vmap_fallback_enabled, _functorch._set_vmap_fallback_enabled)],
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
_SETTINGS |= {name: found[0] for name, found in _MORE.items() if found}


# What kernels on the CPU compute by, read before each operator of a capture; cuDNN and cuBLAS where there is a device.
_CHEAP: dict[str, Callable[[], Any]] = {
    "the default dtype": torch.get_default_dtype,
    "deterministic algorithms": _C._get_deterministic_algorithms,
    "filling of uninitialized memory": guards.fills_uninitialized,
    "flushing of denormal numbers": _flushes_denormals,
    "the number of threads": torch.get_num_threads,
    "oneDNN": _C._get_mkldnn_enabled,
    "float32 precisions": functools.partial(_C._get_fp32_precision_getter, "mkldnn", "matmul"),
}
_FLAGS = ["deterministic oneDNN", "NNPACK", "half precision sums on the CPU"]
if torch.cuda.is_available():
    _CHEAP["float32 matmul precision"] = functools.partial(_C._get_fp32_precision_getter, "cuda", "matmul")
    _CHEAP["TF32 in cuDNN"] = functools.partial(_C._get_fp32_precision_getter, "cuda", "conv")
    _FLAGS += ["cuDNN", "deterministic cuDNN", "cuDNN's benchmarks", "half precision accumulation"]
_CHEAP.update((name, _SETTINGS[name][0]) for name in _FLAGS if name in _SETTINGS)
ARITHMETIC = tuple(_CHEAP)
_READ = tuple(_CHEAP.values())


_OF_ALL = frozenset({"the default dtype", "flushing of denormal numbers"})
_OF_ALL_BUT_POINTWISE = frozenset(
    {"deterministic algorithms", "filling of uninitialized memory", "the number of threads"}
)
# They take data as they are: under torch.compile, NumPy numbers become tensors under another default dtype.
_COMPUTE_NOTHING = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
_COMPUTE_NOTHING |= {torch.ops.aten.detach.default}
_PRODUCTS = ("conv", "mm", "mv", "dot", "linear", "rnn", "lstm", "gru", "einsum", "attention")


def _tags(op: Any) -> Sequence[Any]:
    """Those of an operator, or of the operator that a function or the method of this name is a name of."""
    if not isinstance(op, torch._ops.OpOverload):
        packet: Any = getattr(torch.ops.aten, op if isinstance(op, str) else getattr(op, "__name__", ""), None)
        op = None if packet is None else getattr(packet, packet.overloads()[0])
    return getattr(op, "tags", ())


def matters_to(name: str, op: Any) -> bool:
    """Whether a setting of `ARITHMETIC` may change what an operator computes: one of PyTorch's, or a function."""
    if op in _COMPUTE_NOTHING:
        return False
    if name in _OF_ALL:
        return True
    if name in _OF_ALL_BUT_POINTWISE:
        return torch.Tag.pointwise not in _tags(op)
    return any(part in str(op) for part in _PRODUCTS)


def arithmetic() -> tuple[Any, ...]:
    """What tells the settings of `ARITHMETIC` apart, in their order."""
    return tuple([read() for read in _READ])


# Functions that graphs of Dynamo's call to change settings, which Dynamo has changed already when they are compiled:
# the table's own by their names, and those that call them.
_MATMUL = ("float32 matmul precision", "float32 precisions")
_SETTERS: dict[str, tuple[str, ...]] = {
    **{write.__name__: (name,) for name, (_, write) in _SETTINGS.items() if write.__name__ != "<lambda>"},
    "_set_deterministic_algorithms": ("deterministic algorithms",),
    "use_deterministic_algorithms": ("deterministic algorithms",),
    "set_deterministic_debug_mode": ("deterministic algorithms",),
    "_set_default_dtype": ("the default dtype",),
    "_set_float32_matmul_precision": _MATMUL,
    "set_float32_matmul_precision": _MATMUL,
    "_set_cublas_allow_tf32": _MATMUL,
    "_set_cudnn_allow_tf32": ("TF32 in cuDNN", "float32 precisions"),
    "_set_fp32_precision_setter": ("float32 precisions",),
    "enable_flash_sdp": ("flash attention",),
    "enable_mem_efficient_sdp": ("memory-efficient attention",),
    "enable_math_sdp": ("plain attention",),
    "enable_cudnn_sdp": ("cuDNN's attention",),
    "allow_fp16_bf16_reduction_math_sdp": ("half precision sums in attention",),
    "_set_cublas_allow_fp16_reduced_precision_reduction": ("float16 sums in cuBLAS",),
    "_set_cublas_allow_bf16_reduced_precision_reduction": ("bfloat16 sums in cuBLAS",),
    "preferred_linalg_library": ("the library for linear algebra",),
    "preferred_blas_library": ("the library for matrix products",),
    "preferred_rocm_fa_library": ("the library for attention",),
    "set_overwrite_module_params_on_conversion": ("parameters overwritten in conversions",),
    "set_swap_module_params_on_conversion": ("parameters swapped in conversions",),
    "set_default_validate_args": ("checks of distributions",),
    "_set_warnAlways": ("repeated warnings",),
    "set_anomaly_enabled": ("anomaly mode",),
    "set_autocast_enabled": tuple(name for name in _SETTINGS if name.startswith("autocast of")),
    "set_autocast_dtype": tuple(name for name in _SETTINGS if name.startswith("autocast's dtype")),
    "set_printoptions": ("print options",),
}


def set_by(graph: torch.fx.Graph) -> frozenset[str]:
    """The settings that a graph of Dynamo's changes."""
    calls = (node.target for node in graph.nodes if node.op == "call_function")
    names = (getattr(target, "__name__", "") for target in calls)
    return frozenset(setting for name in names for setting in _SETTERS.get(name, ()) if setting in _SETTINGS)


def changes_between_operators(graph: torch.fx.Graph) -> frozenset[str]:
    """The settings of `ARITHMETIC` that a graph of Dynamo's changes after one of its operators and before another."""
    found: set[str] = set()
    waiting: set[str] = set()
    seen: set[str] = set()  # what mattered to operators so far
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        changed = set(_SETTERS.get(getattr(node.target, "__name__", ""), ())) if node.op == "call_function" else set()
        if changed:
            waiting |= changed & seen
        else:
            matter = {name for name in ARITHMETIC if node.op == "call_module" or matters_to(name, node.target)}
            seen |= matter
            found |= waiting & matter
    return frozenset(found)


def settings() -> dict[str, Any]:
    """The values of all settings, by name."""
    return {name: read() for name, (read, _) in _SETTINGS.items()}


@contextlib.contextmanager
def under_settings(values: dict[str, Any]) -> Iterator[None]:
    """Context: settings have these values."""
    before = {name: _SETTINGS[name][0]() for name in values}
    try:
        apply_settings(values)
        yield
    finally:
        apply_settings(before)


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


def partitioner_settings() -> str:
    """What PyTorch's own partitioners read besides their arguments: equal text for equal settings."""
    from torch._functorch import config

    return str(config.get_hash().hex())
