"""Symbolic sizes of a capture: varying sizes of inputs, and sizes that operators find by looking at values.

The first capture takes a size that an operator finds (`nonzero`, a mask, `unique`) for a part of the program, see
decisions.py. When the size differed at the next capture, it becomes a symbol: the graph itself computes its value and
hands it to the runtime among its outputs. There the conditions found during the capture are tested, before any effect
of the call is visible. 0 and 1 never are symbols.

Only a table of operators can tell the result and dimension of the size; any other size stays a part of the program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..._torch.graphs import symbol_of
from ..._torch.symbols import Size, SymbolTable, TracedInt, concrete, same_numbers
from ...graph.meta import TensorSpec, contiguous_strides, following_strides, memory_order, strides_in_order
from ...graph.signature import SizeSymbol
from ..tape.tape import Entry, entries_in
from .numbers import Numbers

if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

aten = torch.ops.aten

Shape = tuple["Size | None", ...]  # with None for the size that depends on values


class SizeDivergedError(RuntimeError):
    """Raised inside of a graph: its sizes differ from the call's."""


class SizedCall:
    """An operator with result sizes that depend on values, for a graph with known sizes: raises for any others."""

    def __init__(self, op: Any, shapes: tuple[object, ...]) -> None:
        self.op = op
        self.shapes = shapes
        self.__name__ = self.__qualname__ = "sized_" + str(op.overloadpacket.__name__).strip("_")
        self.__module__ = __name__

    def __call__(self, *args: object, **kwargs: object) -> Any:
        result = self.op(*args, **kwargs)
        shapes = shapes_of(result)
        if shapes != self.shapes:
            raise SizeDivergedError(f"`{self.op}` gave sizes {shapes} where the graph was captured for {self.shapes}")
        return result

    def __repr__(self) -> str:
        return f"sized_call({self.op}, {self.shapes})"


class OpenCall:
    """A call of a graph that serves every size of two and more: raises where there are fewer elements.

    `layouts` has for each result the memory order of its dimensions, outermost first; None besides tensors.
    """

    def __init__(self, op: Any, layouts: tuple[tuple[int, ...] | None, ...], size: tuple[int | None, int]) -> None:
        self.op = op
        self.layouts = layouts
        self.size = size  # the result and the dimension that have the size (result None: there is one result)
        self.__name__ = self.__qualname__ = "open_" + str(op.overloadpacket.__name__).strip("_")
        self.__module__ = __name__

    def __call__(self, *args: object, **kwargs: object) -> Any:
        result = self.op(*args, **kwargs)
        index, dim = self.size
        first = result if index is None else result[index]
        if first.shape[dim] < 2:
            raise SizeDivergedError(f"`{self.op}` gave the size {first.shape[dim]}; this size has a separate graph")
        for value, order in zip(result if index is not None else (result,), self.layouts, strict=True):
            if order is not None and value.stride() != strides_in_order(value.shape, order):
                raise SizeDivergedError(f"`{self.op}` gave strides {value.stride()}, not in the order of the capture")
        return result

    def __repr__(self) -> str:
        return f"open_call({self.op})"


def shapes_of(result: object) -> tuple[Any, ...]:
    """The shape of each result; None for a result that is no tensor."""
    values = result if isinstance(result, (tuple, list)) else (result,)
    return tuple(_shape_of(value) for value in values)


