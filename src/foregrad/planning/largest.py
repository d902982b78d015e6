"""The largest batch that fits, and peaks by batch and sequence.

The model is captured once with symbols for the sizes asked for, so each storage's bytes is an expression, and the plan
at other sizes takes their values. A size that the graph's own conditions leave out (0 and 1 always) is captured
by itself, and so is every size of a model that takes no symbols there: `Largest.why_captured` has the reason.

The bytes at each operator are a line over the batch as long as the split and its order are the same, so two sizes say
at which size an operator meets the limit; that size is looked at too, and the next above. The answer is always
a size that fits below a size that does not: where lines mislead (a split, or an order, that depends on the size), more
sizes are looked at, in the end by halves.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._torch.fakes import FakeTensor, without_fake_mode
from .._torch.nested import leaves, mapped
from ..dispatch.varying import mark_dynamic
from ..errors import BudgetError, PlanError, UnsupportedError, first_line
from ..partitioners import Table, in_bytes
from .devices import bytes_of
from .planner import make_plan, plan_of
from .result import Largest, Plan, Recipe
from .step import TrainingStep
from .symbols import values_in

if TYPE_CHECKING:
    from .choices import Choice

_MOST = 1 << 24  # the search ends at this size

_OTHERS = ("budget", "eager")  # never of the least peak

Sizes = tuple[int, ...]


def largest_of(plan: Plan, *, batch: Any, under: int | str | None, choice: str | None) -> Largest:
    """The largest batch with a peak of at most `under`.

    `batch`: the dimension of the arguments that is the batch: a number for all tensors among the arguments that are
    as long there as the first one; a tuple of that number and the positions or names of the arguments that have it; or
    a dict of dimensions by position or name. `under`: bytes, text, a share of the device's memory; None for the plan's
    budget. `choice`: the name of a choice; None for whichever needs least.

    Raises `PlanError` for a dimension that is not there, `BudgetError` where no batch fits.
    """
    limit = _limit(plan, under)
    peaks = _Peaks(plan, [_axis(plan, batch, "batch")], choice, limit)
    tried: dict[int, tuple[int | None, bool]] = {}

    def fits(size: int) -> bool:
        peak = peaks.captured((size,))[1] if peaks.exists((size,)) else None
        tried[size] = peak, peak is not None and peak <= limit
        return tried[size][1]

    if not fits(1):
        least = peaks.why_not((1,))
        if not least:
            name, peak = peaks.captured((1,))
            least = f"the least peak is {in_bytes(peak)} ({peak} bytes), by {name!r}"
        raise BudgetError(
            f"not even a batch of one fits: {in_bytes(limit)} can't be met by `{plan.name}`; {least}. Raise the limit, "
            "or train on more ranks (mesh=)."
        )
    size = _found(peaks, limit, fits)
    name, peak = peaks.captured((size,))
    found = tuple((s, *found) for s, found in sorted(tried.items()))
    return Largest(size, name, peak, limit, found, peaks.captures, peaks.why_captured)


def table_of(plan: Plan, *, batch: Any, sequence: Any, choice: str | None) -> Table:
    """Peaks by batch and sequence: `batch` and `sequence` are each (dimension as in `largest`, sizes to show)."""
    if any(not isinstance(pair, tuple) or len(pair) != 2 for pair in (batch, sequence)):
        raise PlanError("batch and sequence of a table are pairs: a dimension, and the sizes to show: (0, [1, 2])")
    (batch_at, batches), (sequence_at, lengths) = batch, sequence
    if wrong := [size for size in (*batches, *lengths) if not isinstance(size, int) or size < 1]:
        raise PlanError(f"the sizes of a table are integers from 1 on, not {wrong[0]!r}")
    axes = [_axis(plan, batch_at, "batch"), _axis(plan, sequence_at, "sequence")]
    peaks = _Peaks(plan, axes, choice, plan.budget)
    rows = []
    for size in batches:
        found = [peaks.captured(at)[1] if peaks.exists(at) else None for at in ((size, length) for length in lengths)]
        marks = ["" if plan.budget is None or (peak and peak <= plan.budget) else " !" for peak in found]
        shown = ["none" if peak is None else in_bytes(peak) for peak in found]
        rows.append([str(size), *(f"{peak}{mark}" for peak, mark in zip(shown, marks, strict=True))])
    columns = ("batch", *map(str, lengths))
    above = "" if plan.budget is None else f" (! is above {in_bytes(plan.budget)})"
    return Table(f"peak of {plan.name} by batch and sequence{above}", columns, rows, right=len(columns))


def _limit(plan: Plan, under: Any) -> int:
    if under is None:
        if plan.budget is None:
            raise PlanError("give the memory limit for the largest: under='80 GiB'")
        return plan.budget
    return bytes_of(under, plan.device)


@dataclasses.dataclass(frozen=True, slots=True)
class _Axis:
    """One size of the arguments: the dimension of each tensor that has it, by the tensor's place among all."""

    dimensions: Mapping[int, int]
    size: int


