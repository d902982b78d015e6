"""What an editor knows of what `compile` and `eager_region` give: checked by mypy in `make lint`, never run."""

from collections.abc import Callable

from torch import Tensor, nn
from typing_extensions import assert_type

import foregrad


@foregrad.compile
def plain(x: Tensor, scale: float = 1.0) -> Tensor:
    return x * scale


@foregrad.compile(backend="eager")
def configured(x: Tensor, *, scale: float) -> Tensor:
    return x * scale


@foregrad.eager_region
def region(x: Tensor) -> float:
    return float(x)


class Model(nn.Module):
    own = 3


def check(x: Tensor, function: Callable[[Tensor, int], str]) -> None:
    assert_type(foregrad.compile(Model(), backend="eager", on_unsupported="raise"), Model)
    assert_type(foregrad.compile(function), Callable[[Tensor, int], str])
    assert_type(foregrad.compile(Model()).own, int)
    assert_type(plain(x, scale=2.0), Tensor)
    assert_type(configured(x, scale=2.0), Tensor)
    assert_type(region(x), float)
    plain("no tensor")  # type: ignore[arg-type]
    configured(x)  # type: ignore[call-arg]
    region(x, 1)  # type: ignore[call-arg]
    foregrad.compile(3)  # type: ignore[call-overload]
    foregrad.compile(plain, mode="max-autotune")  # type: ignore[call-overload]
    foregrad.compile(plain, on_unsupported="warn")  # type: ignore[call-overload]
