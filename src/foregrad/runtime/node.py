"""The autograd node of a compiled function: a `torch.autograd.Function` with two rendered methods.

The forward takes the inputs that may need gradients as arguments, and the rest in a list; in the list it also returns
the outputs without gradients: autograd then handles no more than it must. Saved tensors are freed as soon as the
backward has them, unless the graph is kept.

If the C++ part was built, it replaces the forward and the usual backward here, on equal graphs and from equal decisions
(`_how_kept`, the specs of tangents); the rendered backward is then for all other cases.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx

from .._torch import engine
from .._torch.engine import TAKES_HANDED
from .._torch.graphs import ends_of
from .._torch.hooks import defined_hooks_only, spare_leaves
from .._torch.native import native
from .._torch.symbols import Size, is_symbolic
from ..graph.meta import TensorSpec, as_captured, in_order, laid_out, memory_order, spec_of
from ..graph.signature import Signature
from ..graph.source import Names, compile_source, unpacked
from ..identity import attributed
from ..passes.aliasing import memory_of
from ..passes.keep import is_alias
from ..passes.opaque import opaque_values
from ..passes.zeros import backward_acts
from .anomaly import watched
from .compiled import Compiled
from .higher import (
    differentiable_backward,
    needs_input_grad_of,
    needs_trail,
    of_other_kinds,
    stopping_backward,
    trails_of,
)
from .passed import Interior, check_marked, finishing, marked
from .release import Release, parts_run, saved_in_part
from .writes import EffectLines

_MOST_PARTIAL = 16  # backwards for some of the gradients only; beyond that all gradients are computed
_AS_IT_IS, _COPIED, _DETACHED, _SIZE = -1, -2, -3, -4  # as `_native/program.h` numbers them
_KEPT = {_COPIED: "{}.clone()", _DETACHED: "{}.detach()"}


@dataclasses.dataclass(frozen=True, slots=True)
class NodeSource:
    """An autograd node: the function that calls it, and its rendered text.

    `apply(others, *taken)` if the node is all rendered: see `call_lines`. `is_native`: `apply(*inputs)`, in C++.
    `held_inputs`, `held_outputs`: the inputs and outputs that share memory with saved values.
    """

    apply: Callable[..., Any]
    source: str
    taken: list[int]
    is_native: bool
    held_inputs: frozenset[int] = frozenset()
    held_outputs: frozenset[int] = frozenset()

    def call_lines(
        self, apply: str, inputs: list[str], outputs: list[str], signature: Signature, names: Names
    ) -> tuple[list[str], str, list[str]]:
        """(lines before the call, the call by the name `apply`, lines after it)."""
        if self.is_native:
            return [], f"{', '.join(outputs)} = {apply}({', '.join(inputs)})", []
        rest = [name for i, name in enumerate(inputs) if i not in self.taken]
        plain = [name for i, name in enumerate(outputs) if i not in signature.gradients.differentiable]
        target = ", ".join(outputs[i] for i in signature.gradients.differentiable)
        arguments = ", ".join(inputs[i] for i in self.taken)
        if not rest and not plain:
            return [], f"{target} = {apply}(None, {arguments})", []
        box = names.fresh("others")
        before = [f"{box} = [{', '.join(rest)}]"]
        return before, f"{target} = {apply}({box}, {arguments})", [f"{unpacked(plain)}{box}"] if plain else []


def make_node(compiled: Compiled, taken: list[int], unmarked: Collection[int] = ()) -> NodeSource:
    """The node for `compiled`; `taken` are its inputs to autograd.

    The differentiable outputs at positions `unmarked` are left for the caller to mark.
    """
    return _NodeRenderer(compiled, taken, unmarked).make()


class _NodeRenderer:
    def __init__(self, compiled: Compiled, taken: list[int], unmarked: Collection[int]) -> None:
        self.compiled = compiled
        self.unmarked = unmarked
        self.partitioned = compiled.partitioned
        self.signature = compiled.partitioned.joint.signature
        self.taken = taken
        signature = self.signature
        self.moved = {u.input for u in signature.updates} | signature.reshaped
        self.moved |= {*signature.swapped, *signature.counted, *signature.effects.counted_along}
        self.moved_by_call = frozenset(self.moved)
        self.moved |= {*signature.backward.live}
        self.results = list(self.partitioned.saved_results) if compiled.hooked else []
        passed = {signature.gradients.differentiable[position] for position, _ in signature.gradients.passed}
        self.has_marks = bool(signature.gradients.passed_aliases or signature.gradients.passed_wrappers or self.results)
        self.has_marks |= any(update.differentiable and update.output in passed for update in signature.updates)
        self.effects = signature.backward
        self.is_native = compiled.native and native() is not None and not self.has_marks and not self.effects
        self.as_they_come = opaque_values().as_they_come(self.partitioned.backward)
        self.is_native &= not self.as_they_come
        self.has_marks |= bool(passed) and not self.is_native
        self.release = Release(self.partitioned, taken if compiled.make_derived is not None else [])
        self.names = Names(["ctx", "others"])
        self.globals: dict[str, Any] = {}
        self.primals = [self.names.fresh(f"primals_{i + 1}") for i in range(len(self.signature.inputs))]
        self.tangents = [
            self.names.fresh(f"tangents_{i + 1}") for i in range(len(self.signature.gradients.differentiable))
        ]

    def make(self) -> NodeSource:
        if self.is_native:
            return self._native()
        source = "\n".join((*self._forward(), "", "", *self._backward(), ""))
        backward = compile_source(source, "backward", self.globals, label="autograd node")
        forward = self.globals.pop("forward")
        held = _held_by_calls(forward, self._in_python(backward))
        body = {"forward": staticmethod(weakref.proxy(held)), TAKES_HANDED: True}
        body["backward"] = staticmethod(lambda ctx, *tangents: ctx.rendered(ctx, *tangents))
        function = type("CompiledFunction", (torch.autograd.Function,), body)
        if len(self.tangents) > 1:
            defined_hooks_only(function)
        state = backward.__globals__
        state["watched_backward"] = watched(backward, self.compiled)
        state["backward_graph"] = _compile_on_first_use(self.compiled, functools.partial(_keep, weakref.ref(backward)))
        apply = engine.beside_threads(engine.direct_apply(function))
        attributed(apply, held=held)  # the class has a weak reference
        if self.has_marks:
            name = self.partitioned.joint.name
            apply = marked(apply, self.signature, name, self.results, self.unmarked)
        return self._made(apply, source)

    def _made(self, apply: Any, source: str) -> NodeSource:
        held: dict[str, Any] = {}
        if self.signature.structure.wrapper_parts or self.signature.gradients.wrapper_results:
            held = self._held()
        return NodeSource(apply, source, self.taken, self.is_native, **held)

    def _held(self) -> dict[str, frozenset[int]]:
        """The inputs and outputs that are saved without a copy, or share memory with saved tensors."""
        tensors = [node for node in self.partitioned.saved_nodes if self._how_kept(node) not in (_SIZE, _COPIED)]
        inputs = frozenset(number for number in map(_number_of_input, tensors) if number >= 0)
        outputs, memory = [*ends_of(self.partitioned.forward)[1]], {*map(memory_of, tensors)}
        held = {at for at in self.signature.gradients.differentiable if memory_of(outputs[at]) in memory}
        return {"held_inputs": inputs, "held_outputs": frozenset(held)}

    def _in_python(self, backward: Any) -> Callable[..., Any]:
        """The backward of a node in Python: autograd drops the node's saved tensors after any part has run."""
        partial = backward.__globals__.get("partial_backward")
        has_parts = partial is not None and (len(self.tangents) > 1 or len(self.taken) > 1)
        runs_once = bool(self.signature.gradients.saving) and not self.partitioned.saved_tensors
        if not has_parts and not runs_once:
            return self._of_all_kinds(backward.__globals__, backward)

        def run(ctx: Any, *tangents: object) -> Any:
            if has_parts and not torch.is_grad_enabled() and parts_run(ctx) is not None:
                return partial(ctx, tangents)
            if runs_once and not has_parts:
                ctx.saved_tensors  # noqa: B018  (there are none; raises if all ran before, as eager does)
            return backward(ctx, *tangents)

        return self._of_all_kinds(backward.__globals__, run)

    def _of_all_kinds(self, state: dict[str, Any], run: Callable[..., object]) -> Callable[..., Any]:
        return of_other_kinds(run, state.get("differentiable_backward"), self.compiled)

    def _native(self) -> NodeSource:
        """The node in C++, with the rendered backward for the calls that C++ leaves to Python."""
        source = "\n".join(("# forward, and backward as a rule: foregrad._native", *self._backward(), ""))
        other = compile_source(source, "backward", self.globals, label="autograd node")
        state, signature = other.__globals__, self.signature
        state["watched_backward"] = watched(other, self.compiled)
        node_of: list[Any] = []  # a weak reference
        rendered = weakref.ref(other)

        def keep(graph: Callable[..., object]) -> None:
            _keep(rendered, graph)
            node = node_of[0]()
            if node is not None:
                node.backward = graph

        name, results = self.partitioned.joint.name, signature.num_forward_outputs
        saved_from = list(range(results, results + len(self.partitioned.saved_nodes)))
        for saved, output in self._outputs_saved():
            saved_from[saved - results] = output
        on_watched = None
        if signature.gradients.passed or signature.gradients.hooked_inside:
            stopping = stopping_backward(self.compiled, self.taken, make_node, self.release)
            on_watched = Interior(signature, name, stopping).before
            other = finishing(other, self.release, lambda ctx: needs_input_grad_of(ctx, self.taken, exact=True))
        other = self._of_all_kinds(state, other)
        failed = self.partitioned.joint.backward_error is not None or bool(self.partitioned.joint.failing)
        state["backward_graph"] = _compile_on_first_use(self.compiled, keep)
        node = native().Function(
            forward=self.compiled.forward,
            backward=None if failed else state["backward_graph"],
            other_backward=other,
            trails_of=trails_of,
            on_watched=on_watched,
            inputs=len(signature.inputs),
            taken=self.taken,
            trails=needs_trail(self.compiled, self.taken),
            shown=[self._how_shown(i) for i in range(signature.num_forward_outputs)],
            saved=[self._how_kept(node) for node in self.partitioned.saved_nodes],
            saved_from=saved_from,
            tangents=[] if failed else [_layout(spec) for spec in signature.gradients.tangent_specs],
            gradients=[
                i if signature.gradients.returned and signature.gradients.returned[i] else -1 for i in self.taken
            ],
            autocast_off=self.compiled.disable_autocast,
            runs_once=bool(signature.gradients.saving),
        )
        node_of.append(weakref.ref(node))
        return self._made(node, source)

    def _how_shown(self, output: int) -> int:
        if output not in self.signature.gradients.differentiable:
            return 0
        return 2 if output in self.signature.graph_outputs.runtime_views else 1

    # ---------------------------------------------------------------- forward

    def _outputs_saved(self) -> list[tuple[int, int]]:
        """(position of a residual, position of the output that it is) among the forward graph's results."""
        signature = self.signature
        return [
            (signature.num_forward_outputs + at, signature.gradients.differentiable[position])
            for position, at in self.partitioned.saved_results.items()
        ]

    def _forward_graph(self) -> Callable[[list[Any]], list[object]]:
        """The compiled forward; an output that is saved too is one object, so autograd recognizes it as an output."""
        forward, same = self.compiled.forward, self._outputs_saved()
        if not same:
            return forward

        def forward_graph(values: list[object]) -> list[object]:
            results = forward(values)
            for saved, output in same:
                results[saved] = results[output]
            return results

        return forward_graph

    def _forward(self) -> list[str]:
        signature, primals = self.signature, self.primals
        rest = [primals[i] for i in range(len(primals)) if i not in self.taken]
        lines = [f"def forward(ctx, others, {', '.join(primals[i] for i in self.taken)}):"]
        outputs = [self.names.fresh(f"out_{i}") for i in range(signature.num_forward_outputs)]
        saved = [self.names.fresh(f"saved_{i}_{n.name}") for i, n in enumerate(self.partitioned.saved_nodes)]
        results = [*outputs, *saved]
        if rest:
            lines.append(f"    {unpacked(rest)}others")
        self.globals["forward_graph"] = self._forward_graph()
        call = f"{unpacked(results)}forward_graph([{', '.join(primals)}])"
        if self.compiled.disable_autocast:
            self.globals["no_autocast"] = engine.disable_autocast
            lines += ["    with no_autocast():", "        " + call]
        else:
            lines.append("    " + call)
        tensors = [
            self._kept(name, node)
            for name, node in zip(saved, self.partitioned.saved_nodes, strict=True)
            if isinstance(spec_of(node), TensorSpec)
        ]
        sizes = [
            n
            for n, node in zip(saved, self.partitioned.saved_nodes, strict=True)
            if not isinstance(spec_of(node), TensorSpec)
        ]
        if tensors:
            lines.append(f"    ctx.to_save = ({', '.join(tensors)},)")  # as `save_for_backward` does
        if sizes:
            lines.append(f"    ctx.sizes = [{', '.join(sizes)}]")
        trails = [primals[i] for i in needs_trail(self.compiled, self.taken)]
        if trails:
            self.globals["trails_of"] = trails_of
            leaves = " and ".join(f"{name}.is_leaf" for name in trails)
            lines += [f"    if not ({leaves}):", f"        ctx.trails = trails_of({', '.join(trails)})"]
        if self.effects.live:
            # A tensor that the call itself writes with a history would form a cycle with its node.
            live = [primals[i] + (".detach()" if i in self.moved_by_call else "") for i in self.effects.live]
            lines.append(f"    ctx.live = ({', '.join(live)},)")
        lines.append("    ctx.materialize_grads = False")
        plain = [outputs[i] for i in range(len(outputs)) if i not in signature.gradients.differentiable]
        if plain:
            lines.append(f"    others[:] = ({', '.join(plain)},)")
        carried = [
            f"{outputs[i]}.data" if i in signature.graph_outputs.runtime_views else outputs[i]
            for i in signature.gradients.differentiable
        ]
        lines.append(f"    return {', '.join(carried)}")
        return lines

    def _how_kept(self, node: fx.Node) -> int:
        """A residual's form while it is kept: one of the constants above, or the number of an input.

        Views are kept without their history, inputs before a version change as copies, other inputs with their history.
        """
        if not isinstance(spec_of(node), TensorSpec):
            return _SIZE
        index = _number_of_input(node)
        if index in self.moved:
            return _COPIED
        if node.op == "placeholder":
            return index if index in self.taken else _AS_IT_IS
        return _DETACHED if is_alias(node) else _AS_IT_IS

    def _kept(self, name: str, node: fx.Node) -> str:
        how = self._how_kept(node)
        if how >= 0:
            return self.primals[how]
        return _KEPT.get(how, "{}").format(name)

    # ---------------------------------------------------------------- backward

    def _backward(self) -> list[str]:
        tangents = self.tangents
        lines = [f"def backward(ctx, {', '.join(tangents)}):"]
        effects = EffectLines(self.signature, self.names, self.globals, tangents)
        self.globals["is_anomaly_enabled"] = torch.is_anomaly_enabled
        lines += ["    if is_anomaly_enabled():", f"        return watched_backward(ctx, {', '.join(tangents)})"]
        if self.partitioned.joint.backward_error is not None:
            self.globals["eager_error"] = _raiser(self.partitioned.joint.backward_error)
            anything = " or ".join(f"{t} is not None" for t in tangents)
            lines += [f"    if {anything}:", "        eager_error()"]
            return [*lines, f"    return {', '.join(['None'] * (len(self.taken) + 1))}"]
        if self.has_marks:
            self.globals["check_marked"] = check_marked
            lines.append(f"    check_marked(ctx, ({', '.join(tangents)},))")
        for position, error in self.partitioned.joint.failing.items():
            raiser = self.names.fresh("eager_error")
            self.globals[raiser] = _raiser(error)
            lines += [f"    if {tangents[position]} is not None:", f"        {raiser}()"]
        differentiable = differentiable_backward(self.compiled, self.taken, make_node, self.release)
        partial = _partial(self.compiled, self.taken, self.release, differentiable)
        self.globals |= {
            "is_grad_enabled": torch.is_grad_enabled,
            "keeps_graph": engine.keeps_graph,
            "differentiable_backward": differentiable,
            "wanted_gradients": engine.wanted_gradients,
            "partial_backward": partial,
        }
        lines += ["    " + line for line in effects.first()]
        lines += ["    if is_grad_enabled():", f"        return differentiable_backward(ctx, {', '.join(tangents)})"]
        missing = " or ".join(f"{t} is None" for t in tangents)
        if len(tangents) == 1:
            self.globals["nothing"] = _nothing
            lines += [f"    if {missing}:", f"        return nothing(ctx, {len(self.taken)})"]
        if len(tangents) > 1 or len(self.taken) > 1:
            some = [missing] if len(tangents) > 1 else []
            some += ["wanted_gradients(ctx) is not None"] if len(self.taken) > 1 else []
            lines += [f"    if {' or '.join(some)}:", f"        return partial_backward(ctx, ({', '.join(tangents)},))"]
        lines += self._laid_out()
        lines += ["    " + line for line in effects.before()]
        saved = "*ctx.sizes, " if self.partitioned.saved_sizes else ""
        arriving = ", ".join([*tangents, *effects.live])
        if self.partitioned.saved_tensors:
            lines.append(f"    values = [{saved}*ctx.saved_tensors, {arriving}]")
            lines += ["    if not keeps_graph():", "        ctx.maybe_clear_saved_tensors()"]
        else:
            lines.append(f"    values = [{saved}{arriving}]")
        kept = {tangents[update.tangent] for update in self.effects.updates if update.live is None}
        if len(kept) < len(tangents):
            lines.append(f"    del {', '.join(t for t in tangents if t not in kept)}")
        gradients = [
            self.names.fresh(f"grad_{i + 1}") if has else "_" for i, has in enumerate(self.signature.gradients.returned)
        ]
        call = f"{unpacked([*gradients, *effects.results])}backward_graph(values)"
        self.globals["no_autocast"] = engine.disable_autocast
        if self.compiled.disable_autocast:
            lines += ["    with no_autocast():", "        " + call]
        else:
            self.globals["any_autocast"] = engine.is_any_autocast_enabled
            lines += ["    if any_autocast():", "        with no_autocast():", "            " + call]
            lines += ["    else:", "        " + call]
        lines += ["    " + line for line in effects.after()]
        named = [name if name != "_" else effects.wrapped.get(i, "None") for i, name in enumerate(gradients)]
        returned = [named[i] for i in self.taken]
        lines.append(f"    return {', '.join(['None', *returned])}")
        return lines

    def _laid_out(self) -> list[str]:
        """Lines that copy a tangent into capture's strides where its strides differ."""
        lines = []
        self.globals["laid_out"] = laid_out
        for i, (name, spec) in enumerate(zip(self.tangents, self.signature.gradients.tangent_specs, strict=True)):
            if i in self.as_they_come:
                continue
            if any(map(is_symbolic, spec.stride)):
                order = repr(memory_order(spec))
                self.globals["in_order"] = in_order
                lines.append(f"    {name} = in_order({name}, {order})")
                continue
            stride = repr(tuple(spec.stride))
            lines += [f"    if {name}.stride() != {stride}:", f"        {name} = laid_out({name}, {stride})"]
        return lines


