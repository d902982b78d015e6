"""`x.data` and `x.data = y` in Dynamo's graphs, as eager runs them. Checked on torch 2.11.0, 2.13.0, 2.15.0.

Dynamo writes `x.data = y` as `set_` under `no_grad` and a function that decrements the version counter. That cuts a
leaf off from gradients of earlier results, and the counter of a tensor that began at 0 still moves. Since 2.15 it
writes an operator, which leaves strides and the storage unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

__all__ = ["restore_data_assignments"]

_SET: Any = torch._C.TensorBase.set_  # a capture replaces `torch.Tensor.set_`
_GET_DATA: Any = torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
_COPY_DATA: Any = getattr(torch.ops.aten, "shallow_copy_data_", None)
_LOWER = "_lower_version_count_by_1"


def restore_data_assignments(gm: fx.GraphModule) -> None:
    """Restore reads and assignments of `.data` in a graph, and in the graphs within it."""
    for module in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
        graph, changed = module.graph, False
        for node in list(graph.nodes):
            if node.op != "call_function":
                continue
            if node.target is _GET_DATA:
                node.target, node.args = getattr, (node.args[0], "data")
                changed = True
            elif _COPY_DATA is not None and node.target in (_COPY_DATA, _COPY_DATA.default):
                node.target = assign_data
                changed = True
            elif getattr(node.target, "__name__", "") == _LOWER and _is_set(node.args[0]):
                node.args[0].target = assign_data
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
                changed = True
        if changed:
            module.recompile()


def _is_set(node: Any) -> bool:
    return isinstance(node, fx.Node) and node.target is _SET and len(node.args) == 2


def assign_data(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    tensor.data = data
    return tensor


fx.node.has_side_effect(assign_data)
