"""The largest batch that fits, and peaks by batch and sequence.

The model is captured at other sizes of its arguments, which are on `meta`, or fakes, or zeros, as the arguments are.
The bytes at each operator are a line over the batch as long as the graph and its order are the same, so two captures
say at which size an operator meets the limit; that size is captured too, and the next one above it. The answer is
always a size that fits below a size that does not, both of them captured: where lines mislead (an order, or a kernel,
that depends on the size), more captures are made, in the end by halves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._torch.fakes import FakeTensor, without_fake_mode
from .._torch.nested import leaves, mapped
from ..errors import BudgetError, PlanError
from ..partitioners import Table, in_bytes
from .devices import bytes_of

if TYPE_CHECKING:
    from .choices import Choice
    from .result import Largest, Plan

_MOST = 1 << 24  # a size above which none is looked for

Sizes = tuple[int, ...]


def largest_of(plan: Plan, *, batch: Any, under: int | str | None, choice: str | None) -> Largest:
    """The largest batch whose peak is at most `under`.

    `batch`: the dimension of the arguments that is the batch: a number for all tensors among the arguments that are
    as long there as the first one, or a tuple of that number and the positions or names of the arguments that have
    it. `under`: bytes, text, a share of the device's memory; None for the plan's budget. `choice`: the name of a
    choice; None for whichever needs least.

    Raises `PlanError` for a dimension that is not there, `BudgetError` where not even a batch of one fits.
    """
    from .result import Largest

    limit = _limit(plan, under)
    peaks = _Peaks(plan, [_axis(plan, batch, "batch")], choice)
    tried: dict[int, tuple[int, bool]] = {}

    def fits(size: int) -> bool:
        peak = peaks.captured((size,))[1]
        tried[size] = peak, peak <= limit
        return peak <= limit

    if not fits(1):
        name, peak = peaks.captured((1,))
        raise BudgetError(
            f"not even a batch of one fits: {in_bytes(limit)} can't be met by `{plan.name}`, whose least is "
            f"{in_bytes(peak)} ({peak} bytes), by {name!r}. Raise it, or train on more ranks (mesh=)."
        )
    size = _found(peaks, limit, fits)
    name, peak = peaks.captured((size,))
    return Largest(size, name, peak, limit, tuple((s, *found) for s, found in sorted(tried.items())))


def table_of(plan: Plan, *, batch: Any, sequence: Any, choice: str | None) -> Table:
    """Peaks by batch and sequence: `batch` and `sequence` are each (dimension, sizes to show)."""
    (batch_at, batches), (sequence_at, lengths) = batch, sequence
    axes = [_axis(plan, batch_at, "batch"), _axis(plan, sequence_at, "sequence")]
    peaks = _Peaks(plan, axes, choice)
    rows = []
    for size in batches:
        found = [peaks.captured((size, length))[1] for length in lengths]
        marks = ["" if plan.budget is None or peak <= plan.budget else " !" for peak in found]
        rows.append([str(size), *(f"{in_bytes(peak)}{mark}" for peak, mark in zip(found, marks, strict=True))])
    columns = ("batch", *map(str, lengths))
    above = "" if plan.budget is None else f" (! is above {in_bytes(plan.budget)})"
    return Table(f"peak of {plan.name} by batch and sequence{above}", columns, rows, right=len(columns))


def _limit(plan: Plan, under: Any) -> int:
    if under is None:
        if plan.budget is None:
            raise PlanError("say under which memory the largest is asked for: under='80 GiB'")
        return plan.budget
    return bytes_of(under, plan.device)


@dataclasses.dataclass(frozen=True, slots=True)
class _Axis:
    """A dimension of some of the arguments, which are as long there as each other."""

    dimension: int
    places: frozenset[int]
    size: int


def _axis(plan: Plan, asked: Any, what: str) -> _Axis:
    dimension, *named = asked if isinstance(asked, tuple) else (asked,)
    _, args, kwargs = plan.call
    tensors = [(at, name, t) for at, (name, t) in enumerate(_tensors(args, kwargs))]
    if named:
        chosen = [(at, t) for at, name, t in tensors if name in named]
    else:
        chosen = [(at, t) for at, _, t in tensors if -t.dim() <= dimension < t.dim()]
        chosen = [(at, t) for at, t in chosen if t.shape[dimension] == chosen[0][1].shape[dimension]]
    if not chosen or any(not -t.dim() <= dimension < t.dim() for _, t in chosen):
        raise PlanError(f"no argument has the dimension {asked!r}, which is to be the {what}")
    if len({t.shape[dimension] for _, t in chosen}) > 1:
        raise PlanError(
            f"the arguments {named} are not of one size in dimension {dimension}, which is to be the {what}"
        )
    return _Axis(dimension, frozenset(at for at, _ in chosen), chosen[0][1].shape[dimension])


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, torch.Tensor]]:
    """The tensors among the arguments, each with the position or name of its argument."""
    named: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
    return [(name, leaf) for name, value in named for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


class _Peaks:
    """Peaks of one plan at other sizes, by captures, each made once."""

    def __init__(self, plan: Plan, axes: Sequence[_Axis], choice: str | None) -> None:
        if choice is not None:
            plan.choice(choice)  # which raises
        self.plan, self.axes, self.choice = plan, axes, choice
        self._plans: dict[Sizes, Plan] = {tuple(axis.size for axis in axes): plan}

    def plan_at(self, sizes: Sizes) -> Plan:
        if sizes not in self._plans:
            from .planner import make_plan

            recipe, args, kwargs = self.plan.call
            recipe = dataclasses.replace(recipe, budget=None, only=self.choice)
            with without_fake_mode():
                self._plans[sizes] = make_plan(recipe, *self._resized(args, kwargs, sizes))
        return self._plans[sizes]

    def captured(self, sizes: Sizes) -> tuple[str, int]:
        """The choice that needs least at these sizes, and its peak."""
        found = [(one.memory.peak, one.name) for one in self.choices_at(sizes) if one.memory is not None]
        if not found:
            raise PlanError(f"the choice {self.choice!r} does not exist at a size of {sizes}")
        peak, name = min(found)
        return name, peak

    def choices_at(self, sizes: Sizes) -> list[Choice]:
        return [one for one in self.plan_at(sizes).choices if self.choice in (None, one.name) and one.name != "budget"]

    def _resized(self, args: Any, kwargs: Any, sizes: Sizes) -> tuple[Any, Any]:
        at = iter(range(len(_tensors(args, kwargs))))

        def other(tensor: torch.Tensor) -> torch.Tensor:
            number, shape = next(at), list(tensor.shape)
            for axis, size in zip(self.axes, sizes, strict=True):
                if number in axis.places:
                    shape[axis.dimension] = size
            if shape == list(tensor.shape):
                return tensor
            mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
            with mode if mode is not None else torch.device(tensor.device):
                made = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
            return made.requires_grad_(tensor.requires_grad)

        return mapped(args, torch.Tensor, other), mapped(kwargs, torch.Tensor, other)


def _found(peaks: _Peaks, limit: int, fits: Callable[[int], bool]) -> int:
    """The largest size that fits, where one does: a size that fits below a size that does not, both captured. The next
    size to capture is where the lines of all operators through the last two say that it is.
    """
    (axis,) = peaks.axes
    low, high, size = 1, _MOST, max(2, axis.size)
    while low + 1 < high:
        size = min(max(size, low + 1), high - 1)
        if not fits(size):
            high = size
        elif not fits(size + 1):
            return size
        else:
            low = size + 1
        guess = _guessed(peaks, size, limit)
        size = guess if low <= guess < high else (low + min(high, 2 * low)) // 2
    return low


def _guessed(peaks: _Peaks, low: int, limit: int) -> int:
    """The size at which the lines through the captures at `low` and the size above it meet the limit."""
    found = [0]
    above = {one.name: one.memory for one in peaks.choices_at((low + 1,))}
    for one in peaks.choices_at((low,)):
        other = above.get(one.name)
        if one.memory is not None and other is not None and len(one.memory.alive) == len(other.alive):
            found.append(_meets(zip(one.memory.alive, other.alive, strict=True), low, limit))
    return min(_MOST, max(found))


def _meets(lines: Iterable[tuple[int, int]], low: int, limit: int) -> int:
    """The largest size at which no operator's line is above the limit; each has a value at `low` and at `low + 1`."""
    size = _MOST
    for first, second in set(lines):
        slope = second - first
        if slope > 0:
            size = min(size, low + (limit - first) // slope)
        elif first > limit:
            size = 0
    return size
