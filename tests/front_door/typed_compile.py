"""What an editor knows of what `compile` and `eager_region` give: checked by mypy in `make lint`, never run.

pyright takes each line as mypy does (tried with 1.1.414).
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn
from typing_extensions import assert_type

import foregrad
from foregrad.extend import CompiledCallable, FunctionView


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

    @foregrad.compile(backend="eager")
    def scaled(self, x: Tensor, factor: int) -> Tensor:
        return x * factor


T = TypeVar("T")


@foregrad.compile
def identity(x: T) -> T:
    return x


def loss(w: Tensor, scale: float = 1.0) -> Tensor:
    return (w * scale).sum()


def loss_and_count(w: Tensor) -> tuple[Tensor, int]:
    return w.sum(), 3


def check(x: Tensor, function: Callable[[Tensor, int], str]) -> None:
    assert_type(foregrad.compile(Model(), backend="eager", on_unsupported="raise"), Model)
    assert_type(foregrad.compile(function), CompiledCallable[[Tensor, int], str])
    as_callable: Callable[[Tensor, int], str] = foregrad.compile(function)
    as_callable(x, 1)
    assert_type(plain.foregrad.view(), FunctionView)
    assert_type(plain.foregrad.specializations[0].source(), Any)
    assert_type(Model().scaled(x, 2), Tensor)
    assert_type(identity(3), int)
    Model().scaled("no tensor", 2)  # type: ignore[arg-type]
    assert_type(foregrad.compile(Model()).own, int)
    assert_type(plain(x, scale=2.0), Tensor)
    assert_type(configured(x, scale=2.0), Tensor)
    assert_type(region(x), float)
    plain("no tensor")  # type: ignore[arg-type]
    configured(x)  # type: ignore[call-arg]
    region(x, 1)  # type: ignore[call-arg]
    foregrad.compile(3)  # type: ignore[call-overload]
    foregrad.compile(plain, mode="max-autotune")  # type: ignore[call-overload]
    foregrad.compile(plain, backend=3)  # type: ignore[call-overload]
    foregrad.nonexistent  # type: ignore[attr-defined]
    assert_type(foregrad.value_and_grad(loss)(x, scale=2.0), tuple[Tensor, Any])
    assert_type(foregrad.value_and_grad(loss_and_count, has_aux=True)(x), tuple[tuple[Tensor, int], Any])
    foregrad.value_and_grad(loss)("no tensor")  # type: ignore[arg-type]
    assert_type(foregrad.config.recompile_limit, int)
    foregrad.config.recompile_limit = "many"  # type: ignore[assignment]
    foregrad.compile(plain, on_unsupported="warn")  # type: ignore[call-overload]
