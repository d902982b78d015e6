"""Forward mode where an operand has no tangent: the operator is skipped, as in eager, and not computed with zeros.

The primals are infinite, zero, or where a logarithm or a quotient is not finite: there 0 times a derivative is NaN.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

import foregrad
from tests.covering import shared
from tests.dynamo.installed import make_known

inf = float("inf")


def vector(*values):
    return torch.tensor(values, dtype=torch.float64)


A, B, C = vector(0.0, 1.0, inf), vector(inf, 0.0, 1.0), vector(1.0, inf, 2.0)
OPERATORS = {
    "addcmul": (lambda a, b, c: torch.addcmul(a, b, c, value=2), (A, B, C)),
    "addcdiv": (torch.addcdiv, (A, B, C)),
    "product, quotient and power": (lambda a, b: (a * b, a / b, a**b), (A, B)),
    "xlogy": (torch.xlogy, (vector(0, 1, 2), vector(0, 0, 2))),
    "binary cross-entropy": (F.binary_cross_entropy, (vector(0.1, 1, 0.5), vector(1, 1, 0))),
    "lerp": (torch.lerp, (A, B, C)),
    "logaddexp": (torch.logaddexp, (vector(-inf, 1, 2), vector(-inf, 0, inf))),
    "a number": (lambda a, b: torch.rsub(a, b, alpha=2) * b * inf, (A, B)),
    "complex numbers": (lambda a, b: (torch.complex(a, b) * torch.complex(b, a) * 1j).abs(), (A, B)),
    "dot": (torch.dot, (A, B)),
    "cross": (torch.linalg.cross, (A, B)),
    "addmm": (lambda a, b, c: torch.addmm(a, b[:, None], c[None]), (A, B, C)),
    "cat": (lambda a, b: torch.cat([a, b]) * torch.cat([b, a]), (A, B)),
    "in place": (lambda a, b: a.clone().mul_(b).div_(a).add_(b, alpha=3), (A, B)),
    "in a view": (lambda a, b: (lambda z: (z[:2].mul_(b[:2]), z / b)[1])(a.clone()), (A, B)),
    "several results": (lambda a, b: (a * b, a.sin(), b.detach()), (A, B)),
}


def split(f, args, mask):
    """The function of those arguments alone that are in the mask, and these."""

    def of_some(*given):
        left = iter(given)
        return f(*(next(left) if has else arg for has, arg in zip(mask, args, strict=True)))

    return of_some, tuple(arg for has, arg in zip(mask, args, strict=True) if has)


def jvp(f, args, mask):
    some, given = split(f, args, mask)
    return torch.func.jvp(some, given, tuple(map(torch.ones_like, given)))


def jvp_with_more(f, args, mask):
    some, given = split(lambda *args: (f(*args), args[0] * args[-1]), args, mask)
    return torch.func.jvp(some, given, tuple(map(torch.ones_like, given)), has_aux=True)


def dual_numbers(f, args, mask):
    with forward_ad.dual_level():
        out = f(*(forward_ad.make_dual(a, torch.ones_like(a)) if has else a for a, has in zip(args, mask, strict=True)))
        return [tuple(forward_ad.unpack_dual(item)) for item in (out if isinstance(out, tuple) else (out,))]


def jacobian(f, args, mask):
    return torch.func.jacfwd(f, argnums=tuple(itertools.compress(itertools.count(), mask)))(*args)


def hessian(f, args, mask):
    def loss(*args):
        out = f(*args)
        return (out[0] if isinstance(out, tuple) else out).sum()

    argnums = tuple(itertools.compress(itertools.count(), mask))
    return torch.func.jacfwd(torch.func.jacrev(loss, argnums=argnums), argnums=argnums)(*args)


DERIVATIVES = [jvp, jvp_with_more, dual_numbers, jacobian, hessian]


def check(eager, compiled):
    eager, compiled = (torch.utils._pytree.tree_leaves(side) for side in (eager, compiled))
    for a, b in zip(eager, compiled, strict=True):
        assert (a is None) is (b is None)
        if a is not None:
            torch.testing.assert_close(b, a, rtol=0, atol=0, equal_nan=True, check_stride=True)


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("name", OPERATORS)
def test_an_absent_tangent_stays_absent(name, derivative):
    """Within the compiled function, and around it."""
    f, args = OPERATORS[name]
    compiled = foregrad.compile(f, backend="eager", on_unsupported="raise")
    masks = [*itertools.product((False, True), repeat=len(args))][1:]
    if derivative is not jvp:
        masks = shared(masks, DERIVATIVES.index(derivative) % 2, 2)
    for mask in masks:
        if not (name == "binary cross-entropy" and derivative is dual_numbers):
            eager = derivative(f, args, mask)
            inside = foregrad.compile(
                lambda *args, mask=mask: derivative(f, args, mask), backend="eager", on_unsupported="raise"
            )
            check(eager, inside(*args))
            check(eager, derivative(compiled, args, mask))


@pytest.mark.parametrize("name", ["addcmul", "binary cross-entropy", "a number", "dot"])
def test_an_absent_tangent_stays_absent_by_the_doors_of_others(name):
    f, args = OPERATORS[name]
    mask = (True, *[False] * (len(args) - 1))
    eager = jvp(f, args, mask)
    check(eager, foregrad.aot_function(lambda *args: jvp(f, args, mask), foregrad.nop)(*args))
    make_known()
    check(
        eager, torch.compile(lambda *args: jvp(f, args, mask), backend="foregrad", options={"backend": "eager"})(*args)
    )


def test_an_absent_tangent_stays_absent_where_sizes_vary():
    def f(a, b):
        def of_one(a):
            return (
                torch.addmm(a, b, b),
                torch.dot(a[0], b[0]),
                (a * b).mT[0] * 3,
                a.view(-1).addcmul(b.view(-1), b[0][0]),
            )

        return torch.func.jvp(of_one, (a,), (torch.ones_like(a),))

    compiled = foregrad.compile(f, backend="eager", dynamic=True, on_unsupported="raise")
    for size in (3, 5):
        args = torch.rand(size, size), torch.full((size, size), inf)
        check(f(*args), compiled(*args))
    assert len(foregrad.explain_recompiles(compiled)) == 1
