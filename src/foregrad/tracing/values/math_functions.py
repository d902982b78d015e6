"""Functions of `math` on numbers that the graph computes: recorded, as arithmetic on them is; `min` and `max` too.

The former take a float's value in C, where no class of numbers is asked; the latter compare, which would be a decision
each. Without the C++ part both are: the number is then a value that the graph is for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from ..._torch.native import divert
from .numbers import TRACED, TracedFloat, numbers_of

__all__ = ["NUMBER_FUNCTIONS", "trace_math"]

_NAMES = (
    "acos acosh asin asinh atan atan2 atanh cbrt copysign cos cosh degrees erf erfc exp exp2 expm1 fabs fma fmod "
    "gamma hypot isclose isfinite isinf isnan ldexp lgamma log log10 log1p log2 nextafter pow radians remainder sin "
    "sinh sqrt tan tanh ulp"
).split()
_FUNCTIONS = [getattr(math, name) for name in _NAMES if hasattr(math, name)]
_LIMITS = [min, max]
NUMBER_FUNCTIONS = (*_FUNCTIONS, *_LIMITS, bool, int, round, math.trunc, math.floor, math.ceil)
"""What a graph may call on numbers besides operators."""


@functools.cache
def trace_math() -> None:
    """From now on they are recorded, for numbers of captures."""
    for function in _FUNCTIONS:
        divert(function, _recorded(function), TRACED)
    for function in _LIMITS:
        divert(function, _recorded_limit(function), (TracedFloat,))


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    def recorded(*args: Any, **kwargs: Any) -> Any:
        number = None if kwargs else next((arg for arg in args if type(arg) in TRACED), None)
        numbers = None if number is None else numbers_of(number)
        return NotImplemented if numbers is None else numbers.apply(function, *args)

    return recorded


def _recorded_limit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of floats alone: what `min` and `max` give of an integer and a float may be of either type, and is decided on."""
    recorded = _recorded(function)

    def limit(*args: Any, **kwargs: Any) -> Any:
        items = args[0] if len(args) == 1 else args
        return NotImplemented if kwargs or not {*map(type, items)} <= _FLOATS else recorded(*items)

    return limit


_FLOATS = {float, TracedFloat}
