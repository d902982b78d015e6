"""`WrapperSpec`: the structure of a wrapper subclass, and the way from a wrapper to its plain tensors and back.

`__tensor_flatten__` of a traceable wrapper subclass names the attributes with its inner tensors (these may be wrappers
themselves), and `__tensor_unflatten__` rebuilds it. Graphs take and return the plain tensors at the leaves.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from .._torch.symbols import coefficient, concrete, expression_text, has_symbolic, is_ragged, is_symbolic
from .._torch.tensors import is_traceable_wrapper_subclass
from .._torch.wrappers import is_wrapper, parts_of
from ..errors import UnsupportedTensorError
from ..graph.meta import following_strides
from ..graph.source import compile_source
from ._torch.jagged import CARRYING, is_jagged, ragged_size, ragged_source

_PLAIN = {torch.Tensor, torch.nn.Parameter}


@dataclasses.dataclass(frozen=True, slots=True)
class Carrier:
    """One plain tensor of a gradient: its path in the gradient, and its metadata."""

    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def make(self) -> torch.Tensor:
        """A tensor like it, in the memory of one element."""
        return torch.zeros((), dtype=self.dtype, device=self.device).expand(self.shape)


@dataclasses.dataclass(frozen=True)
class WrapperSpec:
    """One wrapper: its class, the attributes that hold inner tensors, and the other arguments of
    `__tensor_unflatten__`.

    `inner[i]` is the spec of the tensor in `names[i]` if it is a wrapper too, None if it is plain. `shape` and `stride`
    are capture's, `sizes` the expressions of varying sizes. `constants`: (path, value) of objects that are no tensors
    (a device mesh). `carries[i]`: plain tensor i, of all in order, has a dtype with gradients. `is_whole`: its gradient
    is a plain tensor of its shape, not a wrapper. A further input without elements, after the plain tensors, then
    carries the wrapper's gradient. `carriers`: its gradient is a wrapper of other plain tensors; an input without
    elements then carries the gradient of each. `keeps_parts`: the function made the wrapper of tensors with histories
    of their own, and the wrapper is a leaf. `of`: a reference to the wrapper, if it is an input of a capture.
    """

    cls: type
    names: tuple[str, ...]
    metadata: Any
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    inner: tuple[WrapperSpec | None, ...]
    carries: tuple[bool, ...]
    requires_grad: bool = False
    is_leaf: bool = True
    is_parameter: bool = False
    is_whole: bool = False
    constants: tuple[tuple[str, Any], ...] = ()
    sizes: OuterSizes | None = None
    carriers: tuple[Carrier, ...] = ()
    keeps_parts: bool = False
    of: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def is_apart(self) -> bool:
        """Whether further inputs carry the gradients, not the plain tensors."""
        return self.is_whole or bool(self.carriers)

    @property
    def count(self) -> int:
        """The number of inputs of a graph that stand for the wrapper."""
        return len(self.carries) + self.is_whole + len(self.carriers)

    def paths(self) -> list[str]:
        """The path of each plain tensor from the wrapper: `.a`, or `.a.data`."""
        carriers = [f".grad{carrier.path}" for carrier in self.carriers]
        return [*self._inner_paths(), *([""] if self.is_whole else []), *carriers]

    def _inner_paths(self) -> Iterator[str]:
        for name, spec in zip(self.names, self.inner, strict=True):
            if spec is None:
                yield f".{name}"
            else:
                yield from (f".{name}{rest}" for rest in spec._inner_paths())

    def may_vary(self, part: int, dim: int) -> bool:
        """Whether a plain tensor's size may be symbolic; sizes of parameters may not.

        A ragged size can be multiplied by plain numbers only, so in a jagged tensor only sizes by the batch may be.
        """
        if self.is_parameter or part >= len(self.carries) + self.is_whole:
            return False
        return not is_jagged(self.cls) or dim == (
            self.metadata["ragged_idx"] - 1 if self.names[part] == CARRYING else 0
        )

    def varies(self, part: int) -> bool:
        """Whether the variable sizes of a plain tensor vary from the first call on: jagged ones, but for the batch."""
        return is_jagged(self.cls) and self.names[part] not in ("_offsets", "_lengths")

    def layout(self, parts: Sequence[torch.Tensor]) -> tuple[Any, Any]:
        """The size and strides that a wrapper around these plain tensors has."""
        return (torch.Size(self.shape), self.stride) if self.sizes is None else self.sizes.of(parts)

    def fits(self, value: Any) -> bool:
        """Whether a value is a wrapper like this one, but for the sizes of its plain tensors."""
        tensor: Any = value
        return (
            type(value) is self.cls
            and tensor.requires_grad is self.requires_grad
            and tensor.is_leaf is self.is_leaf
            and is_parameter(tensor) is self.is_parameter
            and self.has_structure_of(tensor)
            and tensor.stride() == self.layout(() if self.sizes is None else parts_of(tensor))[1]
        )

    def has_structure_of(self, tensor: Any, *, of_any_size: bool = False) -> bool:
        """Whether a wrapper of equal class has equal metadata, sizes and inner classes."""
        names, metadata = tensor.__tensor_flatten__()
        if (
            len(names) != len(self.names) + len(self.constants)
            or len(tensor.shape) != len(self.shape)
            or not self.has_metadata(metadata)
        ):
            return False
        if not all(_is_same(getattr(tensor, name), value) for name, value in self.constants):
            return False
        for name, spec in zip(self.names, self.inner, strict=True):
            part = getattr(tensor, name)
            if spec is None:
                if type(part) not in _PLAIN and is_traceable_wrapper_subclass(part):
                    return False
            elif type(part) is not spec.cls or not spec.has_structure_of(part, of_any_size=of_any_size):
                return False
        if of_any_size:
            return True
        size: Any = tensor.shape
        return bool(size == self.layout(() if self.sizes is None else parts_of(tensor))[0])

    def has_metadata(self, metadata: Any) -> bool:
        """Whether a second wrapper's metadata are equal, as its class defines equality."""
        if is_jagged(self.cls):
            return bool(self.metadata["ragged_idx"] == metadata["ragged_idx"])
        guard = getattr(self.cls, "__metadata_guard__", None)
        try:
            return bool(guard(self.metadata, metadata) if guard is not None else self.metadata == metadata)
        except Exception:  # from the user's comparison: the metadata count as different
            return False


