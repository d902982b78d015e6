"""Errors that only kernels raise: writes into memory that overlaps or to a dtype too small, views without strides.

Fake tensors take shortcuts past these checks. Where one might be due, the kernel itself is asked, on zeros laid out
like the fakes: the answer depends on sizes and strides alone.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._torch.nested import tensors_in
from ..._torch.ops import Args, Kwargs
from ..._torch.random_operators import drawing_from
from ..._torch.symbols import has_symbolic
from ..._torch.tensors import storage_key
from ...identity import ById, IdSet
from ..tape.origin import Origins, user_line
from .refusals import written_by_lists

_LIMIT_BYTES = 1 << 26


def check_view(source: torch.Tensor, size: Any) -> None:
    """Raise the error of `source.view(size)` for the tensor's strides."""
    if not source.is_contiguous() and not is_symbolic_tensor(source) and not has_symbolic(size):
        torch.empty_strided(source.size(), source.stride(), device="meta").view(size)


def check_lists(targets: list[torch.Tensor], origins: Origins) -> None:
    """Refuse an operator on lists that writes to one tensor twice, with gradients."""
    tensors = [tensor for tensor in targets if tensor.requires_grad]
    if len(IdSet(tensors)) < len(tensors):
        raise written_by_lists("a tensor", user_line(origins.here()))


def check_write(func: object, args: Args, kwargs: Kwargs, targets: list[torch.Tensor]) -> None:
    """Raise the kernel's error about elements of `targets` that share a place, and about dtypes."""
    if not _is_suspicious(func, targets, args) or any(map(is_symbolic_tensor, (*targets, *tensors_in(args)))):
        return
    try:
        ask_kernel(func, args, kwargs)
    except RuntimeError:
        if _has_other_dtype(func, args) or _answers_apart(func, args, kwargs):
            raise
    except Exception:  # noqa: S110
        pass  # zeros don't suit it: about places it has nothing to say


def _has_other_dtype(func: object, args: Args) -> bool:
    return func is torch.ops.aten.index_put_.default and args[0].dtype is not args[2].dtype


def _answers_apart(func: object, args: Args, kwargs: Kwargs) -> bool:
    """Whether the kernel answers for equal sizes without shared places: else zeros don't suit it."""
    try:
        ask_kernel(func, args, kwargs, apart=True)
    except Exception:
        return False
    return True


def check_cast(source: torch.dtype, target: torch.dtype) -> None:
    """Raise the kernels' error for a result that does not fit its target."""
    if not torch.can_cast(source, target):
        raise RuntimeError(
            f"result type {_type_name(source)} can't be cast to the desired output type {_type_name(target)}"
        )


def _type_name(dtype: torch.dtype) -> str:
    """A dtype's name in C++ messages: `Float`, `Long`."""
    return _TYPE_NAMES.get(dtype, str(dtype).removeprefix("torch.").capitalize())


_TYPE_NAMES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.int16: "Short",
    torch.int8: "Char",
    torch.uint8: "Byte",
    torch.bool: "Bool",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}


def _is_suspicious(func: Any, targets: list[torch.Tensor], args: Args) -> bool:
    if _has_other_dtype(func, args):
        return True
    for target in targets:
        if any(step == 0 and size > 1 for step, size in zip(target.stride(), target.size(), strict=True)):
            return True
        for other in tensors_in(args):
            if other is not target and storage_key(other) == storage_key(target):
                return True
        if torch.Tag.pointwise not in func.tags and sum(other is target for other in tensors_in(args)) > 1:
            return True
    return False


def is_symbolic_tensor(value: object) -> bool:
    """Whether it is a tensor with a symbolic size or stride."""
    return isinstance(value, torch.Tensor) and has_symbolic((*value.size(), *value.stride()))


def ask_kernel(op: Any, args: Args, kwargs: Kwargs, *, apart: bool = False) -> Any:
    """The result, or error, of the operator's kernel on zeros laid out like the fakes among the arguments.

    `apart`: laid out densely, each in memory of its own, also a tensor that is there twice.
    NotImplemented where they would take too much memory, or random numbers that other threads draw too.
    """
    replicas = _Apart() if apart else _Replicas()
    args, kwargs = replicas.of(args), replicas.of(kwargs)
    if replicas.nbytes > _LIMIT_BYTES:
        return NotImplemented
    if torch.Tag.nondeterministic_seeded in op.tags:
        op = drawing_from(op, torch.Generator())
        if op is None:
            return NotImplemented
    with torch.no_grad():
        return op(*args, **kwargs)


class _Replicas:
    """Zeros laid out like fakes, one for each, sharing memory as they do. `nbytes` counts their bytes."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.made: ById[torch.Tensor, torch.Tensor] = ById()
        self.memory: dict[int, torch.UntypedStorage] = {}

    def of(self, value: object) -> Any:
        if isinstance(value, torch.Tensor):
            made = self.made.get(value)
            if made is None:
                made = self.made[value] = self._tensor(value)
            return made
        if isinstance(value, (list, tuple)):
            return type(value)(self.of(item) for item in value)
        if isinstance(value, dict):
            return {key: self.of(item) for key, item in value.items()}
        return value

    def _tensor(self, fake: torch.Tensor) -> torch.Tensor:
        key = storage_key(fake)
        memory = self.memory.get(key)
        if memory is None:
            size = fake.untyped_storage().nbytes()
            self.nbytes += size
            small = size if self.nbytes <= _LIMIT_BYTES else 0
            memory = self.memory[key] = torch.zeros(small, dtype=torch.uint8).untyped_storage()
        empty = torch.empty(0, dtype=fake.dtype)
        if self.nbytes > _LIMIT_BYTES:
            return empty
        return empty.set_(memory, fake.storage_offset(), fake.size(), fake.stride())


class _Apart(_Replicas):
    """Dense zeros of the sizes of fakes; no two share memory."""

    def of(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return super().of(value)
        self.nbytes += value.numel() * value.element_size()
        size = value.size() if self.nbytes <= _LIMIT_BYTES else (0,)
        return torch.zeros(size, dtype=value.dtype)
