"""A graph with symbols for sizes, at given values: each storage's bytes, an expression, becomes a number."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from .._torch.graphs import copied
from .._torch.symbols import concrete, is_symbolic, map_symbolic
from ..graph.joint import JointGraph
from ..graph.meta import NodeMeta, TensorSpec


def values_in(joint: JointGraph, arguments: Sequence[Any]) -> dict[Any, int] | None:
    """The values of a graph's symbols for these arguments (all leaves of the call); None if they break a condition."""
    inputs = joint.signature.inputs
    values: dict[Any, int] = {}
    for one in joint.signature.symbols:
        argument = inputs[one.input].argument
        if argument is None:
            return None
        value = arguments[argument]
        values[one.symbol] = value if one.dim is None else value.shape[one.dim]
    are_served = min(values.values(), default=2) > 1 and all(guard.xreplace(values) for guard in joint.symbols.guards())
    return values if are_served else None


def at_sizes(joint: JointGraph, values: Mapping[Any, int]) -> JointGraph:
    """The graph at these values of its symbols."""

    @functools.cache
    def value_of(expression: Any) -> Any:
        return int(expression.xreplace(values))

    def number(size: Any) -> Any:
        expression = size.node.expr
        return value_of(expression) if expression.free_symbols <= values.keys() else concrete(size)

    module = fx.GraphModule(joint.module, copied(joint.graph, lambda node: _metadata(node.meta, number)))
    return dataclasses.replace(joint, module=module)


def _metadata(meta: dict[str, Any], number: Callable[[Any], int]) -> NodeMeta:
    made = meta.copy() if isinstance(meta, NodeMeta) else NodeMeta(meta)
    spec = dict.get(made, "spec")
    if isinstance(spec, (list, tuple)):
        made["spec"] = type(spec)([_spec(one, number) for one in spec])
    elif spec is not None:
        made["spec"] = _spec(spec, number)
    elif is_symbolic(value := dict.get(made, "val")):
        made["val"] = number(value)
    return made


def _spec(spec: Any, number: Callable[[Any], int]) -> Any:
    if not isinstance(spec, TensorSpec) or spec.is_static:
        return spec
    shape, stride, offset = map_symbolic((spec.shape, spec.stride, spec.offset), number)
    return dataclasses.replace(spec, shape=shape, stride=stride, offset=offset)
