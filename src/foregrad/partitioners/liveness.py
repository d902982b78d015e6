"""The memory that a split takes, storage by storage, for the schedule that runs: both halves, in their order.

A storage lives from its maker to the last operator that reads it or one of its views. Outputs of the forward live on,
since the caller has them; residuals live until their last use in the backward; gradients live to the end. Arguments,
parameters and buffers are alive before the call, and count nothing. The eager backend's generated code does the same
(`del` after each last use). While an operator runs, the workspace of its kernel is added.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.graphs import size_hint
from .._torch.instead import OFFLOAD
from .._torch.memory import peak_bytes
from .._torch.nested import leaves, mapped
from .._torch.ops import mkldnn_rnn_layer_for_training
from ..graph.meta import TensorSpec, value_of
from ..locks import make_lock
from .classify import Kind
from .index import JointIndex
from .instead import device_of, state_size
from .split import Excerpt, backward_needs, backward_order, forward_order

# ---------------------------------------------------------------------------------------------------------- workspaces
# Workspaces: the bytes that kernels allocate for themselves while they run, beyond their results.
#
# oneDNN's convolutions lay out their operands anew, attention has a tile of scores for each thread, norms have
# statistics, sums of half precision are computed in single. The size depends on the library, the processor and the
# number of threads, so each such kernel runs once on zeros of these shapes and layouts, while the allocator's reports
# are counted; the answer is kept for the process. Only kernels of PyTorch's own on the CPU are run, and none that draws
# random numbers. A plain number among an operator's arguments becomes a tensor.
#
# A recurrent layer's residual for its backward has a size that only its library knows, so it is measured likewise.

_NUMBER = 16  # bytes of the largest number, or of a number as a tensor and once more in the result's dtype

_MEASURED = frozenset(
    f"aten::{name}"
    for name in """
    convolution convolution_backward native_layer_norm native_layer_norm_backward native_group_norm
    native_group_norm_backward native_batch_norm native_batch_norm_backward _native_batch_norm_legit
    _native_batch_norm_legit_functional _native_batch_norm_legit_no_training batch_norm_backward
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward embedding
    embedding_dense_backward _embedding_bag _embedding_bag_backward _embedding_bag_dense_backward
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data
    max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d avg_pool2d_backward
    mm bmm addmm baddbmm mean sum var var_mean std amax amin logsumexp cumsum prod mkldnn_rnn_layer_backward
    """.split()
)
_RECURRENT = (mkldnn_rnn_layer_for_training, torch.ops.aten.mkldnn_rnn_layer_backward.default)

_measurements: dict[Any, tuple[int, tuple[int, ...]]] = {}
_measurements_lock = make_lock()


def workspace(node: fx.Node) -> int:
    """The most bytes that an operator's kernel has in use at once, without its results' bytes."""
    if node.op != "call_function":
        return 0
    number = _NUMBER if any(type(argument) in _NUMBERS for argument in node.args) else 0
    return number + measured_kernel(node.target, node.args, node.kwargs)[0]


def measured_kernel(target: Any, args: Any, kwargs: Any) -> tuple[int, tuple[int, ...]]:
    """(an operator's workspace on tensors or nodes, each result's bytes where measured)"""
    if target is torch.ops.aten.mkldnn_rnn_layer.default:
        target = mkldnn_rnn_layer_for_training
    is_measured = getattr(getattr(target, "_schema", None), "name", None) in _MEASURED
    is_measured |= target is mkldnn_rnn_layer_for_training or _converts(target, args)
    return _measured(target, args, kwargs) if is_measured else (0, ())


def _converts(target: Any, args: Any) -> bool:
    """Whether a pointwise operator has operands of several dtypes: the CPU then converts copies."""
    dtypes = (value.dtype for value in map(_value, args) if isinstance(value, (TensorSpec, torch.Tensor)))
    return torch.Tag.pointwise in getattr(target, "tags", ()) and len(set(dtypes)) > 1


def _value(operand: Any) -> Any:
    """The value of a node; an operand that is no node is its own value."""
    return value_of(operand) if isinstance(operand, fx.Node) else operand


def bytes_of_results(node: fx.Node) -> list[int]:
    """Bytes of each result of an operator with several."""
    from_specs = [nbytes(part) for part in value_of(node)]
    if node.target not in _RECURRENT:
        return from_specs
    measured = _measured(node.target, node.args, node.kwargs)[1]
    return [max(pair) for pair in zip(from_specs, measured or from_specs, strict=True)]


_NUMBERS = (int, float, bool, complex)
_CPU = torch.device("cpu")
_MOST_MEASURED = 1 << 30  # bytes of operands: a model that is not there may be larger than the memory


def _measured(target: Any, args: Any, kwargs: Any) -> tuple[int, tuple[int, ...]]:
    """(the most bytes that a kernel has in use at once beside its results, each result's bytes if it was run)"""
    library = torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.are_deterministic_algorithms_enabled()
    key = (target, _key(args), _key(kwargs), library)
    with _measurements_lock:
        measurement = _measurements.get(key)
    if measurement is None:
        specs: dict[object, Any] = {}
        args, kwargs = mapped(
            (args, kwargs), (fx.Node, torch.Tensor), lambda one: specs.setdefault(one, _layout(_value(one)))
        )
        is_small = sum(map(nbytes, specs.values())) <= _MOST_MEASURED
        if is_small and all(isinstance(spec, TensorSpec) and spec.device == _CPU for spec in specs.values()):
            measurement = _measure(target, args, kwargs)
        else:
            measurement = 0, ()
        with _measurements_lock:
            _measurements[key] = measurement
    return measurement


def _key(value: object) -> Any:
    """An argument as a key: of a tensor its layout, of all else its text."""
    if isinstance(value, (fx.Node, torch.Tensor)):
        layout = _value(value)
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


def _measure(target: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[int, tuple[int, ...]]:
    sizes: tuple[int, ...] = ()

    def make_call() -> Callable[[], object]:
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


def _storage(value: object) -> int:
    if isinstance(value, torch.Tensor) and value.is_sparse:
        value = value._values()
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


def _bytes_of_sparse(node: fx.Node) -> int:
    """Bytes of an embedding's sparse gradient beyond the operands' memory."""
    is_bag = node.target is _SPARSE_BAG and node.args[9:10] == (True,)
    if not is_bag and node.target is not _SPARSE:
        return 0
    gradient, indices = (_layout(value_of(operand)) for operand in node.all_input_nodes[:2])
    size = gradient.dtype.itemsize * math.prod((*indices.shape, gradient.shape[1]) if is_bag else gradient.shape)
    return 0 if size == nbytes(gradient) and not is_bag else int(size)


_SPARSE, _SPARSE_BAG = torch.ops.aten.embedding_sparse_backward.default, torch.ops.aten._embedding_bag_backward.default


def _layout(value: object) -> Any:
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
    # Some kernels copy a tensor that does not begin where its memory begins.
    flat = torch.zeros(spec.offset + nbytes(spec) // spec.dtype.itemsize, dtype=spec.dtype)
    return flat.as_strided(spec.shape, spec.stride, spec.offset)


def nbytes(value: object) -> int:
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


@dataclasses.dataclass(frozen=True, slots=True)
class Timeline:
    """The bytes alive while each operator of a half runs: `bytes[k]` while `order[k]` does."""

    order: list[int]
    bytes: list[int]
    after: int

    @property
    def peak(self) -> int:
        return max(self.bytes, default=0)

    @property
    def peak_node(self) -> int | None:
        """The operator at the peak."""
        return self.order[self.bytes.index(self.peak)] if self.order else None


@dataclasses.dataclass(frozen=True, slots=True)
class Liveness:
    """Bytes alive through one step, beyond the bytes alive before."""

    forward: Timeline
    backward: Timeline
    saved_bytes: int  # of storages that only the backward keeps alive

    @property
    def peak(self) -> int:
        return max(self.forward.peak, self.forward.after, self.backward.peak, self.backward.after)


_NO_STATES: Mapping[int, int] = {}


class Storages:
    """The storages of a joint graph's nodes: the owner of each node's memory, each operator's allocations."""

    def __init__(self, index: JointIndex) -> None:
        self.index = index
        self.root = list(index.root)
        self.size = [0] * len(index)
        # For operators with several results: (the item that holds the storage, or None where nobody reads it; bytes).
        self.results: dict[int, list[tuple[int | None, int]]] = {}
        self.workspace = [
            0 if kind in _NOTHING else workspace(node) for node, kind in zip(index.nodes, index.kinds, strict=True)
        ]
        items: dict[int, dict[int, int]] = {}
        for i, kind in enumerate(index.kinds):
            if kind is Kind.ITEM:
                source, at = index.operands[i][0], index.nodes[i].args[1]
                first = items.setdefault(source, {}).setdefault(at, i)
                self.root[i] = first
            elif kind is Kind.VIEW or (index.nodes[i].target is _SPARSE and not _bytes_of_sparse(index.nodes[i])):
                self.root[i] = self.root[index.operands[i][0]] if index.operands[i] else i
        for i, kind in enumerate(index.kinds):
            if kind in _NOTHING or self.root[i] != i or is_offloaded(index.nodes[i]):
                continue
            value = value_of(index.nodes[i])
            if sparse := _bytes_of_sparse(index.nodes[i]):
                self.size[i] = sparse
            elif isinstance(value, (tuple, list)):
                holders = items.get(i, {})
                self.results[i] = [(holders.get(at), size) for at, size in enumerate(bytes_of_results(index.nodes[i]))]
                for holder, size in self.results[i]:
                    if holder is not None:
                        self.size[holder] = size
            else:
                self.size[i] = nbytes(value)
        for i in index.backward_inputs:
            self.size[i] = nbytes(value_of(index.nodes[i]))
        # Bytes of the generator's state that is saved where a random operator runs once more.
        self.states = {i: state_size(device) for i in index.replays if (device := device_of(index, i)) is not None}
        # For each node, the storages that running it makes or reads, each once.
        root = self.root
        # An argument of a half, say, has a size that is told later.
        counts = [bool(size) or kind is Kind.INPUT for size, kind in zip(self.size, index.kinds, strict=True)]
        self.touched = [
            tuple({r for r in (root[i], *[root[operand] for operand in operands]) if counts[r]})
            for i, operands in enumerate(index.operands)
        ]

    def liveness(self, residuals: Iterable[int]) -> Liveness:
        """The memory of the split at these residuals."""
        return self.of_split(*backward_needs(self.index, residuals))

    def of_split(
        self, used: list[int], computed: bytearray, away: Collection[int] = (), excerpt: Excerpt | None = None
    ) -> Liveness:
        """The memory of the split with a backward that takes the residuals `used`, of these `away` from host memory,
        and computes `computed` (see `backward_needs`, also for `excerpt`).
        """
        index, root = self.index, self.root
        kept = {root[i] for i in index.output_numbers}
        saved = {root[i] for i in used if i not in away} - kept
        states = {i: size for i, size in self.states.items() if computed[i]}
        forward = self.timeline(forward_order(index, used, excerpt), set(), kept | saved, states=states)
        own = {r for r in saved if index.kinds[r] is not Kind.INPUT}
        tangents = set(index.backward_inputs)
        held = sum(self.size[r] for r in kept)
        noted = sum(states.values())
        returned = {root[i] for i in index.kept_gradients}
        returned |= self.held_tangents(tangents)
        order = backward_order(index, computed, used, away, excerpt)
        if index.hands_on:
            order = [i for i in order if i not in index.last_views]
        states = {i: -size for i, size in states.items()}
        backward = self.timeline(order, own | tangents, returned, held + noted, states)
        return Liveness(forward, backward, sum(self.size[r] for r in own) + noted)

    def held_tangents(self, tangents: Iterable[int]) -> set[int]:
        """Cotangents alive to the end: `loss.backward()` makes that of a single number, and holds it."""
        return {i for i in tangents if self.size[i] <= _NUMBER}

    def timeline(
        self,
        order: Sequence[int],
        alive: set[int],
        kept: set[int],
        others: int = 0,
        states: Mapping[int, int] = _NO_STATES,
    ) -> Timeline:
        """The bytes alive while each operator of `order` runs.

        `alive`: storages present at the beginning, freed after their last use. `kept`: storages that are never freed.
        `others`: bytes alive all the time. `states`: the bytes of a generator's state that are alive from an operator
        on, or (negative) that are exchanged for another state at an operator and freed after it.
        """
        touched, root, size, results, own = self.touched, self.root, self.size, self.results, self.workspace
        last: dict[int, int] = {}  # where in `order` a storage is made or read last
        for k, i in enumerate(order):
            for r in touched[i]:
                last[r] = k
        present = set(alive)
        # Bytes that come with each operator, less the bytes that went after its predecessor.
        change = [0] * (len(order) + 1)
        change[0] = others + sum([size[r] for r in alive if r in last or r in kept])
        exchanged: list[tuple[int, int]] = []  # (where states are, bytes that are only there after or before that)
        for k, i in enumerate(order):
            before = change[k]
            if i in results:
                for holder, part in results[i]:
                    change[k] += part
                    # A value that nobody reads goes at once, and so does a second copy of a saved result.
                    if holder is None or holder not in last or holder in present:
                        change[k + 1] -= part
                    else:
                        present.add(holder)
            elif root[i] == i and size[i] and i not in present:
                change[k] += size[i]
                present.add(i)
            if i in states:
                state = states[i]
                if state < 0:  # both states are there while they are exchanged
                    exchanged.append((k, change[k] - before + state))
                change[k + (state < 0)] += state
        for r, k in last.items():
            if r in present and r not in kept:
                change[k + 1] -= size[r]
        live = list(itertools.accumulate(change))
        after = live.pop()
        bytes_in_use = [bytes_ + own[i] for bytes_, i in zip(live, order, strict=True)]
        for k, less in exchanged:
            bytes_in_use[k] = max(bytes_in_use[k], live[k] - less)
        return Timeline(list(order), bytes_in_use, after)


_NOTHING = (Kind.INPUT, Kind.CONSTANT, Kind.NUMBER, Kind.ITEM, Kind.VIEW)


def is_offloaded(node: fx.Node) -> bool:
    """Whether a node is a copy of a saved value in host memory."""
    return node.target is OFFLOAD
