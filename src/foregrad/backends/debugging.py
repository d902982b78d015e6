"""Backends for debugging: `interpreter`, `print`, `count` and `crash-on:<op>`. With the last three, graphs
run as with the eager backend.
"""

from __future__ import annotations

import collections
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ..errors import BackendError
from ..graph.printing import print_graph, user_line
from ..graph.role import role_of
from ..identity import attributed
from .eager import BoxedFunction, eager_compiler
from .interpreter import interpreter_compiler
from .registry import Backend, Family


def print_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> BoxedFunction:
    """Print the graph, as Python."""
    print(print_graph(gm, header=f"{role_of(gm).phase} graph"))
    return eager_compiler(gm, example_inputs)


def count_compiler(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> BoxedFunction:
    """Print how often each operator is called; the result carries it as `op_counts`."""
    counts = op_counts(gm)
    total = sum(counts.values())
    print(f"{role_of(gm).phase} graph: {total} operators")
    for name, count in counts.most_common():
        print(f"  {count:5d}  {name}")
    return attributed(eager_compiler(gm, example_inputs), op_counts=counts)


def op_counts(gm: fx.GraphModule) -> collections.Counter[str]:
    """The number of calls of each operator in a graph, by its name (`aten.mm.default`)."""
    return collections.Counter(
        str(node.target)
        for node in gm.graph.nodes
        if node.op in ("call_function", "call_method", "call_module") and node.target is not operator.getitem
    )


def crash_on(name: str) -> Backend:
    """A backend that fails with `BackendError` on graphs that call `name`: `aten.mm.default`, `aten.mm` or `mm`."""

    def compile_half(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> BoxedFunction:
        for node in gm.graph.nodes:
            if node.op == "call_function" and name in _names(node.target):
                where = user_line(node)
                raise BackendError(
                    f"crash-on:{name}: the {role_of(gm).phase} graph has {node.name} = {node.target}"
                    + (f", from {where}" if where else "")
                )
        return eager_compiler(gm, example_inputs)

    compile_half.__name__ = f"crash-on:{name}"
    return Backend(f"crash-on:{name}", compile_half, compile_half, compile_half)


def _names(target: Any) -> tuple[str, ...]:
    full = str(target)
    parts = full.split(".")
    return (full, ".".join(parts[:2]), parts[1] if len(parts) > 1 else full)


def _family(compiler: Callable[..., Any], name: str, description: str, **more: Any) -> Family:
    backend = Backend(name, compiler, compiler, compiler, description=description, **more)
    return Family(lambda: backend, None, description)


BACKENDS = {
    "interpreter": _family(
        interpreter_compiler, "interpreter", "node by node, each checked against its meta; slow", keeps_order=True
    ),
    "print": _family(print_compiler, "print", "prints each graph, then as eager"),
    "count": _family(count_compiler, "count", "counts each graph's operators, then as eager"),
    "crash-on": Family(crash_on, "op", "for tests: fails to compile graphs with the named operator"),
}
