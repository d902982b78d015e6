"""Warnings with numbers in their text: each call makes the text, and warns as eager does."""

import warnings

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning
from foregrad.extend import view

CALLS = 14


def clips_by_hand(x):
    norm = x.norm()
    warnings.warn(f"norm {norm:.2f}", stacklevel=1)
    return x * (3 / norm) if norm > 3 else x


def warns_of_a_number(x):
    norm = x.norm().item()
    warnings.warn("norm " + str(norm), RuntimeWarning, stacklevel=2)
    return x / norm


def warns_of_some(x):
    norm = x.norm()
    if norm > 3:
        warnings.warn(f"norm {norm.item():.2f} is above 3", stacklevel=1)
        x = x * (3 / norm)
    return x


def found(function, *, grad=False, action="always", message=""):
    results = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings(action, message)
        warnings.simplefilter("always", ForegradWarning)
        for i in range(CALLS):
            x = torch.full((3,), 0.4 * i + 0.1, requires_grad=grad)
            try:
                result = function(x)
            except UserWarning as error:
                results.append(repr(error))
                continue
            results.append(result.tolist())
            if grad:
                results.append(torch.autograd.grad(result.sum(), x)[0].tolist())
    own = [w for w in caught if issubclass(w.category, ForegradWarning)]
    assert all(w.filename == __file__ for w in caught)
    return results, [(str(w.message), w.category, w.lineno) for w in caught if w not in own], own


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("function", [clips_by_hand, warns_of_a_number, warns_of_some])
def test_a_warning_with_a_number_compiles(function, grad):
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    assert found(compiled, grad=grad) == found(function, grad=grad)
    assert len(view(compiled).graphs) <= 4


@pytest.mark.parametrize("action", ["error", "ignore", "once", "default"])
@pytest.mark.parametrize("message", ["", "norm 2", "norm 9"])
def test_filters_see_the_text_of_each_call(action, message):
    compiled = foregrad.compile(clips_by_hand, backend="eager", on_unsupported="eager")
    assert (
        found(compiled, action=action, message=message)[:2] == found(clips_by_hand, action=action, message=message)[:2]
    )


def test_a_filter_that_makes_some_texts_errors_later():
    compiled = foregrad.compile(clips_by_hand, backend="eager", on_unsupported="eager")
    for action in ("always", "error", "ignore"):
        assert (
            found(compiled, action=action, message="norm [34]")[:2]
            == found(clips_by_hand, action=action, message="norm [34]")[:2]
        )
