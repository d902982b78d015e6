"""Fusion by TorchScript, under the names of PyTorch's `functorch.compile`: `memory_efficient_fusion` and its parts.

Kept for code written for it. Inductor (`backend="inductor"`) makes faster kernels and is maintained.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn

from ._torch.codegen import OpOverload
from ._torch.fakes import FakeTensor
from ._torch.torchscript import decomposition_table, scripted
from .aot import aot_function, compile_aot_module
from .backends.boxed import make_boxed_compiler
from .partitioners import min_cut_rematerialization_partition

aten = torch.ops.aten


@functools.cache
def default_decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions for a fuser of elementwise operators: activations and normalizations, and their backwards;
    `{operator: function}`.
    """
    families = (
        "gelu", "silu", "mish", "elu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "softplus", "softshrink",
        "hardshrink", "threshold", "sigmoid", "tanh", "log_sigmoid", "rsub", "addcmul", "addcdiv", "masked_fill",
        "native_layer_norm", "native_group_norm", "native_dropout", "_softmax", "_log_softmax", "mse_loss",
        "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "detach", "slice_backward", "select_backward",
        "_softmax_backward_data", "_log_softmax_backward_data",
    )  # fmt: skip
    names = {name for family in families for name in (family, f"{family}_backward")}
    names.remove("sigmoid")  # which adds a number by an operator that TorchScript does not have
    return {
        op: function
        for op, function in decomposition_table().items()
        if op.namespace == "aten" and op.overloadpacket.__name__ in names and not op._schema.is_mutable
    }


@make_boxed_compiler
def ts_compile(fx_g: fx.GraphModule, inps: Sequence[Any]) -> Any:
    """Compile a graph with TorchScript. Raises TorchScript's errors for operators that it can't compile.

    Examples:
        >>> import torch, warnings, foregrad
        >>> with warnings.catch_warnings():  # PyTorch deprecates TorchScript
        ...     warnings.simplefilter("ignore")
        ...     foregrad.aot_function(lambda x: x * 2, fw_compiler=foregrad.ts_compile)(torch.ones(2))
        tensor([2., 2.])
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(fx_g.graph, {}))
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, OpOverload):
            # TorchScript chooses overloads by itself, and has `to` in place of `_to_copy`.
            plain = set(node.kwargs) == {"dtype"} and len(node.args) == 1
            cast = node.target is aten._to_copy.default and plain
            node.target = aten.to if cast else node.target.overloadpacket
        node.kwargs = {
            name: value.type if isinstance(value, torch.device) else value for name, value in node.kwargs.items()
        }
    real = [] if any(isinstance(value, FakeTensor) for value in inps) else list(inps)
    return scripted(fx.GraphModule(fx_g, graph), real)


def mem_efficient_fusion_kwargs(use_decomps: bool) -> dict[str, Any]:
    """The arguments for `aot_function` or `aot_autograd` that make it `memory_efficient_fusion`.

    Examples:
        >>> import foregrad
        >>> sorted(foregrad.mem_efficient_fusion_kwargs(use_decomps=True))
        ['bw_compiler', 'decompositions', 'fw_compiler', 'partition_fn']
    """
    kwargs: dict[str, Any] = {
        "fw_compiler": ts_compile,
        "bw_compiler": ts_compile,
        "partition_fn": min_cut_rematerialization_partition,
    }
    if use_decomps:
        kwargs["decompositions"] = default_decompositions()
    return kwargs


def memory_efficient_fusion(fn: Callable[..., Any] | nn.Module, **kwargs: Any) -> Any:
    """Compile a function or module: TorchScript for both halves, split so that the fewest bytes are saved.

    `kwargs` are for `aot_function` (`aot_module` for a module) and override the ones chosen here.

    Examples:
        >>> import torch, warnings, foregrad
        >>> with warnings.catch_warnings():  # PyTorch deprecates TorchScript
        ...     warnings.simplefilter("ignore")
        ...     foregrad.memory_efficient_fusion(lambda x: x * 2)(torch.ones(2))
        tensor([2., 2.])
    """
    settings = {**mem_efficient_fusion_kwargs(use_decomps=True), **kwargs}
    if isinstance(fn, nn.Module):
        return compile_aot_module(fn, (), settings, functools.partial(memory_efficient_fusion, **kwargs))
    return aot_function(fn, **settings)
