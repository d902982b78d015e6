"""Integers among the arguments that vary from call to call: whether one graph can serve all their values.

A symbolic integer differs from a plain one in `type(n) is int`, and in its text. So a graph with such a number is taken
only if the program does the same things with the plain number in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from .._torch.dispatch import plain_execution
from .._torch.symbols import concrete, map_symbolic
from ..frontend.call import FlatCall
from ..graph.joint import JointGraph
from ..graph.meta import TensorSpec, spec_of
from ..graph.signature import ConstantOutput, Handle

if TYPE_CHECKING:
    from ..tracing.capture import Captured


class ConstantNumbers(Exception):  # noqa: N818 - not an error: asks for another try
    """Raised when these leaves of a call must be parts of the program."""

    def __init__(self, leaves: frozenset[int]) -> None:
        super().__init__("the program depends on the values of numbers")
        self.leaves = leaves


def fixed_numbers(joint: JointGraph) -> frozenset[int]:
    """The arguments that were symbolic numbers, but for which the graph is right for a single value."""
    signature = joint.signature
    arguments = {
        signature.inputs[info.input].argument
        for info in signature.symbols
        if info.dim is None and joint.symbols.value_of(info.symbol) is not None
    }
    # A float whose value the program needed is decided on; a value computed from it names it as its origin.
    decided = {decision.where for decision in signature.decisions if type(decision.value) is float}
    arguments |= {info.argument for info in signature.inputs if info.number is not None and str(info.slot) in decided}
    return frozenset(argument for argument in arguments if argument is not None)


def check_numbers(call: FlatCall, joint: JointGraph, capture: Callable[[FlatCall], Captured]) -> None:
    """Raise `ConstantNumbers` unless `joint`, captured from `call`, serves many values of its symbolic integers."""
    fixed = fixed_numbers(joint)
    if fixed:
        raise ConstantNumbers(fixed)
    plain = capture(dataclasses.replace(call, numbers=frozenset())).joint
    if _behaviour(joint) != _behaviour(plain):
        raise ConstantNumbers(call.numbers)


def _behaviour(joint: JointGraph) -> list[Any]:
    """The operators on tensors in a graph with their arguments, and the results that are no tensors.

    Numbers, and small tensors computed from numbers and constants, have their values in the captured call.
    """
    names: dict[fx.Node, Any] = {}
    tensors: dict[fx.Node, torch.Tensor] = {}
    count = 0
    done: list[Any] = []
    placeholders = joint.placeholders()
    floats = {placeholders[i] for i, info in enumerate(joint.signature.inputs) if info.number is float}
    for node in joint.graph.nodes:
        if node in floats:
            names[node] = None  # read by one operator, which gives the number
            continue
        if _gives_a_number(node):
            names[node] = concrete(node.meta["val"])
            continue
        tensor = _value_of_numbers(joint, node, names, tensors)
        if tensor is not None:
            tensors[node] = tensor
            names[node] = f"{tensor.dtype} {tuple(tensor.shape)} {tensor.tolist()}"
            continue
        names[node] = f"value {count}"
        count += 1
        if node.op in ("call_function", "output"):
            results = node.args if node.op == "call_function" else _outputs(joint)
            arguments = fx.map_arg((results, node.kwargs), names.__getitem__)
            # An operator that holds arguments is a new object in each capture: its text is compared.
            done.append((repr(node.target), repr(map_symbolic(arguments, concrete))))
    nodes = joint.outputs()
    for output in joint.signature.outputs:
        if isinstance(output, Handle) and output.output is not None and _is_number(nodes[output.output]):
            value = concrete(nodes[output.output].meta["val"])
            done.append((ConstantOutput, output.path, repr(value)))
            continue
        if isinstance(output, ConstantOutput):
            value = concrete(output.value)
        else:
            value = [(s.op, map_symbolic((s.args, s.kwargs), concrete), s.index) for s in getattr(output, "steps", ())]
        done.append((type(output), output.path, repr(value)))
    return done


def _value_of_numbers(
    joint: JointGraph, node: fx.Node, names: dict[fx.Node, Any], tensors: dict[fx.Node, torch.Tensor]
) -> torch.Tensor | None:
    """The value of a node in the captured call, if it is a small tensor computed from numbers and constants only."""
    spec = spec_of(node)
    if not isinstance(spec, TensorSpec) or spec.device.type != "cpu" or not _is_small(spec):
        return None
    if node.op == "get_attr":
        constant: torch.Tensor = getattr(joint.module, str(node.target))
        return constant
    operands = node.all_input_nodes
    of_tensors = any(n in tensors for n in operands) and all(
        n in tensors or not isinstance(names[n], str) for n in operands
    )
    is_known = of_tensors or node.target is torch.ops.aten.scalar_tensor.default
    if not is_known or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return None
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: tensors.get(n, names[n]))
    with plain_execution(), torch.no_grad():
        result: torch.Tensor = node.target(*map_symbolic(args, concrete), **map_symbolic(kwargs, concrete))  # type: ignore[operator]
    return result


def _is_small(spec: TensorSpec) -> bool:
    return all(type(size) is int for size in spec.shape) and spec.nbytes <= _LIMIT_BYTES


_LIMIT_BYTES = 1024


def _outputs(joint: JointGraph) -> list[Any]:
    """The graph's results, without decisions on numbers, and without gradients of numbers, which come last."""
    outputs, signature = joint.outputs(), joint.signature
    decided = {decision.output for decision in signature.decisions if not decision.is_tensor}
    count = len(outputs) - sum(1 for info in signature.inputs if info.number is not None)
    return [output for i, output in enumerate(outputs[:count]) if i not in decided and not _is_number(output)]


def _is_number(output: Any) -> bool:
    return isinstance(output, fx.Node) and _gives_a_number(output)


def _gives_a_number(node: fx.Node) -> bool:
    return node.op in ("placeholder", "call_function") and not isinstance(spec_of(node), (TensorSpec, tuple, list))
