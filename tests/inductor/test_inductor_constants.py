"""Constants without dimensions, which Inductor keeps as numbers: each operator that reads one gets a tensor of it."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad.inductor._torch import inductor as door

pytestmark = [
    pytest.mark.skipif(not door.cpp_compiler_found(), reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def an_item_of_a_view(x):
    y = x * 2
    y.view(-1)[0] = 5
    y.view(-1)[1] = float("inf")
    y.view(-1)[2] = -0.0
    return y * 3


def columns(x):
    y = x * 2
    y[:, 1:3] = 5
    y[:, 0] = torch.tensor(2.0)
    return y.sin()


def items_of_many_dtypes(x):
    half, double, whole = x.bfloat16() * 1, x.double() * 1, x.long() * 2
    for y in (half, double, whole):
        y.view(-1)[1] = 0.7
    mask = torch.zeros(3, 4, dtype=torch.bool)
    mask[0] = True
    return x * mask, half, double, whole


def stacked_and_repeated(x):
    numbers = torch.stack([torch.tensor(1.0), x.sum(), torch.tensor(2.0)])
    return numbers, x @ torch.tensor(2.0).repeat(4), torch.cat([torch.tensor(1.0).view(1), x[0]])


def an_index(x):
    return x.index_put((torch.tensor(1),), torch.tensor(2.0)), torch.nn.functional.embedding(torch.tensor(1), x)


def added_to_each(x):
    return torch._foreach_add([x, x * 2], torch.tensor(1.0))


def in_a_branch(x):
    def written(x):
        y = x * 2
        y.view(-1)[0] = 5
        return y

    return torch.cond(x.sum() > 0, written, torch.cos, (x,))


def the_result_itself(x):
    return x + 1, torch.tensor(3.0)


PROGRAMS = [
    an_item_of_a_view,
    columns,
    items_of_many_dtypes,
    stacked_and_repeated,
    an_index,
    added_to_each,
    in_a_branch,
    the_result_itself,
]


def observed(function, x):
    out = function(x)
    out = list(out) if isinstance(out, (tuple, list)) else [out]
    leaves = [value.sum() for value in out if value.requires_grad]
    return out, torch.autograd.grad(sum(leaves), x)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_constant_number_goes_to_any_operator(program):
    x = torch.linspace(-1, 2, 12).view(3, 4).requires_grad_()
    compiled = foregrad.compile(program, backend="inductor", on_unsupported="raise")
    torch.testing.assert_close(observed(compiled, x), observed(program, x))


def test_through_the_door_of_dynamo():
    torch._dynamo.reset()
    x = torch.linspace(-1, 2, 12).view(3, 4).requires_grad_()
    compiled = torch.compile(an_item_of_a_view, backend="foregrad", options={"backend": "inductor"})
    torch.testing.assert_close(observed(compiled, x), observed(an_item_of_a_view, x))
