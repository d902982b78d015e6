"""The backward of a compiled function when it must itself be differentiable (`create_graph=True`).

Each pattern of tangents (present or absent, requiring grad or not) gets a compiled function of its own on first use.
The function takes the saved values, the tangents, and the inputs for their histories: a leaf is found through its
gradient accumulator, other inputs are among the saved values or have a trail, a tensor without memory (`trail_of`). So
a function that is never differentiated twice keeps only trails.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from .._torch import engine, levels
from .._torch.engine import hand_to, take_handed
from .._torch.hooks import spare_leaves
from .._torch.symbols import expression_text
from .._torch.wrappers import is_wrapper
from ..errors import UnsupportedError
from ..frontend.openings import opener
from ..graph.effect_log import CheckInfo
from ..graph.meta import TensorSpec, laid_out, spec_of
from ..graph.source import Names, compile_source, unpacked
from ..graph.tangents import ABSENT, CONSTANT, STOP, VARIABLE, BackwardCase, TangentKind
from .compiled import Compiled, Derived, NeedsInputGrad
from .decisions import attempt_lines, check_arguments, decision_lines, one_call
from .lines import LineWriter, op_name
from .passed import history_lines, refuse_watched_results
from .release import TRAILS, Release, as_output, let_go, parts_run, saved_in_part, saved_inputs, trail_of
from .writes import graph_arguments, update_line

if TYPE_CHECKING:
    from ..tracing.derivatives.resumable_trace import ValueRef

Node = Callable[[Compiled, list[int]], Any]


def needs_trail(compiled: Compiled, taken: list[int]) -> list[int]:
    """The inputs with a history in no saved tensor. Parameters too: `functional_call` replaces them."""
    if compiled.make_derived is None:
        return []
    kept = saved_inputs(compiled.partitioned)
    return [i for i in taken if i not in kept]


def trails_of(*inputs: torch.Tensor) -> list[torch.Tensor | None]:
    """For each input that is no leaf, a tensor of its shape and history that holds none of its memory."""
    return [None if x.is_leaf else trail_of(x) for x in inputs]


def differentiable_backward(
    compiled: Compiled, taken: list[int], make_node: Node, release: Release
) -> Callable[..., Any]:
    """`run(ctx, *tangents)`: the gradients of the inputs, with a history. The plain tensors of tangents of other
    `kinds` may follow the tangents.
    """
    if compiled.make_derived is None:
        return _refuse
    return _Differentiable(compiled, taken, _Derivatives(compiled, taken, make_node, release))


def stopping_backward(
    compiled: Compiled, taken: list[int], make_node: Node, release: Release
) -> Callable[[object, Sequence[Any], tuple[int, ...], bool], tuple[Sequence[object], Sequence[object]]] | None:
    """`run(ctx, tangents, stops, needed)`: the gradients of the outputs at `stops`, where gradients end, and of the
    inputs, if `needed`. Saved tensors are kept.
    """
    if compiled.make_derived is None:
        return None
    derivatives = _Derivatives(compiled, taken, make_node, release)

    def run(ctx: object, tangents: Sequence[Any], stops: tuple[int, ...], needed: bool) -> Any:
        create_graph = torch.is_grad_enabled()
        kind = VARIABLE if create_graph else CONSTANT
        pattern = tuple(ABSENT if t is None else kind if t.requires_grad else CONSTANT for t in tangents)
        pattern = tuple(STOP if i in stops else p for i, p in enumerate(pattern))
        needs_input_grad = needs_input_grad_of(ctx, taken, exact=True) if needed else frozenset()
        return derivatives.run(ctx, tuple(tangents), BackwardCase(pattern, needs_input_grad, create_graph))

    return run


class _Differentiable:
    """The result of `differentiable_backward`; a closure that calls itself would be freed by the collector only."""

    def __init__(self, compiled: Compiled, taken: list[int], derivatives: _Derivatives) -> None:
        self.taken, self.derivatives, self.name = taken, derivatives, compiled.partitioned.joint.name
        self.hooked = compiled.hooked and bool(compiled.partitioned.saved_results)

    def __call__(self, ctx: object, *tangents: Any, kinds: tuple[TangentKind, ...] = ()) -> Any:
        batch = levels.batch_of(tangents)
        if batch is not None:
            return batch.each(lambda *each: self(ctx, *each, kinds=kinds))
        create_graph = torch.is_grad_enabled()
        kind = VARIABLE if create_graph else CONSTANT
        pattern = tuple(ABSENT if t is None else kind if t.requires_grad else CONSTANT for t in tangents)
        if not any(pattern):
            spare_leaves(ctx, [None] * len(self.taken))
            return (None,) * (len(self.taken) + 1)
        if self.hooked and create_graph:
            refuse_watched_results(ctx, self.name)
        exact = parts_run(ctx) is not None or not engine.keeps_graph()
        needs_input_grad = needs_input_grad_of(ctx, self.taken, exact=exact)
        case = BackwardCase(pattern, needs_input_grad, create_graph, kinds=kinds)
        gradients = self.derivatives.run(ctx, tangents, case)
        comes_dual = engine.forward_ad._current_level >= 0 and any(map(_is_dual, tangents))
        if comes_dual and any(g is not None and g.requires_grad and not _is_dual(g) for g in gradients):
            raise UnsupportedError(
                f"a gradient of the compiled `{self.name}` is taken with create_graph=True, and an incoming gradient "
                "is a dual number: the tangent would be lost. Take the gradient inside the compiled function, or "
                "without create_graph=True."
            )
        return gradients


def _is_dual(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and engine.forward_ad.unpack_dual(tensor).tangent is not None


class _Derivatives:
    """The derivatives of a compiled function: one for each pattern of tangents and each set of gradients."""

    def __init__(self, compiled: Compiled, taken: list[int], make_node: Node, release: Release) -> None:
        self.compiled, self.taken, self.make_node, self.release = compiled, taken, make_node, release
        self.calls_by_case: dict[object, list[Callable[..., Any]]] = {}
        self.is_tensor = [isinstance(spec_of(node), TensorSpec) for node in compiled.partitioned.saved_nodes]
        self.tensors = [i for i, tensor in enumerate(self.is_tensor) if tensor]

    def run(self, ctx: Any, tangents: tuple[object, ...], case: BackwardCase) -> Any:
        compiled, release = self.compiled, self.release
        ran = parts_run(ctx)
        if ran is not None:
            release.check(ctx, case.present, case.needs_input_grad)
            case = dataclasses.replace(case, gone=frozenset(self.tensors[i] for i in release.gone(ran)))
        calls = self.calls_by_case.setdefault(case, [])
        for call in calls:
            result = call(ctx, tangents)
            if type(result) is not Diverged:
                return result
        if len(calls) >= compiled.path_limit:
            raise UnsupportedError(
                f"a derivative of `{compiled.partitioned.joint.name}` branches on values, and already has {len(calls)} "
                f"graphs for other outcomes of its branches. {result.where}"
            )
        assert compiled.make_derived is not None
        at_hand = lambda: (_saved_values(ctx, self.is_tensor), tangents)  # noqa: E731
        derived = compiled.make_derived(case, at_hand)
        call = _Renderer(compiled, self.taken, derived, case, release).render(self.make_node)
        result = call(ctx, tangents)
        if type(result) is not Diverged:
            calls.append(call)
            return result
        if result.error is not None:
            raise result.error
        raise UnsupportedError(f"a value that a derivative depends on differs each time. {result.where}")


@dataclasses.dataclass(frozen=True, slots=True)
class Diverged:
    """The result of a derivative with diverging decisions; `error`: the exception of its graph."""

    where: str
    error: Exception | None = None


def _saved_values(ctx: Any, is_tensor: list[bool]) -> list[object]:
    tensors = iter(saved_in_part(ctx, [False] * sum(is_tensor)) if any(is_tensor) else ())
    sizes = iter(() if all(is_tensor) else ctx.sizes)
    return [next(tensors) if tensor else next(sizes) for tensor in is_tensor]


def needs_input_grad_of(ctx: object, taken: list[int], *, exact: bool = False) -> NeedsInputGrad:
    """The inputs with gradients that the running backward needs (or more, unless `exact`); None: all."""
    needs_input_grad = engine.wanted_gradients(ctx, exact=exact)
    return None if needs_input_grad is None else frozenset(compress(taken, needs_input_grad))


def _refuse(ctx: object, *tangents: object) -> object:
    raise UnsupportedError(
        "a compiled function was differentiated twice (create_graph=True), or its backward is compiled again for a "
        "part or for gradients with different metadata, but its trace was not kept: foregrad.config.higher_order is "
        "False, or the graph was edited before it was compiled."
    )


def _refuse_sizes(condition: str) -> None:
    raise UnsupportedError(
        f"a derivative of a compiled function was made for sizes with {condition}, and does not hold for the sizes "
        "of this call. Compile with dynamic=False: each size then gets graphs of its own."
    )


class _Renderer(LineWriter):
    """Renders the lines between a node's backward and the derived function that computes it."""

    def __init__(
        self, compiled: Compiled, taken: list[int], derived: Derived, case: BackwardCase, release: Release
    ) -> None:
        super().__init__(Names(["ctx", "tangents", "error"]))
        self.compiled, self.taken, self.case, self.release = compiled, taken, case, release
        self.derivative, self.inner, self.conditions = derived.derivative, derived.compiled, derived.conditions
        self.is_part = case.needs_input_grad is not None or not all(case.present) or STOP in case.pattern
        self.signature = derived.compiled.partitioned.joint.signature
        saved, fresh = compiled.partitioned.saved_nodes, self.names.fresh
        self.saved = [fresh(f"saved_{i}") for i in range(len(saved))]
        sorts: tuple[list[str], list[str]] = [], []
        for name, node in zip(self.saved, saved, strict=True):
            sorts[isinstance(spec_of(node), TensorSpec)].append(name)
        self.sizes, self.tensors = sorts
        self.tangents = [fresh(f"tangents_{i + 1}") for i in range(len(case.pattern))]
        live = compiled.partitioned.joint.signature.backward.live
        self.live = [fresh(f"live_{i + 1}") for i in range(len(live))]
        self.outputs = [fresh(f"out_{i}") for i in range(self.signature.num_forward_outputs)]
        self.kept = {i: self.saved[at] for i, at in saved_inputs(compiled.partitioned).items() if at not in case.gone}
        self.trails = needs_trail(compiled, taken)

    def _saved(self, place: ValueRef) -> str | None:
        """The name of the saved value that `place` refers to; None if it refers to none."""
        if place.kind == "input":
            return self.kept.get(place.index)
        if place.kind == "result":
            return self.saved[self.compiled.partitioned.saved_results[place.index]]
        return self.saved[place.index] if place.kind == "saved" else None

    def render(self, make_node: Node) -> Callable[[object, tuple[Any, ...]], object]:
        self._take_apart()
        names = [self._feed(place) for place in self.derivative.feeds]
        self._read_sizes(names)
        for place, name, info in zip(self.derivative.feeds, names, self.signature.inputs, strict=True):
            if place.kind not in ("input", "live") and isinstance(info.spec, TensorSpec):  # a saved size has none
                stride = self.literal(tuple(info.spec.stride))
                self.lines.append(f"if {name}.stride() != {stride}:")
                self.lines.append(f"    {name} = {self.bind('laid_out', laid_out)}({name}, {stride})")
        call = self._call(make_node, names)
        free: list[str] = []
        if STOP not in self.case.pattern:
            free = [f"if not {self.bind('keeps_graph', engine.keeps_graph)}():", f"    {self._let_go()}"]
        self.lines += (*self._decided(call, names), *free) if self.signature.may_stop else (*free, *call)
        self.lines += history_lines(self, self.inner.partitioned.joint, self.outputs)
        self._write(names)
        gradients = [self._gradient(self.derivative.gradients[i]) for i in self.taken]
        for first, gradient in self.derivative.whole.items():
            node, value = f"ctx.next_functions[{self.taken.index(first)}][0]", self._gradient(gradient)
            self.lines.append(f"{self.bind('hand_to', hand_to)}({node}, {value})")
        if STOP in self.case.pattern:
            stops = [self._gradient(place) for place in self.derivative.stops]
            self.lines.append(f"return [{', '.join(stops)}], [{', '.join(gradients)}]")
        else:
            if "None" in gradients:
                self.lines.append(f"{self.bind('spare_leaves', spare_leaves)}(ctx, ({', '.join(gradients)},))")
            self.lines.append(f"return {', '.join(['None', *gradients])}")
        source = "".join(f"{line}\n" for line in ("def run(ctx, tangents):", *("    " + line for line in self.lines)))
        return compile_source(source, "run", self.globals, label="derivative")

    def _let_go(self) -> str:
        if not self.is_part:
            return f"{self.bind('let_go', let_go)}(ctx)"
        mask, needs_input_grad = self.case.present, self.case.needs_input_grad
        release = self.bind("release", lambda ctx, *saved: self.release.after(ctx, mask, needs_input_grad, saved))
        return f"{release}({', '.join(['ctx', *self.tensors])})"

    def _take_apart(self) -> None:
        self.lines.append(f"{unpacked(self.tangents)}tangents")
        if self.tensors:
            names = {self._saved(place) for place in self.derivative.feeds}
            read = [name in names for name in self.tensors]
            self.lines.append(f"{unpacked(self.tensors)}{self.bind('saved_in_part', saved_in_part)}(ctx, {read})")
            for place in self.derivative.feeds:
                if place.kind == "result":
                    self._result(place)
        if self.sizes:
            self.lines.append(f"{unpacked(self.sizes)}ctx.sizes")
        if self.live:
            self.lines.append(f"{unpacked(self.live)}ctx.live")

    def _result(self, place: ValueRef) -> None:
        """Give a saved output its history: in a Python node it has none after a part of the backward has run."""
        name, as_output_ = self._saved(place), self.bind("as_output", as_output)
        inputs = ", ".join(self.kept.get(i) or self._history_of(i) for i in self.taken)
        self.lines.append(f"if {name}.grad_fn is None:")
        self.lines.append(f"    {name} = {as_output_}(ctx, {name}, {place.index}, ({inputs},))")

    def _feed(self, place: ValueRef) -> str:
        """The variable of a value that the derived function takes."""
        if place.kind == "live":
            return self.live[place.index]
        name = self._saved(place)
        if name is None and place.kind == "input":  # the leaf, or its trail
            name = self.names.fresh(f"primals_{place.index + 1}")
            self.lines.append(f"{name} = {self._history_of(place.index)}")
        return name or self.tangents[place.index]

    def _read_sizes(self, names: list[str]) -> None:
        """Read the symbolic sizes, and check the conditions on them that are this derivative's own."""
        for info in self.signature.symbols:
            variable = self.symbols[info.symbol] = self.names.fresh(f"size_{info.symbol}")
            self.lines.append(f"{variable} = {names[info.input]}{'' if info.dim is None else f'.size({info.dim})'}")
        for condition in self.conditions:
            is_known = all(symbol in self.symbols for symbol in condition.free_symbols)
            text = expression_text(condition, self.symbols, self.bind) if is_known else "False"
            self.lines.append(f"if not ({text}):")
            self.lines.append(f"    {self.bind('other_sizes', _refuse_sizes)}({str(condition)!r})")

    def _history_of(self, index: int) -> str:
        trail = self.trails.index(index) if index in self.trails else None
        return f"{self.bind('history', _history)}(ctx, {self.taken.index(index)}, {trail})"

    def _decided(self, call: list[str], names: list[str]) -> list[str]:
        """The lines of the call, and of the tests of its decisions."""
        places = "; ".join(dict.fromkeys(decision.where for decision in self.signature.stops.decisions))
        diverged = f"return {self.bind('Diverged', Diverged)}({self.bind('places', f'Values are read at: {places}')}"
        failed = f"{diverged}, fault)" if self.signature.stops.decisions else "raise"

        def check(info: CheckInfo, undo: list[str]) -> list[str]:
            op = self.bind(op_name(info.op), info.op)
            return one_call(op, check_arguments(self, info, names, self.outputs), info, undo)

        run, undo = attempt_lines(self, self.signature, names, call)
        run += ["    " + line for line in (*undo, failed)]
        tests = decision_lines(self, self.inner.partitioned.joint, self.outputs, undo, f"{diverged})", check)
        return [*run, *tests]

    def _write(self, names: list[str]) -> None:
        """The lines of the backward's writes, after everything that may stop it."""
        done = getattr(self.inner.forward, "updated", ())  # by the graph
        left = [u for u in self.signature.updates if (u.input, u.output) not in done]
        if left:
            lines = [
                update_line(
                    self, names[u.input], self.outputs[u.output], self.signature.inputs[u.input].spec, counted=u.counted
                )
                for u in left
            ]
            self.under([f"{self.bind('no_grad', torch.no_grad)}()"], lines)

    def _call(self, make_node: Node, names: list[str]) -> list[str]:
        """The lines that call the derived function."""
        if self.signature.is_inference:
            forward = self.bind("forward_graph", self.inner.forward)
            arguments = graph_arguments(names, self.inner.forward, self.signature.updates)
            modes = self.bind("no_grad", torch.no_grad), self.bind("no_autocast", engine.disable_autocast)
            return [f"with {modes[0]}(), {modes[1]}():", f"    {unpacked(self.outputs)}{forward}({arguments})"]
        node = make_node(self.inner, [i for i, info in enumerate(self.signature.inputs) if info.requires_grad])
        apply = self.bind("apply", node.apply)
        before, call, after = node.call_lines(apply, names, self.outputs, self.signature, self.names)
        return [*before, call, *after]

    def _gradient(self, place: Any) -> str:
        """The expression of a gradient; `place` is a `GradientRef`, or None."""
        if place is None:
            return "None"
        if hasattr(place, "parts"):
            make = self.bind("wrap", functools.partial(opener().wrap, place.spec))
            return f"{make}([{', '.join(map(self._gradient, place.parts))}])"
        return (self.outputs if place.kind == "output" else self.tangents)[int(place.index)]


