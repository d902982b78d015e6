"""TorchScript: as a compiler of captured graphs, and as a part of captured functions; PyTorch's decompositions.

A scripted function that has run a few times runs by a plan: nodes that differentiate by themselves, fused kernels,
which no recorder sees. In a capture a copy of its graph runs instead, without a plan, and with a module's tensors as
arguments, so that stand-ins can be passed for them. Checked on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import UnsupportedOpError, UnsupportedSideEffectError
from ..identity import ById
from ..locks import Bind
from .engine import plain_execution
from .nested import tensors_in


def decomposition_table() -> dict[Any, Callable[..., Any]]:
    """All decompositions of PyTorch's that do not depend on a backend."""
    from torch._decomp import decomposition_table as table

    return dict(table)


def scripted(gm: fx.GraphModule, warm_up: Sequence[Any]) -> Any:
    """A graph of operators as an optimized TorchScript function; run once if `warm_up` are real tensors.

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


def attributes_of(module: torch.jit.ScriptModule) -> list[str]:
    """The names of attributes of the module's object in C++, besides parameters, buffers and modules."""
    kind: Any = torch._C.ConcreteModuleType.from_jit_type(module._c._type())
    return list(kind.get_attributes())


# ------------------------------------------------------------------------------------------------ inside a capture

