"""The weights of convolutions, laid out once for both halves.

On a CPU Inductor runs convolutions channels last, and copies each weight into that layout: in the forward and, since
the weight itself is saved, once more in the backward. For large weights and few images that is several percent of a
step. Here the forward also returns each weight, as a value that Inductor may lay out as it likes, so it returns its
copy, and the backward reads the copy.

The weight is still saved, for derivatives of the backward and to notice writes in between. Known weakness: the copies
live until the backward.
"""

from __future__ import annotations

import torch
from torch import fx

from .._torch.modules import make_graph_module
from ..graph.meta import TensorSpec, spec_of
from ..graph.partitioned import Partitioned
from ..passes.keep import also_saved

__all__ = ["with_weights_laid_out"]

aten = torch.ops.aten


def with_weights_laid_out(partitioned: Partitioned) -> Partitioned:
    """Let the backward's convolutions read an alias of their weight."""
    weights = _weights(partitioned)
    if not weights:
        return partitioned
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    aliases: dict[str, str] = {}
    for node in partitioned.forward.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = node.meta
        if node.name in weights:
            alias = graph.call_function(aten.alias.default, (copies[node],))
            alias.meta.update(val=node.meta["val"], spec=spec_of(node))
            aliases[node.name] = alias.name
    forward = make_graph_module(partitioned.forward, graph, "Forward")
    changed = Partitioned(partitioned.joint, forward, partitioned.backward)
    result = also_saved(changed, aliases.values())
    inputs = {node.name: node for node in result.backward.graph.nodes if node.op == "placeholder"}
    for node in _backward_convolutions(result):
        if _operand(node, 2).name in aliases:
            node.update_arg(2, inputs[aliases[_operand(node, 2).name]])
    result.backward.recompile()
    return result


def _weights(partitioned: Partitioned) -> set[str]:
    """The inputs that are the weight of convolutions in both halves, and whose layout may change.

    If a convolution's image is an input too, the layouts of both decide those of their gradients, so it is left alone.
    """
    saved = {node.name for node in partitioned.saved_nodes if node.op == "placeholder"}
    read = {_operand(n, 2).name for n in _backward_convolutions(partitioned) if _operand(n, 1).name not in saved}
    forward_weights = set()
    for node in partitioned.forward.graph.nodes:
        if node.target is aten.convolution.default and _is_to_lay_out(spec_of(_operand(node, 1))):
            forward_weights.add(_operand(node, 1).name)
    return forward_weights & saved & read


def _backward_convolutions(partitioned: Partitioned) -> list[fx.Node]:
    return [node for node in partitioned.backward.graph.nodes if node.target is aten.convolution_backward.default]


def _operand(node: fx.Node, position: int) -> fx.Node:
    operand = node.args[position]
    assert isinstance(operand, fx.Node)
    return operand


def _is_to_lay_out(spec: object) -> bool:
    """Whether channels last changes the order of a weight in a CPU's memory: not for one channel, or one element."""
    if not isinstance(spec, TensorSpec) or not spec.is_static or spec.device.type != "cpu" or len(spec.shape) != 4:
        return False
    _, channels, height, width = spec.shape
    return bool(channels > 1 and height * width > 1 and spec.stride[1] != 1)
