"""Compiled functions under torch.func transforms run compiled, one level after another, and mean what eager means."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.func as tf
from torch import nn
from torch.autograd import forward_ad

import foregrad

D = torch.float64


def model(x, w):
    return torch.tanh(x @ w).sum(-1)


def scalar(f):
    return lambda x, w: f(x, w).sin().sum()


def inputs():
    return torch.randn(3, 4, dtype=D), torch.randn(4, 4, dtype=D)


TRANSFORMS = {
    "grad": lambda f: tf.grad(scalar(f), (0, 1)),
    "vmap": lambda f: tf.vmap(f, (0, None)),
    "vmap of the second": lambda f: tf.vmap(lambda x, w: f(x, w[:, None]), (None, 1), 1),
    "jvp": lambda f: lambda x, w: tf.jvp(f, (x, w), (w[:3], w)),
    "vmap of grad": lambda f: tf.vmap(tf.grad(scalar(f), (0, 1)), (0, None)),
    "jacrev": lambda f: tf.jacrev(f, (0, 1)),
    "jacfwd": lambda f: tf.jacfwd(f, (0, 1)),
    "hessian": lambda f: tf.hessian(scalar(f)),
    "jacrev of jacrev": lambda f: tf.jacrev(tf.jacrev(scalar(f))),
    "vmap of vmap": lambda f: tf.vmap(tf.vmap(lambda a, b: f(a, b[:, None])), (None, 0)),
}


def same(found, wanted):
    found, wanted = (torch.utils._pytree.tree_leaves(side) for side in (found, wanted))
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def count_runs(function, call):
    """How often `call()` runs the Python of `function`."""
    runs = 0

    def profile(frame, event, arg):
        nonlocal runs
        runs += event == "call" and frame.f_code is function.__code__

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return runs


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_second_call_runs_graphs_and_nothing_of_the_function(name):
    x, w = inputs()
    if name == "vmap of vmap":
        x, w = torch.randn(2, 4, dtype=D), torch.randn(5, 2, 4, dtype=D)
    transform = TRANSFORMS[name]
    compiled = transform(foregrad.compile(model, backend="eager"))
    same(compiled(x, w), transform(model)(x, w))
    assert count_runs(model, lambda: compiled(x * 2, w)) == 0
    same(compiled(x * 2, w), transform(model)(x * 2, w))


def test_the_graph_of_a_vmapped_function_is_one_of_whole_batches():
    x, w = inputs()
    compiled = foregrad.compile(model, backend="eager")
    tf.vmap(compiled, (0, None))(x, w)
    (layered,) = compiled.foregrad.transformed.layered
    (child,) = layered.children.values()
    text = str(child.bottom.specializations[0].product.captured.joint)
    assert "f64[3, 4]" in text


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 1)).to(D)


@pytest.mark.parametrize("backend", ["eager", "nop"])
def test_gradients_for_each_sample_of_parameters_passed_to_functional_call(backend):
    x, y = torch.randn(6, 4, dtype=D), torch.randn(6, 1, dtype=D)
    module = net()
    compiled = foregrad.compile(module, backend=backend)
    parameters = dict(module.named_parameters())

    def per_sample(m):
        def loss(p, x, y):
            return (tf.functional_call(m, p, (x[None],)) - y).pow(2).mean()

        return tf.vmap(tf.grad(loss), (None, 0, 0))(parameters, x, y)

    same(per_sample(compiled), per_sample(module))
    first = module[0]
    assert count_runs(type(first).forward, lambda: per_sample(compiled)) == 0


def test_an_ensemble_of_modules():
    nets = [net() for _ in range(3)]
    for other in nets[1:]:
        with torch.no_grad():
            other[0].weight.mul_(2)
    stacked, _ = tf.stack_module_state(nets)
    x = torch.randn(2, 4, dtype=D)
    base = net()
    compiled = foregrad.compile(base, backend="eager")
    results = tf.vmap(lambda p: tf.functional_call(compiled, p, (x,)))(stacked)
    for result, module in zip(results, nets, strict=True):
        torch.testing.assert_close(result, module(x))


def test_a_pullback_uses_the_parameters_of_its_forward():
    """The pullback is called when functional_call has put the module's own parameters back."""
    x = torch.randn(2, 4, dtype=D)
    results = []
    for compile_it in (False, True):
        module = net()
        m = foregrad.compile(module, backend="eager") if compile_it else module
        frozen = {name: p.detach() * 3 for name, p in module.named_parameters()}
        out, pull = tf.vjp(lambda x: tf.functional_call(m, frozen, (x,)), x)  # noqa: B023
        results.append((out, pull(torch.ones_like(out))))
    same(results[1], results[0])


class StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.round()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad


def rounded(x, w):
    return StraightThrough.apply(x @ w).pow(2).sum(-1)


def partly_constant(x, w):
    with torch.no_grad():
        scale = (x @ w).norm(dim=-1)
    return (x @ w.detach()).sin().sum(-1) * scale


@pytest.mark.parametrize("fn", [rounded, partly_constant])
@pytest.mark.parametrize("name", ["grad", "vmap of grad", "jacrev", "jacrev of jacrev"])
def test_what_autograd_is_told_holds_at_every_level(fn, name):
    x, w = inputs()
    same(TRANSFORMS[name](foregrad.compile(fn, backend="eager"))(x, w), TRANSFORMS[name](fn)(x, w))


def test_no_confusion_of_levels():
    compiled = foregrad.compile(lambda x, y: x * y, backend="eager")

    def f(x):
        return x * tf.grad(lambda y: compiled(x, y))(torch.ones((), dtype=D))

    assert tf.grad(f)(torch.tensor(3.0, dtype=D)).item() == 6.0


def test_outputs_that_are_inputs_views_and_no_tensors():
    def fn(x, w):
        return x, w.t(), {"n": 3, "sum": x.sum() * w.sum()}, x.argmax()

    x, w = torch.randn(4, dtype=D), torch.randn(2, 3, dtype=D)
    compiled = foregrad.compile(fn, backend="eager")

    def use(f):
        def loss(x, w):
            same_x, turned, rest, top = f(x, w)
            assert same_x is x
            assert rest["n"] == 3
            return (same_x.sum() * turned.sum() * rest["sum"]) + top

        return [tf.grad(loss, (0, 1))(x, w), tf.vmap(loss, (None, 0))(x, w), tf.jvp(loss, (x, w), (x, w))]

    same(use(compiled), use(fn))


@pytest.mark.parametrize("randomness", ["different", "same", "error"])
def test_random_numbers_under_vmap(randomness):
    def noisy(x):
        return x + torch.rand_like(x)

    def use(f):
        torch.manual_seed(3)
        try:
            return tf.vmap(f, randomness=randomness)(torch.zeros(4, 3)), torch.rand(2)
        except RuntimeError as error:
            return str(error)[:60]

    wanted, found = use(noisy), use(foregrad.compile(noisy, backend="eager"))
    if randomness == "error":
        assert wanted == found
    else:
        same(found, wanted)


def test_dropout_is_the_same_in_the_pullback():
    x, w = inputs()

    def drop(x, w):
        return nn.functional.dropout(x @ w, 0.5).exp().sum()

    def use(f):
        torch.manual_seed(3)
        return tf.grad(f, (0, 1))(x, w), torch.rand(2)

    same(use(foregrad.compile(drop, backend="eager")), use(drop))


def test_what_is_switched_is_seen_under_transforms():
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(D)
    compiled = foregrad.compile(module, backend="eager")
    x = torch.randn(4, dtype=D)
    for training in (False, True, False):
        module.train(training)
        results = []
        for m in (module, compiled):
            torch.manual_seed(3)
            results.append(tf.grad(lambda x: m(x).sin().sum())(x))  # noqa: B023
        same(results[1], results[0])