def _axis(plan: Plan, asked: Any, what: str) -> _Axis:
    _, args, kwargs = plan.call
    tensors = [(at, name, t) for at, (name, t) in enumerate(_tensors(args, kwargs))]
    if isinstance(asked, Mapping):
        chosen = [(at, t, asked[name]) for at, name, t in tensors if name in asked]
    else:
        dimension, *named = asked if isinstance(asked, tuple) and asked else (asked,)
        if not isinstance(dimension, int):
            raise PlanError(f"the {what} is a dimension, a tuple that begins with one, or a dict, not {asked!r}")
        chosen = [(at, t, dimension) for at, name, t in tensors if name in named or not named]
        if not named:
            chosen = [(at, t, d) for at, t, d in chosen if -t.dim() <= d < t.dim()]
            chosen = [(at, t, d) for at, t, d in chosen if t.shape[d] == chosen[0][1].shape[d]]
    if not chosen or any(not -t.dim() <= d < t.dim() for _, t, d in chosen):
        raise PlanError(f"no argument has the dimension {asked!r}, named as the {what}")
    if len({t.shape[d] for _, t, d in chosen}) > 1:
        raise PlanError(f"the sizes of the arguments differ in the dimension {asked!r}, named as the {what}")
    return _Axis({at: d for at, _, d in chosen}, chosen[0][1].shape[chosen[0][2]])


