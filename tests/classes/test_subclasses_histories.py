"""Wrapper subclasses that are written to: without gradients as in eager, with gradients eager by name."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedError

from .wrappers import Logging, Unit, described, nested, two


def compiled(f):
    return foregrad.compile(f, backend="eager", on_unsupported="raise")


def ones(like):
    return torch.ones_like(like.detach())


def in_place(a, z, w):
    a.add_(z)
    a.mul_(w)
    return a * 2


def through_views(a, z, w):
    a[0].add_(z[0])
    a.view(-1).mul_(w.view(-1))
    a[1:] = z[1:]
    return a[0] * w[0], a.t() * 1


def not_given_back(a, z, w):
    a.mul_(w)


def itself(a, z, w):
    return a.add_(z * w)


def some_without_gradients(a, z, w):
    with torch.no_grad():
        a.mul_(2)
    a.add_(z)
    a.detach().mul_(3)
    return a, w * z


def zeroed(a, z, w):
    a.zero_()
    return a + z


def filled(a, z, w):
    a.copy_(z)
    return z * w


def without_gradients(a, z, w):
    with torch.no_grad():
        a.mul_(w)
        a[0].add_(z[0])
        a.view(-1).clamp_(-3, 3)
    return a * w, z * w


WRITES = [in_place, through_views, not_given_back, itself, some_without_gradients, zeroed, filled]
MAKERS = {
    "two": two,
    "nested": nested,
    "logging": lambda *size: Logging(torch.randn(size)),
    "unit": lambda *size: Unit(torch.randn(size), 0),
}


def trained(f, make, gradients):
    """Two calls, each on a tensor with another history, and all that they leave behind."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        leaf, z, w = (make(3, 3).requires_grad_(g) for g in gradients)
        a = leaf * 1
        version = a._version
        results = f(a, z, w)
        results = results if isinstance(results, tuple) else (results,)
        results = [r for r in (*results, a) if r is not None]
        found += [described(results), a._version - version, [r is a for r in results]]
        losses = [r for r in results if r.requires_grad]
        if losses:
            torch.autograd.backward(losses, [ones(loss) for loss in losses])
        found += [described([t.grad for t in (leaf, z, w)])]
    return found


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("f", [*WRITES, without_gradients])
@pytest.mark.filterwarnings("ignore")
def test_writes(f, kind):
    """Of tensors that gradients flow to, those without gradients."""
    for gradients in (False, False, False), *[(True, True, True)] * (f is without_gradients):
        assert trained(compiled(f), MAKERS[kind], gradients) == trained(f, MAKERS[kind], gradients)


SAID = r"a \w+ from outside is written to with gradients, or resized, at \S*test_subclasses_histories.py:\d+ .*under torch.no_grad"


@pytest.mark.parametrize("kind", ["two", "unit"])
@pytest.mark.parametrize("f", WRITES)
@pytest.mark.parametrize("gradients", [(True, True, True), (True, False, False), (False, True, False)], ids=str)
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_writes_with_gradients_are_eager_by_name(f, kind, gradients):
    if f in (zeroed, not_given_back) and not gradients[0]:
        return
    call = foregrad.compile(f, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match=SAID) as warned:
        found = trained(call, MAKERS[kind], gradients)
    assert found == trained(f, MAKERS[kind], gradients)
    assert len([one for one in warned if one.category is ForegradWarning]) == 1


@pytest.mark.parametrize("write", [lambda a: a.mul_(2), lambda a: a[0].mul_(2), lambda a: a.view(-1).zero_()])
@pytest.mark.filterwarnings("ignore:a TwoTensor from outside")
def test_a_write_to_a_leaf_is_eagers_error(write):
    said = []
    for f in (write, foregrad.compile(write, backend="eager", on_unsupported="eager")):
        a = two(3, 3, grad=True)
        before, version = described(a), a._version
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad") as error:
            f(a)
        assert not isinstance(error.value, UnsupportedError)
        said.append(str(error.value))
        assert (described(a), a._version) == (before, version)
    assert said[0] == said[1]


def test_an_error_that_the_function_catches():
    def f(a):
        try:
            a.mul_(2)
        except RuntimeError:
            return a * 3
        return a

    a = two(3, grad=True)
    assert described(foregrad.compile(f, backend="eager", on_unsupported="eager")(a)) == described(f(a))


def test_what_is_saved_and_then_written_is_eagers_error():
    def f(a):
        result = a * a
        with torch.no_grad():
            a.mul_(2)
        return result

    for call in (f, compiled(f)):
        a = two(3, grad=True) * 1
        result = call(a)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward(ones(result))

    def g(a, b):
        return a * b

    for call in (g, compiled(g)):
        a, b = two(3, grad=True) * 1, two(3, grad=True)
        result = call(a, b)
        compiled(torch.no_grad()(lambda a: a.mul_(2)))(a)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward(ones(result))


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(two(3))
        self.register_buffer("mean", TwoTensor(torch.zeros(3), torch.zeros(3)))
        self.register_buffer("state", two(3))

    def forward(self, x):
        with torch.no_grad():
            self.mean.mul_(0.9).add_(x.mean(0) * 0.1)
            self.state.mul_(self.weight)
        return (x - self.mean) * self.weight + self.state


def test_buffers_of_modules():
    def run(compile_it):
        torch.manual_seed(0)
        model = Normed()
        call, found = compile_it(model), []
        for _ in range(3):
            result = call(two(4, 3, grad=True))
            result.backward(ones(result))
            found.append(described([result, model.weight.grad, model.mean, model.state]))
        return found

    assert run(compiled) == run(lambda model: model)


def test_batch_norm():
    def run(call):
        torch.manual_seed(0)
        mean, var, weight, found = two(3), TwoTensor(torch.ones(3), torch.ones(3)), two(3, grad=True), []
        for _ in range(2):
            result = call(two(4, 3, grad=True), mean, var, weight)
            result.backward(ones(result))
            found.append(described([result, mean, var, weight.grad]))
        return found

    def f(x, mean, var, weight):
        return F.batch_norm(x, mean, var, weight, training=True)

    assert run(compiled(f)) == run(f)


def passes(a):
    first = a * 2
    return first, first * 3


def passes_a_view(a):
    view = (a * 2).view(-1)
    return view, view * 3


@pytest.mark.parametrize("f", [passes, passes_a_view])
def test_gradients_by_what_others_were_computed_from_inside(f):
    """They pass through it where nobody sees it; those by the arguments are right."""

    def run(call):
        torch.manual_seed(0)
        leaf = two(3, grad=True)
        results = call(leaf * 1)
        torch.autograd.backward(results, [ones(r) for r in results])
        return described(leaf.grad)

    fast = compiled(f)
    assert run(fast) == run(f)
    first, second = fast(two(3, grad=True) * 1)
    with pytest.raises(UnsupportedError, match="the gradient by it would miss"):
        torch.autograd.grad(second, first, ones(second))
    first, second = fast(two(3, grad=True) * 1)
    with pytest.raises(UnsupportedError, match="a hook on it would miss"):
        first.register_hook(print)
    first, second = fast(two(3, grad=True) * 1)
    (gradient,) = torch.autograd.grad(first, first, ones(first))
    assert described(gradient) == described(ones(first))