def test_writes_and_branches_on_values_run_as_in_eager():
    def writes(x):
        y = x.clone()
        x.add_(1)
        return y * x

    def branches(x):
        return x.sin().sum() if x.sum() > 0 else x.cos().sum()

    def reached(x):
        return x.sum() * 0

    x = torch.randn(4, dtype=D)
    for fn in (writes, branches, reached):
        compiled = foregrad.compile(fn, backend="eager")
        for value in (x, -x):
            same(
                tf.grad(lambda v: compiled(v * 1).sum())(value),  # noqa: B023
                tf.grad(lambda v: fn(v * 1).sum())(value),  # noqa: B023
            )


def test_an_error_of_the_function_comes_through():
    compiled = foregrad.compile(lambda x, w: x @ w, backend="eager")
    with pytest.raises(RuntimeError, match="shape"):
        tf.vmap(compiled, (0, None))(torch.randn(2, 3), torch.randn(4, 4))


def test_duals_and_reverse_mode_after_them():
    x, w = (t.requires_grad_() for t in inputs())
    compiled = foregrad.compile(model, backend="eager")

    def use(f):
        with forward_ad.dual_level():
            tangent = torch.linspace(0, 1, 16, dtype=D).view(4, 4).requires_grad_()
            out = f(x, forward_ad.make_dual(w, tangent))
            pushed = forward_ad.unpack_dual(out).tangent
            return pushed, *torch.autograd.grad(pushed.pow(2).sum(), [x, w, tangent])

    same(use(compiled), use(model))
    assert count_runs(model, lambda: use(compiled)) == 0


def test_forward_over_reverse():
    x, w = (t.requires_grad_() for t in inputs())

    def use(f):
        out = f(x, w)
        with forward_ad.dual_level():
            seed = forward_ad.make_dual(torch.ones_like(out), torch.full_like(out, 2.0))
            return [forward_ad.unpack_dual(g).tangent for g in torch.autograd.grad(out, [x, w], seed)]

    same(use(foregrad.compile(model, backend="eager")), use(model))


@pytest.mark.parametrize("create_graph", [False, True])
def test_vectorized_jacobians_and_hessians(create_graph):
    x, w = (t.requires_grad_() for t in inputs())
    functional = torch.autograd.functional

    def use(f):
        results = [
            functional.jacobian(lambda x: f(x, w), x, vectorize=True, create_graph=create_graph),
            functional.hessian(lambda x: f(x, w).sin().sum(), x, vectorize=True, create_graph=create_graph),
        ]
        if create_graph:
            results += torch.autograd.grad(sum(r.pow(2).sum() for r in results), [x, w])
        else:
            results.append(functional.jacobian(lambda x: f(x, w), x, vectorize=True, strategy="forward-mode"))
        return results

    same(use(foregrad.compile(model, backend="eager")), use(model))


@pytest.mark.parametrize("over", ["grad"])
def test_composites_under_a_transform(over):
    x, w = inputs()

    def energy(x, w):
        return torch.tanh(x @ w).pow(2).sum()

    step = foregrad.value_and_grad(energy, backend="eager")
    product = foregrad.hessian_vector_product(energy, backend="eager")
    eager_step = lambda x, w: tf.grad_and_value(energy)(x, w)[::-1]
    eager_product = lambda x, w, v: tf.vjp(tf.grad(energy), x, w)[1](v)[0]
    transform = {
        "grad": lambda f: tf.grad(lambda x, w: torch.utils._pytree.tree_leaves(f(x, w))[-1].sin().sum())(x, w),
        "vmap": lambda f: tf.vmap(f, (0, None))(x, w),
        "jvp": lambda f: tf.jvp(f, (x, w), (x, w)),
    }[over]
    same(transform(step), transform(eager_step))
    same(transform(lambda x, w: product(x, w, x.cos())), transform(lambda x, w: eager_product(x, w, x.cos())))
