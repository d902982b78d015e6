"""What a capture is to do, and what its runs learn for the next run."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from ..frontend.objects import called_by_autograd
from ..identity import IdSet
from ..subclasses.conversion import Samples


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What a capture is to do.

    `higher_order`: keep what it takes to differentiate the function again. `around`: makes a context for each run of
    the function. `live_hooks`: hooks may stay Python functions that each call puts on its results.
    `takes_output`: what the function prints or logs is an effect, and not written now; `runs_regions`: an eager region
    is called now, and not refused.
    """

    name: str = "function"
    decompositions: Mapping[Any, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    higher_order: bool = True
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    live_hooks: bool = False
    takes_output: bool = False
    runs_regions: bool = True


@dataclasses.dataclass(slots=True)
class Learned:
    """What makes the next run another one.

    `shared_bases`, `whole`, `viewed` and `as_they_are`: see `Inputs`; `late`: see `BackwardWrites`. `containers`: the
    places of those that change how many items they have, and whether the function reads them, see `Journals`.
    `replays_views`: autograd replays the operators that made views; it does not once the sizes of tensors with
    gradients change in place.
    `regions`: custom Functions that use NumPy, which run as eager regions; `hooks`: see `EagerHooks`. `samples`: see
    `Wrappers`. `collectives_by_regions`: see `Collectives`. `imports`: see `FirstImports`.
    """

    shared_bases: IdSet[torch.Tensor] = dataclasses.field(default_factory=IdSet)
    whole: IdSet[torch.Tensor] = dataclasses.field(default_factory=IdSet)
    viewed: IdSet[torch.Tensor] = dataclasses.field(default_factory=IdSet)
    as_they_are: IdSet[torch.Tensor] = dataclasses.field(default_factory=IdSet)
    late: IdSet[torch.Tensor] = dataclasses.field(default_factory=IdSet)
    containers: dict[tuple[int, Any], bool] = dataclasses.field(default_factory=dict)
    replays_views: bool = True
    regions: set[Any] = dataclasses.field(default_factory=set)
    hooks: dict[Any, Any] = dataclasses.field(default_factory=dict)
    samples: Samples = dataclasses.field(default_factory=Samples)
    collectives_by_regions: bool = False
    imports: dict[str, bool] = dataclasses.field(default_factory=dict)

    @property
    def apart(self) -> list[Any]:
        """Functions that run as they are in each backward."""
        return [*called_by_autograd(self.regions), *self.hooks.values()]
