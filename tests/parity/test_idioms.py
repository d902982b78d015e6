"""Programs after the ideas of PyTorch's own tests of ahead-of-time autograd, through every door."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import foregrad
from tests.covering import ALL, shared
from tests.parity.idioms import PROGRAMS
from tests.parity.oracle import check

# What PyTorch's own backend "eager" does not do either, or what differs for Dynamo's reasons.
NOT_THROUGH_DYNAMO = {
    "a_custom_function": "Dynamo's backward of a custom Function is not differentiable again",
    "data_assigned": "Dynamo counts the assignment as a write",
    "a_leaf_written_through_data": "Dynamo makes the tensor that is written a constant of its graph",
    "a_value_as_a_number": "Dynamo breaks the graph, and says so",
    "an_exception_caught": "Dynamo does not let the function catch an operator's error",
    "two_hooks_and_one_removed": "Dynamo fails on the removal",
}
OF_DYNAMO = [name for name in shared(PROGRAMS, 1, 2) if name not in NOT_THROUGH_DYNAMO]
OF_AOT = [name for name in PROGRAMS if name not in OF_DYNAMO or ALL]


def graph_module(gm, _):
    return gm.forward


def through_aot(f):
    make = foregrad.aot_module if isinstance(f, nn.Module) else foregrad.aot_function
    return make(f, graph_module, graph_module)


def through_dynamo(f):
    torch._dynamo.reset()
    return torch.compile(f, backend="foregrad", options={"backend": "eager"})


def run(name, **options):
    f, make_args, own = PROGRAMS[name]
    # Gradients through the function and through a view that it returned add up in another order.
    check(copy.deepcopy(f), make_args, **own, grad_slack=4, **options)


@pytest.mark.parametrize("name", PROGRAMS)
def test_compile(name):
    run(name)


@pytest.mark.parametrize("name", OF_AOT)
def test_aot_function(name):
    run(name, compile=through_aot)


# Dynamo looks at `.grad` of tensors that are no leaves, and makes objects of the class of Functions.
@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", OF_DYNAMO)
def test_torch_compile(name):
    run(name, compile=through_dynamo)