def _tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> list[tuple[Any, torch.Tensor]]:
    """The tensors among the arguments, each with the position or name of its argument."""
    named: list[tuple[Any, Any]] = [*enumerate(args), *kwargs.items()]
    return [(name, leaf) for name, value in named for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


class _Peaks:
    """Peaks of one plan at other sizes, each found once. `captures`: those made for it; `why_captured`: the reason
    against symbols for these sizes; "" where it does.
    """

    def __init__(self, plan: Plan, axes: Sequence[_Axis], choice: str | None, limit: int | None) -> None:
        if choice is not None and choice != "budget":
            plan.choice(choice)  # it raises
        self.plan, self.axes, self.choice, self.limit = plan, axes, choice, limit
        self._plans: dict[Sizes, Plan] = {}
        if choice != "budget":
            self._plans[tuple(axis.size for axis in axes)] = plan
        self._step: TrainingStep | None = None
        self.captures, self.why_captured = 0, ""

    def plan_at(self, sizes: Sizes) -> Plan:
        if sizes not in self._plans:
            names = [one.name for one in self.plan.choices if one.name not in _OTHERS]
            only = tuple(names) if self.choice is None else (self.choice,)
            recipe = dataclasses.replace(self.plan.call[0], budget=self.limit, only=only)
            with without_fake_mode():
                self._plans[sizes] = self._by_symbols(recipe, sizes) or self._by_capture(recipe, sizes)
        return self._plans[sizes]

    def _by_capture(self, recipe: Recipe, sizes: Sizes) -> Plan:
        _, args, kwargs = self.plan.call
        self.captures += 1
        return make_plan(recipe, *self._resized(args, kwargs, sizes))

    def _by_symbols(self, recipe: Recipe, sizes: Sizes) -> Plan | None:
        """The plan by the one graph with symbols; None if it does not hold for these sizes, or there is none."""
        step = self._symbolic(recipe)
        if step is None:
            return None
        _, args, kwargs = self.plan.call
        args, kwargs = self._resized(args, kwargs, sizes, absent=True)
        values = values_in(step.joint, [*leaves((args, kwargs))])
        return None if values is None else plan_of(recipe, step.at(recipe.function, values, args, kwargs), args, kwargs)

    def _symbolic(self, recipe: Recipe) -> TrainingStep | None:
        if self._step is None and not self.why_captured:
            _, args, kwargs = self.plan.call
            sizes = tuple(max(2, axis.size) for axis in self.axes)
            args, kwargs = self._resized(args, kwargs, sizes, marked=True)
            self.captures += 1
            try:
                self._step = recipe.step(args, kwargs)
            except UnsupportedError as error:
                self.why_captured = first_line(error)
        return self._step

    def captured(self, sizes: Sizes) -> tuple[str, int]:
        """The choice that needs least at these sizes, and its peak."""
        found = [(one.memory.peak, one.name) for one in self.choices_at(sizes) if one.memory is not None]
        peak, name = min(found)
        return name, peak

    def exists(self, sizes: Sizes) -> bool:
        """Whether there is a choice at these sizes. Raises `PlanError` where no limit would make one."""
        found = self.choices_at(sizes)
        if self.choice != "budget" and all(one.memory is None for one in found):
            raise PlanError(f"there is no {self.choice!r} at a size of {sizes}: {found[0].why_not}")
        return any(one.memory is not None for one in found)

    def why_not(self, sizes: Sizes) -> str:
        """The reason for which the choice does not exist; "" where it does."""
        return self.choices_at(sizes)[0].why_not if self.choice == "budget" else ""

    def choices_at(self, sizes: Sizes) -> list[Choice]:
        found = self.plan_at(sizes).choices
        return [one for one in found if one.name == self.choice or (self.choice is None and one.name not in _OTHERS)]

    def _resized(self, args: Any, kwargs: Any, sizes: Sizes, *, marked: bool = False, absent: bool = False) -> Any:
        """The arguments at other sizes: zeros. `marked`: their sizes are to be symbols; `absent`: all are on `meta`."""
        at, made = iter(range(len(_tensors(args, kwargs)))), dict[int, torch.Tensor]()

        def other(tensor: torch.Tensor) -> torch.Tensor:
            number = next(at)
            pairs = zip(self.axes, sizes, strict=True)
            axes = [(axis.dimensions[number], size) for axis, size in pairs if number in axis.dimensions]
            if id(tensor) not in made:
                made[id(tensor)] = self._other(tensor, axes, marked=marked, absent=absent)
            return made[id(tensor)]

        return mapped(args, torch.Tensor, other), mapped(kwargs, torch.Tensor, other)

    @staticmethod
    def _other(tensor: torch.Tensor, axes: list[tuple[int, int]], *, marked: bool, absent: bool) -> torch.Tensor:
        if not axes and not absent:
            return tensor
        shape = list(tensor.shape)
        for dimension, size in axes:
            shape[dimension] = size
        device = torch.device("meta") if absent else tensor.device
        mode = tensor.fake_mode if isinstance(tensor, FakeTensor) and not absent else contextlib.nullcontext()
        with mode:
            made = torch.zeros(shape, dtype=tensor.dtype, device=device).requires_grad_(tensor.requires_grad)
        for dimension, _ in axes if marked else ():
            mark_dynamic(made, dimension)
        return made


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
    """The size where the lines through the captures at `low` and the size above it meet the limit."""
    found = [0]
    above = {one.name: one.memory for one in peaks.choices_at((low + 1,))}
    for one in peaks.choices_at((low,)):
        other = above.get(one.name)
        if one.memory is not None and other is not None and len(one.memory.alive) == len(other.alive):
            found.append(_meets(zip(one.memory.alive, other.alive, strict=True), low, limit))
    return min(_MOST, max(found))


def _meets(lines: Iterable[tuple[int, int]], low: int, limit: int) -> int:
    """The largest size where no operator's line is above the limit; each has a value at `low` and at `low + 1`."""
    size = _MOST
    for first, second in set(lines):
        slope = second - first
        if slope > 0:
            size = min(size, low + (limit - first) // slope)
        elif first > limit:
            size = 0
    return size
