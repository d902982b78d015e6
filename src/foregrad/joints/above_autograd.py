"""Graphs of operators above autograd: `linear`, `dropout`, `scaled_dot_product_attention` and their like stay whole.

PyTorch's dispatcher splits such composite operators before a capture sees them. So PyTorch traces the module above
autograd first, and that graph of operators is captured as any function, with its composite operators as entries of the
tape. A composite operator whose result may share memory with an argument, or that writes, is taken apart.

Known weakness: switches of grad mode are no nodes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

from .._torch.engine import TorchFunctionMode, current_dispatch_mode, without_modes, without_torch_functions
from .._torch.fakes import FakeTensor, fake_mode_of
from .._torch.graphs import is_higher_order
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
            if func is aten.dropout.default:
                out = recorder.fakes_like(dataclasses.replace(TensorSpec.of(out), offset=0))
            if not any(share_memory(result, tensor) for result in tensors_in(out) for tensor in given):
                is_random = op_info(func).is_random or "dropout" in func.name() or bool(kwargs.get("dropout_p"))
                entry = recorder.entry(func, recorder.to_entries(args), recorder.to_entries(kwargs), is_random)
                return recorder.bind_results(entry, out)
        return func(*args, **kwargs)


def _is_whole(op: OpOverload) -> bool:
    info = op_info(op)
    aliases = any(value.alias_info is not None for value in (*op._schema.arguments, *op._schema.returns))
    return info.is_composite and not (aliases or info.hidden_writes or op in _WRITES)


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
    with fakes or contextlib.nullcontext(), torch.no_grad(), preserve_node_meta():
        graph = make_fx(traced, tracing_mode=how, pre_dispatch=True, **told)(*known)
    _check(graph)
    the_one("lines of Dynamo's graphs")(graph)
    own = list(held.values())

    def above(*args: Any, **kwargs: Any) -> Any:
        given, _ = flatten((args, kwargs))
        return graph(*own, *(leaf for leaf in given if isinstance(leaf, torch.Tensor)))

    return above


def _drop_identities(graph: fx.Graph) -> None:
    """Put the argument in the place of a `dropout` that drops nothing, where its memory is written to.

    Such a `dropout` gives its argument; the operator in a functional graph gives a new tensor.
    """
    identities = [n for n in graph.nodes if n.target is aten.dropout.default and not n.args[2]]
    memory: dict[int, int] = {}  # by the memory of a result, in PyTorch's graph: that of the argument
    for node in identities:
        memory[_memory(node)] = memory.get(_memory(node.args[0]), _memory(node.args[0]))
    written = {memory.get(key, key) for node in graph.nodes for key in map(_memory, _written_arguments(node))}
    for node in identities:
        if memory[_memory(node)] in written:
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


def _check(graph: fx.GraphModule) -> None:
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
            if getattr(target, "__name__", "") == "_set_grad_enabled":
                part.graph.erase_node(node)
                continue
            is_operator = isinstance(target, OpOverload) or is_higher_order(target)
            name, home = getattr(target, "__name__", str(target)), getattr(target, "__module__", "")
            of_sizes = home == "_operator" or name.startswith("sym_")
            if node.op == "call_function" and not (is_operator or of_sizes):
                raise UnsupportedError(f"`{name}` is no operator of a graph above autograd: pass pre_dispatch=False")
        _drop_identities(part.graph)
        part.recompile()
