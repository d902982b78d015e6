"""A compiler chooses the strides of saved values. Backwards get the strides that they are compiled for."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import BackendError
from foregrad.graph.role import role_of
from tests.covering import each


def channels_last(value):
    """The dimension 1 is the innermost in memory."""
    return value.movedim(1, -1).contiguous().movedim(-1, 1) if value.dim() > 1 else value


def permuted(value):
    """The dimensions are in memory from last to first."""
    dims = [*reversed(range(value.dim()))]
    return value.permute(dims).contiguous().permute(dims)


def copied(value):
    return value.clone(memory_format=torch.contiguous_format)


LAYOUTS = [channels_last, permuted, copied]


class Image(nn.Module):
    """The backward views `hidden` as a row, which strides of one layout alone allow."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        hidden = self.conv(x * x).tanh()
        return (hidden.view(-1).sin() @ hidden.view(-1).cos()) + hidden.sum()


def image():
    return Image(), torch.randn(2, 3, 6, 5)


def strided_image():
    return Image(), torch.randn(2, 3, 5, 6).transpose(2, 3)


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4).t())

    def forward(self, x):
        return (x @ self.weight).tanh().sum(0)


def matrices():
    return Matrices(), torch.randn(4, 3).t()


def compiler_of(layout, says, seen):
    """A compiler that lays out saved values. `says`: what it reports of them."""

    def compiler(gm, example_inputs):
        phase, strides = role_of(gm).phase, [getattr(value, "stride", tuple)() for value in example_inputs]
        shown = 1  # the only result of each program
        as_it_is = foregrad.make_boxed_func(gm.forward)

        def run(*values):
            if phase == "backward":
                assert [getattr(value, "stride", tuple)() for value in values][: len(strides)] == strides
                seen.append(strides)
                return as_it_is([*values])
            results = [*torch.fx.Interpreter(gm).run(*values)]
            return [*results[:shown], *map(laid_out, results[shown:])]

        def laid_out(value):
            return layout(value) if isinstance(value, torch.Tensor) else value

        if phase == "forward" and says != "nothing":
            results = [node.meta["val"] for node in gm.graph.output_node().args[0]]
            chosen = [layout(torch.empty(value.shape)) for value in results]
            if says == "lies":
                chosen = [value.contiguous() for value in chosen]
            run.output_strides = [None] * shown + [value.stride() for value in chosen[shown:]]
        return run

    return compiler


def by_compile(model, x, compiler):
    return foregrad.compile(model, backend=compiler, on_unsupported="raise")


def by_aot_function(model, x, compiler):
    def function(x, *parameters):
        return torch.func.functional_call(model, dict(zip(names, parameters, strict=True)), (x,))

    names = [name for name, _ in model.named_parameters()]
    run = foregrad.aot_function(function, compiler)
    return lambda x: run(x, *model.parameters())


def by_aot_module(model, x, compiler):
    return foregrad.aot_module(model, compiler)


def by_torch_compile(model, x, compiler):
    torch._dynamo.reset()
    return torch.compile(model, backend=foregrad.aot_autograd(fw_compiler=compiler))


def by_descriptors(model, x, compiler):
    with contextlib.ExitStack() as stack:
        jd = foregrad.aot_export_joint_with_descriptors(stack, model, (x,))
        run = foregrad.aot_compile_joint_with_descriptors(jd, fw_compiler=compiler, bw_compiler=compiler)
    return lambda x: run(*model.parameters(), x)


DOORS = [by_compile, by_aot_function, by_aot_module, by_torch_compile, by_descriptors]
named = lambda value: getattr(value, "__name__", None)


def step(model, call, x):
    x = x.detach().requires_grad_()
    model.zero_grad()
    out = call(x)
    out.sum().backward()
    return [out.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize(
    ("door", "layout", "program", "says"),
    each(DOORS, LAYOUTS, [image, strided_image, matrices], ["nothing", "strides", "lies"], times=4),
    ids=named,
)
def test_a_backward_gets_the_strides_that_it_was_compiled_for(door, program, layout, says):
    """In the first call and in later ones."""
    torch.manual_seed(0)
    model, x = program()
    seen = []
    call = door(model, x.detach().requires_grad_(), compiler_of(layout, says, seen))
    for _ in range(3):
        torch.testing.assert_close(step(model, call, x), step(model, model, x))
        x = torch.empty_strided(x.shape, x.stride()).copy_(torch.randn(x.shape))
    assert len(seen) == 3


@pytest.mark.parametrize("layout", LAYOUTS, ids=named)
def test_a_backward_gets_symbolic_strides_in_the_order_that_it_was_compiled_for(layout):
    torch.manual_seed(0)
    model, orders = Image(), []

    def compiler(gm, example_inputs):
        run = compiler_of(layout, "nothing", [])(gm, [])
        if role_of(gm).phase != "backward":
            return run

        def checked(*values):
            orders.append([value.is_contiguous() for value in values if getattr(value, "ndim", 0) == 4])
            return run(*values)

        return checked

    call = foregrad.compile(model, backend=compiler, dynamic=True, on_unsupported="raise")
    for size in (5, 6, 7):
        x = torch.randn(2, 3, size, 5)
        torch.testing.assert_close(step(model, call, x), step(model, model, x))
    assert len(orders) == 3
    assert all(map(all, orders))


def test_the_strides_that_were_reported_are_those_of_the_backwards_example_inputs():
    torch.manual_seed(0)
    model, x = image()
    seen = {}
    for says in ("nothing", "strides"):
        foregrad.compile(model, backend=compiler_of(channels_last, says, seen.setdefault(says, [])))(x).backward()
    assert (48, 1, 12, 4) not in seen["nothing"][0]
    assert (48, 1, 12, 4) in seen["strides"][0]


def test_a_result_that_the_user_sees_keeps_its_strides():
    def everything(gm, example_inputs):
        return lambda *values: [permuted(value) for value in gm.forward(*values)]

    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(BackendError, match=r"value for `out` .*strides \(4, 1\)"):
        foregrad.aot_function(lambda x: x.sin(), everything)(x)
