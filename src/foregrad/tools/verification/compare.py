"""Two tensors compared: bits, units in the last place, and whether a difference is rounding or wrong.

The judge is the computation in float64. Its results say how far each side is from the exact value. A second run in
float64 multiplies every intermediate result by one plus a random relative error of the narrow type's size: its distance
shows the amplification of rounding in the computation (Monte Carlo arithmetic: Parker, 1997). A result is *rounding*
while it is within `_SLACK` times the larger of eager's own error and this distance; anything beyond is *wrong*.

Known weakness: the allowance is one number for a tensor, so an error in a small element that is below the rounding of
the largest one passes.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable

import torch

_SLACK = 8.0
_PLAIN = (int, float, complex, str, bytes, torch.dtype, torch.device)  # further objects are compared by type alone
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Verdict(enum.IntEnum):
    """How a stage's results are to eager's; the larger, the worse. NOTHING: there was nothing to compare."""

    NOTHING = 0
    EQUAL = 1
    ROUNDING = 2
    WRONG = 3

    def __str__(self) -> str:
        return ("nothing was compared", "equal bit for bit", "rounding", "WRONG")[self]


@dataclasses.dataclass(frozen=True, slots=True)
class Exact:
    """A tensor as float64 has it, and as float64 has it with a rounding error after each operator."""

    value: torch.Tensor
    shaken: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """How one tensor differs from the expected one. `index`, `expected`, `actual`, `exact` are of the worst element.

    `ulps`: its distance in representable numbers of the tensor's type. `absolute`: the largest difference. `count` of
    `numel` elements differ. `allowed`: the largest difference from `exact` that is rounding. `what` takes the place of
    numbers where dtype or shape differ.
    """

    verdict: Verdict
    what: str = ""
    ulps: int = 0
    absolute: float = 0.0
    count: int = 0
    numel: int = 0
    index: tuple[int, ...] = ()
    expected: float | complex = 0.0
    actual: float | complex = 0.0
    exact: float | complex | None = None
    allowed: float | None = None

    def __str__(self) -> str:
        return str(self.verdict) if self.verdict is Verdict.EQUAL else f"{self.verdict}: {self.described()}"

    def described(self) -> str:
        """The difference, without the verdict."""
        if self.what:
            return self.what
        text = f"{self.count:,} of {self.numel:,} elements differ, by up to {self.absolute:.3g}"
        text += f"; worst at {list(self.index)}: expected {self.expected:.9g}, got {self.actual:.9g}"
        text += f", {self.ulps:,} ULPs apart" if self.ulps else ""
        return text + (f", in float64 {self.exact:.9g}" if self.exact is not None else "")


EQUAL = Gap(Verdict.EQUAL)


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors of one shape and dtype hold equal bits; a NaN equals any NaN."""
    if left.dtype.is_floating_point or left.dtype.is_complex:
        left, right = _real(left), _real(right)
        if torch.equal(left, right):
            return bool((left.signbit() == right.signbit()).all()) if (left == 0).any() else True
        both = left.isnan() & right.isnan()
        return bool(((left == right) & (left.signbit() == right.signbit()) | both).all())
    return torch.equal(left, right)


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def ulps_between(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """For each element of two tensors of one floating-point dtype, the representable numbers between them (int64).

    Zero and minus zero are one number. Pairs with a NaN or an infinity give 0.

    Example:
        >>> import torch
        >>> from foregrad.tools.verification.compare import ulps_between
        >>> ulps_between(torch.tensor([1.0, 0.0]), torch.tensor([1.0 + 2**-23, -0.0]))
        tensor([1, 0])
    """
    usable = left.isfinite() & right.isfinite()
    bits = _BITS[left.dtype.itemsize]
    low = torch.iinfo(bits).min
    ordered = []
    for tensor in (left, right):
        number = tensor.contiguous().view(bits).to(torch.int64)
        ordered.append(torch.where(number < 0, low - number, number))
    return torch.where(usable, (ordered[0] - ordered[1]).abs(), 0)


def compare(actual: object, expected: object, exact: Callable[[], Exact | None] = lambda: None) -> Gap:
    """How `actual` differs from `expected`, by `exact()` (asked where bits differ) or `torch.testing`'s tolerances."""
    if not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
        if isinstance(actual, torch.Tensor) or isinstance(expected, torch.Tensor):
            return Gap(Verdict.WRONG, f"expected {_named(expected)}, got {_named(actual)}")
        same = actual is expected or type(actual) is type(expected)
        if same and isinstance(expected, _PLAIN):
            same = repr(actual) == repr(expected)  # all nans are equal
        return EQUAL if same else Gap(Verdict.WRONG, f"expected {expected!r}, got {actual!r}")
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return Gap(Verdict.WRONG, f"expected {_named(expected)}, got {_named(actual)}")
    if actual.is_sparse or actual.layout is not torch.strided:
        actual, expected = actual.to_dense(), expected.to_dense()
    actual, expected = actual.detach(), expected.detach().to(actual.device)
    if actual.dtype.itemsize == 1 and actual.is_floating_point():
        actual, expected = actual.float(), expected.float()  # these dtypes have no arithmetic
    if actual.numel() == 0 or same_bits(actual, expected):
        return EQUAL
    reference = exact()
    if not actual.is_floating_point() and not actual.is_complex():
        return _integers(actual, expected, reference)
    if actual.is_complex() and reference is not None:
        reference = Exact(_real(reference.value), _real(reference.shaken))
    return _floats(_real(actual), _real(expected), reference)


def _floats(actual: torch.Tensor, expected: torch.Tensor, exact: Exact | None) -> Gap:
    a, e = actual.double(), expected.double()
    differs, off = a != e, (a - e).abs()
    if not math.isfinite(float(off.sum())):
        differs &= ~(a.isnan() & e.isnan())
        off = torch.where(differs, off.nan_to_num(nan=math.inf), 0.0)
    if exact is None:
        tolerance = _tolerance(actual.dtype)
        allowed = tolerance[1] + tolerance[0] * e.abs()
        beyond, limit = off > allowed, _largest(allowed)
    else:
        x = exact.value.to(a.device)
        own, strays = (_largest(y - x) for y in (e, exact.shaken.to(a.device)))
        limit = _SLACK * max(own, strays)
        eps = torch.finfo(actual.dtype).eps
        beyond = (a - x).abs() > limit + 2 * eps * x.abs()
        # Where float64 itself is no number, or the narrow type overflows, eager has the word.
        beyond = torch.where(x.isfinite() & e.isfinite(), beyond | ~a.isfinite(), differs)
        beyond &= differs
    worst = int((torch.where(beyond, off + 1, 0.0) if beyond.any() else off).argmax())
    return Gap(
        Verdict.WRONG if beyond.any() else Verdict.ROUNDING,
        ulps=int(ulps_between(*(t.flatten()[worst : worst + 1] for t in (actual, expected)))),
        absolute=float(off.max()),
        count=int(differs.sum()),
        numel=actual.numel(),
        index=_unraveled(worst, actual.shape),
        expected=float(e.flatten()[worst]),
        actual=float(a.flatten()[worst]),
        exact=None if exact is None else float(exact.value.flatten()[worst]),
        allowed=limit,
    )


def _integers(actual: torch.Tensor, expected: torch.Tensor, exact: Exact | None) -> Gap:
    """A number that is chosen by comparison may differ where float64 does not agree with eager either."""
    differs = actual != expected
    settled = differs
    if exact is not None:
        unsettled = [(x.to(expected.device) != expected) for x in (exact.value, exact.shaken)]
        settled = differs & ~(unsettled[0] | unsettled[1])
    worst = int((settled if settled.any() else differs).flatten().to(torch.int8).argmax())
    a, e = int(actual.flatten()[worst]), int(expected.flatten()[worst])
    return Gap(
        Verdict.WRONG if settled.any() else Verdict.ROUNDING,
        absolute=float(abs(a - e)),
        count=int(differs.sum()),
        numel=actual.numel(),
        index=_unraveled(worst, actual.shape),
        expected=e,
        actual=a,
    )


def _tolerance(dtype: torch.dtype) -> tuple[float, float]:
    """(relative, absolute)."""
    by_dtype = {torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5), torch.float32: (1.3e-6, 1e-5)}
    return by_dtype.get(dtype, (1e-7, 1e-7))


def _largest(tensor: torch.Tensor) -> float:
    """The largest size of a finite element."""
    sizes = tensor.abs()
    sizes = sizes[sizes.isfinite()]
    return float(sizes.max()) if sizes.numel() else 0.0


def _unraveled(position: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(map(int, torch.unravel_index(torch.tensor(position), shape)))


def _named(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)