def is_parameter(wrapper: Any) -> bool:
    """Whether `torch.nn.Parameter` was called on the wrapper; it keeps its own class."""
    return bool(getattr(wrapper, "_is_param", False))


def spec_of(wrapper: Any, *, is_whole: bool = False) -> WrapperSpec:
    """The spec of a wrapper. Raises `UnsupportedTensorError` if its sizes or metadata in a call can't be computed."""
    names, metadata = wrapper.__tensor_flatten__()
    inner: list[WrapperSpec | None] = []
    carries: list[bool] = []
    held = [(name, getattr(wrapper, name)) for name in names]
    constants = tuple((name, value) for name, value in held if not isinstance(value, torch.Tensor))
    parts = {name: value for name, value in held if isinstance(value, torch.Tensor)}
    jagged = is_jagged(type(wrapper))
    if jagged:
        metadata = {**metadata, "requires_grad": False}
    for name, part in parts.items():
        spec = spec_of(part) if is_wrapper(part) else None
        inner.append(spec)
        is_inexact = part.dtype.is_floating_point or part.dtype.is_complex
        carries += [is_inexact and not (jagged and name != CARRYING)] if spec is None else spec.carries
    if has_symbolic(metadata):
        raise UnsupportedTensorError(
            f"the metadata of a {type(wrapper).__qualname__} hold a size that varies from call to call. Compile with "
            "dynamic=False."
        )
    shape, stride = tuple(wrapper.shape), tuple(wrapper.stride())
    ragged = list(parts).index(ragged_source(tuple(parts))) if jagged else None
    sizes = outer_sizes(type(wrapper), shape, stride, parts_of(wrapper), ragged)
    layout = concrete_sizes(shape), concrete_sizes(stride), wrapper.dtype, wrapper.device
    flags = wrapper.requires_grad, wrapper.is_leaf, is_parameter(wrapper), is_whole
    inside = tuple(inner), tuple(carries)
    return WrapperSpec(type(wrapper), tuple(parts), metadata, *layout, *inside, *flags, constants, sizes)


def bare_spec(wrapper: Any) -> WrapperSpec:
    """The spec of a wrapper without regard to its history."""
    return dataclasses.replace(spec_of(wrapper), requires_grad=False, is_leaf=True, is_parameter=False)


def rebuilt(spec: WrapperSpec, parts: Sequence[torch.Tensor]) -> Any:
    """The wrapper around these plain tensors, without history."""
    inner: dict[str, Any] = {}
    rest = list(parts)
    for name, part in zip(spec.names, spec.inner, strict=True):
        count = 1 if part is None else len(part.carries)
        inner[name] = rest[0] if part is None else rebuilt(part, rest[:count])
        rest = rest[count:]
    inner.update(spec.constants)
    shape, stride = spec.layout(parts)
    return spec.cls.__tensor_unflatten__(inner, spec.metadata, shape, stride)  # type: ignore[attr-defined]


def _is_same(value: Any, constant: Any) -> bool:
    return value is constant or (type(value) is type(constant) and bool(value == constant))


