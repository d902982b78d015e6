"""The rendered runtime: each call's steps around the compiled graphs, as straight-line Python.

The signature decides the lines of a function: the autograd node, the forward call, writing mutations back, taking
views. Dispatch puts `RunLines` after the guards into one function; `compiled.source()` shows its text.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._torch import engine
from .._torch.engine import keeps_versions
from .._torch.ops import OpOverload, waits_for_others
from ..annexes import the_one
from ..frontend.tree import Tree, flatten
from ..graph.call_effects import CallPlace, EffectTarget, OldObject, at_place
from ..graph.effect_log import (
    BumpVersion,
    Detach,
    Effect,
    Handle,
    InplaceView,
    MarkRequiresGrad,
    OutputInfo,
    RunGraph,
    SetData,
    SetStorage,
    TakeView,
    Write,
    WriteWrapper,
    with_graph,
)
from ..graph.signature import ConstantOutput, Signature, WrapperOutput
from ..graph.source import Names, literal, unpacked
from .compiled import Compiled
from .decisions import Stop, attempt_lines, check_lines, decision_lines, open_sizes
from .lines import LineWriter, op_name
from .node import NodeSource, make_node
from .passed import history_lines, join, marking, said_of_hooked, unwatched
from .writes import graph_arguments, update_line, write_with_history


class RunLines(LineWriter):
    """The body of a function that runs `compiled`: `lines` up to a return, their `globals`, and the `node` called
    there, if there is one.

    `inputs`: the variables of the signature's inputs; `wrappers`: of the wrapper subclasses that inputs are parts of.
    `symbols`: of each symbolic size; `containers`: of containers among the arguments, by number. `draws`: whether
    Python's random numbers are drawn around the body.
    """

    def __init__(
        self,
        compiled: Compiled,
        inputs: list[str],
        names: Names,
        stop: Stop,
        symbols: Mapping[object, str] | None = None,
        wrappers: Sequence[str] = (),
        containers: Mapping[int, str] | None = None,
        *,
        draws: bool = False,
    ) -> None:
        super().__init__(names)
        self.containers = containers or {}
        self.compiled = compiled
        self.stop, self.draws = stop, draws
        self.joint = compiled.partitioned.joint
        self.signature: Signature = self.joint.signature
        self.inputs = inputs
        self.tensors = [*inputs, *wrappers]  # the tensors in the log
        self.wrappers, gradients = wrappers, self.signature.gradients
        self.opened: Any = None  # the lines for tensors that open
        if self.signature.structure.wrapper_parts or gradients.passed_wrappers or gradients.wrapper_results:
            self.opened = the_one("lines of tensors that open")(weakref.proxy(self), wrappers, self.signature)
        self.outputs = [names.fresh(f"out_{i}") for i in range(self.signature.num_forward_outputs)]
        self.symbols = {**(symbols or {}), **open_sizes(self.signature, self.outputs)}
        self.node: NodeSource | None = None
        self.passed = dict(self.signature.gradients.passed)
        self.joins = self._joins()
        self.values: list[str] = []  # expressions of the result's leaves, once all exist
        self.made_by = ""  # the variable of the node, where that is needed
        self.are_inputs_done = False  # no line changes the inputs any more
        self.ends: tuple[int, list[str]] | None = None  # the lines before `else`, and a call's that ends early
        self.unwritten = {update.input: update for update in self.signature.updates if update.differentiable}
        self._render()

    def _render(self) -> None:
        signature = self.signature
        taken = [] if signature.is_inference else self.joint.inputs_taken()
        self._effects(CallPlace.FIRST)
        # A write of no elements moves the version with which a tensor is to be saved: had eager saved it before, the
        # backward raises anyway.
        counts_first = not signature.is_inference and not signature.may_stop
        leaves = {i for i, info in enumerate(signature.inputs) if info.requires_grad and info.is_leaf}
        log = with_graph(signature.effects.log, taken, leaves, counts_first=counts_first)
        last = max((at for at, effect in enumerate(log) if effect.is_whole or isinstance(effect, RunGraph)))
        for at, effect in enumerate(log):
            self.are_inputs_done = at > last
            if isinstance(effect, RunGraph):
                self._run_graph(taken)
            else:
                self._effect(effect)
        self.are_inputs_done = True
        self._returns()
        if self.ends is not None:
            start, last_lines = self.ends
            self.indent(start)
            self.lines += last_lines

    def _run_graph(self, taken: list[int]) -> None:
        if self.signature.is_inference:
            self._inference()
        else:
            self._training(taken)
        if histories := history_lines(self, self.joint, self.outputs):
            modes = [] if torch.is_grad_enabled() else [f"{self.bind('enable_grad', torch.enable_grad)}()"]
            self.under(modes, histories)
        self._may_end()
        self._effects(CallPlace.GRAPH)

    def _effects(self, place: CallPlace) -> None:
        """The effects at one place of the call."""
        for effect in at_place(self.signature.effects.around, place):
            self.lines += effect.lines(self)

    def target(self, target: EffectTarget) -> str:
        return self.tensors[target.number] if target.is_input else self.values[target.number]

    def input(self, number: int) -> str:
        return self.inputs[number]

    def output(self, number: int) -> str:
        return self.outputs[number]

    def result(self, number: int) -> str:
        return self.values[number]

    def built(self, value: object) -> str:
        leaves, tree = flatten(value)
        return pack_expression(tree, [self.bind("value", leaf) for leaf in leaves], self.bind)

    def _effect(self, effect: Effect) -> None:
        """One entry of the log, on the real tensors."""
        whole = self.tensors[effect.input] if effect.result is None else self._result(effect.result)
        if isinstance(effect, TakeView):
            self.view(whole, effect.steps, effect.path)
        elif isinstance(effect, Write):
            self._write(whole, effect)
        elif isinstance(effect, WriteWrapper):
            self.lines += [f"{self._increment_version()}({whole})"] * effect.times
        else:
            self._change(self.view(whole, effect.steps, ""), effect)

    def _change(self, name: str, effect: Effect) -> None:
        """The lines of an effect, other than a write, on the tensor called `name`."""
        if isinstance(effect, MarkRequiresGrad):
            self.lines.append(f"{name}.requires_grad_()")
        elif isinstance(effect, Detach):
            self.lines.append(f"{name}.{'detach_()' if effect.in_place else 'requires_grad_(False)'}")
        elif isinstance(effect, SetStorage):
            self.under([f"{self.bind('no_grad', torch.no_grad)}()"], [f"{name}.set_({self._handle(effect.source)})"])
        elif isinstance(effect, SetData):
            self.lines.append(f"{name}.data = {self._handle(effect.source)}")
        elif isinstance(effect, InplaceView):
            op, arguments = self.bind(op_name(effect.op), effect.op), self.arguments(effect.args, effect.kwargs)
            guards = [] if effect.grad_enabled else [f"{self.bind('no_grad', torch.no_grad)}()"]
            self.under(guards, [f"{op}({', '.join([name, *arguments])})"])
        else:
            assert isinstance(effect, BumpVersion)
            self.lines.append(f"{self._increment_version()}({name})")

    def _increment_version(self) -> str:
        return self.bind("increment_version", torch.autograd.graph.increment_version)

    def _may_end(self) -> None:
        """A call may end once the graph has raised, or a decision or check after it fails. The call then has no visible
        effect yet: other means are tried.
        """
        signature, stop = self.signature, self.stop
        effects = signature.effects
        around = any(e.sees_gradients or e.place is CallPlace.LEFT for e in effects.around)
        leaves = effects.log or effects.python_writes or around or self.draws
        leaves = leaves or any(map(_may_raise_for_numbers, self.joint.graph.nodes))
        acts = bool(signature.may_stop or leaves) and self._acts()
        if not signature.may_stop and (acts or not leaves):
            return
        self.lines, undo = attempt_lines(self, signature, self.tensors, self.lines)
        checks = check_lines(self, signature, self.inputs, self.outputs, stop.checked)
        diverged = stop.diverged if signature.stops.decisions else stop.checked
        faulted = diverged if signature.stops.decisions else "raise fault" if acts else stop.faulted
        self.lines.append("else:")
        self.ends = len(self.lines), [*undo, faulted]
        self.lines += decision_lines(self, self.joint, self.outputs, undo, diverged, checks)

    def _acts(self) -> bool:
        """Whether the forward does more than compute, beyond undoing."""
        modules = [module for module in self.joint.module.modules() if isinstance(module, torch.fx.GraphModule)]
        nodes = [node for module in modules for node in module.graph.nodes if node.op == "call_function"]
        of_forward = [node for node in nodes if node.meta.get("partitioner_tag") != "is_backward"]
        # All calls of an operator have one answer.
        asked = {id(n.target) if isinstance(n.target, OpOverload) else n: n for n in of_forward}
        return any(
            node.is_impure(impure_random=not self.signature.stops.generators) or waits_for_others(node.target)
            for node in asked.values()
        )

    # ---------------------------------------------------------------- running the graph

    def _inference(self) -> None:
        forward = self.bind("forward_graph", self.compiled.forward)
        arguments = graph_arguments(self.inputs, self.compiled.forward, self.signature.updates)
        call = f"{unpacked(self.outputs)}{forward}({arguments})"
        autocast = [f"{self.bind('no_autocast', engine.disable_autocast)}()"] if self.compiled.disable_autocast else []
        autocast += self._around()
        if self.signature.marked or any(info.requires_grad for info in self.signature.inputs):
            # Gradients are mostly off already; a test is ten times quicker than turning them off again.
            self.lines.append(f"if {self.bind('is_grad_enabled', torch.is_grad_enabled)}():")
            start = len(self.lines)
            self.under([f"{self.bind('no_grad', torch.no_grad)}()", *autocast], [call])
            self.indent(start)
            self.lines.append("else:")
            start = len(self.lines)
            self.under(autocast, [call])
            self.indent(start)
        else:
            self.under(autocast, [call])

    def _around(self) -> list[str]:
        return [context for effect in self.signature.effects.around for context in effect.around(self)]

    def _training(self, taken: list[int]) -> None:
        joined = {self._position(output) for output in self.joins}
        self.node = node = make_node(self.compiled, taken, joined)
        signature = self.signature
        apply = self.bind("apply", node.apply)
        guards = [f"{self.bind('enable_grad', torch.enable_grad)}()"] if self.compiled.needs_grad_mode else []
        guards += self._around()
        if torch.is_inference_mode_enabled():
            guards.insert(0, f"{self.bind('inference_mode', torch.inference_mode)}(False)")
        inputs, later, followed = self.inputs, list[str](), list[str]()
        if signature.gradients.stages:
            stages = the_one("stages of backwards")
            inputs, later, followed = stages.later_lines(self, signature, self.inputs, self.outputs)
        before, call, after = node.call_lines(apply, inputs, self.outputs, signature, self.names)
        self.lines += before
        self.under(guards, [*later, call])
        self.lines += [*after, *followed]
        if self.joins or (self.opened and self.opened.needs_node(node)):
            self.made_by = self.names.fresh("node")
            self.lines.append(f"{self.made_by} = {self.outputs[signature.gradients.differentiable[0]]}.grad_fn")

    # ---------------------------------------------------------------- after it

    def _write(self, whole: str, effect: Write) -> None:
        if not effect.is_whole:
            self._write_view(self.view(whole, effect.steps, ""), effect.output, counts=effect.counted)
        elif effect.swapped:
            self._write_history(whole, effect.output)
        elif effect.differentiable:
            self._differentiable_update(effect.input)
        elif (effect.input, effect.output) not in getattr(self.compiled.forward, "updated", ()):  # not by the graph
            spec = self.signature.inputs[effect.input].spec
            self.lines.append(update_line(self, whole, self.outputs[effect.output], spec, counted=effect.counted))

    def _differentiable_update(self, index: int) -> None:
        """Write to an input its new value, with the history, unless that was done."""
        update = self.unwritten.pop(index, None)
        if update is None:
            return
        info = self.signature.inputs[index]
        target = self.inputs[index]
        self._write_history(target, update.output)
        self._mark(target, self.passed.get(self._position(update.output)), str(info.slot))

    def _write_history(self, target: str, output: int) -> None:
        """`target` takes the output's elements and history."""
        self.lines.append(f"{self.bind('write_with_history', write_with_history)}({target}, {self._result(output)})")

    def _write_view(self, view: str, output: int, *, counts: bool) -> None:
        """Give a view its history. `counts`: as a counted write, like the program's own."""
        self._result(output)
        start = len(self.lines)
        self._write_history(view, output)
        if not counts:
            self.indent(start)
            self.lines.insert(start, f"with {self.bind('keeps_versions', keeps_versions)}({view}):")

    def _joins(self) -> dict[int, list[tuple[str, int]]]:
        """For each graph output: the visible tensors that it was computed from, other than results of its node.

        ("input", its number) for inputs that were written to; ("output", its position) for views.
        """
        signature, passed = self.signature, self.passed
        joins: dict[int, list[tuple[str, int]]] = {}
        for update in signature.updates:
            for position in passed.get(self._position(update.output), ()) if update.differentiable else ():
                joins.setdefault(signature.gradients.differentiable[position], []).append(("input", update.input))
        for at, after in signature.gradients.passed_aliases:
            for position in after:
                joins.setdefault(signature.gradients.differentiable[position], []).append(("output", at))
        return joins

    def _result(self, output: int) -> str:
        """A result of the node, joined to the visible tensors that it was computed from."""
        name, tensors = self.outputs[output], []
        for kind, number in self.joins.pop(output, ()):
            if kind == "input":
                self._differentiable_update(number)
                tensors.append(self.inputs[number])
            elif self._is_there(self.signature.structure.outputs[number]):
                tensors.append(self._output(self.signature.structure.outputs[number]))
        if tensors:
            self.lines.append(f"{self.bind('join', join)}({name}, {', '.join(dict.fromkeys(tensors))})")
            self._mark(name, self.passed.get(self._position(output)), str(self.signature.graph_outputs.slots[output]))
        return name

    def _position(self, output: int) -> int:
        differentiable = self.signature.gradients.differentiable
        return differentiable.index(output) if output in differentiable else -1

    def _is_there(self, info: OutputInfo) -> bool:
        """Whether an output that is a view can be taken already."""
        return self.are_inputs_done or (isinstance(info, Handle) and info.input is None)

    def _mark(self, name: str, after: tuple[int, ...] | None, what: str) -> None:
        """Mark a tensor that outputs at the positions `after` were computed from, inside."""
        if after is not None and self.node is not None:
            mark = self.bind("mark", marking(self.signature, self.joint.name, what, after))
            self.lines.append(f"{mark}({name}, {self.made_by})")

    def _returns(self) -> None:
        signature = self.signature
        outputs = signature.structure.outputs
        self.values = values = [self._output(info) for info in outputs]
        for at, after in signature.gradients.passed_aliases:
            self._mark(values[at], after, outputs[at].path)
        self._effects(CallPlace.RESULTS)
        is_told = self.node is not None and self.node.is_native  # the node hears of who watches its outputs
        for at in () if is_told else signature.gradients.hooked_inside:
            message = self.bind("said", said_of_hooked(signature, self.joint.name, at))
            self.lines.append(f"{self.bind('unwatched', unwatched)}({values[at]}, {message})")
        self._effects(CallPlace.LEFT)
        result, *written = self._packed(values)
        if self.node is not None and self.opened and self.opened.needs_node(self.node):
            result = self.opened.linked(result, self.node, self.inputs, self.made_by, self.joint.name)
        self.lines += [write.line(self, written) for write in signature.effects.python_writes]
        self.lines.append(f"return {result}")

    def _packed(self, leaves: list[str]) -> list[str]:
        """The expressions of the result and of the values written to Python's state."""
        signature = self.signature
        trees = [
            signature.structure.output_spec,
            *(signature.structure.written_spec.children if signature.effects.python_writes else ()),
        ]
        made = self.names.fresh("made") if any(map(has_objects, trees)) else None
        if made is not None:
            self.lines.append(f"{made} = {{}}")
        packed, at = [], 0
        for tree in trees:
            part = leaves[at : at + tree.size]
            at += tree.size
            if made is None or tree.kind == "leaf":
                packed.append(pack_expression(tree, part, self.bind))
            else:  # in order: an item may hold an earlier item
                packed.append(self.names.fresh("value"))
                build = self.bind("build", tree.unflatten)
                self.lines.append(f"{packed[-1]} = {build}([{', '.join(part)}], made={made})")
        return packed

    def _handle(self, handle: Handle) -> str:
        whole = self._result(handle.output) if handle.output is not None else self.inputs[handle.input or 0]
        return self.view(whole, handle.steps, handle.path)

    def _output(self, info: OutputInfo) -> str:
        if isinstance(info, ConstantOutput):
            value = info.value
            return value.expression(self) if isinstance(value, OldObject) else self.literal(value)
        if isinstance(info, WrapperOutput):
            return self.wrappers[info.wrapper]
        assert isinstance(info, Handle)
        return self._handle(info)


