"""torch.func over compiled functions and inside them; forward-mode AD."""

from __future__ import annotations

import pytest
import torch
import torch.func as tf
from torch.autograd import forward_ad

import foregrad
from tests.covering import each


def model(x, w):
    return torch.tanh(x @ w).sum(-1)


def inputs():
    torch.manual_seed(0)
    return torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)


def scalar(f):
    return lambda x, w: f(x, w).sin().sum()


TRANSFORMS = {
    "grad": lambda f: tf.grad(scalar(f), (0, 1)),
    "grad and value": lambda f: tf.grad_and_value(scalar(f)),
    "vjp": lambda f: lambda x, w: tf.vjp(f, x, w)[1](x.sum(-1)),
    "jvp": lambda f: lambda x, w: tf.jvp(f, (x, w), (x, w)),
    "jacrev": lambda f: tf.jacrev(f, (0, 1)),
    "jacfwd": lambda f: tf.jacfwd(f, (0, 1)),
    "hessian": lambda f: tf.hessian(scalar(f)),
    "vmap": lambda f: tf.vmap(f, (0, None)),
    "vmap of grad": lambda f: tf.vmap(tf.grad(scalar(f)), (0, None)),
    "grad of grad": lambda f: tf.grad(lambda x, w: tf.grad(scalar(f))(x, w).pow(2).sum()),
}


def flat(result):
    return torch.utils._pytree.tree_leaves(result)


@pytest.mark.parametrize(("name", "requires_grad"), each(TRANSFORMS, [False, True]))
def test_a_transform_of_a_compiled_function(name, requires_grad):
    x, w = (t.requires_grad_(requires_grad) for t in inputs())
    compiled = foregrad.compile(model, backend="eager")
    compiled(x, w)  # a graph that fits is at hand
    wanted, found = TRANSFORMS[name](model)(x, w), TRANSFORMS[name](compiled)(x, w)
    for a, b in zip(flat(wanted), flat(found), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)  # sums of several paths are added in another order
        assert a.requires_grad == b.requires_grad


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_inside_a_compiled_function(name):
    x, w = (t.requires_grad_() for t in inputs())
    transformed = TRANSFORMS[name](model)
    compiled = foregrad.compile(transformed, backend="eager")
    wanted, found = flat(transformed(x, w)), flat(compiled(x, w))
    for a, b in zip(wanted, found, strict=True):
        torch.testing.assert_close(b, a)
    for order in range(2):
        sums = [sum(t.sin().sum() for t in side) for side in (wanted, found)]
        wanted, found = (torch.autograd.grad(s, [x, w], create_graph=order == 0) for s in sums)
        for a, b in zip(wanted, found, strict=True):
            torch.testing.assert_close(b, a)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_dual_numbers_pass_through_a_compiled_function(requires_grad):
    x, w = (t.requires_grad_(requires_grad) for t in inputs())
    compiled = foregrad.compile(model, backend="eager")
    compiled(x, w)
    tangents = []
    for f in (model, compiled):
        with forward_ad.dual_level():
            out = f(forward_ad.make_dual(x, torch.ones_like(x)), w)
            tangents.append(forward_ad.unpack_dual(out).tangent)
    assert tangents[0] is not None
    assert torch.equal(*tangents)


def test_torch_autograd_functional():
    x, w = inputs()
    compiled = foregrad.compile(model, backend="eager")
    functional = torch.autograd.functional
    for use in (
        lambda f: functional.hessian(lambda x: f(x, w).sin().sum(), x),
        lambda f: functional.jacobian(lambda x: f(x, w), x, vectorize=True),
        lambda f: functional.hvp(lambda x: f(x, w).sin().sum(), x, x)[1],
        lambda f: functional.jvp(lambda x: f(x, w), x, x)[1],
    ):
        torch.testing.assert_close(use(compiled), use(model), rtol=1e-10, atol=1e-12)


def test_batched_tangents():
    x, w = inputs()
    x.requires_grad_()
    compiled = foregrad.compile(model, backend="eager")
    wanted, found = (
        torch.autograd.grad(f(x, w), x, torch.eye(3, dtype=x.dtype), is_grads_batched=True)[0]
        for f in (model, compiled)
    )
    torch.testing.assert_close(found, wanted)
