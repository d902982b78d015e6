"""The stack of torch.func transforms, as a call finds it. Checked on torch 2.13.0.

A level is one active transform: the innermost is at the top. A tensor that a level tracks is a wrapper around the
tensor of the level below. PyTorch's older `vmap`, still behind `torch.autograd.grad(is_grads_batched=True)`, keeps
wrappers and a nesting of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

_C: Any = torch._C._functorch

is_legacy_batched = _C.is_legacy_batchedtensor
_KINDS = {"Vmap": "vmap", "Grad": "grad", "Jvp": "jvp"}


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """An active transform: `kind` is "vmap", "grad", "jvp" or "other", `number` its depth, counted from 1."""

    kind: str
    number: int
    interpreter: Any

    @property
    def batch(self) -> tuple[int, str]:
        """(size, randomness) of a vmap."""
        return self.interpreter.batch_size(), self.interpreter.randomness()

    def below(self) -> Any:
        """Context: one level down, with the grad modes that were on when this level began."""
        return self.interpreter.lower()

    def tracks(self, tensor: torch.Tensor) -> bool:
        """Whether a "grad" level records operators on the tensor."""
        return tensor.requires_grad and _C.maybe_get_level(tensor) == self.number


def _level(interpreter: Any) -> Level:
    from torch._functorch.pyfunctorch import coerce_cinterpreter

    full = coerce_cinterpreter(interpreter)
    return Level(_KINDS.get(full.key().name, "other"), full.level(), full)


def top() -> Level | None:
    """The innermost level."""
    interpreter = _C.peek_interpreter_stack()
    return None if interpreter is None else _level(interpreter)


def kinds() -> tuple[str, ...]:
    """The kinds of all levels, outermost first."""
    return tuple(_KINDS.get(i.key().name, "other") for i in _C.get_interpreter_stack() or ())


def levels_off() -> Any:
    """Context: no transform is active."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def bottom_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor inside all wrappers."""
    while _C.is_functorch_wrapped_tensor(tensor):
        tensor = _C.get_unwrapped(tensor)
    return tensor


of_batch: Callable[[torch.Tensor, int], tuple[torch.Tensor, int | None]] = _C._unwrap_batched
"""(the tensor inside a vmap level's wrapper, its batch dimension); the tensor itself and None without a wrapper."""
add_batch: Callable[[torch.Tensor, int, int], torch.Tensor] = _C._add_batch_dim


def _legacy_nesting() -> int:
    """The number of older vmaps that are active."""
    number = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    return number


def legacy_vmap_active() -> bool:
    return _legacy_nesting() > 0


def batch_of(tensors: Sequence[torch.Tensor | None]) -> Batch | None:
    """The tensors' batch in the innermost vmap, of either kind; None if no tensor is batched."""
    level = top()
    if level is not None and level.kind == "vmap":
        pairs = [(None, None) if t is None else of_batch(t, level.number) for t in tensors]
        if all(dim is None for _, dim in pairs):
            return None
        parts = [t if t is None or dim is None else t.movedim(dim, 0) for t, dim in pairs]
        return Batch(parts, [dim is not None for _, dim in pairs], level)
    batched = [t is not None and bool(is_legacy_batched(t)) for t in tensors]
    if not any(batched):
        return None
    number = _legacy_nesting()
    parts = [
        torch._remove_batch_dim(t, number, 1, 0) if t is not None and has else t
        for t, has in zip(tensors, batched, strict=True)
    ]
    return Batch(parts, batched, number)


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Tensors inside a vmap: `parts` have the batch as first dimension if `batched`. `level`: the vmap's."""

    parts: Sequence[torch.Tensor | None]
    batched: Sequence[bool]
    level: Level | int

    def each(self, function: Callable[..., Sequence[torch.Tensor | None]]) -> tuple[torch.Tensor | None, ...]:
        """The batched results of `function` for each element of the batch, in turn and below the vmap."""
        pairs = list(zip(self.parts, self.batched, strict=True))
        size = next(len(t) for t, has in pairs if has and t is not None)
        with contextlib.nullcontext() if isinstance(self.level, int) else self.level.below():
            rows = [function(*(t[i] if has and t is not None else t for t, has in pairs)) for i in range(size)]
            columns = [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]
        return tuple(None if column is None else self._wrapped(column) for column in columns)

    def _wrapped(self, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(self.level, int):
            return torch._add_batch_dim(tensor, 0, self.level)
        return add_batch(tensor, 0, self.level.number)