Swap = Callable[[tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
Read = Callable[[Any, str], None]  # called for each attribute read: the object in C++, the name

_CALLABLE: tuple[Any, ...] = (torch._C.ScriptFunction, torch._C.ScriptMethod)
_without_plans: Any = torch.jit.optimized_execution  # type: ignore[attr-defined]


def install(bind: Bind, capture: Callable[[], tuple[Swap, Read] | None]) -> None:
    """Make scripted functions and methods run without a plan if `capture()` gives a function that finds stand-ins."""
    run = _CALLABLE[0].__call__
    for kind in _CALLABLE:
        bind(kind, "__call__", _call_without_plan(kind.__call__, run, capture))


def _call_without_plan(original: Any, run: Callable[..., Any], capture: Callable[[], tuple[Swap, Read] | None]) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        parts = capture()
        arguments = None if parts is None or _is_of_cpp(self) else _by_position(self, args, kwargs)
        if parts is None or arguments is None:  # for too few arguments, for instance, the original raises
            return original(self, *args, **kwargs)
        swap, read = parts
        function, of_module, constants = _planless(self, read)
        arguments, _ = swap((*arguments, *of_module), {})
        with torch._C.DisableTorchFunction():  # a constant is not closed over
            arguments = (*arguments, *map(torch.ops.aten.lift_fresh_copy.default, constants))
        if _is_method(self):
            arguments = (self.owner, *arguments)
        mode = _KeepingErrors()
        try:
            with _without_plans(False), mode:
                return run(function, *arguments)
        except RuntimeError:
            if mode.error is not None:  # TorchScript makes a RuntimeError of each
                raise mode.error from None
            raise

    return call


class _KeepingErrors(TorchDispatchMode):
    """Remembers what an operator raised."""

    error: BaseException | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except BaseException as error:
            self.error = error
            raise


def _is_method(function: Any) -> bool:
    return isinstance(function, torch._C.ScriptMethod)


def _is_of_cpp(function: Any) -> bool:
    """Whether a method belongs to a class in C++, which has no graph."""
    try:
        return _is_method(function) and function.graph is None
    except RuntimeError:
        return True


def _by_position(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """All arguments in the schema's order, without `self`; None if they do not fit."""
    parameters = function.schema.arguments[_is_method(function) :]
    values = list(args)
    for argument in parameters[len(args) :]:
        if argument.name not in kwargs and not argument.has_default_value():
            return None
        values.append(kwargs.get(argument.name, argument.default_value))
    extra = set(kwargs) - {argument.name for argument in parameters[len(args) :]}
    return None if extra or len(values) != len(parameters) else tuple(values)


def _planless(function: Any, read: Read) -> tuple[Any, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """(a copy without a plan, its module's tensors, its constants); tensors and constants are its last arguments."""
    with plain_execution():  # these passes compare and compute constants
        graph = _inlined(function)
        torch._C._jit_pass_constant_propagation(graph)
    tensors: ById[torch.Tensor, Any] = ById()  # each with its input in the graph

    def stand_in(tensor: torch.Tensor) -> Any:
        if tensor not in tensors:
            tensors[tensor] = graph.addInput("tensor_of_module")
        return tensors[tensor]

    owners = {next(graph.inputs()).debugName(): function.owner} if _is_method(function) else {}
    for node in list(_nodes(graph)):
        if node.kind() == "prim::GetAttr":
            owner = owners.get(next(node.inputs()).debugName())
            value = None if owner is None else getattr(owner, node.s("name"))
            if isinstance(value, torch._C.ScriptObject):
                owners[node.output().debugName()] = value
            elif owner is not None:
                read(owner, node.s("name"))
                node.output().replaceAllUsesWith(_in_place_of(node, graph, value, stand_in))
        elif node.kind() == "prim::SetAttr" and next(node.inputs()).debugName() in owners:
            _check_written(node, owners, tensors)
            node.destroy()
        elif node.kind() in ("aten::tensor", "aten::as_tensor"):
            _check_made(node)
        elif node.kind() in _OUT_OF_SIGHT:
            raise UnsupportedOpError(
                f"TorchScript calls a function whose code is unknown before it runs ({node.kind()} at "
                f"{node.sourceRange()}). Use it without torch.jit.script, or keep it outside."
            )
        elif node.kind() == "prim::NumToTensor":
            node.output().replaceAllUsesWith(_number_as_tensor(node, graph))
    constants: list[torch.Tensor] = []

    def constant(tensor: torch.Tensor) -> Any:
        constants.append(tensor)
        return graph.addInput("constant")

    for node in list(_nodes(graph)):
        if node.kind() == "prim::Constant" and tensors_in(value := node.output().toIValue()):
            node.output().replaceAllUsesWith(_in_place_of(node, graph, value, constant))
    copy = torch._C._create_function_from_graph("without_plan", graph)
    return copy, tuple(tensors), tuple(constants)


def _number_as_tensor(node: Any, graph: Any) -> Any:
    """A number as a tensor made by an operator, in place of one that TorchScript writes straight to memory."""
    number = next(node.inputs())
    operator = graph.create(
        "aten::scalar_tensor", [number, *(graph.insertConstant(v) for v in _OF_KIND[str(number.type())])]
    )
    for argument in list(operator.inputs())[1:]:
        argument.node().moveBefore(node)
    operator.insertBefore(node)
    return operator.output()


def _inlined(function: Any) -> Any:
    """The function's graph, with the graphs of the functions that it calls in place of the calls."""
    graph = function.inlined_graph.copy()
    torch._C._jit_pass_inline_fork_wait(graph)
    calls = before = -1
    while calls < 0 or calls not in (0, before):  # each round inlines the calls inside the graphs of the last
        torch._C._jit_pass_inline(graph)
        before, calls = calls, sum(node.kind() in ("prim::CallMethod", "prim::CallFunction") for node in _nodes(graph))
    return graph


def _in_place_of(node: Any, graph: Any, value: Any, stand_in: Callable[[torch.Tensor], Any]) -> Any:
    """The graph's value for an attribute that `node` reads of a module: an input for each tensor, else constants."""
    if isinstance(value, torch.Tensor):
        return stand_in(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        replacement = graph.insertConstant(value)
        replacement.node().moveBefore(node)
        return replacement
    kind = _CONSTRUCTS.get(type(value))
    if kind is None or any(use.user.kind() in _WRITES_LISTS for use in node.output().uses()):
        raise UnsupportedOpError(
            f"a scripted module reads its attribute `{node.s('name')}` ({node.sourceRange()}), a "
            f"{type(value).__name__}, in a way that can't be captured. Compile the module without torch.jit.script, or "
            "keep it outside."
        )
    items = [part for item in value.items() for part in item] if type(value) is dict else value
    replacement = graph.create(kind, [_in_place_of(node, graph, item, stand_in) for item in items], 1)
    replacement.insertBefore(node)
    replacement.output().setType(node.output().type())
    return replacement.output()


# The dtype (as TorchScript numbers them), layout, device and memory of a tensor made of a number.
_OF_KIND = {"int": (4, None, None, None), "float": (7, None, None, None), "bool": (11, None, None, None)}
_CONSTRUCTS: dict[type, str] = {list: "prim::ListConstruct", tuple: "prim::TupleConstruct", dict: "prim::DictConstruct"}
_OUT_OF_SIGHT = {"prim::CallMethod", "prim::CallFunction", "prim::fork", "prim::awaitable"}
_LIST_WRITERS = ("append", "extend", "insert", "pop", "clear", "reverse", "sort", "remove", "_set_item", "Delete")
_WRITES_LISTS = {f"aten::{name}" for name in _LIST_WRITERS}


def _check_made(node: Any) -> None:
    """Raise `UnsupportedOpError` for a tensor made of a list, whose numbers TorchScript writes straight to memory."""
    if next(node.inputs()).type().kind() == "ListType":
        raise UnsupportedOpError(
            f"TorchScript makes a tensor of a list that is no constant ({node.sourceRange()}), which can't be "
            "captured. Use torch.stack of tensors, or the function without torch.jit.script."
        )


def _check_written(node: Any, owners: dict[str, Any], tensors: ById[torch.Tensor, Any]) -> None:
    """Raise `UnsupportedSideEffectError` unless an attribute is set to its present tensor, as by `self.count += 1`."""
    owner_value, value = node.inputs()
    current = getattr(owners.get(owner_value.debugName()), node.s("name"), None)
    made_by = value.node()
    if isinstance(current, torch.Tensor) and made_by.kind().startswith("aten::") and made_by.kind().endswith("_"):
        written = next(made_by.inputs()).debugName()
        if current in tensors and tensors[current].debugName() == written:
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
