"""Metadata of graph nodes: `TensorSpec`, and the `node.meta` that carries it.

A captured graph has thousands of nodes; their fake tensors are slow to make (about 30 us each) and rarely read. So
capture stores a `TensorSpec` per tensor, and `NodeMeta` makes the `FakeTensor` under ``"val"`` (and the text under
``"stack_trace"``) at the first read.

Known weakness: fake values made late share no storage, even where the real values do.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._torch.graphs import size_hint, strided_metadata, tensor_metadata
from .._torch.nested import frozen
from .._torch.symbols import Size, concrete, is_symbolic

UNDESCRIBED: tuple[object, ...] = ()
"""The spec of a node whose value no spec describes, as of an operator without results."""
_UNKNOWN = object()
_TOKENS: dict[object, object] = {}


def _find_token(spec: TensorSpec) -> object:
    numbers = (*spec.shape, *spec.stride, spec.offset)
    if spec.conj or spec.neg or any(type(n) is not int for n in numbers):
        return None
    # Both lists have equal lengths, so one row of numbers tells layouts apart.
    return _TOKENS.setdefault((numbers, spec.dtype, spec.device), object())


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class TensorSpec:
    """Shape, strides, dtype and device of a tensor; immutable by convention, cheap to make.

    `shape`, `stride` are in elements, `offset` is the storage offset in elements. Entries may be `torch.SymInt`.
    """

    shape: tuple[Size, ...]
    stride: tuple[Size, ...]
    dtype: torch.dtype
    device: torch.device
    offset: Size = 0
    conj: bool = False
    neg: bool = False
    _token: object = dataclasses.field(default=_UNKNOWN, init=False)

    @classmethod
    def of(cls, tensor: torch.Tensor, device: torch.device | None = None) -> TensorSpec:
        """The spec of a strided tensor."""
        return cls(
            tuple(tensor.shape),
            tensor.stride(),
            tensor.dtype,
            tensor.device if device is None else device,
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def fresh(self, shape: Sequence[Size], stride: Sequence[Size] | None = None) -> TensorSpec:
        """A tensor of this dtype and device at the beginning of its memory, contiguous unless `stride` says more."""
        strides = contiguous_strides(shape) if stride is None else tuple(stride)
        return TensorSpec(tuple(shape), strides, self.dtype, self.device)

    @property
    def numel(self) -> Size:
        n: Size = 1
        for size in self.shape:
            n = n * size
        return n

    @property
    def nbytes(self) -> Size:
        """Bytes of memory that the elements span, the cost of saving this tensor alone. 0 when empty."""
        span: Size = 1
        for size, stride in zip(self.shape, self.stride, strict=True):
            if isinstance(size, int) and size == 0:
                return 0
            span = span + (size - 1) * stride
        return span * self.dtype.itemsize

    @property
    def token(self) -> object:
        """One object for all equal specs, for keys; None if a size is symbolic, or the conj or neg bit is set."""
        token = self._token
        if token is _UNKNOWN:
            token = self._token = _find_token(self)
        return token

    @property
    def overlaps_itself(self) -> bool:
        """Whether two elements may be in one place, as after expand or unfold."""
        span: Size = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size > 1:
                if stride < span:
                    return True
                span += stride * (size - 1)
        return False

    @property
    def is_static(self) -> bool:
        """Whether no size, stride or offset is symbolic."""
        return type(self.offset) is int and all(type(n) is int for n in (*self.shape, *self.stride))

    @property
    def is_dense(self) -> bool:
        """Whether the elements fill a stretch of memory, each in a place of its own."""
        expected: Size = 1
        for stride, size in sorted(zip(self.stride, self.shape, strict=True)):
            if size == 0:
                return True
            if size == 1:
                continue
            if stride != expected:
                return False
            expected *= size
        return True

    def holds(self, part: TensorSpec) -> bool:
        """Whether the tensor is a stretch of memory without gaps or overlaps that holds all elements of `part`."""
        start, first = self.offset * self.dtype.itemsize, part.offset * part.dtype.itemsize
        return bool(
            part.numel == 0 or (self.is_dense and start <= first and first + part.nbytes <= start + self.nbytes)
        )

    def same_layout(self, other: TensorSpec) -> bool:
        """Whether both have equal shape, strides and dtype (device and offset aside)."""
        return self.shape == other.shape and self.stride == other.stride and self.dtype is other.dtype

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorSpec):
            return NotImplemented
        return (
            self.same_layout(other)
            and self.device == other.device
            and self.offset == other.offset
            and self.conj == other.conj
            and self.neg == other.neg
        )

    def __hash__(self) -> int:
        return hash((self.shape, self.stride, self.dtype, self.device))

    def __repr__(self) -> str:
        return f"{_DTYPE_NAMES.get(self.dtype) or str(self.dtype)}[{', '.join(map(str, self.shape))}]"


_DTYPE_NAMES = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "b8",
}


def _of_all(name: str) -> Callable[[NodeMeta], Any]:
    return lambda meta: getattr(meta.materialize(), name)()


class NodeMeta(dict[str, Any]):
    """`node.meta` of a captured node. Behaves as the dict that PyTorch's tools expect; costly entries are made late.

    `"spec"` is a `TensorSpec`, a list/tuple of specs (multi-output ops; None for an output that is not a tensor), or
    absent for non-tensors. `"val"`, `"stack_trace"`, ... are made on first use from the functions given here,
    `"tensor_meta"` from `"spec"` or `"val"`; reads of all entries (`dict(meta)`, `meta.items()`) make everything.
    """

    __slots__ = ("_late",)

    def __init__(self, *args: object, late: Mapping[str, Callable[[], object]] | None = None, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._late: Mapping[str, Callable[[], object]] = {} if late is None else late

    def __missing__(self, key: str) -> object:
        make = self._late.get(key)
        if make is not None:
            value = self[key] = make()
        elif key == "tensor_meta" and (metadata := self._tensor_metadata()) is not None:
            value = self[key] = metadata
        else:
            raise KeyError(key)
        return value

    def _tensor_metadata(self) -> Any:
        spec = dict.get(self, "spec")
        if isinstance(spec, TensorSpec) and spec.is_static:
            plain: Any = spec
            return strided_metadata(plain.shape, plain.stride, spec.dtype)
        value = self.get("val")
        return tensor_metadata(value) if isinstance(value, torch.Tensor) else None

    def get(self, key: str, default: object = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def __contains__(self, key: object) -> bool:
        if super().__contains__(key) or key in self._late:
            return True
        return key == "tensor_meta" and isinstance(dict.get(self, "spec"), TensorSpec)

    def copy(self, **late: Callable[[], object]) -> NodeMeta:
        """A copy that also makes the entries of `late` at their first read."""
        return NodeMeta(dict.items(self), late={**self._late, **late} if late else self._late)

    def __copy__(self) -> NodeMeta:
        return self.copy()

    def materialize(self) -> dict[str, object]:
        """A plain dict with everything made."""
        for key in (*self._late, "tensor_meta"):
            self.get(key)
        return dict(dict.items(self))

    # Of all entries, as a plain dict's.
    __iter__, __len__, keys, values, items = (
        _of_all(name) for name in ("__iter__", "__len__", "keys", "values", "items")
    )

    def __eq__(self, other: object) -> bool:
        return self.materialize() == (other.materialize() if isinstance(other, NodeMeta) else other)

    __hash__ = None

    def __or__(self, other: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.materialize() | dict(other)

    def __ror__(self, other: Any) -> dict[str, object]:  # type: ignore[override]
        return dict(other) | self.materialize()

    def __reduce__(self) -> Any:
        return dict, (self.materialize(),)

    def setdefault(self, key: str, default: object = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __delitem__(self, key: str) -> None:
        self.pop(key)

    def pop(self, key: str, *default: object) -> Any:
        value = self.get(key, *default) if default else self[key]
        self._late = {name: make for name, make in self._late.items() if name != key}
        dict.pop(self, key, None)
        return value


def spec_of(node: torch.fx.Node) -> Any:
    """The `TensorSpec` of a node's value (a tuple for several outputs), or None for a value that is no tensor."""
    meta = node.meta
    if dict.__contains__(meta, "spec"):
        return meta["spec"]
    if "val" not in meta:
        return None
    spec = spec_of_value(meta["val"])
    meta["spec"] = spec
    return spec


