"""Operators whose kernels read sizes as plain numbers: one graph for many sizes all the same, equal to eager's."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import foregrad
from tests.dynamic.test_shapes import Compiled
from tests.parity.oracle import check

SIZES = (4, 6, 9)


def _leaf(*shape):
    return torch.randn(*shape).requires_grad_()


def _triangular(n):
    return (torch.randn(n, n).tril() + 4 * torch.eye(n)).requires_grad_()


PROGRAMS = {
    "baddbmm with a bias for all": (
        lambda mask, a, b: torch.baddbmm(mask, a, b),
        lambda n: (torch.randn(n, n), _leaf(2, n, 3), _leaf(2, 3, n)),
    ),
    "addbmm": (lambda x, a, b: x.addbmm(a, b), lambda n: (_leaf(3, 5), _leaf(n, 3, 2), _leaf(n, 2, 5))),
    "addcmul": (lambda x, a, b: torch.addcmul(x, a, b, value=0.5), lambda n: (_leaf(n, 3), _leaf(3), _leaf(n, 1))),
    "addcdiv": (lambda x, a, b: torch.addcdiv(x, a, b), lambda n: (_leaf(n, 3), _leaf(n, 3), torch.rand(3) + 1)),
    "lerp": (lambda x, a, w: torch.lerp(x, a, w), lambda n: (_leaf(n, 3), _leaf(n, 3), _leaf(3))),
    "solve_triangular": (
        lambda a, b: torch.linalg.solve_triangular(a, b, upper=False),
        lambda n: (_triangular(n), _leaf(n, 2)),
    ),
    "rfft and back": (lambda x: torch.fft.irfft(torch.fft.rfft(x) * 2, n=x.shape[-1]), lambda n: (_leaf(3, 2 * n),)),
    "fft2": (lambda x: torch.fft.fft2(x).abs(), lambda n: (_leaf(2, n, n),)),
    "unfold": (lambda x: nn.functional.unfold(x, 3, padding=1), lambda n: (_leaf(2, 3, n, n),)),
    "complex": (lambda a, b: torch.complex(a, b).abs(), lambda n: (_leaf(n, 2), _leaf(n, 2))),
    "bilinear": (
        lambda a, b, w: nn.functional.bilinear(a, b, w),
        lambda n: (_leaf(n, 3), _leaf(n, 4), _leaf(2, 3, 4)),
    ),
    "pad": (lambda x: nn.functional.pad(x, (1, 2), value=0.5).sin(), lambda n: (_leaf(2, n),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_operators(name):
    fn, inputs = PROGRAMS[name]
    compile = Compiled(dynamic=True, on_unsupported="raise")
    assert check(fn, [lambda n=n: inputs(n) for n in SIZES], calls=len(SIZES), compile=compile) == "equal"
    assert compile.count == 1


def test_attention_with_a_mask_and_its_weights():
    """`nn.MultiheadAttention` adds the mask by `baddbmm`, with one mask for all heads."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    compiled = foregrad.compile(attention, backend="eager", dynamic=True, on_unsupported="raise")
    for length in SIZES:
        mask = torch.full((length, length), -torch.inf).triu(1)
        x = torch.randn(2, length, 8)
        results = []
        for run in (attention, compiled):
            attention.zero_grad()
            leaf = x.clone().requires_grad_()
            y, weights = run(leaf, leaf, leaf, attn_mask=mask)
            (y.square().sum() + weights.square().sum()).backward()
            results.append([y, weights, leaf.grad, *(p.grad for p in attention.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), length
    assert len(compiled.foregrad.specializations) == 1


def test_what_fakes_log_of_errors_is_not_shown(caplog):
    """An operator without a kernel for symbols: torch logs a traceback of it, of which the program can know nothing."""
    with caplog.at_level(logging.ERROR):
        compiled = foregrad.compile(nn.Hardshrink(), backend="eager", dynamic=True, on_unsupported="raise")
        for size in SIZES:
            x = _leaf(size)
            (grad,) = torch.autograd.grad(compiled(x).sum(), x)
            assert torch.equal(grad, (x.detach().abs() > 0.5).float())
    assert not [record for record in caplog.records if record.name.startswith("torch._subclasses")]


# -------------------------------------------------------------------- len()


def mean_by_length(x):
    return x.sum() / len(x)


def counted_by_length(x):
    return (x * 2).sum() if len(x) > 1 else x.prod()


def sliced_by_length(x):
    return x[: len(x) // 2].square()


def length_of_found(x):
    (found,) = torch.where(x[:, 0] > -10)
    return x[found].sum() / len(found)


@pytest.mark.parametrize("function", [mean_by_length, counted_by_length, sliced_by_length, length_of_found])
def test_the_length_of_a_tensor_has_one_graph_for_all_sizes(function):
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    for n in range(4, 16):
        x = torch.arange(3.0 * n).reshape(n, 3).requires_grad_()
        ours, theirs = compiled(x), function(x)
        assert torch.equal(ours, theirs)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (ours, theirs)))
    assert len(list(compiled.foregrad.all_specializations())) <= 2


def test_a_length_kept_in_the_state_is_an_integer():
    seen = {"count": 0, "last": 0}

    def step(x):
        seen["count"] += len(x)
        seen["last"] = len(x)
        return x * 2

    compiled = foregrad.compile(step, backend="eager", on_unsupported="raise")
    for n in range(4, 14):
        assert torch.equal(compiled(torch.ones(n, 2)), torch.full((n, 2), 2.0))
        assert seen["last"] == n
        assert type(seen["last"]) is int
    assert seen["count"] == sum(range(4, 14))
    assert len(list(compiled.foregrad.all_specializations())) <= 3
    assert len.__module__ == "builtins"


def test_the_length_of_what_is_no_tensor_or_has_none():
    class Sized:
        def __len__(self):
            return 7

    def lengths(x):
        try:
            len(x.sum())
        except TypeError as error:
            text = str(error)
        return x * len([1, 2]) + len(Sized()), len(text), list(map(len, ("ab", [1])))

    compiled, x = foregrad.compile(lengths, backend="eager", on_unsupported="raise"), torch.ones(3)
    for _ in range(3):
        ours, theirs = compiled(x), lengths(x)
        assert torch.equal(ours[0], theirs[0])
        assert ours[1:] == theirs[1:]
