"""Operators, their schemas and their names. Checked on torch 2.13.0."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["OpOverload"]  # handed on

# The operators that `torch.nn.utils.rnn` calls.
_VF: Any = torch._VF
PACK_PADDED, PAD_PACKED = _VF._pack_padded_sequence, _VF._pad_packed_sequence


def mkldnn_rnn_layer_for_training(*args: Any) -> Any:
    """`aten.mkldnn_rnn_layer` with the workspace that its backward reads, which the kernel only fills in grad mode."""
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        return torch.ops.aten.mkldnn_rnn_layer.default(*args)


def convolves_image_by_image(image: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether a convolution on a CPU, as threads are now, multiplies matrices for each image. A fake image will do."""
    backend: Any = torch._C._select_conv_backend(image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    return bool(backend.name == "Slow2d")


def has_effects(op: Any) -> bool:
    """Whether an operator is registered as one with effects, so that it runs also where nobody needs its result."""
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
    """Whether an operator computes each element of a tensor, or of those of a list, by itself; `item()` is one."""
    name = op._schema.name.rpartition("::")[2]
    is_named = name.startswith(("_foreach_", "_fused_")) or name in ("copy", "_local_scalar_dense")
    return (torch.Tag.pointwise in op.tags or is_named) and not tag_random(op)


def overloads_of(namespace: str, name: str) -> list[OpOverload]:
    """Every overload of an operator; empty if there is no such operator."""
    space = getattr(torch.ops, namespace)
    if not hasattr(space, name):
        return []
    packet = getattr(space, name)
    return [getattr(packet, overload) for overload in packet.overloads()]


# -------------------------------------------------------------------- operators by name
# Operators of the dispatcher by name, and default generators. Checked on torch 2.13.0.


# Libraries of PyTorch's own besides aten and prims: collectives, profilers, packed weights, compilers' internals.
_INTERNAL = frozenset(
    "_c10d_functional _c10d_functional_autograd _dtensor _native _quantized _test c10d debug_mode_ops debugprims "
    "export inductor inductor_prims mkl mkldnn mkldnn_prepacked onednn profiler quantization quantized rngprims sparse "
    "static_runtime symm_mem".split()
)


def refusable_namespaces() -> frozenset[str]:
    """Namespaces of operators that belong to PyTorch's own workings."""
    return _INTERNAL


def operator_called(name: str) -> OpOverload | None:
    """The operator of the dispatcher with this full name, as `aten::add.Tensor`; None if there is none.

    TorchScript's own functions, which have names of this form too, do not count.
    """
    try:
        if not torch._C._dispatch_has_kernel(name):
            return None
    except RuntimeError:  # no legal name
        return None
    space, _, rest = name.partition("::")
    short, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space), short, None)
    operator = getattr(packet, overload or "default", None)
    return operator if isinstance(operator, OpOverload) and operator.name() == name else None


def default_generator() -> Any:
    """The default generator of the CPU."""
    return torch.default_generator
