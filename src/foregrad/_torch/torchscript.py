"""TorchScript: as a compiler of captured graphs, and as a part of captured functions; PyTorch's decompositions.

A scripted function that has run a few times runs by a plan: nodes that differentiate by themselves, fused kernels,
which no recorder sees. In a capture a copy of its graph runs instead, without a plan, and with a module's tensors as
arguments, so that stand-ins can be given for them. Checked on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import UnsupportedOpError, UnsupportedSideEffectError
from .dispatch import plain_execution

__all__ = ["decomposition_table", "install", "remove", "scripted"]


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """All of PyTorch's decompositions that need no backend's say."""
    from torch._decomp import decomposition_table as table

    return dict(table)


def scripted(gm: fx.GraphModule, warm_up: Sequence[Any]) -> Any:
    """A graph of operators as an optimized TorchScript function; run once, when `warm_up` are real tensors.

    TorchScript keeps autocast rules of its own, which a captured graph has applied already, so they are off here.
    """
    before = torch._C._jit_set_autocast_mode(False)
    try:
        function: Any = torch.jit.script(gm)
        torch._C._jit_pass_remove_mutation(function.graph)
        function = torch.jit.optimize_for_inference(torch.jit.freeze(function.eval()))
        if warm_up:
            function(*warm_up)
    finally:
        torch._C._jit_set_autocast_mode(before)
    return function


# ------------------------------------------------------------------------------------------------ inside a capture

Swap = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]

_CALLABLE: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
_ORIGINALS = tuple(kind.__call__ for kind in _CALLABLE)
_without_plans: Any = torch.jit.optimized_execution  # type: ignore[attr-defined]


def install(swap: Callable[[], Swap | None]) -> None:
    """Scripted functions and methods run without a plan where `swap()` gives what finds stand-ins for tensors."""
    run = _ORIGINALS[0]
    for kind, original in zip(_CALLABLE, _ORIGINALS, strict=True):
        kind.__call__ = _call_without_plan(original, run, swap)


def remove() -> None:
    """Undo `install`."""
    for kind, original in zip(_CALLABLE, _ORIGINALS, strict=True):
        kind.__call__ = original


def _call_without_plan(original: Any, run: Callable[..., Any], swap: Callable[[], Swap | None]) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        swapped = swap()
        given = None if swapped is None else _by_position(self, args, kwargs)
        if swapped is None or given is None:  # too few arguments, say: that says what is wrong
            return original(self, *args, **kwargs)
        function, of_module, constants = _planless(self)
        given, _ = swapped((*given, *of_module), {})
        with torch._C.DisableTorchFunction():  # a constant is no tensor from outside
            given = (*given, *map(torch.ops.aten.lift_fresh_copy.default, constants))
        if _is_method(self):
            given = (self.owner, *given)
        mode = _KeepingErrors()
        try:
            with _without_plans(False), mode:
                return run(function, *given)
        except RuntimeError:
            if mode.error is not None:  # TorchScript makes a RuntimeError of each
                raise mode.error from None
            raise

    return call


class _KeepingErrors(TorchDispatchMode):
    """Remembers what an operator raised."""

    error: Exception | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception as error:
            self.error = error
            raise


def _is_method(function: Any) -> bool:
    return isinstance(function, torch._C.ScriptMethod)


def _by_position(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """All arguments in the schema's order, without `self`; None where they do not fit."""
    wanted = function.schema.arguments[_is_method(function) :]
    given = list(args)
    for argument in wanted[len(args) :]:
        if argument.name not in kwargs and not argument.has_default_value():
            return None
        given.append(kwargs.get(argument.name, argument.default_value))
    extra = set(kwargs) - {argument.name for argument in wanted[len(args) :]}
    return None if extra or len(given) != len(wanted) else tuple(given)


def _planless(function: Any) -> tuple[Any, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(a copy that has no plan yet, the tensors of its module, its constants): the latter are its last arguments."""
    graph = function.inlined_graph.copy()
    with plain_execution():
        torch._C._jit_pass_constant_propagation(graph)
    tensors: dict[int, tuple[torch.Tensor, Any]] = {}  # with what stands for it in the graph
    owners = {next(graph.inputs()).debugName(): function.owner} if _is_method(function) else {}
    for node in list(_nodes(graph)):
        if node.kind() == "prim::GetAttr":
            owner = owners.get(next(node.inputs()).debugName())
            value = None if owner is None else getattr(owner, node.s("name"))
            if isinstance(value, torch.Tensor):
                if id(value) not in tensors:
                    tensors[id(value)] = value, graph.addInput("tensor_of_module")
                node.output().replaceAllUsesWith(tensors[id(value)][1])
            elif isinstance(value, torch._C.ScriptObject):
                owners[node.output().debugName()] = value
            elif owner is not None:
                raise UnsupportedOpError(
                    f"a scripted module reads its attribute `{node.s('name')}` ({node.sourceRange()}), whose changes "
                    "nobody sees. Compile the module without torch.jit.script, or keep it outside."
                )
        elif node.kind() == "prim::SetAttr" and next(node.inputs()).debugName() in owners:
            _check_written(node, owners, tensors)
            node.destroy()
        elif node.kind() in ("aten::tensor", "aten::as_tensor"):
            _check_made(node)
    constants = []
    for node in list(_nodes(graph)):
        if node.kind() == "prim::Constant" and isinstance(node.output().toIValue(), torch.Tensor):
            constants.append(node.output().toIValue())
            node.output().replaceAllUsesWith(graph.addInput("constant"))
    made = torch._C._create_function_from_graph("without_plan", graph)
    return made, tuple(tensor for tensor, _ in tensors.values()), tuple(constants)


def _check_made(node: Any) -> None:
    """Raise for a tensor made of a list, whose numbers TorchScript writes straight to memory."""
    if next(node.inputs()).type().kind() == "ListType":
        raise UnsupportedOpError(
            f"TorchScript makes a tensor of a list that is no constant ({node.sourceRange()}), which can't be "
            "captured. Use torch.stack of tensors, or the function without torch.jit.script."
        )


def _check_written(node: Any, owners: dict[str, Any], tensors: dict[int, tuple[torch.Tensor, Any]]) -> None:
    """Raise unless an attribute is set to the tensor that it is already, as `self.count += 1` does."""
    owner_value, value = node.inputs()
    current = getattr(owners.get(owner_value.debugName()), node.s("name"), None)
    made_by = value.node()
    if isinstance(current, torch.Tensor) and made_by.kind().startswith("aten::") and made_by.kind().endswith("_"):
        written = next(made_by.inputs()).debugName()
        if id(current) in tensors and tensors[id(current)][1].debugName() == written:
            return
    raise UnsupportedSideEffectError(
        f"a scripted module sets its attribute `{node.s('name')}`, which a compiled call would not do again. Return "
        "the value, or write to the tensor in place."
    )


def _nodes(block: Any) -> Iterator[Any]:
    for node in block.nodes():
        yield node
        for inner in node.blocks():
            yield from _nodes(inner)
