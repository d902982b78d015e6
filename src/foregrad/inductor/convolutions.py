"""Convolutions as Inductor runs them best: operands laid out once, convolutions of one element as products.

On a CPU Inductor runs convolutions channels last, and copies each weight into that layout: in the forward and, since
the weight itself is saved, once more in the backward. For large weights and few images that is several percent of a
step. Here the forward also returns each weight, as a value that Inductor may lay out as it likes, so it returns its
copy, and the backward reads the copy. The weight is still saved, for derivatives of the backward and to notice writes
in between.

In one graph for forward and backward, a training step's for one, Inductor copies images too: it first gives a backward
convolution's operands the graph's strides. There the copies are nodes, and all strides of the graph follow from them.

Known weakness: the copies live until the backward.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from .._torch.graphs import copied, make_graph_module
from ..graph.joint import Partitioned
from ..graph.meta import TensorSpec, contiguous_strides, respecify, spec_of
from ..passes.aliasing import results_of
from ..passes.keep import also_saved
from ._torch.inductor import REALIZED, convolves_image_by_image

aten = torch.ops.aten


def with_weights_laid_out(partitioned: Partitioned) -> Partitioned:
    """Let the backward's convolutions read an alias of their weight."""
    weights = _weights(partitioned)
    if not weights:
        return partitioned
    graph = copied(partitioned.forward.graph, lambda node: node.meta)
    aliases: dict[str, str] = {}
    for node in list(graph.nodes):
        if node.name in weights:
            with graph.inserting_after(node):
                alias = graph.call_function(aten.alias.default, (node,))
            alias.meta.update(val=node.meta["val"], spec=spec_of(node))
            aliases[node.name] = alias.name
    forward = make_graph_module(partitioned.forward, graph, "Forward")
    changed = Partitioned(partitioned.joint, forward, partitioned.backward)
    result = also_saved(changed, aliases.values())
    inputs = {node.name: node for node in result.backward.graph.nodes if node.op == "placeholder"}
    for node in _backward_convolutions(result.backward):
        if _operand(node, 2).name in aliases:
            node.update_arg(2, inputs[aliases[_operand(node, 2).name]])
    result.backward.recompile()
    return result


def _weights(partitioned: Partitioned) -> set[str]:
    """The inputs that are the weight of convolutions in both halves and may change layout.

    If a convolution's image is an input too, both layouts decide their gradients' layouts, so the weight is left alone.
    """
    saved = {node.name for node in partitioned.saved_nodes if node.op == "placeholder"}
    backward = _backward_convolutions(partitioned.backward)
    read = {_operand(n, 2).name for n in backward if _operand(n, 1).name not in saved}
    forward_weights = set()
    for node in partitioned.forward.graph.nodes:
        if node.target is aten.convolution.default and _is_to_lay_out(spec_of(_operand(node, 1))):
            forward_weights.add(_operand(node, 1).name)
    return forward_weights & saved & read


def with_whole_laid_out(gm: fx.GraphModule, foreign: Collection[fx.Node]) -> fx.GraphModule | None:
    """A graph for forward and backward in which the weights of convolutions and the images of the first convolutions
    are copied channels last. Its strides still equal `gm`'s. None: there is nothing to copy, or a later operator reads
    by strides or is `foreign` to the compiler.
    """
    read = {_operand(node, 2) for node in _backward_convolutions(gm)}
    after: set[fx.Node] = set()  # convolutions with a copy, and the values computed from their results
    entering: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        if node.target is aten.convolution.default and _operand(node, 1) in read:
            image, weight = _operand(node, 0), _operand(node, 1)
            if _is_to_lay_out(spec_of(weight)):
                entering |= {weight: None} if image in after else {weight: None, image: None}
                after.add(node)
        elif not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    depends = any(node in foreign or "as_strided" in getattr(node.target, "_opname", "") for node in after)
    if not entering or depends:
        return None
    whole = make_graph_module(gm, copied(gm.graph), "GraphModule")
    own = dict(zip(gm.graph.nodes, whole.graph.nodes, strict=True))
    for node in after:
        if node.target is aten.view.default:  # of memory in a different layout: it may need a copy
            own[node].target = aten.reshape.default
    for operand in entering:
        with whole.graph.inserting_after(own[operand]):
            copy = _copy(own[operand], torch.channels_last)
        for user in filter(is_convolution, [*own[operand].users]):
            user.replace_input_with(own[operand], copy)
    for gradient in [_gradient(node) for node in _backward_convolutions(gm) if _operand(node, 2) in entering]:
        if gradient is not None and spec_of(gradient).stride == contiguous_strides(spec_of(gradient).shape):
            with whole.graph.inserting_after(own[gradient]):
                copy = _copy(own[gradient], torch.contiguous_format)  # as its readers (an update, say) are laid out
            copy.meta[REALIZED] = True
            own[gradient].replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)
    return whole


