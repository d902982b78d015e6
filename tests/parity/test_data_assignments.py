"""What users write with `.data` and `set_` is the same as eager: see `data_programs`."""

from __future__ import annotations

import pytest
import torch

from tests.parity.data_programs import MODULES, PROGRAMS, module_of, source_of
from tests.parity.oracle import check
from tests.parity.programs import load

# What becomes of a gradient's layout where the tensor's own changes is the engine's choice.
HOW = {"grad_slack": 32, "grad_strides": False}


@pytest.mark.parametrize("name", PROGRAMS)
def test_data_of_arguments(name):
    f, make_args = load(source_of(name))
    assert check(f, make_args, **HOW) == "equal"


@pytest.mark.parametrize("name", MODULES)
def test_data_of_modules(name):
    assert check(module_of(name), lambda: (torch.randn(2, 3, requires_grad=True),), **HOW) == "equal"