def value_of(node: torch.fx.Node) -> Any:
    """The specs of a node's value if the capture left them (cheap), or else its fake value."""
    spec = dict.get(node.meta, "spec")
    return node.meta.get("val") if spec is None else spec


def respecify(graph: torch.fx.Graph) -> None:
    """Make each node's spec again from its fake value, after passes that update only that."""
    for node in graph.nodes:
        if dict.__contains__(node.meta, "val"):
            node.meta["spec"] = spec_of_value(node.meta["val"])


def spec_of_value(value: object) -> Any:
    """The spec of a tensor, a tuple of specs for several; None for anything else."""
    if isinstance(value, torch.Tensor):
        return TensorSpec.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(spec_of_value(item) for item in value)
    return None


def nbytes_of(node: torch.fx.Node) -> int:
    """Bytes of memory that this node's value keeps alive (0 for numbers and symbolic sizes)."""
    spec = spec_of(node)
    if spec is None:
        return 0
    if isinstance(spec, TensorSpec):
        return _hinted(spec.nbytes)
    return sum(_hinted(item.nbytes) for item in spec if item is not None)


def _hinted(number: object) -> int:
    """A number of bytes; with symbolic sizes, its value at capture."""
    return number if type(number) is int else size_hint(number)


def contiguous_strides(shape: Sequence[Size]) -> tuple[Size, ...]:
    """The strides of a contiguous tensor with the shape."""
    return strides_in_order(shape, range(len(shape)))