def _number_of_input(node: fx.Node) -> int:
    """The input that a node is, or is a view of; -1 for any other."""
    while node.op == "call_function" and is_alias(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    is_input = node.op == "placeholder" and node.name.startswith("primals_")
    return int(node.name.rpartition("_")[2]) - 1 if is_input else -1


def _raiser(error: Exception) -> Callable[[], None]:
    def eager_error() -> None:
        raise type(error)(*error.args)

    return eager_error


def _layout(spec: TensorSpec) -> tuple[bool, tuple[Size, ...]]:
    """(True, strides), or (False, dimensions from outermost to innermost) if strides depend on symbolic sizes."""
    if any(map(is_symbolic, spec.stride)):
        return False, memory_order(spec)
    return True, tuple(spec.stride)


def _held_by_calls(forward: Callable[..., object], backward: Callable[..., object]) -> Callable[..., Any]:
    """The forward of a node; it gives each call its backward. The class holds neither: the collector alone frees it."""

    def forward_of_call(ctx: Any, *inputs: object) -> object:
        ctx.rendered = backward
        return forward(ctx, *inputs)

    return forward_of_call


def _keep(rendered: weakref.ref[Any], graph: Callable[..., object]) -> None:
    function = rendered()
    if function is not None:
        function.__globals__["backward_graph"] = graph


def _compile_on_first_use(
    compiled: Compiled, keep: Callable[[Callable[..., Any]], None]
) -> Callable[[list[Any]], list[object]]:
    def backward_graph(values: list[object]) -> list[object]:
        backward = compiled.make_backward(values)
        keep(backward)
        return backward(values)

    return backward_graph


def _nothing(ctx: object, count: int) -> tuple[None, ...]:
    spare_leaves(ctx, [None] * count)
    return (None,) * (count + 1)


def _partial(
    compiled: Compiled, taken: list[int], release: Release, differentiable: Callable[..., object]
) -> Callable[[object, tuple[Any, ...]], Any]:
    """The backward if some tangents are missing, or some gradients are not needed: a graph of its own for each pattern.
    Autograd makes the graph where only autograd can tell the present gradients and effects.
    """
    signature = compiled.partitioned.joint.signature
    is_unclear = bool(signature.backward) or any(paths.is_unclear for paths in signature.gradients.reached_from)
    acts = functools.cache(
        lambda: compiled.make_derived is not None and backward_acts(compiled.partitioned.joint.graph)
    )
    graphs: dict[object, Any] = {}
    num_sizes = len(compiled.partitioned.saved_sizes)
    as_they_come = opaque_values().as_they_come(compiled.partitioned.backward)

    def partial_backward(ctx: Any, tangents: tuple[Any, ...]) -> object:
        if is_unclear or acts():
            return differentiable(ctx, *tangents)
        mask = tuple(t is not None for t in tangents)
        if not any(mask):
            return _nothing(ctx, len(taken))
        keeps_graph, in_parts = engine.keeps_graph(), parts_run(ctx) is not None
        needs_input_grad = exactly = needs_input_grad_of(ctx, taken, exact=in_parts or not keeps_graph)
        if in_parts:
            release.check(ctx, mask, exactly)
        elif len(graphs) >= _MOST_PARTIAL and (mask, needs_input_grad) not in graphs:
            needs_input_grad = None
        graph = graphs.get((mask, needs_input_grad))
        if graph is None:
            graph = graphs[mask, needs_input_grad] = compiled.make_partial_backward(mask, needs_input_grad)
        present = [
            t if i in as_they_come else as_captured(t, spec)
            for i, (t, spec) in enumerate(zip(tangents, signature.gradients.tangent_specs, strict=True))
            if t is not None
        ]
        saved = saved_in_part(ctx, graph.read[num_sizes:])
        values = [*(ctx.sizes if num_sizes else ()), *saved, *present]
        if not keeps_graph:
            release.after(ctx, mask, exactly, saved)
        del present, tangents, saved
        with engine.disable_autocast():
            gradients = graph.backward(values)
        needed = [gradients[i] for i in taken]
        spare_leaves(ctx, needed)
        return None, *needed

    return partial_backward