def lay_out_as_before(gm: fx.GraphModule, before: fx.GraphModule, positions: Collection[int]) -> bool:
    """Give these outputs of a graph the strides that they had before. False: they were not contiguous."""
    results = results_of(gm)
    for position in positions:
        result, spec = results[position], spec_of(results_of(before)[position])
        now = spec_of(result) if isinstance(result, fx.Node) else None
        if not isinstance(spec, TensorSpec) or not isinstance(now, TensorSpec) or now.stride == spec.stride:
            continue
        if spec.stride != contiguous_strides(spec.shape):
            return False
        with gm.graph.inserting_before(gm.graph.output_node()):
            results[position] = _copy(result, torch.contiguous_format)
    gm.graph.output_node().args = (tuple(results),)
    respecify(gm.graph)
    return True


def _copy(node: fx.Node, memory_format: torch.memory_format) -> fx.Node:
    copy = node.graph.call_function(aten.clone.default, (node,), {"memory_format": memory_format})
    copy.meta.update(val=aten.clone.default(node.meta["val"], memory_format=memory_format))
    return copy


def is_convolution(node: fx.Node) -> bool:
    """Whether a node is a convolution or a convolution's backward."""
    return "convolution" in getattr(node.target, "_opname", "")


def _backward_convolutions(gm: fx.GraphModule) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is aten.convolution_backward.default]


def _operand(node: fx.Node, position: int) -> fx.Node:
    operand = node.args[position]
    assert isinstance(operand, fx.Node)
    return operand


def _gradient(node: fx.Node) -> fx.Node | None:
    """The gradient of the weight that a backward convolution computes, or None."""
    return next((user for user in node.users if user.args[1:] == (1,)), None)


def _is_to_lay_out(spec: object) -> bool:
    """Whether channels last changes the order of a weight in a CPU's memory: not for one channel, or one element."""
    if not isinstance(spec, TensorSpec) or not spec.is_static or spec.device.type != "cpu" or len(spec.shape) != 4:
        return False
    _, channels, height, width = spec.shape
    return bool(channels > 1 and height * width > 1 and spec.stride[1] != 1)


# ------------------------------------------------------------------------------------------------ products of matrices
# Convolutions whose kernel is one element, as products of matrices.
#
# On one thread of a CPU, PyTorch computes such a convolution of few images as a product for each image, and each
# product reads the weight. Channels last, all images are one matrix. With `SETTINGS` Inductor makes a forward
# convolution one product. Here the image's gradient becomes a convolution of this kind, and the weight's gradient a
# product; a convolution with a stride becomes a convolution of a part of the image, without a stride.


SETTINGS = types.MappingProxyType({"conv_1x1_as_mm": True})

_PLAIN = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # stride, padding, dilation, transposed, output padding, groups


def with_products(gm: fx.GraphModule) -> bool:
    """Prepare a graph without symbolic sizes for Inductor with `SETTINGS`. False: a product may be slower there, so the
    graph stays as it is.
    """
    found = [(node, convolution) for node in gm.graph.nodes if (convolution := _convolution(node)) is not None]
    if not found or not all(convolution.is_slow() for _, convolution in found):
        return False
    for node, convolution in found:
        with gm.graph.inserting_before(node):
            if node.target is aten.convolution.default:
                node.args = (convolution.part(), *node.args[1:3], *_PLAIN)
            else:
                _split(node, convolution)
    return True


