"""Programs with PyTorch's higher-order operators as users write them, beyond the samples of `hop_db`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.map import map as map_slices
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.strict_mode import strict_mode
from torch._higher_order_ops.while_loop import while_loop
from torch._higher_order_ops.wrap import wrap, wrap_with_autocast, wrap_with_set_grad_enabled

PROGRAMS: dict[str, Callable[[bool], tuple[Any, tuple[Any, ...]]]] = {}


def program(*shapes: tuple[int, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A function of tensors of these shapes."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        def make(grad: bool) -> tuple[Any, tuple[Any, ...]]:
            torch.manual_seed(1)
            return function, tuple(torch.rand(shape).add(0.1).requires_grad_(grad) for shape in shapes)

        PROGRAMS[function.__name__] = make
        return function

    return add


@program((3,), (3,))
def cond_of_a_value(x, y):
    z = x * 2
    return torch.cond(z.sum() > 100, lambda z, y: z.exp() + y, lambda z, y: z - y, (z, y)) * 3


@program((3,), (3,))
def cond_in_cond(x, y):
    def inner(x, y):
        return torch.cond(x.sum() > 0, lambda x, y: (x * y, y + 1), lambda x, y: (x / y, x + 1), (x, y))

    return torch.cond(y.sum() > 0, inner, lambda x, y: (x - y, x + y), (x, y))


@program((3,))
def while_a_value(x):
    return while_loop(lambda i, x: i < 4, lambda i, x: (i + 1, x.sin() * 2), (torch.tensor(0), x))


@program((3,), (3,))
def while_with_a_weight(x, w):
    return while_loop(lambda i, x: x.sum() < 50, lambda i, x: (i + 1, x * (1 + w)), (torch.tensor(0), x))[1]


@program((4,), (5, 4))
def scan_a_sum(carry, xs):
    return scan(lambda c, x: (c + x, c * x), carry, xs)


@program((4,), (5, 4), (4, 4))
def scan_a_cell(carry, xs, w):
    def cell(h, x):
        h = torch.tanh(h @ w + x)
        return h, h.clone()

    return scan(cell, carry, xs)


@program((4,), (4, 5))
def scan_in_reverse(carry, xs):
    return scan(lambda c, x: (c * x, c + 1), carry, xs, dim=1, reverse=True)


@program((2,), (5, 2), (5, 2))
def scan_of_trees(carry, a, b):
    def step(c, x):
        return {"h": c["h"] * x[0] + x[1]}, (c["h"].sin(), x[0] * 1)

    return scan(step, {"h": carry}, [a, b])


@program((5, 3))
def associative_sum(xs):
    return associative_scan(lambda a, b: a + b, xs, 0, combine_mode="generic")


@program((5, 3), (5, 3))
def associative_recurrence(gate, value):
    def step(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    return associative_scan(step, (gate, value), 0, combine_mode="generic")


@program((5, 3), (3,))
def map_with_a_weight(xs, w):
    return map_slices(lambda x, w: (x * w).sin(), xs, w)


@program((5, 3), (3,))
def map_that_closes_over(xs, w):
    return map_slices(lambda x: (x * w, x + 1), xs)


@program((5, 3), (3,))
def map_of_a_part(xs, unused):
    return map_slices(lambda x, u: x.exp(), xs, unused)


@torch.compiler.nested_compile_region
def _layer(x, w):
    return (x @ w).relu()


@program((4, 4), (4, 4))
def nested_region(x, w):
    return _layer(_layer(x, w), w).sum(0)


@program((4, 4), (4, 4))
def checkpointed(x, w):
    block = torch.utils.checkpoint.checkpoint(lambda x: torch.tanh(x @ w) @ w, x, use_reentrant=False)
    return block.sin()


@program((4, 4))
def checkpointed_with_dropout(x):
    return torch.utils.checkpoint.checkpoint(lambda x: torch.dropout(x.sin(), 0.5, True) * x, x, use_reentrant=False)


@program((4, 4))
def wrapped(x):
    return wrap(lambda x: x.sin() * 2, x)


@program((4, 4))
def wrapped_without_gradients(x):
    return wrap_with_set_grad_enabled(False, lambda x: x.sin(), x) + x


@program((4, 4))
def wrapped_with_autocast(x):
    return wrap_with_autocast("cpu", torch.bfloat16, True, None, lambda x: x @ x, x)


@program((4, 4))
def hinted(x):
    return hints_wrapper(lambda x: x.sin(), (x,), {}, hints={"level": 1})


@program((4, 4))
def strict(x):
    return strict_mode(lambda x: (x.sin(),), (x,))


@torch.library.custom_op("foregrad_hops::scale_", mutates_args={"x"})
def _scale(x: torch.Tensor, by: float) -> None:
    x.mul_(by)


@torch.library.custom_op("foregrad_hops::add_both", mutates_args={"x", "y"})
def _add_both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.add_(1)
    y.add_(x)
    return x + y


@_add_both.register_fake
def _(x, y):
    return torch.empty_like(x)


@program((4,))
def custom_operator_that_writes(x):
    y = x.sin()
    with torch.no_grad():
        z = y.clone()
        _scale(z, 3.0)
    return y * z


@program((4,), (4,))
def custom_operator_that_writes_to_arguments(x, y):
    x, y = x.detach(), y.detach()
    return _add_both(x, y) * 2


@program((4,))
def printed(x):
    y = x * 2
    torch._higher_order_ops.print("sum {}", y.detach().sum())
    return y.sin()


@program((4, 4))
def quantised(x):
    return torch._higher_order_ops.InvokeQuant()(lambda x, y: (x.sin() * y,), x, x)[0]


@program((3, 4))
def in_another_type(x):
    whole = (x.detach() * 10).to(torch.int8)
    return torch.ops.higher_order.out_dtype(torch.ops.aten.mul.Tensor, torch.int32, whole, whole)
