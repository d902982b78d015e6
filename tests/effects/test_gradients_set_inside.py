"""`.grad` of parameters and arguments that the function sets or takes away: as in eager, on every call."""

import warnings

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning


def _zeroed(m, x):
    m.zero_grad()
    return m(x)


def _zeroed_in_place(m, x):
    m.zero_grad(set_to_none=False)
    return m(x)


def _set_to_none(m, x):
    for parameter in m.parameters():
        parameter.grad = None
    return m(x)


def _deleted(m, x):
    del m.weight.grad
    return m(x)


def _set(m, x):
    m.bias.grad = torch.ones(2)
    return m(x)


def _set_from_one_that_was(m, x):
    if m.bias.grad is not None:
        m.bias.grad = m.bias.grad * 0.5
    return m(x)


def _of_an_argument(m, x):
    x.grad = None
    return m(x)


def _by_an_optimizer(m, x):
    torch.optim.SGD(m.parameters(), 0.1).zero_grad()
    return m(x)


PROGRAMS = [
    _zeroed, _zeroed_in_place, _set_to_none, _deleted, _set, _set_from_one_that_was, _of_an_argument, _by_an_optimizer,
]  # fmt: skip


def _run(function, wrap):
    torch.manual_seed(0)
    module, x = torch.nn.Linear(3, 2), torch.ones(1, 3, requires_grad=True)
    wrapped, seen = wrap(lambda x: function(module, x)), []
    for _ in range(4):
        wrapped(x).sum().backward()
        seen += [None if t.grad is None else t.grad.clone() for t in (*module.parameters(), x)]
    return seen


def _compiled(function):
    return foregrad.compile(function, backend="eager", on_unsupported="eager")


def _through_dynamo(function):
    return torch.compile(function, backend="foregrad", options={"backend": "eager"})


@pytest.mark.parametrize("wrap", [_compiled, _through_dynamo])
@pytest.mark.parametrize("function", PROGRAMS)
def test_as_in_eager(function, wrap):
    if function is _deleted and wrap is _through_dynamo:
        pytest.skip("torch.compile hands over a graph that no backend could run")
    torch._dynamo.reset()
    expected = _run(function, lambda f: f)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForegradWarning)
        found = _run(function, wrap)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("function", PROGRAMS)
def test_compiled_whatever_is_there(function, is_there):
    """Without a warning, and as often as the two kinds of `.grad` ask for."""
    if function is _deleted and is_there:
        pytest.skip("eager's own error")
    torch.manual_seed(0)
    module, x = torch.nn.Linear(3, 2), torch.ones(1, 3, requires_grad=True)
    if is_there:
        module(x).sum().backward()
    compiled = foregrad.compile(lambda x: function(module, x), backend="eager", on_unsupported="raise")
    compiled(x)
    compiled(x)
    assert 1 <= len(foregrad.explain_recompiles(compiled)) <= 2
