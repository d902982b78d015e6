"""What a graph can't hold: operators without results, which the runtime runs on what the graph computed."""

from __future__ import annotations

import dataclasses
from typing import Any

from .._torch.codegen import OpOverload
from .slots import Slot

__all__ = ["BackwardEffects", "CheckFailed", "CheckInfo", "Given", "LateUpdate", "Result", "WrappedGradient"]


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
    """An operator that returns nothing and writes to nothing: it raises, or does something besides computing.

    `args` and `kwargs` hold `Given` and `Result` in the place of tensors. It runs behind the first `after` decisions
    and before the others; `where` is the user's line.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    where: str
    after: int = 0

    @property
    def only_raises(self) -> bool:
        """Whether it may run twice: an operator of PyTorch's own or a check of ours, not one of the user's."""
        return not isinstance(self.op, OpOverload) or self.op.namespace == "aten"

    def behind(self, count: int) -> CheckInfo:
        """The check with its outputs moved behind `count` others."""

        def moved(value: Any) -> Any:
            if isinstance(value, Result):
                return Result(value.output + count)
            if isinstance(value, (list, tuple)):
                return type(value)(map(moved, value))
            return value

        kwargs = tuple((key, moved(value)) for key, value in self.kwargs)
        return dataclasses.replace(self, args=tuple(map(moved, self.args)), kwargs=kwargs)


@dataclasses.dataclass(frozen=True, slots=True)
class LateUpdate:
    """A tensor that a backward writes to: `output`, of `BackwardEffects.outputs`, holds its new value.

    `live`: its position in `BackwardEffects.live`; None for a tangent, which then is that at position `tangent`.
    `counted`: the write moves the version counter.
    """

    output: int
    live: int | None
    tangent: int = 0
    counted: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class WrappedGradient:
    """The gradient of a plain input that is a wrapper subclass: `spec` says of what kind, `outputs`, of
    `BackwardEffects.outputs`, are its plain tensors.
    """

    input: int
    spec: Any
    outputs: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class BackwardEffects:
    """What a backward does besides giving gradients that are plain tensors.

    `outputs`: of the joint graph, behind the gradients. `checks` run on these. `generators`: what the backward draws
    from, where a check may fail. `live`: the inputs that it writes to; the joint graph takes what these hold when the
    backward runs behind the tangents. `once`: why it can't run a second time, where the forward has made tensors that
    it writes to. `wrapped`: the gradients that are wrapper subclasses.
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
    """A check fails in the very call that is captured; `error` is what it raised. Leaves no public function."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
