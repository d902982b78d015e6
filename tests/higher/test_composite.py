"""`value_and_grad` and `hessian_vector_product`: one graph, the results of torch.func."""

from __future__ import annotations

import pytest
import torch

import foregrad


def loss(x, w):
    return torch.tanh(x @ w).pow(2).sum()


def inputs():
    torch.manual_seed(0)
    return torch.randn(3, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)


def test_value_and_gradient_of_one_argument():
    x, w = inputs()
    value, grad = foregrad.value_and_grad(loss, backend="eager")(x, w)
    wanted, wanted_value = torch.func.grad_and_value(loss)(x, w)
    assert torch.equal(value, wanted_value)
    assert torch.equal(grad, wanted)


def test_several_arguments_and_containers():
    x, w = inputs()
    fn = foregrad.value_and_grad(lambda p, y: loss(p["x"], p["w"]) + (y * y).sum(), (0, 1), backend="eager")
    value, (of_p, of_y) = fn({"x": x, "w": w}, x)
    wanted = torch.func.grad(loss, (0, 1))(x, w)
    assert torch.equal(of_p["x"], wanted[0])
    assert torch.equal(of_p["w"], wanted[1])
    assert torch.equal(of_y, 2 * x)
    assert not value.requires_grad


def test_auxiliary_results_are_passed_on():
    x, w = inputs()

    def with_aux(x, w):
        y = x @ w
        return y.pow(2).sum(), {"y": y, "n": 3}

    (value, aux), grad = foregrad.value_and_grad(with_aux, has_aux=True, backend="eager")(x, w)
    assert torch.equal(value, (x @ w).pow(2).sum())
    assert torch.equal(aux["y"], x @ w)
    assert aux["n"] == 3
    assert not aux["y"].requires_grad
    torch.testing.assert_close(grad, 2 * (x @ w) @ w.mT)


class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        self.net[0].bias.requires_grad_(False)

    def forward(self, x):
        return self.net(x).pow(2).mean()


def test_a_module_is_differentiated_by_its_parameters():
    x, _ = inputs()
    module = Loss()
    step = foregrad.value_and_grad(module, None, backend="eager")
    for _ in range(3):
        value, grads = step(x)
        wanted = torch.autograd.grad(module(x), [p for p in module.parameters() if p.requires_grad])
        assert list(grads) == [n for n, p in module.named_parameters() if p.requires_grad]
        assert all(torch.equal(a, b) for a, b in zip(grads.values(), wanted, strict=True))
        assert not value.requires_grad
        with torch.no_grad():
            for name, p in module.named_parameters():
                if name in grads:
                    p.sub_(grads[name], alpha=0.1)
    assert len(step.foregrad.specializations) == 1


def test_what_does_not_matter_has_a_zero_gradient():
    x, w = inputs()
    _, (_, of_w) = foregrad.value_and_grad(lambda x, w: x.sum(), (0, 1), backend="eager")(x, w)
    assert torch.equal(of_w, torch.zeros_like(w))


def test_a_value_that_depends_on_no_variable_has_zero_gradients():
    def second(x, y):
        return y.sum()

    x, y = torch.randn(3), torch.randn(2)
    value, gradient = foregrad.value_and_grad(second, backend="eager")(x, y)
    assert torch.equal(value, y.sum())
    assert torch.equal(gradient, torch.zeros(3))
    assert torch.equal(foregrad.hessian_vector_product(second, backend="eager")(x, y, torch.ones(3)), torch.zeros(3))


def test_hessian_vector_products():
    x, w = inputs()
    vector = torch.randn_like(x)
    found = foregrad.hessian_vector_product(loss, backend="eager")(x, w, vector)
    wanted = torch.autograd.functional.hvp(lambda x: loss(x, w), x, vector)[1]
    torch.testing.assert_close(found, wanted)
    linear = foregrad.hessian_vector_product(lambda x: x.sum(), backend="eager")
    assert torch.equal(linear(x, vector), torch.zeros_like(x))


def test_hessian_vector_products_of_a_module():
    x, _ = inputs()
    module = Loss()
    parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
    vector = {n: torch.randn_like(p) for n, p in parameters.items()}
    found = foregrad.hessian_vector_product(module, None, backend="eager")(x, vector)
    grads = torch.autograd.grad(module(x), list(parameters.values()), create_graph=True)
    wanted = torch.autograd.grad(grads, list(parameters.values()), list(vector.values()))
    for a, b in zip(found.values(), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_both_compose_with_other_derivatives():
    x, w = inputs()
    kept = foregrad.value_and_grad(loss, create_graph=True, backend="eager")
    leaf = x.clone().requires_grad_()
    _, grad = kept(leaf, w)
    (second,) = torch.autograd.grad(grad.sin().sum(), leaf)
    wanted = torch.func.grad(lambda x: torch.func.grad(loss)(x, w).sin().sum())(x)
    torch.testing.assert_close(second, wanted)
    plain = foregrad.value_and_grad(loss, backend="eager")
    torch.testing.assert_close(torch.func.grad(lambda x: plain(x, w)[1].sin().sum())(x), wanted)


def test_one_graph_and_no_autograd():
    x, w = inputs()
    step = foregrad.value_and_grad(loss, backend="eager")
    step(x, w)
    (made,) = step.foregrad.specializations
    assert made.product.captured.joint.signature.is_inference
    assert step.foregrad.source().count("forward_graph(") == 1
    ops = [n for n in made.product.captured.joint.graph.nodes if n.target is torch.ops.aten.tanh.default]
    assert len(ops) == 1


@pytest.mark.parametrize(
    ("make", "arguments", "error"),
    [
        (lambda: foregrad.value_and_grad(loss, None), (), TypeError),
        (lambda: foregrad.value_and_grad(lambda x: x, backend="eager"), (torch.ones(2),), ValueError),
        (lambda: foregrad.value_and_grad(lambda x: x.sum(), backend="eager"), (torch.ones(2, dtype=torch.int64),), TypeError),
        (lambda: foregrad.value_and_grad(lambda x: x.sum(), 3, backend="eager"), (torch.ones(2),), TypeError),
        (lambda: foregrad.value_and_grad(lambda x: 3, backend="eager"), (torch.ones(2),), TypeError),
    ],
)  # fmt: skip
def test_misuse_is_told(make, arguments, error):
    with pytest.raises(error):
        make()(*arguments)
