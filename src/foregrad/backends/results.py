"""The contract of a compiled graph, checked in its first call, and the replacement for a failing graph.

Checked are kinds, shapes, dtypes, devices, and the strides of visible results; memory of its own for every result that
is no view in the graph; inputs that must stay unwritten. A compiled graph is straight-line code: a contract kept in one
call is kept in all, so later calls are not checked, and cost nothing (`config.check` checks each).

A result that shares memory against the graph (passes simplify `x * 1` to `x`) is right as a value: it is copied, in the
first call and in all later calls. So is a saved value in strides that its backward is not compiled for. Anything else
is a `BackendError`. For foregrad's own compilers the strides of visible results are repaired too.

Known weaknesses: a write to an input that does not move its version counter is not seen, nor is memory lent for one
call only, if the first results do not show it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import operator
import os
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from .._torch import memory
from .._torch.engine import default_generators
from .._torch.graphs import body_of, ends_of, is_random
from .._torch.stand_ins import is_stand_in
from .._torch.symbols import Size, concrete
from .._torch.tensors import share_memory, version_of
from ..errors import BackendError, headline
from ..graph.meta import TensorSpec, laid_out, memory_order, spec_of, strides_in_order
from ..graph.printing import print_graph
from ..interrupts import is_interrupt
from ..passes.aliasing import Memory, makes_memory, memory_of, results_of

log = logging.getLogger("foregrad.backends")

Run = Callable[[list[Any]], list[Any]]
Repairs = dict[int, Callable[[torch.Tensor], torch.Tensor]]  # by result: what copies it
_HELD = "held by others"
_IN_AN_INPUT = "in an input"
_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclasses.dataclass(frozen=True, slots=True)
class PromisedResult:
    """One result of a graph. `node` is its entry in the output node.

    `memory`: the memory that it may share with further results; None if that is unknown. `is_fresh`: the memory is no
    input's. `is_visible`: the user sees its strides. `is_handed_out`: the user gets this very tensor. `is_kept`: it is
    a residual, and nobody writes to it.
    """

    name: str
    node: Any
    spec: Any
    memory: Memory | None
    is_fresh: bool
    is_visible: bool
    is_handed_out: bool
    is_kept: bool

    def in_an_input(self) -> PromisedResult:
        """The result if the graph wrote it to an input, and returns that or None."""
        return dataclasses.replace(self, node=_IN_AN_INPUT, spec=None, memory=None, is_fresh=False)


def promised(
    module: fx.GraphModule, names: Sequence[str], visible: Sequence[int], kept_from: int | None, strides: Any = ()
) -> list[PromisedResult]:
    """The results of a graph, by its operators.

    From position `kept_from` on they are residuals in reported `strides`; None: a backward, which hands all out.
    """
    results, inputs = [], set(ends_of(module)[0])
    for i, (node, name) in enumerate(zip(results_of(module), names, strict=True)):
        source = memory_of(node, inputs) if isinstance(node, fx.Node) else None
        is_given = source is not None and source[0] in inputs
        is_fresh = source is not None and not is_given and makes_memory(source)
        spec = spec_of(node) if isinstance(node, fx.Node) else None
        is_kept = kept_from is not None and i >= kept_from
        if is_kept and i not in visible and isinstance(spec, TensorSpec) and i < len(strides):
            spec = spec.fresh(spec.shape, strides[i] or spec.stride)
        is_handed_out = kept_from is None or (i in visible and not is_kept)
        shared = source if is_fresh or is_given else None
        results.append(PromisedResult(name, node, spec, shared, is_fresh, i in visible, is_handed_out, is_kept))
    return results


@dataclasses.dataclass(frozen=True, slots=True)
class Instead:
    """Replacement for a graph that failed. `remember(values)` gives a function that restores the state before the call;
    `after(error)` gives the function to run instead, and one that reports the failure after it has run.
    """

    remember: Callable[[list[Any]], Callable[[], None]]
    after: Callable[[Exception], tuple[Run, Callable[[], None]]]


@dataclasses.dataclass
class Contract:
    """The contract of one compiled graph: its `results`, and the inputs that it may write to, `writes`.

    `backend`, `graph` and the names of `inputs` are for messages. `constants`: tensors that the graph holds. `is_own`:
    the compiler is foregrad's, so wrong aliases and strides are repaired silently. `any_device`: results may be on any
    device. `always`: every call is checked, and aliases of other backends are errors. `instead`: the replacement if the
    first call fails; the inputs stay alive for it.
    """

    backend: str
    graph: str
    results: Sequence[PromisedResult]
    inputs: Sequence[str]
    writes: Sequence[int] = ()
    constants: Sequence[torch.Tensor] = ()
    is_own: bool = False
    any_device: bool = False
    always: bool = False
    instead: Instead | None = None
    hold: set[int] = dataclasses.field(default_factory=set)  # inputs to keep alive in the next checked call

    def first_call(self, run: Run, values: list[object]) -> tuple[list[Any], Run | None]:
        """(the checked results of `run(values)`; the function for later calls, None if the next is checked too)."""
        instead = self.instead
        if instead is None or self.writes:
            return self._checked_call(run, values)
        kept, put_back = list(values), instead.remember(values)
        inputs = _read_only(kept, (), set())
        try:
            return self._checked_call(run, values)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._check_untouched(inputs or [])
            put_back()
            later, note = instead.after(error)
            out = later(kept)  # raises if the error is the program's own
            note()
            return out, later

    def _checked_call(self, run: Run, values: list[object]) -> tuple[list[object], Run | None]:
        inputs = _read_only(values, self.writes, self.hold)
        self.hold = set()
        out = run(values)
        if len(out) != len(self.results):
            raise BackendError(
                f"{self._named()} returned {len(out)} results, the graph has {len(self.results)}: "
                f"{', '.join(result.name for result in self.results)}."
            )
        if inputs is None or not all(type(value) in _TENSORS or not isinstance(value, torch.Tensor) for value in out):
            return out, None  # of a transform, or of a second dispatch mode
        if not self.is_own:
            self._check_untouched(inputs)
        for i, expected in enumerate(self.results):
            self._check(expected, out[i])
        repairs = self._repairs(out, inputs)
        if repairs:
            _copy(out, repairs)
            return out, None if self.always or self.hold else lambda values: _copy(run(values), repairs)
        return out, None if self.always or self.hold else run

    # -- faults that can't be repaired

    def _check(self, expected: PromisedResult, value: Any) -> None:
        spec = expected.spec
        if expected.node is _IN_AN_INPUT:
            return
        if expected.node is None:
            if value is not None:
                self._fail(expected, "None", _shown(value))
        elif isinstance(spec, TensorSpec):
            if not isinstance(value, torch.Tensor):
                self._fail(expected, f"a tensor {spec!r}", _shown(value))
            for what, expected_value, actual in differences(spec, value):
                if what == "shape" and expected.is_kept and spec.numel == 0:
                    continue  # a kernel's workspace: a fake kernel doesn't know the size
                if what == "device" and self.any_device:
                    continue
                is_scalar = value.ndim == 0 and value.device.type == "cpu"
                if what == "device" and is_scalar and (expected.is_kept or _is_of_attention(expected.node)):
                    continue  # a seed of attention on a GPU: the kernels leave the seed on the CPU and read it there
                self._fail(expected, f"{what} {expected_value}", actual)
            if expected.is_visible and not (expected.is_kept or self.is_own) and _laying_out(spec, value) is not None:
                self._fail(expected, f"strides {spec.stride}", value.stride())
        elif _is_number(expected.node) and not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            self._fail(expected, "a number", _shown(value))

    def _check_untouched(self, inputs: list[_Input]) -> None:
        for item in inputs:
            tensor = item.tensor()
            if tensor is not None and item.is_changed(tensor):
                did = "resized or replaced" if item.has_moved(tensor) else "wrote to"
                raise BackendError(
                    f"{self._named()} {did} its input `{self.inputs[item.position]}`, but the graph only reads it.\n"
                    "  A compiled graph has no hidden writes: write to memory of its own. A backward may write into "
                    "the inputs that its role calls donated, if its function says so (`writes_into`)."
                )

    def _fail(self, expected: PromisedResult, expected_value: object, actual: object) -> None:
        raise BackendError(
            f"{self._named()} returned a value for `{expected.name}` that differs from the graph's "
            f"(expected: {expected_value}; got: {actual})."
        )

    def _named(self) -> str:
        return f"the function that backend `{self.backend}` made of {self.graph}"

    # -- faults that can

    def _repairs(self, out: list[Any], inputs: list[_Input]) -> Repairs:
        """The results to copy."""
        alias = dict(self._aliases(out, inputs))
        for i, what in alias.items():
            message = f"{self._named()} returned `{self.results[i].name}` in memory that is {what}, not its own"
            is_certain = what != _HELD  # the holder may be a list of all results
            if self.always and not self.is_own and is_certain:
                raise BackendError(f"{message}.")
            level = logging.WARNING if is_certain and not self.is_own else logging.DEBUG
            log.log(level, "%s; it is copied in each call", message)
        repairs: Repairs = {}
        for i, expected in enumerate(self.results):
            if not isinstance(expected.spec, TensorSpec):
                continue
            matters = expected.is_visible or (expected.is_kept and not self.is_own)
            if matters and (repair := _laying_out(expected.spec, out[i])) is not None:
                repairs[i] = repair
            elif i in alias:
                now = TensorSpec.of(out[i])
                keeps_strides = expected.spec.is_static and not now.overlaps_itself
                repairs[i] = functools.partial(laid_out, stride=now.stride) if keeps_strides else torch.clone
        return repairs

    def _aliases(self, out: list[Any], inputs: list[_Input]) -> Iterator[tuple[int, str]]:
        """Results that share memory against the graph, each with the owner of the memory."""
        extents = [_extent(value) for value in out]
        meeting, at = _that_meet(extents), _by_address(inputs)
        for i, expected in enumerate(self.results):
            extent = extents[i]
            if expected.memory is None or extent is None:
                continue
            owner = self._owner(out[i], at(extent[0])) if expected.is_fresh else None
            seen = meeting.get(i)
            clash = next((j for j in seen or () if self._clash(i, j) and _meet(extent, extents[j])), None)
            if owner is not None:
                yield i, f"that of {owner}"
            elif clash is not None:
                yield i, f"that of `{self.results[clash].name}`"
            elif expected.is_fresh and expected.is_handed_out and seen is None and _is_held(out, i):
                yield i, _HELD
            elif seen is not None:
                seen.append(i)

    def _owner(self, value: torch.Tensor, inputs: list[_Input]) -> str | None:
        """The input or constant that owns the memory of a result; `inputs`: those with elements at its beginning."""
        for item in inputs:
            tensor = item.tensor()
            if tensor is None:  # it was freed, so its memory may have been reused: it is held in the next checked call
                self.hold.add(item.position)
            elif share_memory(value, tensor):
                return f"the input `{self.inputs[item.position]}`"
        return next(
            (f"constant {j}" for j, constant in enumerate(self.constants) if share_memory(value, constant)), None
        )

    def _clash(self, i: int, j: int) -> bool:
        """Whether two results may not share memory."""
        a, b = self.results[i], self.results[j]
        return a.is_fresh and b.is_fresh and a.memory != b.memory and not (a.is_kept and b.is_kept)


class _Input(NamedTuple):
    """A tensor among a call's inputs, and the place of its elements. The tensor is not kept alive unless `held`.

    Its storage is not read: the Python object that this makes would count as one more owner from then on.
    """

    position: int
    tensor: weakref.ref[torch.Tensor]
    shape: torch.Size
    version: int | None
    start: int
    stop: int
    held: torch.Tensor | None

    @classmethod
    def of(cls, position: int, value: torch.Tensor, *, hold: bool) -> _Input:
        version = None if value.is_inference() else version_of(value)
        start = _address(value)
        stop = start + (_span(value) if start else 0)
        return cls(position, weakref.ref(value), value.shape, version, start, stop, value if hold else None)

    def has_moved(self, tensor: torch.Tensor) -> bool:
        return tensor.shape != self.shape or _address(tensor) != self.start

    def is_changed(self, tensor: torch.Tensor) -> bool:
        return self.has_moved(tensor) or (self.version is not None and version_of(tensor) != self.version)


def _read_only(values: Sequence[object], writes: Sequence[int], hold: set[int]) -> list[_Input] | None:
    """The tensors among a call's inputs that it may not write to; None if not all are plain."""
    tensors = []
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or i in writes or any(share_memory(value, values[j]) for j in writes):
            continue
        if type(value) not in _TENSORS or is_stand_in(value) or not memory.has_storage(value):
            return None
        if value.numel():
            tensors.append(_Input.of(i, value, hold=i in hold))
    return tensors


