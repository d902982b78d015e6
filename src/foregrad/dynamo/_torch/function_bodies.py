"""Custom Functions in Dynamo's graphs: the grad mode of their backwards, and marks that Dynamo has lost.

Dynamo traces the backward of a custom Function with gradients off, and writes that into its graph: a second derivative
through the backward would be missing, and so would a gradient of a gradient inside the function. Here the backward runs
in the caller's grad mode, except for operators under `no_grad` in the user's source. Dynamo drops the decorator
`once_differentiable`; its frame in the traces of the operators shows that it was there.

Checked on torch 2.12.0, 2.13.0.
"""

from __future__ import annotations

import ast
import functools
import linecache
import operator
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from ..._torch.fakes import FakeTensor
from ..._torch.versions import is_at_least

_ONCE = f'File "{torch.autograd.function.__file__}"'
_FRAME = re.compile(r'File "([^"]*)", line (\d+)')
_OFF = ("no_grad", "inference_mode")
_set_grad_enabled = torch._C._set_grad_enabled


def has_lost_marks(gm: fx.GraphModule) -> bool:
    """Whether a custom Function returns an argument that it wrote to: Dynamo before torch 2.13 drops `mark_dirty`."""
    if is_at_least(2, 13):
        return False
    return any(_returns_written(getattr(module, forward)) for module, forward, _ in _functions(gm))


def _returns_written(body: fx.GraphModule) -> bool:
    arguments = body.graph.find_nodes(op="placeholder")
    views = body.graph.find_nodes(op="call_method", target="view_as")
    returned = {
        node.args[0] for node in views if node.args[0] is node.args[1]
    }  # so Dynamo writes a result that is an argument
    if returned.isdisjoint(arguments):
        return False
    values = [node.meta.get("example_value") for node in arguments]
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None or any(value is None for value in values):  # there is no telling
        return True
    with mode:
        values = [torch.empty_like(v) if isinstance(v, torch.Tensor) else v for v in values]  # of version 0
        fx.Interpreter(body).run(*values)
    return any(node in returned and value._version for node, value in zip(arguments, values, strict=True))


def _functions(gm: fx.GraphModule) -> Iterator[tuple[fx.GraphModule, str, str]]:
    """(graph, the names of its forward and backward) of each custom Function in a graph, nested graphs included."""
    for module in [m for m in gm.modules() if isinstance(m, fx.GraphModule)]:
        for node in module.graph.nodes:
            if node.op == "call_function" and node.target is torch.ops.higher_order.autograd_function_apply:
                yield module, str(node.args[0].target), str(node.args[1].target)


