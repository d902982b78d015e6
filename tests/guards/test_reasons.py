"""The reason for an eager call is true, names the user's line, and tells a change that helps."""

# ruff: noqa: NPY002 - the programs draw as users do

import collections
import types
import warnings

import numpy as np
import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning

LEAF = torch.ones(3, requires_grad=True)


def gives_an_array(x):
    return x * 2, np.ones(3)


def warns_of_nothing_new(x):
    warnings.warn("this will go", FutureWarning, stacklevel=1)
    for _ in range(int(x.sum() * 10)):  # the branches
        x = x + 1
    return x


def shuffles(x):
    order = np.arange(3)
    np.random.shuffle(order)  # the shuffle
    return x[order]


def goes_on_outside(x):
    (OUTSIDE * x).sum().backward(retain_graph=True)  # the backward
    return x * 2


OUTSIDE = LEAF * 2


def reason_of(fn, calls=40):
    compiled = foregrad.compile(fn, backend="eager", on_unsupported="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(calls):
            compiled(torch.ones(3) + i * 0.1)
    told = [str(w.message) for w in caught if w.category is ForegradWarning]
    assert len(told) == 1
    return told[0]


def test_an_array_as_a_result():
    reason = reason_of(gives_an_array)
    assert "return a tensor, or a list of numbers" in reason
    assert "pytree" not in reason


def test_a_constant_warning_makes_no_text_of_a_value():
    reason = reason_of(warns_of_nothing_new)
    assert "makes text" not in reason
    assert "range(int(x.sum() * 10)):  # the branches" in reason


def test_a_shuffle_inside():
    line = shuffles.__code__.co_firstlineno + 2
    reason = reason_of(shuffles, calls=3)
    assert f"test_reasons.py:{line} in shuffles" in reason
    assert "np.random.permutation(len(a))" in reason


def shuffles_by_permutation(x):
    order = np.arange(3)
    return x[torch.from_numpy(order)[torch.from_numpy(np.random.permutation(len(order)))]]


def test_the_remedy_for_a_shuffle_compiles_and_draws_as_eager_does():
    compiled = foregrad.compile(shuffles_by_permutation, backend="eager", on_unsupported="raise")
    x = torch.arange(3.0)
    for seed in range(5):
        np.random.seed(seed)
        expected = shuffles_by_permutation(x)
        np.random.seed(seed)
        assert torch.equal(compiled(x), expected)


def test_a_backward_that_goes_on_outside():
    line = goes_on_outside.__code__.co_firstlineno + 1
    reason = reason_of(goes_on_outside, calls=3)
    assert f"test_reasons.py:{line} in goes_on_outside" in reason
    assert ".detach().requires_grad_()" in reason


@pytest.mark.parametrize("make", [dict, lambda: collections.defaultdict(dict)], ids=["dict", "defaultdict"])
def test_state_of_an_optimizer_by_hand_needs_no_reason(make):
    def training(wrap):
        weight, state = torch.nn.Parameter(torch.ones(3)), make()

        def step(x):
            (weight * x).sum().backward()
            with torch.no_grad():
                s = state.setdefault(weight, {})
                s["sum"] = s["sum"] + weight.grad if s else weight.grad.clone()
                weight.sub_(0.1 * s["sum"])
                weight.grad = None
            return weight.detach().clone()

        call = wrap(step)
        return [call(torch.ones(3) + i) for i in range(6)]

    eager = training(lambda step: step)
    ours = training(lambda step: foregrad.compile(step, backend="eager", on_unsupported="raise"))
    assert all(map(torch.equal, eager, ours))


class Surrogate(torch.autograd.Function):
    """Its backward reads a list: the items at that time count."""

    scales = [10.0]

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return (x > 0).float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (Surrogate.scales[-1] * ctx.saved_tensors[0].abs() + 1)


def test_a_function_that_no_graph_holds_is_named_as_the_function():
    seen = types.SimpleNamespace(x=None)

    def function(x):
        seen.x = x * 2
        return Surrogate.apply(seen.x)

    with pytest.raises(foregrad.errors.UnsupportedSideEffectError) as caught:
        foregrad.capture(function, torch.ones(2, requires_grad=True))
    assert "before the custom Function `Surrogate` called at" in str(caught.value)
    assert "eager region" not in str(caught.value)
