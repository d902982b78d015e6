"""A foregrad small enough to read in one sitting: capture, backward, cut, effect log, wrap.

Run with `python examples/toy_foregrad.py`. docs/toy.md goes through it. It has the stages, the names and the rules of
the real one and leaves out almost everything else; what it can't do it refuses by name, it never gives wrong numbers.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import Any

import networkx as nx
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

aten = torch.ops.aten


class UnsupportedError(RuntimeError):
    """The function does something that this page-sized compiler has no rule for."""


# ----------------------------------------------------------------------------------------------------------- the heap
# A tensor is a handle: a storage, and a geometry that says which of its elements in which order. Functional graphs
# have no memory, so a storage is the node that holds what all of it is now; a write gives it another node.


@dataclasses.dataclass
class Storage:
    """Memory that a captured function sees: `node` computes all of it, `base` is the fake tensor made with it."""

    base: torch.Tensor
    node: fx.Node
    input: int | None = None  # the argument that brought it
    views: dict[Any, fx.Node] = dataclasses.field(default_factory=dict)  # parts of `node` read so far, by geometry


def geometry(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Sizes, strides and offset: where a tensor lies in its storage."""
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


# ---------------------------------------------------------------------------------------------------- the effect log
# What a call does that its results don't say, in the order of the program. After the compiled forward has run, which
# is pure, the log is replayed on the real tensors.


@dataclasses.dataclass(frozen=True)
class Write:
    """Argument `input` gets the value of graph output `output`; `grad_enabled`: autograd recorded the write."""

    input: int
    grad_enabled: bool
    output: int = -1


@dataclasses.dataclass(frozen=True)
class TakeView:
    """A view comes to be, `tensor` in the capture; `storage`: the memory. The runtime calls it `name`, for `source`."""

    storage: int
    tensor: torch.Tensor
    grad_enabled: bool
    name: str = ""
    source: str = ""


def simplified(log: list[Any], returned: set[int]) -> list[Any]:
    """The log without what nobody can see: views that are not returned, writes that a later one overwrites."""
    kept: list[Any] = []
    for entry in reversed(log):
        if isinstance(entry, TakeView) and id(entry.tensor) not in returned:
            continue
        if isinstance(entry, Write):
            later = next((e for e in kept if isinstance(e, Write) and e.input == entry.input), None)
            if later is not None and later.grad_enabled != entry.grad_enabled:
                raise UnsupportedError(f"args[{entry.input}] is written with and without gradients: choose one.")
            if later is not None:
                continue
        kept.append(entry)
    return kept[::-1]


