"""Graphs of operators above autograd: `linear`, `dropout`, `scaled_dot_product_attention` and their like stay whole.

PyTorch's dispatcher splits such composite operators before a capture sees them. So PyTorch traces the module above
autograd first, and that graph of operators is captured as any function, with its composite operators as entries of the
tape. A composite operator whose result may share memory with an argument, or that writes, is taken apart.

Switches of grad mode and `detach` are operators of the graph too, so that a graph that is differentiated has the
module's gradients. Known weakness: branches of `cond` hold no switches.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from .._torch.engine import TorchFunctionMode, current_dispatch_mode, without_modes, without_torch_functions
from .._torch.fakes import FakeTensor, fake_mode_of
from .._torch.graphs import is_higher_order, set_grad_enabled
from .._torch.nested import leaves, tensors_in
from .._torch.ops import OpOverload
from .._torch.tensors import is_inside_transform, share_memory, storage_key
from ..annexes import the_one
from ..errors import UnsupportedError
from ..frontend.call import FlatCall
from ..frontend.tree import flatten
from ..graph.meta import TensorSpec
from ..identity import attributed
from ..tracing.tape.opinfo import op_info

aten = torch.ops.aten
_IDENTITIES = {aten.dropout.default, aten.detach.default}  # each may give its argument; an operator gives a new tensor
_WRITES = {aten.batch_norm.default, aten.instance_norm.default, aten._batch_norm_impl_index.default}  # statistics


class WholeOperators(TorchFunctionMode):
    """Records each call of a composite operator as it is, where no decomposition is given for it."""

    def __init__(self, decompositions: Mapping[Any, Any]) -> None:
        super().__init__()
        self.decompositions = decompositions

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload) or func in self.decompositions or not _is_whole(func):
            return func(*args, **kwargs)
        recorder: Any = current_dispatch_mode()
        args, kwargs = recorder.host.swap(args, kwargs)
        with without_torch_functions(), without_modes(None, recorder):
            out = recorder.kernels(func, args, kwargs)
            given = list(tensors_in((args, kwargs)))
            if func in _IDENTITIES:
                out = recorder.fakes_like(dataclasses.replace(TensorSpec.of(out), offset=0))
            if not any(share_memory(result, tensor) for result in tensors_in(out) for tensor in given):
                is_random = op_info(func).is_random or "dropout" in func.name() or bool(kwargs.get("dropout_p"))
                entry = recorder.entry(func, recorder.to_entries(args), recorder.to_entries(kwargs), is_random)
                return recorder.bind_results(entry, out)
        return func(*args, **kwargs)


def _is_whole(op: OpOverload) -> bool:
    info = op_info(op)
    aliases = any(value.alias_info is not None for value in (*op._schema.arguments, *op._schema.returns))
    return op is aten.detach.default or (info.is_composite and not (aliases or info.hidden_writes or op in _WRITES))


def above_autograd(mod: nn.Module, call: FlatCall, *, dynamic: bool) -> Callable[..., Any]:
    """A function of the module's arguments that runs PyTorch's graph of the module above autograd.

    Raises `UnsupportedError` where that graph holds more than operators, such as a switch of autocast.
    """
    held = {**dict(mod.named_parameters()), **dict(mod.named_buffers())}
    tensors = [leaf for leaf in call.leaves if isinstance(leaf, torch.Tensor)]

    def on_tensors(*values: torch.Tensor) -> Any:
        given = iter(values[len(held) :])
        filled = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
        args, kwargs = call.tree.unflatten(filled)
        return functional_call(mod, dict(zip(held, values, strict=False)), tuple(args), kwargs)

    known = [*held.values(), *tensors]
    fakes = fake_mode_of(known)
    how: Any = "real" if fakes is not None else "symbolic" if dynamic else "fake"
    traced = attributed(on_tensors, _orig_mod=mod)  # where the tracer looks for the module whose parts it names
    told: Any = {"record_module_stack": True, "record_stack_traces": True}
    trace = make_fx(traced, tracing_mode=how, pre_dispatch=True, **told)
    with fakes or contextlib.nullcontext(), preserve_node_meta():
        try:
            graph = trace(*known)
        except RuntimeError as error:
            if type(error).__module__ != "torch._dynamo.exc":
                raise
            with torch.no_grad():  # Dynamo traces a `scan` with parameters in this mode alone
                graph = trace(*known)
            parts = (part.graph for part in graph.modules() if isinstance(part, fx.GraphModule))
            if any(part.find_nodes(op="call_function", target=set_grad_enabled) for part in parts):
                raise
    _check(graph, _with_gradients(graph.graph, known))
    the_one("lines of Dynamo's graphs")(graph)
    own = list(held.values())

    def above(*args: Any, **kwargs: Any) -> Any:
        given, _ = flatten((args, kwargs))
        return graph(*own, *(leaf for leaf in given if isinstance(leaf, torch.Tensor)))

    return above


def _with_gradients(graph: fx.Graph, known: Sequence[torch.Tensor]) -> set[fx.Node]:
    """The nodes that an input with gradients leads to, if grad mode is on."""
    given = zip(graph.find_nodes(op="placeholder"), known, strict=True)
    found = {node for node, tensor in given if tensor.requires_grad and torch.is_grad_enabled()}
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _drop_identities(graph: fx.Graph, with_gradients: Collection[fx.Node]) -> None:
    """Put the argument in the place of a `detach`, or a `dropout` that drops nothing, where its memory is written to.

    Such an operator gives its argument's memory; the operator in a functional graph gives a new tensor.
    """
    identities = [n for n in graph.nodes if n.target in _IDENTITIES and not any(n.args[2:])]
    memory: dict[int, int] = {}  # by the memory of a result, in PyTorch's graph: that of the argument
    for node in identities:
        memory[_memory(node)] = memory.get(_memory(node.args[0]), _memory(node.args[0]))
    written = {memory.get(key, key) for node in graph.nodes for key in map(_memory, _written_arguments(node))}
    for node in identities:
        if memory[_memory(node)] in written:
            if node.target is aten.detach.default and node.args[0] in with_gradients:
                raise UnsupportedError(
                    "a graph above autograd can't hold a write to detached memory that requires grad, at "
                    f"{' '.join(node.meta.get('stack_trace', '').split())}: write to a copy, or export the graph under "
                    "torch.no_grad()"
                )
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _memory(node: fx.Node) -> int:
    value = node.meta.get("val")
    return storage_key(value) if isinstance(value, torch.Tensor) else id(node)


def _written_arguments(node: fx.Node) -> Iterator[fx.Node]:
    info = op_info(node.target) if isinstance(node.target, OpOverload) else None
    if info is not None:
        given = dict(zip(info.argument_names, node.args, strict=False)) | node.kwargs
        written = leaves([given.get(info.argument_names[position]) for position in info.writes])
        yield from (leaf for leaf in written if isinstance(leaf, fx.Node))


def _switch(*mode: bool) -> None:
    """Record a switch of grad mode, and leave grad mode as it is."""
    recorder: Any = current_dispatch_mode()
    recorder.entry(set_grad_enabled, mode, {}, is_random=False).has_effect = True


def _check(graph: fx.GraphModule, with_gradients: Collection[fx.Node]) -> None:
    for part in graph.modules():
        if not isinstance(part, fx.GraphModule):
            continue
        for node in list(part.graph.nodes):
            target = node.target
            held = getattr(part, target, None) if node.op == "get_attr" else None
            if isinstance(held, torch.Tensor) and (is_inside_transform(held) or isinstance(held, FakeTensor)):
                raise UnsupportedError(
                    "a transform of torch.func is no operator above autograd: pass pre_dispatch=False"
                )
            if target is set_grad_enabled:
                node.target = _switch
                if part is not graph:
                    part.graph.erase_node(node)
                continue
            if target is aten.detach_.default:
                node.target = aten.detach.default
            is_operator = isinstance(target, OpOverload) or is_higher_order(target)
            name, home = getattr(target, "__name__", str(target)), getattr(target, "__module__", "")
            of_sizes = home == "_operator" or name.startswith("sym_")
            if node.op == "call_function" and not (is_operator or of_sizes):
                raise UnsupportedError(f"`{name}` is no operator of a graph above autograd: pass pre_dispatch=False")
        _drop_identities(part.graph, with_gradients)
        part.recompile()
