"""The conformance suite's door to private PyTorch: its database of operators.

Checked on torch 2.13.0. PyTorch's module needs the package `expecttest`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from ..._torch.ops import Args, Kwargs
from ...errors import ForegradError

_USUAL = (torch.Tensor, int, float, bool, str, type(None))

# Results that depend on more than the arguments: memory that nobody has written, and addresses.
_LEFT_OUT = (
    "empty", "new_empty", "resize_", "resize_as_", "nn.functional.rrelu.noise", "linalg.lstsq", "item", "tolist",
)  # fmt: skip


class DatabaseError(ForegradError):
    """PyTorch's database of operators can't be loaded."""


class OperatorCall(NamedTuple):
    """A function of tensors and plain values, and its call; further arguments are closed over."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@functools.cache
def _database() -> dict[str, Any]:
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ImportError as error:
        raise DatabaseError(
            f"PyTorch's database of operators can't be loaded: {error}. `pip install expecttest`, or leave the "
            "group `operators` out."
        ) from error
    return {op.full_name: op for op in op_db if not op.full_name.startswith(_LEFT_OUT)}


def operator_names() -> tuple[str, ...]:
    """The operators of PyTorch's database, in order. Raises `DatabaseError`."""
    return tuple(_database())


def operator_dtypes(name: str) -> frozenset[torch.dtype]:
    """The dtypes that an operator takes on a CPU."""
    return frozenset(_database()[name].supported_dtypes("cpu"))


def operator_calls(name: str, dtype: torch.dtype) -> Iterator[OperatorCall]:
    """The calls of an operator that the database has for a dtype, equal in each process."""
    op = _database()[name]
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        samples: Sequence[Any] = list(op.sample_inputs_func(op, "cpu", dtype, grad))
    for sample in samples:
        yield _with_usual_arguments(_unseeded(op.op), (sample.input, *sample.args), dict(sample.kwargs))


def _unseeded(op: Any) -> Any:
    """An operator of the database that does not seed the generator ahead of each call, as random ones do there."""
    if not isinstance(op, FunctionType) or _SEEDING not in op.__code__.co_names:
        return op
    return FunctionType(
        op.__code__, {**op.__globals__, _SEEDING: _called}, op.__name__, op.__defaults__, op.__closure__
    )


_SEEDING = "wrapper_set_seed"


def _called(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


def _with_usual_arguments(op: Callable[..., Any], args: Args, kwargs: Kwargs) -> OperatorCall:
    leaves, spec = pytree.tree_flatten((args, kwargs))
    usual = [isinstance(leaf, _USUAL) for leaf in leaves]
    fixed = [leaf for leaf, is_usual in zip(leaves, usual, strict=True) if not is_usual]

    def call(*passed: Any) -> Any:
        given, kept = iter(passed), iter(fixed)
        merged = [next(given) if is_usual else next(kept) for is_usual in usual]
        args, kwargs = pytree.tree_unflatten(merged, spec)
        return op(*args, **kwargs)

    return OperatorCall(call, tuple(leaf for leaf, is_usual in zip(leaves, usual, strict=True) if is_usual), {})
