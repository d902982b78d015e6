"""What users write with `.data` and `set_` is the same as eager: see `data_programs`."""

from __future__ import annotations

import pytest
import torch

import foregrad
from tests.parity.data_programs import EAGER, MODULES, PROGRAMS, module_of, source_of
from tests.parity.oracle import Refused, check
from tests.parity.programs import load

# What becomes of a gradient's layout where the tensor's own changes is the engine's choice.
HOW = {"grad_slack": 32, "grad_strides": False}


@pytest.mark.parametrize("name", PROGRAMS)
def test_data_of_arguments(name):
    f, make_args = load(source_of(name))
    if name in EAGER:
        with pytest.raises(
            Refused, match=r"changes sizes, dtype, history|needs? a gradient|`set_` at .* gives a tensor other memory"
        ):
            check(f, make_args, **HOW)
        return
    assert check(f, make_args, **HOW) == "equal"


@pytest.mark.parametrize("name", MODULES)
def test_data_of_modules(name):
    assert check(module_of(name), lambda: (torch.randn(2, 3, requires_grad=True),), **HOW) == "equal"


@pytest.mark.parametrize(
    ("make", "there"),
    [
        (lambda: torch.arange(1.0, 3.0)[:, None].expand(2, 3), 2),  # elements in one place
        (lambda: torch.arange(1, 2).bool().expand(4), 1),
        (lambda: torch.arange(8.0).view(2, 4)[:, :3], 7),  # and between them
        (lambda: torch.arange(6.0).view(2, 3).t(), 6),
    ],
)
def test_what_lies_in_memory_stays_there_when_a_tensor_grows(make, there):
    """`resize_` beyond the memory: what comes behind is nobody's."""

    def f(x):
        x.resize_(12)

    results = []
    for fn in (f, foregrad.compile(f, backend="eager")):
        x = make()
        fn(x)
        results.append((x.shape, x.stride(), x[:there].tolist()))
    assert results[0] == results[1]
