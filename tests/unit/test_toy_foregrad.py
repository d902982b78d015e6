"""The page-sized foregrad of examples/toy_foregrad.py does what eager does, or refuses by name."""

import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from examples import toy_foregrad as toy


def _mlp(parameters, x):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
    return functional_call(model, parameters, (x,)).logsumexp(-1)


def _parameters():
    sizes = {"0.weight": (8, 4), "0.bias": (8,), "2.weight": (8,), "2.bias": (8,), "3.weight": (2, 8), "3.bias": (2,)}
    return {name: torch.randn(size, requires_grad=True) for name, size in sizes.items()}


def _written(x, y):
    x.mul_(2)
    x[1].add_(y.exp()[0])
    return (x * y).sum()


def _views(x, y):
    first = x[0]
    x.add_(1)
    return first, x.t(), x, y.detach(), (x * y).sum()


def _views_of_a_result(x, y):
    z = x @ y
    return z[0], z.t(), z.detach(), z, (z, 3, None, "text")


def _written_inside(x, y):
    z = torch.zeros(3, 3)
    z[:, 1] = x[0]
    z.diagonal().mul_(y[0] + 2)
    return z.sin()


def _without_gradients(x, y):
    with torch.no_grad():
        y.mul_(0.5)
    return x * y.detach().exp()


def _random(x, y):
    return ((torch.rand_like(x) > 0.5) * x).sin() @ y


def _convolved(x, y):
    return F.max_pool2d(F.conv2d(x[None, None], y[None, None], padding=1), 2)


def _leaf(size=(3, 3)):
    return torch.randn(size, requires_grad=True)


def _inner(size=(3, 3)):
    return torch.randn(size, requires_grad=True) * 1


PROGRAMS = {
    "network": (_mlp, lambda: (_parameters(), torch.randn(5, 4))),
    "written": (_written, lambda: (torch.randn(3, 3), _leaf())),
    "written with a history": (_written, lambda: (_inner(), _leaf())),
    "views": (_views, lambda: (_inner(), _leaf())),
    "views of plain arguments": (_views, lambda: (torch.randn(3, 3), torch.randn(3, 3))),
    "views of a late argument": (_views, lambda: (torch.randn(5, 3)[2:], _leaf())),
    "views of a result": (_views_of_a_result, lambda: (_leaf(), torch.randn(3, 3))),
    "transposed": (_views_of_a_result, lambda: (_leaf().t(), torch.randn(3, 3).t())),
    "written inside": (_written_inside, lambda: (_leaf(), _leaf())),
    "without gradients": (_without_gradients, lambda: (_leaf(), torch.randn(3, 3))),
    "random": (_random, lambda: (_leaf(), _leaf())),
    "convolution": (_convolved, lambda: (_leaf((6, 6)), _leaf())),
    "same argument twice": (lambda x, y: x @ y, lambda: (x := _leaf(), x)),
}


def _run(function, make):
    torch.manual_seed(0)
    args = make()
    leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    results = torch.utils._pytree.tree_leaves(function(*args))
    tensors = [result for result in results if isinstance(result, torch.Tensor)]
    ends = {id(t): t for t in (*tensors, *leaves) if t.grad_fn is not None}
    roots = [leaf for leaf in leaves if leaf.requires_grad and leaf.is_leaf]
    gradients = torch.autograd.grad([t.sin().sum() for t in ends.values()], roots, allow_unused=True) if roots else ()
    facts = [(t.requires_grad, t.is_leaf, t.stride(), t._base is not None) for t in tensors]
    same = [[a is b for a in tensors] for b in leaves]
    memory = [[a.untyped_storage()._cdata == b.untyped_storage()._cdata for a in tensors] for b in (*leaves, *tensors)]
    values = [t.detach().clone() for t in (*tensors, *leaves)]
    others = [result for result in results if not isinstance(result, torch.Tensor)]
    return [*values, *gradients], (facts, same, memory, others)


@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_to_eager(name):
    function, make = PROGRAMS[name]
    compiled = toy.compile(function)
    for _ in range(2):
        (expected, facts), (found, ours) = _run(function, make), _run(compiled, make)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert ours == facts
    assert len(compiled.specializations) == 1


def test_other_arguments_are_another_specialization():
    compiled = toy.compile(lambda x, n: x.sin() * n)
    for x, n in ((torch.ones(2), 2), (torch.ones(3), 2), (torch.ones(3), 3), (torch.ones(3), 3)):
        torch.testing.assert_close(compiled(x, n), x.sin() * n)
    assert len(compiled.specializations) == 3


def test_compilers_get_the_halves():
    seen = []

    def compiler(module, examples):
        seen.append((module, len(examples)))
        return module

    x = _leaf()
    toy.compile(lambda x: (x.sin().cos() * 2).sum(), compiler)(x).backward()
    (forward, inputs), (backward, residuals) = seen
    assert inputs == 1 and residuals == 2  # x is cheaper to keep than what is computed from it; and the tangent
    assert "cos" in forward.code and "neg" not in forward.code and "sin" in backward.code


CLOSED_OVER = torch.ones(3)
REFUSED = {
    "closed over": (lambda x: x + CLOSED_OVER, lambda: (torch.ones(3),), "make it an argument"),
    "a value": (lambda x: x * x.sum().item(), lambda: (torch.ones(3),), "a value that only a real call knows"),
    "gaps": (lambda x: x + 1, lambda: (torch.ones(3, 4)[:, ::2],), "gaps in its memory"),
    "another dtype": (lambda x: x.view(torch.int32) + 1, lambda: (torch.ones(3),), "is read as"),
    "shared memory": (lambda x, y: x.add_(y), lambda: (x := torch.ones(3), x), "share memory"),
    "an object": (lambda x: (x, object()), lambda: (torch.ones(3),), "returns object"),
    "statistics": (
        lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3), training=True),
        lambda: (torch.ones(2, 3),),
        "which its schema does not say",
    ),
    "no functional form": (lambda x: torch.sin(x, out=torch.empty(3)), lambda: (torch.ones(3),), "functional form"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    function, make, message = REFUSED[name]
    args = make()
    before = [arg.clone() for arg in args]
    with pytest.raises(toy.UnsupportedError, match=message):
        toy.compile(function)(*args)
    torch.testing.assert_close(list(args), before)


def test_the_page_is_small():
    with open(toy.__file__) as file:
        assert len(file.readlines()) <= 500
