"""Settings of the thread and of the library that a function may leave changed.

There are two tables. A compiled call sets settings that change numbers or gradients; a function that leaves any further
setting changed runs eagerly. Checked on torch 2.13.0; a setting that the installed version lacks is left out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..._torch import guards

_Setting = tuple[Callable[[], Any], Callable[[Any], Any]]
_C: Any = torch._C


def _variable(holder: Any, name: str) -> _Setting:
    """A setting that is a variable of a module, a class or an object."""

    def write(value: Any) -> None:
        if getattr(holder, name) != value:  # settings of a missing library can't be written
            setattr(holder, name, value)

    return (lambda: getattr(holder, name)), write


# --------------------------------------------------------------------------------------- settings of several parts

# A setting comes after the one it inherits from: writing `generic` changes settings that were never written.
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
    """The precision of all backends; None if it was set for one backend alone."""
    precision = guards.matmul_precision()
    return precision if isinstance(precision, str) else None


def _set_matmul_precision(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


def _cudnn_tf32() -> bool | None:
    try:
        return bool(_C._get_cudnn_allow_tf32())
    except RuntimeError:
        return None


def _set_cudnn_tf32(value: bool | None) -> None:
    if value is not None:
        _C._set_cudnn_allow_tf32(value)


_TINY, _ONE = [5e-324], [1.0]


def _flushes_denormals() -> bool:
    """Whether this thread flushes denormal numbers to zero, found out by arithmetic: PyTorch has no query."""
    return _TINY[0] * _ONE[0] == 0.0


# --------------------------------------------------------------------------------------- the tables

# Settings that a compiled call leaves changed as the function does.
_SETTINGS: dict[str, _Setting] = {
    "grad mode": (torch.is_grad_enabled, _C._set_grad_enabled),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (guards.current_device, torch.set_default_device),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "filling of uninitialized memory": (
        guards.fills_uninitialized,
        lambda value: setattr(torch.utils.deterministic, "fill_uninitialized_memory", value),
    ),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "flushing of denormal numbers": (_flushes_denormals, torch.set_flush_denormal),
    "float32 matmul precision": (_matmul_precision, _set_matmul_precision),
    "TF32 in cuDNN": (_cudnn_tf32, _set_cudnn_tf32),
    "float32 precisions": (_precisions, _set_precisions),  # last: the two above write to some of the precisions
}
for _device in torch._C._autocast_supported_devices():
    _SETTINGS[f"autocast of {_device}"] = (
        functools.partial(torch.is_autocast_enabled, _device),
        functools.partial(torch.set_autocast_enabled, _device),
    )
    _SETTINGS[f"autocast's dtype of {_device}"] = (
        functools.partial(torch.get_autocast_dtype, _device),
        functools.partial(torch.set_autocast_dtype, _device),
    )
# PyTorch sets the order itself where it chooses a kernel for attention on a GPU.
_SETTINGS["order of attention kernels"] = _C._get_sdp_priority_order, _C._set_sdp_priority_order
REPLAYED = frozenset(_SETTINGS)

# Settings that no compiled call changes, by PyTorch's names for them: `_get_NAME` and `_set_NAME` of `torch._C`, ...
_FLAGS = (
    "cudnn_benchmark cudnn_deterministic cudnn_enabled cudnn_depthwise_kernel miopen_immediate mkldnn_enabled "
    "mkldnn_deterministic nnpack_enabled qengine linalg_preferred_backend blas_preferred_backend "
    "rocm_fa_preferred_backend math_sdp_allow_fp16_bf16_reduction sm_carveout_experimental "
    "cpu_allow_fp16_reduced_precision_reduction cublas_allow_fp16_accumulation warnAlways autograd_fallback_mode"
).split()
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn", "fa3", "overrideable")
_REDUCTIONS = ("cublas_allow_fp16_reduced_precision_reduction", "cublas_allow_bf16_reduced_precision_reduction")
_PAIRS = {name: (f"_get_{name}", f"_set_{name}") for name in (*_FLAGS, *_REDUCTIONS)}
_PAIRS |= {f"{name}_sdp_enabled": (f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in _ATTENTION}
_PAIRS |= {
    "cudnn_benchmark_limit": ("_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit"),
    "fwd_grad_enabled": ("_is_fwd_grad_enabled", "_set_fwd_grad_enabled"),
    "check_sparse_tensor_invariants": ("_check_sparse_tensor_invariants", "_set_check_sparse_tensor_invariants"),
}
# ... or a variable of Python's.
_VARIABLES: list[tuple[Any, str]] = [
    (torch.backends.cudnn, "benchmark_limit"),
    (torch.backends.opt_einsum, "enabled"),
    (torch.backends.opt_einsum, "strategy"),
    (torch.__future__, "_overwrite_module_params_on_conversion"),
    (torch.__future__, "_swap_module_params_on_conversion"),
    (torch.utils.checkpoint, "_checkpoint_debug_enabled"),
    (torch.utils.checkpoint, "_enable_checkpoint_early_stop"),
    *((torch._tensor_str.PRINT_OPTS, name) for name in vars(torch._tensor_str.PRINT_OPTS)),
]


def _pair(name: str, read: str, write: str) -> _Setting:
    get, put = getattr(_C, read), getattr(_C, write)
    return get, (
        (lambda value: put(*value) if isinstance(value, tuple) else put(value)) if name in _REDUCTIONS else put
    )


_SETTINGS |= {
    name: _pair(name, read, write) for name, (read, write) in _PAIRS.items() if hasattr(_C, read) and hasattr(_C, write)
}
_SETTINGS |= {
    f"{getattr(holder, '__name__', type(holder).__name__)}.{name}": _variable(holder, name)
    for holder, name in _VARIABLES
    if hasattr(holder, name)
}
_SETTINGS |= {
    "anomaly mode": (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.set_anomaly_enabled(*value),
    ),
    "mha fastpath": (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    "threads of the backward": (_C._is_multithreading_enabled, _C._set_multithreading_enabled),
    "the autocast cache": (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
}
# Python functions with settings that neither table has: calls of them in a captured function are refused.
SETTERS = (
    *(torch.distributions.Distribution.set_default_validate_args, torch.multiprocessing.set_sharing_strategy),
    torch.autograd.grad_mode._force_original_view_tracking.__init__,
)


# Settings that kernels depend on, read before each operator of a capture; cuDNN and cuBLAS only with a device.
_CHEAP: dict[str, Callable[[], Any]] = {
    "the default dtype": torch.get_default_dtype,
    "deterministic algorithms": _C._get_deterministic_algorithms,
    "filling of uninitialized memory": guards.fills_uninitialized,
    "flushing of denormal numbers": _flushes_denormals,
    "the number of threads": torch.get_num_threads,
    "mkldnn_enabled": _C._get_mkldnn_enabled,
    "float32 precisions": functools.partial(_C._get_fp32_precision_getter, "mkldnn", "matmul"),
}
_BY_FLAGS = ["mkldnn_deterministic", "nnpack_enabled", "cpu_allow_fp16_reduced_precision_reduction"]
if torch.cuda.is_available():
    _CHEAP["float32 matmul precision"] = functools.partial(_C._get_fp32_precision_getter, "cuda", "matmul")
    _CHEAP["TF32 in cuDNN"] = functools.partial(_C._get_fp32_precision_getter, "cuda", "conv")
    _BY_FLAGS += ["cudnn_enabled", "cudnn_deterministic", "cudnn_benchmark", "cublas_allow_fp16_accumulation"]
_CHEAP.update((name, _SETTINGS[name][0]) for name in _BY_FLAGS if name in _SETTINGS)
ARITHMETIC = tuple(_CHEAP)
_READ = tuple(_CHEAP.values())


_OF_ALL = frozenset({"the default dtype", "flushing of denormal numbers"})
_OF_ALL_BUT_POINTWISE = frozenset(
    {"deterministic algorithms", "filling of uninitialized memory", "the number of threads"}
)
# Functions that take data unchanged: under torch.compile, NumPy numbers become tensors under another default dtype.
_COMPUTE_NOTHING = {torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default}
_COMPUTE_NOTHING |= {torch.ops.aten.detach.default}
_PRODUCTS = ("conv", "mm", "mv", "dot", "linear", "rnn", "lstm", "gru", "einsum", "attention")


def _tags(op: Any) -> Sequence[Any]:
    """The tags of an operator, found by the operator, by a function or by the name of a method."""
    if not isinstance(op, torch._ops.OpOverload):
        packet: Any = getattr(torch.ops.aten, op if isinstance(op, str) else getattr(op, "__name__", ""), None)
        if isinstance(packet, torch._ops.OpOverloadPacket):  # no method of the namespace's own, as `__eq__` is
            op = getattr(packet, packet.overloads()[0])
    return getattr(op, "tags", ())


def matters_to(name: str, op: Any) -> bool:
    """Whether a setting of `ARITHMETIC` may change the result of an operator or a function of PyTorch's."""
    if op in _COMPUTE_NOTHING:
        return False
    if name in _OF_ALL:
        return True
    if name in _OF_ALL_BUT_POINTWISE:
        return torch.Tag.pointwise not in _tags(op)
    return any(part in str(op) for part in _PRODUCTS)


