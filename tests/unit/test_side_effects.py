"""Effects that a compiled call would not repeat are refused while capturing."""

import numpy as np
import pytest
import torch

import foregrad
from foregrad.errors import UnknownLeafError, UnsupportedSideEffectError


def test_seeding_inside_is_refused_and_leaves_the_generator_alone():
    def seeded(x):
        torch.manual_seed(12345)
        return x + torch.rand(3)

    before = torch.get_rng_state()
    with pytest.raises(UnsupportedSideEffectError, match="Seed before the call"):
        foregrad.compile(seeded, backend="eager")(torch.ones(3))
    assert torch.equal(before, torch.get_rng_state())


def test_changing_an_argument_container_is_refused_where_there_are_no_guards():
    def appended(items):
        items.append(items[0] * 2)
        return items[0]

    with pytest.raises(UnsupportedSideEffectError, match="container"):
        foregrad.capture(appended, [torch.ones(3)])
    items = [torch.ones(3)]
    foregrad.compile(appended, backend="eager", on_unsupported="raise")(items)
    assert items[1].tolist() == [2.0, 2.0, 2.0]


def test_backward_inside_leaves_a_gradient_on_a_leaf_and_is_refused_elsewhere():
    def stepped(x):
        (x * x).sum().backward()
        return x

    call = foregrad.compile(stepped, backend="eager")
    x = torch.ones(3, requires_grad=True)
    assert call(x) is x
    assert x.grad.tolist() == [2, 2, 2]
    with pytest.raises(UnsupportedSideEffectError, match=r"reaches the graph of args\[0\] before .*inside"):
        call(x * 1)


def test_an_array_of_numpy_as_a_result_is_refused_with_the_remedy():
    def counted(x):
        return {"twice": x * 2, "counts": np.zeros(3)}

    with pytest.raises(UnknownLeafError, match=r"output `out\['counts'\]` is an array of NumPy: return a tensor"):
        foregrad.compile(counted, backend="eager", on_unsupported="raise")(torch.ones(3))
