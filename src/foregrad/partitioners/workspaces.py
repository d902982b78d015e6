"""What kernels allocate for themselves while they run, beyond their results.

oneDNN's convolutions lay out their operands anew, attention has a tile of scores for each thread, norms have
statistics, sums of half precision are computed in single. How much that is depends on the library, the processor and
the number of threads, so each such kernel runs once on zeros of the same shapes and layout, while the allocator's
reports are counted; the answer is kept for the process. Only kernels of PyTorch's own on the CPU are run, and none that
draws random numbers. A plain number that an operator is given becomes a tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._torch.allocations import peak_bytes
from .._torch.graphs import size_hint
from ..graph.meta import TensorSpec
from .index import value_of

__all__ = ["nbytes", "workspace"]

_NUMBER = 16  # a number as a tensor, and once more in the result's dtype

_MEASURED = frozenset(
    f"aten::{name}"
    for name in """
    convolution convolution_backward native_layer_norm native_layer_norm_backward native_group_norm
    native_group_norm_backward native_batch_norm native_batch_norm_backward _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training batch_norm_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward embedding
    embedding_dense_backward _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
    mm bmm addmm baddbmm mean sum var var_mean std amax amin logsumexp cumsum prod
    """.split()
)

_known: dict[Any, int] = {}
_known_lock = threading.Lock()


def workspace(node: fx.Node) -> int:
    """The most bytes that an operator's kernel has in use at once, less those of its results."""
    if node.op != "call_function":
        return 0
    found = _NUMBER if any(type(argument) in _NUMBERS for argument in node.args) else 0
    if getattr(getattr(node.target, "_schema", None), "name", None) in _MEASURED:
        found += _measured(node)
    return found


_NUMBERS = (int, float, bool, complex)
_CPU = torch.device("cpu")


def _measured(node: fx.Node) -> int:
    library = torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()
    key = (node.target, _key(node.args), _key(node.kwargs), library)
    with _known_lock:
        known = _known.get(key)
    if known is None:
        specs = {operand: _layout(value_of(operand)) for operand in node.all_input_nodes}
        if all(isinstance(spec, TensorSpec) and spec.device == _CPU for spec in specs.values()):
            args, kwargs = fx.map_arg((node.args, node.kwargs), specs.__getitem__)
            known = _measure(node.target, args, kwargs, _results(value_of(node)))
        else:
            known = 0
        with _known_lock:
            _known[key] = known
    return known


def _key(value: Any) -> Any:
    """An argument as a key: of a tensor its layout, of all else its text."""
    if isinstance(value, fx.Node):
        found = value_of(value)
        token = found.token if isinstance(found, TensorSpec) else None
        if token is None:
            found = _layout(found)
            return (repr(found), repr(found.stride), found.device) if isinstance(found, TensorSpec) else type(found)
        return token
    if isinstance(value, (tuple, list)):
        return tuple([_key(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _key(item)) for name, item in value.items()])
    return repr(value)


def _measure(target: Any, args: Any, kwargs: Any, results: int) -> int:
    def make_call() -> Callable[[], Any]:
        made = {id(spec): _zeros(spec) for spec in _specs((args, kwargs))}
        return lambda: target(*_with(args, made), **_with(kwargs, made))

    peak = peak_bytes(make_call)
    return 0 if peak is None else max(0, peak - results)


def _results(value: Any) -> int:
    return sum(map(nbytes, value)) if isinstance(value, (tuple, list)) else nbytes(value)


def _layout(value: Any) -> Any:
    """A tensor's spec with plain sizes; the value itself if it is no tensor."""
    if isinstance(value, torch.Tensor):
        value = TensorSpec.of(value)
    if not isinstance(value, TensorSpec):
        return value
    return TensorSpec(
        tuple(map(size_hint, value.shape)), tuple(map(size_hint, value.stride)), value.dtype, value.device
    )


def _zeros(spec: TensorSpec) -> torch.Tensor:
    flat = torch.zeros(nbytes(spec) // spec.dtype.itemsize, dtype=spec.dtype)
    return flat.as_strided(spec.shape, spec.stride)


def _specs(value: Any) -> list[TensorSpec]:
    if isinstance(value, TensorSpec):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [spec for item in value for spec in _specs(item)] if isinstance(value, (tuple, list)) else []


def _with(value: Any, made: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, TensorSpec):
        return made[id(value)]
    if isinstance(value, (tuple, list)):
        return type(value)([_with(item, made) for item in value])
    return {name: _with(item, made) for name, item in value.items()} if isinstance(value, dict) else value


def nbytes(value: Any) -> int:
    """Bytes of the storage behind a value: symbolic sizes are estimated."""
    if not isinstance(value, (TensorSpec, torch.Tensor)):
        return 0
    token = value.token if isinstance(value, TensorSpec) else None
    known = _BYTES.get(token) if token is not None else None
    if known is None:
        known = _span(value)
        if token is not None:
            _BYTES[token] = known
    return known


_BYTES: dict[object, int] = {}  # by the token of a spec


def _span(value: Any) -> int:
    span = 1
    strides = value.stride if isinstance(value, TensorSpec) else value.stride()
    for size, stride in zip(value.shape, strides, strict=True):
        count = size_hint(size)
        if count == 0:
            return 0
        span += (count - 1) * size_hint(stride)
    return int(span * value.dtype.itemsize)
