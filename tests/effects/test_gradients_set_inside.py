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
    torch.manual_seed(0)
    module, x = torch.nn.Linear(3, 2), torch.ones(1, 3, requires_grad=True)
    if is_there:
        module(x).sum().backward()
    compiled = foregrad.compile(lambda x: function(module, x), backend="eager", on_unsupported="raise")
    compiled(x)
    compiled(x)
    assert 1 <= len(foregrad.explain_recompiles(compiled)) <= 2


CLEARED = [_zeroed, _set_to_none, _deleted, _of_an_argument, _by_an_optimizer]


@pytest.mark.parametrize("function", CLEARED)
def test_one_graph_clears_whatever_is_there(function):
    found = []
    for wrap in (lambda function: function, lambda f: foregrad.compile(f, backend="eager", on_unsupported="raise")):
        torch.manual_seed(0)
        module, x = torch.nn.Linear(3, 2), torch.ones(1, 3, requires_grad=True)
        call, seen = wrap(lambda x, module=module: function(module, x)), []
        for is_there in (False, True, False, True, True, False):
            for tensor in (x, *module.parameters()):
                tensor.grad = torch.ones_like(tensor) if is_there else None
            seen.append([call(x).detach(), *(t.grad if t.grad is None else t.grad.clone() for t in (x, module.weight))])
        found.append(seen)
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert len(foregrad.explain_recompiles(call)) == 1


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_layers_that_a_step_leaves_out(optimizer):
    """As many graphs as there are sets of layers, whatever gradients the step before has left."""
    found = []
    for wrap in (lambda function: function, lambda f: foregrad.compile(f, backend="eager", on_unsupported="raise")):
        torch.manual_seed(0)
        layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(3))
        made = optimizer(layers.parameters(), 0.1)

        @wrap
        def step(x, kept, layers=layers, made=made):
            made.zero_grad()
            for layer, is_kept in zip(layers, kept, strict=True):
                x = layer(x).tanh() if is_kept else x
            loss = x.square().sum()
            loss.backward()
            made.step()
            return loss.detach()

        step(torch.ones(2, 3), [True] * 3)  # makes the state
        sets = [[True, False, True], [True, True, False], [False, True, True], [True] * 3]
        losses = [step(torch.ones(2, 3) * i, sets[(i * i + i // 3) % 4]) for i in range(24)]
        found.append([losses, [(p.detach(), p.grad) for p in layers.parameters()]])
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert len(foregrad.explain_recompiles(step)) <= 5


def test_a_gradient_keeps_its_strides_at_sizes_of_one():
    """Autograd takes the gradient over as it is, also where it was summed from two of other strides."""
    found = []
    for wrap in (lambda function: function, _compiled):
        torch.manual_seed(0)
        layer = torch.nn.Linear(12, 1)

        def step(x, layer=layer):
            energy = layer(x.requires_grad_()).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            layer.zero_grad()
            (energy + force.pow(2).sum()).backward()

        wrap(step)(torch.randn(5, 12))
        found.append((layer.weight.grad.stride(), layer.weight.grad.tolist()))
    assert found[0] == found[1]
