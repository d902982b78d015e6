"""Tensors of other classes: taken where the program can't tell, refused by name where it can."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad


class Named(torch.Tensor):
    pass


class Own(nn.Parameter):
    pass


class Doubling(nn.Parameter):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def by_class(x):
    return x * 3 if isinstance(x, Named) else x * 2


@pytest.mark.parametrize(
    "make", [lambda x: x, lambda x: x.as_subclass(Named), lambda x: nn.Parameter(x.as_subclass(Named))]
)
def test_a_class_that_the_program_asks_for(make):
    result, expected = foregrad.compile(by_class, backend="eager")(make(torch.ones(3))), by_class(make(torch.ones(3)))
    assert type(result) is type(expected)
    assert result.tolist() == expected.tolist()


def test_a_class_that_handles_operators_is_refused():
    with pytest.raises(foregrad.errors.UnsupportedTensorError, match="Doubling"):
        foregrad.compile(by_class, backend="eager")(Doubling(torch.ones(3)))


@pytest.mark.parametrize("make", [lambda: Own(torch.ones(3, 3)), lambda: nn.Parameter(torch.ones(3, 3))])
def test_a_parameter_of_another_class(make):
    model = nn.Linear(3, 3)
    model.weight = make()
    compiled, x = foregrad.compile(model, backend="eager"), torch.ones(2, 3)
    assert torch.equal(compiled(x), model(x))


def test_a_weight_of_a_class_with_operators_of_its_own_is_refused():
    model = nn.Linear(3, 3)
    model.weight = Doubling(torch.ones(3, 3))
    with pytest.raises(foregrad.errors.UnsupportedTensorError, match="parameter weight"):
        foregrad.compile(model, backend="eager")(torch.ones(2, 3))
