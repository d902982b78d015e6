"""Fusion by TorchScript and compilers that show a graph, under the names of PyTorch's `functorch.compile`.

Kept for code written for them. Inductor (`backend="inductor"`) makes faster kernels and is maintained.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from .._torch.fakes import FakeTensor
from .._torch.ops import OpOverload
from ..aot import aot_function, compile_aot_module
from ..backends.boxed import make_boxed_compiler
from ..partitioners import min_cut_rematerialization_partition
from ._torch import decomposition_table, draw, minified, scripted

aten = torch.ops.aten


class DefaultDecompositions(dict[Any, Callable[..., Any]]):
    """Decompositions for a fuser of elementwise operators: activations and normalizations, and their backwards;
    `{operator: function}`. For `decompositions=`, with `ts_compile`.
    """


@functools.cache
def default_decompositions() -> dict[Any, Callable[..., Any]]:
    """The table behind `foregrad.default_decompositions`."""
    families = (
        "gelu", "silu", "mish", "elu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "softplus", "softshrink",
        "hardshrink", "threshold", "sigmoid", "tanh", "log_sigmoid", "rsub", "addcmul", "addcdiv", "masked_fill",
        "native_layer_norm", "native_group_norm", "native_dropout", "_softmax", "_log_softmax", "mse_loss",
        "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "detach", "slice_backward", "select_backward",
        "_softmax_backward_data", "_log_softmax_backward_data",
    )  # fmt: skip
    names = {name for family in families for name in (family, f"{family}_backward")}
    names.remove("sigmoid")  # it adds a number by an operator that TorchScript does not have
    return DefaultDecompositions(
        (op, function)
        for op, function in decomposition_table().items()
        if op.namespace == "aten" and op.overloadpacket.__name__ in names and not op._schema.is_mutable
    )


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
    """The arguments with which `aot_function` and `aot_autograd` do as `memory_efficient_fusion`.

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

    `kwargs` are for `aot_function` (`aot_module` for a module) and override `mem_efficient_fusion_kwargs`.

    Examples:
        >>> import torch, warnings, foregrad
        >>> with warnings.catch_warnings():  # PyTorch deprecates TorchScript
        ...     warnings.simplefilter("ignore")
        ...     foregrad.memory_efficient_fusion(lambda x: x * 2)(torch.ones(2))
        tensor([2., 2.])
    """
    settings = {**mem_efficient_fusion_kwargs(use_decomps=True), **kwargs}
    if isinstance(fn, nn.Module):
        return compile_aot_module(fn, settings, functools.partial(memory_efficient_fusion, **kwargs))
    return aot_function(fn, **settings)


# -------------------------------------------------------------------- compilers that show a graph


@make_boxed_compiler
def print_compile(fx_g: fx.GraphModule, _: Any) -> fx.GraphModule:
    """A compiler that prints the graph's code, and compiles nothing.

    Examples:
        >>> import torch, foregrad
        >>> out = foregrad.aot_function(lambda x: x * 2, fw_compiler=foregrad.print_compile)(torch.ones(2))
        <BLANKLINE>
        <BLANKLINE>
        <BLANKLINE>
        def forward(self, primals_1):
            mul = torch.ops.aten.mul.Tensor(primals_1, 2);  primals_1 = None
            return [mul]
        <BLANKLINE>
    """
    print(fx_g.code)
    return fx_g


def debug_compile(fx_g: fx.GraphModule, inps: Sequence[torch.Tensor]) -> Any:
    """Write the graph to the folder `foo`, print a program that runs it, and compile it as `ts_compile` does.

    Examples:
        >>> import os, tempfile, torch, warnings, foregrad
        >>> os.chdir(tempfile.mkdtemp())
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # PyTorch deprecates TorchScript
        ...     out = foregrad.aot_function(lambda x: x * 2, fw_compiler=foregrad.debug_compile)(torch.ones(2))
        import torch
        from foo import FxModule
        <BLANKLINE>
        inputs = [torch.ones(shape, dtype=dtype) for shape, dtype in [((2,), torch.float32)]]
        module = FxModule()
        module(*inputs)  # `foregrad.minifier(torch.fx.symbolic_trace(module), inputs, fails)` makes it smaller
    """
    fx_g.to_folder("foo")
    shapes = [(tuple(value.shape), value.dtype) for value in inps]
    print(f"""\
