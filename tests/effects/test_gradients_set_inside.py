"""`.grad` of parameters and arguments that the function sets or takes away: as in eager, on every call."""

import warnings

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedSideEffectError


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


def test_said_once():
    module = torch.nn.Linear(3, 2)
    compiled = foregrad.compile(lambda x: _set_to_none(module, x), backend="eager", on_unsupported="eager")
    compiled(torch.ones(1, 3)).sum().backward()
    with pytest.warns(ForegradWarning, match=r"`\.grad` of .*weight is set at .*test_gradients_set_inside"):
        compiled(torch.ones(1, 3))


def test_refused_where_asked():
    module = torch.nn.Linear(3, 2)
    compiled = foregrad.compile(lambda x: _set_to_none(module, x), backend="eager", on_unsupported="raise")
    compiled(torch.ones(1, 3)).sum().backward()
    with pytest.raises(UnsupportedSideEffectError, match="is set at"):
        compiled(torch.ones(1, 3))
