"""`x.data = y` behind Dynamo, which writes it as `set_` and takes the version counter back, is what it is in eager."""

from __future__ import annotations

import pytest
import torch

from tests.parity.data_programs import MODULES, PROGRAMS, module_of, source_of
from tests.parity.oracle import check
from tests.parity.programs import load

# Dynamo looks at `.grad` of tensors between two graphs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

HOW = {"grad_slack": 32, "grad_strides": False}
OPTIONS = {"backend": "eager", "on_unsupported": "raise"}


def compiled(function):
    return torch.compile(function, backend="foregrad", options=OPTIONS)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if ".data = " in PROGRAMS[name][2]][::3])
def test_data_of_arguments(name):
    f, make_args = load(source_of(name))
    assert check(f, make_args, compile=compiled, **HOW) == "equal"


@pytest.mark.parametrize("name", ["use ema data", "swap", "buffer new", "sam"])
def test_data_of_modules(name):
    assert name in MODULES
    module = module_of(name)
    assert check(module, lambda: (torch.randn(2, 3, requires_grad=True),), compile=compiled, **HOW) == "equal"
