"""Ways of a backward that lead to no input and raise: behind a Function marked `once_differentiable`.

Eager runs them in `backward()`, which goes to every leaf, and not in `torch.autograd.grad` by an input. So the outputs
that lead there get a history that raises, beside the one that gives gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from ...errors import ForegradError
from ..tape.gradient_paths import nodes_behind, other_leaves
from .session import run_engine

__all__ = ["errors_behind", "raise_behind"]

_DELAYED = "torch::autograd::Error"  # the node of `torch._C._functions.DelayedError`


def raise_behind(outputs: Sequence[torch.Tensor]) -> list[int]:
    """The positions of the outputs behind which a node raises whatever arrives there."""
    if not any(node.name() == _DELAYED for node in nodes_behind(outputs)):
        return []
    return [i for i, o in enumerate(outputs) if any(node.name() == _DELAYED for node in nodes_behind([o]))]


def errors_behind(
    outputs: Sequence[torch.Tensor],
    seeds: Sequence[torch.Tensor],
    known: Sequence[torch.Tensor | None],
    recording: Callable[[], AbstractContextManager[None]],
) -> dict[int, Exception]:
    """What eager raises on the way from an output, by its position, to leaves that are not known.

    A run that does not raise has done what it does besides giving gradients within the context `recording`.
    """
    found: dict[int, Exception] = {}
    for position, (output, seed) in enumerate(zip(outputs, seeds, strict=True)):
        others = other_leaves([output], known)
        try:
            with recording():
                run_engine([output], others, [seed], create_graph=False)
        except ForegradError:
            raise
        except RuntimeError as error:
            found[position] = error
    return found
