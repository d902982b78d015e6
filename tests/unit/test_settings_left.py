"""What a function sets for what comes after it (grad mode, autocast, ...) each call sets, or the capture says no."""

import contextlib

import pytest
import torch

import foregrad
from foregrad.errors import UnsupportedSideEffectError
from foregrad.python._torch.settings import apply_settings, settings


def grad_mode(x):
    y = x.sin()
    torch.set_grad_enabled(False)
    return y, x.cos()


def grad_mode_in_a_helper(x):
    def helper():
        torch.set_grad_enabled(False)

    helper()
    return (x * 2,)


def there_and_back(x):
    torch.set_grad_enabled(False)
    y = x * 2
    torch.set_grad_enabled(True)
    return y, x * 3


def a_context_not_left(x):
    torch.no_grad().__enter__()
    return (x.sin(),)


def deterministic(x):
    torch.use_deterministic_algorithms(True, warn_only=True)
    return (x * 2,)


def autocast(x):
    torch.set_autocast_enabled("cpu", True)
    return (x @ x.t(),)


def dtype_of_autocast(x):
    torch.set_autocast_dtype("cpu", torch.float16)
    return (x * 2,)


def threads(x):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return (x * 2,)


def device(x):
    torch.set_default_device("meta")
    return (x * 2,)


def precision(x):
    torch.set_float32_matmul_precision("medium")
    return (x * 2,)


def memory(x):
    torch.utils.deterministic.fill_uninitialized_memory = False
    return (x * 2,)


EVERYWHERE = [grad_mode, grad_mode_in_a_helper, there_and_back, deterministic, precision]
ALL = [
    *EVERYWHERE, a_context_not_left, autocast, dtype_of_autocast, threads, device, memory,
]  # fmt: skip


@contextlib.contextmanager
def put_back():
    before = settings()
    try:
        yield
    finally:
        apply_settings(before)


def after(function):
    """What is set once the function was called, and what its results tell of what was set in between."""
    x = torch.ones(2, 2, requires_grad=True)
    with put_back():
        results = function(x)
        return settings(), [(t.requires_grad, t.dtype) for t in results]


@pytest.mark.parametrize("function", ALL)
def test_settings_outlast_each_call(function):
    compiled = foregrad.compile(function, backend="eager")
    for _ in range(3):
        assert after(compiled) == after(function)
    assert len(compiled.foregrad.specializations) == 1


@pytest.mark.parametrize("function", EVERYWHERE)
def test_settings_outlast_each_call_under_torch_compile(function):
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="foregrad", options={"backend": "eager"})
    for _ in range(2):
        assert after(compiled) == after(function)


def default_dtype(x):
    torch.set_default_dtype(torch.float64)
    return x * torch.ones(2)


def default_dtype_for_a_while(x):
    torch.set_default_dtype(torch.float64)
    y = x * torch.ones(2)
    torch.set_default_dtype(torch.float32)
    return y


@pytest.mark.parametrize("function", [default_dtype, default_dtype_for_a_while])
def test_another_default_dtype_inside_is_refused_and_put_back(function):
    with put_back(), pytest.raises(UnsupportedSideEffectError, match="default dtype"):
        foregrad.capture(function, torch.ones(2))
    assert torch.get_default_dtype() is torch.float32


def test_a_context_that_no_call_can_enter_is_refused():
    context = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)

    def function(x):
        context.__enter__()
        return x.sin()

    with pytest.raises(UnsupportedSideEffectError, match="hooks for saved tensors"):
        foregrad.capture(function, torch.ones(2))
    context.__exit__()  # for the tests that follow


def test_an_error_leaves_what_was_set_before_it():
    def function(x):
        torch.set_grad_enabled(False)
        raise ValueError("no")

    with put_back():
        with pytest.raises(ValueError, match="no"):
            foregrad.compile(function, backend="eager")(torch.ones(2))
        assert not torch.is_grad_enabled()
