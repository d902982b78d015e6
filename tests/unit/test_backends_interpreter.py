"""The interpreter backend: eager's results, and the first node that breaks its word."""

from __future__ import annotations

import operator
import re
import uuid
import weakref

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from foregrad.backends.interpreter import interpreter_compiler
from foregrad.errors import GraphError
from foregrad.graph.meta import NodeMeta, TensorSpec

aten = torch.ops.aten
CPU = torch.device("cpu")
TRACE = '  File "/home/someone/model.py", line 41, in forward\n    y = self.fc(x)\n'


def spec(shape, stride, dtype=torch.float32, device=CPU):
    return TensorSpec(tuple(shape), tuple(stride), dtype, device)


def one_op(op, args, meta, inputs=1):
    graph = torch.fx.Graph()
    nodes = [graph.placeholder(f"x{i}") for i in range(inputs)]
    node = graph.call_function(op, (*nodes, *args))
    node.meta = NodeMeta(spec=meta, stack_trace=TRACE)
    node.name = "suspect"
    graph.output((node,))
    return interpreter_compiler(torch.fx.GraphModule({}, graph))


def test_a_traced_step_agrees_with_its_meta_and_with_eager():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Softmax(-1))
    params = dict(model.named_parameters())

    def step(params, x):
        out = torch.func.functional_call(model, params, (x,))
        return [out, *torch.autograd.grad(out.square().sum(), list(params.values()))]

    x = torch.randn(3, 4)
    gm = make_fx(step, tracing_mode="fake")(params, x)
    args = [*params.values(), x]
    run = interpreter_compiler(gm)
    got = run(args)
    assert args == []
    assert all(torch.equal(a, b) for a, b in zip(got, step(params, x), strict=True))
    assert "def forward(" in run.source()


def test_symbolic_sizes_are_not_compared_nor_specialized():
    gm = make_fx(lambda x: x.sin().view(-1).expand(2, -1), tracing_mode="symbolic")(torch.randn(3, 4))
    x = torch.randn(5, 2)
    (got,) = interpreter_compiler(gm)([x])
    assert torch.equal(got, x.sin().view(-1).expand(2, -1))


@pytest.mark.parametrize(
    ("wrong", "what", "expected", "actual"),
    [
        (spec((3, 2), (2, 1)), "shape", r"\(3, 2\)", r"\(2, 3\)"),
        (spec((6,), (1,)), "shape", r"\(6,\)", r"\(2, 3\)"),
        (spec((2, 3), (1, 2)), "strides", r"\(1, 2\)", r"\(3, 1\)"),
        (spec((2, 3), (3, 1), torch.float64), "dtype", "torch.float64", "torch.float32"),
        (spec((2, 3), (3, 1), device=torch.device("cuda")), "device", "cuda", "cpu"),
        ((spec((2, 3), (3, 1)),), "number of outputs", "1", "Tensor"),
    ],
)
def test_each_disagreement_names_node_line_and_both_values(wrong, what, expected, actual):
    run = one_op(aten.sin.default, (), wrong)
    with pytest.raises(GraphError, match=r"node `suspect` .*aten\.sin\.default") as caught:
        run([torch.ones(2, 3)])
    message = str(caught.value)
    assert "model.py:41 in forward: y = self.fc(x)" in message
    assert f": {what} is not" in message
    assert re.search(f"expected: {expected}\n", message)
    assert re.search(f"actual:   .*{actual}", message)


def test_strides_that_address_nothing_may_differ():
    run = one_op(aten.sin.default, (), spec((1, 3), (99, 1)))
    run([torch.ones(1, 3)])
    run = one_op(aten.sin.default, (), spec((0, 3), (7, 7)))
    run([torch.ones(0, 3)])


def test_a_number_where_a_tensor_was_promised():
    run = one_op(lambda x: 3, (), spec((2,), (1,)))
    with pytest.raises(GraphError, match="actual:   an int"):
        run([torch.ones(2)])


