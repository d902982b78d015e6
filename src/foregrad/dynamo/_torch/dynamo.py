"""Dynamo's facts about a graph that it hands to a backend, and its registry of backends.

Nothing of Dynamo is imported before it is used: `import foregrad` stays quick. Checked on torch 2.13.0.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

import torch
from torch import fx

from ..._torch.fakes import FakeTensor
from ..._torch.graphs import make_code, size_hint
from ...house import GENERATED, PACKAGE


@dataclasses.dataclass(frozen=True, slots=True)
class GraphInput:
    """An input of a graph of Dynamo's. `source` is its path from the user's frame, as Python: `L['x']`.

    `kind` is "parameter", "buffer" or "argument". `is_static`: it keeps its address from call to call.
    """

    name: str
    source: str
    kind: str
    is_static: bool


def graph_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> list[GraphInput]:
    """Dynamo's facts about each input; an empty source for graphs that are not its own."""
    inputs = [GraphInput(f"input {i}", "", "argument", False) for i in range(len(example_inputs))]
    placeholders = [node for node in _nodes(gm) if node.op == "placeholder"]
    for index, (node, value) in enumerate(zip(placeholders, example_inputs, strict=False)):
        text = _source_text(_source_of(node))
        facts = node.meta.get("tensor_dict") or {}
        kind = "argument"
        if isinstance(value, torch.nn.Parameter) or "._parameters[" in text:
            kind = "parameter"
        elif "._buffers[" in text:
            kind = "buffer"
        inputs[index] = GraphInput(node.name, text, kind, facts.get("_dynamo_static_input_type") is not None)
    return inputs


def of_compiled_autograd(example_inputs: Sequence[Any]) -> bool:
    """Whether a graph is a whole backward of compiled autograd's, or hands hooks on to such a backward."""
    from torch._dynamo import compiled_autograd
    from torch.fx.experimental._backward_state import BackwardState

    hands_on = any(isinstance(value, BackwardState) for value in example_inputs)
    return hands_on or bool(compiled_autograd.in_compiled_autograd_region)


def unused_inputs(gm: Any) -> list[int]:
    """The inputs that nothing in the graph uses."""
    placeholders = [node for node in _nodes(gm) if node.op == "placeholder"]
    return [index for index, node in enumerate(placeholders) if not node.users]


def known_inputs(gm: Any, example_inputs: Sequence[Any]) -> list[Any]:
    """The inputs as Dynamo traced them: fakes, with a `SymInt` for each open size; else the example inputs."""
    inputs = list(example_inputs)
    placeholders = [node for node in _nodes(gm) if node.op == "placeholder"]
    for index, node in enumerate(placeholders[: len(inputs)]):
        inputs[index] = node.meta.get("example_value", inputs[index])
    return inputs


def branches_on_values(gm: Any) -> bool:
    """Whether the graph, or a function of its operators, reads values: a branch, a loop on values, or a `print`."""
    if not isinstance(gm, fx.GraphModule):
        return False
    hops = torch.ops.higher_order
    names = ("cond", "switch", "while_loop", "while_loop_stack_output", "print")
    operators = {getattr(hops, name, None) for name in names}
    graphs = [part for part in gm.modules() if isinstance(part, fx.GraphModule)]
    return any(node.target in operators for part in graphs for node in part.graph.nodes)


def is_dynamo_graph(gm: Any) -> bool:
    """Whether Dynamo captured this graph."""
    return isinstance(gm, fx.GraphModule) and "dynamo_compile_id" in gm.meta


def _source_of(node: fx.Node) -> Any:
    source = getattr(node, "_dynamo_source", None)
    return getattr(node.meta.get("grapharg"), "source", None) if source is None else source


def _nodes(gm: Any) -> list[fx.Node]:
    # A backend may be called with any module.
    return list(gm.graph.nodes) if isinstance(gm, fx.GraphModule) else []


def _source_text(source: Any) -> str:
    if source is None:
        return ""
    name = source.name
    return str(name() if callable(name) else name)


def source_lines(gm: Any) -> tuple[CodeType, dict[int, tuple[str, dict[str, Any]]]] | None:
    """(the code that fx generated for a graph, for each of its lines the user's stack and the node's origin); None for
    any other module.
    """
    if not isinstance(gm, fx.GraphModule):
        return None
    make_code(gm)
    start: Any = gm._prologue_start
    lines: Any = gm._lineno_map or {}
    nodes, origin_by_line = dict(enumerate(_nodes(gm))), {}
    for line, index in lines.items():
        node = nodes.get(index)
        if node is not None and node.op not in ("placeholder", "output"):
            origin_by_line[line + start] = (node.stack_trace or "", _origin_of(node))
    return type(gm).forward.__code__, origin_by_line