def _history(ctx: Any, position: int, trail: int | None) -> torch.Tensor:
    """A tensor with the history of the input at `position` among the node's; its values are arbitrary."""
    node = ctx.next_functions[position][0]
    if trail is not None and hasattr(ctx, "trails") and ctx.trails[trail] is not None:
        found: torch.Tensor = ctx.trails[trail]
        return found
    if position in ctx.metadata.get(TRAILS, ()):  # its saved tensor was freed
        kept: torch.Tensor = ctx.metadata[TRAILS][position]
        return kept
    leaf = getattr(node, "variable", None)
    if not isinstance(leaf, torch.Tensor):
        raise UnsupportedError(
            "a compiled function was differentiated with create_graph=True, and one of its parameters is not a leaf. "
            "Pass that tensor as an argument."
        )
    return leaf


def of_other_kinds(
    backward: Callable[..., object], derivative: Callable[..., object] | None, compiled: Compiled
) -> Callable[..., Any]:
    """`backward(node, *tangents)`; tangents of another kind than at capture are the annex's, see `Opener`."""
    others: list[Callable[..., object]] = []  # once there is such a tangent

    def run(node: object, *tangents: Any) -> Any:
        for tangent in tangents:
            if type(tangent) is not torch.Tensor:
                break
        else:
            return backward(node, *tangents)
        handed = take_handed(node)
        if not handed and not any(map(is_wrapper, tangents)):
            return backward(node, *tangents)
        if not others:
            others.append(opener().OtherKinds(backward, derivative, compiled))
        return others[0](node, tangents, handed)

    return run
