"""Effects outside of a graph: operators without results, which the runtime runs on values that the graph computed."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._torch.codegen import OpOverload
from .._torch.nested import mapped
from .slots import Slot


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
    """An operator that returns nothing and writes to no tensor: it raises, or has another effect.

    `args` and `kwargs` hold `Given` and `Result` in place of tensors. The check runs after the first `after` decisions
    and before the others; `where` is the user's line.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    where: str
    after: int = 0

    @property
    def only_raises(self) -> bool:
        """Whether the check may run twice: an operator of PyTorch's or a check of foregrad's, not one of the user's."""
        return not isinstance(self.op, OpOverload) or (self.op.namespace == "aten" and self.op.name() != "aten::_print")

    def behind(self, count: int) -> CheckInfo:
        """The check with its outputs moved behind `count` others."""
        args, kwargs = mapped((self.args, self.kwargs), Result, lambda result: Result(result.output + count))
        return dataclasses.replace(self, args=args, kwargs=kwargs)


@dataclasses.dataclass(frozen=True, slots=True)
class LateUpdate:
    """A tensor that a backward writes to: `output`, of `BackwardEffects.outputs`, holds its new value.

    `live`: its position in `BackwardEffects.live`; None for a tangent, whose position is then `tangent`.
    `counted`: the write moves the version counter.
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
