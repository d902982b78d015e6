"""What Inductor simplifies away is no alias: a result has memory of its own where eager gives it memory of its own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import foregrad
from foregrad.inductor._torch import inductor as door
from tests.dynamo.installed import make_known

pytestmark = [
    pytest.mark.skipif(not door.cpp_compiler_found(), reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def replaced_later(x):
    y = x * torch.ones(4)
    x.add_(1)
    return y


def before_and_after(x):
    y = x + torch.zeros(4)
    x.mul_(2)
    return y, x * torch.ones(4)


def swapped(x):
    a, b = x[0] * torch.ones(4), x[1] * torch.ones(4)
    x[0].copy_(b)
    x[1].copy_(a)
    return a


def constants(x):
    constant = torch.tensor([1.0, 2.0])
    return constant, constant.view(2, 1), constant + 0, constant * torch.ones(2)


PROGRAMS = {
    "times ones": lambda x: x * torch.ones(3, 4),
    "ones times": lambda x: torch.ones(4) * x,
    "times one": lambda x: x * torch.ones(()),
    "times ones like": lambda x: x * torch.ones_like(x),
    "times a fold": lambda x: x * (torch.zeros(4) + 1),
    "plus zeros": lambda x: x + torch.zeros(4),
    "zeros plus": lambda x: torch.zeros(3, 4) + x,
    "minus zeros": lambda x: x - torch.zeros(4),
    "over ones": lambda x: x / torch.ones(4),
    "into zeros": lambda x: torch.zeros(3, 4).add_(x),
    "into ones": lambda x: torch.ones(3, 4).mul_(x),
    "of a view": lambda x: x.view(-1) * torch.ones(12),
    "of a transposed": lambda x: x.t() * torch.ones(3),
    "of a slice": lambda x: x[1:] * torch.ones(4),
    "of a row": lambda x: x[1] * torch.ones(4),
    "of an expanded": lambda x: x[:1].expand(3, 4) * torch.ones(3, 4),
    "of a detached": lambda x: (x.detach() * torch.ones(4), x * 2),
    "of complex numbers": lambda x: torch.view_as_complex(x.view(3, 2, 2)) * torch.ones(2),
    "of another layout": lambda x: torch.ones(4, 3) * x.t(),
    "strides asked of another layout": lambda x: (torch.ones(4, 3) * x.t()).as_strided((12,), (1,)),
    "casts there and back": lambda x: x.double().float(),
    "one tensor alone": lambda x: (torch.cat([x]), x.repeat(1, 1), F.pad(x, (0, 0)), x.clone()),
    "whole slice": lambda x: torch.slice_scatter(torch.zeros(3, 4), x),
    "batch norm of no effect": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), eps=0.0),
    "two of one value": lambda x: (x * torch.ones(4), x * torch.ones(4)),
    "two of a computed value": lambda x: ((y := x.sin()), y * torch.ones(4), y[1:] + torch.zeros(4)),
    "the input too": lambda x: (x, x.view(-1), x * torch.ones(4)),
    "a saved value": lambda x: ((y := x * torch.ones(4)), y.sin(), y @ y.t()),
    "before a write": replaced_later,
    "before and after a write": before_and_after,
    "parts that change places": swapped,
    "constants": constants,
    "folded constants": lambda x: (torch.arange(3) + 1, torch.arange(3) + 1, torch.eye(3) * 2),
}
WRITES = {"before a write", "before and after a write", "parts that change places"}


def tensors(values):
    return list(values) if isinstance(values, tuple) else [values]


def shares(a, b):
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def observed(function, *, with_grad):
    """What can be told of a call and its results, who sees a write to which, and the gradients."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_(with_grad)
    outs = tensors(function(x))
    seen = [[(tuple(out.shape), out.stride(), out.requires_grad, out is x) for out in outs]]
    seen.append([[shares(a, b) for b in (*outs, x)] for a in outs])
    values = [out.detach().clone() for out in outs]
    results = [out for out in outs if out.requires_grad]
    if results:
        tangents = [torch.full_like(out, 0.5) for out in results]
        (gradient,) = torch.autograd.grad(results, [x], tangents, retain_graph=True)
        values.append(gradient.clone())
        seen.append([shares(gradient, tangent) for tangent in tangents])
    for out in outs:
        before = [value.detach().clone() for value in (*outs, x)]
        with torch.no_grad():
            out.add_(1)
        seen.append([not torch.equal(value, now) for value, now in zip(before, (*outs, x), strict=True)])
    return seen, values


def check(function, call, *, with_grad):
    for _ in range(2):  # the second must not see what was written to the results of the first
        expected, values = observed(function, with_grad=with_grad)
        found, actual = observed(call, with_grad=with_grad)
        assert found == expected
        torch.testing.assert_close(actual, values)


@pytest.mark.parametrize("name", PROGRAMS)
def test_without_gradients(name):
    check(PROGRAMS[name], foregrad.compile(PROGRAMS[name], backend="inductor"), with_grad=False)


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in WRITES | {"constants", "folded constants"}])
def test_with_gradients(name):
    check(PROGRAMS[name], foregrad.compile(PROGRAMS[name], backend="inductor"), with_grad=True)


@pytest.mark.parametrize("name", ["times ones", "two of one value", "a saved value"])
def test_under_torch_compile(name):
    make_known()
    torch._dynamo.reset()
    check(PROGRAMS[name], torch.compile(PROGRAMS[name], backend="foregrad"), with_grad=True)
    torch._dynamo.reset()


def test_a_value_whose_layout_is_asked_for_after_a_simplified_product():
    """The passes put the layout of `ones * y` on `y`, which has another."""

    def f(x):
        y = x.t().sin()
        return (torch.ones(4, 3) * y).as_strided((12,), (1,)) * 2

    for with_grad in (False, True):
        x = torch.randn(3, 4, requires_grad=with_grad)
        torch.testing.assert_close(foregrad.compile(f, backend="inductor")(x), f(x))


def test_what_is_no_result_is_still_simplified():
    def f(x):
        return (x * torch.ones(4)).sin()

    call = foregrad.compile(f, backend="inductor")
    x = torch.randn(3, 4, requires_grad=True)
    call(x)
    (specialization,) = call.foregrad.specializations
    forward = specialization.product.compiled.partitioned.forward
    assert [n.target for n in forward.graph.nodes if n.op == "call_function"] == [torch.ops.aten.sin.default]
