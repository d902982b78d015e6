"""What a function returns detached has no history, also where a backend decomposes `detach`, as Inductor does."""

import pytest
import torch

import foregrad

aten = torch.ops.aten
DECOMPOSED = {aten.detach.default: lambda x: aten.alias(x), aten.t.default: lambda x: aten.transpose.int(x, 0, 1)}

PROGRAMS = {
    "a view of it": lambda x: (x * 2).detach()[0],
    "an argument": lambda x: (x.detach()[0], x.sin()),
    "a view of an argument": lambda x: x[0].detach(),
    "beside what it is of": lambda x: ((y := x.sin()), y.detach(), y.detach()[0]),
    "transposed": lambda x: ((y := x.sin()), y.t().detach()),
    "pieces": lambda x: tuple(piece.detach() for piece in x.sin().chunk(2)),
    "one of the pieces": lambda x: tuple(p.detach() if i else p for i, p in enumerate(x.sin().chunk(2))),
    "pieces of it": lambda x: (*(y := x.sin()).detach().split(1), y),
    "required again": lambda x: x.sin()[0].detach().requires_grad_(),
    "expanded": lambda x: (x.sum().detach().expand(3), x.sum()),
}


def seen(results):
    results = results if isinstance(results, tuple) else (results,)
    return [
        (
            t.requires_grad,
            t.is_leaf,
            t.stride(),
            t.storage_offset(),
            [t.untyped_storage().data_ptr() == u.untyped_storage().data_ptr() for u in results],
        )
        for t in results
    ]


@pytest.mark.parametrize("decompositions", [None, DECOMPOSED], ids=["as it is", "decomposed"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_detached_results(name, decompositions):
    function = PROGRAMS[name]
    compiled = foregrad.compile(function, backend="eager", decompositions=decompositions)
    for requires_grad in (True, False):
        x = torch.rand(2, 2).requires_grad_(requires_grad)
        for _ in range(2):
            assert seen(compiled(x)) == seen(function(x))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def test_a_custom_function_that_returns_a_view_of_an_argument_writes_nothing():
    def f(x):
        y = Reversed.apply(x)
        return y, y, y[1:]

    x = torch.randn(3, requires_grad=True)
    first, again, part = foregrad.compile(f, backend="eager")(x)
    assert first is again
    assert x._version == 0
    (gradient,) = torch.autograd.grad(first.sum() + part.sum(), x)
    assert gradient.equal(torch.tensor([-1.0, -2.0, -2.0]))


def test_a_view_of_a_view_among_the_arguments_whose_base_is_marked_afterwards_is_refused():
    """The view of eager's is a leaf by then; a view taken last would have a history."""

    def f(x, whole):
        view = x.squeeze()
        whole.requires_grad_()
        return view

    whole = torch.randn(1, 3)
    with pytest.raises(foregrad.errors.UnsupportedAliasError, match="is a view"):
        foregrad.compile(f, backend="eager", on_unsupported="raise")(whole.flatten(), whole)
