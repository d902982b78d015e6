"""What a compiled graph must return, looked at in its first call.

Kinds, shapes, dtypes, devices, and the strides of what the user sees; memory of its own for every result that no
operator of the graph makes a view; inputs that it leaves alone. A compiled graph is straight-line code: what holds in
one call holds in all, so later calls are not looked at, and cost nothing (`config.check` looks at each).

A result in memory that is somebody else's (passes simplify `x * 1` to `x`) is right as a value: it is copied, in this
call and all later ones. Anything else is a `BackendError`. Of our own compilers strides are mended as well.

Known weaknesses: a write to an input that does not move its version counter is not seen, nor is memory that a graph
lends out for one call only and that its first result does not show to be shared.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from .._torch import memory
from .._torch.tensors import share_memory, version_of
from ..errors import BackendError
from ..graph.meta import TensorSpec, spec_of
from ..interrupts import is_interrupt
from ..passes.aliasing import Memory, makes_memory, memory_of, results_of

__all__ = ["Contract", "Instead", "Result", "differences", "is_other", "promised"]

log = logging.getLogger("foregrad.backends")

Run = Callable[[list[Any]], list[Any]]
Repairs = dict[int, tuple[int, ...] | None]  # the strides that a result is copied to; None: as they are
_HELD = "held by others"
_TENSORS = (torch.Tensor, torch.nn.Parameter)


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One result of a graph. `node` is its entry in the output node.

    `memory`: what it may share with other results; None where it may be anything's. `is_fresh`: that is no input's.
    `is_visible`: its strides are the user's to see. `is_handed_out`: the user gets this very tensor. `is_kept`: it goes
    to the backward, and nobody writes to it.
    """

    name: str
    node: Any
    spec: Any
    memory: Memory | None
    is_fresh: bool
    is_visible: bool
    is_handed_out: bool
    is_kept: bool


def promised(
    module: fx.GraphModule, names: Sequence[str], visible: Sequence[int], kept_from: int | None
) -> list[Result]:
    """The results of a graph, as its operators make them.

    From position `kept_from` they are saved for a backward; None: this is a backward, whose results are all handed out.
    """
    made = []
    for i, (node, name) in enumerate(zip(results_of(module), names, strict=True)):
        source = memory_of(node) if isinstance(node, fx.Node) else None
        is_fresh = source is not None and makes_memory(source)
        known = source is not None and (is_fresh or source[0].op == "placeholder")
        spec = spec_of(node) if isinstance(node, fx.Node) else None
        is_kept = kept_from is not None and i >= kept_from
        is_handed_out = kept_from is None or (i in visible and not is_kept)
        shared = source if known else None
        made.append(Result(name, node, spec, shared, is_fresh, i in visible, is_handed_out, is_kept))
    return made


@dataclasses.dataclass(frozen=True, slots=True)
class Instead:
    """What takes the place of a graph that failed: `after(error)`, once what `remember(values)` gave was called. The
    second function that it gives says so, when the first has run.
    """

    remember: Callable[[list[Any]], Callable[[], None]]
    after: Callable[[Exception], tuple[Run, Callable[[], None]]]


