"""Running eager's engine over what a capture has recorded: the gradients of outputs, and what it raises."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._torch.dispatch import disable_autocast
from .._torch.histories import lead_to
from .._torch.tensors import is_usable
from ..errors import ForegradError, UnsupportedError
from .reach import reached_from

if TYPE_CHECKING:
    from .inputs import InputRecord, Inputs

__all__ = ["InnerGradients", "gradients_of", "run_backward", "takes_gradient"]


def takes_gradient(record: InputRecord) -> bool:
    """Whether gradients arrive at an input by itself, not through the tensor that it is a view of."""
    leaf = record.leaf
    return leaf is not None and leaf.requires_grad and is_usable(leaf) and leaf.is_leaf


def run_backward(outputs: Any, leaves: Any, tangents: Any, *, keep: bool) -> Any:
    """`torch.autograd.grad`; autocast belongs to the forward: eager's backward usually runs outside its region."""
    with disable_autocast(), torch.autograd.set_detect_anomaly(False):
        return torch.autograd.grad(outputs, leaves, tangents, allow_unused=True, retain_graph=keep)


def gradients_of(
    outputs: Sequence[Any], leaves: Sequence[Any], tangents: Sequence[torch.Tensor], *, keep: bool
) -> tuple[Sequence[Any], dict[int, Exception]]:
    """The gradients, and what eager raises for some of the outputs: then they are those of the others.

    Raises what eager raises for all.
    """
    try:
        return run_backward(outputs, leaves, tangents, keep=keep or len(outputs) > 1), {}
    except ForegradError:
        raise
    except RuntimeError:
        failing = _failing(outputs, leaves, tangents) if len(outputs) > 1 else {}
        if len(failing) in (0, len(outputs)):
            raise
    good = [i for i in range(len(outputs)) if i not in failing]
    return run_backward([outputs[i] for i in good], leaves, [tangents[i] for i in good], keep=keep), failing


def _failing(outputs: Sequence[Any], leaves: Sequence[Any], tangents: Sequence[Any]) -> dict[int, Exception]:
    failing: dict[int, Exception] = {}
    for position, (output, tangent) in enumerate(zip(outputs, tangents, strict=True)):
        try:
            run_backward([output], leaves, [tangent], keep=True)
        except ForegradError:
            raise
        except RuntimeError as error:
            failing[position] = error
    return failing


class InnerGradients:
    """Which inputs a function takes gradients by, and the inputs that what it differentiates depends on.

    Such a gradient goes through what the function does and no further. Eager's goes on: from one argument, through
    what was computed outside, to another one.
    """

    def __init__(self, inputs: Inputs, where: Callable[[], str], name: str) -> None:
        self.inputs = inputs
        self.where = where
        self.name = name
        self.found: list[tuple[list[InputRecord], list[InputRecord], str]] = []

    def note(self, outputs: Any, inputs: Any, **_: Any) -> None:
        """A call of `torch.autograd.grad` on stand-ins. Raises where eager would leave the function."""
        by_stand_in = self.inputs.by_stand_in
        outputs = [t for t in _flat(outputs) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        targets = [by_stand_in[id(t)] for t in _flat(inputs) if id(t) in by_stand_in]
        targets = [r for r in targets if r.real.requires_grad]
        if not outputs or not targets:
            return
        rest = [r for r in self.inputs.records if r.real.requires_grad and r not in targets and takes_gradient(r)]
        reached = reached_from(outputs, [r.leaf for r in rest])
        others = [r for r, reach in zip(rest, reached, strict=True) if reach.outputs]
        others += targets if len(targets) > 1 else []
        if not others:
            return
        said = (
            f"`{self.name}` takes a gradient by {', '.join(str(r.slot) for r in targets)} at {self.where()}, and "
            f"another of its inputs ({', '.join(str(r.slot) for r in others)}) was computed from that outside of it. "
            "In eager the gradient goes through that too. Compute it inside the compiled function, or detach it."
        )
        if lead_to([r.real for r in others], [r.real for r in targets]):
            raise UnsupportedError(said)
        self.found.append((targets, others, said))

    def apart(self, number: Mapping[int, int]) -> tuple[tuple[tuple[int, ...], tuple[int, ...], str], ...]:
        """What the signature says of it."""
        return tuple(
            (tuple(number[id(r)] for r in targets), tuple(number[id(r)] for r in others), said)
            for targets, others, said in self.found
        )


def _flat(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]
