"""`foregrad.plan`: capture a step once, then foresee each choice of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .._torch.fakes import without_fake_mode
from ..errors import BudgetError, PartitionError, PlanError, headline
from ..graph.source import check_function
from ..partitioners import in_bytes
from . import choices
from ._torch import shard_of
from .asked import check_sizes
from .choices import Asked, Choice
from .devices import Shares, bytes_of, device_of
from .eager import Call, eager_of
from .links import summed
from .memory import Standing, memory_of
from .optimizers import Twin, optimizer_of
from .ranks import CollectiveCost, Ranks, Unit, collectives_of, ranks_in_module, seconds_of
from .result import Plan, Recipe, Tally
from .step import Held, TrainingStep, planned
from .work import Layers, by_module, layers_of, work_of


def plan(
    fn_or_module: Any,
    /,
    *args: Any,
    optimizer: Any = None,
    device: Any = None,
    budget: int | float | str | None = None,
    mesh: Any = None,
    shares: Mapping[str, float] | Shares | None = None,
    policies: Mapping[str, Any] | None = None,
    sizes: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Plan:
    """Estimate the memory and the time of a training step. No step runs, and the device need not exist.

    The model and its arguments may be real, fake, or on `meta`. If the device is an accelerator, attention and dropout
    use the accelerator's operators. The step is forward, backward and the optimizer's step. The loss is the result, its
    `loss`, or its only number with a gradient. A larger result gets a gradient of ones, and the plan no loss.

    Args:
        fn_or_module: the model or the function to train.
        *args: its positional arguments.
        optimizer: a class (`torch.optim.AdamW`), its name, a function of a list of parameters, or an optimizer over the
            model's parameters. One step of the optimizer on fake tensors shows its state. None: no optimizer.
        device: a name in `foregrad.planning.DEVICES`, "cpu", a `Device`, or a dict of its fields. None: "h100" if a
            tensor is on `meta` or an accelerator, else "cpu".
        budget: the bytes that a rank may have alive: an integer, text with a unit ("80 GiB"), or a share of the
            device's memory from 0.0 to 1.0. None: the device's memory.
        mesh: ranks that train together: `{"fsdp": 8}`, `{"dp": 4, "fsdp": 8}`, a `Ranks`, a number of FSDP ranks, or a
            `DeviceMesh`. Memory, time and arguments are a rank's.
        shares: the assumed fractions of the published peaks: `{"flops": 0.7, "bandwidth": 0.8, "link": 0.75}`.
        policies: more choices by name, each a partition or policy as for `foregrad.partition`.
        sizes: numbers that the model reads from tensors without values, by line, or how many elements a mask chooses
            there: `{"model.py:41": 128}`. If a number is missing, the error has the entry to add.
        **kwargs: its keyword arguments, but for the names above.

    Raises:
        PlanError: an unknown device, a mesh that is not planned, several results with gradients and none called
        `loss`, no parameter that requires gradients, an optimizer that needs values. BudgetError: no choice keeps to
        the budget; the message has the least budget and the values alive at the peak. UnsupportedDataDependentError:
        the model needs a number that `sizes` lacks.

    Examples:
        >>> import torch, foregrad
        >>> with torch.device("meta"):
        ...     model, x = torch.nn.Linear(1024, 1024), torch.empty(64, 1024)
        >>> found = foregrad.plan(model, x, optimizer="SGD", device="l4")
        >>> found.standing.parameters
        4198400
    """
    check_function(fn_or_module, "plan")
    on = device_of(_default_device(fn_or_module, args, kwargs) if device is None else device, shares)
    recipe = Recipe(
        fn_or_module,
        optimizer,
        on,
        budget,
        ranks_in_module(fn_or_module, mesh),
        _checked(policies or {}),
        check_sizes(sizes),
    )
    return make_plan(recipe, args, kwargs)


def _checked(policies: Any) -> dict[str, Any]:
    if not isinstance(policies, Mapping):
        raise PlanError(f'policies are partitions by name, {{"mine": "min_cut"}}, not {policies!r}')
    if taken := choices.NAMES & policies.keys():
        raise PlanError(f"{min(taken)!r} is a choice of each plan: give your policy a name of its own")
    return dict(policies)


def _default_device(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    from .._torch.nested import leaves

    state = [*fn.parameters()] if isinstance(fn, torch.nn.Module) else []
    tensors = [leaf for leaf in leaves((args, dict(kwargs), state)) if isinstance(leaf, torch.Tensor)]
    return "h100" if any(tensor.is_meta or tensor.device.type != "cpu" for tensor in tensors) else "cpu"


def make_plan(recipe: Recipe, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
    """The plan of a recipe for one call."""
    with planned(recipe.function):
        return plan_of(recipe, recipe.step(args, kwargs), args, kwargs)


def plan_of(recipe: Recipe, step: TrainingStep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
    """The plan of a recipe for a captured step."""
    with without_fake_mode(), planned(recipe.function):
        return _Planner(recipe, step).plan(args, kwargs)


_HALVINGS = 4  # each is a split and its memory


class _Planner:
    """Foresees the choices of one step. Used once."""

    def __init__(self, recipe: Recipe, step: TrainingStep) -> None:
        self.recipe, self.step, self.ranks = recipe, step, recipe.ranks
        self.work = work_of(step.joint, recipe.device, self.ranks.host)
        self.layers = layers_of(self.work.values())
        self.gathered = self._gathered() if self.ranks.units else self.layers
        self.parameters = step.of_kind("parameter")
        self._check_parts()
        trained = [one for one in self.parameters if one.has_gradient]
        twins = [_twin(one, self.ranks) for one in trained]
        self.optimizer = optimizer_of(recipe.optimizer, twins, is_accelerator=recipe.device.is_accelerator)
        self.units = _units(self.parameters, self.gathered, self.ranks)
        self.standing = self._standing()

    def plan(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Plan:
        recipe, step, device = self.recipe, self.step, self.recipe.device
        budget = self._budget()
        asked = choices.asked_of(step.joint, self.work, self.layers, has_host=device.is_accelerator)
        asked += [Asked(name, _split_by(policy)) for name, policy in recipe.policies.items()]
        found = [self._choice(one) for one in asked if recipe.makes(one.name)]
        if budget is not None and recipe.makes("budget"):
            found.insert(2, self._within(budget))
        if recipe.makes("eager"):
            found.append(self._eager((args, kwargs)))
        operators = [self.work[n.name] for n in step.joint.module.graph.nodes if n.name in self.work]
        total = Tally(
            sum(one.flops for one in operators),
            sum(one.moved for one in operators),
            sum(one.seconds for one in operators),
        )
        result = Plan(
            name=step.name,
            device=device,
            ranks=self.ranks,
            budget=budget,
            standing=self.standing,
            optimizer=self.optimizer,
            choices=tuple(found),
            modules={path: Tally(*entry) for path, entry in by_module(operators).items()},
            collectives=(*collectives_of(self.units, self.ranks, device), *self._inside()),
            total=total,
            layers=len(self.layers.paths),
            trained=sum(one.elements for one in self.parameters if one.has_gradient),
            call=(recipe, args, dict(kwargs)),
        )
        if recipe.budget is not None and recipe.only is None and not result.fitting:
            raise self._nothing_fits(result)
        return result

    def _gathered(self) -> Layers:
        """The modules that are gathered as one, by their paths in the step: a function has a name for the model."""
        known = {path for one in self.work.values() for path, _ in one.stack}
        units = [path for path in self.ranks.units if path]
        owns = [[own for own in known if f".{own}".endswith(f".{path}")] for path in units]
        return Layers(tuple(min(own, key=len, default=path) for path, own in zip(units, owns, strict=True)))

    def _inside(self) -> list[CollectiveCost]:
        """The collectives of the graph itself."""
        inside = ((one.collective, one.seconds) for one in self.work.values())
        return [CollectiveCost(*one) for one in summed((c, seconds) for c, seconds in inside if c is not None)]

    def _check_parts(self) -> None:
        parts = max((one.elements // max(1, one.tensor.numel()) for one in self.parameters), default=1)
        if self.ranks.tp > 1 and parts == 1:
            raise PlanError(
                f"tp={self.ranks.tp} of the mesh splits no operator of `{self.step.name}`: none of its parameters is a "
                "DTensor. Call `parallelize_module` first; `foregrad.planning.fake_ranks(size)` has ranks for it."
            )

    def _budget(self) -> int | None:
        asked, memory = self.recipe.budget, self.recipe.device.memory
        return memory or None if asked is None else bytes_of(asked, self.recipe.device)

    def _beside(self) -> int:
        """The most bytes that sharding adds at once to a step that hands its gradients on."""
        if self.ranks.fsdp == 1:
            return 0
        root, *layers = self.units
        largest = max((3 * unit.whole + unit.gradients + 2 * unit.reduced for unit in layers), default=0)
        shards = sum(unit.reduced for unit in self.units) // self.ranks.fsdp
        return root.whole + root.gradients + root.reduced + largest + shards

    def _standing(self) -> Standing:
        ranks = self.ranks
        parameters = [_shard_bytes(one.tensor, ranks) if ranks.size > 1 else one.nbytes for one in self.parameters]
        others = [one.nbytes for one in self.step.held if one.kind not in ("parameter", "argument")]
        root = next((unit.whole for unit in self.units if not unit.path), 0) if ranks.fsdp > 1 else 0
        arguments = [one.nbytes for one in self.step.of_kind("argument")]
        buckets = sum(unit.gradients for unit in self.units) if ranks.dp > 1 and ranks.fsdp == 1 else 0
        pieces = (*parameters, *others, *arguments, *ranks.buckets(buckets))
        sums = sum(parameters), sum(others), sum(arguments), self.optimizer.state, buckets
        return Standing(*sums, root, pieces)

    def _choice(self, asked: Asked) -> Choice:
        try:
            parts = asked.split(self.step.joint)
        except PartitionError as error:
            return choices.refused(asked.name, error)
        memory = memory_of(parts, self.work, self.gathered, self.standing, self.optimizer, self.ranks, self.units)
        again_flops, again_s = choices.again_in(parts, self.work)
        away = choices.moved_by(parts)
        return Choice(asked.name, memory, again_flops, again_s, away, self._seconds(again_s, away))

    def _eager(self, call: Call) -> Choice:
        """The program by PyTorch, without foregrad; or the reason for which tensors without memory do not suffice."""
        beside = self.standing, self.optimizer, self.gathered, self.units
        try:
            memory, again_flops, again_s = eager_of(self.step, self.recipe, call, *beside)
        except Exception as error:
            said = headline(error)
            return Choice("eager", None, why_not=f"it does not run on tensors without values: {said}")
        return Choice("eager", memory, again_flops, again_s, 0, self._seconds(again_s, 0))

    def _within(self, budget: int) -> Choice:
        """The choice that keeps to a budget: the one that saves most of those that do. What sharding adds to a step
        depends on where its peak is, so that limits for the step alone are tried, in halves.
        """
        if self.standing.total >= budget:
            stands = f"{in_bytes(self.standing.total)} stand through the whole step"
            return Choice("budget", None, why_not=f"does not fit: {stands}, the budget is {in_bytes(budget)}")
        splits = choices.Budgeted(self.step.joint, hands_on=self.ranks.fsdp > 1)

        def within(limit: int) -> Choice:
            return self._choice(Asked("budget", lambda _: splits.split(limit)))

        low = budget - self.standing.total - self._beside()
        high = budget - self.standing.total if self.ranks.fsdp > 1 else low
        best = within(low)
        for _ in range(_HALVINGS if high > low else 0):
            middle = (low + high) // 2
            other = within(middle)
            if other.memory is None or other.fits(budget):
                low, best = middle, other
            else:
                high = middle
        return best

    def _seconds(self, again_s: float, away: int) -> float:
        """The time of a step: operators one after the other, then the optimizer's traffic. Transfers to the host and
        collectives run beside the operators, and add the time by which they are longer.
        """
        device, ranks = self.recipe.device, self.ranks
        computing = sum(one.seconds for one in self.work.values()) + again_s
        sent = sum(one.seconds for one in collectives_of(self.units, ranks, device))
        transfer = 2 * away / (device.host * device.shares.link)
        beside = max(0.0, transfer - computing) + (max(0.0, sent - computing) if ranks.overlap else sent)
        if ranks.overlap and ranks.fsdp > 1:  # nothing runs beside the first gather and the last reduction
            root = next((unit for unit in self.units if not unit.path), Unit("", 0, 0, 0))
            beside += seconds_of(root.whole + root.reduced, ranks.fsdp, device, max(1, ranks.host // ranks.tp))
        return computing + beside + self.optimizer.moved / (device.bandwidth * device.shares.bandwidth)

    def _nothing_fits(self, result: Plan) -> BudgetError:
        least = min((one for one in result.choices if one.memory is not None), key=lambda one: one.peak or 0)
        assert least.memory is not None
        held = [
            *(f"{name} {in_bytes(count)}" for name, count in result.standing_rows()),
            *(f"{one.kind} of {one.module or 'the step'} {in_bytes(one.nbytes)}" for one in least.memory.at_peak[:3]),
        ]
        return BudgetError(
            f"a budget of {in_bytes(result.budget or 0)} can't be met by `{self.step.name}` on {self.ranks}: the "
            f"least is {in_bytes(least.memory.peak)} ({least.memory.peak} bytes), by {least.name!r}, at "
            f"{least.memory.peak_at}. The peak holds: {', '.join(held)}. Raise the budget, take a smaller batch, a "
            'different optimizer, or more ranks (mesh={"fsdp": ...}).'
        )


def _split_by(policy: Any) -> Any:
    from ..api import partition

    return lambda joint: partition(joint, policy)


def _twin(one: Held, ranks: Ranks) -> Twin:
    shape, dtype = ranks.shard(tuple(one.tensor.shape)), ranks.master(one.tensor.dtype)
    return Twin(shape, dtype, shard_of(one.whole), one.is_sparse)


def _shard_bytes(tensor: torch.Tensor, ranks: Ranks) -> int:
    count = 1
    for size in ranks.shard(tuple(tensor.shape)):
        count *= size
    return count * ranks.master(tensor.dtype).itemsize


def _units(parameters: list[Held], layers: Layers, ranks: Ranks) -> list[Unit]:
    """The layers; first, the parts outside the layers."""
    sums: dict[str, list[int]] = {"": [0, 0, 0]}
    parts: dict[str, list[int]] = {}
    for one in parameters:
        path = layers.of(one.name)
        entry = sums.setdefault(path, [0, 0, 0])
        parts.setdefault(path, []).append(one.tensor.numel() * one.tensor.dtype.itemsize)
        count, dtype = one.tensor.numel(), one.tensor.dtype
        entry[0] += count * dtype.itemsize
        if one.has_gradient:
            entry[1] += count * dtype.itemsize
            entry[2] += count * ranks.reduced(dtype).itemsize
    return [Unit(path, a, b, c, tuple(parts.get(path, ()))) for path, (a, b, c) in sums.items()]
