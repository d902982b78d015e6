"""Programs that Inductor can't take whole, or with plain sizes: each runs with eager's numbers, none fails inside."""

from __future__ import annotations

import copy
import logging
import operator

import pytest
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

import foregrad
from foregrad.graph.meta import TensorSpec
from foregrad.graph.role import LAID_OUT
from foregrad.inductor._torch import inductor as door
from foregrad.inductor.segments import compile_around

pytestmark = [
    pytest.mark.skipif(not door.cpp_compiler_found(), reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


def of_lengths(*sizes):
    return [lambda n=n: (torch.randn(2, n, 4).requires_grad_(),) for n in sizes]


def filled(*values):
    return [lambda v=v: (torch.full((4,), v).requires_grad_(),) for v in values]


@torch.library.custom_op("foregrad_tests::add_one_", mutates_args=("x",))
def add_one_(x: torch.Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("foregrad_tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


twice.register_fake(torch.empty_like)
twice.register_autograd(lambda ctx, grad: grad * 2)


def writes_through_a_custom_operator(x):
    y = x.detach() * 1
    add_one_(y)
    return x * y


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(x.flatten(0, 1)).relu()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x):
        return self.lstm(x * 2)[0].sin()


def repeated(x):
    return x.repeat_interleave(torch.tensor([1, 2]), 0) * 2


PROGRAMS = {
    "lstm": (Recurrent(), of_lengths(5)),
    "batch norm over a size that varies": (Normed(), of_lengths(5, 7, 6)),
    "picking by a mask": (lambda x: (x[x > 0] * 2, x.sum()), of_lengths(5, 5)),
    "a number that differs": (lambda x: x * (x.sum().item() * 2 + 1) ** 2, filled(1.0, 2.0, 3.0)),
    "a number that is returned": (lambda x: (x * 2, x.sum().item()), filled(1.0, 2.0)),
    "a branch": (lambda x: x.sin() if x.sum() > 0 else x.cos(), filled(1.0, -2.0)),
    "repeats from a tensor": (repeated, of_lengths(5)),
    "a custom operator that writes": (writes_through_a_custom_operator, of_lengths(5)),
    "sizes in what is returned": (lambda x: (x.shape[1] * 2, x * x.shape[1], x.view(-1)), of_lengths(5, 7, 6)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_the_same_as_eager(name):
    fn, makers = PROGRAMS[name]

    call = foregrad.compile(copy.deepcopy(fn), backend="inductor")
    for make in makers:
        sides = []
        for run in (fn, call):
            torch.manual_seed(0)
            (x,) = make()
            out = pytree.tree_leaves(run(x))
            loss = sum(o.sum() for o in out if isinstance(o, torch.Tensor) and o.requires_grad)
            loss.backward()
            layouts = [(o.stride(), o.requires_grad) for o in out if isinstance(o, torch.Tensor)]
            sides.append((layouts, out, x.grad))
        (layouts, *expected), (found, *actual) = sides
        torch.testing.assert_close(actual, expected)
        assert found == layouts
    assert len(call.foregrad.specializations) <= 2, "a graph for each number or size"


def test_a_graph_is_compiled_around_what_inductor_does_not_know(caplog):
    call = foregrad.compile(lambda x: (x.sin() * 2)[x > 0].exp(), backend="inductor")
    x = torch.randn(6)
    with caplog.at_level(logging.INFO, "foregrad"):
        torch.testing.assert_close(call(x), (x.sin() * 2)[x > 0].exp())
    assert "the inference graph is compiled around sized_index" in caplog.text


def test_only_masks_make_sizes_that_depend_on_values(caplog):
    def taken(x, i, mask):
        return (x.sin()[i] * 2).exp(), (x * mask).cos()

    call = foregrad.compile(taken, backend="inductor")
    x, i, mask = torch.randn(6, 3).requires_grad_(), torch.tensor([4, 0, 4]), torch.ones(6, 1, dtype=torch.bool)
    with caplog.at_level(logging.INFO, "foregrad"):
        found = [sum(out.sum() for out in f(x, i, mask)) for f in (taken, call)]
        gradients = [torch.autograd.grad(out, x)[0] for out in found]
    torch.testing.assert_close(*found)
    torch.testing.assert_close(*gradients)
    assert "compiled around" not in caplog.text


def test_nothing_of_a_backward_is_fixed_to_a_size_when_its_kernels_come_from_the_cache():
    """Inductor reports strides as numbers of the call at hand, and forgets in its cache which sizes it fixed."""

    def fn(x):
        return twice(x).sin()

    for _ in range(2):
        call = foregrad.compile(fn, backend="inductor")
        for n in (5, 7, 6):
            x = torch.randn(2, n, 4).requires_grad_()
            (grad,) = torch.autograd.grad(call(x).sum(), x)
            torch.testing.assert_close(grad, (2 * x).cos() * 2)
        assert len(call.foregrad.specializations) == 2


def odd(x):
    return x.sum().item(), x + 1


def test_segments_are_few_and_in_order():
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    one = graph.call_function(torch.ops.aten.sin.default, (a,))
    made = graph.call_function(odd, (one,))
    first, second = (graph.call_function(operator.getitem, (made, i)) for i in range(2))
    other = graph.call_function(torch.ops.aten.cos.default, (b,))
    last = graph.call_function(torch.ops.aten.mul.Tensor, (second, other))
    unused = graph.placeholder("c")
    graph.output([last, one, first, unused])
    for node in graph.nodes:
        node.meta["val"] = torch.ones(3)
    compiled = []

    def compile_segment(gm, inputs, overwritten):
        assert not overwritten
        compiled.append([node.target for node in gm.graph.nodes if node.op == "call_function"])
        assert len(inputs) == sum(node.op == "placeholder" for node in gm.graph.nodes)
        return foregrad.make_boxed_func(gm.forward)

    run = compile_around(fx.GraphModule({}, graph), {made, first, second}, compile_segment)
    aten = torch.ops.aten
    assert compiled == [[aten.sin.default, aten.cos.default], [aten.mul.Tensor]]
    x, y, z = torch.rand(3), torch.rand(3), torch.rand(1)
    values = [x, y, z]
    out = run(values)
    assert values == []
    assert torch.equal(out[0], (x.sin() + 1) * y.cos())
    assert torch.equal(out[1], x.sin())
    assert out[2] == x.sin().sum().item()
    assert out[3] is z


def test_a_segment_is_given_a_residual_with_the_strides_that_it_was_compiled_for():
    aten, graph = torch.ops.aten, fx.Graph()
    chosen = torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last)
    saved = graph.placeholder("saved")
    saved.meta[LAID_OUT] = TensorSpec.of(chosen.contiguous())
    sine = graph.call_function(aten.sin.default, (saved,))
    foreign = graph.call_function(aten.cos.default, (sine,))
    graph.output([foreign])
    for node in (saved, sine, foreign):
        node.meta["val"] = chosen
    strides = []

    def compile_segment(gm, inputs, _):
        def run(*tensors):
            strides.extend((value.stride(), tensor.stride()) for value, tensor in zip(inputs, tensors, strict=True))
            return gm(*tensors)

        return foregrad.make_boxed_func(run)

    run = compile_around(fx.GraphModule({}, graph), {foreign}, compile_segment)
    assert torch.equal(run([chosen.clone()])[0], chosen.sin().cos())
    assert strides == [(chosen.stride(), chosen.stride())]


@pytest.mark.parametrize("size", ["read", "of a mask"])
def test_a_size_found_by_the_forward_that_the_backward_adds_to(size):
    """The backward is given the size itself, not only what was made of it: Inductor asks where symbols come from."""

    def joined(x, t):
        more = torch.zeros(t.item()) if size == "read" else torch.zeros(10)[torch.arange(10) < t]
        return torch.cat([x, more]).cos().sum()

    compiled = foregrad.compile(joined, backend="inductor", on_unsupported="raise")
    for value in (3, 4, 5):
        x, y = (torch.arange(4.0, requires_grad=True) for _ in range(2))
        torch.testing.assert_close(compiled(x, torch.tensor(value)), joined(y, torch.tensor(value)))
        compiled(x, torch.tensor(value)).backward()
        joined(y, torch.tensor(value)).backward()
        torch.testing.assert_close(x.grad, y.grad)