def restore_grad_mode(gm: fx.GraphModule) -> None:
    """Give backwards of custom Functions in a graph, and in the graphs within it, eager's grad mode."""
    for module, *names in _functions(gm):
        forward, backward = (getattr(module, name) for name in names)
        inside = [n for n in backward.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
        if _is_off(inside):
            setattr(module, names[1], _restored(forward, backward, inside))


def _is_off(nodes: list[fx.Node]) -> bool:
    """Whether Dynamo turned gradients off for all these nodes."""
    return len(nodes) > 1 and all(nodes[i].target is _set_grad_enabled for i in (0, -1)) and nodes[0].args == (False,)


def _restored(forward: fx.GraphModule, body: fx.GraphModule, inside: list[fx.Node]) -> fx.GraphModule:
    traces = [trace for node in inside[1:-1] if (trace := node.meta.get("stack_trace"))]
    if all(_ONCE in trace for trace in traces) if traces else _is_of_once(forward):
        results = _results(forward)[0]
        return _decorated(body, len(results) if isinstance(results, (tuple, list)) else 1)
    graph = fx.Graph()
    mode: fx.Node | None = None
    copies: dict[fx.Node, fx.Node] = {}
    for node in body.graph.nodes:
        if node is inside[0]:
            mode = graph.call_function(torch.is_grad_enabled)
        elif node is inside[-1]:
            continue
        elif node in inside and any(
            _turns_off(file, int(line)) for file, line in _FRAME.findall(node.meta.get("stack_trace") or "")
        ):
            now = graph.call_function(torch.is_grad_enabled)
            graph.call_function(_set_grad_enabled, (False,))
            copies[node] = graph.node_copy(node, copies.__getitem__)
            graph.call_function(_set_grad_enabled, (now,))
        elif node.target is _set_grad_enabled and node.args == (False,):  # the end of `enable_grad`
            graph.call_function(_set_grad_enabled, (mode,))
        else:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    return fx.GraphModule(body, graph, type(body).__name__)


def _results(body: fx.GraphModule) -> Any:
    return body.graph.output_node().args[0]


# ---------------------------------------------------------------------------------------------- once_differentiable


def _decorated(body: fx.GraphModule, count: int) -> fx.GraphModule:
    """`body` as once-differentiable; its first `count` arguments are gradients."""
    graph = fx.Graph()
    arguments = [graph.placeholder(node.name) for node in body.graph.find_nodes(op="placeholder")]
    returned = graph.call_function(_once, (graph.get_attr("body"), count, *arguments))
    size = range(len(_results(body)))
    graph.output(tuple(graph.call_function(operator.getitem, (returned, i)) for i in size))
    root = torch.nn.Module()
    root.body = body
    return fx.GraphModule(root, graph, type(body).__name__)


def _once(body: fx.GraphModule, count: int, *values: Any) -> Any:
    @once_differentiable
    def backward(ctx: None, *gradients: Any) -> Any:
        return fx.Interpreter(body).run(*gradients, *values[count:])

    gradients = backward(None, *values[:count])
    return gradients if isinstance(gradients, tuple) else (gradients,)


# ------------------------------------------------------------------------------------------------------ the source


@functools.lru_cache(maxsize=256)
def _turns_off(file: str, line: int) -> bool:
    is_off_inside, smallest = False, None
    for first, last, is_off in _blocks(file, len(linecache.getlines(file))):
        if first <= line <= last and (smallest is None or last - first <= smallest):
            is_off_inside, smallest = is_off, last - first
    return is_off_inside


def _is_of_once(forward: fx.GraphModule) -> bool:
    """Whether a Function is once-differentiable, for a backward without operators: read from the forward's class."""
    traces = [node.meta.get("stack_trace") or "" for node in forward.graph.nodes]
    return any(_class_is_once(file, int(line)) for trace in traces for file, line in _FRAME.findall(trace))


@functools.lru_cache(maxsize=256)
def _class_is_once(file: str, line: int) -> bool:
    return any(
        isinstance(node, ast.ClassDef)
        and node.lineno <= line <= (node.end_lineno or line)
        and any(
            isinstance(method, ast.FunctionDef)
            and method.name == "backward"
            and any("once_differentiable" in ast.unparse(decorator) for decorator in method.decorator_list)
            for method in node.body
        )
        for node in ast.walk(_tree(file, len(linecache.getlines(file))))
    )


@functools.lru_cache(maxsize=16)
def _tree(file: str, length: int) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


@functools.lru_cache(maxsize=16)
def _blocks(file: str, length: int) -> tuple[tuple[int, int, bool], ...]:
    """(first line, last line, whether gradients are off) of blocks of a file that set the grad mode."""
    blocks = []
    for node in ast.walk(_tree(file, length)):
        if isinstance(node, ast.With):
            expressions, body = [item.context_expr for item in node.items], node.body
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            expressions, body = node.decorator_list, node.body
        else:
            continue
        text = " ".join(map(ast.unparse, expressions))
        if "enable_grad" in text or any(name in text for name in _OFF):
            blocks.append((body[0].lineno, body[-1].end_lineno or body[-1].lineno, "enable_grad" not in text))
    return tuple(blocks)