def arithmetic() -> tuple[Any, ...]:
    """The values of the settings of `ARITHMETIC`, in their order."""
    return tuple([read() for read in _READ])


# Functions by which graphs of Dynamo's change settings; Dynamo has changed the settings already when a graph is
# compiled.
_MATMUL = ("float32 matmul precision", "float32 precisions")
_DETERMINISM = ("deterministic algorithms",)
_SETTERS: dict[str, tuple[str, ...]] = {
    **{getattr(_SETTINGS[name][1], "__name__", ""): (name,) for name in REPLAYED},
    "_set_deterministic_algorithms": _DETERMINISM,
    "use_deterministic_algorithms": _DETERMINISM,
    "set_deterministic_debug_mode": _DETERMINISM,
    "_set_default_dtype": ("the default dtype",),
    "_set_float32_matmul_precision": _MATMUL,
    "set_float32_matmul_precision": _MATMUL,
    "_set_cublas_allow_tf32": _MATMUL,
    "_set_cudnn_allow_tf32": ("TF32 in cuDNN", "float32 precisions"),
    "_set_fp32_precision_setter": ("float32 precisions",),
    "set_autocast_enabled": tuple(name for name in _SETTINGS if name.startswith("autocast of")),
    "set_autocast_dtype": tuple(name for name in _SETTINGS if name.startswith("autocast's dtype")),
}
# Functions that change settings; no compiled call changes these. Transforms set forward gradients and put them back.
_OTHERS = frozenset(
    "enable_flash_sdp enable_mem_efficient_sdp enable_math_sdp enable_cudnn_sdp allow_fp16_bf16_reduction_math_sdp "
    "preferred_linalg_library preferred_blas_library preferred_rocm_fa_library set_anomaly_enabled set_printoptions "
    "set_overwrite_module_params_on_conversion set_swap_module_params_on_conversion set_default_validate_args".split()
) | {write.__name__ for name, (_, write) in _SETTINGS.items() if name not in REPLAYED and hasattr(write, "__name__")}
_OTHERS -= {"<lambda>", "write", "_set_fwd_grad_enabled"}
for _name in ("", "<lambda>", "write"):
    _SETTERS.pop(_name, None)


