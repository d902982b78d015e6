"""Floating-point operations of a graph's operators, forward and backward.

Formulas are those of `torch.utils.flop_counter`, with what `register_flop_formula` added: so a graph counts what
`FlopCounterMode` counts when the function runs eagerly. That counter knows nothing of some operators that stand for
matrix products (attention and recurrent layers on the CPU); these have formulas here and are told apart.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils import flop_counter

from .._torch.graphs import size_hint
from ..graph.meta import TensorSpec
from ..partitioners.costs import flops
from ..partitioners.index import value_of

__all__ = ["flops_of"]


def flops_of(node: fx.Node) -> tuple[int, bool]:
    """The operations of a node, and whether PyTorch's counter knows the operator."""
    packet = getattr(node.target, "_overloadpacket", node.target)
    formula: Any = flop_counter.flop_registry.get(packet)
    if formula is None:
        return _backward(node) or flops(node), False
    values: Any = fx.node.map_arg((node.args, node.kwargs), _shape)
    try:
        return int(formula(*values[0], **values[1], out_val=_shape(node))), True
    except Exception:  # a formula that asks for tensors
        return flops(node), False


def _shape(node: Any) -> Any:
    value = value_of(node)
    if isinstance(value, (tuple, list)):
        return tuple(map(_sizes, value))
    return _sizes(value)


def _sizes(value: Any) -> Any:
    if not isinstance(value, (TensorSpec, torch.Tensor)):
        return value
    return torch.Size(size_hint(size) for size in value.shape)


def _backward(node: fx.Node) -> int:
    """Of attention, whose backward multiplies five times: for the scores again, then for the gradients of what they are
    made of. Of a recurrent layer, twice what its forward does.
    """
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    if name == "aten::mkldnn_rnn_layer_backward":
        *steps, _ = _shape(node.args[0])
        weights: list[int] = [math.prod(_shape(weight)) for weight in node.args[1:3]]
        return int(4 * math.prod(steps)) * sum(weights)
    if not (name.startswith("aten::_scaled_dot_product") and name.endswith("_backward")):
        return 0
    tangent, query, key, value = (_shape(operand) for operand in node.args[:4])
    return int(flop_counter.sdpa_backward_flop_count(tangent, query, key, value))