def _origin_of(node: fx.Node) -> dict[str, Any]:
    """The metadata that derived nodes inherit."""
    from torch.fx.traceback import NodeSource, NodeSourceAction

    metadata: dict[str, Any] = {
        key: node.meta[key] for key in ("nn_module_stack", "source_fn_stack", "custom") if key in node.meta
    }
    return {**metadata, "from_node": [NodeSource(node, "foregrad", NodeSourceAction.CREATE)]}


def takes_floats(gm: fx.GraphModule) -> bool:
    """Whether Dynamo made Python floats inputs of the graph, as tensors of no dimension."""
    for node in _nodes(gm):
        if node.op == "call_method" and node.target == "item" and isinstance(node.args[0], fx.Node):
            argument = node.args[0].meta.get("grapharg")
            if getattr(argument, "pass_arg_as_tensor", False) and isinstance(
                node.meta.get("example_value"), torch.SymFloat
            ):
                return True
    return False


def restarts() -> tuple[type[Exception], type[Exception]]:
    """Exceptions that are no failures: at the first Dynamo starts over, at the second it runs the frame eagerly."""
    from torch._dynamo.exc import SkipFrame, TensorifyScalarRestartAnalysis

    return TensorifyScalarRestartAnalysis, SkipFrame


def compiler_counters() -> Any:
    """Dynamo's counters of ahead-of-time autograd: "total", "ok", "not_ok"."""
    from torch._dynamo.utils import counters

    return counters["aot_autograd"]


def shielded(function: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """`function`, to be called by Dynamo without tracing."""
    result: Callable[..., Any] = torch.compiler.disable(function, reason=reason)
    return result


def real_inputs(inputs: Sequence[Any]) -> list[Any]:
    """The inputs with fakes replaced by zeros of equal layout; symbolic sizes have their values at capture."""
    return [_real(value) for value in inputs]


def _real(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    sizes, strides = [size_hint(n) for n in value.size()], [size_hint(n) for n in value.stride()]
    zeros = torch.empty_strided(
        sizes, strides, dtype=value.dtype, device=value.device, requires_grad=value.requires_grad
    )
    with torch.no_grad():
        return zeros.zero_()


def has_checkpoints(gm: Any) -> bool:
    """Whether a part of a graph is checkpointed."""
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    return isinstance(gm, torch.fx.GraphModule) and any(node.target is checkpoint for node in gm.graph.nodes)


def skip_foregrad() -> None:
    """Keep Dynamo, if it has been imported, from tracing foregrad's own and rendered code.

    Otherwise Dynamo tries to compile a compiled function's wrappers, in calls and backwards after a graph break.
    """
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    if rules is not None and PACKAGE not in rules.SKIP_DIRS:
        rules.SKIP_DIRS += [PACKAGE, GENERATED]
        rules._recompile_re()
    if rules is not None:  # a mark calls functions of the user's; PyTorch makes the list anew now and then
        rules.get_mod_inlinelist().add(f"{PACKAGE}/regions/marks.py")


def known_backends() -> list[str]:
    """The names that `torch.compile(backend=...)` takes, debugging and experimental ones too."""
    from torch._dynamo.backends.registry import list_backends

    return list(list_backends(exclude_tags=()))


def lookup_backend(name: str) -> Callable[..., Any]:
    """The backend function of a name that `torch.compile` takes."""
    from torch._dynamo.backends.registry import lookup_backend

    backend: Callable[..., Any] = lookup_backend(name)
    return backend


# -------------------------------------------------------------------- x.data in graphs
# `x.data` and `x.data = y` in Dynamo's graphs, as eager runs them. Checked on torch 2.11.0, 2.13.0, 2.15.0.
#
# Dynamo writes `x.data = y` as `set_` under `no_grad` and a function that decrements the version counter. So a leaf
# loses the gradients of earlier results, and the counter of a tensor that began at 0 still moves. Since 2.15 it writes
# an operator, which leaves strides and the storage unchanged.


_SET = torch._C.TensorBase.set_  # a capture replaces `torch.Tensor.set_`
_autograd: Any = torch._C._autograd
_GET_DATA: Any = _autograd._get_data_attr
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
