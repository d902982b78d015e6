"""`retain_grad()` inside a compiled function: gradients are kept where eager keeps them, or the function is refused."""

import pytest
import torch

import foregrad


def returned(x):
    h = x.sin()
    h.retain_grad()
    return h


def in_a_container(x):
    h = x.sin()
    h.retain_grad()
    return {"h": h, "kept": h.retains_grad}


def written_later(x):
    h = x.sin()
    h.retain_grad()
    h.mul_(2)
    return h


def two_apart(x):
    h, k = x.sin(), x.cos()
    h.retain_grad()
    k.retain_grad()
    return h, k, x.exp()


def with_a_view(x):
    h = x.sin()
    h.retain_grad()
    v = h[0]
    v.retain_grad()
    return v, h


def an_argument(x):
    x.retain_grad()
    return x * 2


def inside_only(x):
    h = x.sin()
    h.retain_grad()
    return torch.autograd.grad((h * h).sum(), h, create_graph=True)[0]


def none_for_a_leaf(x):
    h = x.detach().requires_grad_()
    h.retain_grad()
    return h * x


def tensors_of(result):
    result = result.values() if isinstance(result, dict) else result if isinstance(result, tuple) else [result]
    return [item for item in result if isinstance(item, torch.Tensor)]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(
    "function",
    [returned, in_a_container, written_later, two_apart, with_a_view, an_argument, inside_only, none_for_a_leaf],
)
def test_gradients_are_kept_where_eager_keeps_them(function, native):
    found = []
    with foregrad.config.override(native=native):
        for run in (function, foregrad.compile(function, backend="eager")):
            for _ in range(2):
                leaf = torch.tensor([[0.3, 0.5], [0.2, 0.7]], requires_grad=True)
                x = leaf * 1
                tensors = tensors_of(run(x))
                sum((t * t).sum() * (n + 1) for n, t in enumerate(tensors)).backward()
                tensors = [*tensors, x]
                found.append(([t.retains_grad for t in tensors], [t.grad if t.retains_grad else None for t in tensors]))
    for kept, gradients in found[2:]:
        assert kept == found[0][0]
        for eager, ours in zip(found[0][1], gradients, strict=True):
            assert (eager is None) == (ours is None)
            assert eager is None or torch.equal(eager, ours)


def passed_on(x):
    h = x.sin()
    h.retain_grad()
    return h, (h * h).sum()


def with_a_hook(x):
    h = x.sin()
    h.register_hook(lambda g: g * 2)
    h.retain_grad()
    return h


def assigned(x):
    h = x.sin()
    h.retain_grad()
    h.grad = torch.ones_like(h)
    return h


@pytest.mark.parametrize(
    ("function", "said"),
    [(passed_on, r"retain_grad.*out\[0\]"), (with_a_hook, "hooks"), (assigned, r"\.grad. of the result out")],
)
def test_what_cannot_be_kept_is_refused(function, said):
    with pytest.raises(foregrad.errors.UnsupportedSideEffectError, match=said):
        foregrad.capture(function, torch.rand(2, 2).requires_grad_())
