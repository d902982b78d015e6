"""Graph modules whose Python code is made when first called, and modules that are moved inside a capture.

Checked on torch 2.13.0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from ..locks import Bind


class _Late:
    """A class attribute of graph modules whose code is not made yet: makes the code, and gives the real attribute."""

    def __set_name__(self, owner: Any, name: str) -> None:
        self.name = name

    def __get__(self, module: Any, owner: Any) -> Any:
        if owner.without_code is None or "forward" in vars(owner):
            raise AttributeError(self.name)
        owner.without_code().make_code()
        return getattr(owner if module is None else module, self.name)


class LateGraphModule(fx.GraphModule):
    """A `GraphModule` that generates its code when it is called, or its `forward` or `code` is read.

    A reader gets the function itself, as TorchScript needs. `recompile` does nothing before that.
    """

    # Without annotations and properties: TorchScript would compile them.
    forward = _Late()
    _code = _Late()
    _lineno_map = _Late()
    _prologue_start = _Late()
    without_code = None  # gives the module, on the class that each has for itself

    def recompile(self) -> Any:
        own: Any = type(self)
        if "forward" in vars(own):
            return super().recompile()
        own.without_code = weakref.ref(self)
        return None

    def make_code(self) -> None:
        if "forward" not in vars(type(self)):
            super().recompile()

    def __reduce__(self) -> Any:
        self.make_code()
        return super().__reduce__()

    def __reduce_package__(self, exporter: Any) -> Any:
        self.make_code()
        return super().__reduce_package__(exporter)


def make_graph_module(
    root: torch.nn.Module | dict[str, Any], graph: fx.Graph, name: str = "GraphModule"
) -> fx.GraphModule:
    """A graph module that makes its code late. Attributes that the graph reads are taken from `root`."""
    return LateGraphModule(root, graph, name)


def with_nested_arguments(module: fx.GraphModule, primals: int, tangents: int) -> fx.GraphModule:
    """The graph, called as `(list of primals, list of tangents)`, returning a list."""
    output = next(iter(reversed(module.graph.nodes)))
    _, spec = pytree.tree_flatten((([0] * primals, [0] * tangents), {}))
    _, out_spec = pytree.tree_flatten([0] * len(output.args[0]))
    module.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(["primals", "tangents"], spec, out_spec)))
    module.recompile()
    return module


# -------------------------------------------------------------------- modules that are moved
# `module.to(device)`, `.float()`, `.cpu()` inside a capture, if they change no tensor of the module.
#
# PyTorch then assigns each parameter to itself (`param.data = param`). For fake tensors it would replace the
# parameters. Checked on torch 2.11.0, 2.13.0.


_original: Callable[..., torch.nn.Module] = torch.nn.Module._apply
_is_capturing: Callable[[], bool]
_swapped: Callable[[Any], Any]


def _apply(self: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
    if _is_capturing():
        held = [*self.parameters(recurse), *self.buffers(recurse)]
        with torch.no_grad():
            applied = [(fn(tensor), tensor) for tensor in held]
            if all(after is tensor or after is _swapped(tensor) for after, tensor in applied):
                return self
    return _original(self, fn, recurse)


def install(bind: Bind, is_capturing: Callable[[], bool], swapped: Callable[[Any], Any]) -> None:
    """Install the patch; `swapped(tensor)` is the stand-in of a tensor in this thread's capture."""
    global _is_capturing, _swapped
    _is_capturing, _swapped = is_capturing, swapped
    bind(torch.nn.Module, "_apply", _apply)
