"""The first operator of a captured graph that eager does not run.

Eager runs once more under a mode that notes each result by its content. A node of the graph, run on eager's kernels,
whose value eager never had is where the capture went wrong; with it goes the first operator of eager's whose value the
graph lacks.

Known weakness: a value that eager has twice, once where the graph has it and once where it lacks it, is not missed.
"""

from __future__ import annotations

import ctypes
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
from .._torch.pytree import leaves_of
from ..graph.printing import user_line
from ..tracing.tape.opinfo import op_info
from .compare import Gap, Verdict
from .locate import Culprit, ranges_of
from .lockstep import gives_nothing, steps

__all__ = ["EagerValues", "first_not_eager"]

_TORCH, _OURS = (os.path.dirname(module.__file__ or "") for module in (torch, sys.modules["foregrad"]))
Content = tuple[Any, ...]


class EagerValues(ThreadDispatchMode):
    """Notes what operators give: `by_content` has the operator and the user's line for each content, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.by_content: dict[Content, tuple[str, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = op_info(func)
        if not gives_nothing(func):
            for tensor in _tensors((result, args) if known.writes else result):
                for memory in (tensor, tensor._base):
                    if memory is not None:
                        name = "" if known.is_view else str(func)
                        self.by_content.setdefault(_content(memory), (name, _user_place()))
        return result


def first_not_eager(module: fx.GraphModule, inputs: Sequence[Any], eager: EagerValues) -> Culprit | None:
    """The first node whose value eager does not have; None where eager has all of them."""
    given = {_content(value) for value in inputs if isinstance(value, torch.Tensor)}
    found: Culprit | None = None
    graph: set[Content] = set(given)
    for step in steps(module, inputs):
        contents = [_content(tensor) for tensor in _tensors(step.value)]
        graph.update(contents)
        node = step.node
        is_left = node.op != "call_function" or node.target is operator.getitem or gives_nothing(node.target)
        if found is not None or is_left or (isinstance(node.target, OpOverload) and op_info(node.target).is_view):
            continue
        if any(content not in eager.by_content and content not in given for content in contents):
            operands = zip(node.all_input_nodes, _tensors((step.args, step.kwargs)), strict=False)
            named = ranges_of((operand.name, value) for operand, value in operands)
            found = Culprit(node.name, str(node.target), user_line(node), Gap(Verdict.WRONG), named)
    lacking = next((known for content, known in eager.by_content.items() if known[0] and content not in graph), None)
    if found is None and lacking is None:
        return None
    what = "eager has all of the graph's values" if found is None else "eager never has this value"
    if lacking is not None:
        place = f" at {lacking[1]}" if lacking[1] else ""
        what += f"; the first of eager's that the graph lacks is that of {lacking[0]}{place}"
    if found is None:
        return Culprit("nothing", "no operator of the graph", None, Gap(Verdict.WRONG, what), ())
    return Culprit(found.node, found.operator, found.where, Gap(Verdict.WRONG, what), found.operands)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves_of(value) if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)


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
