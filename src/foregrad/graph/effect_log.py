"""The effect log: the changes that a call makes to tensors that the caller can see, in program order.

The compiled forward is pure. A call replays these entries on the real tensors, one after the other: those of inputs in
program order, then those of results and of views, which a call takes last. `with_graph` puts the forward into the log.
Checks, and a backward's effects besides gradients, are described here too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from .._torch.graphs import is_higher_order
from .._torch.nested import mapped
from .._torch.ops import OpOverload
from .slots import Slot


@dataclasses.dataclass(frozen=True, slots=True)
class ViewStep:
    """One view operator on the way from a base to an output. `call` is equal for outputs of one multi-output call."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    index: int | None
    call: int
    grad_enabled: bool


@dataclasses.dataclass(frozen=True, slots=True)
class OutputInfo:
    """One leaf of the function's result."""

    path: str


@dataclasses.dataclass(frozen=True, slots=True)
class Handle(OutputInfo):
    """A tensor that a call has at hand: an input or a graph output, by its number (one of the two is given), or the
    view at the end of `steps`. A tensor among the result's leaves is a handle.
    """

    input: int | None = None
    output: int | None = None
    steps: tuple[ViewStep, ...] = ()

    def __str__(self) -> str:
        return f"{_base(self.input, self.output)}{_chain(self.steps)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Effect:
    """Base of all entries. It happens to input `input`, to graph output `result` (then `input` is -1), or to the view
    at the end of `steps`. `words` is the text for people.
    """

    words = ""
    input: int
    result: int | None = dataclasses.field(default=None, kw_only=True)
    steps: tuple[ViewStep, ...] = dataclasses.field(default=(), kw_only=True)

    def __str__(self) -> str:
        return self.words.format(self)

    @property
    def is_whole(self) -> bool:
        """Whether it happens to a whole input, not to a view or a graph output."""
        return self.input >= 0 and not self.steps

    @property
    def target(self) -> str:
        """The affected tensor, in words."""
        return f"{_base(self.input, self.result)}{_chain(self.steps)}"


@dataclasses.dataclass(frozen=True, slots=True)
class TakeView(Effect):
    """A view of an input is taken early: before the input is given other memory, if a tensor takes over the former
    memory, or before a write, if autograd bars the view from then on.
    """

    path: str
    words = "take view {0.path} of {0.target}"


@dataclasses.dataclass(frozen=True, slots=True)
class MarkRequiresGrad(Effect):
    """`requires_grad_()`."""

    words = "requires_grad_() on {0.target}"


@dataclasses.dataclass(frozen=True, slots=True)
class Detach(Effect):
    """`detach_()`, or else `requires_grad_(False)`."""

    in_place: bool = True

    def __str__(self) -> str:
        return f"{'detach_()' if self.in_place else 'requires_grad_(False)'} on {self.target}"


@dataclasses.dataclass(frozen=True, slots=True)
class Write(Effect):
    """The elements become those of graph output `output`.

    `differentiable`: the history is taken over too. `counted`: the write moves the version counter (a write through
    `.data` does not). `swapped`, in older files: the write goes to the storage assigned during the call.
    """

    output: int
    differentiable: bool
    counted: bool = True
    swapped: bool = False

    def __str__(self) -> str:
        how = " with its history" if self.differentiable else "" if self.counted else ", no version moves"
        return f"write output {self.output} to {self.target}{how}"


@dataclasses.dataclass(frozen=True, slots=True)
class WriteWrapper(Effect):
    """A wrapper subclass was written to: its version moves `times`."""

    times: int
    words = "{0.target} is written, a wrapper subclass"


@dataclasses.dataclass(frozen=True, slots=True)
class SetData(Effect):
    """`.data = ...`: the tensor takes the other tensor's memory over."""

    source: Handle
    words = "{0.target} takes the memory of {0.source}"


@dataclasses.dataclass(frozen=True, slots=True)
class SetStorage(SetData):
    """`set_`, counted as a write. In older files alone: captures refuse it."""

    words = "set_() on {0.target}, to {0.source}"


@dataclasses.dataclass(frozen=True, slots=True)
class InplaceView(Effect):
    """The sizes of an input change in place: `op(input, *args)`, by `t_`, `squeeze_`, `resize_`."""

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    grad_enabled: bool

    def __str__(self) -> str:
        return f"{self.op} on {self.target}{'' if self.grad_enabled else ' under no_grad'}"


@dataclasses.dataclass(frozen=True, slots=True)
class BumpVersion(Effect):
    """The version counter of an input moves though no element is written."""

    words = "bump version of {0.target}"


@dataclasses.dataclass(frozen=True, slots=True)
class RunGraph(Effect):
    """The compiled forward runs, in the autograd node where there is one."""

    input: int = -1
    words = "run the graph"


def _base(input: int | None, output: int | None) -> str:
    return f"input {input}" if output is None else f"output {output}"


def _chain(steps: tuple[ViewStep, ...]) -> str:
    return "".join(f", {step.op}" for step in steps)


# -------------------------------------------------------------------- from log to log


@dataclasses.dataclass(frozen=True, slots=True)
class Recorded:
    """An entry as it was recorded: when, by one sequence number."""

    at: int
    effect: Effect


