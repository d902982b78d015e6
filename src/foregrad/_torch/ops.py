"""Operators: their schemas, their names, and the fastest callable for each. Checked on torch 2.13.0."""

from __future__ import annotations

import dataclasses
import functools
import sys
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._ops import HigherOrderOperator, OpOverload

__all__ = ["HigherOrderOperator", "OpOverload"]  # handed on

# The operators that `torch.nn.utils.rnn` calls.
_VF = torch._VF
PACK_PADDED, PAD_PACKED = _VF._pack_padded_sequence, _VF._pad_packed_sequence


Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
"""Arguments of an operator or a function of PyTorch's: tensors, numbers, and containers of them."""


def mkldnn_rnn_layer_for_training(*args: object) -> Any:
    """`aten.mkldnn_rnn_layer` with the workspace that its backward reads; the kernel fills it in grad mode alone."""
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


def has_effects(op: object) -> bool:
    """Whether an operator is registered as one with effects, so that it runs also where nobody needs its result."""
    if op in torch.fx.node._side_effectful_functions:  # a profile's range is of the run that begins it
        return getattr(op, "namespace", "") not in ("aten", "profiler")
    return has_ordered_effect(op)


def has_ordered_effect(op: object) -> bool:
    """Whether PyTorch keeps the calls of an operator in their order."""
    effects = sys.modules.get("torch._higher_order_ops.effects")  # if that is not loaded, none is
    return effects is not None and bool(effects.has_effects(op))


def has_composite_implicit_kernel(op: OpOverload) -> bool:
    """Whether `op` exists only as its decomposition; an operator that also has kernels does not count."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    name = op.name()
    return has(name, "CompositeImplicitAutograd") and not (has(name, "CPU") or has(name, "CUDA"))


def tag_inplace_view(op: OpOverload) -> bool:
    return torch.Tag.inplace_view in op.tags


def tag_random(op: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


@functools.lru_cache(4096)
def depends_on_values(op: OpOverload) -> bool:
    """Whether an operator's result sizes depend on more than its arguments' metadata."""
    return torch.Tag.dynamic_output_shape in op.tags or torch.Tag.data_dependent_output in op.tags


def is_builtin(op: OpOverload) -> bool:
    """Whether an operator is PyTorch's own, so that it lives as long as the process and never changes."""
    return op.namespace in ("aten", "prims")


@functools.lru_cache(4096)
def is_pointwise(op: OpOverload) -> bool:
    """Whether an operator computes each element of a tensor, or of a list's tensors, by itself; `item()` does."""
    name = op._schema.name.rpartition("::")[2]
    is_named = name.startswith(("_foreach_", "_fused_")) or name in ("copy", "_local_scalar_dense")
    return (torch.Tag.pointwise in op.tags or is_named) and not tag_random(op)


