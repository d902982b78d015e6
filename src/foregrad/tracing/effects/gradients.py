"""`.grad` of the inputs while a function runs: what it holds when the call begins, and what it is left holding.

A stand-in gets a `.grad` of its own when the function first sets it, or runs a backward that adds to it: autograd then
does with the stand-in what eager does with the tensor. The gradient that is there at entry is one more input. What is
there at the end is one more output, which each call sets.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..._torch.hooks import UNHOOKED, gradient_hooks, hooked_as, own_gradient, set_gradient
from ..._torch.stand_ins import is_stand_in
from ..._torch.tensors import base_of, history_of, is_view
from ...errors import UnsupportedError, UnsupportedSideEffectError
from ...graph.effect_log import SetGradient
from ...graph.signature import OutputInfo, PartOf
from ...graph.slots import Closure
from ...identity import ById, IdSet
from ...subclasses.spec import is_wrapper
from ..heap.records import InputRecord
from ..inputs.inputs import GradientSource, Inputs
from ..tape.gradient_paths import other_leaves


@dataclasses.dataclass(slots=True)
class _Held:
    """An input whose `.grad` the stand-in has. `was_cleared`: the first thing that happened to it is that it went."""

    record: InputRecord
    was_cleared: bool
    final: torch.Tensor | None = None


class Gradients:
    """The `.grad` of inputs in one run. `note(record, question, answer)`: see `Facts`; `where()`: the user's line."""

    def __init__(self, inputs: Inputs, note: Callable[..., None], where: Callable[[], str]) -> None:
        self.inputs, self.note, self.where = inputs, note, where
        self._held: dict[InputRecord, _Held] = {}
        self._is_over = False  # the function has run
        self.values: list[torch.Tensor] = []  # that are left in `.grad`, once the function has run
        self.hooks: list[Any] = []  # that backwards inside call

    # ---------------------------------------------------------------- while the function runs

    def read(self, record: InputRecord) -> Any:
        """What the program gets for `tensor.grad`."""
        if record in self._held:
            found = own_gradient(record.stand_in)
            real = None if found is None else self.inputs.real_of(found)
            return found if real is None else real
        real = record.real
        if not real.is_leaf and not real.retains_grad:
            return None
        self._note(record)
        if real.grad is not None:
            self._know(record, real.grad)
            return real.grad
        return own_gradient(record.stand_in) if record.stand_in.is_leaf else None

    def set(self, record: InputRecord, value: Any) -> None:
        """Before the program sets `tensor.grad`."""
        if self._is_over or not record.real.is_leaf:
            why = "which is no leaf" if not self._is_over else "in the backward"
            raise UnsupportedSideEffectError(
                f"`.grad` of {record.slot}, {why}, is set at {self.where()}, which a compiled call can't repeat. Set "
                "it outside the compiled function."
            )
        if record not in self._held:
            self._note(record)
            self._held[record] = _Held(record, was_cleared=value is None)

    def accumulating(self, roots: Sequence[Any]) -> contextlib.AbstractContextManager[None]:
        """Context: autograd's engine adds the gradients of `roots` to `.grad`, and calls the hooks of tensors."""
        if self._is_over:  # a backward of the capture's own, which puts `.grad` back
            return contextlib.nullcontext()
        by_stand_in = self.inputs.by_stand_in
        if not all(is_stand_in(root) or is_wrapper(root) for root in roots):
            raise UnsupportedError(
                f"a backward begins at {self.where()}, at a tensor that is not computed in the function, or at a "
                "gradient edge. Run it outside the compiled function."
            )
        reached = [by_stand_in[leaf] for leaf in other_leaves(roots, ()) if leaf in by_stand_in]
        for record in reached:
            self._enter(record)
        return hooked_as([(record.stand_in, record.real) for record in reached])

    def _enter(self, record: InputRecord) -> None:
        """Gradients are about to be added to `.grad`, and hooks of the tensor are to see them."""
        hooks = gradient_hooks(record.real)
        for question, answer in hooks.items() if hooks else [(UNHOOKED, True)]:
            self.note(record, question, answer)
        self.hooks += [hook for hook in hooks.values() if not isinstance(hook, int)]
        if record in self._held or not record.real.is_leaf:
            return
        grad = record.real.grad
        self._note(record)
        if grad is not None:
            self._know(record, grad)
            set_gradient(record.stand_in, self.inputs.adopt(grad))
        self._held[record] = _Held(record, was_cleared=False)

    def _note(self, record: InputRecord) -> None:
        """Each call is to find a gradient in `.grad`, or None, as this one does. PyTorch warns who asks no leaf: a part
        of a wrapper subclass may be one in one call alone.
        """
        asked = "{0}.is_leaf and {0}" if record.real.is_leaf and not isinstance(record.source, PartOf) else "{}"
        self.note(record, f"{asked}.grad is {'None' if record.real.grad is None else 'not None'}", True)

    def _know(self, record: InputRecord, grad: torch.Tensor) -> None:
        """Where the gradient that an input has at entry is found in each call."""
        source = GradientSource(Closure(f"{record.slot}.grad"), record.real)
        known = self.inputs.by_real.get(grad)
        if known is not None and getattr(known.source, "owner", None) is not record.real:
            raise UnsupportedError(
                f"`.grad` of {record.slot} is {known.slot}, which is used as well at {self.where()}: only one "
                "of the two can be an input. Use a copy."
            )
        self.inputs.sources.add(grad, source)

    # ---------------------------------------------------------------- when it has run

    def finish(self) -> tuple[list[Any], list[str]]:
        """The function has run: the `values`, and what people call their places. The stand-ins lose their `.grad`."""
        paths, self._is_over = [], True
        for held in self._held.values():
            record = held.record
            held.final = own_gradient(record.stand_in)
            set_gradient(record.stand_in, None)
            real = None if held.final is None else self.inputs.real_of(held.final)
            if held.final is not None and (real is None or real is not record.real.grad):
                if is_wrapper(held.final):
                    raise UnsupportedSideEffectError(
                        f"a {type(held.final).__qualname__} is left in `.grad` of {record.slot}, which a compiled call "
                        "can't repeat: use torch.autograd.grad, or do it outside."
                    )
                self.values.append(held.final)
                paths.append(f"{record.slot}.grad")
        return self.values, paths

    def effects(self, number: Mapping[Any, int], outputs: int) -> list[SetGradient]:
        """The entries of the log. `number`: by its record, which input it is; `outputs`: how many there are,
        the last of which are the `values`.
        """
        place = ById((value, outputs - len(self.values) + at) for at, value in enumerate(self.values))
        made = []
        for held in self._held.values():
            final, at = held.final, number[held.record]
            if held.record.real.grad is not None and (final is None or final in place):
                is_first = held.was_cleared
                made += [SetGradient(at, None, first=is_first)] if final is None or is_first else []
            made += [SetGradient(at, place[final])] if final is not None and final in place else []
        return made