def ordered(recorded: Sequence[Recorded]) -> tuple[Effect, ...]:
    """The log, in order: entries of one time as recorded, equal entries of a view once."""

    def place(entry: Recorded) -> tuple[bool, int]:
        return not (entry.effect.is_whole or isinstance(entry.effect, TakeView)), entry.at

    log = [entry.effect for entry in sorted(recorded, key=place)]
    return tuple(e for at, e in enumerate(log) if e.is_whole or e not in log[:at])


def with_graph(
    log: Sequence[Effect], taken: Collection[int], leaves: Collection[int], *, counts_first: bool
) -> list[Effect]:
    """The log with the place of the forward.

    It comes first, but for the first marks of inputs that are `taken` by autograd; not so for `leaves` that require
    grad already and are detached before they are marked. With `counts_first` it comes after the versions that move
    before sizes or memory do, too.
    """
    detached: dict[int, int] = {}
    marks: dict[int, int] = {}
    for at, effect in enumerate(log):
        if isinstance(effect, Detach) and effect.is_whole:
            detached.setdefault(effect.input, at)
        elif not (isinstance(effect, MarkRequiresGrad) and effect.is_whole):
            continue
        elif not (effect.input in detached and effect.input in leaves):
            marks.setdefault(effect.input, at)
    early = {at for index, at in marks.items() if index in taken}
    again = {marks[index] for index, at in detached.items() if marks.get(index, -1) > at}
    changed = next((at for at, effect in enumerate(log) if isinstance(effect, (SetData, InplaceView))), len(log))
    counts = {at for at, effect in enumerate(log[:changed]) if counts_first and isinstance(effect, BumpVersion)}
    after = [effect for at, effect in enumerate(log) if at not in (early | counts) - again]
    return [*(log[at] for group in (early, counts) for at in sorted(group)), RunGraph(), *after]


# ------------------------------------------------------------------------------------------------ effects of no tensor
# Effects outside of a graph: operators without results, which the runtime runs on values that the graph computed.


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """An argument of a check that is an input, by its position among these."""

    input: int


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """An argument of a check that is an output of its half of the graph, by its position among these."""

    output: int


@dataclasses.dataclass(frozen=True, slots=True)
class CheckInfo:
    """An operator that returns nothing and writes to no tensor: it raises, or has some effect of its own.

    `args` and `kwargs` hold `Given` and `Result` in place of tensors. The check runs between decision `after` - 1 and
    decision `after`; `where` is the user's line.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    where: str
    after: int = 0

    @property
    def is_operator(self) -> bool:
        """Whether a graph can hold the check: all but foregrad's own."""
        return isinstance(self.op, OpOverload) or is_higher_order(self.op)

    @property
    def only_raises(self) -> bool:
        """Whether the check may run twice: an operator of PyTorch's or a check of foregrad's, not one of the user's."""
        return not self.is_operator or (self.op.namespace == "aten" and self.op.name() != "aten::_print")

    def arguments(self, inputs: Sequence[object], outputs: Sequence[object]) -> Any:
        """(args, kwargs), with an object in place of each `Given` and `Result`."""
        given = self.args, dict(self.kwargs)
        return mapped(mapped(given, Given, lambda at: inputs[at.input]), Result, lambda at: outputs[at.output])

    def behind(self, count: int) -> CheckInfo:
        """The check with its outputs moved by `count`."""
        args, kwargs = mapped((self.args, self.kwargs), Result, lambda result: Result(result.output + count))
        return dataclasses.replace(self, args=args, kwargs=kwargs)


@dataclasses.dataclass(frozen=True, slots=True)
class LateUpdate:
    """A tensor that a backward writes to: `output`, of `BackwardEffects.outputs`, holds its new value.

    `live`: its position in `BackwardEffects.live`; None for a tangent; then `tangent` is its position. `counted`: the
    write moves the version counter.
    """

    output: int
    live: int | None
    tangent: int = 0
    counted: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class WrappedGradient:
    """The gradient of a plain input that is a wrapper subclass of kind `spec`; `outputs`, positions in
    `BackwardEffects.outputs`, are its plain tensors.
    """

    input: int
    spec: Any
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardEffects:
    """Effects of a backward besides gradients that are plain tensors.

    `outputs`: outputs of the joint graph after the gradients. `checks` run on these. `generators`: the generators that
    the backward draws from, if a check may fail. `live`: the inputs that it writes to; after the tangents the joint
    graph takes their contents at the time of the backward. `once`: the reason why it can't run a second time, if it
    writes to tensors that the forward made. `wrapped`: the gradients that are wrapper subclasses.
    """

    outputs: tuple[Slot, ...] = ()
    checks: tuple[CheckInfo, ...] = ()
    generators: tuple[Any, ...] = ()
    live: tuple[int, ...] = ()
    updates: tuple[LateUpdate, ...] = ()
    once: str = ""
    wrapped: tuple[WrappedGradient, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.outputs or self.live or self.once)


class CheckFailed(Exception):  # noqa: N818
    """A check failed in the call that is captured; `error` is its exception. Never leaves a public function."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
