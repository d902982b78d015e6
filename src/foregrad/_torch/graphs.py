"""fx graphs built node by node, and modules of graphs that are made late. Checked on torch 2.13.0.

`fx.Graph.create_node` looks for symbolic numbers in every argument and makes every name unique again: some 20 us a
node. A graph copied out of a graph needs neither, and `GraphCopier` takes an eighth of the time.
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx
from torch._logging._internal import trace_log, trace_structured
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.fx.node import map_arg

from .ops import Args, Kwargs
from .symbols import Size, is_symbolic

operands_of: Callable[[fx.Node], dict[fx.Node, None]] = operator.attrgetter("_input_nodes")
"""The nodes that a node reads: the keys. Not to be changed."""
_NodeBase: Any = fx.Node.__base__
set_grad_enabled: Callable[..., Any] = torch._C._set_grad_enabled  # the switch of grad mode that PyTorch's graphs hold


def function_of(node: fx.Node) -> Callable[..., Any]:
    """The function that a node calls."""
    assert not isinstance(node.target, str)
    return node.target


def is_operator(target: object) -> bool:
    """Whether `target` is one overload of a dispatcher operator, as in `torch.ops.aten.add.Tensor`."""
    return isinstance(target, OpOverload)


def is_higher_order(target: object) -> bool:
    """Whether `target` is an operator that takes functions or graphs (`cond`, `scan`, a wrapped custom kernel)."""
    return isinstance(target, HigherOrderOperator)


_NO_HINT = 4096  # the size of an unknown dimension


def size_hint(size: Any) -> int:
    """A size as a plain number, for estimates: a symbolic size has its value at capture, and no guard is added."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return int(hint) if isinstance(hint, int) else _NO_HINT


def symbols_in(value: Any) -> set[Any]:
    """The symbols (sympy) in a symbolic number, or in a tensor's sizes, strides and offset."""
    if is_symbolic(value):
        return set(value.node.expr.free_symbols)
    if isinstance(value, torch.Tensor):
        numbers: list[object] = [*value.shape, *value.stride(), value.storage_offset()]
        return {s for n in numbers if isinstance(n, torch.SymInt) for s in n.node.expr.free_symbols}
    return set()


def symbol_of(value: object) -> Any:
    """The symbol of a symbolic integer; None for any other expression."""
    if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol:
        return value.node.expr
    return None


def tensor_metadata(tensor: torch.Tensor) -> object:
    """The value of `node.meta["tensor_meta"]` for a tensor."""
    from torch.fx.passes.shape_prop import _extract_tensor_metadata

    return _extract_tensor_metadata(tensor)


