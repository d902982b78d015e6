"""Objects that only operators know (`torch._library.opaque_object`): arguments, closed-over, in graphs, at every door."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

import foregrad
from foregrad.extend import view

opaque = pytest.importorskip("torch._library.opaque_object")
OpaqueBase = pytest.importorskip("torch._opaque_base").OpaqueBase


class Table(OpaqueBase):
    def __init__(self, factor):
        self.factor, self.reads = factor, 0


class Scale(OpaqueBase):
    def __init__(self, factor):
        self.factor = factor

    def __eq__(self, other):
        return isinstance(other, Scale) and self.factor == other.factor

    def __hash__(self):
        return hash(self.factor)

    def __fx_repr__(self):
        return f"Scale({self.factor})", {"Scale": Scale}


opaque.register_opaque_type(Table, typ="reference")
opaque.register_opaque_type(Scale, typ="value")


@torch.library.custom_op("foregrad_opaque::looked_up", mutates_args=())
def looked_up(x: torch.Tensor, table: Table) -> torch.Tensor:
    table.reads += 1
    return x * table.factor


@torch.library.custom_op("foregrad_opaque::scaled", mutates_args=())
def scaled(x: torch.Tensor, scale: Scale) -> torch.Tensor:
    return x * scale.factor


for op in (looked_up, scaled):
    op.register_fake(lambda x, _: torch.empty_like(x))


def backward(ctx, gradient):
    return looked_up(gradient, ctx.table), None


def keep(ctx, inputs, output):
    ctx.table = inputs[1]


looked_up.register_autograd(backward, setup_context=keep)
HELD = Table(3.0)


def given(x, table):
    return (looked_up(x, table).sin().sum(),)


def closed(x):
    return (looked_up(x, HELD).sin().sum(),)


def by_value(x, scale):
    return (scaled(x, scale),)


class Wrapped(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(3))

    def forward(self, x, *others):
        return self.function(x * self.weight, *others)


DOORS = {
    "compile": lambda f, *_: foregrad.compile(f, backend="eager", on_unsupported="raise"),
    "aot_function": lambda f, *_: foregrad.aot_function(f, foregrad.nop),
    "simplified": lambda f, *args: foregrad.aot_module_simplified(Wrapped(f), args, foregrad.nop),
    "torch.compile": lambda f, *_: torch.compile(f, backend="foregrad", fullgraph=True, options={"backend": "eager"}),
}


def gradient(function, x, *others):
    x = x.clone().requires_grad_()
    (out,) = function(x, *others)
    out.sum().backward()
    return out.detach(), x.grad


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("is_argument", [True, False], ids=["argument", "closed over"])
def test_a_kernel_reads_the_object_in_each_call(door, is_argument):
    torch._dynamo.reset()
    x, others = torch.randn(3), (HELD,) if is_argument else ()
    function = given if is_argument else closed
    HELD.factor = 3.0
    run = DOORS[door](function, x.clone().requires_grad_(), *others)
    for factor in (3.0, 3.0, 0.5):
        HELD.factor, HELD.reads = factor, 0
        found = gradient(run, x, *others)
        assert HELD.reads == 2  # forward and backward, and none while it captures
        for value, expected in zip(found, gradient(function, x, *others), strict=True):
            assert torch.equal(value, expected)


@pytest.mark.parametrize("door", DOORS)
def test_a_second_object_is_read_when_it_is_given(door):
    torch._dynamo.reset()
    x, tables = torch.randn(3), [Table(2.0), Table(5.0)]
    run = DOORS[door](given, x.clone().requires_grad_(), tables[0])
    for table in (*tables, *tables):
        for value, expected in zip(gradient(run, x, table), gradient(given, x, table), strict=True):
            assert torch.equal(value, expected)


def test_equal_objects_of_a_class_of_values_share_a_graph():
    run, x = foregrad.compile(by_value, backend="eager", on_unsupported="raise"), torch.randn(3)
    for factor in (2.0, 2.0, 4.0):
        assert torch.equal(run(x, Scale(factor))[0], x * factor)
    assert len(view(run).graphs) == 2


def test_an_object_is_an_attribute_of_an_exported_graph():
    x = torch.randn(3, requires_grad=True)
    graph, _ = foregrad.aot_export_module(Wrapped(closed), [x], trace_joint=True, output_loss_index=0)
    (read,) = graph.graph.find_nodes(op="get_attr", target="_opaque_obj0")
    assert read.meta["val"] is HELD
    loss, *gradients = graph(torch.ones(3), x)
    expected = gradient(closed, x.detach())
    assert torch.equal(loss, expected[0])
    assert any(torch.equal(value, expected[1]) for value in gradients)


def test_a_value_is_spelled_in_an_exported_graph():
    graph, _ = foregrad.aot_export_module(
        Wrapped(lambda x: by_value(x, Scale(2.0))), [torch.ones(3)], trace_joint=False
    )
    assert not graph.graph.find_nodes(op="get_attr")
    assert "Scale(2.0)" in graph.code
    assert graph(torch.ones(3), torch.ones(3))[0].tolist() == [2, 2, 2]


def test_a_graph_with_descriptors_reads_the_object():
    module, x = Wrapped(closed), torch.randn(3)
    with contextlib.ExitStack() as stack:
        jd = foregrad.aot_export_joint_with_descriptors(stack, module, (x,))
        run = foregrad.aot_compile_joint_with_descriptors(jd)
    (out,) = run(module.weight, x)
    out.backward()
    assert torch.equal(out, gradient(closed, x)[0])


@pytest.mark.parametrize("door", [foregrad.aot_export_module, foregrad.aot_export_joint_with_descriptors])
def test_an_object_among_the_arguments_of_an_export_is_refused_by_name(door):
    args = [torch.ones(3), HELD]
    with pytest.raises(foregrad.errors.UnknownLeafError, match=r"args\[1\].*Table"):
        if door is foregrad.aot_export_module:
            door(Wrapped(given), args, trace_joint=False)
        else:
            with contextlib.ExitStack() as stack:
                door(stack, Wrapped(given), tuple(args))