def _shape_of(value: object) -> tuple[object, ...] | None:
    if isinstance(value, (tuple, list)):
        return shapes_of(value)
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dimensions, outermost first, of densely lying elements."""
    order = memory_order(TensorSpec.of(tensor))
    return order if tensor.stride() == strides_in_order(tensor.shape, order) else None


@dataclasses.dataclass(frozen=True, slots=True)
class OpenResult:
    """A result with a size that stays open: its specs, and where the size is (result, or None for one; dimension).

    `number` is the symbolic size; `is_new` that no operator before this one had it.
    """

    target: Any
    specs: Any
    place: tuple[int | None, int]
    number: Any
    is_new: bool


class OpenSizes:
    """The sizes of one capture that depend on values and stay open.

    `seen` has, by line, the numbers of elements found there by earlier captures; a size is open where a new number is
    found. None: no size is. `always`: every size is, from the beginning.
    """

    def __init__(self, numbers: Numbers, seen: Mapping[str, frozenset[int]] | None, *, always: bool = False) -> None:
        self.numbers = numbers
        self.seen = seen
        self.always = always
        self.made: dict[Entry, Any] = {}  # by the entry that gives a size: that size
        self.counts: dict[Entry, Size] = {}  # by the entry of a mask: how many of its elements are chosen

    def are_open(self, where: str, value: int) -> bool:
        """Whether a number of elements, found at the program's line, may differ in the next call."""
        if self.seen is None or value < 2:
            return False
        return self.always or bool(self.seen.get(where, frozenset()) - {value})

    def open(self, entry: Entry, result: object, where: str) -> OpenResult | None:
        """`result`, from the operator of `entry` in the call, with its size open; None where the size can't be."""
        shapes = _open_shapes(entry, result)
        if shapes is None:
            return None
        place, size = _find_size(shapes, result)
        mask = mask_counted(entry)
        known = None if mask is None else self.counts.get(mask)
        if not isinstance(known, torch.SymInt):
            known = None
        if known is None and not self.are_open(
            where, next(t for t in _all(result) if isinstance(t, torch.Tensor)).numel()
        ):
            return None
        layouts = tuple(_memory_order(t) if isinstance(t, torch.Tensor) else None for t in _all(result))
        if place is None or any(o is None for o, s in zip(layouts, shapes, strict=True) if s is not None):
            return None
        number = known if known is not None else self.numbers.size(size, where)
        if number is None:
            return None
        if mask is not None:
            self.counts[mask] = number
        specs = [_spec(t, s, number) for t, s in zip(_all(result), shapes, strict=True)]
        target = OpenCall(entry.target, layouts, place)
        one = isinstance(result, torch.Tensor)
        return OpenResult(target, specs[0] if one else tuple(specs), place, number, known is None)

    def remember(self, entry: Entry, result: object) -> None:
        """`result` has the size that a graph for this size alone has: it tells how many elements a mask chooses."""
        mask, shapes = mask_counted(entry), _open_shapes(entry, result)
        if mask is not None and shapes is not None:
            self.counts.setdefault(mask, _find_size(shapes, result)[1])

    def picked(self, entry: Entry) -> TensorSpec | None:
        """The pick of a mask with chosen elements counted earlier, from elements that nobody knows yet."""
        mask = mask_counted(entry)
        number = None if mask is None else self.counts.get(mask)
        source = entry.args[0].spec
        if number is None or not isinstance(source, TensorSpec) or entry.target is aten.nonzero.default:
            return None
        shape = (number,) if entry.target is aten.masked_select.default else _shape_picked(entry, number)
        if shape is None or not same_numbers(source.stride, contiguous_strides(source.shape)):
            return None  # it is laid out as its source is
        return source.fresh(shape)


def _all(result: object) -> tuple[Any, ...]:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _spec(tensor: object, shape: Shape | None, number: Size) -> TensorSpec | None:
    if not isinstance(tensor, torch.Tensor):
        return None
    spec = TensorSpec.of(tensor)
    if shape is None:
        return spec
    sizes = tuple(number if size is None else size for size in shape)
    return TensorSpec(sizes, following_strides(spec.shape, spec.stride, sizes), spec.dtype, spec.device, spec.offset)


def _find_size(shapes: tuple[Shape | None, ...], result: object) -> tuple[tuple[int | None, int] | None, int]:
    """The first place of the open size, and its present value."""
    for index, (shape, tensor) in enumerate(zip(shapes, _all(result), strict=True)):
        if shape is not None and None in shape:
            dim = shape.index(None)
            return (None if isinstance(result, torch.Tensor) else index, dim), int(tensor.shape[dim])
    return None, 0


# -------------------------------------------------------------------- which dimensions depend on values


def mask_counted(entry: Entry) -> Entry | None:
    """The mask with the chosen elements that the operator counts, and nothing besides."""
    if entry.target is aten.nonzero.default:
        mask = entry.args[0]
    elif entry.target is aten.masked_select.default:
        mask = entry.args[1]
        if isinstance(mask.spec, TensorSpec) and mask.spec.shape != entry.args[0].spec.shape:
            return None  # broadcast
    elif entry.target is aten.index.Tensor and len(list(entries_in(entry.args[1]))) == 1:
        (mask,) = entries_in(entry.args[1])
    else:
        return None
    return mask if isinstance(mask, Entry) and mask.tensor.dtype is torch.bool else None