def strided_metadata(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Any:
    """`tensor_metadata` of a strided tensor that requires no gradient, from plain numbers."""
    from torch.fx.passes.shape_prop import TensorMetadata

    layout = next((name for name, order in _inner_first(len(shape)) if _is_nested(shape, stride, order)), None)
    if 0 in shape:
        layout = torch.contiguous_format
    return TensorMetadata(torch.Size(shape), dtype, False, tuple(stride), layout, False, {})


def _inner_first(dimensions: int) -> list[tuple[torch.memory_format, Sequence[int]]]:
    """The memory formats that a tensor may have, with the order of its dimensions in memory, innermost first."""
    orders: list[tuple[torch.memory_format, Sequence[int]]] = [(torch.contiguous_format, range(dimensions)[::-1])]
    if dimensions == 4:
        orders.append((torch.channels_last, (1, 3, 2, 0)))
    elif dimensions == 5:
        orders.append((torch.channels_last_3d, (1, 4, 3, 2, 0)))
    return orders


def _is_nested(shape: Sequence[Size], stride: Sequence[Size], order: Sequence[int]) -> bool:
    """Whether each dimension steps exactly over the dimensions before it in `order`. Sizes of 1 don't count."""
    expected: Size = 1
    for dimension in order:
        size = shape[dimension]
        if size != 1:
            if stride[dimension] != expected:
                return False
            expected *= size
    return True


def needed_by(results: Iterable[fx.Node], among: Callable[[fx.Node], bool] = lambda _: True) -> set[fx.Node]:
    """The results, and the nodes that they are computed from; `among`: without other nodes in between."""
    needed: set[fx.Node] = set()
    stack = [*results]
    while stack:
        node = stack.pop()
        if node not in needed and among(node):
            needed.add(node)
            stack += operands_of(node)
    return needed


def depending_on(graph: fx.Graph, nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all values that a graph computes from the nodes."""
    found = set(nodes)
    for node in graph.nodes:
        if node.op != "output" and not found.isdisjoint(operands_of(node)):
            found.add(node)
    return found


class GraphWriter:
    """Appends nodes to a new graph, `graph`, without the checks of `Graph.create_node`."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._names = self.graph._graph_namespace
        self._insert = self.graph._root._prepend
        self._buckets: dict[tuple[str, int], dict[fx.Node, None]] = {}
        self._count: dict[str, int] = {}

    def add(self, name: str, op: str, target: object, args: Args, kwargs: Kwargs, meta: dict[str, Any]) -> fx.Node:
        """A node called `name`, a new name."""
        node = fx.Node.__new__(fx.Node)
        _NodeBase.__init__(node, self.graph, name, op, target, None)  # without the checks of `Node.__init__`
        node._update_args_kwargs(args, kwargs)
        # Setting it as an attribute would take the node out of the graph's index and put it back.
        object.__setattr__(node, "meta", meta)
        names = self._names
        names._used_names.add(name)
        names._obj_to_name[node] = name
        self._insert(node)
        key = (op, id(target) if op == "call_function" else 0)
        bucket = self._buckets.get(key)
        if bucket is None:
            table = self.graph._find_nodes_lookup_table
            bucket = self._buckets[key] = table.table[table._key(node)]
        bucket[node] = None
        self.graph._len += 1
        return node

    def name(self, base: str) -> str:
        """A name that no node has: `base`, with a number behind it if needed, as `Graph.create_node` would choose."""
        count = self._count.get(base)
        if count is None:
            name = self._names.create_name(base, None)
            self._count[base] = 0 if name == base else int(name.rpartition("_")[2])
            return name
        used = self._names._used_names
        count += 1
        while (name := f"{base}_{count}") in used:
            count += 1
        self._count[base] = count
        used.add(name)
        return name


class GraphCopier:
    """Copies nodes of one graph into a new one, keeping their names; operands must have been copied before.

    Names must be unique, as in one graph. `metadata`: gives the copy of a node's metadata.
    """

    def __init__(self, metadata: Callable[[fx.Node], dict[str, Any]] | None = None) -> None:
        self.metadata = metadata or (lambda node: node.meta.copy())
        self.writer = GraphWriter()
        self.graph = self.writer.graph
        self.copies: dict[fx.Node, fx.Node] = {}
        self._copy_of: Callable[[fx.Node], Any] = self.copies.__getitem__

    def placeholder(self, node: fx.Node) -> fx.Node:
        """A placeholder that stands for `node`, a node of any kind."""
        copy = self.copies[node] = self.writer.add(node.name, "placeholder", node.name, (), {}, self.metadata(node))
        return copy

    def copy(self, node: fx.Node) -> fx.Node:
        args, kwargs = node.args, node.kwargs
        if args:
            args = map_arg(args, self._copy_of)
        if kwargs:
            kwargs = map_arg(kwargs, self._copy_of)
        copy = self.copies[node] = self.writer.add(node.name, node.op, node.target, args, kwargs, self.metadata(node))
        if node.type is not None:
            copy.type = node.type
        return copy

    def output(self, values: Sequence[Any]) -> fx.Node:
        """The output node, in terms of the original graph's nodes."""
        node: fx.Node = self.graph.output(map_arg(values, self._copy_of))
        return node


def copied(graph: fx.Graph, metadata: Callable[[fx.Node], dict[str, object]] | None = None) -> fx.Graph:
    """A copy of a graph with the names of its nodes, and their metadata or the result of `metadata`."""
    copier = GraphCopier(metadata)
    for node in graph.nodes:
        if node.op == "placeholder":
            copier.placeholder(node)
        elif node.op == "output":
            copier.output(node.args[0]).meta.update(copier.metadata(node))
        else:
            copier.copy(node)
    return copier.graph


# -------------------------------------------------------------------- traces
# PyTorch's structured trace, which `tlparse` reads (`TORCH_TRACE`). Checked on torch 2.11.0, 2.13.0, 2.15.0.


def trace_artifact(name: str, text: Callable[[], str]) -> None:
    """Put a text under a name into the trace, if it is on."""
    # PyTorch's handler exists without a folder too, until the first write: the text would be made in vain.
    if any(getattr(handler, "root_dir", "") is not None for handler in trace_log.handlers):
        metadata = {"name": name, "encoding": "string"}
        trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=text, expect_trace_id=False)


# ------------------------------------------------------------------------------------------------------- graph modules
# Their Python code is made when it is first called, or their graph when it is first read.


class _Late:
    """A class attribute of graph modules without code yet: makes the code, and gives the real attribute."""

    def __set_name__(self, owner: object, name: str) -> None:
        self.name = name

    def __get__(self, module: object, owner: Any) -> Any:
        if owner.without_code is None or "forward" in vars(owner):
            raise AttributeError(self.name)
        owner.without_code().make_code()
        return getattr(owner if module is None else module, self.name)


@dataclasses.dataclass(frozen=True, slots=True)
class LateGraph:
    """A graph that is not made yet, of nodes of a second graph; nobody may change that graph meanwhile.

    `inputs`: the nodes that give its placeholders their names. `constants`: attributes that it may read. `results`: its
    returned values. `body` gives its further nodes in the order to run; nodes outside may use these, too. `make` gives
    the graph, with the metadata that a function gives for each of its nodes, if there is one.
    """

    inputs: Sequence[fx.Node]
    constants: Sequence[fx.Node]
    results: Sequence[Any]
    body: Callable[[], list[fx.Node]]
    make: Callable[..., fx.Graph]


class _MadeWhenRead:
    """A class attribute of graph modules without a graph yet: makes the graph."""

    def __get__(self, module: Any, owner: object) -> fx.Graph:
        late = late_graph_of(module)
        if late is None:
            raise AttributeError("_graph")
        module.graph = graph = late.make()
        del module.late_graph
        return graph


def late_graph_of(module: object) -> LateGraph | None:
    """The graph of a module that is not made yet; None if it is."""
    return getattr(module, "__dict__", {}).get("late_graph")


def ends_of(module: fx.GraphModule) -> tuple[Sequence[fx.Node], Sequence[Any]]:
    """The inputs of a graph, and its results; the graph need not be made for that."""
    late = late_graph_of(module)
    if late is not None:
        return late.inputs, late.results
    return module.graph.find_nodes(op="placeholder"), next(iter(reversed(module.graph.nodes))).args[0]


def body_of(module: fx.GraphModule) -> list[fx.Node]:
    """The nodes of a graph in order, without its inputs and its output; the graph need not be made for that."""
    late = late_graph_of(module)
    if late is not None:
        return late.body()
    return [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]


def copied_graph_of(module: fx.GraphModule, metadata: Callable[[fx.Node], dict[str, Any]]) -> fx.Graph:
    """A copy of a module's graph with the result of `metadata`; a graph that is not made yet stays so."""
    late = late_graph_of(module)
    return copied(module.graph, metadata) if late is None else late.make(metadata)


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


def make_code(module: torch.nn.Module) -> None:
    """Have graphs in a module make their code now: some do so when they are first called, and change then."""
    for part in module.modules():
        getattr(part, "real_recompile", bool)()


def make_graph_module(
    root: torch.nn.Module | dict[str, object], graph: fx.Graph, name: str = "GraphModule"
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


def with_nested_arguments(
    module: fx.GraphModule, primals: int, tangents: int, forward: int | None = None
) -> fx.GraphModule:
    """The graph, called as `(list of primals, list of tangents)`, returning a list; with the number of the `forward`'s
    outputs (list of forward outputs, list of the rest).
    """
    outputs = next(iter(reversed(module.graph.nodes))).args[0]
    _, spec = pytree.tree_flatten((([0] * primals, [0] * tangents), {}))
    results = [0] * len(outputs)
    _, out_spec = pytree.tree_flatten(results if forward is None else (results[:forward], results[forward:]))
    module.graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(["primals", "tangents"], spec, out_spec)))
    module.recompile()
    return module


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


