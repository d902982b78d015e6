"""An operator's behaviour on memory, read once from its schema: `OpInfo.of(op)`.

The recorder needs to know, for every operator it sees: does it return views of its arguments, does it write to
arguments, which operator computes its values without writing, does it draw random numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from ..._torch.nested import mapped
from ..._torch.ops import (
    OpOverload,
    has_composite_implicit_kernel,
    mkldnn_rnn_layer_for_training,
    overloads_of,
    tag_inplace_view,
    tag_random,
)

aten = torch.ops.aten

# Operators that write to arguments without saying so in their schema -> positions of these arguments, used when the
# predicate over the arguments holds.
_HIDDEN_WRITES: dict[OpOverload, tuple[int, ...]] = {
    aten.native_batch_norm.default: (3, 4),
    aten.cudnn_batch_norm.default: (3, 4),
    aten.miopen_batch_norm.default: (3, 4),
}

# Functional forms that no naming rule finds.
_FUNCTIONAL_NAMES = {"normal_": "normal_functional", "rrelu_with_noise_": "rrelu_with_noise_functional"}

# It returns its argument's memory, against its schema. So does `unsafe_split`, to which recurrent layers write in vain.
_UNDECLARED_VIEWS = {aten._unsafe_view.default}


def take_data(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.data`; no operator stands for it."""
    return tensor.data


# Views that change nothing below autograd.
CUTS = {aten.detach.default, take_data}  # these also cut the history off
IDENTITIES = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, take_data}

# These address the memory of their operand from its beginning, whatever the operand's offset.
BY_STRIDES = (aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default)

# Outputs that a kernel may leave undefined: Python can't pass an undefined tensor to an operator.
MAYBE_UNDEFINED: dict[object, tuple[int, ...]] = {aten.mkldnn_rnn_layer.default: (3,)}  # in grad mode it is defined

# Kernels that look at the grad mode: the operator to call for the way with gradients on.
IN_GRAD_MODE: dict[object, Any] = {aten.mkldnn_rnn_layer.default: mkldnn_rnn_layer_for_training}


def item_or_empty(values: tuple[Any, ...], index: int) -> torch.Tensor:
    """`values[index]`, or an empty tensor where the kernel left it undefined."""
    value = values[index]
    return torch.empty(0, dtype=torch.uint8) if value is None else value


@dataclasses.dataclass(frozen=True, slots=True)
class OpInfo:
    """The memory behaviour of one operator overload."""

    op: OpOverload
    is_view: bool
    is_identity: bool
    writes: tuple[int, ...]  # positions, in schema order, of the arguments written to
    is_metadata_write: bool  # t_, squeeze_, resize_, set_: changes sizes or storage, not elements
    is_random: bool
    is_composite: bool
    hidden_writes: tuple[int, ...]
    functional: OpOverload | None
    argument_names: tuple[str, ...]
    is_out: bool
    returns_written: tuple[int | None, ...]  # for each return: the position of the argument it is, or None


class CallOnCopies:
    """A functional form of a mutating operator that has none: runs it on copies, returns (results, copies).

    The returned tuple is the operator's results followed by the updated copies of the arguments at `writes`.
    """

    def __init__(self, op: OpOverload, writes: tuple[int, ...]) -> None:
        self.op = op
        self.writes = writes
        self.tags = op.tags  # random is random on copies too
        self.__name__ = "call_on_copies_" + op.__name__.replace(".", "_")
        self.__qualname__ = self.__name__
        self.__module__ = __name__

    def __call__(self, *args: object) -> tuple[object, ...]:
        names = [a.name for a in self.op._schema.arguments]
        kwonly = [a.kwarg_only for a in self.op._schema.arguments]
        call = [mapped(a, torch.Tensor, _copy) if i in self.writes else a for i, a in enumerate(args)]
        positional = [a for a, kw in zip(call, kwonly[: len(call)], strict=True) if not kw]
        keywords = {n: a for n, a, kw in zip(names[: len(call)], call, kwonly[: len(call)], strict=True) if kw}
        result = self.op(*positional, **keywords)
        results = () if result is None else result if isinstance(result, (tuple, list)) else (result,)
        return (*results, *(call[i] for i in self.writes))

    def __repr__(self) -> str:
        return f"call_on_copies({self.op}, {self.writes})"


def _copy(value: torch.Tensor) -> Any:
    if value.storage_offset() == 0 or value.numel() == 0 or value.is_conj() or value.is_neg():
        return aten.copy.default(value, value)  # unlike clone, keeps the strides of any layout
    # It keeps the offset, too: views are taken of a copy by strides, from its beginning.
    span = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return value.as_strided((span,), (1,)).clone().as_strided(value.shape, value.stride())


@functools.cache
def returns_tensors(op: OpOverload) -> bool:
    """Whether some result of `op` is a tensor or a list of tensors."""
    return any("Tensor" in str(value.type) for value in op._schema.returns)


def _types(op: OpOverload, *, drop_out: bool) -> list[str]:
    return [str(a.type) for a in op._schema.arguments if not (drop_out and a.is_out)]


def _functional_form(op: OpOverload, *, is_out: bool) -> OpOverload | None:
    """The overload with the operator's arguments (outputs apart) that writes to none."""
    namespace, _, name = op._schema.name.partition("::")
    names: list[str] = []
    if name in _FUNCTIONAL_NAMES:
        names.append(_FUNCTIONAL_NAMES[name])
    if is_out:
        names.append(name)
    elif name.startswith("__i") and name.endswith("__"):
        names.append(
            {"__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor"}.get(name, "__" + name[3:])
        )
    elif name.endswith("_"):
        names += [name[:-1], name + "functional"]
    names.append(name + "_functional")
    wanted = _types(op, drop_out=True)
    for candidate in names:
        for overload in overloads_of(namespace, candidate):
            if not overload._schema.is_mutable and _types(overload, drop_out=False) == wanted:
                return overload
    return None


@functools.cache
def op_info(op: OpOverload) -> OpInfo:
    """Facts about `op`, cached for the life of the process."""
    schema = op._schema
    arguments = schema.arguments
    writes = tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)
    is_out = any(a.is_out for a in arguments)
    is_metadata = tag_inplace_view(op) or schema.name in ("aten::resize_", "aten::resize_as_", "aten::set_")
    is_view = op in _UNDECLARED_VIEWS or any(
        r.alias_info is not None and not r.alias_info.is_write for r in schema.returns
    )
    alias_sets = {frozenset(info.before_set): i for i in writes if (info := arguments[i].alias_info) is not None}
    returned = tuple(
        alias_sets.get(frozenset(r.alias_info.before_set))
        if r.alias_info is not None and r.alias_info.is_write
        else None
        for r in schema.returns
    )
    return OpInfo(
        op=op,
        is_view=is_view and not writes,
        is_identity=op in IDENTITIES,
        writes=writes,
        is_metadata_write=is_metadata,
        is_random=tag_random(op),
        is_composite=has_composite_implicit_kernel(op) and not op.namespace.startswith("prim"),
        hidden_writes=_HIDDEN_WRITES.get(op, ()),
        functional=_functional_form(op, is_out=is_out) if writes else None,
        argument_names=tuple(a.name for a in arguments),
        is_out=is_out,
        returns_written=returned,
    )
