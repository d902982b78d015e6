"""Numbers read from tensors (`step.item()`), given to operators on tensors as elements of one tensor.

A compiler of kernels takes no numbers from tensors, and would be cut at each operator that does. Where all numbers come
from inputs alone, as the bias corrections of an optimizer do, Python computes them first, and the rest is one graph.
Constants without dimensions become tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten
Node = fx.Node
_WITH_FACTOR: dict[Any, Any] = {aten.addcdiv.default: aten.div.Tensor, aten.addcmul.default: aten.mul.Tensor}
_ARITHMETIC: set[Any] = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}
# Operators on lists of tensors with a number for each tensor, and the operator that takes tensors for the numbers. For
# `addcdiv` and `addcmul` the table gives the operator on the second and third list; its results are multiplied by the
# numbers.
_LISTS: dict[Any, Any] = {
    aten._foreach_add.ScalarList: aten._foreach_add.List,
    aten._foreach_sub.ScalarList: aten._foreach_sub.List,
    aten._foreach_mul.ScalarList: aten._foreach_mul.List,
    aten._foreach_div.ScalarList: aten._foreach_div.List,
    aten._foreach_addcdiv.ScalarList: aten._foreach_div.List,
    aten._foreach_addcmul.ScalarList: aten._foreach_mul.List,
}


def _foreach_add(tensors: Sequence[torch.Tensor], other: torch.Tensor, *, alpha: Any = 1) -> list[torch.Tensor]:
    return [torch.add(tensor, other, alpha=alpha) for tensor in tensors]


# Optimizers count their steps with this operator, in a tensor for each parameter. The step is known first as an
# operator alone.
ONE_BY_ONE = {aten._foreach_add.Tensor: _foreach_add}


def as_vector(numbers: list[Any], device: torch.device) -> torch.Tensor:
    """The numbers as one tensor of doubles."""
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def known_first(gm: fx.GraphModule, numbers: Collection[Node]) -> set[Node]:
    """The nodes of `numbers` that can be computed before all else, and the nodes that compute them. Each is a number or
    a tensor of one element, and needs only inputs and nodes of its kind.
    """
    known: set[Node] = set()
    for node in gm.graph.nodes:
        is_small = node.op == "call_function" and (node in numbers or _is_one_element(node))
        if is_small and all(n.op in ("placeholder", "get_attr") or n in known for n in node.all_input_nodes):
            known.add(node)
    read: set[Node] = set()
    for node in reversed(gm.graph.nodes):
        if node in known and (node in numbers or any(user in read for user in node.users)):
            read.add(node)
    return read


def _is_one_element(node: Node) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor) and value.ndim == 0 and torch.Tag.pointwise in getattr(node.target, "tags", ())
    )


def numbers_in_a_tensor(gm: fx.GraphModule, numbers: Collection[Node], mode: Any) -> None:
    """Hand the `numbers` that are known first to operators on tensors, as elements of one tensor. In place."""
    first = known_first(gm, numbers)
    given = [node for node in gm.graph.nodes if node in first and any(_takes(user, node) for user in node.users)]
    if not given:
        return
    device = _device(next(user for user in given[0].users if _takes(user, given[0])))
    last = [node for node in gm.graph.nodes if node.op == "placeholder"][-1]
    for node in [node for node in gm.graph.nodes if node in first or node.op == "get_attr"]:
        last.append(node)
        last = node
    with mode, torch.no_grad(), gm.graph.inserting_after(last):
        vector = gm.graph.call_function(as_vector, (given, device))
        vector.meta["val"] = torch.empty(len(given), dtype=torch.float64, device=device)
        places = {node: place for place, node in enumerate(given)}
        for node in given:
            for user in [user for user in node.users if _takes(user, node)]:
                if _device(user) == device and all(n in places for n in _numbers_of(user, node)):
                    _replace(gm.graph, user, vector, [places[n] for n in _numbers_of(user, node)])


def _device(node: Node) -> torch.device:
    value = node.meta["val"]
    first: torch.Tensor = value if isinstance(value, torch.Tensor) else value[0]
    return first.device


def _numbers_of(user: Node, number: Node) -> Any:
    return user.args[-1] if user.target in _LISTS else [number]


def _takes(user: Node, number: Node) -> bool:
    """Whether an operator on tensors of several dimensions can take a number as a tensor."""
    value: Any = user.meta.get("val")
    if user.target in _LISTS:
        numbers: Any = user.args[-1]
        is_one_device = len({v.device for v in value}) == 1
        return number in numbers and is_one_device and all(v.ndim and v.dtype.is_floating_point for v in value)
    if not isinstance(value, torch.Tensor) or value.ndim == 0 or not value.dtype.is_floating_point:
        return False
    if user.target in _WITH_FACTOR:
        return user.kwargs.get("value") is number and number not in user.args
    return user.target in _ARITHMETIC and user.args[1] is number and not user.kwargs


def _replace(graph: fx.Graph, user: Node, vector: Node, places: list[int]) -> None:
    """Give `user` the elements of `vector` at `places` for its numbers."""
    value = user.meta["val"]
    dtypes = [v.dtype for v in value] if user.target in _LISTS else [value.dtype]
    with graph.inserting_before(user):

        def call(op: Any, *args: Any) -> Node:
            node = graph.call_function(op, args)
            node.meta = {
                key: value for key, value in dict.items(user.meta) if key not in ("val", "spec", "tensor_meta")
            }
            node.meta["val"] = op(*fx.map_arg(args, lambda arg: arg.meta["val"]))
            return node

        def items(several: Node) -> list[Node]:
            return [call(operator.getitem, several, i) for i in range(len(several.meta["val"]))]

        factors = []
        for place, dtype in zip(places, dtypes, strict=True):
            exact = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype  # as eager's kernels take it
            factors.append(
                call(torch.ops.prims.convert_element_type.default, call(aten.select.int, vector, 0, place), exact)
            )
        if user.target in _LISTS:
            whole, *others = user.args[:-1]
            if others:
                product = call(aten._foreach_mul.List, items(call(_LISTS[user.target], *others)), factors)
                new = call(aten._foreach_add.List, whole, items(product))
            else:
                new = call(_LISTS[user.target], whole, factors)
        elif user.target in _ARITHMETIC:
            new = call(user.target, user.args[0], factors[0])
        else:
            whole, a, b = user.args
            new = call(aten.add.Tensor, whole, call(aten.mul.Tensor, factors[0], call(_WITH_FACTOR[user.target], a, b)))
    user.replace_all_uses_with(new)
    graph.erase_node(user)


def fill_in_constants(gm: fx.GraphModule) -> None:
    """Fill tensors with constants that have no dimensions, for all operators but elementwise ones: Inductor's lowerings
    of these take tensors alone, and a constant number is none. In place.
    """
    for inner in [module for module in gm.modules() if isinstance(module, fx.GraphModule)]:
        for node in inner.graph.find_nodes(op="get_attr"):
            value = operator.attrgetter(str(node.target))(inner)
            if not isinstance(value, torch.Tensor) or value.ndim or value.dtype.is_complex:
                continue
            with inner.graph.inserting_after(node):
                filled = inner.graph.call_function(
                    aten.full.default, ([], value.item()), {"dtype": value.dtype, "device": value.device}
                )
            filled.meta = dict(node.meta)
            node.replace_all_uses_with(filled, lambda user: torch.Tag.pointwise not in getattr(user.target, "tags", ()))
