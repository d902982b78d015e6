"""`once_differentiable`: what a second derivative raises, and when; the grad mode of a backward under torch.compile."""

import pytest
import torch
from torch.autograd import Function, grad
from torch.autograd.function import once_differentiable

import foregrad
from tests.covering import shared
from tests.dynamo.installed import make_known
from tests.regions.programs_once import Once, OnceIdentity, OnceLinear, OnceTwo


class Sine(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


class PartlyConstant(Sine):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            cosine = x.cos()
        return g * cosine * x


class PartlyEnabled(Sine):
    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            cosine = x.cos()
        return g * cosine * x


class Undifferentiated(Sine):
    @staticmethod
    @torch.no_grad()
    def backward(ctx, g):
        return g * ctx.saved_tensors[0].cos()


class StraightThrough(Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


class OnceThrough(StraightThrough):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return g


class TwoResults(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        index = x.argsort()
        ctx.mark_non_differentiable(index)
        return x.sin(), x * 2, index

    @staticmethod
    @once_differentiable
    def backward(ctx, a, b, _):
        (x,) = ctx.saved_tensors
        return (0 if a is None else a * x.cos()) + (0 if b is None else b * 2)


def inner(function):
    def run(x, y):
        return grad(function(x, y).square().sum(), x, create_graph=True)[0] * x

    return run


PROGRAMS = {
    "linear": lambda x, y: OnceLinear.apply(x),
    "twice": lambda x, y: OnceLinear.apply(Once.apply(x)) * y,
    "after a product": lambda x, y: Once.apply(x * y) * x,
    "beside another way": lambda x, y: Once.apply(x).sum() + (x**3 * y).sum(),
    "beside another output": lambda x, y: (Once.apply(x), (x * y).sin()),
    "detached": lambda x, y: Once.apply(x).detach() * (x * y),
    "of a matrix product": lambda x, y: OnceTwo.apply(x, y) @ x,
    "around another": lambda x, y: Once.apply(Sine.apply(x)) * y,
    "within another": lambda x, y: Sine.apply(Once.apply(x)) * y,
    "several results": lambda x, y: TwoResults.apply(x)[:2],
    "several results, all used": lambda x, y: sum(TwoResults.apply(x * y)[:2]),
    "without operators": lambda x, y: OnceThrough.apply(x * 3).square() * y,
    "an inner gradient": inner(lambda x, y: Once.apply(x) * y),
    "plain": lambda x, y: Sine.apply(x) * y,
    "plain, straight through": lambda x, y: StraightThrough.apply(x * 3).square() * y,
    "plain, an inner gradient": inner(lambda x, y: Sine.apply(x * y)),
    "plain, under no_grad in part": lambda x, y: PartlyConstant.apply(x) * y,
    "plain, under enable_grad in part": lambda x, y: PartlyEnabled.apply(x) * y,
    "plain, under no_grad": lambda x, y: Undifferentiated.apply(x) * y,
}
DOORS = {
    "directly": lambda f: foregrad.compile(f, backend="eager"),
    "torch.compile": lambda f: torch.compile(f, backend="foregrad", options={"backend": "eager"}),
}


def said(error):
    return type(error).__name__, str(error)[:60]


def derivatives(function, outputs, of, *, square):
    """First derivatives with `create_graph`, by which second ones there are, and by `backward()`, or what they raise."""
    torch.manual_seed(0)
    x, y = torch.rand(2, 3, 3, dtype=torch.float64).unbind()
    leaves = x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
    results = function(x, y)
    results = (results,) if isinstance(results, torch.Tensor) else results
    loss = sum((results[i].square() if square else results[i]).sum() for i in outputs if i < len(results))
    try:
        firsts = grad(loss, [leaves[i] for i in of], create_graph=True, allow_unused=True)
    except RuntimeError as error:
        return [said(error)]
    found = [None if g is None else (g.detach(), g.requires_grad) for g in firsts]
    firsts = [g for g in firsts if g is not None and g.requires_grad]
    for first in firsts:
        for by in ([x], [y], [x, y]):
            found += [None if g is None else g for g in grad(first.sum(), by, retain_graph=True, allow_unused=True)]
    for root in (loss, *(first.sum() for first in firsts)):
        try:
            root.backward(retain_graph=True)
        except RuntimeError as error:
            found.append(said(error))
        else:
            found += [None if leaf.grad is None else leaf.grad.clone() for leaf in leaves]
            x.grad = y.grad = None
    return found


def same(a, b):
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.allclose(a, b)
    return type(a) is type(b) and a == b


@pytest.mark.filterwarnings("ignore")
# What runs is one node through either door: without the C++ part, through one.
@pytest.mark.parametrize(
    ("name", "door", "native"),
    [
        *((name, "directly", True) for name in PROGRAMS),
        *((name, "directly", False) for name in shared(PROGRAMS, 0, 2)),
        *((name, "torch.compile", True) for name in shared(PROGRAMS, 1, 2)),
    ],
)
def test_second_derivatives_raise_where_eagers_do(name, door, native):
    make_known()
    torch._dynamo.reset()
    with foregrad.config.override(native=native):
        compiled = DOORS[door](PROGRAMS[name])
        if (name, door) == ("several results", "directly"):  # of which the caller may leave one out, and it is told so
            with pytest.raises(foregrad.errors.UnsupportedError, match="receive a gradient"):
                derivatives(compiled, (0, 1), (0,), square=False)
            return
        for outputs in ((0, 1), (0,)) if door == "directly" else ((0, 1),):
            for of in ((0, 1), (0,), (1,)):
                for square in (False, True):
                    eager, ours = (derivatives(f, outputs, of, square=square) for f in (PROGRAMS[name], compiled))
                    assert same(eager, ours), (outputs, of, square, eager, ours)


def test_identities_are_known_by_their_class():
    def function(x):
        return OnceIdentity.apply(x.sin()).sum()

    x = torch.rand(3, dtype=torch.float64).requires_grad_()
    (first,) = grad(DOORS["directly"](function)(x), x, create_graph=True)
    assert torch.equal(first, x.cos())
