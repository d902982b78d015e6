"""The cost of recomputing a node: an analytic model of time, in floating-point operations.

Matrix products, convolutions and attention cost their operations, by the formulas of `torch.utils.flop_counter` and
`register_flop_formula`. Every operator costs at least the bytes that it reads and writes, each worth `FLOPS_A_BYTE`
operations. A `CostModel` is any function from a node to a number, so measured times can replace the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx

from .._torch.graphs import size_hint
from .._torch.ops import mkldnn_rnn_layer_for_training
from ..graph.meta import value_of
from .classify import Kind
from .index import JointIndex, value_bytes

CostModel = Callable[[fx.Node], float]

# A byte's price where compilers fuse: most bytes that memory-bound operators read and write are never moved. With one
# kernel an operator a byte takes as long as 5 operations on a laptop's processor, 150 on a data centre's accelerator.
FLOPS_A_BYTE = 2


def flops(node: fx.Node) -> int:
    """Floating-point operations of a matrix product, convolution, attention or recurrent layer, forward or backward;
    0 for all else.
    """
    formula = _formula(node)
    if formula is None:
        return _uncounted(node)
    args, kwargs = cast("tuple[Any, Any]", fx.node.map_arg((node.args, node.kwargs), _shape))
    try:
        return int(formula(*args, **kwargs, out_val=_shape(node)))
    except Exception:  # a formula for sequences in one tensor; it asks for tensors
        return 0


def is_counted(node: fx.Node) -> bool:
    """Whether `torch.utils.flop_counter` has a formula for the operator, so that it counts in eager mode as well."""
    return _formula(node) is not None


def _formula(node: fx.Node) -> Callable[..., int] | None:
    from torch.utils.flop_counter import flop_registry  # late: nothing that is imported with foregrad needs it

    packet = getattr(node.target, "_overloadpacket", node.target)
    formula: Callable[..., int] | None = flop_registry.get(packet)
    return formula


def _shape(node: object) -> Any:
    value = value_of(node) if isinstance(node, fx.Node) else None
    return tuple(map(_sizes, value)) if isinstance(value, (tuple, list)) else _sizes(value)


def _sizes(value: object) -> object:
    return None if value is None else torch.Size(size_hint(size) for size in getattr(value, "shape", ()))


def _uncounted(node: fx.Node) -> int:
    """Operations without a formula in PyTorch: of the CPU's own operators for attention and recurrent layers, and of
    products in groups, as experts have them.
    """
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    is_backward = name.endswith("_backward")
    if name in ("aten::_grouped_mm", "aten::_scaled_grouped_mm"):  # the groups share one dimension of matrices
        left, right = map(_shape, node.args[:2])
        return int(2 * math.prod(left[-2:] if len(right) == 2 else left) * right[-1])
    if node.target is mkldnn_rnn_layer_for_training or name == "aten::mkldnn_rnn_layer_backward":
        # For each step the products with the weights of the input and of the state; twice as many in the backward.
        *steps, _ = _shape(node.args[0])
        weights: list[int] = [math.prod(_shape(weight)) for weight in node.args[1:3]]
        return int((4 if is_backward else 2) * math.prod(steps)) * sum(weights)
    if not name.startswith("aten::_scaled_dot_product"):
        return 0
    query, key, value = map(_shape, node.args[1:4] if is_backward else node.args[:3])
    scores = 2 * math.prod(query[:-1]) * key[-2]
    # The backward computes the scores again, their gradient, and the gradients of both products' operands.
    return int(scores * (3 * query[-1] + 2 * value[-1] if is_backward else query[-1] + value[-1]))


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
