"""What the nodes of a joint graph say of the program: marks, stack traces, numbers; and modules of many kinds."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch._decomp import decomposition_table
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch.fx import traceback

import foregrad
from foregrad import descriptors
from foregrad.descriptors import BufferAOTInput, ParamAOTInput
from tests.joints.programs import held_by, whole_regions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def exported(module, args, kwargs=None, *, by_dynamo=False, **how):
    """(the joint graph, the compiled function)."""
    context = None
    kwargs = kwargs or {}
    if by_dynamo:
        torch._dynamo.reset()
        with traceback.preserve_node_meta():
            module = dynamo_graph_capture_for_export(module)(*args, **kwargs)
        context = module.meta.get("tracing_context")
    with torch._guards.tracing(context), contextlib.ExitStack() as stack:
        jd = foregrad.aot_export_joint_with_descriptors(stack, module, args, kwargs, **how)
        return jd, foregrad.aot_compile_joint_with_descriptors(jd)


def calls(jd):
    return [node for node in jd.graph_module.graph.nodes if node.op == "call_function"]


def found(jd, target):
    return jd.graph_module.graph.find_nodes(op="call_function", target=target)


def marks(jd):
    """By operator, in order: the mark on each call that has one."""
    marked = [(str(node.target).split(".")[1], node.meta.get("custom")) for node in calls(jd)]
    return [(name, mark) for name, mark in marked if mark]


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)


class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x):
        return torch.relu(self.bn(self.conv(x)))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x, *, scale):
        return self.linear(x) * scale


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 4)

    def forward(self, x):
        return self.first(x), self.second(x)


SAMPLES = {
    Linear: (lambda: (torch.randn(4, 3),), dict),
    Convolved: (lambda: (torch.randn(2, 1, 4, 4),), dict),
    Scaled: (lambda: (torch.randn(4, 3),), lambda: {"scale": torch.tensor(2.0)}),
    Two: (lambda: (torch.randn(4, 3),), dict),
}


@pytest.mark.parametrize("by_dynamo", [False, True], ids=["module", "captured by Dynamo"])
@pytest.mark.parametrize("kind", SAMPLES)
def test_with_all_decompositions_that_there_are(kind, by_dynamo):
    """Down to `prims`; values and gradients are the module's."""
    torch.manual_seed(0)
    module = kind()
    args, kwargs = (make() for make in SAMPLES[kind])
    jd, run = exported(module, args, kwargs, by_dynamo=by_dynamo, decompositions=decomposition_table)
    names = {str(node.target).split(".")[1] for node in calls(jd) if str(node.target).startswith("aten")}
    assert names <= {"mm", "convolution", "convolution_backward", "as_strided"}, names
    assert any(str(node.target).startswith("prims") for node in calls(jd))

    def observed(call):
        out = call()
        leaves = torch.utils._pytree.tree_leaves(out)
        gradients = torch.autograd.grad(sum(leaf.square().sum() for leaf in leaves), list(module.parameters()))
        return leaves, gradients

    held = held_by(module)
    expected = observed(lambda: module(*args, **kwargs))
    torch.testing.assert_close(observed(lambda: run(*held, *args, **kwargs)), expected, rtol=1e-4, atol=1e-4)


def test_the_specs_are_those_of_trees():
    module, args = Linear(), (torch.randn(4, 3),)
    jd, _ = exported(module, args)
    flat, spec = torch.utils._pytree.tree_flatten(((*held_by(module), *args), {}))
    assert jd.in_spec.num_leaves == spec.num_leaves == len(flat)
    assert torch.utils._pytree.tree_unflatten([1], jd.out_spec) == 1


def test_the_numbers_of_nodes_that_descriptors_find():
    jd, _ = exported(Convolved(), (torch.randn(2, 1, 4, 4),))
    graph = jd.graph_module.graph
    inputs = descriptors.get_all_input_and_grad_nodes(graph)
    assert len(inputs) == 9  # 4 parameters, 3 buffers, an argument, a tangent
    assert sum(isinstance(desc, BufferAOTInput) for desc in inputs) == len(descriptors.get_buffer_nodes(graph)) == 3
    assert all(grad is not None for _, grad in descriptors.get_param_and_grad_nodes(graph).values())
    named = descriptors.get_named_param_nodes(graph)
    assert list(named) == ["conv.weight", "conv.bias", "bn.weight", "bn.bias"]
    assert [inputs[ParamAOTInput(name)][0] for name in named] == descriptors.get_param_nodes(graph)

    two, _ = exported(Two(), (torch.randn(4, 3),))
    outputs = descriptors.get_all_output_and_tangent_nodes(two.graph_module.graph)
    assert len(outputs) == 6  # 2 results, 4 gradients
    plain = descriptors.get_plain_output_and_tangent_nodes(two.graph_module.graph)
    assert [tangent is not None for _, tangent in plain.values()] == [True, True]


# ------------------------------------------------------------------------------------------- torch.compile in a module


