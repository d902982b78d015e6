"""`retain_grad()` on a result or an input: each compiled call makes it too.

Results computed inside from a tensor that retains its gradient are refused: that tensor would get no whole gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..._torch.ops import Args, Kwargs
from ...errors import UnsupportedSideEffectError
from ...graph.call_effects import EffectTarget, RetainGradient
from ...identity import IdSet
from ..aspect import Aspect, Row, Settled, aspect
from ..heap.recording import Host, Recording


@aspect
class RetainedGradients(Aspect):
    """The tensors of one run that `retain_grad()` was called on."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.retained: IdSet[torch.Tensor] = IdSet()

    def retain(self, function: Any, args: Args, kwargs: Kwargs) -> object:
        self.retained.add(args[0])
        return function(*args, **kwargs)

    functions: ClassVar[Mapping[Any, Row]] = {torch.Tensor.retain_grad: retain}

    def effects(self, run: Settled) -> list[RetainGradient]:
        records = [run.records[tensor] for tensor in self.retained if tensor in run.records]
        inputs = sorted(run.number[r] for r in records if r.real.requires_grad and not r.real.is_leaf)
        results = [i for i, t in enumerate(run.results) if t in self.retained and t not in run.records]
        inside = [run.interior(at) for at in results if run.interior(at)]
        if inside:
            names = ", ".join(run.paths[at] for at in results if run.interior(at))
            raise UnsupportedSideEffectError(
                f"`{run.name}` calls `retain_grad()` on the result {names}, and {inside[-1]}. Compile the part "
                "before and the part after as two functions, or take this gradient with torch.autograd.grad inside "
                "the function."
            )
        targets = [*(EffectTarget(i, is_input=True) for i in inputs), *map(EffectTarget, results)]
        return list(map(RetainGradient, targets))