def test_one_of_several_outputs():
    whole = spec((2, 3), (3, 1))
    run = one_op(aten.native_layer_norm.default, ([3], None, None, 1e-5), (whole, spec((2, 2), (2, 1)), None))
    with pytest.raises(GraphError, match=r"shape of output \[1\]"):
        run([torch.ones(2, 3)])
    run = one_op(aten.native_layer_norm.default, ([3], None, None, 1e-5), (whole, None, None))
    run([torch.ones(2, 3)])


def test_inputs_are_checked_too():
    graph = torch.fx.Graph()
    x = graph.placeholder("primals_1")
    x.meta = NodeMeta(spec=spec((2,), (1,)))
    graph.output((x,))
    run = interpreter_compiler(torch.fx.GraphModule({}, graph))
    with pytest.raises(GraphError, match="node `primals_1`"):
        run([torch.ones(3)])
    with pytest.raises(GraphError, match="takes 1 inputs"):
        run([])


@pytest.fixture
def library():
    name = f"foregrad_test_{uuid.uuid4().hex[:8]}"
    library = torch.library.Library(name, "DEF")
    yield library, name
    library._destroy()


def test_an_operator_that_writes_to_what_it_only_reads(library):
    lib, name = library
    lib.define("sneaky(Tensor x, Tensor y) -> Tensor")
    lib.impl("sneaky", lambda x, y: y.add_(1).clone(), "CompositeExplicitAutograd")
    op = getattr(torch.ops, name).sneaky.default
    run = one_op(op, (), None, inputs=2)
    with pytest.raises(GraphError, match=r"node `suspect` .*wrote to its argument `y`") as caught:
        run([torch.ones(2), torch.ones(2)])
    assert "model.py:41" in str(caught.value)


def test_a_write_inside_a_list_argument(library):
    lib, name = library
    lib.define("sneaky(Tensor[] xs) -> Tensor")
    lib.impl("sneaky", lambda xs: xs[1].mul_(2).clone(), "CompositeExplicitAutograd")
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output((graph.call_function(getattr(torch.ops, name).sneaky.default, ([x, y],)),))
    run = interpreter_compiler(torch.fx.GraphModule({}, graph))
    with pytest.raises(GraphError, match="argument `xs`"):
        run([torch.ones(2), torch.ones(2)])


def test_announced_writes_are_allowed_and_seen_through_aliases():
    x = torch.zeros(4)
    one_op(aten.copy_.default, (), None, inputs=2)([x, torch.ones(4)])
    assert x.tolist() == [1, 1, 1, 1]
    one_op(aten.copy_.default, (), None, inputs=2)([x[:2], x[2:]])


def test_inference_tensors_have_no_version_and_are_left_alone():
    with torch.inference_mode():
        x = torch.ones(2)
        (got,) = one_op(aten.sin.default, (), spec((2,), (1,)))([x])
    assert torch.equal(got, torch.ones(2).sin())


def test_a_failing_operator_says_where():
    run = one_op(aten.mm.default, (), None, inputs=2)
    with pytest.raises(RuntimeError) as caught:
        run([torch.ones(2, 3), torch.ones(2, 3)])
    assert any("`suspect`" in note and "model.py:41" in note for note in caught.value.__notes__)


def test_values_are_freed_after_their_last_use():
    seen = []
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.placeholder("unused")
    y = graph.call_function(aten.sin.default, (x,))
    graph.call_function(lambda y: seen.append([ref() is None for ref in refs]), (y,))
    graph.output((graph.call_method("neg", (y,)), graph.call_function(operator.add, (1, 2))))
    run = interpreter_compiler(torch.fx.GraphModule({}, graph))
    args = [torch.ones(2), torch.ones(2)]
    refs = [weakref.ref(arg) for arg in args]
    out = run(args)
    assert seen == [[True, True]]
    assert out[1] == 3


def test_attributes_and_modules():
    root = torch.nn.Module()
    root.sub = torch.nn.Module()
    root.sub.w = torch.nn.Parameter(torch.ones(2))
    root.act = torch.nn.ReLU()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.mul.Tensor, (x, graph.get_attr("sub.w")))
    graph.output(graph.call_module("act", (y,)))
    x = torch.randn(2)
    (got,) = interpreter_compiler(torch.fx.GraphModule(root, graph))([x])
    assert torch.equal(got, x.relu())