def test_a_compiled_callable_in_a_module_is_captured_and_its_backend_not_called():
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        raise AssertionError("called while exporting")

    def faster(x):
        return x.sin() * 2

    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))
            self.compiled = torch.compile(faster, backend=backend)

        def forward(self, x):
            return self.compiled(x @ self.weight).sum()

    class Inside(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return torch.compile(faster, backend=backend)(x @ self.weight).sum()

    for kind in (Held, Inside):
        module, x = kind(), torch.randn(4, 4)
        jd, run = exported(module, (x,))
        assert not seen
        assert len(found(jd, torch.ops.aten.sin.default)) == 1
        torch.testing.assert_close(run(module.weight, x), faster(x @ module.weight).sum(), rtol=0, atol=0)


# ---------------------------------------------------------------------------------------------------------------- marks


class Marked(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        with traceback.annotate({"stage": 0}):
            y = self.linear(x)
        return y - 1


@traceback.annotate_fn({"stage": 1})
def squared(x):
    return x * x


class MarkedFunction(Marked):
    def forward(self, x):
        with traceback.annotate({"stage": 0}):
            y = self.linear(x)
        return squared(y) - 1


@pytest.mark.parametrize("by_dynamo", [False, True], ids=["module", "captured by Dynamo"])
def test_a_mark_is_on_the_operators_of_its_block_and_on_their_backward(by_dynamo):
    jd, _ = exported(Marked(), (torch.randn(4, 3),), by_dynamo=by_dynamo)
    assert {name for name, _ in marks(jd)} >= {"addmm", "mm", "sum"}
    assert all(mark == {"stage": 0} for _, mark in marks(jd))
    (sub,) = found(jd, torch.ops.aten.sub.Tensor)
    assert not sub.meta.get("custom")
    unmarked = [node for node in calls(jd) if not node.meta.get("custom")]
    assert unmarked == [sub]


@pytest.mark.parametrize("by_dynamo", [False, True], ids=["module", "captured by Dynamo"])
def test_a_marked_function_marks_its_operators(by_dynamo):
    jd, _ = exported(MarkedFunction(), (torch.randn(4, 3),), by_dynamo=by_dynamo)
    products = [mark for name, mark in marks(jd) if name == "mul"]
    assert products == [{"stage": 1}] * 3
    assert {tuple(mark.items()) for name, mark in marks(jd) if name != "mul"} == {
        (("stage", 0),),
    }


@pytest.mark.parametrize("by_dynamo", [False, True], ids=["module", "captured by Dynamo"])
def test_a_sum_of_gradients_has_no_mark(by_dynamo):
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x):
            with traceback.annotate({"stage": 1}):
                return self.first(x) - self.second(x)

    jd, _ = exported(Forked(), (torch.randn(4, 3, requires_grad=True),), by_dynamo=by_dynamo)
    (added,) = found(jd, torch.ops.aten.add.Tensor)
    assert added.meta["is_gradient_acc"]
    assert not added.meta.get("custom")
    assert all(node is added or node.meta["custom"] == {"stage": 1} for node in calls(jd))


@pytest.mark.parametrize("by_dynamo", [False, True], ids=["module", "captured by Dynamo"])
def test_nodes_that_are_written_for_views_have_the_line_and_number_of_the_view(by_dynamo):
    class Unpermuted(nn.Module):
        def __init__(self):
            super().__init__()
            self.indices = torch.tensor([2, 0, 3, 1])

        def forward(self, x):
            with traceback.annotate({"stage": 0}):
                out = x.new_empty((5, 3))
                out[self.indices, :] = x
                out = out[:-1]
            return out.cos()

    jd, _ = exported(Unpermuted(), (torch.randn(4, 3, requires_grad=True),), by_dynamo=by_dynamo)
    (cut,) = found(jd, torch.ops.aten.slice.Tensor)
    (back,) = found(jd, torch.ops.aten.slice_backward.default)
    assert cut.meta["seq_nr"] == back.meta["seq_nr"]
    assert "out = out[:-1]" in cut.meta["stack_trace"]
    names = [name for name, _ in marks(jd)]
    assert {"index_put", "slice", "slice_backward", "index"} <= set(names)
    assert all(not node.meta.get("custom") for target in ("cos", "sin") for node in calls(jd) if node.name == target)


@torch.library.custom_op("foregrad_tests::marked_sum", mutates_args={})
def marked_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


marked_sum.register_fake(lambda x, y: torch.empty_like(x))
marked_sum.register_autograd(lambda ctx, grad: (grad, grad), setup_context=lambda ctx, inputs, output: None)


@pytest.mark.parametrize("by_dynamo", [False, True], ids=["module", "captured by Dynamo"])
def test_a_custom_operator_has_the_line_of_the_program(by_dynamo):
    class Custom(nn.Module):
        def forward(self, x, y):
            return marked_sum(x, y)

    given = (torch.randn(4, 3, requires_grad=True), torch.randn(4, 3))
    jd, _ = exported(Custom(), given, by_dynamo=by_dynamo)
    (node,) = found(jd, torch.ops.foregrad_tests.marked_sum.default)
    assert "return marked_sum(x, y)" in node.meta["stack_trace"]
    text = jd.graph_module.print_readable(print_output=False)
    assert "return marked_sum(x, y)" in text
    assert "self._opoverload" not in text


def test_paths_of_modules_begin_at_the_module():
    jd, _ = exported(Two(), (torch.randn(4, 3, requires_grad=True),))
    paths = {
        (node.name.partition("_")[0], list(modules.values())[-1][0])
        for node in calls(jd)
        if (modules := node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"))
        if "mm" in node.name
    }
    assert paths == {("addmm", "self.first"), ("addmm", "self.second"), ("mm", "self.first"), ("mm", "self.second")}


def test_indices_of_inputs_that_stay_where_they_are():
    graph = dynamo_graph_capture_for_export(Linear())(torch.randn(4, 3))
    context = torch._guards.TracingContext(graph.meta["fake_mode"])
    with torch._guards.tracing(context), contextlib.ExitStack() as stack:
        jd = foregrad.aot_export_joint_with_descriptors(stack, graph, (torch.randn(4, 3),))
    assert jd._aot_state.fw_metadata.static_input_indices == [0, 1]


def test_a_nested_compile_region_has_its_marks():
    class Inner(nn.Module):
        @torch.compiler.nested_compile_region
        def forward(self, x):
            with traceback.annotate({"name": "inner"}):
                return x.sin() * 3

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            with traceback.annotate({"name": "outer"}):
                z = self.inner(x)
            return z - 1

    with whole_regions():
        x = torch.randn(4, 3, requires_grad=True)
        jd, run = exported(Outer(), (x,), by_dynamo=True)
    (sub,) = found(jd, torch.ops.aten.sub.Tensor)
    assert not sub.meta.get("custom")
    (grad,) = torch.autograd.grad(run(x).sum(), x)
    torch.testing.assert_close(grad, 3 * x.detach().cos())


# ------------------------------------------------------------------------------------------------------ control flow


def test_a_branch_on_values_is_refused_by_name():
    class Branching(nn.Module):
        def forward(self, x):
            return x.sin() if x.sum() > 0 else x.cos()

    with pytest.raises(foregrad.errors.UnsupportedError, match="branches on values of tensors"):
        exported(Branching(), (torch.ones(2, 3, requires_grad=True),))


def test_a_loop_of_known_length_is_in_the_graph():
    class Repeating(Linear):
        def forward(self, x):
            start = torch.tensor(0), self.linear(x)
            while_loop = torch._higher_order_ops.while_loop
            return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), start)[1]

    module, x = Repeating(), torch.ones(2, 3)
    jd, run = exported(module, (x,))
    assert len(found(jd, torch.ops.aten.sin.default)) == 3
    torch.testing.assert_close(run(*module.parameters(), x), module.linear(x).sin().sin().sin(), rtol=0, atol=0)


