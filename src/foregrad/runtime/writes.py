"""Writes of a call and of its backward, into tensors and the program's objects: lines, and functions called there."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from .._torch import engine
from .._torch.tensors import is_view
from ..errors import UnsupportedMutationError
from ..frontend.openings import opener
from ..graph.effect_log import CheckInfo, Write
from ..graph.meta import TensorSpec
from ..graph.signature import Signature
from ..graph.source import Names, unpacked
from .decisions import check_arguments, generator_lines, one_call
from .lines import LineWriter, op_name


def write_with_history(target: torch.Tensor, value: torch.Tensor) -> None:
    """`target` takes the elements and the autograd history of `value`.

    Its earlier history is an input of the autograd node already: a copy would also send it zeros.
    """
    if not is_view(target) and not target.retains_grad:
        target.detach_()
    target.copy_(value)


def write_overlapping(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy into a tensor with elements that overlap in memory; overlapping elements of `value` are equal."""
    for dim in range(target.dim()):
        if target.stride(dim) == 0 and target.size(dim) > 1:
            target, value = target.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    if TensorSpec.of(target).overlaps_itself:
        for part, new in zip(target.unbind(0), value.unbind(0), strict=True):
            write_overlapping(part, new)
    else:
        target.copy_(value)


class _History(torch.autograd.Function):
    """Tensors that require grad and are no leaves, with gradients that go nowhere."""

    @staticmethod
    def forward(
        ctx: Any, nobody: torch.Tensor, tensors: list[torch.Tensor], error: Exception | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.error = error
        return tuple(tensor.data for tensor in tensors)  # without their view relations

    @staticmethod
    def backward(ctx: Any, *gradients: object) -> tuple[None, None, None]:
        if ctx.error is not None:
            raise type(ctx.error)(*ctx.error.args)
        return None, None, None


_history = engine.direct_apply(_History)
_nobody = torch.empty(0, requires_grad=True)


def with_history(tensors: list[torch.Tensor], error: Exception | None = None) -> tuple[torch.Tensor, ...]:
    """The tensors as results of a differentiable operator without a path to any input.

    `error`: the exception of their backward.
    """
    result: tuple[torch.Tensor, ...] = _history(_nobody, tensors, error)
    return result


# ------------------------------------------------------------------------------------------------ writes of a backward
# Lines for the effects of a backward besides gradients: its checks, then its writes, after it has run.


class EffectLines(LineWriter):
    """The lines of one node's backward, and their globals."""

    def __init__(self, signature: Signature, names: Names, globals: dict[str, object], tangents: list[str]) -> None:
        super().__init__(names)
        self.signature, self.effects, self.tangents = signature, signature.backward, tangents
        self.globals = globals
        self.results = [names.fresh(f"effect_{i + 1}") for i in range(len(self.effects.outputs))]
        self.save, self.undo = generator_lines(self.effects.generators, self.bind)
        self.wrapped = {one.input: names.fresh(f"grad_{one.input + 1}") for one in self.effects.wrapped}
        self.live = [names.fresh(f"live_{i + 1}") for i in range(len(self.effects.live))]

    def first(self) -> list[str]:
        """Lines at the beginning of every backward."""
        if not self.effects.once:
            return []
        once = self.bind("refuse_again", _refusing(self.effects.once))
        return ["if hasattr(ctx, 'has_run'):", f"    {once}()", "ctx.has_run = True"]

    def before(self) -> list[str]:
        """Lines before the graph."""
        live = [f"{unpacked(self.live)}ctx.live"] if self.live else []
        return [*live, *self.save]

    def after(self) -> list[str]:
        """Lines after the graph."""
        lines = [line for check in self.effects.checks for line in self._check(check)]
        for update in self.effects.updates:
            if update.live is None:
                target, spec = self.tangents[update.tangent], self.signature.gradients.tangent_specs[update.tangent]
            else:
                target, spec = self.live[update.live], self.signature.inputs[self.effects.live[update.live]].spec
            lines.append(update_line(self, target, self.results[update.output], spec, counted=update.counted))
        for gradient in self.effects.wrapped:
            parts = ", ".join(self.results[output] for output in gradient.outputs)
            make = self.bind("wrap", functools.partial(opener().rebuilt, gradient.spec))
            lines.append(f"{self.wrapped[gradient.input]} = {make}([{parts}])")
        return lines

    def _check(self, check: CheckInfo) -> list[str]:
        op = self.bind(op_name(check.op), check.op)
        return one_call(op, check_arguments(self, check, (), self.results), check, self.undo)


def update_line(writer: LineWriter, target: str, value: str, spec: TensorSpec, *, counted: bool) -> str:
    """A write to a tensor: autograd sees only its version."""
    # Neither counts as a write to a leaf; `detach` shares the version counter, `data` does not.
    hidden = f"{target}.{'detach()' if counted else 'data'}"
    if spec.overlaps_itself:
        return f"{writer.bind('write_overlapping', write_overlapping)}({hidden}, {value})"
    return f"{hidden}.copy_({value})"


def graph_arguments(names: Sequence[str], forward: object, updates: Iterable[Write]) -> str:
    """A graph's arguments, without gradients, as a list. It writes to an input whose version stays through `data`."""
    done = {number for number, _ in getattr(forward, "updated", ())}
    hidden = done & {update.input for update in updates if not update.counted}
    return f"[{', '.join([f'{name}.data' if i in hidden else name for i, name in enumerate(names)])}]"


def _refusing(message: str) -> Any:
    def refuse_again() -> None:
        raise UnsupportedMutationError(message)

    return refuse_again
