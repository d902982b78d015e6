"""The backward of one capture: which outputs have gradients, which inputs those go to, and what leads nowhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from ...graph.signature import GradientPaths
from ..effects.analysis import Analysis
from ..heap.records import InputRecord
from ..recorder.recorder import Recorder
from ..tape.tape import Entry
from .backward import Backward, takes_gradient
from .session import make_tangent

__all__ = ["Differentiated", "differentiate"]


@dataclasses.dataclass(frozen=True, slots=True)
class Differentiated:
    """`outputs`: those of the graph that have a gradient, each with its tangent; `rootless`: those whose gradient leads
    nowhere. `gradients`: an entry, or None, for each input. `reached`: by key of an input, see `Backward.reached`.
    `late`: inputs whose gradients look like what they are after the call, see `AttachNode`.
    """

    outputs: list[int]
    rootless: list[int]
    tangents: list[tuple[torch.Tensor, Entry]]
    gradients: list[Entry | None]
    reached: dict[int, GradientPaths]
    late: frozenset[int] = frozenset()

    def parted(self, backward: Backward, analysis: Analysis) -> Differentiated:
        """Tell outputs apart whose gradient leads nowhere."""
        nowhere = backward.leading_nowhere(self.outputs, self.gradients, self.reached, self.tangents)
        if not nowhere:
            return self
        backward.to_nowhere({i: analysis.fakes[i] for i in nowhere}, list(nowhere.values()))
        kept = [k for k, i in enumerate(self.outputs) if i not in nowhere]
        backward.run.keep_tangents(kept)
        reached = {key: reach.of_outputs(kept) for key, reach in self.reached.items()} if len(kept) > 1 else {}
        outputs, tangents = [self.outputs[k] for k in kept], [self.tangents[k] for k in kept]
        return Differentiated(outputs, list(nowhere), tangents, self.gradients, reached)


def differentiate(
    recorder: Recorder, records: Sequence[InputRecord], backward: Backward, analysis: Analysis, *, keep: bool
) -> Differentiated:
    """Run the backward on fakes. `keep`: what it takes to differentiate that again."""
    outputs = analysis.carrying_gradients()
    with_history = [fake for fake in analysis.fakes if fake is not None]
    tangents = [make_tangent(recorder, analysis.specs[i]) for i in outputs]
    reached = backward.reached(with_history)
    sinks = [record for record in records if takes_gradient(record)]
    gradients: dict[int, Any] = {}
    if outputs and sinks:
        gradients = backward.gradients([analysis.fakes[i] for i in outputs], sinks, [f for f, _ in tangents], keep=keep)
        backward.raising |= {outputs[position]: error for position, error in backward.aside.items()}
    return Differentiated(outputs, [], tangents, [gradients.get(id(record)) for record in records], reached)
