"""The backward of a compiled function when it must itself be differentiable (`create_graph=True`).

Each pattern of tangents (which are present, which require grad) gets a compiled function of its own on first use. The
function takes the saved values, the tangents, and the inputs for their histories: a leaf is found through its gradient
accumulator, other inputs are among the saved values or have a trail, a tensor without memory (`trail_of`). So a
function that is never differentiated twice keeps only trails for it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch

from .._torch import engine, transforms
from .._torch.hooks import spare_leaves
from .._torch.symbols import expression_text, is_symbolic
from ..errors import UnsupportedError
from ..graph.effect_log import CheckInfo
from ..graph.meta import TensorSpec, laid_out, spec_of
from ..graph.source import Names, compile_source, unpacked
from ..graph.tangents import ABSENT, CONSTANT, STOP, VARIABLE, BackwardCase, TangentKind, place_of_size
from ..subclasses.conversion import converted, hand_to, take_handed, taken_apart, unexpected, wrap
from ..subclasses.spec import bare_spec, is_wrapper, parts_of
from .compiled import Compiled, Derived, NeedsInputGrad
from .decisions import Stop, check_arguments, decision_lines, one_call
from .lines import LineWriter, op_name
from .passed import check_marked, join_error, refuse_watched_results
from .release import TRAILS, Release, as_output, let_go, parts_run, saved_in_part, saved_inputs, trail_of
from .writes import graph_arguments, update_line, with_history

if TYPE_CHECKING:
    from ..tracing.derivatives.resumable_trace import ValueRef

Node = Callable[[Compiled, list[int]], Any]

_MOST_PATHS = 16  # of one derivative, for different outcomes of its decisions


def needs_trail(compiled: Compiled, taken: list[int]) -> list[int]:
    """The inputs whose history is in no saved tensor. Parameters too: `functional_call` replaces them."""
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
) -> Callable[[Any, Sequence[Any], tuple[int, ...], bool], tuple[Sequence[Any], Sequence[Any]]] | None:
    """`run(ctx, tangents, stops, needed)`: the gradients of the outputs at `stops`, which go no further, and of the
    inputs, if these are `needed`. Saved tensors are kept.
    """
    if compiled.make_derived is None:
        return None
    derivatives = _Derivatives(compiled, taken, make_node, release)

    def run(ctx: Any, tangents: Sequence[Any], stops: tuple[int, ...], needed: bool) -> Any:
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

    def __call__(self, ctx: Any, *tangents: Any, kinds: tuple[TangentKind, ...] = ()) -> Any:
        batch = transforms.batch_of(tangents)
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
        return self.derivatives.run(ctx, tangents, BackwardCase(pattern, needs_input_grad, create_graph, kinds=kinds))


class _Derivatives:
    """The derivatives of a compiled function: one for each pattern of tangents and each set of gradients."""

    def __init__(self, compiled: Compiled, taken: list[int], make_node: Node, release: Release) -> None:
        self.compiled, self.taken, self.make_node, self.release = compiled, taken, make_node, release
        self.calls_by_case: dict[Any, list[Callable[..., Any]]] = {}
        self.is_tensor = [isinstance(spec_of(node), TensorSpec) for node in compiled.partitioned.saved_nodes]
        self.tensors = [i for i, tensor in enumerate(self.is_tensor) if tensor]

    def run(self, ctx: Any, tangents: tuple[Any, ...], case: BackwardCase) -> Any:
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
        if len(calls) >= _MOST_PATHS:
            raise UnsupportedError(
                f"a derivative of `{compiled.partitioned.joint.name}` branches on values, and was compiled for "
                f"{len(calls)} outcomes; this is another. {result.where}"
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
    """The result of a derivative whose decisions come out otherwise; `error`: the exception of its graph."""

    where: str
    error: Exception | None = None


def _saved_values(ctx: Any, is_tensor: list[bool]) -> list[Any]:
    tensors = iter(saved_in_part(ctx, [False] * sum(is_tensor)) if any(is_tensor) else ())
    sizes = iter(() if all(is_tensor) else ctx.sizes)
    return [next(tensors) if tensor else next(sizes) for tensor in is_tensor]


def needs_input_grad_of(ctx: Any, taken: list[int], *, exact: bool = False) -> NeedsInputGrad:
    """The inputs whose gradients are needed in the running backward (or more, unless `exact`); None: all of them."""
    needs_input_grad = engine.wanted_gradients(ctx, exact=exact)
    return None if needs_input_grad is None else frozenset(compress(taken, needs_input_grad))


def _refuse(ctx: Any, *tangents: Any) -> Any:
    raise UnsupportedError(
        "a compiled function was differentiated twice (create_graph=True), or its backward is compiled again for a "
        "part of it or for gradients of another kind, but its trace was not kept: "
        "foregrad.config.higher_order is False."
    )


def _refuse_sizes(condition: str) -> None:
    raise UnsupportedError(
        f"a derivative of a compiled function was made for sizes with {condition}, and now has others. "
        "Compile with dynamic=False: each size then gets graphs of its own."
    )


class _Renderer:
    """Renders the lines between a node's backward and the derived function that computes it."""

    def __init__(
        self, compiled: Compiled, taken: list[int], derived: Derived, case: BackwardCase, release: Release
    ) -> None:
        self.compiled, self.taken, self.derived, self.case, self.release = compiled, taken, derived, case, release
        self.is_part = case.needs_input_grad is not None or not all(case.present) or STOP in case.pattern
        self.signature = compiled.partitioned.joint.signature
        self.inner = derived.compiled.partitioned.joint.signature
        self.globals: dict[str, Any] = {"laid_out": laid_out, "keeps_graph": engine.keeps_graph}
        self.lines = ["def differentiable_backward(ctx, tangents):"]
        saved = compiled.partitioned.saved_nodes
        self.saved = [f"saved_{i}" for i in range(len(saved))]
        self.is_tensor = [isinstance(spec_of(node), TensorSpec) for node in saved]
        self.tangents = [f"tangents_{i + 1}" for i in range(len(case.pattern))]
        self.kept = {i: at for i, at in saved_inputs(compiled.partitioned).items() if at not in case.gone}
        self.trails = needs_trail(compiled, taken)
        self.read = {self._saved(place) for place in derived.derivative.feeds}

    def _saved(self, place: ValueRef) -> str | None:
        """The name of the saved value that `place` refers to; None if it refers to none."""
        if place.kind == "input":
            return self.saved[self.kept[place.index]] if place.index in self.kept else None
        if place.kind == "result":
            return self.saved[self.compiled.partitioned.saved_results[place.index]]
        return self.saved[place.index] if place.kind == "saved" else None

    def render(self, make_node: Node) -> Callable[[Any, tuple[Any, ...]], Any]:
        self._take_apart()
        feeds = self.derived.derivative.feeds
        names = [self._feed(place) for place in feeds]
        sizes = self._sizes(names)
        for place, name, info in zip(feeds, names, self.inner.inputs, strict=True):
            if place.kind not in ("input", "live") and isinstance(info.spec, TensorSpec):  # a saved size has none
                stride = f"({''.join(f'{self._number(s, sizes)}, ' for s in info.spec.stride)})"
                self._line(f"if {name}.stride() != {stride}:")
                self._line(f"    {name} = laid_out({name}, {stride})")
        outputs = [f"out_{i}" for i in range(self.inner.num_forward_outputs)]
        if self.inner.is_inference:
            self.globals |= {"forward_graph": self.derived.compiled.forward, "no_grad": torch.no_grad}
            self.globals["no_autocast"] = engine.disable_autocast
            arguments = graph_arguments(names, self.derived.compiled.forward, self.inner.updates)
            call = ["with no_grad(), no_autocast():"]
            call.append(f"    {unpacked(outputs)}forward_graph({arguments})")
        else:
            call = self._node_call(make_node, names, outputs)
        free = [] if STOP in self.case.pattern else ["if not keeps_graph():", f"    {self._let_go()}"]
        for line in (*self._decided(call, names, outputs, sizes), *free) if self.inner.may_stop else (*free, *call):
            self._line(line)
        self._histories(outputs)
        self._write(names, outputs)
        gradients = [self._gradient(self.derived.derivative.gradients[i], outputs) for i in self.taken]
        for first, gradient in self.derived.derivative.whole.items():
            self.globals["hand_to"] = hand_to
            value = self._gradient(gradient, outputs)
            self._line(f"hand_to(ctx.next_functions[{self.taken.index(first)}][0], {value})")
        if STOP in self.case.pattern:
            stops = [self._gradient(place, outputs) for place in self.derived.derivative.stops]
            self._line(f"return [{', '.join(stops)}], [{', '.join(gradients)}]")
            return self._compiled()
        if "None" in gradients:
            self.globals["spare_leaves"] = spare_leaves
            self._line(f"spare_leaves(ctx, ({', '.join(gradients)},))")
        self._line(f"return {', '.join(['None', *gradients])}")
        return self._compiled()

    def _compiled(self) -> Callable[[Any, tuple[Any, ...]], Any]:
        return compile_source("\n".join(self.lines) + "\n", "differentiable_backward", self.globals, label="derivative")

    def _histories(self, outputs: list[str]) -> None:
        """Give a history to outputs that require grad though their gradient leads nowhere, or raises."""
        raising = self.derived.compiled.partitioned.joint.raising
        for at in self.inner.rootless:
            error = f", {self._bind_fresh('error', raising[at])}" if at in raising else ""
            self._line(f"{outputs[at]}, = {self._bind('with_history', with_history)}([{outputs[at]}]{error})")
        for at in sorted(raising.keys() - {*self.inner.rootless}):
            error = self._bind_fresh("error", raising[at])
            self._line(f"{self._bind('join_error', join_error)}({outputs[at]}, {error})")

    def _let_go(self) -> str:
        if not self.is_part:
            self.globals["let_go"] = let_go
            return "let_go(ctx)"
        mask, needs_input_grad = self.case.present, self.case.needs_input_grad
        self.globals["release"] = lambda ctx, *saved: self.release.after(ctx, mask, needs_input_grad, saved)
        tensors = [name for name, is_tensor in zip(self.saved, self.is_tensor, strict=True) if is_tensor]
        return f"release({', '.join(['ctx', *tensors])})"

    def _line(self, text: str) -> None:
        self.lines.append("    " + text)

    def _take_apart(self) -> None:
        self._line(f"{', '.join(self.tangents)}, = tangents")
        tensors = [name for name, is_tensor in zip(self.saved, self.is_tensor, strict=True) if is_tensor]
        sizes = [name for name, is_tensor in zip(self.saved, self.is_tensor, strict=True) if not is_tensor]
        if tensors:
            read = [name in self.read for name in tensors]
            self.globals["saved_in_part"] = saved_in_part
            self._line(f"{', '.join(tensors)}, = saved_in_part(ctx, {read})")
            for place in self.derived.derivative.feeds:
                if place.kind == "result":
                    self._result(place)
        if sizes:
            self._line(f"{', '.join(sizes)}, = ctx.sizes")
        if self.signature.in_backward.live:
            live = [f"live_{i + 1}" for i in range(len(self.signature.in_backward.live))]
            self._line(f"{', '.join(live)}, = ctx.live")

    def _result(self, place: ValueRef) -> None:
        """Give a saved output its history: in a Python node it has none after a part of the backward has run."""
        name = self._saved(place)
        self.globals["as_output"] = as_output
        kept = {i: self.saved[at] for i, at in self.kept.items()}
        inputs = ", ".join(kept.get(i) or self._history_of(i) for i in self.taken)
        self._line(f"if {name}.grad_fn is None:")
        self._line(f"    {name} = as_output(ctx, {name}, {place.index}, ({inputs},))")

    def _feed(self, place: ValueRef) -> str:
        if place.kind == "input":
            return self._input(place.index)
        if place.kind == "live":
            return f"live_{place.index + 1}"
        return self._saved(place) or self.tangents[place.index]

    def _sizes(self, names: list[str]) -> dict[Any, str]:
        """The variables of symbolic sizes, after a check of the conditions on them that are this derivative's own."""
        variables: dict[Any, str] = {}
        for info in self.inner.symbols:
            variable = variables[info.symbol] = f"size_{info.symbol}"
            self._line(f"{variable} = {names[info.input]}{'' if info.dim is None else f'.size({info.dim})'}")
        for condition in self.derived.conditions:
            unknown = [str(s) for s in condition.free_symbols if s not in variables]
            text = "False" if unknown else expression_text(condition, variables, self._bind)
            self.globals["other_sizes"] = _refuse_sizes
            self._line(f"if not ({text}):")
            self._line(f"    other_sizes({str(condition)!r})")
        return variables

    def _number(self, number: Any, sizes: dict[Any, str]) -> str:
        return expression_text(number, sizes, self._bind) if is_symbolic(number) else repr(number)

    def _bind(self, hint: str, value: Any) -> str:
        self.globals[hint] = value
        return hint

    def _input(self, index: int) -> str:
        """An input of the function: the saved tensor, the leaf, or its trail."""
        if index in self.kept:
            return self.saved[self.kept[index]]
        name = f"primals_{index + 1}"
        self._line(f"{name} = {self._history_of(index)}")
        return name

    def _history_of(self, index: int) -> str:
        self.globals["history"] = _history
        trail = self.trails.index(index) if index in self.trails else None
        return f"history(ctx, {self.taken.index(index)}, {trail})"

    def _decided(self, call: list[str], names: list[str], outputs: list[str], sizes: dict[Any, str]) -> list[str]:
        """The lines of the call, and of the tests of its decisions."""
        places = "; ".join(dict.fromkeys(decision.where for decision in self.inner.decisions))
        self.globals |= {"Diverged": Diverged, "places": f"Values are read at: {places}"}
        joint = self.derived.compiled.partitioned.joint
        stop = Stop("return Diverged(places)", "return Diverged(places, error)" if self.inner.decisions else "raise")
        writer = LineWriter(Names(self.globals))
        writer.globals, writer.symbols = self.globals, sizes

        def check(info: CheckInfo, undo: list[str]) -> list[str]:
            op = writer.bind(op_name(info.op), info.op)
            return one_call(op, check_arguments(writer, info, names, outputs), info, undo)

        return decision_lines(writer, joint, names, outputs, call, stop, check)

    def _write(self, names: list[str], outputs: list[str]) -> None:
        """The lines of the backward's writes, after everything that may stop it."""
        writer = LineWriter(Names())
        writer.globals = self.globals
        done = getattr(self.derived.compiled.forward, "updated", ())  # by the graph
        left = [u for u in self.inner.updates if (u.input, u.output) not in done]
        updates = [(names[u.input], outputs[u.output], self.inner.inputs[u.input].spec, u) for u in left]
        if updates:
            self.globals["no_grad"] = torch.no_grad
            self._line("with no_grad():")
        for name, output, spec, update in updates:
            self._line("    " + update_line(writer, name, output, spec, counted=update.counted))

    def _bind_fresh(self, hint: str, value: Any) -> str:
        name = hint if hint not in self.globals else f"{hint}_{len(self.globals)}"
        return self._bind(name, value)

    def _node_call(self, make_node: Node, names: list[str], outputs: list[str]) -> list[str]:
        inner = self.inner
        taken = [i for i, info in enumerate(inner.inputs) if info.requires_grad]
        node = make_node(self.derived.compiled, taken)
        self.globals["apply"] = node.apply
        before, call, after = node.call_lines("apply", names, outputs, inner, Names())
        return [*before, call, *after]

    def _gradient(self, place: Any, outputs: list[str]) -> str:
        """The expression of a gradient; `place` is a `GradientRef`, or None."""
        if place is None:
            return "None"
        if hasattr(place, "parts"):
            make = self._bind_fresh("wrap", functools.partial(wrap, place.spec))
            return f"{make}([{', '.join(self._gradient(part, outputs) for part in place.parts)}])"
        return (outputs if place.kind == "output" else self.tangents)[int(place.index)]


