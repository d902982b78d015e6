"""Dual numbers (`torch.autograd.forward_ad`) given to functions that take a gradient inside: forward over reverse."""

import pytest
import torch
import torch.func as tf
from torch.autograd import forward_ad

import foregrad
from foregrad.errors import ForegradWarning
from tests.dynamo.installed import make_known


def energy(x):
    return (x.sin() * x).sum()


def by_autograd(x):
    return torch.autograd.grad(energy(x), x, create_graph=True)[0]


def once(x):
    return torch.autograd.grad(energy(x), x)[0]


def with_the_energy(x):
    e = energy(x)
    return e, torch.autograd.grad(e, x, create_graph=True)[0]


def by_transform(x):
    return tf.grad(energy)(x)


def of_a_copy(x):
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return torch.autograd.grad(energy(y), y)[0]


def twice(x):
    first = torch.autograd.grad(energy(x), x, create_graph=True)[0]
    return torch.autograd.grad(first.exp().sum(), x, create_graph=True)[0]


def parts(function, requires_grad):
    x = torch.tensor([0.3, 0.5, 0.2], requires_grad=requires_grad)
    with forward_ad.dual_level():
        out = function(forward_ad.make_dual(x, torch.full((3,), 0.5)))
        out = out if isinstance(out, tuple) else (out,)
        return [part for item in out for part in forward_ad.unpack_dual(item)]


def same(eager, ours):
    assert [part is None for part in eager] == [part is None for part in ours]
    assert all(torch.equal(a, b) for a, b in zip(eager, ours, strict=True) if a is not None)


@pytest.mark.parametrize("function", [energy, by_autograd, once, with_the_energy, by_transform, of_a_copy, twice])
def test_a_gradient_taken_inside_has_a_tangent(function):
    compiled = foregrad.compile(function, backend="eager")
    for _ in range(2):
        same(parts(function, True), parts(compiled, True))
    if function in (energy, by_transform, of_a_copy):
        same(parts(function, False), parts(compiled, False))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo looks at it
@pytest.mark.parametrize("function", [energy, by_transform])
def test_dual_numbers_through_torch_compile(function):
    compiled = torch.compile(function, backend="foregrad", options={"backend": "eager"})
    for _ in range(2):
        for requires_grad in (True, False):
            same(parts(function, requires_grad), parts(compiled, requires_grad))


@pytest.mark.filterwarnings("ignore")
def test_a_gradient_of_a_dual_number_under_torch_compile_has_its_tangent():
    """Dynamo takes the gradient outside of its graph."""

    def function(x):
        return torch.autograd.grad((x**3).sum(), x, create_graph=True)[0]

    make_known()
    found = []
    for run in (function, torch.compile(function, backend="foregrad", options={"backend": "eager"})):
        with forward_ad.dual_level():
            x = torch.full((2,), 0.5).requires_grad_()
            found.append(forward_ad.unpack_dual(run(forward_ad.make_dual(x, torch.ones(2)))))
    assert all(map(torch.equal, *found))


def test_a_gradient_taken_outside_that_has_no_tangent_is_no_secret():
    """Forward over reverse by hand: what a compiled function saves has no tangents."""
    compiled = foregrad.compile(energy, backend="eager")
    x = torch.tensor([0.3, 0.5], requires_grad=True)
    with forward_ad.dual_level():
        result = compiled(forward_ad.make_dual(x, torch.ones(2)))
        with pytest.warns(ForegradWarning, match="that gradient has no tangent"):
            (gradient,) = torch.autograd.grad(result, x)
    assert torch.allclose(gradient, once(x))


def test_a_gradient_of_a_tangent_alone_is_eagers_without_a_word():
    x = torch.tensor([0.3, 0.5], requires_grad=True)
    found = []
    for function in (energy, foregrad.compile(energy, backend="eager")):
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones(2)))).tangent
            found.append(torch.autograd.grad(tangent, x)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "compiler", [lambda f: foregrad.compile(f, backend="eager"), lambda f: foregrad.aot_function(f, foregrad.nop)]
)
def test_a_gradient_with_a_history_whose_tangent_would_be_lost_raises(compiler):
    """Without a history it has its tangent; where it is right with one, it is taken."""

    def use(f, create_graph):
        x = torch.tensor([0.3, 0.5], requires_grad=True)
        out = f(x)
        with forward_ad.dual_level():
            incoming = forward_ad.make_dual(torch.ones(2), torch.full((2,), 2.0))
            (gradient,) = torch.autograd.grad(out, x, incoming, create_graph=create_graph)
            return forward_ad.unpack_dual(gradient)

    compiled = compiler(torch.sin)
    same(use(torch.sin, False), use(compiled, False))
    assert use(torch.sin, True).tangent is not None
    with pytest.raises(foregrad.errors.UnsupportedError, match="an incoming gradient is a dual number"):
        use(compiled, True)
    same(use(torch.negative, True), use(compiler(torch.negative), True))
