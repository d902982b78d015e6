"""The steps that random programs are made of: a table of ops, each with a way to write one that fits a tensor.

An op's `write` gives Python source for one use of it on a tensor of the pool, with parameters that are valid for
the shape at hand, most of the time: the growing program runs the line and drops it when it raises.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

Suits = Callable[[torch.Tensor], bool]
FLOATS = (torch.float32, torch.float64)
MOST_ELEMENTS = 64


class Pool:
    """The tensors that a growing program has at hand, by the expression that names each."""

    def __init__(self, chooser: Any) -> None:
        self.choose = chooser
        self.names: dict[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.names[name]

    def add(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.numel() <= MOST_ELEMENTS:
                self.names[name] = value
        elif isinstance(value, tuple | list):
            for i, part in enumerate(value[:3]):
                self.add(f"{name}[{i}]", part)

    def name(self, chooser: Any) -> str:
        return chooser.choice(list(self.names))

    def partner(self, tensor: torch.Tensor) -> str:
        """A tensor that broadcasts to the shape of this one, or a number."""
        fits = [name for name, other in self.names.items() if _broadcasts(other.shape, tensor.shape)]
        return self.choose.choice([*fits, "2"])

    def tensor_partner(self, tensor: torch.Tensor) -> str:
        same = [name for name, other in self.names.items() if _broadcasts(other.shape, tensor.shape)]
        return self.choose.choice(same)

    def source(self, tensor: torch.Tensor) -> str:
        """A partner to copy from."""
        fits = [name for name, other in self.names.items() if _broadcasts(other.shape, tensor.shape)]
        return self.choose.choice([*fits, _full_of_twos(tensor)])

    def dim(self, tensor: torch.Tensor) -> int:
        return self.choose.integer(0, tensor.dim() - 1) - tensor.dim() * self.choose.chance(30)

    def index(self, size: int) -> int:
        return self.choose.integer(0, max(size - 1, 0)) - size * self.choose.chance(20)

    def number(self) -> str:
        return self.choose.choice(["2", "-1", "0", "0.5"])


def _full_of_twos(tensor: torch.Tensor) -> str:
    """A source that fits anything."""
    return f"torch.full({tuple(tensor.shape)}, 2, dtype={tensor.dtype})"


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, wanted) for size, wanted in pairs)


@dataclasses.dataclass(frozen=True)
class Op:
    name: str
    kind: str
    write: Callable[[str, torch.Tensor, Pool], str]
    suits: Suits = lambda t: True
    gives: bool = True


# What a tensor must be like.
def _any(t: torch.Tensor) -> bool:
    return True


def _dims(least: int) -> Suits:
    return lambda t: t.dim() >= least and t.numel() > 0


def _floating(t: torch.Tensor) -> bool:
    return t.dtype in FLOATS


def _inexact(t: torch.Tensor) -> bool:
    return t.dtype in FLOATS or t.is_complex()


def _complex(t: torch.Tensor) -> bool:
    return t.is_complex()


def _pairs(t: torch.Tensor) -> bool:
    return _floating(t) and t.shape[-1:] == (2,)


def _floating_dims(t: torch.Tensor) -> bool:
    return _floating(t) and t.dim() > 0


def _real_number(t: torch.Tensor) -> bool:
    return not t.is_complex() and t.dtype != torch.bool


def _real_dims(t: torch.Tensor) -> bool:
    return _real_number(t) and t.dim() > 0  # without dimensions a mask is read as a Python bool


def _matrix(t: torch.Tensor) -> bool:
    return t.dim() == 2


def _has_room(t: torch.Tensor) -> bool:
    """Its elements fit behind its offset: resizing makes no memory that nobody wrote."""
    return 0 < t.numel() <= t.untyped_storage().nbytes() // t.itemsize - t.storage_offset()


# ------------------------------------------------------------------------------------------------ views
def _other_shape(t: torch.Tensor, pool: Pool) -> tuple[int, ...]:
    count = t.numel()
    divisors = [d for d in range(1, count + 1) if count % d == 0] or [1]
    first = pool.choose.choice(divisors)
    return pool.choose.choice([(count,), (first, count // first), (1, first, count // first), (-1, 1)])


def _slice(name: str, t: torch.Tensor, pool: Pool, dim: int) -> str:
    size = t.shape[dim]
    start, step = pool.choose.integer(0, size), pool.choose.choice(["", ":2"])
    stop = pool.choose.integer(start, size)
    return f"{start}:{stop}{step}"


def _room(t: torch.Tensor) -> int:
    """How many elements there are from its first to its last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether some of its elements are in one place."""
    if t.numel() == 0:
        return False
    places = torch.arange(_room(t)).as_strided(t.shape, t.stride(), 0)
    return places.unique().numel() < t.numel()


def _as_strided(name: str, t: torch.Tensor, pool: Pool) -> str:
    room = _room(t)
    size = pool.choose.integer(1, max(1, min(room, 4)))
    stride = pool.choose.integer(1, max(1, (room - 1) // size))
    offset = pool.choose.integer(0, max(0, room - 1 - (size - 1) * stride))
    return f"{name}.as_strided(({size},), ({stride},), {t.storage_offset() + offset})"


def _windows(name: str, t: torch.Tensor, pool: Pool) -> str:
    """Rows that have elements in common, some in one place or in an order of their own."""
    room = _room(t)
    size = pool.choose.integer(2, min(room, 3))
    strides = (pool.choose.integer(0, 2), pool.choose.integer(0, 2))
    span = 1 + (size - 1) * sum(strides)
    if span > room:
        strides, span = (1, 0), size
    offset = t.storage_offset() + pool.choose.integer(0, room - span)
    return f"{name}.as_strided(({size}, {size}), {strides}, {offset})"


def _has_memory(t: torch.Tensor) -> bool:
    return t.numel() > 0 and _room(t) > 1


def _on_storage(name: str, t: torch.Tensor, pool: Pool) -> str:
    """Shares memory, and autograd does not know."""
    room = t.untyped_storage().nbytes() // t.itemsize
    size = pool.choose.integer(1, max(1, room))
    offset = pool.choose.integer(0, max(0, room - size))
    return f"torch.empty(0, dtype={t.dtype}).set_({name}.untyped_storage(), {offset}, ({size},), (1,))"


def _permute(name: str, t: torch.Tensor, pool: Pool) -> str:
    left, order = list(range(t.dim())), []
    while left:
        order.append(left.pop(pool.choose.integer(0, len(left) - 1)))
    return f"{name}.permute({tuple(order)})"


def _narrow(name: str, t: torch.Tensor, pool: Pool) -> str:
    dim = pool.dim(t)
    start = pool.choose.integer(0, t.shape[dim] - 1)
    return f"{name}.narrow({dim}, {start}, {pool.choose.integer(1, t.shape[dim] - start)})"


def _unflatten(name: str, t: torch.Tensor, pool: Pool) -> str:
    dim = pool.dim(t)
    return f"{name}.unflatten({dim}, ({pool.choose.choice([1, 2])}, -1))"


def _unfold(name: str, t: torch.Tensor, pool: Pool) -> str:
    dim = pool.dim(t)
    return f"{name}.unfold({dim}, {pool.choose.integer(1, t.shape[dim])}, {pool.choose.integer(1, 2)})"


def _view_dtype(name: str, t: torch.Tensor, pool: Pool) -> str:
    options = [d for d in ("int32", "float32", "int64", "float64", "int16", "uint8") if d not in str(t.dtype)]
    return f"{name}.view(torch.{pool.choose.choice(options)})"


def _dim_view(template: str) -> Callable[[str, torch.Tensor, Pool], str]:
    def write(n: str, t: torch.Tensor, p: Pool) -> str:
        small = {"k": p.choose.integer(1, 2), "o": p.choose.integer(-1, 1)}
        return template.format(x=n, d=p.dim(t), e=p.dim(t), **small)

    return write


def _plain(template: str) -> Callable[[str, torch.Tensor, Pool], str]:
    return lambda n, t, p: template.format(x=n)


VIEWS = [
    Op("select", "view", lambda n, t, p: f"{n}[{p.index(t.shape[0])}]", _dims(1)),
    Op("slice", "view", lambda n, t, p: f"{n}[{_slice(n, t, p, 0)}]", _dims(1)),
    Op("slice last", "view", lambda n, t, p: f"{n}[..., {_slice(n, t, p, -1)}]", _dims(1)),
    Op("view", "view", lambda n, t, p: f"{n}.view({_other_shape(t, p)})"),
    Op("reshape", "view", lambda n, t, p: f"{n}.reshape({_other_shape(t, p)})"),
    Op("transpose", "view", _dim_view("{x}.transpose({d}, {e})"), _dims(2)),
    Op("t", "view", _plain("{x}.t()"), _matrix),
    Op("mT", "view", _plain("{x}.mT"), _dims(2)),
    Op("permute", "view", _permute, _dims(2)),
    Op("movedim", "view", _dim_view("{x}.movedim({d}, {e})"), _dims(2)),
    Op("narrow", "view", _narrow, _dims(1)),
    Op("squeeze", "view", _plain("{x}.squeeze()")),
    Op("squeeze dim", "view", _dim_view("{x}.squeeze({d})"), _dims(1)),
    Op("unsqueeze", "view", lambda n, t, p: f"{n}.unsqueeze({p.choose.integer(0, t.dim())})"),
    Op("none index", "view", _plain("{x}[None]")),
    Op("ellipsis index", "view", _plain("{x}[...]")),
    Op("expand", "view", lambda n, t, p: f"{n}.expand({(2, *t.shape)})"),
    Op("diagonal", "view", _dim_view("{x}.diagonal({o})"), _dims(2)),
    Op("unbind", "view", _dim_view("{x}.unbind({d})"), _dims(1)),
    Op("split", "view", _dim_view("{x}.split({k}, {d})"), _dims(1)),
    Op("chunk", "view", _dim_view("{x}.chunk(2, {d})"), _dims(1)),
    Op("tensor_split", "view", _dim_view("{x}.tensor_split(2, {d})"), _dims(1)),
    Op("as_strided", "view", _as_strided, _dims(0)),
    Op("unfold", "view", _unfold, _dims(1)),
    Op("windows", "view", _windows, _has_memory),
    Op("view dtype", "view", _view_dtype, lambda t: t.dtype != torch.bool),
    Op("view_as_real", "view", _plain("torch.view_as_real({x})"), _complex),
    Op("view_as_complex", "view", _plain("torch.view_as_complex({x})"), _pairs),
    Op("real", "view", _plain("{x}.real"), _complex),
    Op("imag", "view", _plain("{x}.imag"), _complex),
    Op("conj", "view", _plain("{x}.conj()"), _complex),
    Op("detach", "view", _plain("{x}.detach()")),
    Op("flatten", "view", _plain("{x}.flatten()")),
    Op("unflatten", "view", _unflatten, _dims(1)),
    Op("view_as", "view", _plain("{x}.view_as({x})")),
]


# --------------------------------------------------------------------------------------------- in place
def _change(template: str) -> Callable[[str, torch.Tensor, Pool], str]:
    return lambda n, t, p: template.format(x=n, s=p.number())


def _change_by(template: str) -> Callable[[str, torch.Tensor, Pool], str]:
    return lambda n, t, p: template.format(x=n, y=p.tensor_partner(t))


def _index_add(name: str, t: torch.Tensor, pool: Pool) -> str:
    index = pool.choose.integer(0, t.shape[0] - 1)
    return f"{name}.index_add_(0, torch.tensor([{index}]), torch.ones({(1, *t.shape[1:])}, dtype={t.dtype}))"


def _fill(name: str, t: torch.Tensor, pool: Pool) -> str:
    # PyTorch lets a bool tensor filled with a float that requires grad require grad: then nothing else works with it.
    value = pool.name(pool.choose)
    return f"{name}.fill_({value}{'' if t.is_floating_point() or t.is_complex() else '.detach()'}.sum())"


def _assign(name: str, t: torch.Tensor, pool: Pool) -> str:
    places = [f"{pool.index(t.shape[0])}", _slice(name, t, pool, 0), f"..., {pool.index(t.shape[-1])}"]
    where = pool.choose.choice(places)
    try:
        part = eval(f"t[{where}]", {"t": t})
    except (IndexError, RuntimeError):
        part = t
    # As in `_fill`: a source without dimensions is filled in.
    return f"{name}[{where}] = {pool.source(part)}{'' if _inexact(t) else '.detach()'}"


IN_PLACE = [
    Op("add_", "in-place", _change("{x}.add_({s})"), gives=False),
    Op("mul_", "in-place", _change("{x}.mul_({s})"), gives=False),
    Op("add_ tensor", "in-place", _change_by("{x}.add_({y})"), gives=False),
    Op("mul_ tensor", "in-place", _change_by("{x}.mul_({y})"), gives=False),
    Op("copy_", "in-place", lambda n, t, p: f"{n}.copy_({p.source(t)})", gives=False),
    Op("iadd", "in-place", _change("{x} += {s}"), gives=False),
    Op("zero_", "in-place", _change("{x}.zero_()"), gives=False),
    Op("fill_", "in-place", _change("{x}.fill_({s})"), gives=False),
    Op("fill_ tensor", "in-place", _fill, gives=False),
    Op("neg_", "in-place", _change("{x}.neg_()"), gives=False),
    Op("sin_", "in-place", _change("{x}.sin_()"), _inexact, gives=False),
    Op("relu_", "in-place", _change("{x}.relu_()"), _real_number, gives=False),
    Op("clamp_", "in-place", _change("{x}.clamp_(-1, 1)"), _real_number, gives=False),
    Op("masked_fill_", "in-place", _change("{x}.masked_fill_({x} == {s}, {s})"), gives=False),
    Op("masked_fill_ sign", "in-place", _change("{x}.masked_fill_({x} > 0, {s})"), _real_number, gives=False),
    Op("index_add_", "in-place", _index_add, _dims(1), gives=False),
    Op("index_fill_", "in-place", _change("{x}.index_fill_(0, torch.tensor([0]), {s})"), _dims(1), gives=False),
    Op("assign", "in-place", _assign, _dims(1), gives=False),
    Op("assign list", "in-place", _change("{x}[[0]] = {s}"), _dims(1), gives=False),
    Op("assign mask", "in-place", _change("{x}[{x} > 0] = {s}"), _real_dims, gives=False),
    Op("t_", "in-place", _change("{x}.t_()"), _matrix, gives=False),
    Op("transpose_", "in-place", _dim_view("{x}.transpose_({d}, {e})"), _dims(2), gives=False),
    Op("unsqueeze_", "in-place", lambda n, t, p: f"{n}.unsqueeze_({p.choose.integer(0, t.dim())})", gives=False),
    Op("squeeze_", "in-place", _change("{x}.squeeze_()"), gives=False),
    Op("result of add_", "in-place", _change("{x}.add_({s})")),
    Op("exchange", "in-place", lambda n, t, p: f"{n}.lerp_({p.source(t)}, 0.5)", _floating, gives=False),
    Op("clip under a view", "in-place", _change("{x}.view(-1).clamp_(-1, 1)"), _real_number, gives=False),
    Op("detached change", "in-place", _change("{x}.detach().add_({s})"), gives=False),
]


def _scatter(name: str, t: torch.Tensor, pool: Pool) -> str:
    index = f"torch.full({tuple(t.shape)}, {pool.choose.integer(0, t.shape[0] - 1)})"
    return f"{name}.scatter_(0, {index}, {pool.tensor_partner(t)})"


def _put(name: str, t: torch.Tensor, pool: Pool) -> str:
    index = pool.choose.integer(0, t.shape[0] - 1)
    accumulate = pool.choose.chance(50)
    return f"{name}.index_put_((torch.tensor([0, {index}]),), {pool.source(t.detach()[:1])}, accumulate={accumulate})"


def _mul_out(name: str, t: torch.Tensor, pool: Pool) -> str:
    fits = [other for other, value in pool.names.items() if value.shape == t.shape]
    return f"torch.mul({pool.choose.choice(fits)}, 2, out={name})"


def _index_copy(name: str, t: torch.Tensor, pool: Pool) -> str:
    index = pool.choose.integer(0, t.shape[0] - 1)
    return f"{name}.index_copy_(0, torch.tensor([{index}]), {name}[:1])"


IN_PLACE += [
    Op("addcmul_", "in-place", _change_by("{x}.addcmul_({y}, {y})"), _real_number, gives=False),
    Op("add out", "in-place", _change_by("torch.add({x}, {y}, out={x})"), gives=False),
    Op("mul out", "in-place", _mul_out, gives=False),
    Op("copy_ flipped", "in-place", _change("{x}.copy_({x}.flip(0))"), _dims(1), gives=False),
    Op("copy_ transposed", "in-place", _change("{x}.copy_({x}.mT)"), _dims(2), gives=False),
    Op("foreach", "in-place", _change_by("torch._foreach_add_([{x}, {x}], [{y}, {y}])"), _real_number, gives=False),
    Op("foreach halves", "in-place", _change("torch._foreach_mul_([{x}[:1], {x}], 2)"), _dims(1), gives=False),
    Op("cumsum_", "in-place", _change("{x}.cumsum_(0)"), lambda t: _dims(1)(t) and t.dtype != torch.bool, gives=False),
    Op("scatter_", "in-place", _scatter, _dims(1), gives=False),
    Op("index_put_", "in-place", _put, _dims(1), gives=False),
    Op("index_copy_", "in-place", _index_copy, _dims(1), gives=False),
    Op("unfold under a write", "in-place", _change("{x}.unfold(0, {x}.shape[0], 1).mul_({s})"), _dims(1), gives=False),
    Op("shifted", "in-place", _change("{x}[1:].copy_({x}[:-1])"), _dims(1), gives=False),
    Op("shifted columns", "in-place", _change("{x}[..., 1:].add_({x}[..., :-1])"), _dims(1), gives=False),
]

RESHAPING = ("t_", "transpose_", "squeeze_", "unsqueeze_", "resize_", "resize_ smaller")


# ----------------------------------------------------------------------------------------- pure and random
def _concatenate(name: str, t: torch.Tensor, pool: Pool) -> str:
    return f"torch.cat([{name}, {name}], {pool.dim(t)})"


PURE = [
    Op("clone", "pure", _plain("{x}.clone()")),
    Op("times", "pure", _change("{x} * {s}")),
    Op("plus", "pure", _change_by("{x} + {y}")),
    Op("product", "pure", _change_by("{x} * {y}"), lambda t: t.dtype != torch.bool),
    Op("contiguous", "pure", _plain("{x}.contiguous()")),
    Op("to same", "pure", lambda n, t, p: f"{n}.to({t.dtype})"),
    Op("to double", "pure", _plain("{x}.to(torch.float64)"), lambda t: not t.is_complex()),
    Op("neg", "pure", _plain("-{x}"), lambda t: t.dtype != torch.bool),
    Op("sin", "pure", _plain("{x}.sin()"), _inexact),
    Op("relu", "pure", _plain("{x}.relu()"), _real_number),
    Op("sigmoid", "pure", _plain("{x}.sigmoid()"), _floating),
    Op("sum", "pure", _plain("{x}.sum()")),
    Op("sum dim", "pure", _dim_view("{x}.sum({d})"), _dims(1)),
    Op("cumsum", "pure", _dim_view("{x}.cumsum({d})"), _dims(1)),
    Op("greater", "pure", _plain("{x} > 0"), lambda t: not t.is_complex()),
    Op("where", "pure", _change_by("torch.where({x} > 0, {x}, {y})"), _real_number),
    Op("cat", "pure", _concatenate, _dims(1)),
    Op("stack", "pure", _change_by("torch.stack([{x}, {y}.expand_as({x})])")),
    Op("matmul", "pure", _plain("{x} @ {x}.t()"), lambda t: _matrix(t) and t.dtype != torch.bool),
    Op("flip", "pure", _dim_view("{x}.flip({d})"), _dims(1)),
    Op("list index", "pure", _plain("{x}[[0, 0]]"), _dims(1)),
    Op("zeros_like", "pure", _plain("torch.zeros_like({x})")),
    Op("two outputs", "pure", _dim_view("{x}.sort({d})"), lambda t: t.dim() > 0 and _real_number(t)),
    Op("softmax", "pure", _dim_view("{x}.softmax({d})"), _floating_dims),
    Op("layer norm", "pure", _plain("torch.nn.functional.layer_norm({x}, {x}.shape[-1:])"), _floating_dims),
    Op("constant", "pure", _plain("torch.arange(3.)"), _any),
    Op("shape arithmetic", "pure", _plain("{x} * {x}.shape[0]"), lambda t: _dims(1)(t) and t.dtype != torch.bool),
    Op("product of root", "pure", _plain("{x}.abs()"), _real_number),
    Op("power", "pure", _plain("{x} ** 2"), lambda t: t.dtype != torch.bool),
]

RANDOM = [
    Op("dropout", "random", _plain("torch.nn.functional.dropout({x}, 0.5)"), _floating),
    Op("dropout in place", "random", _plain("torch.nn.functional.dropout({x}, 0.5, inplace=True)"), _floating),
    Op("rand_like", "random", _plain("torch.rand_like({x})"), _floating),
    Op("rand", "random", lambda n, t, p: f"torch.rand({tuple(t.shape)})"),
    Op("bernoulli", "random", _plain("torch.bernoulli({x}.sigmoid())"), _floating),
    Op("bernoulli_", "random", _plain("{x}.bernoulli_(0.5)"), gives=False),
    Op("uniform_", "random", _plain("{x}.uniform_()"), _floating, gives=False),
    Op("normal_", "random", _plain("{x}.normal_()"), _floating, gives=False),
]

STORAGE = [
    Op("resize_", "storage", lambda n, t, p: f"{n}.resize_({t.numel()})", _has_room, gives=False),
    Op("resize_ smaller", "storage", lambda n, t, p: f"{n}.resize_({t.numel() - 1})", _has_room, gives=False),
    Op("data", "storage", lambda n, t, p: f"{n}.data", _any),
    Op("data assigned", "storage", lambda n, t, p: f"{n}.data = {n}.data.clone()", _any, gives=False),
    Op("requires_grad_", "storage", _plain("{x}.requires_grad_()"), _inexact, gives=False),
    Op("detach_", "storage", _plain("{x}.detach_()"), gives=False),
]

OPS = [*VIEWS, *IN_PLACE, *PURE, *RANDOM, *STORAGE]

# How an argument can share memory with an earlier one.
ARGUMENTS = [
    Op("same object", "argument", _plain("{x}")),
    Op("on its storage", "argument", _on_storage, lambda t: t.numel() > 0),
    Op("data", "argument", _plain("{x}.data")),
    *(op for op in VIEWS if op.name not in ("unbind", "split", "chunk", "tensor_split")),
    Op("one of many", "argument", _dim_view("{x}.unbind({d})[0]"), _dims(1)),
    Op("detach", "argument", _plain("{x}.detach()")),
    Op("detached leaf", "argument", _plain("{x}.detach().requires_grad_()"), _inexact),
    Op("half of it", "argument", _plain("{x}[:-1]"), lambda t: t.dim() > 0 and t.shape[0] > 1),
    Op("other half of it", "argument", _plain("{x}[1:]"), lambda t: t.dim() > 0 and t.shape[0] > 1),
]
