"""Workspaces: the bytes that kernels allocate for themselves while they run, beyond their results.

oneDNN's convolutions lay out their operands anew, attention has a tile of scores for each thread, norms have
statistics, sums of half precision are computed in single. The size depends on the library, the processor and
the number of threads, so each such kernel runs once on zeros of the same shapes and layout, while the allocator's
reports are counted; the answer is kept for the process. Only kernels of PyTorch's own on the CPU are run, and none that
draws random numbers. A plain number among an operator's arguments becomes a tensor.

A recurrent layer's residual for its backward has a size that only its library knows, so it is measured likewise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .._torch.graphs import size_hint
from .._torch.memory import peak_bytes
from .._torch.nested import leaves, mapped
from .._torch.ops import mkldnn_rnn_layer_for_training
from ..graph.meta import TensorSpec, value_of
from ..locks import make_lock

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
    mm bmm addmm baddbmm mean sum var var_mean std amax amin logsumexp cumsum prod mkldnn_rnn_layer_backward
    """.split()
)
_RECURRENT = (mkldnn_rnn_layer_for_training, torch.ops.aten.mkldnn_rnn_layer_backward.default)

_measurements: dict[Any, tuple[int, tuple[int, ...]]] = {}
_measurements_lock = make_lock()


def workspace(node: fx.Node) -> int:
    """The most bytes that an operator's kernel has in use at once, less those of its results."""
    if node.op != "call_function":
        return 0
    total = _NUMBER if any(type(argument) in _NUMBERS for argument in node.args) else 0
    is_measured = getattr(getattr(node.target, "_schema", None), "name", None) in _MEASURED
    if is_measured or node.target is mkldnn_rnn_layer_for_training:
        total += _measured(node)[0]
    return total


def bytes_of_results(node: fx.Node) -> list[int]:
    """Bytes of each result of an operator with several."""
    from_specs = [nbytes(part) for part in value_of(node)]
    if node.target not in _RECURRENT:
        return from_specs
    return [max(pair) for pair in zip(from_specs, _measured(node)[1] or from_specs, strict=True)]


_NUMBERS = (int, float, bool, complex)
_CPU = torch.device("cpu")


def _measured(node: fx.Node) -> tuple[int, tuple[int, ...]]:
    """(the most bytes that a kernel has in use at once beside its results, those of each result if it was run)"""
    library = torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()
    key = (node.target, _key(node.args), _key(node.kwargs), library)
    with _measurements_lock:
        measurement = _measurements.get(key)
    if measurement is None:
        specs = {operand: _layout(value_of(operand)) for operand in node.all_input_nodes}
        if all(isinstance(spec, TensorSpec) and spec.device == _CPU for spec in specs.values()):
            args, kwargs = fx.map_arg((node.args, node.kwargs), specs.__getitem__)
            measurement = _measure(node.target, args, kwargs)
        else:
            measurement = 0, ()
        with _measurements_lock:
            _measurements[key] = measurement
    return measurement


def _key(value: Any) -> Any:
    """An argument as a key: of a tensor its layout, of all else its text."""
    if isinstance(value, fx.Node):
        layout = value_of(value)
        token = layout.token if isinstance(layout, TensorSpec) else None
        if token is None:
            layout = _layout(layout)
            if not isinstance(layout, TensorSpec):
                return type(layout)
            return repr(layout), repr(layout.stride), layout.device, layout.offset
        return token
    if isinstance(value, (tuple, list)):
        return tuple([_key(item) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _key(item)) for name, item in value.items()])
    return repr(value)


def _measure(target: Any, args: Any, kwargs: Any) -> tuple[int, tuple[int, ...]]:
    sizes: tuple[int, ...] = ()

    def make_call() -> Callable[[], Any]:
        zeros_by_spec = {id(spec): _zeros(spec) for spec in leaves((args, kwargs)) if isinstance(spec, TensorSpec)}
        operands, keywords = mapped((args, kwargs), TensorSpec, lambda spec: zeros_by_spec[id(spec)])
        if target is _RECURRENT[1]:
            operands = _after_the_forward(operands)

        def call() -> Any:
            nonlocal sizes
            results = target(*operands, **keywords)
            sizes = tuple([_storage(one) for one in (results if isinstance(results, (tuple, list)) else (results,))])
            return results

        return call

    peak = peak_bytes(make_call)
    return (0, ()) if peak is None else (max(0, peak - sum(sizes)), sizes)


def _storage(value: Any) -> int:
    return value.untyped_storage().nbytes() if isinstance(value, torch.Tensor) else 0


def _after_the_forward(operands: Any) -> Any:
    """The operands of a recurrent layer's backward, with a workspace of its forward's in the place of the last.

    The two states are one tensor, as zeros are once equal computations are one: the kernel then copies it.
    """
    operands = (*operands[:6], operands[5], *operands[7:])
    tensors, (reverse, mode, size, layers, has_biases, train, both, batches, first, _) = operands[:7], operands[13:]
    forward = mkldnn_rnn_layer_for_training(
        *tensors, reverse, batches, mode, size, layers, has_biases, both, first, train
    )
    return (*operands[:-1], forward[3])


def _layout(value: Any) -> Any:
    """A tensor's spec with plain sizes; the value itself if it is no tensor."""
    if isinstance(value, torch.Tensor):
        value = TensorSpec.of(value)
    if not isinstance(value, TensorSpec):
        return value
    return TensorSpec(
        tuple(map(size_hint, value.shape)),
        tuple(map(size_hint, value.stride)),
        value.dtype,
        value.device,
        size_hint(value.offset),
    )


def _zeros(spec: TensorSpec) -> torch.Tensor:
    # Some kernels copy what does not begin where its memory does.
    flat = torch.zeros(spec.offset + nbytes(spec) // spec.dtype.itemsize, dtype=spec.dtype)
    return flat.as_strided(spec.shape, spec.stride, spec.offset)


def nbytes(value: Any) -> int:
    """Bytes of the storage behind a value: symbolic sizes are estimated."""
    if not isinstance(value, (TensorSpec, torch.Tensor)):
        return 0
    token = value.token if isinstance(value, TensorSpec) else None
    span = _BYTES.get(token) if token is not None else None
    if span is None:
        span = _span(value)
        if token is not None:
            _BYTES[token] = span
    return span


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