def overloads_of(namespace: str, name: str) -> list[OpOverload]:
    """Every overload of an operator; empty if the operator does not exist."""
    space = getattr(torch.ops, namespace)
    if not hasattr(space, name):
        return []
    packet = getattr(space, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


# -------------------------------------------------------------------- operators by name
# Libraries of PyTorch's own besides aten and prims: collectives, profilers, packed weights, compilers' internals.
INTERNAL_NAMESPACES = frozenset(
    "_c10d_functional _c10d_functional_autograd _dtensor _native _quantized _test c10d debug_mode_ops debugprims "
    "export inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn profiler quantization quantized rngprims sparse "
    "static_runtime symm_mem".split()
)


def waits_for_others(target: object) -> bool:
    """Whether an operator is a collective: further processes take part, once."""
    return getattr(target, "namespace", "") == "_c10d_functional"


def is_opaque(value: object) -> bool:
    """Whether a value is an object with contents that only its own operators know."""
    if isinstance(value, torch.ScriptObject):
        return True
    from torch._library.opaque_object import is_opaque_type

    return bool(is_opaque_type(type(value)))


try:
    from torch._opaque_base import OpaqueBase as _OpaqueBase

    OPAQUE: tuple[type, ...] = (torch.ScriptObject, _OpaqueBase)  # classes of opaque objects
except ImportError:  # torch 2.11
    OPAQUE = (torch.ScriptObject,)


def is_opaque_reference(value: object) -> bool:
    """Whether a value is opaque, and no equal one may be in its place."""
    return isinstance(value, OPAQUE) and not is_opaque_value(value)


def is_opaque_value(value: object) -> bool:
    """Whether the value's class is registered as constant: equal values are interchangeable."""
    try:
        from torch._library.opaque_object import is_opaque_value_type
    except ImportError:  # torch 2.11
        return False
    return bool(is_opaque_value_type(type(value)))


# --------------------------------------------------------------------------------------------- calls in generated code
# The fastest callable for each operator, and schemas for generated code.
#
# An `OpOverload` is called through a Python frame and a generic argument converter. Torch's own Python bindings
# (`torch.mm`, `Tensor.view`) parse their arguments in generated C++ and reach the dispatcher with the same operator and
# arguments, about 1 us sooner. The arguments choose the overload, so a binding is listed here only with kinds of
# arguments that make the choice certain; a test sends each entry through both doors and compares the dispatcher's view.
# All remaining operators call the C++ entry inside the `OpOverload`, which saves the Python frame.
#
# Known weakness: backward operators have no Python binding, and so take the slower door.


class Argument(NamedTuple):
    """One parameter of an operator, for generated code.

    `kind` is one of tensor, tensors, int, ints, float, bool, number, str, constant, or "" for a kind that only the
    generic entry takes. `takes_number` means that a Python number may stand for the tensor.
    """

    name: str
    kind: str
    optional: bool
    keyword_only: bool
    takes_number: bool
    one_int: bool


@dataclasses.dataclass(frozen=True, slots=True)
class FastCall:
    """A direct binding for an operator, and the conditions of its use.

    `spread`: the last positional argument, a list of integers, is passed as separate arguments. `needs`: required
    keywords, since their absence means a different overload or the process's default. `only`: keywords that may be
    passed. `positional`: keywords that the binding takes by position. `appended`: text put after the arguments.
    """

    function: Any
    name: str
    arguments: tuple[Argument, ...]
    spread: bool = False
    needs: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    positional: tuple[str, ...] = ()
    appended: str = ""


_FUNCTIONS = """
    mm addmm bmm baddbmm mv dot addmv add.Tensor sub.Tensor mul.Tensor div.Tensor div.Tensor_mode neg
    pow.Tensor_Scalar pow.Tensor_Tensor exp exp2 log log2 log1p expm1 sqrt rsqrt reciprocal square sin cos tan sinh
    cosh tanh asin acos atan atan2 sigmoid relu erf erfc abs sign sgn floor ceil round trunc isnan
    addcmul addcdiv maximum minimum clamp clamp.Tensor clamp_min clamp_max lerp.Scalar lerp.Tensor
    eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar
    ge.Scalar logical_and logical_or logical_not logical_xor bitwise_not bitwise_and.Tensor bitwise_or.Tensor
    where.self masked_fill.Scalar masked_fill.Tensor fill.Scalar nan_to_num
    sum sum.dim_IntList mean mean.dim amax amin max.dim min.dim max min argmax argmin any any.dim all all.dim
    prod.dim_int cumsum var.correction std.correction var_mean.correction topk sort logsumexp
    t transpose.int permute select.int unsqueeze squeeze squeeze.dim squeeze.dims diagonal detach as_strided
    split.Tensor split_with_sizes unbind.int cat stack flip roll tril triu clone view_as_real view_as_complex _conj
    gather scatter.src scatter.value scatter_add index_select embedding
    native_layer_norm native_group_norm native_batch_norm _native_batch_norm_legit
    _native_batch_norm_legit_no_training _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data
    convolution native_dropout bernoulli bernoulli.p constant_pad_nd select_scatter slice_scatter
    _scaled_dot_product_flash_attention_for_cpu zeros_like ones_like full_like empty_like
    _fft_c2r _fft_r2c _fft_c2c equal
    _adaptive_avg_pool2d full zeros ones empty.memory_format arange arange.start arange.start_step scalar_tensor
"""
_NN_FUNCTIONS = """
    gelu silu leaky_relu elu hardtanh hardswish hardsigmoid softplus mish
    max_pool2d_with_indices avg_pool2d
"""
_METHODS = """
    view view.dtype expand repeat unfold copy_ add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor addcmul_ addcdiv_
    lerp_.Scalar lerp_.Tensor neg_ sqrt_ reciprocal_ new_zeros new_ones new_full
    _to_copy _local_scalar_dense sym_size.int sym_stride.int sym_numel sym_storage_offset
"""
_OTHER_NAMES = {
    "_to_copy": "to",
    "_local_scalar_dense": "item",
    "sym_size.int": "size",
    "sym_stride.int": "stride",
    "sym_numel": "numel",
    "sym_storage_offset": "storage_offset",
}
# Without these keywords the bindings would fill in the process's default dtype and device at another level.
_FACTORIES = "full zeros ones empty.memory_format arange arange.start arange.start_step scalar_tensor"
_NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_FACTORIES.split(), ("dtype", "device")),
    **dict.fromkeys("var.correction std.correction var_mean.correction".split(), ("correction",)),
}
_SPREAD = frozenset({"view", "expand", "repeat"})
_TAKES_NUMBER = frozenset(
    """
    add.Tensor sub.Tensor mul.Tensor div.Tensor div.Tensor_mode add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor
    """.split()
)


