"""`torch.cond`, `while_loop`, `scan` and `map` as operators of a graph, with a graph for each function that they take.

As PyTorch's export gives them. Only captures with `Options.keeps_branches` do so; elsewhere the operators are Python.

A function runs once on stand-ins of the operands, and its entries leave the tape for a graph. A tensor from outside
becomes an operand. The backward of a branch computes the branch again, from the operands.

Known weaknesses: `while_loop`, `scan` and `map` with gradients are Python, as elsewhere; a random number that a
backward needs, a write to an operand, and a check of values inside are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.autograd.function import once_differentiable

from .._torch.engine import TorchFunctionMode, without_torch_functions
from .._torch.graphs import make_graph_module
from .._torch.nested import flattened, mapped
from .._torch.stand_ins import is_stand_in
from .._torch.tensors import is_inside_transform, share_memory
from .._torch.wrappers import is_wrapper
from ..errors import UnsupportedOpError
from ..graph.meta import TensorSpec, contiguous_strides
from ..identity import ById, IdSet
from ..locks import bound
from ..tracing.heap.alias import Value
from ..tracing.recorder.recorder import Recorder
from ..tracing.tape.graph import build_module
from ..tracing.tape.tape import Entry, Tape
from ._torch.control_flow import COND, MAP, PRINT, SCAN, WHILE_LOOP, run_cond, run_map, run_scan, run_while_loop


@dataclasses.dataclass(slots=True)
class _Traced:
    """A function that ran: its entries and results, and the containers of the results."""

    entries: list[Entry]
    results: list[torch.Tensor]
    tree: Any


class _InputsOfGraphs(TorchFunctionMode):
    """The operands of an operator: the given tensors, then all further tensors from outside in its functions.

    An operand has a stand-in for the functions alone, and the entry of an input of their graphs.
    """

    def __init__(self, branches: Branches, name: str, given: Sequence[Any]) -> None:
        super().__init__()
        self.branches, self.around = branches, branches.running
        self.recorder, self.name = branches.recorder, name
        self.before = IdSet(self.recorder.values)
        self.stand_ins: ById[torch.Tensor, torch.Tensor] = ById()  # by the tensor outside
        self.own: IdSet[torch.Tensor] = IdSet()
        self.entries: list[Entry] = []
        self.given = [self.stand_in(value) if isinstance(value, torch.Tensor) else value for value in given]
        self.count = len(self.entries)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.Tensor.__hash__:
            args, kwargs = mapped((args, kwargs or {}), torch.Tensor, self.stand_in)
        return func(*args, **(kwargs or {}))

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in of a tensor from outside; a tensor that the functions made is itself."""
        if is_inside_transform(tensor) or is_wrapper(tensor):
            where = "under a transform of torch.func" if is_inside_transform(tensor) else f"a {type(tensor).__name__}"
            raise self.refused(f"meets {where}")
        if tensor in self.own:
            return tensor
        tensor = self.branches.outside(self.around, tensor)
        is_outside = tensor in self.before or (self.around is not None and tensor in self.around.own)
        if not is_outside and self.recorder.host.real_of(tensor) is None:
            return tensor
        if tensor not in self.stand_ins:
            with without_torch_functions():
                own, entry = self.input(TensorSpec.of(tensor))
                own.requires_grad_(tensor.requires_grad and torch.is_grad_enabled())
            self.stand_ins[tensor] = own
            self.own.add(own)
            self.entries.append(entry)
        return self.stand_ins[tensor]

    def input(self, spec: TensorSpec) -> tuple[torch.Tensor, Entry]:
        """A stand-in, and the entry of an input of a graph."""
        own, entry = self.recorder.fake_of(spec), Entry(None, spec=spec)
        self.recorder.values[own] = Value(own, entry, spec)
        return own, entry

    def refused(self, does: str) -> UnsupportedOpError:
        return UnsupportedOpError(
            f"a function given to `{self.name}` at {self.recorder.where()} {does}, which no graph of its own can hold. "
            "Do it outside of the operator."
        )

    # ---------------------------------------------------------------- running functions

    @contextlib.contextmanager
    def recording(self, entries: list[Entry]) -> Iterator[None]:
        """Context: recorded entries are added to `entries`, and leave the tape."""
        tape = self.recorder.tape.entries
        start = len(tape)
        try:
            with self, bound(self.branches, "running", self):
                yield
        finally:
            entries += tape[start:]
            del tape[start:]

    def traced(self, function: Callable[..., Any]) -> _Traced:
        """A function, run on the operands."""
        recorder, entries = self.recorder, list[Entry]()
        made, checks, changed = recorder.decisions.made, recorder.checks.made, recorder.host.changed_since()
        known = len(made), len(checks)
        with self.recording(entries):
            try:
                leaves, tree = flattened(function(*self.given))
            except RuntimeError as error:
                if "leaf Variable" in str(error):  # eager's operand is none
                    raise self.refused("writes to a tensor from outside") from None
                raise
            if not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
                raise self.refused("returns more than tensors")
            results = self.apart(leaves, ())
        if (len(made), len(checks)) != known:
            raise self.refused("depends on values in Python, prints a tensor, or checks values")
        if (what := changed()) is not None:
            raise self.refused(what)
        if any(recorder.value_of(own).storage.generation for own in self.stand_ins.values()):
            raise self.refused("writes to a tensor from outside")
        return _Traced(entries, results, tree)

    def apart(self, results: Sequence[Any], tangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Results that share memory with no operand, result or tangent."""
        seen = [*self.stand_ins.values(), *tangents]
        for result in map(self.stand_in, results):
            seen.append(result.clone() if any(share_memory(result, other) for other in seen) else result)
        return seen[len(seen) - len(results) :]

    def alike(self, all_entries: Sequence[list[Entry]], results: Sequence[list[torch.Tensor]]) -> list[TensorSpec]:
        """The specs of the results of all functions; results with different strides become contiguous."""
        specs = []
        for position, ones in enumerate(zip(*results, strict=True)):
            found = list(map(TensorSpec.of, ones))
            if any(_kind(spec) != _kind(found[0]) for spec in found):
                raise self.refused(f"gives a result unlike another function's: {' and '.join(map(str, found))}")
            if any(spec.stride != found[0].stride for spec in found):
                for entries, own in zip(all_entries, results, strict=True):
                    with self.recording(entries):
                        own[position] = own[position].clone(memory_format=torch.contiguous_format)
            specs.append(TensorSpec.of(results[0][position]))
        return specs

    # ---------------------------------------------------------------- graphs

    def outputs(self, entries: list[Entry], results: Sequence[torch.Tensor]) -> list[Entry]:
        with self.recording(entries):
            return [self.recorder.entry_of(result) for result in results]

    def used(self, parts: Sequence[tuple[list[Entry], list[Entry]]], known: Sequence[Entry]) -> list[Entry]:
        """The operands in need of (entries, outputs), without the `known` inputs."""
        needed: set[Entry] = set()
        for entries, outputs in parts:
            own = Tape()
            own.entries = entries
            needed_here = own.needed([*outputs, *(entry for entry in entries if entry.has_effect)])
            if needed_here.difference(entries, self.entries, known):
                raise self.refused("uses a tensor from outside that a custom Function, or a number, brings in")
            needed |= needed_here
        return [entry for entry in self.entries if entry in needed and entry not in known]

    def graph(
        self, entries: list[Entry], inputs: Sequence[Entry], outputs: Sequence[Entry], name: str
    ) -> fx.GraphModule:
        """A function's entries as a graph that returns a tuple."""
        recorder = self.recorder
        tape = Tape(recorder.tape.origins)
        tape.entries, tape.meta = entries, recorder.tape.meta
        numbers = recorder.decisions.numbers.by_entry
        module = build_module(tape, inputs, [], outputs, recorder.fake_mode, name, recorder.is_symbolic, numbers)
        graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in module.graph.nodes:
            if node.op == "placeholder":
                made[node] = graph.placeholder(f"arg{len(made)}_1")
                made[node].meta = node.meta
            elif node.op == "output":
                graph.output(tuple(made[result] for result in node.args[0]))
            else:
                made[node] = graph.node_copy(node, made.__getitem__)
        return make_graph_module(module, graph, name)

    def outside(self, inputs: Sequence[Entry]) -> list[torch.Tensor]:
        """The tensors outside, for inputs of a graph."""
        by_entry = dict(zip(self.entries, self.stand_ins, strict=True))
        return [by_entry[entry] for entry in inputs]

    def forget(self) -> None:
        """Tensors made by the functions are of no use outside."""
        if self.around is not None:
            return  # it forgets these, too
        for tensor in [tensor for tensor in self.recorder.values if tensor not in self.before]:
            if self.recorder.host.real_of(tensor) is None:
                del self.recorder.values[tensor]


class Branches:
    """Records the operators."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.running: _InputsOfGraphs | None = None  # of the function that runs, if one does

    def outside(self, around: _InputsOfGraphs | None, tensor: torch.Tensor) -> torch.Tensor:
        """The stand-in for a tensor, where the operator is called."""
        if around is not None:
            return around.stand_in(tensor)
        return tensor if is_stand_in(tensor) else self.recorder.adopt(tensor)

    def operators(self) -> Mapping[type, Callable[..., Any]]:
        named: Any = {COND: self.cond, WHILE_LOOP: self.while_loop, SCAN: self.scan, MAP: self.map, PRINT: self.print}
        return {type(op): method for op, method in named.items()}

    def print(self, format_str: str, *args: Any, **kwargs: Any) -> None:
        args, kwargs = mapped((args, kwargs), torch.Tensor, lambda tensor: self.outside(self.running, tensor))
        self.recorder.checks.note(PRINT, (format_str, *args), kwargs)

    def cond(self, pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
        if not isinstance(pred, torch.Tensor):
            return run_cond(pred, true_fn, false_fn, operands)
        pred = self.outside(self.running, pred)
        given, tree = flattened(tuple(operands))
        inner = _InputsOfGraphs(self, "torch.cond", given)

        def on_leaves(function: Any) -> Callable[..., Any]:
            return lambda *leaves: function(*tree.unflatten(leaves))

        both = [inner.traced(on_leaves(function)) for function in (true_fn, false_fn)]
        if both[0].tree != both[1].tree:
            raise inner.refused("returns other containers than the other function")
        specs = inner.alike([one.entries for one in both], [one.results for one in both])
        parts = [(one.entries, inner.outputs(one.entries, one.results)) for one in both]
        first = inner.entries[: inner.count]
        inputs = [*first, *inner.used(parts, first)]
        graphs = [
            inner.graph(entries, inputs, outputs, name)
            for (entries, outputs), name in zip(parts, ("true_graph", "false_graph"), strict=True)
        ]
        call = _CondCall(self.recorder, graphs, specs, _have_effects(*both))
        carrying = [i for i in range(len(specs)) if any(one.results[i].requires_grad for one in both)]
        backward = _backward(inner, both, carrying, specs) if carrying else None
        inner.forget()
        outside = inner.outside(inputs)
        if backward is None:
            results = call(pred, outside)
        else:
            kept, wanted = inner.outside(backward.inputs), inner.outside(backward.wanted)
            how = call, backward.call, carrying, len(outside), len(kept)
            results = _Branched.apply(how, pred, *outside, *kept, *wanted)
        return both[0].tree.unflatten(results)

    def while_loop(self, cond_fn: Any, body_fn: Any, carried_inputs: Any, additional_inputs: Any = ()) -> Any:
        given, tree = flattened((tuple(carried_inputs), tuple(additional_inputs)))
        count = len(flattened(tuple(carried_inputs))[0])
        if not all(isinstance(value, torch.Tensor) for value in given):
            return run_while_loop(cond_fn, body_fn, carried_inputs, additional_inputs)
        inner = _InputsOfGraphs(self, "torch.while_loop", _each_once(given))

        def on_leaves(function: Any) -> Callable[..., Any]:
            def run(*leaves: Any) -> Any:
                carried, others = tree.unflatten(leaves)
                return function(*carried, *others)

            return run

        test, body = (inner.traced(on_leaves(function)) for function in (cond_fn, body_fn))
        if any(result.requires_grad for result in body.results):  # a loop of a known number of steps has a backward
            inner.forget()
            return run_while_loop(cond_fn, body_fn, carried_inputs, additional_inputs)
        if len(body.results) != count or len(test.results) != 1:
            raise inner.refused("gives another number of tensors than are carried, or than one condition")
        with inner.recording(body.entries):
            like = zip(body.results, inner.given[:count], strict=True)
            body.results = [_like(inner, result, carried) for result, carried in like]
        parts = [(one.entries, inner.outputs(one.entries, one.results)) for one in (test, body)]
        first = inner.entries[: inner.count]
        inputs = [*first, *inner.used(parts, first)]
        names = "while_loop_cond_graph", "while_loop_body_graph"
        graphs = [
            inner.graph(entries, inputs, outputs, name) for (entries, outputs), name in zip(parts, names, strict=True)
        ]
        output = next(iter(reversed(graphs[0].graph.nodes)))
        output.args = (output.args[0][0],)  # a condition is bare
        graphs[0].recompile()
        specs = [TensorSpec.of(result) for result in body.results]
        inner.forget()
        outside = inner.outside(inputs)
        operands = outside[:count], outside[count:]
        results = _record(self.recorder, WHILE_LOOP, (*graphs, *operands), specs, is_random=_have_effects(test, body))
        return tree.unflatten((*results, *inner.given[count:]))[0]

    def scan(self, combine_fn: Any, init: Any, xs: Any, additional_inputs: Any = ()) -> Any:
        found = self._stepped(SCAN, combine_fn, init, xs, additional_inputs)
        if found is None:
            return run_scan(combine_fn, init, xs, additional_inputs)
        results, tree = found
        return tree.unflatten(results) if isinstance(combine_fn, functools.partial) else tuple(results)

    def map(self, f: Any, xs: Any, pos_args: Any = ()) -> Any:
        found = self._stepped(MAP, f, (), xs, pos_args)
        if found is None:
            return run_map(f, xs, pos_args)
        results, tree = found
        return tree.unflatten(results)

    def _stepped(self, op: Any, function: Any, init: Sequence[Any], xs: Sequence[Any], others: Sequence[Any]) -> Any:
        """The results of an operator that calls a function for each slice of `xs`, and the containers of a step's.

        The function takes carried values, slices, then the other operands. None where it is to run as Python: with
        gradients, and with symbolic numbers.
        """
        tensors = [*init, *xs, *(value for value in others if type(value) not in (bool, int, float))]
        if not all(isinstance(value, torch.Tensor) for value in tensors):
            return None
        xs = [self.outside(self.running, x) for x in xs]
        given = [*init, *(x.select(0, 0) for x in xs), *others]
        inner = _InputsOfGraphs(self, "scan" if op is SCAN else "map", _each_once(given))
        one, carries = inner.traced(function), len(init)
        if any(result.requires_grad for result in one.results):
            inner.forget()
            return None
        if len(one.results) < carries:
            raise inner.refused("gives fewer tensors than are carried")
        with inner.recording(one.entries):
            like = zip(one.results, inner.given[:carries], strict=False)
            one.results[:carries] = [_like(inner, result, carried) for result, carried in like]
        outputs = inner.outputs(one.entries, one.results)
        first = inner.entries[: inner.count]
        inputs = [*first, *inner.used([(one.entries, outputs)], first)]
        graph = inner.graph(one.entries, inputs, outputs, "scan_combine_graph" if op is SCAN else "body_graph")
        specs = [TensorSpec.of(result) for result in one.results]
        specs[carries:] = [_stacked(spec, xs[0].shape[0]) for spec in specs[carries:]]
        inner.forget()
        operands = inner.outside(inputs)
        rest = operands[carries + len(xs) :]
        args = (graph, operands[:carries], xs, tuple(rest)) if op is SCAN else (graph, xs, rest)
        return _record(self.recorder, op, args, specs, is_random=_have_effects(one)), one.tree


def _each_once(values: Sequence[Any]) -> list[Any]:
    """The values, with a view in the place of a tensor that came before: all operands differ."""
    seen: IdSet[object] = IdSet()
    found = []
    for value in values:
        found.append(value.view_as(value) if isinstance(value, torch.Tensor) and value in seen else value)
        seen.add(value)
    return found


def _have_effects(*traced: _Traced) -> bool:
    """Whether functions draw random numbers."""
    return any(entry.has_effect for one in traced for entry in one.entries)


def _stacked(spec: TensorSpec, steps: Any) -> TensorSpec:
    return spec.fresh((steps, *spec.shape))


def _kind(spec: TensorSpec) -> Any:
    return spec.shape, spec.dtype, spec.device, spec.conj, spec.neg


def _like(inner: _InputsOfGraphs, result: torch.Tensor, carried: torch.Tensor) -> torch.Tensor:
    spec, wanted = TensorSpec.of(result), TensorSpec.of(carried)
    if _kind(spec) != _kind(wanted):
        raise inner.refused(f"gives {spec} where {wanted} is carried")
    return result if spec.stride == wanted.stride else torch.empty_like(carried).copy_(result)


@dataclasses.dataclass(frozen=True, slots=True)
class _CondCall:
    """The operator with its graphs, as an entry of the tape."""

    recorder: Recorder
    graphs: Sequence[fx.GraphModule]
    specs: Sequence[TensorSpec]
    is_random: bool

    def __call__(self, pred: torch.Tensor, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        args = pred, *self.graphs, tuple(operands)
        return _record(self.recorder, COND, args, self.specs, is_random=self.is_random)


def _record(
    recorder: Recorder, op: Any, args: tuple[Any, ...], specs: Sequence[TensorSpec], *, is_random: bool
) -> Sequence[torch.Tensor]:
    entry = recorder.entry(op, recorder.to_entries(args), {}, is_random=is_random)
    entry.spec = tuple(specs)
    found: Sequence[torch.Tensor] = recorder.bind_results(entry, recorder.fakes_like(entry.spec))
    return found


@dataclasses.dataclass(frozen=True, slots=True)
class _Gradients:
    """`call` gives gradients of the operands `wanted` from the operands `inputs` and the tangents."""

    call: _CondCall
    inputs: list[Entry]
    wanted: list[Entry]


def _backward(
    inner: _InputsOfGraphs, both: Sequence[_Traced], carrying: Sequence[int], specs: Sequence[TensorSpec]
) -> _Gradients:
    recorder = inner.recorder
    if recorder.in_backward:
        raise inner.refused("is differentiated in a backward")
    like = [dataclasses.replace(specs[i], stride=contiguous_strides(specs[i].shape), offset=0) for i in carrying]
    tangents = [inner.input(spec) for spec in like]
    by_entry = dict(zip(inner.entries, inner.stand_ins.values(), strict=True))
    wanted = {entry: own for entry, own in by_entry.items() if own.requires_grad}
    all_entries = [list(one.entries) for one in both]
    found = [
        _gradients(inner, entries, [one.results[i] for i in carrying], [*wanted.values()], [own for own, _ in tangents])
        for entries, one in zip(all_entries, both, strict=True)
    ]
    reached = [k for k in range(len(wanted)) if any(gradients[k] is not None for gradients in found)]
    results = []
    for entries, gradients in zip(all_entries, found, strict=True):
        with inner.recording(entries), recorder.backward_runs():
            owns = [*wanted.values()]
            dense = [torch.zeros_like(owns[k]) if gradients[k] is None else gradients[k] for k in reached]
            results.append(inner.apart(dense, [own for own, _ in tangents]))
    back_specs = inner.alike(all_entries, results)
    parts = []
    for entries, own in zip(all_entries, results, strict=True):
        outputs = inner.outputs(entries, own)
        tape = Tape()
        needed = tape.needed(outputs)
        if any(entry.has_effect for entry in entries if entry in needed):
            raise inner.refused("draws random numbers that its backward needs again")
        parts.append(([entry for entry in entries if entry in needed], outputs))
    last = [entry for _, entry in tangents]
    inputs = inner.used(parts, last)
    graphs = [
        inner.graph(entries, [*inputs, *last], outputs, name)
        for (entries, outputs), name in zip(parts, ("true_graph", "false_graph"), strict=True)
    ]
    return _Gradients(_CondCall(recorder, graphs, back_specs, False), inputs, [[*wanted][k] for k in reached])


def _gradients(
    inner: _InputsOfGraphs,
    entries: list[Entry],
    results: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    tangents: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor | None]:
    recorder = inner.recorder
    pairs = [(result, tangent) for result, tangent in zip(results, tangents, strict=True) if result.requires_grad]
    if not pairs:
        return [None] * len(wanted)
    with inner.recording(entries), recorder.backward_runs(), recorder.host.engine(None):
        recorder.late.begin(tangents)
        ends, seeds = zip(*pairs, strict=True)
        found = torch.autograd.grad(ends, wanted, seeds, allow_unused=True, retain_graph=True)
        if recorder.late.finish().has_effects:
            raise inner.refused("has a backward that writes to tensors or checks values")
    return found


class _Branched(torch.autograd.Function):
    """Links the results to the operands. Gradients go to the last operands, which the forward does not read."""

    @staticmethod
    def forward(ctx: Any, how: Any, pred: torch.Tensor, *operands: torch.Tensor) -> Any:
        call, ctx.call, ctx.carrying, count, kept = how
        results = tuple(call(pred, operands[:count]))
        ctx.skipped = count + kept
        ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in ctx.carrying))
        ctx.save_for_backward(pred, *operands[count : count + kept])
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        pred, *kept = ctx.saved_tensors
        given = [gradients[i].contiguous() for i in ctx.carrying]
        return None, None, *(None,) * ctx.skipped, *ctx.call(pred, (*kept, *given))
