"""The first operator of a captured graph that eager does not run.

Eager runs once more under a mode that notes each result by its content. A node of the graph, run on eager's kernels,
whose value eager never had is where the capture went wrong; with it goes the first operator of eager's whose value the
graph lacks.

The operators of eager's forward are a program as well. A few of them that are captured wrong by themselves are the
reproducer. There is none where it takes Python to go wrong.

Known weakness: a value that eager has twice, once where the graph has it and once where it lacks it, is not missed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import operator
import os
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import fx

from .._torch.codegen import OpOverload
from .._torch.dispatch import ThreadDispatchMode
from .._torch.modules import make_graph_module
from .._torch.nested import mapped, tensors_in
from .._torch.tensors import storage_key
from ..graph.printing import user_line
from ..identity import ById
from ..tracing.tape.opinfo import op_info
from .compare import Gap, Verdict
from .locate import Culprit, Piece, ranges_of
from .lockstep import gives_nothing, steps
from .search import Maker, made_gap, needed_of
from .watched import Generators, copy_of_tensor

_TORCH, _OURS = (os.path.dirname(module.__file__ or "") for module in (torch, sys.modules["foregrad"]))
_DETACH = torch.ops.aten.detach.default
Content = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """A call of an operator; `before`: copies of its tensors from before it."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    before: ById[torch.Tensor, torch.Tensor]


class EagerValues(ThreadDispatchMode):
    """Notes what operators give: `by_content` has the operator and the user's line for each content, in order.

    `calls` are those of the forward, which ends when `is_forward` is set to False.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_content: dict[Content, tuple[str, str]] = {}
        self.calls: list[_Call] = []
        self.is_forward = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before: ById[torch.Tensor, torch.Tensor] = ById()
        is_noted = self.is_forward and func is not _DETACH  # which autograd calls for what it saves
        if is_noted:
            tensors = _tensors((args, kwargs))
            before = ById((t, copy_of_tensor(t).requires_grad_(t.requires_grad)) for t in tensors)
        result = func(*args, **kwargs)
        if is_noted:
            self.calls.append(_Call(func, args, kwargs, result, before))
        info = op_info(func)
        is_cotangent = not self.is_forward and "generator" in kwargs  # drawn by `verify`
        if not gives_nothing(func) and not is_cotangent:
            for tensor in _tensors((result, args) if info.writes else result):
                for memory in (tensor, tensor._base):
                    if memory is not None:
                        name = "" if info.is_view else str(func)
                        self.by_content.setdefault(_content(memory), (name, _user_place()))
        return result


def first_not_eager(module: fx.GraphModule, inputs: Sequence[Any], eager: EagerValues) -> Culprit | None:
    """The first node whose value eager does not have; None where eager has all of them."""
    input_contents = {_content(value) for value in inputs if isinstance(value, torch.Tensor)}
    culprit: Culprit | None = None
    graph: set[Content] = set(input_contents)
    for step in steps(module, inputs):
        contents = [_content(tensor) for tensor in _tensors(step.value)]
        graph.update(contents)
        node = step.node
        is_left = node.op != "call_function" or node.target is operator.getitem or gives_nothing(node.target)
        if culprit is not None or is_left or (isinstance(node.target, OpOverload) and op_info(node.target).is_view):
            continue
        if any(content not in eager.by_content and content not in input_contents for content in contents):
            operands = zip(node.all_input_nodes, _tensors((step.args, step.kwargs)), strict=False)
            named = ranges_of((operand.name, value) for operand, value in operands)
            culprit = Culprit(node.name, str(node.target), user_line(node), Gap(Verdict.WRONG), named)
    lacking = next((noted for content, noted in eager.by_content.items() if noted[0] and content not in graph), None)
    if culprit is None and lacking is None:
        return None
    what = "eager has all of the graph's values" if culprit is None else "eager never has this value"
    if lacking is not None:
        place = f" at {lacking[1]}" if lacking[1] else ""
        what += f"; the first of eager's that the graph lacks is that of {lacking[0]}{place}"
    if culprit is None:
        return Culprit("nothing", "no operator of the graph", None, Gap(Verdict.WRONG, what), ())
    return Culprit(culprit.node, culprit.operator, culprit.where, Gap(Verdict.WRONG, what), culprit.operands)


def with_program(culprit: Culprit, eager: EagerValues, maker: Maker) -> Culprit:
    """The culprit with a piece: few of the forward's operators that `maker` gets wrong. Without one where none are."""

    def gap(numbers: Sequence[int]) -> Gap | None:
        piece = _piece([eager.calls[i] for i in sorted(numbers)])
        try:
            return None if piece is None else made_gap(piece, maker)
        except Exception:  # a part of a program may not run
            return None

    numbers = needed_of(gap, range(len(eager.calls) - 1, -1, -1), 1)
    if numbers is None:
        return culprit
    piece = _piece([eager.calls[i] for i in sorted(numbers)])
    return dataclasses.replace(culprit, piece=piece, maker=maker)


def _piece(calls: Sequence[_Call]) -> Piece | None:
    """Calls as a graph. A tensor that none of them made is an input, with its content from before its first use."""
    graph = fx.Graph()
    inputs: list[torch.Tensor] = []
    nodes: dict[Any, fx.Node] = {}  # by the id of a tensor, and by its place: autograd makes another object of a view

    def note(tensor: torch.Tensor, node: fx.Node) -> None:
        nodes[id(tensor)] = nodes[_place(tensor)] = node

    def operand(call: _Call, value: torch.Tensor) -> fx.Node:
        if id(value) not in nodes and _place(value) not in nodes:
            with graph.inserting_before(None):  # ahead of all others
                note(value, graph.placeholder(f"x{len(inputs)}"))
            inputs.insert(0, call.before[value])
        return nodes.get(id(value)) or nodes[_place(value)]

    for call in calls:
        args, kwargs = mapped((call.args, call.kwargs), torch.Tensor, functools.partial(operand, call))
        node = graph.call_function(call.op, args, kwargs)
        if isinstance(call.result, torch.Tensor):
            note(call.result, node)
        elif isinstance(call.result, (list, tuple)):
            for i, item in enumerate(call.result):
                if isinstance(item, torch.Tensor):
                    note(item, graph.call_function(operator.getitem, (node, i)))
    results = dict.fromkeys(node for node in nodes.values() if node.op == "call_function" and not node.users)
    if not results:
        return None
    graph.output(list(results))
    return Piece(make_graph_module(torch.nn.Module(), graph, "Piece"), inputs, Generators.now())


def _place(tensor: torch.Tensor) -> Any:
    if tensor.layout is not torch.strided:
        return id(tensor)
    flags = tensor.dtype, tensor.is_conj(), tensor.is_neg()
    return storage_key(tensor), tensor.storage_offset(), tuple(tensor.shape), tuple(tensor.stride()), flags


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (tensor for tensor in tensors_in(value) if tensor.layout is torch.strided)


@torch.no_grad()
def _content(tensor: torch.Tensor) -> Content:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    content = ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b""
    return tensor.dtype, tuple(tensor.shape), hash(content)


def _user_place() -> str:
    """The user's line that runs, `model.py:41`; nothing in a backward that we called."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not (path := frame.f_code.co_filename).startswith(_OURS):
        if not path.startswith((_TORCH, "<")):
            return f"{os.path.basename(path)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