def _doors() -> dict[str, tuple[object, str, str]]:
    """`operator.overload` -> (namespace, prefix for the name in generated code, name of the binding)."""
    doors: dict[str, tuple[object, str, str]] = {}
    for words, space, prefix in (
        (_FUNCTIONS, torch._C._VariableFunctions, "torch"),
        (_NN_FUNCTIONS, torch._C._nn, "nn"),
        (_METHODS, torch.Tensor, "tensor"),
    ):
        for word in words.split():
            doors[word] = (space, prefix, _OTHER_NAMES.get(word, word.partition(".")[0]))
    return doors


DOORS = _doors()


@functools.lru_cache(maxsize=4096)
def fast_call(op: OpOverload) -> FastCall | None:
    """The direct binding for an operator; None if there is none, or this torch lacks it."""
    if type(op) is not OpOverload or op.namespace != "aten":
        return None
    word = str(op).removeprefix("aten.").removesuffix(".default")
    door = DOORS.get(word)
    if door is None:
        return None
    space, prefix, name = door
    function = getattr(space, name, None)
    if function is None:
        return None
    arguments = tuple(_argument(argument, word) for argument in op._schema.arguments)
    if word == "_to_copy":
        # A conversion that must copy even when the dtype is the same already.
        only = ("dtype",)
        return FastCall(
            function, f"{prefix}_{name}", arguments, needs=only, only=only, positional=only, appended="copy=True"
        )
    return FastCall(function, f"{prefix}_{name}", arguments, spread=word in _SPREAD, needs=_NEEDS.get(word, ()))


_KINDS = {
    "Tensor": "tensor",
    "List[Tensor]": "tensors",
    "int": "int",
    "List[int]": "ints",
    "float": "float",
    "bool": "bool",
    "number": "number",
    "str": "str",
    **dict.fromkeys(("ScalarType", "Layout", "Device", "MemoryFormat"), "constant"),
}


def _argument(argument: Any, word: str) -> Argument:
    text = str(argument.real_type)
    optional = text.startswith("Optional[")
    if optional:
        text = text[len("Optional[") : -1]
    kind = _KINDS.get(text, "")
    return Argument(
        argument.name,
        kind,
        optional,
        argument.kwarg_only,
        kind == "tensor" and argument.name == "other" and word in _TAKES_NUMBER,
        kind == "ints" and argument.N == 1,
    )


def raw_call(op: Any) -> Any:
    """The C++ entry of an operator, with equal arguments and result, and without the Python frame around it."""
    return op._op if type(op) is OpOverload else op


def view_call(op: Any, args: tuple[Any, ...], kwargs: tuple[tuple[str, object], ...]) -> Any:
    """The quickest function that takes a tensor and exactly these arguments to the view `op(tensor, *args)`."""
    fast = fast_call(op)
    certain = all(type(a) is int or (type(a) in (list, tuple) and all(type(n) is int for n in a)) for a in args)
    if fast is None or kwargs or not certain or fast.needs or fast.only is not None or fast.spread:
        return raw_call(op)
    return fast.function


@functools.lru_cache(maxsize=4096)
def return_kinds(op: OpOverload) -> tuple[str, ...]:
    """The kind of each value that an operator returns, named as in `Argument`."""
    return tuple(_KINDS.get(str(value.real_type), "") for value in op._schema.returns)


@functools.lru_cache(maxsize=4096)
def written_arguments(op: OpOverload) -> frozenset[str]:
    """Names of the arguments that an operator says it writes to."""
    return frozenset(
        argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@functools.lru_cache(maxsize=4096)
def argument_names(op: OpOverload) -> tuple[str, ...]:
    """The names of an operator's parameters, in order."""
    return tuple(argument.name for argument in op._schema.arguments)