# ------------------------------------------------------------------------------------------------------ the recorder
class Recorder(TorchDispatchMode):
    """Sees every operator below autograd, the backward's too, and writes its functional form into one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.storages: dict[int, Storage] = {}
        self.log: list[Any] = []
        self.in_backward = False

    def placeholder(self, name: str, fake: torch.Tensor, index: int | None = None) -> fx.Node:
        """An input of the graph, with memory of its own."""
        node = self.graph.placeholder(name)
        node.meta["val"] = fake
        self.storages[_memory(fake)] = Storage(fake, node, index)
        return node

    def storage_of(self, tensor: torch.Tensor) -> Storage:
        """The memory that a fake tensor lies in."""
        if not isinstance(tensor, FakeTensor):
            raise UnsupportedError("the function uses a tensor that it is not given: make it an argument.")
        storage = self.storages[_memory(tensor)]
        if tensor.dtype is not storage.base.dtype:
            raise UnsupportedError(f"memory of {storage.base.dtype} is read as {tensor.dtype}.")
        return storage

    def read(self, tensor: torch.Tensor) -> fx.Node:
        """A node with the tensor's present value: all of its storage, or a view of that."""
        storage, place = self.storage_of(tensor), geometry(tensor)
        if place == geometry(storage.base):
            return storage.node
        if place not in storage.views:
            storage.views[place] = self.emit(aten.as_strided.default, (storage.node, *place), {}, tensor)
        return storage.views[place]

    def write(self, tensor: torch.Tensor, value: fx.Node) -> None:
        """The tensor has another value from now on, and so has everything that shares memory with it."""
        storage = self.storage_of(tensor)
        if value.meta["val"].dtype is not tensor.dtype or value.meta["val"].shape != tensor.shape:
            value = self.emit(aten.copy.default, (self.read(tensor), value), {}, tensor)
        if geometry(tensor) != geometry(storage.base):
            args = (storage.node, value, *geometry(tensor))
            value = self.emit(aten.as_strided_scatter.default, args, {}, storage.base)
        storage.node, storage.views = value, {}
        if storage.input is not None:
            if self.in_backward:
                raise UnsupportedError(f"the backward writes to args[{storage.input}].")
            self.log.append(Write(storage.input, torch.is_grad_enabled()))

    def emit(self, op: Any, args: Any, kwargs: Any, value: Any) -> fx.Node:
        """One more node of the graph; `value` is the fake of what it computes."""
        node = self.graph.call_function(op, args, kwargs)
        node.meta["val"], node.meta["in_backward"] = value, self.in_backward
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # questions about a tensor, no computation
            return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            raise UnsupportedError(f"{func} gives a value that only a real call knows.")
        if func in (aten.native_batch_norm.default, aten.cudnn_batch_norm.default):
            raise UnsupportedError(f"{func} writes to its arguments, which its schema does not say.")
        flat, spec = tree_flatten((args, kwargs))
        nodes = [self.read(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in flat]
        result = func(*args, **kwargs)  # on fake tensors: sizes and dtypes, no data
        functional_args, functional_kwargs = tree_unflatten(nodes, spec)
        if func._schema.is_mutable:
            functional = _functional(func)
            self.write(args[0], self.emit(functional, functional_args, functional_kwargs, args[0]))
            return result
        results, _ = tree_flatten(result)
        made = {i: tensor for i, tensor in enumerate(results) if isinstance(tensor, torch.Tensor)}
        if all(_memory(tensor) in self.storages for tensor in made.values()):  # views: nothing is computed
            for tensor in made.values():
                self.log.append(TakeView(_memory(tensor), tensor, torch.is_grad_enabled()))
            return result
        node = self.emit(func, functional_args, functional_kwargs, result)
        for position, tensor in made.items():
            part = node if result is tensor else self.emit(operator.getitem, (node, position), {}, tensor)
            self.storages[_memory(tensor)] = Storage(tensor, part)
        return result


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _functional(op: Any) -> Any:
    """The operator that computes what an in-place operator writes: `add` for `add_`."""
    name = op._schema.name.split("::")[1]
    packet = getattr(aten, name[:-1], None) if name.endswith("_") else None
    if packet is None or op._overloadname not in packet.overloads():
        raise UnsupportedError(f"{op} writes to its arguments in a way that has no functional form here.")
    return getattr(packet, op._overloadname)


# ----------------------------------------------------------------------------------------------------------- capture
@dataclasses.dataclass(frozen=True)
class Signature:
    """The calling convention: how arguments, results and effects correspond to the graph's inputs and outputs."""

    num_inputs: int
    num_outputs: int  # of the forward: values for writes, then results
    differentiable: tuple[int, ...]  # the outputs that take a tangent
    gradients: tuple[int, ...]  # the inputs that get a gradient
    log: tuple[Any, ...]
    results: tuple[Any, ...]  # for each leaf of what is returned: how it comes from arguments and outputs
    tree: Any


@dataclasses.dataclass(frozen=True)
class JointGraph:
    """Forward and backward in one graph: primals and tangents in, outputs and gradients out."""

    graph: fx.Graph
    signature: Signature


def capture(function: Callable[..., Any], args: list[Any], spec: Any) -> JointGraph:
    """Run the function once on fake tensors, ask autograd for the gradients, and give what both did as one graph."""
    fake_mode, recorder = FakeTensorMode(), Recorder()
    leaves: dict[int, torch.Tensor] = {}
    stand_ins: list[Any] = list(args)
    for i, arg in enumerate(args):
        if isinstance(arg, torch.Tensor):
            if torch.empty_like(arg).stride() != arg.stride():
                raise UnsupportedError(f"args[{i}] has gaps in its memory: pass a contiguous tensor.")
            leaves[i] = fake_mode.from_tensor(_own_memory(arg.detach())).requires_grad_(arg.requires_grad)
            # In eager a leaf that requires grad can't be written; any other tensor can, so it must not be a leaf.
            stand_ins[i] = leaves[i] if arg.is_leaf and arg.requires_grad else leaves[i].clone()
            recorder.placeholder(f"primals_{i}", stand_ins[i], i)
    with fake_mode:
        inner_args, inner_kwargs = tree_unflatten(stand_ins, spec)
        with recorder:
            returned = function(*inner_args, **inner_kwargs)
        flat, tree = tree_flatten(returned)
        outputs, fakes, log, results = _analyze(recorder, flat)
        differentiable = [i for i, fake in enumerate(fakes) if fake.requires_grad]
        wanted = [i for i, leaf in leaves.items() if leaf.requires_grad]
        tangents = [torch.empty_like(fakes[i]) for i in differentiable]
        for i, tangent in zip(differentiable, tangents, strict=True):
            recorder.placeholder(f"tangents_{i}", tangent)
        gradients: tuple[Any, ...] = ()
        if differentiable:
            recorder.in_backward = True
            with recorder:
                ends, starts = [fakes[i] for i in differentiable], [leaves[i] for i in wanted]
                gradients = torch.autograd.grad(ends, starts, tangents, allow_unused=True)
        nodes = [None if gradient is None else recorder.read(gradient) for gradient in gradients]
    recorder.graph.output((outputs, nodes))
    order = (len(args), len(outputs), tuple(differentiable), tuple(wanted) if differentiable else ())
    return JointGraph(recorder.graph, Signature(*order, tuple(log), tuple(results), tree))


def _analyze(recorder: Recorder, flat: list[Any]) -> tuple[list[fx.Node], list[torch.Tensor], list[Any], list[Any]]:
    """Outputs of the forward with their fakes; the log with the positions of those; how each result is made."""
    outputs: list[fx.Node] = []
    fakes: list[torch.Tensor] = []
    log: list[Any] = []
    position: dict[int, int] = {}  # of a storage's value among the outputs

    def output(storage: Storage) -> int:
        if _memory(storage.base) not in position:
            position[_memory(storage.base)] = len(outputs)
            outputs.append(storage.node)
            fakes.append(storage.base)
        return position[_memory(storage.base)]

    inputs = {s.input: s for s in recorder.storages.values() if s.input is not None}
    spelled = {_memory(s.base): f"args[{i}]" for i, s in inputs.items()}
    views: dict[int, str] = {}
    for entry in simplified(recorder.log, {id(leaf) for leaf in flat}):
        if isinstance(entry, Write):
            log.append(dataclasses.replace(entry, output=output(inputs[entry.input])))
            continue
        storage, (size, stride, offset) = recorder.storages[entry.storage], geometry(entry.tensor)
        memory = spelled.get(entry.storage) or f"outs[{output(storage)}]"
        is_cut = entry.grad_enabled and storage.base.requires_grad and not entry.tensor.requires_grad
        start = f"{memory}.detach()" if is_cut else memory
        view = f"{start}.as_strided({size}, {stride}, {memory}.storage_offset() + {offset})"
        source = view if entry.tensor._is_view() else f"{view}.detach()"
        name = views[id(entry.tensor)] = f"view_{len(views)}"
        log.append(dataclasses.replace(entry, name=name, source=source))
    results: list[str] = []
    for leaf in flat:
        if isinstance(leaf, (int, float, str, bool, type(None))):
            results.append(repr(leaf))
        elif not isinstance(leaf, torch.Tensor):
            raise UnsupportedError(f"the function returns {type(leaf).__name__}: tensors and constants are known.")
        elif id(leaf) in views:
            results.append(views[id(leaf)])
        elif leaf is (storage := recorder.storage_of(leaf)).base:
            results.append(spelled.get(_memory(leaf)) or f"outs[{output(storage)}]")
        else:
            raise UnsupportedError("a result shares memory with another tensor in a way that no view tells.")
    return outputs, fakes, log, results


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it begins late in its memory: graphs count offsets from the beginning."""
    return tensor if tensor.storage_offset() == 0 else tensor.clone()


def _laid_out(tensor: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
    """The tensor with the strides that the graph was captured for."""
    return tensor if tensor.stride() == fake.stride() else tensor.new_empty_strided(*geometry(fake)[:2]).copy_(tensor)


# --------------------------------------------------------------------------------------------------------------- cut
def partition(joint: JointGraph) -> tuple[fx.GraphModule, fx.GraphModule, list[fx.Node]]:
    """Split the joint graph where the fewest bytes cross: forward, backward, and the residuals between the two.

    A minimum cut of a flow: each value of the forward is an edge as wide as its bytes, cut where it is saved; what lies
    behind the cut is computed again in the backward. (Min-cut recomputation: Chen et al. 2016 gave the problem, the
    cut is that of the functorch partitioner.)
    """
    outputs, gradients = joint.graph.output_node().args[0]
    tangents = {n for n in joint.graph.nodes if n.op == "placeholder" and n.name.startswith("tangents")}
    late = set(tangents)  # what depends on a tangent: only the backward can compute it
    for node in joint.graph.nodes:
        if node.op == "call_function" and any(n in late for n in node.all_input_nodes):
            late.add(node)
    read = {n for gradient in gradients if gradient is not None for n in _ancestors(gradient)}
    flow = nx.DiGraph()
    for node in read - late:
        for user in node.users:
            if user in read:
                flow.add_edge((node, "out"), "sink" if user in late else (user, "in"))
        if node in gradients:
            flow.add_edge((node, "out"), "sink")
        value = node.meta["val"]
        is_tensor = isinstance(value, torch.Tensor)
        flow.add_edge((node, "in"), (node, "out"), **({"capacity": value.nbytes or 1} if is_tensor else {}))
        if node.op == "placeholder" or not _is_recomputable(node):
            flow.add_edge("source", (node, "in"))
    saved: list[fx.Node] = []
    if "sink" in flow and "source" in flow:
        reachable, _ = nx.minimum_cut(flow, "source", "sink")[1]
        saved = [n for n in joint.graph.nodes if (n, "in") in reachable and (n, "out") not in reachable]
    primals = [n for n in joint.graph.nodes if n.op == "placeholder" and n not in tangents]
    forward = _extract(joint, primals, [*outputs, *saved])
    ordered = [n for n in joint.graph.nodes if n in tangents]
    return forward, _extract(joint, [*saved, *ordered], list(gradients)), saved


def _is_recomputable(node: fx.Node) -> bool:
    """Not twice: random operators, which would draw other numbers, and those that cost much."""
    heavy = (aten.mm, aten.bmm, aten.addmm, aten.convolution)
    op = node.target if isinstance(node.target, torch._ops.OpOverload) else None
    return op is None or not (torch.Tag.nondeterministic_seeded in op.tags or op.overloadpacket in heavy)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    seen, stack = {node}, [node]
    while stack:
        new = [n for n in stack.pop().all_input_nodes if n not in seen]
        seen.update(new)
        stack += new
    return seen


def _extract(joint: JointGraph, inputs: list[fx.Node], outputs: list[fx.Node | None]) -> fx.GraphModule:
    """The part of the joint graph that computes `outputs` from `inputs`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in inputs:
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    needed: set[fx.Node] = set()
    stack = [n for n in outputs if n is not None]
    while stack:
        node = stack.pop()
        if node not in needed and node not in copies:
            needed.add(node)
            stack += node.all_input_nodes
    for node in joint.graph.nodes:
        if node in needed:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([None if n is None else copies[n] for n in outputs])
    return fx.GraphModule(torch.nn.Module(), graph)


# -------------------------------------------------------------------------------------------------------------- wrap
Compiler = Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]