def _history(ctx: Any, position: int, trail: int | None) -> torch.Tensor:
    """A tensor with the history of the input at `position` among the node's; its values are arbitrary."""
    node = ctx.next_functions[position][0]
    if trail is not None and hasattr(ctx, "trails") and ctx.trails[trail] is not None:
        return ctx.trails[trail]  # type: ignore[no-any-return]
    if position in ctx.metadata.get(TRAILS, ()):  # its saved tensor was freed
        return ctx.metadata[TRAILS][position]  # type: ignore[no-any-return]
    leaf = getattr(node, "variable", None)
    if not isinstance(leaf, torch.Tensor):
        raise UnsupportedError(
            "a compiled function was differentiated with create_graph=True, and one of its parameters is not a leaf. "
            "Pass that tensor as an argument."
        )
    return leaf


# -------------------------------------------------------------------------------------------- tangents of another kind
# Tangents of another kind than at capture: the backward is captured again for them.
#
# Such a tangent is a wrapper subclass for a plain result; or, for a result that is a wrapper subclass, a plain tensor
# or a wrapper of another class, of other metadata, or of other plain tensors.

_MOST_KINDS = 16


def of_other_kinds(
    backward: Callable[..., Any], derivative: Callable[..., Any] | None, compiled: Compiled
) -> Callable[..., Any]:
    """`backward(node, *tangents)`; if some tangents are of other kinds, `derivative(node, *tangents, kinds=)`, or an
    error without one.
    """
    kinds_so_far: list[TangentKind] = []
    joint = compiled.partitioned.joint
    varies = bool(joint.signature.symbols)
    count, error = len(joint.signature.differentiable), joint.backward_error
    errors = joint.failing if error is None else dict.fromkeys(range(count), error)  # eager's, for any kind
    if errors or compiled.make_derived is None:
        derivative = None

    def run(node: Any, *tangents: Any) -> Any:
        for tangent in tangents:
            if type(tangent) is not torch.Tensor:
                break
        else:
            return backward(node, *tangents)
        others = take_handed(node)
        plain = [_as_plain(tangent) if is_wrapper(tangent) else tangent for tangent in tangents]
        others += [((i,), t) for i, t in enumerate(tangents) if t is not None and plain[i] is None]
        tangents = tuple(plain)
        if not others:
            return backward(node, *tangents)
        for places, _ in others:
            if places[0] in errors:
                raise type(errors[places[0]])(*errors[places[0]].args)
        if derivative is None or (hasattr(node, "take_rest") and node.take_rest() is not None):
            raise unexpected(others[0][1])
        if hasattr(node, "passed"):
            check_marked(node, tangents)
        kinds = [_kind_of(kinds_so_far, places, tangent, varies=varies) for places, tangent in others]
        parts = [part for _, tangent in others for part in _parts(tangent)]
        return derivative(node, *tangents, *parts, kinds=tuple(kinds))

    return run


