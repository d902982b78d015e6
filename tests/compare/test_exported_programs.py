"""Programs of many kinds, exported by `aot_export_module`: signatures and numbers are those of PyTorch's, or eager's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_module as their_export
from torch.utils import _pytree as pytree

import foregrad
from tests.covering import each


@dataclasses.dataclass
class Program:
    """`function(module, *args, **kwargs)`; `more(module)` adds to its parameter `w` and buffer `buf`."""

    function: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]
    kwargs: Callable[[], dict[str, Any]]
    more: Callable[[nn.Module], None]


PROGRAMS: dict[str, Program] = {}


def prog(name, args=lambda: (torch.randn(3),), kwargs=dict, setup=lambda module: None):
    def add(function):
        PROGRAMS[name] = Program(function, args, kwargs, setup)
        return function

    return add


class Module(nn.Module):
    def __init__(self, program):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(3))
        self.register_buffer("buf", torch.ones(3))
        self.function = program.function
        program.more(self)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def loss(module, x):
    return (module.w * x).sum()


def tie(module):
    module.w2 = module.w


@prog("tied", setup=tie)
def _(module, x):
    return ((module.w * module.w2 * x).sum(),)


def unused(module):
    module.u = nn.Parameter(torch.ones(2))
    module.register_buffer("ub", torch.ones(2))


@prog("unused", setup=unused)
def _(module, x):
    return (loss(module, x),)


def frozen(module):
    module.fz = nn.Parameter(torch.ones(3), requires_grad=False)


@prog("frozen", setup=frozen)
def _(module, x):
    return ((module.w * x * module.fz).sum(),)


def nonp(module):
    module.register_buffer("np_", torch.ones(3) * 2, persistent=False)


@prog("nonpersistent", setup=nonp)
def _(module, x):
    return ((module.w * x * module.np_).sum(),)


@prog("returns an input")
def _(module, x):
    return (loss(module, x), x)


@prog("returns a view of an input", args=lambda: (torch.randn(3, 1),))
def _(module, x):
    return (loss(module, x.view(-1)), x.view(-1))


@prog("returns a parameter detached")
def _(module, x):
    return (loss(module, x), module.w.detach())


@prog("returns a buffer")
def _(module, x):
    return (loss(module, x), module.buf)


@prog("returns a written buffer")
def _(module, x):
    module.buf.add_(1)
    return (loss(module, x), module.buf)


@prog("writes a view of a buffer")
def _(module, x):
    module.buf[0].add_(x[0])
    return (loss(module, x) * module.buf.sum(),)


@prog("writes a buffer twice")
def _(module, x):
    module.buf.add_(1)
    y = module.buf * 2
    module.buf.mul_(3)
    return (loss(module, x) + y.sum(),)


@prog("copies into a buffer")
def _(module, x):
    module.buf.copy_(x)
    return (loss(module, x),)


@prog("writes a parameter")
def _(module, x):
    with torch.no_grad():
        module.w.add_(1)
    return (loss(module, x),)


@prog("writes an input and returns it")
def _(module, x):
    x.add_(1)
    return (loss(module, x), x)


@prog("number and none and text")
def _(module, x):
    return (loss(module, x), 3, None)


@prog("nested results")
def _(module, x):
    return loss(module, x), {"a": x.sin(), "b": [x.cos(), x]}


@prog("nested arguments", args=lambda: ({"a": torch.randn(3), "b": [torch.randn(3)]},))
def _(module, d):
    return ((module.w * d["a"]).sum() + d["b"][0].sum(),)


@prog("keywords", kwargs=lambda: {"y": torch.randn(3)})
def _(module, x, *, y):
    return ((module.w * x * y).sum(),)


@prog("one result twice")
def _(module, x):
    y = x.sin()
    return (loss(module, x), y, y)


@prog("two views of one result")
def _(module, x):
    y = x.sin()
    return (loss(module, x), y[:2], y[1:])


def dup():
    x = torch.randn(3)
    return (x, x)


@prog("one argument twice", args=dup)
def _(module, x, y):
    return ((module.w * x * y).sum(),)


@prog("one argument twice, written", args=dup)
def _(module, x, y):
    x.add_(1)
    return ((module.w * x * y).sum(),)


def syn():
    b = torch.randn(4)
    return (b[:3], b[1:])


@prog("shared memory, written", args=syn)
def _(module, x, y):
    x.add_(1)
    return ((module.w * x * y).sum(),)


@prog("shared memory", args=syn)
def _(module, x, y):
    return ((module.w * x * y).sum(),)


@prog("sizes written", args=lambda: (torch.randn(3, 1),))
def _(module, x):
    x.transpose_(0, 1)
    return (loss(module, x),)


@prog("no_grad block")
def _(module, x):
    with torch.no_grad():
        y = module.w * x
    return (loss(module, x) + y.sum(),)


@prog("no_grad block, result")
def _(module, x):
    with torch.no_grad():
        y = module.w * x
    return (loss(module, x), y)


@prog("autocast block", args=lambda: (torch.randn(3),))
def _(module, x):
    with torch.autocast("cpu"):
        y = torch.outer(module.w, x) @ torch.ones(3, 3)
    return (y.float().sum(),)


class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0]


@prog("custom Function")
def _(module, x):
    return (Fn.apply(module.w * x).sum(),)


@prog("gradient inside")
def _(module, x):
    y = (module.w * x).sin().sum()
    (g,) = torch.autograd.grad(y, module.w, create_graph=True)
    return (g.square().sum(),)


@prog("checkpoint")
def _(module, x):
    return (torch.utils.checkpoint.checkpoint(lambda a: (a * module.w).sin().sum(), x, use_reentrant=False),)


@prog("vmap")
def _(module, x):
    return (torch.func.vmap(lambda a, b: a * b)(module.w, x).sum(),)


@prog(
    "func.grad",
)
def _(module, x):
    return (torch.func.grad(lambda a: (a * x).sin().sum())(module.w).sum(),)


@prog("constant")
def _(module, x):
    return ((module.w * x * torch.tensor([1.0, 2.0, 3.0])).sum(),)


@prog("constant written")
def _(module, x):
    c = torch.tensor([1.0, 2.0, 3.0])
    c.add_(1)
    return ((module.w * x * c).sum(),)


@prog("numbers as arguments", args=lambda: (torch.randn(3), 2, 0.5, True))
def _(module, x, i, f, b):
    return ((module.w * x * i * f).sum() if b else x.sum(),)


@prog("item as size", args=lambda: (torch.randn(3), torch.tensor(4)))
def _(module, x, n):
    k = n.item()
    torch._check(k >= 0)
    return (loss(module, x) + torch.zeros(k).sum(),)


@prog("nonzero", args=lambda: (torch.tensor([1.0, 0.0, 2.0]),))
def _(module, x):
    return (loss(module, x) + x.nonzero().sum(),)


@prog("as_strided")
def _(module, x):
    return ((module.w * x).as_strided((2, 2), (1, 1)).sum(),)


@prog("complex", args=lambda: (torch.randn(3, dtype=torch.complex64),))
def _(module, x):
    return ((module.w * x).abs().sum(),)


@prog("dropout")
def _(module, x):
    return (nn.functional.dropout(module.w * x, 0.5).sum(),)


@prog("rand")
def _(module, x):
    return ((module.w * x * torch.rand(3)).sum(),)


@prog("cond")
def _(module, x):
    return (torch.cond(x.sum() > 0, lambda a: (a * module.w).sin(), lambda a: (a * module.w).cos(), (x,)).sum(),)


@prog("loss at 1")
def _(module, x):
    return (x.sin(), loss(module, x))


@prog("loss of one element")
def _(module, x):
    return (loss(module, x).view(1),)


@prog("no requires grad")
def _(module, x):
    return (x.sum(),)


@prog("gradient of an argument", args=lambda: (torch.randn(3, requires_grad=True),))
def _(module, x):
    return (loss(module, x),)


@prog("written argument with gradient", args=lambda: (torch.randn(3, requires_grad=True),))
def _(module, x):
    y = x * 1
    y.mul_(2)
    return (loss(module, y),)


@prog("written leaf", args=lambda: (torch.randn(3, requires_grad=True),))
def _(module, x):
    x.mul_(2)
    return (loss(module, x),)


@prog("hook")
def _(module, x):
    y = module.w * x
    y.register_hook(lambda g: g * 2)
    return (y.sum(),)


@prog("list result")
def _(module, x):
    return [loss(module, x)]


@prog("bare result")
def _(module, x):
    return loss(module, x)


@prog("no arguments", args=lambda: ())
def _(module):
    return (module.w.sum(),)


@prog(
    "inference mode",
)
def _(module, x):
    with torch.inference_mode():
        y = x * 2
    return (loss(module, x) + y.sum(),)


@prog("detach and write")
def _(module, x):
    y = (module.w * x).detach()
    y.add_(1)
    return (loss(module, x) + y.sum(),)


@prog("scatter loop")
def _(module, x):
    out = torch.zeros(3)
    for i in range(3):
        out[i] = x[i] * module.w[i]
    return (out.sum(),)


@prog("requires_grad_ inside")
def _(module, x):
    y = x.clone().requires_grad_()
    return (loss(module, y),)


MODES = {
    "joint": {"trace_joint": True},
    "forward": {"trace_joint": False},
    "above autograd": {"trace_joint": False, "pre_dispatch": True},
}
REFUSED = {("autocast block", "above autograd"): "_enter_autocast"}  # PyTorch's graph has a switch there


def made(program):
    """A module, and arguments, equal in each call."""
    module = Module(program)
    torch.manual_seed(1)
    return module, program.args(), program.kwargs()


def exported(export, name, mode):
    """(the results of the exported graph, its signature), or the error."""
    program, settings = PROGRAMS[name], dict(MODES[mode])
    if mode == "joint":
        settings["output_loss_index"] = int(name == "loss at 1")
    module, args, kwargs = made(program)
    given = {"kwargs": kwargs} if kwargs else {}
    with torch.set_grad_enabled(mode == "joint"):
        graph, signature = export(module, args, **settings, **given)
    module, args, kwargs = made(program)
    state = [*module.parameters(), *module.buffers(), *pytree.tree_leaves((args, kwargs))]
    flat = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in state]
    torch.manual_seed(3)
    with torch.no_grad():
        return list(graph(*flat)), signature


def alike(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        torch.testing.assert_close(a, b, equal_nan=True)
    else:
        assert a == b


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "mode"), dict.fromkeys([*each(PROGRAMS, MODES, times=2), *REFUSED]))
def test_an_exported_program_is_pytorchs_or_eagers(name, mode):
    if (name, mode) in REFUSED:
        with pytest.raises(foregrad.errors.UnsupportedError, match=REFUSED[name, mode]):
            exported(foregrad.aot_export_module, name, mode)
        return
    try:
        theirs = exported(their_export, name, mode)
    except Exception:  # PyTorch exports no such program
        theirs = None
    try:
        ours = exported(foregrad.aot_export_module, name, mode)
    except RuntimeError:  # a refusal is one
        assert theirs is None
        return
    if theirs is None:
        results = ours[0][len(ours[0]) - len(ours[1].user_outputs) - gradients(ours[1]) :]
        module, args, kwargs = made(PROGRAMS[name])
        torch.manual_seed(3)
        expected = pytree.tree_leaves(module(*args, **kwargs))
        for found, value in zip(results, expected, strict=False):
            alike(found, value.detach() if isinstance(value, torch.Tensor) else value)
        return
    for found, expected in zip(ours[0], theirs[0], strict=True):
        alike(found, expected)
    for field in ("parameters", "buffers", "user_inputs", "inputs_to_parameters", "inputs_to_buffers", "in_spec"):
        assert getattr(ours[1], field) == getattr(theirs[1], field), field
    assert ours[1].out_spec == theirs[1].out_spec
    for field in ("buffers_to_mutate", "parameters_to_mutate", "user_inputs_to_mutate"):
        assert [*getattr(ours[1], field).values()] == [*getattr(theirs[1], field).values()], field


def gradients(signature):
    backward = signature.backward_signature
    return 0 if backward is None else len(backward.gradients_to_parameters) + len(backward.gradients_to_user_inputs)


def test_a_loss_that_is_a_view_of_a_scalar_has_one_element():
    program = Program(
        lambda module, x: ((module.w * x).sum().expand(3),), lambda: (torch.ones(3),), dict, lambda module: None
    )
    with pytest.raises(RuntimeError, match="no scalar"):
        foregrad.aot_export_module(Module(program), [torch.ones(3)], trace_joint=True, output_loss_index=0)


def test_an_argument_given_twice_may_be_two_in_a_call_of_the_graph():
    program = Program(lambda module, x, y: (module.w * (x - y),), tuple, dict, lambda module: None)
    x = torch.ones(3)
    graph, signature = foregrad.aot_export_module(Module(program), [x, x], trace_joint=False)
    assert len(signature.user_inputs) == 2
    assert graph(x, x, x * 5, x * 2)[0].tolist() == [3, 3, 3]
    simple = foregrad.aot_export_joint_simple(lambda x, y: (x - y,), [x, x], trace_joint=False)
    assert simple(x * 5, x * 2)[0].tolist() == [3, 3, 3]