class _Convolution(NamedTuple):
    """The operands of a convolution or of a convolution's backward."""

    image: fx.Node
    weight: fx.Node
    stride: Sequence[int]

    def is_slow(self) -> bool:
        """Whether PyTorch computes a product for each image, or would without a stride."""
        specs = [spec_of(self.image), spec_of(self.weight)]
        is_plain = all(len(spec.shape) == 4 and spec.device.type == "cpu" for spec in specs)
        return is_plain and convolves_image_by_image(self.image.meta["val"], self.weight.meta["val"])

    def part(self) -> fx.Node:
        """The part of the image that is read."""
        part = self.image
        for dim, step in zip((2, 3), self.stride, strict=True):
            part = part if step == 1 else _call(aten.slice.Tensor, part, dim, 0, sys.maxsize, step)
        return part

    def spread(self, gradient: fx.Node) -> fx.Node:
        """The gradient of the image, from the part's."""
        if {*self.stride} == {1}:
            return gradient
        value = self.image.meta["val"]
        settings = {"dtype": value.dtype, "device": value.device}
        zeros = self.image.graph.call_function(aten.full.default, ([*value.shape], 0), settings)
        zeros.meta["val"] = torch.zeros_like(value)
        rows = _call(aten.slice.Tensor, zeros, 2, 0, sys.maxsize, self.stride[0])
        rows = _call(aten.slice_scatter.default, rows, gradient, 3, 0, sys.maxsize, self.stride[1])
        return _call(aten.slice_scatter.default, zeros, rows, 2, 0, sys.maxsize, self.stride[0])


def _convolution(node: fx.Node) -> _Convolution | None:
    """A convolution that `SETTINGS` change or, with a stride, that is to be changed; or its backward."""
    operands: Any = node.args
    if node.target is aten.convolution.default:
        image, weight, _, stride, padding, dilation, is_transposed, _, groups = operands
    elif node.target is aten.convolution_backward.default:
        _, image, weight, _, stride, padding, dilation, is_transposed, _, groups, _ = operands
    else:
        return None
    if {*spec_of(weight).shape[2:], *dilation, groups} != {1} or any(padding) or is_transposed:
        return None
    # PyTorch's way with a stride is as fast where it reads mostly the image.
    is_chosen = {*stride} == {1} or spec_of(image).numel < spec_of(weight).numel
    return _Convolution(image, weight, stride) if is_chosen else None


def _split(node: fx.Node, convolution: _Convolution) -> None:
    """Compute each result of a backward by itself, that of the image first: there Inductor lays out the gradient."""
    gradient: Any = node.args[0]
    by_position: list[tuple[Any, fx.Node]] = [(user.args[1], user) for user in node.users]
    for position, user in sorted(by_position, key=lambda pair: pair[0]):
        if position == 0:
            across = _call(aten.permute.default, convolution.weight, [1, 0, 2, 3])
            result = convolution.spread(_call(aten.convolution.default, gradient, across, None, *_PLAIN))
        elif position == 1:
            channels_by_places = _call(aten.permute.default, _matrix(gradient), [1, 0])
            product = _call(aten.mm.default, channels_by_places, _matrix(convolution.part()))
            result = _call(aten.view.default, product, [*convolution.weight.meta["val"].shape])
        else:
            result = _call(aten.sum.dim_IntList, gradient, [0, 2, 3])
        result.meta = user.meta
        user.replace_all_uses_with(result)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def _matrix(images: fx.Node) -> fx.Node:
    """Places by channels: a view, if images are laid out channels last."""
    places = _call(aten.permute.default, images, [0, 2, 3, 1])
    return _call(aten.reshape.default, places, [-1, images.meta["val"].shape[1]])


def _call(target: Any, *args: Any) -> fx.Node:
    """A call before the graph's point of insertion."""
    graph = next(value.graph for value in args if isinstance(value, fx.Node))
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda operand: operand.meta["val"]))
    return node
