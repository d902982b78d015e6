"""Writes whose values depend on the order of a kernel are refused by name; writes to elements apart are not."""

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedAliasError
from tests.parity.oracle import check


def windows(x):
    x.unfold(0, 2, 1).mul_(2)
    return x * 1


def shifted_columns(x):
    y = x.view(2, -1)
    y[:, 1:].add_(y[:, :-1])
    return x * 1


def text(fn, *args):
    return str(foregrad.capture(fn, *args))


def twice(x):
    torch._foreach_add_([x, x], [x, x])


def transposed(x):
    y = x.view(2, 3)[:, :2]
    y.copy_(y.mT)


def complex_rows(x):
    z = torch.view_as_complex(x.view(3, 2))
    z[0].mul_(z[1])


@pytest.mark.parametrize("fn", [windows, shifted_columns, twice, transposed, complex_rows])
def test_the_call_runs_eagerly_by_name(fn):
    with pytest.raises(UnsupportedAliasError, match="the order of its kernel"):
        foregrad.capture(fn, torch.randn(6))
    ours, theirs = torch.arange(6.0), torch.arange(6.0)
    with pytest.warns(ForegradWarning, match="clone"):
        result = foregrad.compile(fn, backend="eager", on_unsupported="eager")(ours)
    expected = fn(theirs)
    assert torch.equal(ours, theirs)
    assert result is expected is None or torch.equal(result, expected)


def test_a_kernel_of_a_backward_too():
    class Windows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            gradient = gradient.clone()
            gradient.unfold(0, 2, 1).mul_(2)
            return gradient

    with pytest.raises(UnsupportedAliasError, match="the order of its kernel"):
        foregrad.capture(Windows.apply, torch.randn(6, requires_grad=True))


def halves(x):
    x[:3].add_(x[3:])
    return x * 1


def interleaved(x):
    x[::2].mul_(x[1::2])
    return x * 1


def itself(x):
    x.add_(x)
    return x * 1


def together(x):
    a, b = x[:3], x[3:]
    torch._foreach_add_([a, b], [a, b])
    return x * 1


def columns(x):
    y = x.view(2, -1)
    y[:, :1].add_(y[:, 1:2])
    return x * 1


def blocks(x):
    y = x.view(3, 2)
    y[1:, ::2].add_(y[:2, 1::2])
    return x * 1


@pytest.mark.parametrize("fn", [halves, interleaved, itself, together, columns, blocks])
@pytest.mark.parametrize("size", [6, 3_000_000])
def test_elements_apart_stay_functional_operators(fn, size):
    """Tensors in one memory that have no element in common, or the same ones at the same places."""
    ours = torch.randn(size if fn in (interleaved, itself, columns) else 6)
    theirs = ours.clone()
    assert torch.equal(foregrad.compile(fn, backend="eager", on_unsupported="raise")(ours), fn(theirs))
    assert torch.equal(ours, theirs)


def test_sizes_that_vary_are_no_reason_to_refuse():
    def fn(x):
        n = x.shape[0] // 2
        x[1 : n + 1].copy_(x[:n].clone())
        x[::2].mul_(x[1::2])
        return x * 1

    compiled = foregrad.compile(fn, backend="eager", dynamic=True, on_unsupported="raise")
    for size in (4, 6, 10):
        ours = torch.randn(size)
        theirs = ours.clone()
        assert torch.equal(compiled(ours), fn(theirs))
        assert torch.equal(ours, theirs)


def test_halves_that_vary_stay_symbolic():
    def fn(x):
        n = x.shape[0] // 2
        x[:n].add_(x[n:])
        return x * 1

    compiled = foregrad.compile(fn, backend="eager", dynamic=True)
    for size in (4, 6, 10):
        x = torch.randn(size)
        expected = fn(x.clone())
        assert torch.equal(compiled(x), expected)


@pytest.mark.parametrize("loss", ["phase", "size"])
@pytest.mark.parametrize("decompose", [torch.linalg.eig, torch.linalg.eigh, torch.linalg.svd])
def test_a_loss_of_the_phase_of_complex_vectors_has_no_gradient(decompose, loss):
    """Eager looks at values and raises; so does the compiled backward."""

    def fn(x):
        result = decompose(x)
        vectors = result[0] if decompose is torch.linalg.svd else result[1]
        return (vectors if loss == "phase" else vectors.abs()).sum()

    def make_args():
        return (torch.randn(3, 3, dtype=torch.complex64, requires_grad=True),)

    check(fn, make_args, grad_slack=64)
    x = make_args()[0]
    out = foregrad.compile(fn, backend="eager")(x)
    if loss == "phase":
        with pytest.raises(RuntimeError, match="phase"):
            out.backward(torch.ones_like(out))
    else:
        out.backward()


@pytest.mark.parametrize("fn", [torch.linalg.eigvalsh, torch.linalg.svdvals, torch.linalg.cond])
def test_no_vectors_are_computed_where_none_are_used(fn):
    """As eager: without gradients the cheaper kernel, which rounds in its own way."""
    captured = text(lambda x: fn(x), torch.randn(4, 4))
    assert "False)" in next(line for line in captured.splitlines() if "_linalg_" in line and "ops.aten" in line)
    assert check(lambda x: fn(x), lambda: (torch.randn(4, 4),)) == "equal"
