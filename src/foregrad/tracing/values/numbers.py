"""Floating-point numbers read from tensors that vary from call to call: they stay numbers of the graph.

A number that the call computed, or read from an input that it wrote, is taken to vary from the first capture on. A
number of an unchanged input is a part of the program, like any value that is read, until it differs at a later capture.
A number that varies is a `TracedFloat`: arithmetic on it is recorded, operator by operator, as Python does it, and an
operator of torch takes it as it takes a number. A comparison is a decision. Whatever needs the number itself (`int()`,
formatting, an operator with a result that depends on it) makes the number a decision too.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..._torch.engine import heard_by_modes, plain_execution
from ..._torch.native import divert
from ..._torch.symbols import SymbolTable, TracedInt, TracedSymbol, concrete, fixed, may_vary, numbers_told, symbol_made
from ...identity import class_property
from ..heap.recording import Recording
from ..tape.tape import Entry


class Numbers:
    """The numbers of one capture that the graph computes."""

    def __init__(self, recorder: Recording, table: SymbolTable | None) -> None:
        self.recorder = recorder
        self.table = table
        self.texts: Any = None  # gives marks for texts that each call makes
        self.made: list[TracedFloat] = []
        self.by_entry: dict[Entry, TracedFloat] = {}
        self.by_symbol: dict[object, TracedFloat] = {}
        self.integers: dict[Any, str] = {}  # symbols that are plain numbers to the program: their origins
        if table is not None:
            table.tell(self)

    def float(self, entry: Entry, value: float, where: str) -> TracedFloat:
        """The number that `entry` computes, `value` in the present call."""
        number = TracedFloat(self._symbols().float_node(float(value), f"number {len(self.made)}"))
        number.entry, number.numbers, number.value, number.where = entry, self, value, where
        self.made.append(number)
        self.by_entry[entry] = number
        self.by_symbol[symbol_made(number)] = number
        return number

    def size(self, value: int, where: str, *, is_size: bool = True) -> Any:
        """A size or integer that the graph finds, `value` in the present call; None where it can't be a symbol."""
        number = self._symbols().computed_symbol(value, f"a size found at {where}", is_size=is_size)
        return number if isinstance(number, torch.SymInt) else None

    def integer(self, value: int, where: str) -> TracedInt | None:
        """An integer that the graph reads from a tensor, `value` in the call; None where it can't be a symbol."""
        number = self.size(value, where, is_size=False) if may_vary(value, is_size=False) else None
        if number is None:
            return None
        self.integers[symbol_made(number)] = where
        return TracedInt(number.node)

    def _symbols(self) -> SymbolTable:
        if self.table is None:
            self.table = SymbolTable()
            self.table.tell(self)
            self.recorder.fake_mode.shape_env = self.table.env
            self.recorder.is_symbolic = True
        return self.table

    def known(self, number: object) -> TracedFloat | None:
        """The number of ours that a symbolic float is: torch wraps them anew on their way through it."""
        return self.by_symbol.get(symbol_made(number)) if isinstance(number, torch.SymFloat) else None

    def plain(self, number: Any) -> Any:
        """A number as torch's own code is to see it."""
        if type(number) is TracedInt:
            return number.plain()
        return torch.SymFloat(number.node) if type(number) is TracedFloat else number

    def ours(self, number: Any) -> object:
        """A number that was read from a tensor as the program is to see it; any other as it is."""
        if type(number) is torch.SymInt and symbol_made(number) in self.integers:
            return TracedInt(number.node)
        known = self.known(number)
        return number if known is None else known

    def sizes(self, sizes: object) -> Any:
        """A size, or several, as the program is to see them."""
        if isinstance(sizes, tuple):
            return sizes if all(type(size) is int for size in sizes) else type(sizes)(map(self.sizes, sizes))
        return TracedInt(sizes.node) if type(sizes) is torch.SymInt else sizes

    def entry_of(self, number: object) -> Any:
        """The tape's entry for a symbolic float; any other number unchanged.

        One that torch's own code computed becomes a plain number: its arithmetic rounds otherwise than Python's.
        """
        if not isinstance(number, torch.SymFloat):
            return number
        known = self.known(number)
        return known.entry if known is not None else torch.SymFloat.__float__(number)

    def apply(self, op: Callable[..., object], *operands: object) -> Any:
        """Python's operator on numbers: recorded; a result that is no float is decided on, and so are the numbers for
        which it raises.
        """
        try:
            value = op(*map(_value_of, operands))
        except Exception:
            for number in operands:
                fixed(number)
            raise
        where = next(filter(None, map(self._where, operands)))
        entry = self.recorder.entry(op, tuple(map(_as_operand, operands)), {}, is_random=False)
        if isinstance(value, float) and math.isfinite(value):  # NumPy's are floats, too
            return self.float(entry, value, where)
        return self.recorder.decisions.found_or_decided(entry, value, where)

    def gives_a_float(self, function: Callable[..., object], args: Iterable[object]) -> bool:
        """Whether a function of NumPy gives a finite float for the numbers in the present call, or a truth value."""
        value = function(*map(_value_of, args))
        return math.isfinite(value) if isinstance(value, float) else type(value).__name__ in ("bool", "bool_")

    def _where(self, operand: Any) -> str | None:
        if type(operand) is not TracedInt:
            return operand.where if type(operand) is TracedFloat else None
        return next((self.integers[s] for s in symbol_made(operand).free_symbols if s in self.integers), "a size")

    def decide_fixed(self) -> None:
        """Numbers that an operator asked the value of are decisions, and so are its questions."""
        for number in list(self.made):
            found = self._symbols().found_of(symbol_made(number))
            if found is None:
                self.recorder.decisions.decide(number.entry, number.value, number.where)
            for op, other in found or ():
                self.apply(op, number, other)