import torch
from foo import FxModule

inputs = [torch.ones(shape, dtype=dtype) for shape, dtype in {shapes}]
module = FxModule()
module(*inputs)  # `foregrad.minifier(torch.fx.symbolic_trace(module), inputs, fails)` makes it smaller""")
    return ts_compile(fx_g, inps)


def draw_graph(
    traced: fx.GraphModule,
    fname: str,
    figname: str = "fx_graph",
    clear_meta: bool = True,
    prog: str | list[str] | None = None,
    parse_stack_trace: bool = False,
    dot_graph_shape: str | None = None,
) -> None:
    """Draw a graph into a file; its ending says the format (`.svg` if it has none; `.dot` is text). Needs pydot;
    all formats but `.dot` need Graphviz too. `clear_meta`: without shapes and lines. `prog`: Graphviz's program.

    Examples:
        >>> import importlib.util, torch, foregrad
        >>> graph = torch.fx.symbolic_trace(torch.nn.ReLU())
        >>> if importlib.util.find_spec("pydot"):
        ...     foregrad.draw_graph(graph, "relu.dot")
    """
    if clear_meta:
        plain = fx.Graph()
        plain.output(plain.graph_copy(traced.graph, {}))
        for node in plain.nodes:
            node.meta = {}
        traced = fx.GraphModule(traced, plain)
    draw(traced, fname, figname, prog, parse_stack_trace=parse_stack_trace, dot_graph_shape=dot_graph_shape)


def draw_graph_compile(name: str) -> Callable[[fx.GraphModule, list[Any]], Any]:
    """A compiler that draws each graph into the file `name`, and compiles nothing.

    Examples:
        >>> import foregrad
        >>> f = foregrad.aot_function(lambda x: x * 2, fw_compiler=foregrad.draw_graph_compile("double.svg"))
    """

    def draw_and_keep(fx_g: fx.GraphModule, _: Any) -> fx.GraphModule:
        draw_graph(fx_g, name)
        return fx_g

    return make_boxed_compiler(draw_and_keep)


def minifier(
    fail_f: fx.GraphModule,
    inps: Sequence[torch.Tensor],
    module_fails: Callable[[fx.GraphModule, Sequence[torch.Tensor]], bool],
    dump_state: Callable[[fx.GraphModule, Sequence[torch.Tensor]], None] | None = None,
    *,
    save_dir: str | None = None,
    offload_to_disk: bool = False,
    skip_offload: bool = False,
    skip_sanity: bool = False,
    max_granularity: int | None = None,
) -> tuple[fx.GraphModule, Sequence[torch.Tensor]]:
    """(a smaller graph that fails, inputs for it): PyTorch's `minifier`.

    `module_fails(graph, inputs)` says whether a graph fails; `dump_state` gets each smaller graph that does.

    Examples:
        >>> import torch, foregrad
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> graph = make_fx(lambda x: x.sin().cos().tanh())(torch.ones(2))
        >>> def has_cos(graph, inputs):
        ...     return any("cos" in str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        >>> settings = {"skip_offload": True, "skip_sanity": True}
        >>> import contextlib, io
        >>> with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ...     small, _ = foregrad.minifier(graph, [torch.ones(2)], has_cos, lambda *smaller: None, **settings)
        >>> [str(node.target) for node in small.graph.nodes if node.op == "call_function"]
        ['aten.cos.default']
    """
    settings: dict[str, Any] = {
        "save_dir": save_dir,
        "offload_to_disk": offload_to_disk,
        "skip_offload": skip_offload,
        "skip_sanity": skip_sanity,
        "max_granularity": max_granularity,
    }
    if dump_state is not None:
        settings["dump_state"] = dump_state
    return minified(fail_f, inps, module_fails, settings)


@contextlib.contextmanager
def pythonkey_decompose(
    decomposition_table: Mapping[Any, Callable[..., Any]] | None,
) -> Iterator[Mapping[Any, Callable[..., Any]]]:
    """Context: gives the table, an empty one for None. Pass it as `decompositions=`; no function reads it by itself.

    Examples:
        >>> import foregrad
        >>> with foregrad.pythonkey_decompose(None) as table:
        ...     table
        {}
    """
    yield decomposition_table or {}