def is_plain_graph_module(module: object) -> bool:
    """Whether calling `module` does nothing but run its graph: no hooks, no forward of its own, no pytree codegen."""
    if not isinstance(module, torch.fx.GraphModule):
        return False
    bases = type(module).__bases__
    if bases != (torch.fx.GraphModule,) and bases[0].__name__ not in ("_LazyGraphModule", "LateGraphModule"):
        return False
    if "forward" in vars(module) or any(getattr(module, hooks) for hooks in _HOOKS):
        return False
    if any(getattr(torch.nn.modules.module, hooks) for hooks in _GLOBAL_HOOKS):
        return False
    codegen = torch.fx.graph.CodeGen() if late_graph_of(module) is not None else module.graph._codegen
    return type(codegen) is torch.fx.graph.CodeGen and codegen._body_transformer is None


def is_random(node: fx.Node) -> bool:
    """Whether a node is an operator that draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def piece(
    gm: fx.GraphModule, inputs: Collection[fx.Node], nodes: Collection[fx.Node], results: Sequence[object], name: str
) -> fx.GraphModule:
    """Some nodes of a graph, in order, as a graph of its own, with the constants that are read or returned."""
    copier = GraphCopier()

    def copy_constants(used: Sequence[object]) -> None:
        for node in used:
            if isinstance(node, fx.Node) and node.op == "get_attr" and node not in copier.copies:
                copier.copy(node)

    for node in inputs:
        copier.placeholder(node)
    for node in nodes:
        copy_constants(node.all_input_nodes)
        copier.copy(node)
    copy_constants(results)
    copier.output(results)
    return make_graph_module(gm, copier.graph, name)
