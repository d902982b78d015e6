"""Eager regions: functions of the user's that graphs call on real tensors.

A region's effects can't be undone. So if one call of a compiled function reaches a region again, in a capture or in
another graph, the results of the first run are used: see `Journal`. A region runs only after the values that the
program branched on before it were found equal to the graph's values.

The user's function runs with gradients on, and its autograd graph is kept for the region's backward. A region's first
result is the backward's key to the graph: a tensor over memory that owns the autograd graph, so the graph lives as long
as the saved tensor. The second result is a status: a decision reads it and the next region takes it, so no region is
dropped and all keep their order.

Known weaknesses: memory held by an inner autograd graph is counted by no budget, and is freed as a whole.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from .._torch.engine import default_generators, direct_apply, no_saved_tensors_hooks
from .._torch.histories import nodes_behind
from .._torch.tensors import storage_key, version_of
from ..errors import ForegradError, UnsupportedLayoutError, UnsupportedMutationError, UnsupportedSideEffectError
from ..graph.attempts import Attempts, RaisedInCallError
from ..graph.calls import PythonCall, status
from ..graph.meta import TensorSpec, memory_order, strides_in_order
from ..identity import IdSet
from ..python._torch.settings import under_settings
from ._torch import without_tensor_hooks

Layout = tuple[torch.dtype, torch.device, tuple[int, ...]]
"""Of a tensor: what it is made of, where, and its dimensions in the order of memory, outermost first."""


class RegionChangedError(RuntimeError):
    """Raised inside of a graph: a region's results, or the decisions before it, differ from capture's."""


@dataclasses.dataclass(eq=False)
class Region(PythonCall):
    """One captured call of a user's function. Fields with defaults are set by its first run.

    `call(function, tensors)` gives the result's tensors, the rest of the result, and its deed to a container made for
    the call ("changes" or "keeps or returns"). The inputs are its tensor arguments, then the leaves that it reached by
    itself (`leaves`). `differentiable` and `is_leaf` describe the arguments, `written` has the positions of written
    arguments. `decided`: the values that the program branched on before. `layouts`, `requires_grad` and `rest` describe
    the results; `views` has for each result the argument with the same memory and sizes; `reached` has the inputs
    that its gradient reaches. `materializes`: the inputs of custom Functions that take an absent gradient for zeros.
    """

    function: Callable[..., Any]
    name: str
    where: str
    call: Callable[[Callable[..., Any], list[torch.Tensor]], tuple[list[torch.Tensor], Any, str]]
    differentiable: tuple[bool, ...]
    is_leaf: tuple[bool, ...]
    settings: dict[str, Any]
    decided: tuple[Any, ...]
    written: tuple[int, ...] | None = None
    leaves: tuple[weakref.ref[torch.Tensor], ...] = ()
    input_layouts: tuple[Layout, ...] = ()
    layouts: tuple[Layout, ...] = ()
    requires_grad: tuple[bool, ...] = ()
    rest: Any = None
    views: tuple[int | None, ...] = ()
    reached: tuple[tuple[int, ...], ...] = ()
    backwards: dict[tuple[bool | None, ...], RegionBackward] = dataclasses.field(default_factory=dict)
    materializes: tuple[bool, ...] = ()

    @property
    def acts(self) -> str:
        return "" if _is_shared(self.function) else self.name

    @property
    def said(self) -> str:
        """The region and its line for people: a custom Function without a graph is a region, too."""
        kind = "custom Function" if isinstance(getattr(self.function, "owner", None), type) else "eager region"
        return f"the {kind} `{self.name}` called at {self.where}"

    def run(
        self, inputs: Sequence[torch.Tensor], after: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        """[key, status, *values]. `after` are the values that the program branched on before."""
        if getattr(self.function, "owner", None) in differentiated_twice:
            raise RegionChangedError(f"whether `{self.name}` is an eager region")
        if any(_differs(value.item(), expected) for value, expected in zip(after, self.decided, strict=True)):
            raise RegionChangedError("values that the program branched on before an eager region")
        with under_settings(self.settings), no_saved_tensors_hooks():
            try:
                ran = run_region(self, inputs[: len(self.differentiable)])
            except ForegradError:
                raise
            except Exception as error:
                raise RaisedInCallError(error) from error
        _check_same(self, ran, sizes)
        return self.results(ran)

    def results(self, ran: Ran) -> list[torch.Tensor]:
        """The results of the operator for one run."""
        kept = _Kept(next(_kept_keys).to_bytes(8, "little"))
        reached = {position for positions in self.reached for position in positions}
        starts = [*ran.starts, *(leaf() for leaf in self.leaves)]
        kept.region = self
        kept.outputs = [get_gradient_edge(output) if output.requires_grad else None for output in ran.outputs]
        with torch.enable_grad():
            absent = [_absent_for(output) if output.requires_grad else None for output in ran.outputs]
        kept.absent = [None if number is None else get_gradient_edge(number) for number in absent]
        kept.inputs = [tensor if i in reached else None for i, tensor in enumerate(starts)]
        key = torch.frombuffer(kept, dtype=torch.int64)
        _kept[int.from_bytes(kept, "little")] = kept
        return [key, status(), *ran.values()]

    def fake(self, inputs: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        return [torch.empty((1,), dtype=torch.int64), status(), *_empty(self.layouts, sizes)]

    def backward(self, present: Sequence[bool | None]) -> RegionBackward:
        """The call that gives the gradients of inputs, if cotangents of the results at `present` arrive; None: a
        cotangent that autograd reaches but that is absent.
        """
        key = tuple(present)
        if key not in self.backwards:
            reached = [positions for positions, how in zip(self.reached, key, strict=True) if how is not False]
            input_positions = sorted({position for positions in reached for position in positions})
            layouts = tuple(self.input_layouts[i] for i in input_positions)
            self.backwards[key] = RegionBackward(weakref.ref(self), key, tuple(input_positions), layouts)
        return self.backwards[key]


@dataclasses.dataclass(eq=False)
class RegionBackward(PythonCall):
    """The gradients of a region's inputs, from the region's key and the gradients of the results that are `present`.

    `input_positions`: the inputs that get a gradient; `layouts`: their layouts.
    """

    region: weakref.ref[Region]
    present: tuple[bool | None, ...]
    input_positions: tuple[int, ...]
    layouts: tuple[Layout, ...]

    def without(self, absent: Sequence[bool]) -> RegionBackward:
        """The call without the gradients at `absent`; the first input is the key."""
        is_absent, region = iter(absent[1:]), self.region()
        assert region is not None
        return region.backward([(None if next(is_absent) else how) if how else how for how in self.present])

    def run(
        self, inputs: Sequence[torch.Tensor], after: Sequence[torch.Tensor], sizes: Sequence[int]
    ) -> list[torch.Tensor]:
        found = self.gradients(inputs)
        there = [gradient for gradient in found if gradient is not None]
        if len(there) < len(found):
            raise UnsupportedSideEffectError(
                f"the backward of {self._called()} gives no gradient for an input, inside of a function that computes "
                "with its gradients. Return zeros there, or call `backward()` outside of the compiled function."
            )
        return there

    def _called(self) -> str:
        region = self.region()
        assert region is not None
        return region.said

    def gradients(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """The gradients, None where eager has none."""
        key, *gradients = inputs
        kept = _kept.get(int(key))
        if kept is None:
            raise UnsupportedSideEffectError(
                "the autograd graph of an eager region is gone: a hook for saved tensors has copied the tensor that "
                "holds it. Call the compiled function outside of `saved_tensors_hooks` and the like."
            )
        given, arriving, outputs = iter(gradients), [], []
        for at, how in enumerate(self.present):
            if how is not False:
                outputs.append(kept.outputs[at] if how else kept.absent[at])
                arriving.append(next(given) if how else torch.ones(()))
        leaves: list[Any] = [kept.inputs[i] for i in self.input_positions]
        with without_tensor_hooks(leaves):
            at_leaves = torch.autograd.grad(outputs, leaves, arriving, retain_graph=True, allow_unused=True)
        taken = {storage_key(gradient) for gradient in gradients}
        results: list[torch.Tensor | None] = []
        for at, gradient, leaf in zip(self.input_positions, at_leaves, leaves, strict=True):
            result: torch.Tensor | None = gradient
            if result is None:
                materializes = kept.region.materializes
                if at < len(materializes) and materializes[at]:
                    result = torch.zeros_like(leaf, memory_format=torch.contiguous_format)
                results.append(result)
                continue
            if result.layout is not torch.strided:
                raise UnsupportedLayoutError(
                    f"{self._called()} returns a gradient of layout {result.layout}. Only strided gradients can leave "
                    "a region: make it dense inside."
                )
            result = result.contiguous()
            results.append(result.clone() if storage_key(result) in taken else result)
            taken.add(storage_key(results[-1]))  # type: ignore[arg-type]
        return results

    def fake(self, inputs: Sequence[torch.Tensor], sizes: Sequence[Any]) -> list[torch.Tensor]:
        return _empty(self.layouts, sizes)


@dataclasses.dataclass(eq=False)
class Ran:
    """The results of a run of a region's function. `outputs` have their history, `starts` are the history's first
    leaves, `memory` holds the storages of the arguments.
    """

    starts: list[torch.Tensor]
    outputs: list[torch.Tensor]
    rest: Any
    leaves: list[torch.Tensor]
    views: list[list[int]]  # the arguments that share memory and sizes with a result, by result
    memory: frozenset[int]
    left: str  # see `Region.call`

    def values(self) -> list[torch.Tensor]:
        """The results without their history, in memory of their own."""
        values = []
        for output in self.outputs:
            dtype, device, order = layout_of(output)
            value = torch.empty_strided(output.shape, strides_in_order(output.shape, order), dtype=dtype, device=device)
            values.append(value.copy_(output.detach()))
        return values


class _Kept(bytearray):
    """The memory of a key. It owns the autograd graph of one run, by the graph's first and last edges.

    The region's backward can run as long as this object lives, whoever called the region.
    """

    region: Region
    outputs: list[Any]
    absent: list[Any]  # edges like `outputs`, with an absent gradient
    inputs: list[torch.Tensor | None]


class _AbsentGradient(torch.autograd.Function):
    """Stands for a result's absent gradient; eager's autograd reaches the result nevertheless."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        return None