def render(signature: Signature) -> str:
    """The code that runs after the compiled forward: the log in order on the real tensors, then the results."""
    lines = []
    for entry in signature.log:
        is_view = isinstance(entry, TakeView)
        line = f"{entry.name} = {entry.source}" if is_view else f"args[{entry.input}].copy_(outs[{entry.output}])"
        lines += [line] if entry.grad_enabled else ["with torch.no_grad():", f"    {line}"]
    lines.append(f"return [{', '.join(signature.results)}]")
    return "\n    ".join(["def epilogue(args, outs):", *lines])


class CompiledFunction:
    """One specialization: the two compiled halves behind an autograd node, then the epilogue."""

    def __init__(self, joint: JointGraph, fw_compiler: Compiler, bw_compiler: Compiler) -> None:
        self.signature = signature = joint.signature
        forward, backward, saved = partition(joint)
        self.forward_code, self.backward_code, self.epilogue_code = forward.code, backward.code, render(signature)
        forward_call = fw_compiler(forward, _examples(forward))
        backward_call = bw_compiler(backward, _examples(backward)) if signature.gradients else None
        scope: dict[str, Any] = {"torch": torch, "inf": float("inf"), "nan": float("nan")}
        exec(self.epilogue_code, scope)
        self.epilogue: Callable[..., list[Any]] = scope["epilogue"]
        count = signature.num_outputs
        expected = _examples(backward)[len(saved) :]
        others = [i for i in range(count) if i not in signature.differentiable]
        # The backward reads what arguments were before the epilogue writes to them.
        self.written = {entry.input for entry in signature.log if isinstance(entry, Write)}

        class Node(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *primals: Any) -> Any:
                results = forward_call(*[p for p in primals if isinstance(p, torch.Tensor)])
                ctx.mark_non_differentiable(*(results[i] for i in others))
                ctx.save_for_backward(*results[count:])
                return tuple(results[:count])

            @staticmethod
            @torch.autograd.function.once_differentiable
            def backward(ctx: Any, *tangents: Any) -> Any:
                assert backward_call is not None
                given = [tangents[i] for i in signature.differentiable]
                gradients = iter(backward_call(*ctx.saved_tensors, *map(_laid_out, given, expected)))
                return tuple(next(gradients) if i in signature.gradients else None for i in range(signature.num_inputs))

        self.node = Node
        self.forward_call = forward_call

    def __call__(self, args: list[Any]) -> Any:
        primals = [_own_memory(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        primals = [p.clone() if i in self.written else p for i, p in enumerate(primals)]
        if self.signature.gradients:
            outs = self.node.apply(*primals)
        else:
            outs = self.forward_call(*[p for p in primals if isinstance(p, torch.Tensor)])
        return tree_unflatten(self.epilogue(args, outs), self.signature.tree)


def _examples(module: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]


def compile(
    function: Callable[..., Any], fw_compiler: Compiler | None = None, bw_compiler: Compiler | None = None
) -> Any:
    """A callable like `function` that runs compiled graphs: one specialization for each kind of arguments.

    `fw_compiler(gm, example_inputs)` gives a callable for a graph, `bw_compiler` too; without them the graphs are run
    as they are. Raises `UnsupportedError` for what the toy has no rule for.
    """
    fw = fw_compiler or (lambda module, _: module)
    specializations: dict[Any, CompiledFunction] = {}

    def compiled(*args: Any, **kwargs: Any) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        guard = (str(spec), torch.is_grad_enabled(), *map(_guard, flat))
        if guard not in specializations:
            specializations[guard] = CompiledFunction(capture(function, flat, spec), fw, bw_compiler or fw)
        made = specializations[guard]
        memories = [_memory(leaf) for leaf in flat if isinstance(leaf, torch.Tensor)]
        if made.signature.log and len(set(memories)) < len(memories):
            raise UnsupportedError("arguments share memory, and the function writes to them or returns views of them.")
        return made(flat)

    compiled.specializations = specializations  # type: ignore[attr-defined]
    return compiled


def _guard(leaf: Any) -> Any:
    """What a specialization depends on: of tensors all but the values, of anything else the value."""
    if isinstance(leaf, torch.Tensor):
        needs = leaf.requires_grad, leaf.is_leaf and leaf.requires_grad
        return type(leaf), leaf.dtype, leaf.device, tuple(leaf.shape), tuple(leaf.stride()), *needs
    return type(leaf), leaf


def main() -> None:
    """Compile a small function with a write to an argument and a view of it; show the graphs, compare with eager."""

    def step(weight: torch.Tensor, state: torch.Tensor) -> Any:
        hidden = torch.sin(state.cos() @ weight)
        state.mul_(0.9)  # seen by the caller
        state[0].add_(hidden.detach()[0])
        return (hidden * hidden).sum(), state[1:]

    compiled = compile(step)
    torch.manual_seed(0)
    weight, state = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    runs = []
    for function in (step, compiled):
        given = state.clone()
        loss, rest = function(weight, given)
        (gradient,) = torch.autograd.grad(loss, weight)
        runs.append((loss.detach(), rest, given, gradient))
        assert rest._base is given
    for name, eager, ours in zip(("loss", "view", "state", "gradient"), *runs, strict=True):
        print(f"{name:9}", "equal" if torch.equal(eager, ours) else "different")
    (made,) = compiled.specializations.values()
    print(f"\n# forward\n{made.forward_code.strip()}\n\n# backward\n{made.backward_code.strip()}")
    print(f"\n# after the forward, the log\n{made.epilogue_code}")


if __name__ == "__main__":
    main()
