"""Functions of `math` on numbers that the graph computes: recorded, as arithmetic on them is.

They take a float's value in C, where no class of numbers is asked. So those that give one number are replaced while any
thread captures, in `math` and under names that code has for them by itself (`from math import sqrt`). Of plain numbers
they give what they always give.
"""

from __future__ import annotations

import math
from typing import Any

from ...locks import InPlace
from .numbers import TRACED, numbers_of

__all__ = ["MATH", "NUMBER_FUNCTIONS", "traced_math"]


class _OnNumbers:
    """Stands for a function of `math`, whichever thread finds it: it is equal to it, and is pickled as it."""

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        self._of = of

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        number = None if kwargs else next((arg for arg in args if type(arg) in TRACED), None)
        numbers = None if number is None else numbers_of(number)
        return self._of(*args, **kwargs) if numbers is None else numbers.apply(self._of, *args)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._of)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def __eq__(self, other: Any) -> bool:
        return self._of is (other._of if type(other) is _OnNumbers else other)

    def __hash__(self) -> int:
        return hash(self._of)

    def __repr__(self) -> str:
        return repr(self._of)

    def __reduce__(self) -> Any:
        return getattr, (math, self._of.__name__)


_NAMES = (
    "acos acosh asin asinh atan atan2 atanh cbrt copysign cos cosh degrees erf erfc exp exp2 expm1 fabs fma fmod gamma "
    "hypot isclose isfinite isinf isnan ldexp lgamma log log10 log1p log2 nextafter pow radians remainder sin sinh sqrt "
    "tan tanh ulp"
).split()
_FUNCTIONS = {name: getattr(math, name) for name in _NAMES if hasattr(math, name)}
MATH = {id(function): _OnNumbers(function) for function in _FUNCTIONS.values()}
"""By the id of a function, what stands for it."""
traced_math = InPlace(
    lambda: vars(math).update({name: MATH[id(function)] for name, function in _FUNCTIONS.items()}),
    lambda: vars(math).update(_FUNCTIONS),
)
"""Context: numbers of a capture on this thread may be given to functions of `math`."""
NUMBER_FUNCTIONS = (*_FUNCTIONS.values(), bool, int, round, math.trunc, math.floor, math.ceil)
"""What a graph may call on numbers besides operators."""
