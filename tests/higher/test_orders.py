"""Derivatives of the first three orders, by finite differences and against eager."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.gradcheck import GradcheckError

import foregrad
from tests.higher.table import TABLE

# Where eager's own derivative is not that of the function: parts that autograd is told to look past.
NOT_ITS_DERIVATIVE = {"detached part"}

# Eager's third derivative treats the saved statistics as constants; finite differences tell it from the true one.
# Since 2.14 the formula that a capture takes, which allows for zeros, ends in constants; eager's without zeros divides.
CONSTANT_IN_THE_END = {"cumprod"}
WRONG_IN_EAGER_AT_THREE = {"layer norm", "batch norm"}


def directional(fn, order):
    """x -> the order-th derivative of sum(fn(x)), contracted with fixed vectors at each step but the last."""

    def derivative(*inputs):
        out = fn(*inputs)
        value = (out * torch.linspace(1, 2, out.numel(), dtype=out.dtype).view(out.shape)).sum()
        for step in range(order):
            grads = torch.autograd.grad(value, inputs, create_graph=True, materialize_grads=True)
            value = sum((g * torch.linspace(1 + step, 2, g.numel(), dtype=g.dtype).view(g.shape)).sum() for g in grads)
            if not value.requires_grad:
                break
        return value

    return derivative


def inputs_of(name):
    torch.manual_seed(0)
    return TABLE[name][1]()


def test_forty_functions_are_checked_to_the_third_order():
    assert len(TABLE.keys() - NOT_ITS_DERIVATIVE - WRONG_IN_EAGER_AT_THREE) >= 40


@pytest.mark.parametrize("name", sorted(WRONG_IN_EAGER_AT_THREE))
def test_what_is_not_checked_there_is_wrong_in_eager(name):
    with pytest.raises((GradcheckError, RuntimeError), match=r"Jacobian|does not support 3rd"):  # since 2.14 it raises
        torch.autograd.gradcheck(directional(TABLE[name][0], 2), inputs_of(name), fast_mode=True, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", TABLE)
def test_three_orders_against_eager(name):
    fn = TABLE[name][0]
    compiled = foregrad.compile(fn, backend="eager")
    for order in range(4):
        wanted, found = (value_and_gradients(f, order, inputs_of(name)) for f in (fn, compiled))
        if isinstance(wanted, str):
            assert found == wanted
            continue
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-9, atol=1e-11)
        if len(found) == 1 and name in CONSTANT_IN_THE_END:
            found += [torch.zeros_like(x) for x in inputs_of(name)]
        torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-8, atol=1e-10)


def value_and_gradients(fn, order, inputs):
    """What `directional` gives and its gradients; the message where an operator has none of that order."""
    try:
        value = directional(fn, order)(*inputs)
        gradients = torch.autograd.grad(value, inputs, materialize_grads=True) if value.requires_grad else ()
    except RuntimeError as error:
        return str(error)
    return [value, *gradients]


@pytest.mark.parametrize("name", [n for n in TABLE if n not in NOT_ITS_DERIVATIVE][::4])
def test_three_orders_against_finite_differences(name):
    """Of some: all are compared with eager's, which PyTorch's own tests compare with differences."""
    compiled = foregrad.compile(TABLE[name][0], backend="eager")
    for order in range(2 if name in WRONG_IN_EAGER_AT_THREE else 3):
        inputs = inputs_of(name)
        if not directional(compiled, order)(*inputs).requires_grad:
            break
        assert torch.autograd.gradcheck(directional(compiled, order), inputs, fast_mode=True, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("name", ["layer norm", "attention", "conv", "written in place", "solve", "loop"])
def test_non_leaf_inputs_under_either_partition(name, partition):
    fn = TABLE[name][0]
    compiled = foregrad.compile(fn, backend="eager", partition=partition)

    def behind(function):
        return lambda *leaves: function(*(x * 1.5 for x in leaves))

    inputs = inputs_of(name)
    for order in range(4):
        wanted, found = directional(behind(fn), order)(*inputs), directional(behind(compiled), order)(*inputs)
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
