"""Tensors made of numbers and of lists that hold tensors: values stay values, nothing is read out of a fake."""

import numpy as np
import pytest
import torch

import foregrad
from tests.parity.oracle import check


def pair():
    return torch.randn(()), torch.randn(()).requires_grad_()


def in_a_row(x, y):
    rows = torch.zeros(2, 2)
    rows[0] = torch.tensor([x, y])
    rows[1] = torch.tensor([1, 2])
    return rows * x


# Once a process, in eager alone.
pytestmark = pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")

LISTS = {
    "two": lambda x, y: torch.tensor([x, y]),
    "nested": lambda x, y: torch.tensor([[x, y], (y, x)]) * y,
    "with numbers": lambda x, y: torch.tensor([x, 1.0, y, 2]) * y,
    "nested, with numbers": lambda x, y: torch.tensor([[[x], [1]], [[2.5], [y]]]),
    "of another type": lambda x, y: torch.tensor([x, y], dtype=torch.float64),
    "comparisons": lambda x, y: torch.tensor([x > 0, True, y > 0]),
    "comparisons and numbers": lambda x, y: torch.tensor([x > 0, True, y]),
    "half and single": lambda x, y: torch.tensor([x.half(), y]),
    "complex": lambda x, y: torch.tensor([torch.complex(x, y), y]),
    "one element each": lambda x, y: torch.tensor([x[None], y[None, None]]),
    "requires grad": lambda x, y: torch.tensor([x * 2, y], requires_grad=True) * y,
    "results": lambda x, y: torch.tensor([x.sin(), y * 2]).mean() * y,
    "as_tensor": lambda x, y: torch.as_tensor([x, y, 3]),
    "asarray": lambda x, y: torch.asarray([x, y], dtype=torch.float64),
    "new_tensor": lambda x, y: x.double().new_tensor([x, y, 1]),
    "random numbers": lambda x, y: torch.tensor([torch.rand(()), torch.rand(())]) + x,
    "constants": lambda x, y: torch.tensor([torch.arange(3).sum(), 4]) + x,
    "an index": lambda x, y: torch.stack([x, y, x])[torch.tensor([(x > 0).long(), 2])],
    "set": in_a_row,
    "ragged": lambda x, y: torch.tensor([[x, y], [x]]),
    "several elements": lambda x, y: torch.tensor([torch.ones(2) * x, y]),
    "no number": lambda x, y: torch.tensor([x, "a"]),
    "new": lambda x, y: x.new([x, y]) * y,
    "new, nested": lambda x, y: x.double().new([[x, 1], [y, 2.5]]) * y,
    "new, of sizes": lambda x, y: x.new(2, 3).fill_(1) * y,
    "new, of a tensor": lambda x, y: x.new(torch.stack([x, y])) * y,
    "new, no number": lambda x, y: x.new([x, "a"]),
}
# Constructors whose C++ asks each tensor for a number of Python's.
OLD = {
    "Tensor": lambda x, y: torch.Tensor([x, y]) * y,
    "Tensor, nested": lambda x, y: torch.Tensor([[x, y], [y, 1.0]]) * y,
    "Tensor, of a tuple": lambda x, y: torch.Tensor((x, y * 2), device="cpu") * y,
    "Tensor, one element each": lambda x, y: torch.Tensor([x[None], y[None]]) * y,
    "FloatTensor": lambda x, y: torch.FloatTensor([x, y, 2.0]) * y,
    "DoubleTensor": lambda x, y: torch.DoubleTensor([x]) * y,
    "HalfTensor": lambda x, y: torch.HalfTensor([x, y]) * y,
    "BFloat16Tensor": lambda x, y: torch.BFloat16Tensor([x, y]) * y,
    "LongTensor": lambda x, y: torch.LongTensor([(x * 10).long(), 3]) * y,
    "IntTensor": lambda x, y: torch.IntTensor([(x * 10).int(), 3]) * y,
    "ByteTensor": lambda x, y: torch.ByteTensor([(x > 0).byte()]) * y,
    "BoolTensor": lambda x, y: torch.BoolTensor([x > 0, y > 0]) * y,
    "integers of fractions": lambda x, y: torch.LongTensor([x]) * y,
    "a closed-over tensor": lambda x, y: torch.FloatTensor([closed_over, x]) * y,
    "several elements": lambda x, y: torch.FloatTensor([torch.ones(2) * x, y]),
}
closed_over = torch.tensor(1.5)


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_tensors(name):
    check(LISTS[name], pair)


@pytest.mark.parametrize("name", OLD)
def test_an_old_constructor(name):
    check(OLD[name], pair, calls=3)


def test_no_value_of_a_list_is_a_part_of_the_program():
    compiled = foregrad.compile(LISTS["with numbers"], backend="eager")
    for _ in range(3):
        compiled(*pair())
    assert len(compiled.foregrad.specializations) == 1


NUMBERS = [True, 1, -3, 2.5, float("inf"), 1 + 2j, np.float32(1.5), np.int64(3), np.bool_(False)]
TYPES = [torch.float32, torch.int64, torch.complex64, torch.bool, torch.bfloat16]


@pytest.mark.filterwarnings("ignore:Casting complex values to real")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("number", NUMBERS, ids=repr)
def test_a_number_is_copied(number, dtype):
    if dtype is torch.int64 and number == float("inf"):
        pytest.skip("what that casts to is not defined")
    check(lambda x: (x.copy_(number), x), lambda: (torch.arange(6).reshape(2, 3).to(dtype),))


WRITES = {
    "to a part": lambda x: (x[0].copy_(1), x),
    "to a transposed tensor": lambda x: (x.t().copy_(2.5), x * 2),
    "with a history": lambda x: (x * 2).copy_(3) * x,
    "without waiting": lambda x: x.copy_(1, non_blocking=True),
    "everywhere": lambda x: (x.__setitem__(..., 1), x),
    "a size": lambda x: x.copy_(x.shape[0]),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_number_is_copied_somewhere(name):
    check(WRITES[name], lambda: (torch.randn(2, 3),))


ARRAYS = {
    "as it is": lambda x: torch.asarray(x),
    "made to require grad": lambda x: torch.asarray(x, requires_grad=True),
    "made not to": lambda x: torch.asarray(x, requires_grad=False),
    "a result": lambda x: torch.asarray(x * 2) * x,
    "a result without history": lambda x: torch.asarray(x * 2, requires_grad=False) * x,
    "a view without history": lambda x: torch.asarray((x * 2)[1:], requires_grad=False) * x[1:],
    "a copy": lambda x: torch.asarray(x, copy=True, requires_grad=True).sin(),
    "a copy under no_grad": torch.no_grad()(lambda x: torch.asarray(x, copy=True)),
    "converted": lambda x: torch.asarray(x, dtype=torch.float64).sin(),
    "integers": lambda x: torch.asarray(x, dtype=torch.int64, requires_grad=False),
}


@pytest.mark.filterwarnings("ignore:torch.asarray")  # that it keeps the history, since PyTorch 2.12
@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("name", ARRAYS)
def test_asarray_of_a_tensor_has_eagers_history(name, requires_grad):
    function = ARRAYS[name]

    def outcome(call):
        x = torch.arange(3.0).requires_grad_(requires_grad)
        result = call(x)
        history = result.requires_grad, result.is_leaf, result is x, x.requires_grad
        if result.requires_grad:
            result.sum().backward()
        return history, result.detach(), x.grad

    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    for _ in range(2):
        torch.testing.assert_close(outcome(compiled), outcome(function), rtol=0, atol=0)