def numbers_of(number: Any) -> Numbers | None:
    """The numbers of the capture that a traced one is of."""
    return number.numbers if type(number) is TracedFloat else numbers_told(number)


def _value_of(number: Any) -> object:
    """A number as it is in the call that is captured."""
    return number.value if type(number) is TracedFloat else concrete(number)


def _as_operand(number: Any) -> object:
    """A number as an operator on the tape takes it."""
    if type(number) is TracedInt:
        return number.plain()
    return number.entry if type(number) is TracedFloat else number


class TracedFloat(TracedSymbol):
    """A float that the graph computes. It says that it is one: `isinstance(number, float)`."""

    entry: Entry
    numbers: Numbers
    value: float = 0.0
    where: str

    @class_property
    def __class__(self) -> type:
        return type(self.value)

    def _fixed(self) -> float:
        value: float = self.numbers.recorder.decisions.decide(self.entry, self.value, self.where)
        return value

    def __float__(self) -> float:
        return self._fixed()

    def __int__(self) -> int:
        return int(self._fixed())

    def __bool__(self) -> bool:
        result: bool = self.numbers.apply(bool, self)
        return result

    def __getattr__(self, name: str) -> object:
        if name[:1] != "_" and hasattr(type(self.value), name):
            return getattr(self._fixed(), name)
        raise AttributeError(f"'{type(self.value).__name__}' object has no attribute {name!r}")


def _binary(op: Callable[..., object], *, swapped: bool) -> Callable[[Any, Any], object]:
    def method(self: TracedFloat, other: object) -> object:
        if type(other) not in _NUMBERS:
            return NotImplemented
        return self.numbers.apply(op, other, self) if swapped else self.numbers.apply(op, self, other)

    return method


TRACED = (TracedFloat, TracedInt)
_NUMBERS = (*TRACED, int, float, bool)
for _name in "add sub mul truediv floordiv mod pow".split():
    setattr(TracedFloat, f"__r{_name}__", _binary(getattr(operator, _name), swapped=True))
for _name in "add sub mul truediv floordiv mod pow lt le gt ge eq ne".split():
    setattr(TracedFloat, f"__{_name}__", _binary(getattr(operator, _name), swapped=False))
for _op in (operator.neg, operator.pos, operator.abs, round, math.trunc, math.floor, math.ceil):
    setattr(TracedFloat, f"__{_op.__name__}__", lambda self, *args, _op=_op: self.numbers.apply(_op, self, *args))


def _divmod(*, swapped: bool) -> Callable[[Any, Any], object]:
    def method(self: Any, other: Any) -> object:
        if type(other) not in _NUMBERS:
            return NotImplemented
        a, b = (other, self) if swapped else (self, other)
        return a // b, a % b

    return method


for _cls in TRACED:
    for _name, _swapped in (("__divmod__", False), ("__rdivmod__", True)):
        setattr(_cls, _name, _divmod(swapped=_swapped))


