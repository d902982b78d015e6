"""Inference mode: tensors from outside stay what they are through views, tensors made inside are inference tensors."""

from __future__ import annotations

import pytest
import torch

import foregrad


def plain():
    return torch.arange(4.0)


def leaf():
    return plain().requires_grad_()


def with_history():
    return leaf() * 1


def made_inside():
    with torch.inference_mode():
        return plain()


PROGRAMS = {
    "view": lambda x: x.view(2, 2),
    "detach": lambda x: x.detach(),
    "a write through a view": lambda x: x.view(-1)[1:].mul_(2),
    "a write through detach": lambda x: x.detach().mul_(2),
    "a write": lambda x: x.mul_(2),
    "unbind": lambda x: list(x.unbind(0)),
    "a write through one of several": lambda x: x.split(2)[0].mul_(2),
    "data": lambda x: x.data.mul_(2),
    "a view of another dtype": lambda x: [x.view(torch.int32), x + 1],
    "a chain": lambda x: [x.view(1, 4)[0].detach()[1:].mul_(3), x + 1, x[0]],
    "expand": lambda x: x.expand(2, 4),
    "strides": lambda x: [x.as_strided((2,), (1,), 1).mul_(3), x + 1],
    "a view of something new": lambda x: (x * 2)[1:],
    "the conjugate": lambda x: torch.view_as_real(x.to(torch.complex64).conj()[1:] * 2j),
}


def seen(function, make):
    arguments = make()
    with torch.inference_mode():
        out = function(*arguments)
    found = [*(out if isinstance(out, list) else [out]), *arguments]
    return [(t.is_inference(), t.requires_grad, t.stride(), t.tolist()) for t in found], [
        None if t.is_inference() else t._version for t in arguments
    ]


@pytest.mark.parametrize("make", [plain, leaf, with_history, made_inside])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_view_of_an_argument_is_what_it_is_in_eager(name, make):
    program = PROGRAMS[name]
    compiled = foregrad.compile(program, backend="eager")
    for _ in range(2):
        assert seen(compiled, lambda: [make()]) == seen(program, lambda: [make()])
    assert len(compiled.foregrad.specializations) == 1


@pytest.mark.parametrize("requires_grad", [False, True])
def test_arguments_that_share_memory(requires_grad):
    def make():
        x = torch.arange(6.0).requires_grad_(requires_grad)
        return [x, x.detach()[1:5]]

    def program(x, y):
        y.mul_(2)
        return [x + 1, y[0]]

    compiled = foregrad.compile(program, backend="eager")
    for _ in range(2):
        assert seen(compiled, make) == seen(program, make)