def _as_plain(tangent: Any) -> torch.Tensor | None:
    """The plain tensor that a wrapper's class converts it to; a pending collective is waited for."""
    plain = converted(tangent, None, torch.Tensor)
    return plain if type(plain) is torch.Tensor else None


def _parts(tangent: Any) -> Sequence[torch.Tensor]:
    return taken_apart(tangent) if is_wrapper(tangent) else [tangent]


def _kind_of(kinds: list[TangentKind], places: tuple[int, ...], tangent: Any, *, varies: bool) -> TangentKind:
    """The kind of a tangent, one object for all of the same kind. `varies`: sizes of results may vary."""
    parts = parts_of(tangent) if is_wrapper(tangent) else [tangent]
    layouts = [_layout(part, tuple(tangent.shape) if varies else ()) for part in parts]
    for kind in kinds:
        if kind.outputs == places and kind.layouts == layouts and _is_of(kind.spec, tangent, varies=varies):
            return kind
    if len(kinds) >= _MOST_KINDS:
        raise unexpected(tangent)
    spec = bare_spec(tangent) if is_wrapper(tangent) else None
    kinds.append(TangentKind(places, tuple(tangent.shape), spec, tuple(map(TensorSpec.of, parts)), layouts))
    return kinds[-1]


def _layout(part: torch.Tensor, sizes: tuple[int, ...]) -> Any:
    """The layout of a plain tensor; its sizes by their positions among `sizes`."""
    places = [place_of_size(size, dim, sizes) for dim, size in enumerate(part.shape)]
    own = [size if place is None else ("size", place) for size, place in zip(part.shape, places, strict=True)]
    return own, part.dtype, part.device


def _is_of(spec: Any, tangent: Any, *, varies: bool) -> bool:
    if spec is None or not is_wrapper(tangent):
        return spec is None and not is_wrapper(tangent)
    return type(tangent) is spec.cls and spec.has_structure_of(tangent, of_any_size=varies)