@dataclasses.dataclass
class Contract:
    """What is asked of one compiled graph: its `results`, and that it writes to no inputs but those in `writes`.

    `backend`, `graph` and the names of `inputs` are for messages. `constants`: tensors that the graph holds. `is_ours`:
    an alias, or strides, that it gets wrong are mended without a word. `always`: every call is looked at, and aliases
    of other backends are errors. `instead`: what runs where the first call fails; its inputs stay alive for that.
    """

    backend: str
    graph: str
    results: Sequence[Result]
    inputs: Sequence[str]
    writes: Sequence[int] = ()
    constants: Sequence[torch.Tensor] = ()
    is_ours: bool = False
    always: bool = False
    instead: Instead | None = None
    hold: set[int] = dataclasses.field(default_factory=set)  # inputs to keep alive in the next call that is looked at

    def first_call(self, run: Run, values: list[Any]) -> tuple[list[Any], Run | None]:
        """`run(values)`, looked at; and what later calls go to, None where the next is to be looked at too."""
        instead = self.instead
        if instead is None or self.writes:
            return self._looked_at_call(run, values)
        kept, put_back = list(values), instead.remember(values)
        inputs = _looked_at(kept, (), set())
        try:
            return self._looked_at_call(run, values)
        except Exception as error:
            if is_interrupt(error):
                raise
            self._check_untouched(inputs or [])
            put_back()
            later, note = instead.after(error)
            out = later(kept)  # which raises where the error is the program's own
            note()
            return out, later

    def _looked_at_call(self, run: Run, values: list[Any]) -> tuple[list[Any], Run | None]:
        inputs = _looked_at(values, self.writes, self.hold)
        self.hold = set()
        out = run(values)
        if len(out) != len(self.results):
            raise BackendError(
                f"{self._named()} returned {len(out)} results, the graph has {len(self.results)}: "
                f"{', '.join(result.name for result in self.results)}."
            )
        if inputs is None or not all(type(value) in _TENSORS or not isinstance(value, torch.Tensor) for value in out):
            return out, None  # of a transform, or of another dispatch mode
        for i, expected in enumerate(self.results):
            self._check(expected, out[i])
        if not self.is_ours:
            self._check_untouched(inputs)
        repairs = self._repairs(out, inputs)
        if repairs:
            _copy(out, repairs)
            run = _copying(run, repairs)
        return out, None if self.always or self.hold else run

    # -- what can't be mended

    def _check(self, expected: Result, value: Any) -> None:
        spec = expected.spec
        if expected.node is None:
            if value is not None:
                self._fail(expected, "None", _shown(value))
        elif isinstance(spec, TensorSpec):
            if not isinstance(value, torch.Tensor):
                self._fail(expected, f"a tensor {spec!r}", _shown(value))
            for what, wanted, found in differences(spec, value):
                if what == "shape" and expected.is_kept and spec.numel == 0:
                    continue  # a kernel's workspace, of which a fake one knows nothing
                self._fail(expected, f"{what} {wanted}", found)
            if expected.is_visible and not self.is_ours and _has_other_strides(spec, value):
                self._fail(expected, f"strides {spec.stride}", value.stride())
        elif _is_number(expected.node) and not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
            self._fail(expected, "a number", _shown(value))

    def _check_untouched(self, inputs: list[_Input]) -> None:
        for given in inputs:
            tensor = given.tensor()
            if tensor is not None and given.version is not None and version_of(tensor) != given.version:
                raise BackendError(
                    f"{self._named()} wrote to its input `{self.inputs[given.position]}`, which the graph only reads.\n"
                    "  A compiled graph has no hidden writes: write to memory of its own. A backward may write into "
                    "the inputs that its role calls donated, if its function says so (`writes_into`)."
                )

    def _fail(self, expected: Result, wanted: Any, found: Any) -> None:
        raise BackendError(
            f"{self._named()} returned another value for `{expected.name}` than the graph does.\n"
            f"  expected: {wanted}\n"
            f"  got:      {found}"
        )

    def _named(self) -> str:
        return f"what backend `{self.backend}` made of {self.graph}"

    # -- what can

    def _repairs(self, out: list[Any], inputs: list[_Input]) -> Repairs:
        """The results to copy."""
        alias = dict(self._aliases(out, inputs))
        for i, what in alias.items():
            said = f"{self._named()} returned `{self.results[i].name}` in memory that is {what}, not its own"
            is_certain = what != _HELD  # what holds the tensor may be a list of all results, say
            if self.always and not self.is_ours and is_certain:
                raise BackendError(f"{said}.\n  expected: memory of its own\n  got:      {what}")
            level = logging.WARNING if is_certain and not self.is_ours else logging.DEBUG
            log.log(level, "%s; it is copied in each call", said)
        repairs: Repairs = {}
        for i, expected in enumerate(self.results):
            if not isinstance(expected.spec, TensorSpec):
                continue
            if expected.is_visible and _has_other_strides(expected.spec, out[i]):
                repairs[i] = expected.spec.stride
            elif i in alias:
                now = TensorSpec.of(out[i])
                repairs[i] = now.stride if expected.spec.is_static and not now.overlaps_itself else None
        return repairs

    def _aliases(self, out: list[Any], inputs: list[_Input]) -> Iterator[tuple[int, str]]:
        """Results whose memory is not as the graph says, and whose it is."""
        extents = [_extent(value) for value in out]
        meeting = _that_meet(extents)
        seen: list[int] = []
        for i, expected in enumerate(self.results):
            extent = extents[i]
            if expected.memory is None or extent is None:
                continue
            owner = self._owner(out[i], extent[0], inputs) if expected.is_fresh else None
            others = seen if i in meeting else ()
            clash = next((j for j in others if self._clash(i, j) and _meet(extent, extents[j])), None)
            if owner is not None:
                yield i, f"that of {owner}"
            elif clash is not None:
                yield i, f"that of `{self.results[clash].name}`"
            elif expected.is_fresh and expected.is_handed_out and i not in meeting and _is_held(out, i):
                yield i, _HELD
            else:
                seen.append(i)

    def _owner(self, value: torch.Tensor, start: int, inputs: list[_Input]) -> str | None:
        """The input or constant whose memory a result is in, which begins at `start`."""
        for given in inputs:
            if not given.start <= start < given.stop:
                continue
            tensor = given.tensor()
            if tensor is None:  # its memory may be the result's since it was let go: that is seen while it is held
                self.hold.add(given.position)
            elif share_memory(value, tensor):
                return f"the input `{self.inputs[given.position]}`"
        return next(
            (f"constant {j}" for j, constant in enumerate(self.constants) if share_memory(value, constant)), None
        )

    def _clash(self, i: int, j: int) -> bool:
        """Whether two results may not share memory."""
        a, b = self.results[i], self.results[j]
        return a.is_fresh and b.is_fresh and a.memory != b.memory and not (a.is_kept and b.is_kept)