# -------------------------------------------------------------------- sizes
# Sizes and strides of wrappers that vary from call to call: expressions of the sizes of the plain tensors inside.


Sizes = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class OuterSizes:
    """`shape` and `stride` of a wrapper: plain numbers, and Python expressions of `parts`, its plain tensors."""

    shape: tuple[int | str, ...]
    stride: tuple[int | str, ...]

    def of(self, parts: Sequence[torch.Tensor]) -> tuple[torch.Size, Sizes]:
        """The size and the strides of the wrapper around these plain tensors."""
        shape, stride = _function(f"{_row(self.shape)}, {_row(self.stride)}")(parts)
        return torch.Size(shape), stride


def outer_sizes(
    cls: type, shape: Sizes, stride: Sizes, parts: Sequence[torch.Tensor], ragged: int | None = None
) -> OuterSizes | None:
    """The sizes of a wrapper as expressions of the sizes of `parts`; None if no size is symbolic. `ragged`: the part
    that ragged sizes belong to.

    Raises `UnsupportedTensorError` if a size depends on one that no plain tensor has.
    """
    if not has_symbolic(shape) and not has_symbolic(stride):
        return None
    places: dict[Any, str] = {None: f"ragged_size(parts[{ragged}], {{}})"}
    for number, part in enumerate(parts):
        _note(places, part.shape, f"parts[{number}].shape[{{}}]")
    for number, part in enumerate(parts):
        _note(places, part.stride(), f"parts[{number}].stride({{}})")
    return OuterSizes(_texts(cls, shape, places), _texts(cls, stride, places))


def _note(places: dict[Any, str], numbers: Any, place: str) -> None:
    for dim, number in enumerate(numbers):
        if is_symbolic(number):
            places.setdefault(number.node.expr, place.format(dim))


def _texts(cls: type, numbers: Sizes, places: dict[Any, str]) -> tuple[int | str, ...]:
    texts: list[int | str] = []
    for number in numbers:
        if not is_symbolic(number):
            texts.append(number)
            continue
        if is_ragged(number):
            texts.append(places[None].format(coefficient(number)))
            continue
        expression = number.node.expr
        if expression in places:
            texts.append(places[expression])
            continue
        if not all(symbol in places for symbol in expression.free_symbols):
            raise UnsupportedTensorError(
                f"a {cls.__qualname__} has a size that varies from call to call and that no tensor inside it has. "
                "Compile with dynamic=False."
            )
        texts.append(expression_text(expression, places, _global))
    return tuple(texts)


def concrete_sizes(numbers: Sizes) -> tuple[int, ...]:
    """Sizes as plain numbers: a symbolic size has its value at capture, a ragged size is -1."""
    return tuple(-1 if is_ragged(number) else concrete(number) for number in numbers)


def _row(numbers: Sizes) -> str:
    return "".join(["(", *(f"{number}, " for number in numbers), ")"])


def _global(name: str, value: Any) -> str:
    _globals[name] = value
    return name


_globals: dict[str, Any] = {"ragged_size": ragged_size}


@functools.lru_cache(maxsize=1024)
def _function(text: str) -> Callable[[Sequence[torch.Tensor]], Any]:
    source = f"def sizes(parts):\n    return {text}\n"
    return compile_source(source, "sizes", dict(_globals), label="sizes of a wrapper")


def with_sizes_of(spec: WrapperSpec, parts: Sequence[Any]) -> WrapperSpec:
    """`spec` for a wrapper around plain stand-ins with some varying sizes.

    A size of the wrapper is taken to be the one of a plain tensor that it is equal to: guards look at each call.
    """
    parts = parts[: len(spec.carries)]
    varying = [(dim, size) for part in parts for dim, size in enumerate(part.shape) if is_symbolic(size)]
    if not varying or is_jagged(spec.cls):  # its class computes its sizes
        return spec
    inner: list[WrapperSpec | None] = []
    first = 0
    for held in spec.inner:
        count = 1 if held is None else len(held.carries)
        inner.append(None if held is None else with_sizes_of(held, parts[first : first + count]))
        first += count
    shape = tuple(_same_size(size, dim, varying) for dim, size in enumerate(spec.shape))
    sizes = outer_sizes(spec.cls, shape, following_strides(spec.shape, spec.stride, shape), parts)
    return dataclasses.replace(spec, sizes=sizes, inner=tuple(inner))


def _same_size(size: int, dim: int, varying: Sequence[tuple[int, Any]]) -> Any:
    equal = [(other_dim != dim, other) for other_dim, other in varying if concrete(other) == size]
    return min(equal, key=lambda pair: pair[0])[1] if equal else size
