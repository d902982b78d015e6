"""Writes that a kernel's order decides: when a copy of the memory is made for them, and that it is right everywhere."""

import pytest
import torch

import foregrad
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


@pytest.mark.parametrize("fn", [windows, shifted_columns])
def test_the_kernel_itself_runs_on_a_copy(fn):
    """Overlaps become one node that names the operator."""
    assert "call_in_memory" in text(fn, torch.randn(6))


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


@pytest.mark.parametrize("fn", [halves, interleaved, itself, together])
def test_elements_apart_stay_functional_operators(fn):
    """Tensors in one memory that have no element in common, or the same ones at the same places."""
    assert "call_in_memory" not in text(fn, torch.randn(6))
    assert check(fn, lambda: (torch.randn(6),)) == "equal"


def test_too_large_to_look_at_every_byte():
    """Past the limit, tensors that might overlap take the safe way."""

    def fn(x):
        x[::2].mul_(x[1::2])
        return x.sum()

    large = torch.randn(3_000_000)
    assert "call_in_memory" in text(fn, large)
    expected = large.clone()
    assert torch.equal(foregrad.compile(fn, backend="eager")(large), fn(expected))
    assert torch.equal(large, expected)


def test_sizes_that_vary_get_graphs_of_their_own():
    compiled = foregrad.compile(windows, backend="eager", dynamic=True)
    for size in (4, 6, 9):
        x = torch.randn(size)
        expected = windows(x.clone())
        assert torch.equal(compiled(x), expected)
        assert torch.equal(x, expected)


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


def test_second_derivatives_flow_through():
    def fn(x):
        y = x * x
        y.unfold(0, 2, 1).mul_(x[:2])
        return y.sin()

    assert check(fn, lambda: (torch.randn(5, requires_grad=True),), order=2, grad_slack=8) == "equal"


def test_random_numbers_are_drawn_in_the_kernels_order():
    def fn(x):
        x.unfold(0, 3, 1).uniform_()
        return x * 1

    assert check(fn, lambda: (torch.zeros(6),)) == "equal"


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