# -------------------------------------------------------------------- functions of numbers
# Functions of `math` on numbers that the graph computes: recorded, as arithmetic on them is; `min` and `max` too.
#
# Functions of `math` take a float's value in C, and C asks no class of numbers; `min` and `max` compare, and each
# comparison would be a decision; `float` and `int` in the program's code are here too. A tensor of one element counts
# as its number. Without the C++ part all are decisions: the graph then holds for one number.


_NAMES = (
    "acos acosh asin asinh atan atan2 atanh cbrt comb copysign cos cosh degrees erf erfc exp exp2 expm1 fabs fma fmod "
    "gamma gcd hypot isclose isfinite isinf isnan isqrt lcm ldexp lgamma log log10 log1p log2 nextafter perm pow "
    "radians remainder sin sinh sqrt tan tanh ulp"
).split()
_FUNCTIONS = [getattr(math, name) for name in _NAMES if hasattr(math, name)]


def _fsum(*items: float) -> float:
    return math.fsum(items)


def _sum(start: float, *items: float) -> float:
    return sum(items, start)


_CONVERSIONS: dict[Any, type] = {float: TracedFloat, **dict.fromkeys((int, math.floor, math.ceil), TracedInt)}
NUMBER_FUNCTIONS = (*_FUNCTIONS, min, max, _sum, _fsum, *_CONVERSIONS, bool, round, math.trunc)
"""What a graph may call on numbers besides operators."""


@functools.cache
def trace_math() -> None:
    """From now on they are recorded, for numbers of captures."""
    for function in _FUNCTIONS:
        divert(function, _recorded(function), TRACED, asked=True)
    for function, same in _CONVERSIONS.items():  # libraries ask for floats too: schedulers of a loss
        divert(function, _recorded(function, same), (TracedFloat,) if function is float else (), asked=True)
    for function, (instead, types) in _OF_ITEMS.items():
        divert(function, instead, types)


def _recorded(function: Callable[..., object], same: type | None = None) -> Callable[..., Any]:
    """`same`: the numbers that the function gives back as they are."""

    def recorded(*args: Any, **kwargs: object) -> Any:
        for arg in filter(_is_one, args if function is not int else ()):
            if arg.requires_grad and torch.is_grad_enabled():
                heard_by_modes(warn_of_scalar, (arg,))  # whoever hears warnings is told
        args = args if kwargs else tuple(arg.item() if _is_one(arg) else arg for arg in args)
        number = None if kwargs else next((arg for arg in args if type(arg) in TRACED), None)
        numbers = None if number is None else numbers_of(number)
        if numbers is None:
            return NotImplemented
        is_so = type(number) is same and len(args) == 1 and type(_value_of(number)) in (float, int)
        return number if is_so else numbers.apply(function, *args)

    return recorded


def _is_one(value: Any) -> bool:
    """Whether a value is a tensor of one element."""
    return isinstance(value, torch.Tensor) and value.numel() == 1 and not value.is_complex()


def warn_of_scalar() -> None:
    """A float is made of a tensor that requires grad: PyTorch warns of the first in a process."""
    with plain_execution(), torch.enable_grad():
        float(torch.ones((), requires_grad=True))


def _recorded_of_items(function: Callable[..., object], kinds: set[type]) -> Callable[..., object]:
    recorded = _recorded(function)

    def of_items(*args: Any, **kwargs: object) -> object:
        items = args[0] if len(args) == 1 else args
        is_known = not kwargs or (items is not args and kwargs.keys() == {"default"} and kinds is _FLOATS)
        return recorded(*items) if is_known and {*map(type, items)} <= kinds else NotImplemented

    return of_items


_FLOATS = {float, TracedFloat}  # of an integer and a float, `min` and `max` may give either type: decided on
_of_sum = _recorded_of_items(_sum, {*_NUMBERS})
_OF_ITEMS: dict[Any, tuple[Callable[..., object], tuple[type, ...]]] = {
    min: (_recorded_of_items(min, _FLOATS), (TracedFloat,)),
    max: (_recorded_of_items(max, _FLOATS), (TracedFloat,)),
    # From Python 3.12 on `sum` compensates the rounding of floats, which additions do not.
    sum: (lambda items, /, start=0: _of_sum([start, *items]), (TracedFloat,)),
    math.fsum: (_recorded_of_items(_fsum, {*_NUMBERS}), TRACED),
}