@pytest.mark.parametrize("by_dynamo", [False, True], ids=["module", "captured by Dynamo"])
def test_flex_attention_is_in_the_graph_with_its_mark(by_dynamo):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    documents = torch.zeros(2, 128, dtype=torch.int32)
    documents[:, 64:] = 1

    def same_document(b, h, q, kv):
        return (documents[b, q] == documents[b, kv]) & (q >= kv)

    mask = create_block_mask(same_document, 2, None, 128, 128, device="cpu")

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(16, 16)

        def forward(self, q, k, v):
            with traceback.annotate({"compile_with_inductor": "flex_attention"}):
                y = flex_attention(q, k, v, block_mask=mask)
            return self.out(y)

    torch.manual_seed(0)
    module = Attention()
    given = [torch.randn(2, 2, 128, 16) for _ in range(3)]
    jd, run = exported(module, tuple(given), by_dynamo=by_dynamo)
    (node,) = [n for n in calls(jd) if str(n.target) == "flex_attention"]
    assert node.meta["custom"] == {"compile_with_inductor": "flex_attention"}
    torch.testing.assert_close(run(*held_by(module), *given), module(*given))


class Scored(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(32))

    def forward(self, q):
        from torch.nn.attention.flex_attention import flex_attention

        return (flex_attention(q * self.weight, q, q, score_mod=lambda score, b, h, i, j: score + self.bias[i] - j),)


@pytest.mark.parametrize("door", ["aot_module_simplified", "aot_export_joint_with_descriptors"])
def test_gradients_of_flex_attention_through_each_door(door, monkeypatch):
    """Of a tensor that the scores look up too. Dynamo's graphs of scores make their code when they are first called."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, q = Scored(), torch.randn(1, 2, 32, 16)

    def backend(gm, inputs):
        return foregrad.aot_module_simplified(gm, inputs, foregrad.nop)

    if door == "aot_module_simplified":
        (out,) = torch.compile(module, backend=backend)(q)
    else:
        (out,) = exported(module, (q,))[1](*module.parameters(), q)
    found = torch.autograd.grad(out.sum(), list(module.parameters()))
    (expected,) = module(q)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), list(module.parameters())))