# -------------------------------------------------------------------- gradients of results
# Results whose gradients can be looked at: results that retain their gradients, and leaves that the function makes.
#
# Each compiled call repeats `retain_grad()` on a result or an input. Results computed inside from a tensor that retains
# its gradient, or from a leaf made inside, are refused: that tensor or leaf would get no gradient.


_INTERIOR = "computes other results from it, whose gradients flow to it inside"


def retained_by(
    tensors: Sequence[torch.Tensor],
    results: Sequence[Any],
    by_stand_in: ById[Any, Any],
    number: Mapping[Any, int],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions among the results of those of the tensors that keep their gradient, and the inputs that do."""
    if not tensors:
        return (), ()
    kept = IdSet(tensors)
    records = [by_stand_in[i] for i in kept if i in by_stand_in]
    inputs = sorted(number[r] for r in records if r.real.requires_grad and not r.real.is_leaf)
    positions = [i for i, result in enumerate(results) if result in kept and result not in by_stand_in]
    return tuple(positions), tuple(inputs)


def check_watched_inside(name: str, paths: Sequence[str], positions: Sequence[int], hooked: Sequence[int]) -> None:
    """Raise where the gradient of a result flows inside the function: nobody outside sees it whole."""
    if not positions:
        return
    why = "has hooks that compute with its own tensors" if set(positions) <= set(hooked) else _INTERIOR
    raise UnsupportedSideEffectError(
        f"`{name}` calls `retain_grad()` on {', '.join(paths[i] for i in positions)}, which it returns, and {why}. "
        "Compile what comes before it and what comes after it as two functions, or take the gradient by it with "
        "torch.autograd.grad inside the function."
    )


def check_new_leaves(
    name: str,
    results: Sequence[Any],
    infos: Sequence[OutputInfo],
    known: IdSet[Any],
    fakes: Sequence[torch.Tensor | None],
    wrappers: Sequence[Any],
) -> None:
    """No output of the graph (`fakes`) was computed from a leaf that the function made and gives back, or leaves in
    Python's state. `known`: results that are inputs. `wrappers`: results that are wrapper subclasses.
    """
    made = ById(
        (result, info.path)
        for result, info in zip(results, infos, strict=True)
        if isinstance(result, torch.Tensor) and result not in known and _is_leaf(result)
    )
    made |= ById((one, f"a {type(one).__qualname__}") for one in wrappers if one not in known and _is_leaf(one))
    if not made:
        return
    outputs = [fake for fake in fakes if fake is not None and history_of(fake) is not None]
    for leaf in other_leaves(outputs, ()):
        if leaf in made:
            raise UnsupportedSideEffectError(
                f"`{name}` makes the leaf {made[leaf]} and computes other results from it: a compiled call would "
                "not give it their gradient. Make the leaf outside, or compile what computes with it by itself."
            )


def _is_leaf(tensor: torch.Tensor) -> bool:
    """Whether it was marked by itself. A view is not asked: that may give it another history, or raise."""
    base = base_of(tensor) if is_view(tensor) else None
    return tensor.requires_grad and (tensor.is_leaf if base is None else not base.requires_grad)
