"""What the recorder does with each operator, worked out when it first meets it."""

from __future__ import annotations

from typing import Any

import torch

from ..._torch.ops import OpOverload
from ..tape.opinfo import IN_GRAD_MODE, OpInfo
from .checks import check_formula
from .formulas import FORMULAS
from .metadata import is_cacheable
from .sparse import FORMULAS as SPARSE_FORMULAS

aten = torch.ops.aten
prim = torch.ops.prim

# Questions about a tensor that its fake answers: nothing to record.
QUERIES = {
    prim.device.default,
    prim.layout.default,
    aten.size.default,
    aten.stride.default,
    aten.storage_offset.default,
    aten.sym_size.default,
    aten.sym_stride.default,
    aten.sym_numel.default,
    aten.sym_storage_offset.default,
    aten.numel.default,
    aten.dim.default,
    aten.is_contiguous.default,
    aten.is_contiguous.memory_format,
    aten.is_strides_like_format.default,
    aten.is_non_overlapping_and_dense.default,
    aten._fused_sdp_choice.default,
}


def _plain_zeros(size: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None) -> Any:
    return aten.zeros.default(size, dtype=dtype, device=device)


# Forward mode's zeros have no memory, which no compiler knows.
PLAINER = {aten._efficientzerotensor.default: _plain_zeros}


# By name: they are known once their module is imported. A result that is still under way is no plain tensor, which is
# what kernels take.
PLAINER_BY_NAME = {
    "_c10d_functional._wrap_tensor_autograd.default": lambda tensor: torch.ops._c10d_functional.wait_tensor(tensor)
}


class Plan:
    """What the recorder does with an operator; it keeps the operator alive, and with it the id it is found by."""

    __slots__ = ("decomposition", "formula", "in_grad_mode", "info", "is_cacheable", "is_query", "op")

    def __init__(self, op: Any, info: OpInfo | None, decomposition: Any) -> None:
        self.op = op
        self.info: Any = info
        self.is_query = info is None
        self.decomposition = decomposition
        self.in_grad_mode = IN_GRAD_MODE.get(op, op)
        self.is_cacheable = info is not None and is_cacheable(info)
        self.formula = FORMULAS.get(op) or SPARSE_FORMULAS.get(op) or check_formula(op, info)


def has_real(values: Any, is_known: Any) -> bool:
    """Whether there is a tensor among the values that is no fake."""
    for value in values:
        cls = type(value)
        if cls in PLAIN:
            continue
        if isinstance(value, torch.Tensor):
            if not is_known(value):
                return True
        elif isinstance(value, (list, tuple)) and has_real(value, is_known):
            return True
    return False


NO_KEYWORDS: dict[str, Any] = {}
PLAIN = {int, float, bool, type(None), str, torch.dtype, torch.device, torch.Size}


def draws_nothing(target: Any, args: Any) -> bool:
    """Whether a random operator is called in a way that draws no random numbers (dropout with probability 0)."""
    if not isinstance(target, OpOverload):
        return False
    for index, argument in enumerate(target._schema.arguments):
        if argument.name in ("dropout_p", "p", "dropout") and index < len(args):
            return isinstance(args[index], float) and args[index] == 0.0 and "dropout" in argument.name
        if argument.name == "dropout_p":
            return True  # left at its default, 0
    return False