def differences(spec: TensorSpec, value: torch.Tensor) -> Iterator[tuple[str, object, object]]:
    """The differences in dtype, device and shape: (name, expected, actual)."""
    if spec.dtype is not value.dtype:
        yield "dtype", spec.dtype, value.dtype
    if spec.device.type != value.device.type or None is not spec.device.index != value.device.index:
        yield "device", spec.device, value.device
    shape = tuple(value.shape)
    if len(shape) != len(spec.shape) or any(map(is_other, spec.shape, shape)):
        yield "shape", tuple(spec.shape), shape


def is_other(expected: object, actual: object) -> bool:
    """Whether a size or stride differs; symbolic ones are not compared."""
    # A symbolic size compared with a number would become a guard on the graph.
    return type(expected) is int and expected != actual


def _laying_out(spec: TensorSpec, value: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What copies each call's result into the strides of `spec`; None if this call's value has these strides."""
    sizes, steps = [*map(concrete, spec.shape)], [*map(concrete, spec.stride)]
    varies = not spec.is_static  # unknown numbers are None
    # In a dimension of one element any stride is right, so the order of the dimensions at capture may be wrong later.
    if (
        not value.numel()
        or (varies and (1 in sizes or None in (*sizes, *steps)))
        or not spec.fresh(sizes, steps).is_dense
    ):
        return None
    order = memory_order(spec) if varies else ()

    def strides_of(tensor: torch.Tensor) -> Sequence[Size]:
        return strides_in_order(tensor.shape, order) if varies else spec.stride

    if all(n == 1 or a == b for n, a, b in zip(value.shape, strides_of(value), value.stride(), strict=True)):
        return None
    return lambda tensor: laid_out(tensor, strides_of(tensor))


def _is_of_attention(node: Any) -> bool:
    is_item = isinstance(node, fx.Node) and node.target is operator.getitem
    return is_item and "_attention" in str(node.all_input_nodes[0].target)


def _is_number(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else node
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat))


def _is_held(out: list[Any], i: int) -> bool:
    """Whether a second object (a cache, the true owner) refers to memory that should be the result's own."""
    if out[i]._base is not None:
        return False
    # The latter allows for a storage that has been read.
    return not (memory.owned()(out, (i,)) or memory.owned_in_python(out, (i,)))


def _address(tensor: torch.Tensor) -> int:
    """The address of a tensor's first byte; 0 on a device whose tensors have no storage."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


Extent = tuple[int, int]


def _extent(value: object) -> Extent | None:
    """The addresses of a tensor's first byte and after its last; None for a value without bytes."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return None
    start = _address(value)
    return (start, start + _span(value)) if start else None


def _meet(a: Extent, b: Extent | None) -> bool:
    """Whether two tensors have bytes in common, from first to last."""
    return b is not None and a[0] < b[1] and b[0] < a[1]


def _that_meet(extents: Sequence[Extent | None]) -> dict[int, list[int]]:
    """The positions of tensors that share bytes with a second tensor, each with the list of its group, empty as yet."""
    groups: dict[int, list[int]] = {}
    last, farthest = -1, -1  # the one that ends farthest so far
    for (start, stop), i in sorted((extent, i) for i, extent in enumerate(extents) if extent is not None):
        if start < farthest:
            groups[i] = groups.setdefault(last, [])
        if stop > farthest:
            last, farthest = i, stop
    return groups


def _by_address(inputs: list[_Input]) -> Callable[[int], list[_Input]]:
    """A function that gives the inputs with elements at an address, in their order."""
    ordered = sorted(inputs, key=lambda item: item.start)
    starts = [item.start for item in ordered]
    reach = [*itertools.accumulate((item.stop for item in ordered), max)]

    def at(address: int) -> list[_Input]:
        first = end = bisect_right(starts, address)
        while first and reach[first - 1] > address:
            first -= 1
        return sorted((i for i in ordered[first:end] if address < i.stop), key=lambda item: item.position)

    return at


def _span(value: torch.Tensor) -> int:
    steps = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (1 + steps) * value.element_size()


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {TensorSpec.of(value)!r}"
    return "None" if value is None else f"an object of type `{type(value).__name__}`"


def _copy(out: list[Any], repairs: Repairs) -> list[Any]:
    with torch.no_grad():
        for i, repair in repairs.items():
            out[i] = repair(out[i].detach())
    return out


# ------------------------------------------------------------------------------------------------------------ failures
# Failures of a backend, or wrong results: the graph runs on eager's kernels instead, with one warning.
#
# A failure is kept as a program of its own: the graph, inputs of the same layouts, the call of the compiler.


class Failures:
    """The failures of one backend, for one function. `tell(message)` warns the user; None: a failure is an error."""

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self.tell = tell
        self._said = False

    def note(self, message: str, error: Exception) -> None:
        """Note a failure: the first one is a warning, later ones are logged. Without `tell` it is a `BackendError`."""
        if self.tell is None:
            raise BackendError(message) from error
        if self._said:
            log.warning("%s", message)
            return
        self._said = True
        self.tell(
            f"{message} The graph runs on eager's kernels instead. "
            '(foregrad.compile(..., on_unsupported="raise") makes this an error.)'
        )


def described(compiler: object, name: str, graph: str, module: fx.GraphModule, error: BaseException) -> str:
    """The message for a failure, with the path of a program that shows it."""
    message = f"backend `{name}` failed on {graph}: {headline(error)}"
    message += "" if message.endswith((".", "!", "?")) else "."
    path = _kept(compiler, name, graph, module, message)
    return message if path is None else f"{message} {path} is a program that shows it."


def _kept(compiler: object, name: str, graph: str, module: fx.GraphModule, message: str) -> str | None:
    """The path of a file with a program that shows the failure; None if it can't be written."""
    try:
        text = _program(compiler, module, message)
        handle, path = tempfile.mkstemp(prefix="foregrad_failure_", suffix=".py", text=True)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except Exception as why:
        log.debug("no program is kept of the failure on %s with %s: %s", graph, name, why)
        return None
    return path


def _program(compiler: object, module: fx.GraphModule, message: str) -> str:
    graph = print_graph(module, header=message, name="graph")
    inputs = [_input(spec_of(node)) for node in module.graph.nodes if node.op == "placeholder"]
    home, qualified = getattr(compiler, "__module__", None), getattr(compiler, "__qualname__", None)
    if home is None or qualified is None or "<" in qualified or home == "__main__":
        compiler_line = "compiler = ...  # the backend's compiler: (graph module, example inputs) -> callable"
    else:
        root, _, rest = qualified.partition(".")
        compiler_line = f"from {home} import {root} as compiler" + (f"\ncompiler = compiler.{rest}" if rest else "")
    return (
        f"{graph}\n\n{compiler_line}\nfrom foregrad.backends.boxed import call_boxed\n\n"
        f"inputs = [\n{''.join(f'    {line},{chr(10)}' for line in inputs)}]\n"
        "module = torch.fx.symbolic_trace(graph)\n"
        "results = call_boxed(compiler(module, inputs), list(inputs))\n"
        "print([getattr(result, 'shape', result) for result in results])\n"
    )


def _input(spec: Any) -> str:
    if not isinstance(spec, TensorSpec) or not spec.is_static:
        return "...  # a number, or a tensor of symbolic sizes"
    shape, stride, last = tuple(map(int, spec.shape)), tuple(map(int, spec.stride)), f"device='{spec.device}'"
    return f"torch.empty_strided({shape}, {stride}, dtype={spec.dtype}, {last}).zero_()"


def random_states_of(module: fx.GraphModule, values: Sequence[object]) -> Callable[[], None]:
    """A function that restores the random generators that a graph may draw from."""
    draws = any(map(is_random, body_of(module)))
    devices = {value.device for value in values if isinstance(value, torch.Tensor)} | {torch.device("cpu")}
    generators = default_generators(devices) if draws else []
    states = [(generator, generator.get_state()) for generator in generators]

    def put_back() -> None:
        for generator, state in states:
            generator.set_state(state)

    return put_back
