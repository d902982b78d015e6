"""Operators without results: asserts on tensors, the checks behind `torch.linalg`, custom operators `-> ()`.

No output needs them, so each is kept beside the tape, in program order: the runtime runs the operator itself, on the
values that the graph found, before any effect of the call is visible. Some of PyTorch's composite operators look at
values without an operator, and skip the look for fakes; their checks are functions here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..._torch.ops import OpOverload, has_effects, has_ordered_effect
from ..._torch.symbols import map_symbolic
from ...errors import UnsupportedSideEffectError
from ...graph.effect_log import CheckInfo
from ...graph.meta import TensorSpec
from ..heap.recording import Recording
from ..tape.opinfo import OpInfo
from ..tape.origin import user_line
from ..tape.tape import Entry, Tape, entries_in, map_entries

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Check:
    """One check, with entries in the place of tensors; `after`, `at`: how many decisions and entries are earlier."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    where: str
    after: int
    in_backward: bool
    at: int

    def info(self, place: Callable[[Entry], object]) -> CheckInfo:
        """Its form in the signature; `place` gives the substitute for an entry."""
        kwargs = tuple(map_entries(self.kwargs, place).items())
        return CheckInfo(self.op, map_entries(self.args, place), kwargs, self.where, self.after)

    def entries(self) -> list[Entry]:
        return [*entries_in(self.args), *entries_in(self.kwargs)]


class Checks:
    """The checks of one recorder, in program order."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self.made: list[Check] = []

    def note(self, op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Keep `op` and its arguments."""
        rec = self.recorder
        entry_args, entry_kwargs = rec.to_entries(args), rec.to_entries(kwargs)
        numbers = rec.decisions.numbers
        if numbers.made:
            entry_args = map_symbolic(entry_args, numbers.entry_of)
            entry_kwargs = map_symbolic(entry_kwargs, numbers.entry_of)
        after, at = len(rec.decisions.made), len(rec.tape.entries)
        self.made.append(Check(op, tuple(entry_args), entry_kwargs, rec.where(), after, rec.in_backward, at))


def check_formula(op: Any, info: OpInfo | None) -> Callable[..., Any] | None:
    """The recorder's treatment of `op` if it is a check; None for any other operator."""
    if op is _FUNCTIONAL_ASSERT:
        return _functional_assert
    if info is None or op._schema.returns or info.writes or info.is_metadata_write:
        return None
    takes_tensors = any("Tensor" in str(argument.type) for argument in op._schema.arguments)
    if op.namespace == "profiler":
        return None  # the end of a `record_function` belongs to the run that began it
    if op.namespace != "aten" or op is aten._print.default:
        return _note
    return _note_builtin if takes_tensors and op not in _OF_METADATA else None


_FUNCTIONAL_ASSERT = aten._functional_assert_async.msg
_OF_METADATA = {aten._assert_tensor_metadata.default}


def _note(rec: Recording, plan: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    rec.checks.note(plan.op, args, kwargs)


def _note_builtin(rec: Recording, plan: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    rec.kernels(plan.op, args, kwargs)  # they look at the metadata
    rec.checks.note(plan.op, args, kwargs)


def _functional_assert(rec: Recording, plan: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    rec.checks.note(aten._assert_async.msg, args[:2], {})
    return rec.pure(plan, args, kwargs)


# ------------------------------------------------------------------------------------------------ without an operator


def check_classes(*args: Any, **kwargs: Any) -> None:
    """The check of `one_hot` on its values; beyond the CPU its kernel does it."""
    index, *rest = (*args, *kwargs.values())
    if index.numel() == 0 or index.device.type != "cpu":
        return
    if index.min().item() < 0:
        raise RuntimeError("Class values must be non-negative.")
    if rest and rest[0] != -1 and index.max().item() >= rest[0]:
        raise RuntimeError("Class values must be smaller than num_classes.")


def check_fractions(*args: object, **kwargs: object) -> None:
    """The check of `quantile` on the values of `q` on the CPU."""
    q = kwargs["q"] if "q" in kwargs else args[1]
    if isinstance(q, torch.Tensor) and q.device.type == "cpu" and not bool(((q >= 0) & (q <= 1)).all()):
        raise RuntimeError("quantile() q values must be in the range [0, 1]")


# Functions that look at values by themselves, without an operator that a capture would see -> the look.
VALUE_CHECKS: dict[object, Callable[..., None]] = {
    torch.nn.functional.one_hot: check_classes,
    **dict.fromkeys((torch.quantile, torch.Tensor.quantile), check_fractions),
    **dict.fromkeys((torch.nanquantile, torch.Tensor.nanquantile), check_fractions),
}


# -------------------------------------------------------------------- checks of operators without users
# Eager runs operators whose results nobody needs. Some have effects by PyTorch's register, or raise for some values (an
# index out of bounds, a division by zero): each of them becomes a check of its operands.

# Packets all of whose overloads look at the values of an index, a class or a probability.
_LOOK_AT_VALUES = (
    "index", "index_put", "_unsafe_index_put", "index_select", "index_add", "index_copy", "index_fill", "index_reduce",
    "gather", "scatter", "scatter_add", "scatter_reduce", "take", "put", "masked_scatter",
    "embedding", "_embedding_bag", "_embedding_bag_forward_only",
    "nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss", "multilabel_margin_loss_forward",
    "binary_cross_entropy", "max_unpool2d", "max_unpool3d", "multinomial",
)  # fmt: skip
_DIVIDE = ("floor_divide", "remainder", "fmod", "div")
_RAISING = {getattr(aten, name) for name in _LOOK_AT_VALUES if hasattr(aten, name)}
_DIVIDING = {getattr(aten, name) for name in _DIVIDE}


def in_order(made: list[Check], tape: Tape, outputs: Sequence[object], after: int) -> list[Check]:
    """The forward's checks in program order, with one for each unneeded operator that may raise; `after`: the number of
    decisions. Raises for an effect in the graph that comes after a check's: checks run after the graph.
    """
    raising = [(at, e) for at, e in enumerate(tape.entries) if not e.is_backward and may_raise(e.target, e.spec)]
    live = set(tape.live(outputs)) if raising else set()
    checks = [*made]
    for at, e in raising:
        if e not in live and all(isinstance(operand.spec, TensorSpec) for operand in entries_in([e.args, e.kwargs])):
            checks.append(Check(e.target, e.args, e.kwargs, user_line(e.origin), after, in_backward=False, at=at))
    checks.sort(key=lambda check: check.at)
    first = next((check.at for check in checks if has_ordered_effect(check.op)), len(tape.entries))
    for entry in (e for at, e in raising if at >= first and e in live and has_ordered_effect(e.target)):
        raise UnsupportedSideEffectError(
            f"the effect of `{entry.target}` at {user_line(entry.origin)} comes after an effect without a result, and "
            "a graph has effects without results at its end. Call one of the two outside the function."
        )
    return checks


def may_raise(op: object, spec: Any) -> bool:
    """Whether an operator with results of the spec raises for some values, or has effects."""
    if not isinstance(op, OpOverload) or op.namespace != "aten":
        return isinstance(op, OpOverload) and has_effects(op)
    if op.overloadpacket in _DIVIDING:
        return isinstance(spec, TensorSpec) and not (spec.dtype.is_floating_point or spec.dtype.is_complex)
    return op.overloadpacket in _RAISING
