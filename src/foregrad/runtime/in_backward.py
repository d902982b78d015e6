"""Lines for the effects of a backward besides gradients: its checks, then its writes, after it has run."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from ..errors import UnsupportedMutationError
from ..graph.effect_log import Write
from ..graph.effects import CheckInfo
from ..graph.meta import TensorSpec
from ..graph.signature import Signature
from ..graph.source import Names, unpacked
from ..subclasses.spec import rebuilt
from .decisions import check_arguments, generator_lines, one_call
from .lines import LineWriter, op_name
from .writes import write_overlapping


class EffectLines(LineWriter):
    """The lines of one node's backward, and the globals that they use."""

    def __init__(self, signature: Signature, names: Names, globals: dict[str, Any], tangents: list[str]) -> None:
        super().__init__(names)
        self.signature, self.effects, self.tangents = signature, signature.in_backward, tangents
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
                target, spec = self.tangents[update.tangent], self.signature.tangent_specs[update.tangent]
            else:
                target, spec = self.live[update.live], self.signature.inputs[self.effects.live[update.live]].spec
            lines.append(update_line(self, target, self.results[update.output], spec, counted=update.counted))
        for gradient in self.effects.wrapped:
            parts = ", ".join(self.results[output] for output in gradient.outputs)
            make = self.bind("wrap", functools.partial(rebuilt, gradient.spec))
            lines.append(f"{self.wrapped[gradient.input]} = {make}([{parts}])")
        return lines

    def _check(self, check: CheckInfo) -> list[str]:
        op = self.bind(op_name(check.op), check.op)
        return one_call(op, check_arguments(self, check, (), self.results), check, self.undo)


def update_line(writer: LineWriter, target: str, value: str, spec: TensorSpec, *, counted: bool) -> str:
    """A write to a tensor of which autograd sees only the version."""
    # Neither counts as a write to a leaf; `detach` shares the version counter, `data` does not.
    hidden = f"{target}.{'detach()' if counted else 'data'}"
    if spec.overlaps_itself:
        return f"{writer.bind('write_overlapping', write_overlapping)}({hidden}, {value})"
    return f"{hidden}.copy_({value})"


def graph_arguments(names: Sequence[str], forward: Any, updates: Iterable[Write]) -> str:
    """The list that a graph without gradients is given. It writes to an input whose version stays through `data`."""
    done = {number for number, _ in getattr(forward, "updated", ())}
    hidden = done & {update.input for update in updates if not update.counted}
    return f"[{', '.join([f'{name}.data' if i in hidden else name for i, name in enumerate(names)])}]"


def _refusing(message: str) -> Any:
    def refuse_again() -> None:
        raise UnsupportedMutationError(message)

    return refuse_again
