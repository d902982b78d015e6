"""`Plan`: the foreseen memory and time. A plan prints, is saved as a page, and finds the largest batch."""

from __future__ import annotations

import dataclasses
import html
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from ..errors import PlanError
from ..partitioners import Table, in_bytes
from .allocator import Reserved
from .choices import Choice
from .devices import Device
from .memory import Standing, StepMemory
from .optimizers import Optimizer
from .ranks import CollectiveCost, Ranks
from .replay import reserved_by
from .step import TrainingStep, step_of


@dataclasses.dataclass(frozen=True, slots=True)
class Recipe:
    """What is planned, apart from the arguments of the call. `only`: the choices that are made; None for all."""

    function: Any
    optimizer: Any
    device: Device
    budget: Any
    ranks: Ranks
    policies: dict[str, Any]
    sizes: dict[str, Any]
    only: tuple[str, ...] | None = None

    def makes(self, choice: str) -> bool:
        return self.only is None or choice in self.only

    def step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> TrainingStep:
        """The step for these arguments, captured."""
        return step_of(self.function, args, kwargs, is_accelerator=self.device.is_accelerator, sizes=self.sizes)


@dataclasses.dataclass(frozen=True, slots=True)
class Tally:
    """Operations, bytes moved, and seconds."""

    flops: int
    moved: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Largest:
    """The largest batch that fits. `size`: the batch; `choice`: the one that fits there; `peak`: its bytes; `tried`:
    each size that was looked at, with the least peak (None where no split keeps to the limit) and whether it fits;
    `captures`: how many were made.
    `why_captured`: where the model takes no symbols for these sizes, the reason; each size is captured by itself then.
    """

    size: int
    choice: str
    peak: int
    under: int
    tried: tuple[tuple[int, int | None, bool], ...]
    captures: int = 0
    why_captured: str = ""

    def __str__(self) -> str:
        return f"{self.size}, by {self.choice!r}: {in_bytes(self.peak)} of {in_bytes(self.under)}"


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """The memory and time of a training step of one rank, in bytes and seconds.

    `standing`: bytes in use all the time. `choices`: the ways to train, a `Choice` each. `modules`: work by module,
    numbers in paths left out. `total`: the work of a step that computes nothing twice. `budget`: the bytes that a
    rank may have alive; None where the device's memory is not known.

    Examples:
        >>> import torch, foregrad
        >>> with torch.device("meta"):
        ...     model, x = torch.nn.Linear(1024, 1024), torch.empty(64, 1024)
        >>> plan = foregrad.plan(model, x, optimizer="AdamW", device="l4")
        >>> plan.best.name, plan.standing.optimizer == 2 * plan.standing.parameters
        ('save all', True)
    """

    name: str
    device: Device
    ranks: Ranks
    budget: int | None
    standing: Standing
    optimizer: Optimizer
    choices: tuple[Choice, ...]
    modules: Mapping[str, Tally]
    collectives: tuple[CollectiveCost, ...]
    total: Tally
    layers: int
    trained: int
    call: tuple[Recipe, tuple[Any, ...], dict[str, Any]]

    @property
    def fitting(self) -> tuple[Choice, ...]:
        """The choices that keep to the budget, the quickest first."""
        fits = [one for one in self.choices if one.fits(self.budget)]
        return tuple(sorted(fits, key=lambda one: (one.seconds, one.peak)))

    @property
    def best(self) -> Choice | None:
        """The quickest choice that fits; None if none does."""
        return self.fitting[0] if self.fitting else None

    def choice(self, name: str) -> Choice:
        """The choice called `name`. Raises `KeyError` for an unknown name."""
        found = next((one for one in self.choices if one.name == name), None)
        if found is None:
            raise KeyError(f"there is no choice {name!r}: there are {', '.join(one.name for one in self.choices)}")
        return found

    def standing_rows(self) -> list[tuple[str, int]]:
        """The bytes in use all the time, by kind, without zeros."""
        stands = self.standing
        rows = [
            ("parameters" if self.ranks.fsdp == 1 else "shards of parameters", stands.parameters),
            ("buffers", stands.buffers),
            ("arguments", stands.arguments),
            (f"state of {self.optimizer.name}", stands.optimizer),
            ("buckets of gradients", stands.buckets),
        ]
        return [(name, count) for name, count in rows if count]

    def reserved(self, choice: str | None = None, *, expandable: bool = False) -> Reserved:
        """The bytes that CUDA's caching allocator reserves, with the peak allocated: the allocations of three steps in
        their order, by the allocator's rules (`foregrad.planning.allocator`). The CUDA context and NCCL's buffers come
        beside.

        `choice`: the name of a choice; None for the quickest that fits. `expandable`: as with
        `PYTORCH_ALLOC_CONF=expandable_segments:True`. Raises `KeyError` for an unknown choice, `PlanError` for
        one that does not exist for this model.
        """
        return reserved_by(self._memory(choice).script, self.standing.pieces, self.optimizer, expandable=expandable)

    def in_flight(self, micro_batches: int, choice: str | None = None) -> int:
        """The peak in bytes of a pipeline's stage, of a plan for one micro-batch: so many micro-batches are between
        forward and backward, and hold arguments and saved values; gradients add up beside.

        Of `stages` with `n` micro-batches, the stage `at` (from 0) has `min(stages - at, n)` in flight by 1F1B, and
        `n` by GPipe. Raises `KeyError` and `PlanError` as `reserved`, and `PlanError` for a number below one, and for
        shards, since schedules differ in the moments of their gathers.
        """
        memory = self._memory(choice)
        is_count = isinstance(micro_batches, int) and micro_batches > 0
        if not is_count or self.ranks.fsdp > 1:
            raise PlanError(
                f"at least one micro-batch is in flight, not {micro_batches}"
                if not is_count
                else f"a pipeline's stage on {self.ranks} is not planned: plan it without shards"
            )
        *step, last = memory.alive
        waiting = (micro_batches - 1) * (memory.saved + self.standing.arguments)
        return max(max(step) + waiting + memory.gradients, last)

    def _memory(self, choice: str | None) -> StepMemory:
        one = self.best if choice is None else self.choice(choice)
        if one is None or one.memory is None:
            raise PlanError("no choice fits" if one is None else f"there is no {one.name!r}: {one.why_not}")
        return one.memory

    def largest(self, *, batch: Any = 0, under: int | str | None = None, choice: str | None = None) -> Largest:
        """The largest batch that fits, found from a capture with symbols; see `foregrad.planning.largest`."""
        from .largest import largest_of

        return largest_of(self, batch=batch, under=under, choice=choice)

    def table(self, *, batch: Any, sequence: Any, choice: str | None = None) -> Table:
        """Peaks by batch and sequence; see `foregrad.planning.largest`."""
        from .largest import table_of

        return table_of(self, batch=batch, sequence=sequence, choice=choice)

    def __str__(self) -> str:
        from .text import text

        return text(self)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_json(self, **settings: Any) -> str:
        """The plan as JSON, sizes in bytes and times in seconds. `settings`: those of `json.dumps`."""
        return json.dumps(self.to_data(), **settings)

    def to_data(self) -> dict[str, Any]:
        """The plan as plain values."""
        best = self.best
        return {
            "name": self.name,
            "device": {**dataclasses.asdict(self.device), "flops": dict(self.device.flops)},
            "ranks": {"dp": self.ranks.dp, "fsdp": self.ranks.fsdp, "tp": self.ranks.tp},
            "budget": self.budget,
            "trained": self.trained,
            "standing": {name: count for name, count in dataclasses.asdict(self.standing).items() if name != "pieces"},
            "optimizer": {n: getattr(self.optimizer, n) for n in ("name", "state", "workspace", "moved")},
            "total": dataclasses.asdict(self.total),
            "modules": {path: dataclasses.asdict(tally) for path, tally in self.modules.items()},
            "collectives": [dataclasses.asdict(one) for one in self.collectives],
            "choices": [_choice_data(one, self.budget) for one in self.choices],
            "best": None if best is None else best.name,
        }

    def save(self, path: Any) -> pathlib.Path:
        """Write the plan as one HTML file, and return its path."""
        from .page import page

        target = pathlib.Path(path)
        target.write_text(page(self), encoding="utf-8")
        return target


def _choice_data(one: Choice, budget: int | None) -> dict[str, Any]:
    data: dict[str, Any] = {"name": one.name, "why_not": one.why_not}
    if one.memory is not None:
        memory = one.memory
        data |= {
            "peak": memory.peak,
            "peak_at": memory.peak_at,
            "fits": one.fits(budget),
            "saved": memory.saved,
            "gradients": memory.gradients,
            "away": one.away,
            "again_flops": one.again_flops,
            "seconds": one.seconds,
            "at_peak": [dataclasses.asdict(alive) for alive in memory.at_peak],
        }
    return data
