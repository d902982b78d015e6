"""Graphs for compiler writers, with the names and conventions of AOTAutograd: `aot_export_module`, `..._joint_simple`.

Parameters, buffers and arguments are inputs of one functional graph, updated buffers and gradients outputs of it. To
save a program and run it elsewhere, use `foregrad.export`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from .._torch.graphs import function_of, make_code, set_grad_enabled, with_nested_arguments
from .._torch.nested import spec_of_structure
from ..aot import named_sources
from ..dispatch.pipeline import reachable
from ..errors import UnsupportedError
from ..frontend.call import FlatCall, flatten_call
from ..frontend.tree import Tree
from ..graph.effect_log import CheckFailed, OutputInfo, SetData, Write
from ..graph.joint import JointGraph
from ..graph.meta import NodeMeta
from ..graph.signature import ConstantOutput, Handle, Signature
from ..graph.slots import Buffer, Param
from .above_autograd import WholeOperators, above_autograd

aten = torch.ops.aten
Decompositions = Mapping[Any, Callable[..., Any]] | None


@dataclasses.dataclass
class BackwardSignature:
    """The outputs that are gradients, each with its input, and the loss; by the names of their nodes."""

    gradients_to_parameters: dict[str, str]
    gradients_to_user_inputs: dict[str, str]
    loss_output: str


@dataclasses.dataclass
class GraphSignature:
    """The inputs and outputs of an exported graph, by the names of their nodes.

    Inputs: parameters, buffers, then the user's. Outputs: new values of written inputs, the user's, then
    gradients.

    Examples:
        >>> import torch, foregrad
        >>> graph, signature = foregrad.aot_export_module(torch.nn.ReLU(), [torch.ones(3)], trace_joint=False)
        >>> signature.user_inputs, signature.parameters
        (['arg0_1'], [])
    """

    parameters: list[str]
    buffers: list[str]
    user_inputs: list[str]
    user_outputs: list[object]
    inputs_to_parameters: dict[str, str]
    inputs_to_buffers: dict[str, str]
    buffers_to_mutate: dict[str, str]
    parameters_to_mutate: dict[str, str]
    user_inputs_to_mutate: dict[str, str]
    in_spec: Any
    out_spec: Any
    backward_signature: BackwardSignature | None = None
    input_tokens: list[str] = dataclasses.field(default_factory=list)
    output_tokens: list[str] = dataclasses.field(default_factory=list)


def aot_export_module(
    mod: nn.Module,
    args: Iterable[object],
    *,
    decompositions: Decompositions = None,
    trace_joint: bool,
    output_loss_index: int | None = None,
    pre_dispatch: bool = False,
    dynamic_shapes: bool | None = None,
    kwargs: dict[str, object] | None = None,
) -> tuple[fx.GraphModule, GraphSignature]:
    """The graph of a module, with parameters and buffers as inputs, and the meaning of its inputs and outputs.

    With `trace_joint` the module's result at `output_loss_index` must be a scalar loss, and its gradients by the
    parameters, and by arguments that require grad, are outputs too. Results other than the loss must require no
    gradients then. `dynamic_shapes`: sizes of arguments are symbolic. `pre_dispatch`: composite operators (`linear`,
    `dropout`) stay whole, without a backward. Raises `RuntimeError` for an action of the module that no exported graph
    can hold, as PyTorch does.

    Examples:
        >>> import torch, foregrad
        >>> graph, signature = foregrad.aot_export_module(torch.nn.Linear(3, 2), [torch.ones(1, 3)], trace_joint=False)
        >>> signature.parameters
        ['weight', 'bias']
    """
    if pre_dispatch and trace_joint:
        raise RuntimeError("operators above autograd have no backward in a graph: pass trace_joint=False")
    if trace_joint and output_loss_index is None:
        raise RuntimeError("a joint graph needs output_loss_index, the position of the loss among the results")
    make_code(mod)
    args = tuple(args)
    call = _apart(flatten_call(mod.forward, args, kwargs or {}))
    sources = named_sources(mod)
    name, dynamic = type(mod).__name__, bool(dynamic_shapes)
    joint = _capture(call, name, decompositions, sources, dynamic=dynamic, grad=trace_joint)  # or a refusal by name
    if pre_dispatch:
        call = dataclasses.replace(call, function=above_autograd(mod, call, dynamic=dynamic))
        whole = functools.partial(WholeOperators, decompositions or {})
        joint = _capture(call, name, decompositions, sources, dynamic=dynamic, grad=False, around=whole)
    writer = _JointWriter(joint, call, "arg{}_1", lifted=len(sources), constants=pre_dispatch)
    loss = writer.loss(output_loss_index) if trace_joint else None
    module = writer.module(gradients=trace_joint)
    if loss is not None and writer.results[output_loss_index or 0].meta["val"].numel() != 1:  # a view of a scalar
        raise RuntimeError(f"the result at {output_loss_index}, named as the loss, is no scalar")
    return module, writer.signature_of(call, output_loss_index if loss is not None else None)


def aot_export_joint_simple(
    func: Callable[..., object],
    args: Sequence[object],
    *,
    trace_joint: bool,
    num_params_buffers: int = 0,
    decompositions: Decompositions = None,
) -> fx.GraphModule:
    """The graph of a function of tensors that writes to none of its arguments.

    With `trace_joint` the result takes a list of arguments and a list of tangents, and returns results, then a gradient
    for each argument that requires grad. Without it, the result takes the function's arguments. Raises `RuntimeError`
    for functions that write to arguments, or return arguments or views of arguments.

    Examples:
        >>> import torch, foregrad
        >>> x = torch.ones(2, requires_grad=True)
        >>> graph = foregrad.aot_export_joint_simple(lambda x: (x.sin(),), [x], trace_joint=True)
        >>> [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        ['primals_1', 'tangents_1']
    """
    del num_params_buffers
    call = _apart(flatten_call(func, tuple(args), {}))
    if not all(child.kind == "leaf" for child in call.tree.children[0].children):
        raise UnsupportedError("aot_export_joint_simple takes tensors that are not nested")
    joint = _capture(
        call, str(getattr(func, "__name__", "function")), decompositions, [], dynamic=False, grad=trace_joint
    )
    signature = joint.signature
    if signature.updates or signature.reshaped or signature.swapped:
        raise UnsupportedError("aot_export_joint_simple takes functions that write to none of their arguments")
    if any(getattr(o, "input", None) is not None or getattr(o, "steps", ()) for o in signature.structure.outputs):
        raise UnsupportedError(
            "aot_export_joint_simple takes functions that return neither arguments nor views of arguments"
        )
    writer = _JointWriter(joint, call, "primals_{}" if trace_joint else "arg{}_1", int(trace_joint))
    module = writer.module(gradients=trace_joint, tangents=trace_joint)
    if not trace_joint:
        return module
    return with_nested_arguments(module, len(writer.all_inputs), len(signature.gradients.differentiable))


def _apart(call: FlatCall) -> FlatCall:
    """The call with a tensor of its own for each place: a caller of the graph may give different ones."""
    leaves = [
        leaf if i == first else leaf.detach().requires_grad_(leaf.requires_grad)
        for i, (first, leaf) in enumerate(zip(call.first_of, call.leaves, strict=True))
    ]
    return dataclasses.replace(call, leaves=tuple(leaves), first_of=tuple(range(len(leaves))))


def _capture(
    call: FlatCall,
    name: str,
    decompositions: Decompositions,
    sources: Sequence[Any],
    *,
    dynamic: bool,
    grad: bool,
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> JointGraph:
    from ..tracing.capture import capture_call  # late, as in the pipeline
    from ..tracing.parts import Options

    if dynamic:
        tensors = [(i, leaf) for i, leaf in enumerate(call.leaves) if isinstance(leaf, torch.Tensor)]
        dims = {i: {d: (None, None) for d, size in enumerate(leaf.shape) if size > 1} for i, leaf in tensors}
        call = dataclasses.replace(call, dynamic=dims)
    with torch.set_grad_enabled(grad):
        try:
            lifted = [(source.get(), source) for source in sources]
            options = Options(name, decompositions or {}, higher_order=False, around=around, keeps_branches=True)
            joint = capture_call(call, options, lifted=lifted).joint
        except CheckFailed as found:
            raise found.error from None
    if joint.error is not None:
        raise joint.error
    s = joint.signature
    checks = any(not check.is_operator for check in s.stops.checks)
    what = "takes or returns wrapper subclasses of tensors" if s.has_wrappers else inexpressible(s, checks=checks)
    if what:
        raise UnsupportedError(f"`{name}` can't be exported as a single graph: it {what}")
    slots = [str(i.slot) for i in s.inputs if i.argument is None and not isinstance(i.slot, (Param, Buffer))]
    if slots:
        raise UnsupportedError(f"`{name}` reaches {', '.join(slots)} by itself: make them buffers, or arguments")
    return joint


def inexpressible(s: Signature, *, checks: bool) -> str:
    """What a function does that no single graph can say; "" if there is nothing. `checks`: it has checks of values."""
    written = ", ".join(dict.fromkeys(write.path for write in s.effects.python_writes))
    branches = "; ".join(dict.fromkeys(decision.where for decision in s.stops.decisions))
    rows = (
        ("changes sizes of its arguments in place", s.reshaped or s.swapped),
        ("writes to an argument that shares memory with a second argument", s.structure.shared_memory),
        (f"runs Python in each call ({s.stops.in_python})", s.stops.in_python),
        (f"branches on values of tensors (by `if`, a loop or the like; use `torch.cond`: {branches})", branches),
        ("checks values of tensors", checks),
        ("writes to tensors in its backward", s.backward),
        ("sets `.grad` of tensors", s.gradients_left),
        (f"writes {written}", written),
    )
    return next((what for what, does in rows if does), "")


class _JointWriter:
    """Writes a joint graph anew, with the inputs and outputs that callers of AOTAutograd expect."""

    def __init__(
        self,
        joint: JointGraph,
        call: FlatCall,
        inputs: str,
        first: int = 0,
        *,
        lifted: int = 0,
        constants: bool = False,
    ) -> None:
        """`lifted`: how many parameters and buffers come first. `constants`: all others belong to the graph."""
        self.joint, self.signature = joint, joint.signature
        self.graph = fx.Graph()
        self.made: dict[fx.Node, fx.Node] = {}
        self.old_outputs = joint.outputs()
        placeholders = joint.placeholders()
        self.count = len(self.signature.inputs)
        infos = list(zip(self.signature.inputs, placeholders, strict=False))
        others = [node for info, node in infos if info.argument is None]
        by_leaf = {info.argument: node for info, node in infos}
        leaves = [by_leaf.get(i, leaf) for i, leaf in enumerate(call.leaves)]
        wanted = [*others[:lifted], *leaves, *([] if constants else others[lifted:])]
        self.all_inputs = [self._input(node, inputs.format(i)) for i, node in enumerate(wanted, first)]
        for number, (info, node) in enumerate(infos):
            if node not in self.made:
                setattr(joint.module, f"_tensor_constant{number}", info.source.get().detach())
                self.made[node] = self.graph.get_attr(f"_tensor_constant{number}")
                self.made[node].meta = node.meta
        self.inputs = [self.made[node] for _, node in infos]
        self.tangents = placeholders[self.count :]
        self.seed: int | None = None

    def _input(self, node: Any, name: str) -> fx.Node:
        """A placeholder for an input of the joint graph, or for a plain value among the arguments: a constant."""
        copy = self.graph.placeholder(name)
        if isinstance(node, fx.Node):
            self.made[node], copy.meta = copy, node.meta
        else:
            copy.meta["val"] = node
        return copy

    def loss(self, index: int | None) -> int:
        """The graph output that is the loss: the tangent of it is a one, and there is no other."""
        assert index is not None
        outputs: Signature = self.signature
        info = outputs.structure.outputs[index] if 0 <= index < len(outputs.structure.outputs) else None
        position = info.output if isinstance(info, Handle) else None
        if position is None or position not in outputs.gradients.differentiable:
            raise RuntimeError(f"the result at {index}, named as the loss, requires no gradients")
        if outputs.graph_outputs.specs[position].shape not in ((), (1,)):
            raise RuntimeError(f"the result at {index}, named as the loss, is no scalar")
        others = [str(outputs.graph_outputs.slots[i]) for i in outputs.gradients.differentiable if i != position]
        if others:
            raise RuntimeError(f"{', '.join(others)} require gradients, too: detach all results but the loss")
        self.seed = position
        return position

    def module(self, *, gradients: bool, tangents: bool = False) -> fx.GraphModule:
        if tangents:
            for number, node in enumerate(self.tangents, 1):
                self._input(node, f"tangents_{number}")
        grads = [(i, g) for i, g in enumerate(self._gradients()) if gradients and self.signature.gradients.returned[i]]
        wanted = [*self.old_outputs[: self.signature.num_forward_outputs], *(g for _, g in grads)]
        needed = reachable([node for node in wanted if node is not None], self.joint)
        for node in self.joint.graph.nodes:
            if node.op in ("call_function", "get_attr") and (node in needed or node.target is set_grad_enabled):
                self._copy(node)
        self.updated = [self._of(self.old_outputs[update.output]) for update in self._updates()]
        self.results = [self._result(info) for info in self.signature.structure.outputs]
        self._checks()
        self.grads = [(i, self._of(g)) for i, g in grads]
        self.graph.output((*self.updated, *self.results, *(node for _, node in self.grads)))
        return fx.GraphModule(self.joint.module, self.graph)

    def _checks(self) -> None:
        """Operators without results, which check values or print, in their order at the end of the forward."""
        outputs = [self._of(node) for node in self.old_outputs[: self.signature.num_forward_outputs]]
        for check in self.signature.stops.checks:
            args, kwargs = check.arguments(self.inputs, outputs)
            name = getattr(check.op, "overloadpacket", check.op).__name__
            self.graph.create_node("call_function", check.op, args, kwargs, name)

    def _gradients(self) -> list[Any]:
        first = self.signature.num_forward_outputs
        return self.old_outputs[first : first + self.count]

    def _updates(self) -> list[Any]:
        return sorted(self.signature.updates, key=lambda update: update.input)

    def _copy(self, node: fx.Node) -> None:
        for operand in node.all_input_nodes:
            self._of(operand)
        copy = self.made[node] = self.graph.node_copy(node, self.made.__getitem__)
        copy.meta = node.meta

    def _of(self, node: object) -> Any:
        if isinstance(node, fx.Node) and node not in self.made:  # the tangent of the loss
            assert self.seed is not None
            loss = self.made[self.old_outputs[self.seed]]
            self.made[node] = self.graph.create_node("call_function", aten.ones_like.default, (loss,), name="ones_like")
            self.made[node].meta = loss.meta.copy()
        return self.made[node] if isinstance(node, fx.Node) else node

    def _result(self, info: OutputInfo) -> Any:
        if isinstance(info, ConstantOutput):
            return info.value
        assert isinstance(info, Handle)
        if any(isinstance(e, (SetData, Write)) and not e.is_whole for e in self.signature.effects.log):
            raise UnsupportedError(f"{info.path} can't be exported: it is a view of memory that was replaced")
        output = info.output
        if output is None:
            output = next((u.output for u in self.signature.updates if u.input == info.input), None)
        base = self.inputs[info.input or 0] if output is None else self._of(self.old_outputs[output])
        for step in info.steps:
            node = self.graph.call_function(step.op, (base, *step.args), dict(step.kwargs))
            if step.index is not None:
                node = self.graph.call_function(operator.getitem, (node, step.index))
            node.meta = NodeMeta(late={"val": _value(node)})
            base = node
        return base

    def signature_of(self, call: FlatCall, loss: int | None) -> GraphSignature:
        names, every = [node.name for node in self.inputs], [node.name for node in self.all_inputs]
        slots = [(n, i.slot) for n, i in zip(names, self.signature.inputs, strict=True) if n in every]
        parameters = {n: s.name for n, s in slots if isinstance(s, Param)}
        buffers = {n: s.name for n, s in slots if isinstance(s, Buffer)}
        mutated = [(node.name, update.input) for node, update in zip(self.updated, self._updates(), strict=True)]
        backward = None
        if loss is not None:
            by_input = {names[i]: node.name for i, node in self.grads}
            backward = BackwardSignature(
                {grad: parameters[n] for n, grad in by_input.items() if n in parameters},
                {grad: n for n, grad in by_input.items() if n not in parameters and n not in buffers},
                str(self.results[loss].name),
            )
        return GraphSignature(
            list(parameters.values()),
            list(buffers.values()),
            [n for n in every if n not in parameters and n not in buffers],
            [node.name if isinstance(node, fx.Node) else node for node in self.results],
            parameters,
            buffers,
            {name: buffers[names[i]] for name, i in mutated if names[i] in buffers},
            {name: parameters[names[i]] for name, i in mutated if names[i] in parameters},
            {name: names[i] for name, i in mutated if names[i] not in buffers and names[i] not in parameters},
            _spec(call.tree, len(every) - call.tree.size),
            _spec(self.signature.structure.output_spec),
            backward,
        )


def _spec(tree: Tree, ahead: int = 0) -> Any:
    """The structure as PyTorch's callers know it; `ahead`: tensors that come before the arguments."""
    value = tree.unflatten([0] * tree.size)
    if ahead:
        args, kwargs = value
        value = (tuple([0] * ahead) + tuple(args), kwargs)
    return spec_of_structure(value)


def _value(node: fx.Node) -> Callable[[], Any]:
    def make() -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        return function_of(node)(*args, **kwargs)

    return make
