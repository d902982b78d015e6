"""Operators of the dispatcher by name, and default generators. Checked on torch 2.13.0."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

__all__ = ["default_generator", "operator_called", "refusable_namespaces"]

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
