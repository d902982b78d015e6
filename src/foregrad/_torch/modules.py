"""Graph modules whose Python code is made when first called, or their graph when first read, and modules that are moved
inside a capture.

Checked on torch 2.13.0.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
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


@dataclasses.dataclass(frozen=True, slots=True)
class LateGraph:
    """A graph that is not made yet. Its nodes are nodes of another, which nobody changes before that.

    `inputs`: what its placeholders stand for, and are named as. `constants`: attributes that it may read. `results`:
    what it returns. `body` gives its other nodes in the order to run; nodes that are not among them may use them, too.
    `make` gives the graph.
    """

    inputs: Sequence[fx.Node]
    constants: Sequence[fx.Node]
    results: Sequence[Any]
    body: Callable[[], list[fx.Node]]
    make: Callable[[], fx.Graph]


class _MadeWhenRead:
    """A class attribute of graph modules whose graph is not made yet: makes it."""

    def __get__(self, module: Any, owner: Any) -> Any:
        late = late_graph_of(module)
        if late is None:
            raise AttributeError("_graph")
        module.graph = graph = late.make()
        del module.late_graph
        return graph


def late_graph_of(module: Any) -> LateGraph | None:
    """The graph of a module that is not made yet; None if it is."""
    return getattr(module, "__dict__", {}).get("late_graph")


def ends_of(module: fx.GraphModule) -> tuple[Sequence[fx.Node], Sequence[Any]]:
    """The inputs of a graph, and its results; the graph need not be made for that."""
    late = late_graph_of(module)
    if late is not None:
        return late.inputs, late.results
    return module.graph.find_nodes(op="placeholder"), next(iter(reversed(module.graph.nodes))).args[0]


class LateGraphModule(fx.GraphModule):
    """A `GraphModule` that generates its code when it is called, or its `forward` or `code` is read.

    A reader gets the function itself, as TorchScript needs. `recompile` does nothing before that.
    """

    # Without annotations and properties: TorchScript would compile them.
    forward = _Late()
    _code = _Late()
    _lineno_map = _Late()
    _prologue_start = _Late()
    _graph = _MadeWhenRead()
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

    def __deepcopy__(self, memo: Any) -> Any:
        _ = self.graph  # made now
        return super().__deepcopy__(memo)

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


def late_graph_module(root: torch.nn.Module, late: LateGraph) -> fx.GraphModule:
    """A graph module that makes its graph late, too."""
    constants = fx.Graph()
    for node in late.constants:
        constants.create_node("get_attr", node.target)
    module = LateGraphModule(root, constants)
    del module._graph
    vars(module)["late_graph"] = late
    return module


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