# -------------------------------------------------------------------- containers and results that are objects
# Containers and objects as lines of Python: rendered code builds the function's result with these lines.


def _may_raise_for_numbers(node: torch.fx.Node) -> bool:
    """Whether a node is Python's arithmetic on numbers and raises for some: a division by a number that varies."""
    if node.target in (operator.truediv, operator.floordiv, operator.mod):
        return isinstance(node.args[1], torch.fx.Node)
    return node.target is operator.pow or getattr(node.target, "__module__", "") == "math"


def has_objects(tree: Tree) -> bool:
    """Whether a container holds an object that is made before its contents."""
    return any(node.kind in _MADE_FIRST for _, node in tree.walk(""))


_MADE_FIRST = {"object", "ref", "weakref", "method", "partial", "function", "cell"}


def pack_expression(tree: Tree, values: list[str], bind: Callable[[str, object], str]) -> str:
    """The expression that builds a container of structure `tree` from the expressions of its leaves."""
    if tree.kind == "leaf":
        return values[0]
    parts, at = [], 0
    for child in tree.children:
        parts.append(pack_expression(child, values[at : at + child.size], bind))
        at += child.size
    if tree.kind == "list":
        return f"[{', '.join(parts)}]"
    if tree.kind == "tuple":
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if tree.kind == "dict" and tree.type is dict:
        items = []
        for key, part in zip(tree.context, parts, strict=True):
            items.append(f"{literal(key) or bind('key', key)}: {part}")
        return "{" + ", ".join(items) + "}"
    if tree.kind == "namedtuple":
        return f"{bind(tree.type.__name__, tree.type)}({', '.join(parts)})"
    # Anything else is opened one level and built by the tree itself.
    flat = Tree(tree.kind, tree.type, tree.context, tuple(Tree("leaf") for _ in tree.children), len(tree.children))
    return f"{bind('build', flat.unflatten)}([{', '.join(parts)}])"