_absent_for = direct_apply(_AbsentGradient)  # as it is, inside of a capture too


_kept: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()
_kept_keys = itertools.count(1)
differentiated_twice: weakref.WeakSet[Any] = weakref.WeakSet()
"""Custom Functions that are regions no more, as regions can't be differentiated twice and one of them was to be."""


# ---------------------------------------------------------------------------------------------- running once in a call


@dataclasses.dataclass(slots=True)
class _Entry:
    """One run: function, inputs, results, and the states of generators before and after it."""

    function: Callable[..., Any]
    inputs: list[torch.Tensor]
    ran: Ran
    states: list[tuple[torch.Generator, torch.Tensor, torch.Tensor]]


class Journal:
    """The runs of regions in one call of a compiled function, in order; `at`: the number of runs already reused.

    Known weakness: if the call runs eagerly in the end, regions run once more, and print twice.
    """

    def __init__(self) -> None:
        self.entries: list[_Entry] = []
        self.at = 0
        self.undo: list[Callable[[], None]] = []  # restores Python state that regions changed

    def next(self, region: Region, inputs: list[torch.Tensor]) -> Ran | None:
        """The earlier run of the region in the present call of the compiled function; or None."""
        if self.at == len(self.entries):
            return None
        entry = self.entries[self.at]
        if entry.function != region.function or not all(map(_is_close, entry.inputs, inputs)):
            del self.entries[self.at :]
            return None
        self.at += 1
        for generator, before, after in entry.states:
            if not torch.equal(before, after):
                generator.set_state(after)
        return entry.ran

    def add(self, entry: _Entry) -> None:
        self.entries.append(entry)
        self.at += 1


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors may be one value, computed by two backends."""
    if one.shape != other.shape or one.dtype is not other.dtype or one.device != other.device:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    return torch.allclose(one, other, rtol=1e-2, atol=1e-4, equal_nan=True)


_thread = threading.local()


def open_journal() -> Journal | None:
    """The journal of the call that runs on this thread."""
    return getattr(_thread, "journal", None)


def begin() -> None:
    """Note that a graph with regions begins to run, or to be captured."""
    journal = open_journal()
    if journal is None:
        _thread.journal = Journal()
    else:
        journal.at = 0


def rewind() -> None:
    """Note that the graph is wrong for the call, and that a second graph runs."""
    journal = open_journal()
    if journal is not None:
        journal.at = 0


def finish() -> None:
    """Note that the graph was right for this call."""
    _thread.journal = None


def give_up() -> AbstractContextManager[Any]:
    """Context: the call runs eagerly, with Python's state as if no region had run.

    Collectives that ran do not run again: other processes took part.
    """
    journal, ran = open_journal(), []
    if journal is not None:
        while journal.undo:
            journal.undo.pop()()
        ran = [(e.function, e.ran.outputs) for e in journal.entries if _is_shared(e.function)]
    _thread.journal = None
    first: Any = ran[0][0] if ran else None
    return first.given_again(ran) if ran else contextlib.nullcontext()


def _is_shared(function: Any) -> bool:
    return isinstance(function, PythonCall) and function.is_shared


@contextlib.contextmanager
def in_one_call() -> Iterator[None]:
    """Context: captures and graphs inside are part of one call."""
    outer = open_journal()
    begin()
    try:
        yield
    finally:
        if outer is None:
            _thread.journal = None


def undo_then(undo: Callable[[], None]) -> None:
    """Have a region's change undone where the call gives up."""
    if (journal := open_journal()) is not None:
        journal.undo.append(undo)


