"""Inference mode: tensors from outside stay what they are through views, tensors made inside are inference tensors."""

from __future__ import annotations

import pytest
import torch

import foregrad
from tests.covering import each


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


@pytest.mark.parametrize(("name", "make"), each(PROGRAMS, [plain, leaf, with_history, made_inside], times=2))
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


class Written(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean.add_(x.detach().mean(0))
        return self.layer(x) + self.mean


MODULES = {
    "a linear layer": lambda: torch.nn.Linear(4, 4),
    "layers": lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.LayerNorm(8)),
    "batch norm": lambda: torch.nn.BatchNorm1d(4),
    "a buffer that is written": Written,
}


@pytest.mark.parametrize("called_in", [torch.inference_mode, torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_a_module_made_in_inference_mode(name, requires_grad, called_in):
    def run(compile_it):
        torch.manual_seed(0)
        with torch.inference_mode():
            module = MODULES[name]()
        function = compile_it(module)
        found = []
        for _ in range(2):
            x = torch.randn(3, 4, requires_grad=requires_grad)
            try:
                with called_in():
                    out = function(x)
            except RuntimeError as error:
                found.append(type(error))
                continue
            found.append((out.is_inference(), out.requires_grad, out.tolist(), [b.tolist() for b in module.buffers()]))
        return found

    assert run(lambda f: foregrad.compile(f, backend="eager")) == run(lambda f: f)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_a_write_through_a_view_of_an_inference_tensor_is_refused_as_in_eager(mode):
    for function in (lambda x: x[0].add_(1), lambda x: x.view(2, 2).t().mul_(2)):
        with mode(), pytest.raises(RuntimeError, match="Inplace update to inference tensor"):
            foregrad.compile(function, backend="eager")(made_inside())
