"""Tensors that open: the spine's questions about tensor subclasses with plain tensors that are the inputs of graphs.

An annex answers, see `annexes.py`. A capture or call without tensors that open never loads the annex.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..annexes import given, the_one
from ..errors import UnsupportedTensorError

_SEAM = "tensor subclasses"


class GradientKindError(UnsupportedTensorError):
    """The kind of a wrapper's gradient is not the predicted one. The kind is recorded, so the next capture succeeds."""


class Opening(Protocol):
    """How one tensor subclass opens: its class, its layout, and its plain tensors, named by `paths`.

    `carries[i]`: gradients go through plain tensor i. `is_apart`: further inputs carry the gradients. `count`: the
    number of inputs of a graph that stand for the subclass.
    """

    @property
    def cls(self) -> type: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def requires_grad(self) -> bool: ...
    @property
    def carries(self) -> tuple[bool, ...]: ...
    @property
    def is_apart(self) -> bool: ...
    @property
    def count(self) -> int: ...
    def paths(self) -> list[str]: ...
    def may_vary(self, part: int, dim: int) -> bool: ...
    def varies(self, part: int) -> bool: ...
    def fits(self, value: object) -> bool: ...
    def has_structure_of(self, tensor: object, *, of_any_size: bool = False) -> bool: ...


class OtherFormError(UnsupportedTensorError):
    """A form of the function, `form(function)`, takes the call: `called(entry, args, kwargs)` calls the form by its
    compiled `entry`. `takes(args, kwargs)`: whether the form takes a call.
    """

    form: type[Any]
    takes: Callable[[Any, Any], bool]


Unwrap = Callable[[Any], "tuple[Opening, Sequence[torch.Tensor]] | None"]
Sampler = Callable[[object], tuple[Any, Sequence[torch.Tensor]]]
Wrap = Callable[[object, "list[torch.Tensor]"], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class ReachedOpening:
    """A tensor that opens and that the function reached: its `Source`, its gradient's opening (None: as predicted)."""

    source: Any
    spec: Opening
    gradient: Opening | None


@dataclasses.dataclass(frozen=True, slots=True)
class FoundOpenings:
    """The tensors that open in a call: the tensors that the function reached by itself; and for the arguments, by their
    first leaf, the openings of the tensor and of its gradient.
    """

    reached: tuple[ReachedOpening, ...]
    arguments: Mapping[int, tuple[Opening, Opening | None]]


class Opener(Protocol):
    """The module that opens tensors.

    `Samples()` gives for a tensor its opening and plain tensors without history; `unwrapping` and `wrap` go from a
    tensor to its plain tensors and back with the history, `rebuilt` goes back without. `bare_spec` opens a gradient;
    `refusal` is the error for an input that does not open; `taken_apart` opens a gradient that differs in kind from the
    result, and `OtherKinds(backward, derivative, compiled)(node, tangents, handed)` runs the backward for some.
    """

    Samples: Callable[[], Sampler]
    OtherKinds: Callable[..., Callable[[object, Sequence[object], Sequence[object]], object]]
    bare_spec: Callable[[object], Any]
    refusal: Callable[[torch.Tensor, str], UnsupportedTensorError]
    rebuilt: Callable[[object, Sequence[torch.Tensor]], object]
    taken_apart: Callable[[object], Sequence[torch.Tensor]]
    unwrapping: Callable[[object, object], Callable[[object], Sequence[torch.Tensor]]]
    with_sizes_of: Callable[[object, Sequence[Any]], object]
    wrap: Callable[..., Any]


def opener() -> Opener:
    """The module that opens tensors."""
    module: Opener = the_one(_SEAM)
    return module


def wrap(opening: Any, parts: Sequence[torch.Tensor]) -> Any:
    """The tensor around these plain tensors, with their history."""
    return opener().wrap(opening, parts)


def new_samples() -> Sampler:
    """For tensors that open, plain tensors as in a call, but without history: equal objects at each call."""
    found = given(_SEAM)
    return found[0].Samples() if found else lambda _: the_one(_SEAM)