ATTEMPTS = Attempts(begin, rewind, finish, give_up, in_one_call, undo_then)


# ---------------------------------------------------------------------------------------------- running


def run_region(region: Region, inputs: Sequence[torch.Tensor]) -> Ran:
    """Call the user's function on real tensors. The region's `written` is None in a capture, before its first run."""
    inputs = list(inputs)
    journal = open_journal()
    earlier = None if journal is None else journal.next(region, inputs)
    if earlier is not None:
        return earlier
    _thread.journal = None  # compiled functions that the region calls are not part of this call
    generators = default_generators({torch.device("cpu"), *(t.device for t in inputs)})
    before = [generator.get_state() for generator in generators] if journal is not None else []
    try:
        ran = _run(region, inputs)
    finally:
        _thread.journal = journal
    if journal is not None:
        states = [(g, b, g.get_state()) for g, b in zip(generators, before, strict=True)]
        journal.add(_Entry(region.function, inputs, ran, states))
    return ran


def _run(region: Region, inputs: list[torch.Tensor]) -> Ran:
    is_first = region.written is None
    leaves, arguments = [], []
    for index, (tensor, differentiable, is_leaf) in enumerate(
        zip(inputs, region.differentiable, region.is_leaf, strict=True)
    ):
        is_copied = is_first or index in (region.written or ())
        leaf = tensor.detach().clone() if is_first else tensor.detach()
        if differentiable:
            leaf.requires_grad_()
        leaves.append(leaf)
        arguments.append(leaf.clone() if is_copied and (not is_first or (differentiable and not is_leaf)) else leaf)
    versions = [version_of(tensor) for tensor in arguments]
    outputs, rest, left = region.call(region.function, arguments)
    changed = [i for i, (t, version) in enumerate(zip(arguments, versions, strict=True)) if version_of(t) != version]
    if is_first:
        changed = [i for i, (now, then) in enumerate(zip(arguments, inputs, strict=True)) if _is_written(now, then)]
        region.written = tuple(changed)
    elif not set(changed) <= set(region.written or ()):
        raise UnsupportedMutationError(
            f"the eager region `{region.name}` called at {region.where} writes to a tensor among its arguments, but "
            "did not at capture. Let the region return the new value."
        )
    outputs += [arguments[i] for i in region.written or ()]
    memory = frozenset(storage_key(t) for t in arguments if t.layout is torch.strided)
    views = [[i for i, argument in enumerate(arguments) if _is_whole(output, argument)] for output in outputs]
    return Ran(leaves, outputs, rest, _leaves_behind(outputs, leaves), views, memory, left)


