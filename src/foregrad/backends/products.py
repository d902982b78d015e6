"""Convolutions whose kernel is one element, as products of matrices.

On one thread of a CPU, PyTorch computes such a convolution of few images as a product for each image, which reads the
weight each time. Channels last, all images are one matrix. With `SETTINGS` Inductor makes a forward convolution one
product. Here a backward becomes such a convolution, for the gradient of the image, and a product, for that of the
weight; a convolution with a stride becomes one without, of a part of the image.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from .._torch.ops import convolves_image_by_image
from ..graph.meta import spec_of

aten = torch.ops.aten

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
    """The operands of a convolution, or of the backward of one."""

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
        """The gradient of the image, from that of the part."""
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
    """A convolution that `SETTINGS` change or, with a stride, one that is to be changed; or the backward of one."""
    operands: Any = node.args
    if node.target is aten.convolution.default:
        image, weight, _, stride, padding, dilation, is_transposed, _, groups = operands
    elif node.target is aten.convolution_backward.default:
        _, image, weight, _, stride, padding, dilation, is_transposed, _, groups, _ = operands
    else:
        return None
    if {*spec_of(weight).shape[2:], *dilation, groups} != {1} or any(padding) or is_transposed:
        return None
    # PyTorch's way with a stride is as fast where most of what it reads is the image.
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
    """A call before the point of the graph at which nodes are inserted."""
    graph = next(value.graph for value in args if isinstance(value, fx.Node))
    node = graph.call_function(target, args)
    node.meta["val"] = target(*fx.map_arg(args, lambda operand: operand.meta["val"]))
    return node
