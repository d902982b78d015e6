"""Sparse tensors in graphs: the operators that return and take them.

The gradient of an embedding with `sparse=True` is a COO tensor. The number of elements in the sum of two depends on
their indices, so no `TensorSpec` describes one: a node with a sparse value has the spec `UNDESCRIBED`, as an operator
without results. No sparse value is saved for a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

aten = torch.ops.aten

MAKE = aten._sparse_coo_tensor_with_dims_and_tensors.default
EMBEDDING_BACKWARD = aten.embedding_sparse_backward.default
BAG_BACKWARD = aten._embedding_bag_backward.default
_MAKERS = {MAKE, EMBEDDING_BACKWARD}
MAY_MAKE = frozenset(map(id, (*_MAKERS, BAG_BACKWARD)))  # by id: an operator's hash is a function in Python
_SPARSE_OF_BAG = 9  # the position of the argument `sparse`

# Operators that give a sparse tensor for one sparse operand, whatever the second operand.
_KEEPING = {aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.clone.default}
_SUM = aten.add.Tensor
_DENSE = {aten._to_dense.default}

IsSparse = Callable[[Any], bool]


def gives_sparse(target: Any, args: Sequence[Any], is_sparse: IsSparse) -> bool:
    """Whether an operator gives a sparse tensor for these arguments."""
    if target in _MAKERS:
        return True
    if target is BAG_BACKWARD:
        return len(args) > _SPARSE_OF_BAG and args[_SPARSE_OF_BAG] is True
    if target is _SUM:
        return is_sparse(args[0]) and is_sparse(args[1])
    return target in _KEEPING and any(map(is_sparse, args[:2]))


def can_take(target: Any, args: Sequence[Any], kwargs: Any, is_sparse: IsSparse) -> bool:
    """Whether an operator in a graph may take the arguments, some of them sparse."""
    if kwargs and target is not aten.clone.default:
        return False
    if target is _SUM:
        return len(args) == 2 and is_sparse(args[1])
    if target in (aten.div.Tensor, aten.div.Scalar):
        return is_sparse(args[0]) and not is_sparse(args[1])
    return target in _KEEPING or target in _DENSE