def _open_shapes(entry: Entry, result: object) -> tuple[Shape | None, ...] | None:
    """For each result its shape with None for the size that depends on values; None for an operator not known here.

    A result without an entry of its own is constant.
    """
    rule = _RULES.get(entry.target)
    shapes = None if rule is None else rule(entry, result)
    if shapes is None:
        return None
    for shape, tensor in zip(shapes, _all(result), strict=True):
        if shape is not None:
            now = [concrete(size) for size in shape]
            if len(now) != tensor.dim() or any(a not in (None, b) for a, b in zip(now, tensor.shape, strict=True)):
                return None
    return tuple(shapes)


Rule = Callable[[Entry, object], "list[Shape | None] | None"]


def _row(entry: Entry, result: object) -> list[Shape | None]:
    return [(None,)]


def _positions(entry: Entry, result: Any) -> list[Shape | None]:
    return [(None, result.shape[1])]


def _picked(entry: Entry, result: object) -> list[Shape | None] | None:
    shape = _shape_picked(entry, None)
    return None if shape is None else [shape]


def _shape_picked(entry: Entry, number: Any) -> Any:
    """The shape of one mask's pick, with `number` elements chosen."""
    indices = entry.args[1]
    if len(list(entries_in(indices))) != 1:
        return None
    at = next(i for i, index in enumerate(indices) if index is not None)
    source, mask = entry.args[0].spec, indices[at].spec
    if mask.dtype is not torch.bool or not mask.shape:
        return None
    return (*source.shape[:at], number, *source.shape[at + len(mask.shape) :])


def _unique(entry: Entry, result: Any) -> list[Shape | None] | None:
    source = entry.args[0].spec
    _, inverse, counts = result
    return [
        (None,),
        tuple(source.shape) if inverse.dim() == len(source.shape) and inverse.numel() else None,
        (None,) if counts.numel() else None,
    ]


def _unique_along(entry: Entry, dim: int, result: Any) -> list[Shape | None]:
    source = entry.args[0].spec
    dim %= len(source.shape)
    _, inverse, counts = result
    return [
        (*source.shape[:dim], None, *source.shape[dim + 1 :]),
        (source.shape[dim],) if inverse.numel() else None,
        (None,) if counts.numel() else None,
    ]


_OF_ONE_ROW = (aten.masked_select.default, aten.repeat_interleave.Tensor, aten.bincount.default)
_RULES: dict[object, Rule] = {
    **dict.fromkeys(_OF_ONE_ROW, _row),
    aten.nonzero.default: _positions,
    aten.index.Tensor: _picked,
    aten._unique2.default: _unique,
    aten.unique_consecutive.default: lambda e, r: _unique(e, r) if len(e.args) < 4 and "dim" not in e.kwargs else None,
    aten.unique_dim.default: lambda e, r: _unique_along(e, e.args[1], r),
}


# -------------------------------------------------------------------- sizes of inputs
# The dimensions of inputs that vary, and the consequences.


Limits = tuple["int | None", "int | None"]


class SizeSymbols:
    """The symbols made for the sizes of inputs; `bound` of the table says (entry of the input, dimension)."""

    def __init__(self, env: ShapeEnv | None = None) -> None:
        self.table = SymbolTable(env)

    def spec(
        self, spec: TensorSpec, dims: Mapping[int, Limits], name: str, entry: Any, padded: Container[int] = ()
    ) -> TensorSpec:
        """`spec` with symbols for the sizes at `dims`, and the strides that follow, with a padding at `padded`."""
        shape = [
            self.table.symbol(size, f"{name}.size({dim})", (entry, dim), dims[dim]) if dim in dims else size
            for dim, size in enumerate(spec.shape)
        ]
        stride = following_strides(spec.shape, spec.stride, shape, padded)
        return TensorSpec(tuple(shape), stride, spec.dtype, spec.device, spec.offset, conj=spec.conj, neg=spec.neg)

    def given(self, numbers: Iterable[Any], entry: Any) -> None:
        """Sizes that are symbolic already: a fake tensor's, or one number (dimension None)."""
        for dim, number in numbers:
            symbol = symbol_of(number)
            if symbol is not None:
                self.table.bound.setdefault(symbol, (entry, dim))

    def number(self, value: int, name: str, entry: object, *, is_item: bool) -> Any:
        """A symbol for an argument that is an integer; the plain integer, where it can't be one."""
        number = self.table.number(value, name, (entry, None), is_item=is_item)
        return TracedInt(number.node) if isinstance(number, torch.SymInt) else value

    def signature(self, number: Mapping[Entry, int]) -> tuple[SizeSymbol, ...]:
        """The symbols' part of the signature; `number` has each input's position by its entry."""
        return tuple(SizeSymbol(symbol, number[entry], dim) for symbol, (entry, dim) in self.table.bound.items())