def strides_in_order(shape: Sequence[Size], order: Sequence[int]) -> tuple[Size, ...]:
    """The strides of dense memory with the dimensions in `order`, outermost first."""
    strides: list[Size] = [1] * len(shape)
    step: Size = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


# -------------------------------------------------------------------- layout
# Tensors that enter a compiled graph from outside, in the layout of its capture.


def laid_out(tensor: torch.Tensor, stride: Sequence[Size]) -> torch.Tensor:
    """A dense copy with the strides; sparse tensors get here too, since their strides are all zero."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def memory_order(spec: TensorSpec) -> tuple[int, ...]:
    """The dimensions of a dense tensor of symbolic sizes, outermost in memory first."""
    dims = range(len(spec.shape))
    return tuple(sorted(dims, key=lambda dim: (-concrete(spec.stride[dim]), dim)))


def in_order(tensor: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """The tensor laid out densely with its dimensions in `order`."""
    strides = strides_in_order(tensor.shape, order)
    return tensor if tensor.stride() == strides else laid_out(tensor, strides)


def as_captured(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor in the layout of `spec`, copied only if it must be."""
    if any(map(is_symbolic, spec.stride)):
        return in_order(tensor, memory_order(spec))
    return tensor if tensor.stride() == spec.stride else laid_out(tensor, spec.stride)


# -------------------------------------------------------------------- strides


def pairs_of_strides(shape: Sequence[Size], stride: Sequence[Size]) -> Iterator[tuple[int, int, Size]]:
    """(inner dimension, outer dimension, padding): the outer stride is the inner one times inner size and padding."""
    order = sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim))
    for inner, outer in itertools.pairwise(order):
        step, next_step = stride[inner], stride[outer]
        used = step * shape[inner]
        if next_step and next_step == used:
            yield inner, outer, 0
        elif isinstance(step, int) and isinstance(next_step, int) and 0 < used < next_step and next_step % step == 0:
            yield inner, outer, next_step // step - shape[inner]


def following_strides(
    own: Sequence[Size], strides: Sequence[Size], shape: Sequence[Size], padded: Container[int] = ()
) -> tuple[Size, ...]:
    """The strides of a tensor of symbolic `shape`, laid out as a tensor is with the sizes `own` and `strides`."""
    stride = list(strides)
    for inner, outer, padding in pairs_of_strides(own, strides):
        if not padding or outer in padded:
            stride[outer] = stride[inner] * (shape[inner] + padding)
    return tuple(stride)


def paddings(shape: Sequence[Size], stride: Sequence[Size]) -> Iterator[tuple[int, Size, Size]]:
    """(dimension, stride, padding) of the dimensions with a padding."""
    return ((outer, stride[outer], padding) for _, outer, padding in pairs_of_strides(shape, stride) if padding)


def structure_of(node: torch.fx.Node, name: Callable[[torch.fx.Node], object]) -> Any:
    """A hashable key of a node's computation: operator, constants, layout; `name` gives the key of an operand."""
    return node.target, frozen((node.args, node.kwargs), torch.fx.Node, name), layout_of(value_of(node))


def layout_of(value: object) -> Any:
    """Shape, strides, dtype and device of a tensor, or of each of several; a symbolic number itself; else the type."""
    if isinstance(value, (tuple, list)):
        return tuple(map(layout_of, value))
    if isinstance(value, TensorSpec) and (token := value.token) is not None:
        layout_id = _LAYOUTS.get(token)
        if layout_id is None:  # a token tells of the offset too
            layout = value.shape, value.stride, value.dtype, value.device
            layout_id = _LAYOUTS[token] = _LAYOUTS.setdefault(layout, object())
        return layout_id
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return object()
        value = TensorSpec.of(value)
    if not isinstance(value, TensorSpec):
        return str(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else type(value)
    sizes = tuple(map(str, value.shape)), tuple(map(str, value.stride))
    return *sizes, value.dtype, value.device, value.conj, value.neg


_LAYOUTS: dict[object, object] = {}  # by token, and by layout without offset: comparing one object is cheap