def _is_whole(output: torch.Tensor, argument: torch.Tensor) -> bool:
    """Whether a result is a view of all of an argument: `x.view_as(x)`."""
    if output is argument or argument.layout is not torch.strided or output.layout is not torch.strided:
        return False
    one, other = [(storage_key(t), t.storage_offset(), t.shape, t.stride(), t.dtype) for t in (output, argument)]
    return one == other


def _is_written(now: torch.Tensor, then: torch.Tensor) -> bool:
    """Whether a tensor's elements changed: NumPy's writes move no version counter."""
    now, then = now.detach(), then.detach()
    return not torch.equal(now.resolve_conj().nan_to_num(), then.resolve_conj().nan_to_num())


def _leaves_behind(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The leaves with gradients that lead to `outputs`, except `inputs`."""
    apart = IdSet(inputs)
    return [leaf for leaf in _leaves_of(outputs) if leaf not in apart]


def _leaves_of(outputs: Sequence[torch.Tensor]) -> IdSet[torch.Tensor]:
    variables = (getattr(node, "variable", None) for node in nodes_behind(outputs))  # of the nodes that accumulate
    leaves = IdSet(output for output in outputs if output.requires_grad and output.is_leaf)
    return leaves | (variable for variable in variables if variable is not None)


def reached_from(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The positions of the leaves that a result's gradient reaches."""
    leaves = _leaves_of([output])
    return tuple(index for index, leaf in enumerate(inputs) if leaf in leaves)


def layout_of(tensor: torch.Tensor) -> Layout:
    """The layout of a copy of a tensor."""
    order = memory_order(TensorSpec.of(tensor))
    if strides_in_order(tensor.shape, order) != tensor.stride():
        order = tuple(range(tensor.dim()))
    return tensor.dtype, tensor.device, order


def _differs(value: Any, expected: Any) -> bool:
    if isinstance(expected, float) and math.isnan(expected):
        return not math.isnan(value)
    return bool(value != expected)


def _check_same(region: Region, ran: Ran, sizes: Sequence[int]) -> None:
    """Raise `RegionChangedError` if the results of a run are not of the kinds at capture."""
    leaves = [leaf() for leaf in region.leaves]
    same = (
        not ran.left
        and [layout_of(output) for output in ran.outputs] == list(region.layouts)
        and [size for output in ran.outputs for size in output.shape] == list(sizes)
        and [output.requires_grad for output in ran.outputs] == list(region.requires_grad)
        and _same_rest(ran.rest, region.rest)
        and all(at is None or at in found for at, found in zip(region.views, ran.views, strict=True))
        and all(any(leaf is one for one in leaves) for leaf in ran.leaves)
    )
    if not same:
        raise RegionChangedError(f"the result of the eager region `{region.name}`")


def _same_rest(one: Any, other: Any) -> bool:
    (tree, leaves), (other_tree, other_leaves) = one, other
    if tree != other_tree or len(leaves) != len(other_leaves):
        return False
    return all(a is b or (type(a) is type(b) and a == b) for a, b in zip(leaves, other_leaves, strict=True))


def _empty(layouts: Sequence[Layout], sizes: Sequence[Any]) -> list[torch.Tensor]:
    rest = list(sizes)
    tensors = []
    for dtype, device, order in layouts:
        shape, rest = rest[: len(order)], rest[len(order) :]
        tensors.append(torch.empty_strided(shape, strides_in_order(shape, order), dtype=dtype, device=device))
    return tensors
