"""Functions of `math` on numbers that the graph computes: recorded, as arithmetic on them is; `min` and `max` too.

The former take a float's value in C, where no class of numbers is asked; the latter compare, which would be a decision
each. So those that give one number are replaced while any thread captures a function with such numbers, in `math` and
under names that code has for them by itself (`from math import sqrt`). Of plain numbers they give what they always do.
"""

from __future__ import annotations

import builtins
import math
import sys
from typing import Any

from ..._torch.asked import rebind
from ...locks import InPlace
from .numbers import TRACED, TracedFloat, numbers_of

__all__ = ["NUMBER_FUNCTIONS", "traced_math"]


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
        return self._of is (other._of if isinstance(other, _OnNumbers) else other)

    def __hash__(self) -> int:
        return hash(self._of)

    def __repr__(self) -> str:
        return repr(self._of)

    def __reduce__(self) -> Any:
        return getattr, (sys.modules[self._of.__module__], self._of.__name__)


class _OnFloats(_OnNumbers):
    """Stands for `min` or `max`. What they give of an integer and a float may be of either type, and is decided on."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not kwargs:
            items = args[0] if len(args) == 1 and type(args[0]) in (list, tuple) else args
            kinds = set(map(type, items))
            if TracedFloat in kinds and kinds <= _FLOATS:
                return super().__call__(*items)
        return self._of(*args, **kwargs)


_FLOATS = {float, TracedFloat}

_NAMES = (
    "acos acosh asin asinh atan atan2 atanh cbrt copysign cos cosh degrees erf erfc exp exp2 expm1 fabs fma fmod "
    "gamma hypot isclose isfinite isinf isnan ldexp lgamma log log10 log1p log2 nextafter pow radians remainder sin "
    "sinh sqrt tan tanh ulp"
).split()
_FUNCTIONS = {name: getattr(math, name) for name in _NAMES if hasattr(math, name)}
_LIMITS = {"min": min, "max": max}
_FOR_MATH = {name: _OnNumbers(function) for name, function in _FUNCTIONS.items()}
_FOR_LIMITS = {name: _OnFloats(function) for name, function in _LIMITS.items()}
rebind({_FUNCTIONS[name]: instead for name, instead in _FOR_MATH.items()})


def _install() -> None:
    vars(math).update(_FOR_MATH)
    vars(builtins).update(_FOR_LIMITS)


def _remove() -> None:
    vars(math).update(_FUNCTIONS)
    vars(builtins).update(_LIMITS)


traced_math = InPlace(_install, _remove)
"""Context: numbers of a capture on this thread may be given to these functions."""
NUMBER_FUNCTIONS = (*_FUNCTIONS.values(), *_LIMITS.values(), bool, int, round, math.trunc, math.floor, math.ceil)
"""What a graph may call on numbers besides operators."""