@dataclasses.dataclass(frozen=True)
class _Input:
    """A tensor that a call was given, and where its elements are. It is not kept alive unless it is `held`.

    It is not asked for its storage: the Python object that this makes counts as one more owner from then on.
    """

    position: int
    tensor: weakref.ref[torch.Tensor]
    version: int | None
    start: int
    stop: int
    held: torch.Tensor | None

    @classmethod
    def of(cls, position: int, value: torch.Tensor, *, hold: bool) -> _Input:
        version = None if value.is_inference() else version_of(value)
        start = value.data_ptr()
        stop = start + (_span(value) if start else 0)
        return cls(position, weakref.ref(value), version, start, stop, value if hold else None)


def _looked_at(values: Sequence[Any], writes: Sequence[int], hold: set[int]) -> list[_Input] | None:
    """The tensors among a call's inputs that it may not write to; None where not all are plain."""
    found = []
    for i, value in enumerate(values):
        if not isinstance(value, torch.Tensor) or i in writes:
            continue
        if type(value) not in _TENSORS or not memory.has_storage(value):
            return None
        if value.numel():
            found.append(_Input.of(i, value, hold=i in hold))
    return found


def differences(spec: TensorSpec, value: torch.Tensor) -> Iterator[tuple[str, Any, Any]]:
    """What of dtype, device and shape is not as expected: (which, expected, found)."""
    if spec.dtype is not value.dtype:
        yield "dtype", spec.dtype, value.dtype
    if spec.device.type != value.device.type or None is not spec.device.index != value.device.index:
        yield "device", spec.device, value.device
    shape = tuple(value.shape)
    if len(shape) != len(spec.shape) or any(map(is_other, spec.shape, shape)):
        yield "shape", tuple(spec.shape), shape


def is_other(expected: Any, actual: Any) -> bool:
    """Whether a size or stride is another one; what is symbolic is not compared."""
    # A symbolic size compared with a number would become a guard on the graph.
    return type(expected) is int and expected != actual


def _has_other_strides(spec: TensorSpec, value: torch.Tensor) -> bool:
    if not spec.is_static or not spec.is_dense or value.numel() == 0:
        return False
    return any(n > 1 and a != b for n, a, b in zip(spec.shape, spec.stride, value.stride(), strict=True))


def _is_number(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else node
    return isinstance(value, (int, float, torch.SymInt, torch.SymFloat))


def _is_held(out: list[Any], i: int) -> bool:
    """Whether somebody else leads to the memory of a result that is no other's: a cache, the memory's true owner."""
    if out[i]._base is not None:
        return False
    # The latter allows for a storage that has been looked at.
    return not (memory.owned()(out, (i,)) or memory.owned_in_python(out, (i,)))


Extent = tuple[int, int]


def _extent(value: Any) -> Extent | None:
    """The address of a tensor's first byte, and the one behind its last; None for what has no bytes."""
    if not isinstance(value, torch.Tensor) or value.numel() == 0:
        return None
    start = value.data_ptr()
    return start, start + _span(value)


def _meet(a: Extent, b: Extent | None) -> bool:
    """Whether two tensors have bytes in common, from first to last."""
    return b is not None and a[0] < b[1] and b[0] < a[1]


def _that_meet(extents: Sequence[Extent | None]) -> set[int]:
    """The positions of those that have bytes in common with another one."""
    found: set[int] = set()
    last, farthest = -1, -1  # the one that ends farthest so far
    for (start, stop), i in sorted((extent, i) for i, extent in enumerate(extents) if extent is not None):
        if start < farthest:
            found |= {i, last}
        if stop > farthest:
            last, farthest = i, stop
    return found


def _span(value: torch.Tensor) -> int:
    steps = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    return (1 + steps) * value.element_size()


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {TensorSpec.of(value)!r}"
    return "None" if value is None else f"an object of type `{type(value).__name__}`"


def _copying(run: Run, repairs: Repairs) -> Run:
    def run_and_copy(values: list[Any]) -> list[Any]:
        out = run(values)
        _copy(out, repairs)
        return out

    return run_and_copy


def _copy(out: list[Any], repairs: Repairs) -> None:
    with torch.no_grad():
        for i, strides in repairs.items():
            value = out[i].detach()
            if strides is not None:
                out[i] = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)
            else:
                out[i] = value.clone()
