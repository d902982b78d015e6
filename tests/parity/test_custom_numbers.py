"""Custom operators that return numbers, alone or beside tensors: a number that depends on values is decided on."""

import pytest
import torch
from torch import Tensor

from tests.parity.oracle import check

LIBRARY = "foregrad_numbers"


def operator(name, fn, returns, fake=None, autograd=None):
    fn.__annotations__ = {"x": Tensor, "return": returns}
    made = torch.library.custom_op(f"{LIBRARY}::{name}", mutates_args=())(fn)
    if fake is not None:
        made.register_fake(fake)
    if autograd is not None:
        made.register_autograd(autograd, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]))
    return made


def some_size():
    return torch.library.get_ctx().new_dynamic_size()


def by_sine(ctx, gradient, *_):
    return gradient * ctx.saved_tensors[0].cos()


def by_both(ctx, gradients, *_):
    (x,) = ctx.saved_tensors
    return gradients[0] * x.cos() - gradients[1] * x.sin()


count = operator("count", lambda x: int((x > 0).sum()), int)
total = operator("total", lambda x: float(x.sum()), float)
positive = operator("positive", lambda x: bool(x.sum() > 0), bool)
rows = operator("rows", lambda x: x.size(0) * 2, int, lambda x: x.size(0) * 2)
with_count = operator(
    "with_count",
    lambda x: (x.sin(), int((x > 0).sum())),
    tuple[Tensor, int],
    lambda x: (torch.empty_like(x), some_size()),
    by_sine,
)
with_rows = operator(
    "with_rows", lambda x: (x.sin(), x.size(0)), tuple[Tensor, int], lambda x: (torch.empty_like(x), x.size(0)), by_sine
)
with_total = operator("with_total", lambda x: (x.sin(), float(x.sum())), tuple[Tensor, float], None, by_sine)
list_and_count = operator(
    "list_and_count",
    lambda x: ([x.sin(), x.cos()], int((x > 0).sum())),
    tuple[list[Tensor], int],
    None,
    by_both,
)
list_and_three = operator(
    "list_and_three",
    lambda x: ([x.sin(), x.cos()], 3),
    tuple[list[Tensor], int],
    lambda x: ([torch.empty_like(x), torch.empty_like(x)], 3),
    by_both,
)

PROGRAMS = {
    "a count": lambda x: count(x * 2),
    "multiplied by a count": lambda x: x * count(x),
    "as large as a count": lambda x: torch.ones(count(x)) + x.sum(),
    "a count that decides": lambda x: x * 2 if count(x) > 6 else x * 3,
    "a float": lambda x: x * total(x),
    "a bool that decides": lambda x: x * 2 if positive(x) else x * 3,
    "a size": lambda x: x * rows(x),
    "a tensor and a count": lambda x: with_count(x),
    "a tensor times its count": lambda x: (lambda out: out[0] * out[1])(with_count(x * 2)),
    "a tensor and a size": lambda x: (lambda out: out[0] * out[1])(with_rows(x)),
    "a tensor and a float": lambda x: (lambda out: out[0] * out[1])(with_total(x)),
    "a list and a count": lambda x: (lambda out: out[0][0] * out[0][1] * out[1])(list_and_count(x)),
    "a list and a number": lambda x: (lambda out: out[0][0] * out[0][1] * out[1])(list_and_three(x)),
    "twice": lambda x: (with_count(x), with_count(x + 1), count(x)),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_of_custom_operators(name, requires_grad):
    check(PROGRAMS[name], lambda: (torch.randn(3, 4, requires_grad=requires_grad),))
