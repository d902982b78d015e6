"""What it costs to compute a node again: an analytic model of time, in floating-point operations.

Matrix products, convolutions and attention cost their operations, counted as `torch.utils.flop_counter` counts them;
every operator besides costs the bytes that it reads and writes, each worth `FLOPS_A_BYTE` operations. A `CostModel` is
any function from a node to a number, so that measured times can take the place of this one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import fx

from .._torch.graphs import size_hint
from .._torch.ops import mkldnn_rnn_layer_for_training
from .classify import Kind
from .index import JointIndex, value_bytes, value_of

__all__ = ["FLOPS_A_BYTE", "CostModel", "analytic_cost", "costs", "flops"]

CostModel = Callable[[fx.Node], float]

# What a byte takes where compilers fuse: most of what operators bound by memory read and write is never moved. With one
# kernel an operator a byte takes as long as 5 operations on a laptop's processor, 150 on a data centre's accelerator.
FLOPS_A_BYTE = 2


def _shape(node: Any) -> list[int]:
    value = value_of(node) if isinstance(node, fx.Node) else None
    if isinstance(value, (tuple, list)):
        value = value[0] if value else None
    return [] if value is None else [size_hint(size) for size in getattr(value, "shape", ())]


def _product(a: Any, b: Any) -> int:
    return 2 * math.prod(_shape(a)) * _shape(b)[-1]


def _convolution(node: fx.Node) -> int:
    # One product for each element of the larger side and of the kernel, over one side's channels.
    moved = _shape(node.args[0]) if node.args[6] else _shape(node)
    return 2 * math.prod(_shape(node.args[1])[1:]) * math.prod(moved)


def _attention(node: fx.Node) -> int:
    query, key = _shape(node.args[0]), _shape(node.args[1])
    value = _shape(node.args[2])
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


_FLOPS: dict[str, Callable[[fx.Node], int]] = {
    "aten::mm": lambda node: _product(node.args[0], node.args[1]),
    "aten::bmm": lambda node: _product(node.args[0], node.args[1]),
    "aten::addmm": lambda node: _product(node.args[1], node.args[2]),
    "aten::baddbmm": lambda node: _product(node.args[1], node.args[2]),
    "aten::convolution": _convolution,
}


def _recurrent(node: fx.Node) -> int:
    # For each step the products with the weights of the input and of the state.
    *steps, _ = _shape(node.args[0])
    return 2 * math.prod(steps) * sum(math.prod(_shape(weight)) for weight in node.args[1:3])


def flops(node: fx.Node) -> int:
    """Floating-point operations of a matrix product, convolution, attention or recurrent layer; 0 for all else."""
    if node.target is mkldnn_rnn_layer_for_training:
        return _recurrent(node)
    name = getattr(node.target, "_schema", None)
    if name is None:
        return 0
    formula = _FLOPS.get(name.name)
    if formula is None and name.name.startswith("aten::_scaled_dot_product") and "backward" not in name.name:
        formula = _attention
    return 0 if formula is None else formula(node)


def analytic_cost(node: fx.Node) -> float:
    """The time of a node, in floating-point operations."""
    moved = value_bytes(value_of(node)) + sum(value_bytes(value_of(operand)) for operand in node.all_input_nodes)
    return max(flops(node), moved * FLOPS_A_BYTE)


_FREE = (Kind.INPUT, Kind.CONSTANT, Kind.NUMBER, Kind.ITEM, Kind.VIEW)


def costs(index: JointIndex, model: CostModel = analytic_cost) -> list[int]:
    """The cost of each node as an integer, at least 1 for what runs; views and numbers cost nothing."""
    return [
        0 if kind in _FREE else max(1, round(model(node))) for node, kind in zip(index.nodes, index.kinds, strict=True)
    ]