def set_by(graph: torch.fx.Graph) -> frozenset[str]:
    """The settings that a graph of Dynamo's changes, and the functions that change further settings."""
    names = {getattr(node.target, "__name__", "") for node in graph.nodes if node.op == "call_function"}
    changed = {setting for name in names for setting in _SETTERS.get(name, ()) if setting in _SETTINGS}
    return frozenset(changed | names & _OTHERS)


def changes_between_operators(graph: torch.fx.Graph) -> frozenset[str]:
    """The settings of `ARITHMETIC` that a graph of Dynamo's changes between two of its operators."""
    between: set[str] = set()
    waiting: set[str] = set()
    seen: set[str] = set()  # the settings that mattered to operators so far
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        changed = set(_SETTERS.get(getattr(node.target, "__name__", ""), ())) if node.op == "call_function" else set()
        if changed:
            waiting |= changed & seen
        else:
            matter = {name for name in ARITHMETIC if node.op == "call_module" or matters_to(name, node.target)}
            seen |= matter
            between |= waiting & matter
    return frozenset(between)


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
    """A context, in words, that code has entered and not left and that is no setting. Called if there was none before,
    except for inference mode.
    """
    if torch.is_inference_mode_enabled() is not was_inference:
        return "inference mode"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks for saved tensors"
    return None


def partitioner_settings() -> str:
    """The settings of PyTorch's own partitioners, as text."""
    from torch._functorch import config

    return str(config.get_hash().hex())
