"""Printed graphs are programs: they say what everything is, and they run."""

from __future__ import annotations

import math
import operator
import typing

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from foregrad.graph.meta import NodeMeta, TensorSpec
from foregrad.graph.printing import print_graph, user_line

aten = torch.ops.aten
CPU = torch.device("cpu")


def spec(*shape, dtype=torch.float32):
    stride, step = [], 1
    for size in reversed(shape):
        stride.insert(0, step)
        step *= size
    return TensorSpec(shape, tuple(stride), dtype, CPU)


def run(text: str, name: str):
    namespace: dict = {}
    exec(text, namespace)
    return namespace[name]


def same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


def joint_graph():
    """The joint graph of `tanh(x @ w)`, with the meta that capture gives."""
    trace = '  File "/home/someone/train.py", line 9, in step\n    loss = model(x)\n  File "/home/someone/model.py", line {}, in forward\n    {}'
    graph = torch.fx.Graph()

    def node(op, *args, shape, line, **meta):
        made = graph.call_function(op, args)
        made.meta = NodeMeta(spec=spec(*shape), late={"stack_trace": lambda: trace.format(*line)}, **meta)
        return made

    def placeholder(name, *shape):
        made = graph.placeholder(name)
        made.meta = NodeMeta(spec=spec(*shape))
        return made

    w, x, tangent = placeholder("primals_1", 4, 3), placeholder("primals_2", 2, 4), placeholder("tangents_1", 2, 3)
    line1, line2 = (41, "h = x @ self.w"), (42, "return h.tanh()")
    mm = node(aten.mm.default, x, w, shape=(2, 3), line=line1)
    tanh = node(aten.tanh.default, mm, shape=(2, 3), line=line2, saved=True)
    back = node(aten.tanh_backward.default, tangent, tanh, shape=(2, 3), line=line2)
    xt = node(aten.t.default, x, shape=(4, 2), line=line1)
    grad = node(aten.mm.default, xt, back, shape=(4, 3), line=line1)
    graph.output([tanh, grad, None])
    return torch.fx.GraphModule({}, graph)


PRINTED = """\
# joint graph after capture
# of `step`
import torch


def joint(
    primals_1,  # f32[4, 3]  parameter w
    primals_2,  # f32[2, 4]  args[0]
    tangents_1,  # f32[2, 3]  tangent of output 0
):
    # model.py:41 in forward: h = x @ self.w
    mm_default = torch.ops.aten.mm.default(primals_2, primals_1)  # f32[2, 3]
    # model.py:42 in forward: return h.tanh()
    tanh_default = torch.ops.aten.tanh.default(mm_default)  # f32[2, 3]  saved, 24 bytes
    tanh_backward_default = torch.ops.aten.tanh_backward.default(tangents_1, tanh_default)  # f32[2, 3]
    # model.py:41 in forward: h = x @ self.w
    t_default = torch.ops.aten.t.default(primals_2)  # f32[4, 2]
    mm_default_1 = torch.ops.aten.mm.default(t_default, tanh_backward_default)  # f32[4, 3]
    return [
        tanh_default,  # f32[2, 3]  output 0  saved, 24 bytes
        mm_default_1,  # f32[4, 3]  gradient of w
        None,  # no gradient
    ]
"""


def test_the_whole_text():
    slots = {
        "primals_1": "parameter w",
        "primals_2": "args[0]",
        "tangents_1": "tangent of output 0",
        "tanh_default": "output 0",
        "output[1]": "gradient of w",
        "output[2]": "no gradient",
    }
    assert print_graph(joint_graph(), header="joint graph after capture\nof `step`", slots=slots) == PRINTED


def test_the_text_runs():
    w, x, t = torch.randn(4, 3), torch.randn(2, 4), torch.randn(2, 3)
    gm = joint_graph()
    same(run(print_graph(gm), "joint")(w, x, t), gm(w, x, t))
    same(run(print_graph(gm.graph, name="half"), "half")(w, x, t), gm(w, x, t))


def test_a_traced_training_step_runs_as_printed():
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    params = dict(model.named_parameters())

    def step(params, x):
        out = torch.func.functional_call(model, params, (x,))
        return [out, *torch.autograd.grad(out.square().sum(), list(params.values()))]

    x = torch.randn(3, 6)
    gm = make_fx(step, tracing_mode="fake")(params, x)
    text = print_graph(gm)
    assert "torch.ops.aten.addmm.default(" in text
    assert "# (f32[3, 8], f32[3, 1], f32[3, 1])" in text
    same(run(text, "forward")(*params.values(), x), step(params, x))


def test_symbolic_sizes_are_shown_and_not_specialized():
    gm = make_fx(lambda x: x.sin().view(-1), tracing_mode="symbolic")(torch.randn(3, 4))
    for node in gm.graph.nodes:
        node.meta["saved"] = True
    text = print_graph(gm)
    assert "saved, " in text
    assert "s" in text.split("# f32[")[1].split("]")[0]
    x = torch.randn(5, 2)
    assert torch.equal(run(text, "forward")(x), x.sin().view(-1))


@pytest.mark.parametrize(
    ("inputs", "name"),
    [
        (("primals_1", "tangents_1"), "joint"),
        (("s", "tangents_1"), "backward"),
        (("primals_1",), "forward"),
        ((), "forward"),
    ],
)
def test_the_name_says_which_graph_it_is(inputs, name):
    graph = torch.fx.Graph()
    graph.output(tuple(graph.placeholder(text) for text in inputs))
    same(run(print_graph(graph), name)(*range(len(inputs))), tuple(range(len(inputs))))


def test_constants_and_submodules_come_through_self():
    root = torch.nn.Module()
    root.register_buffer("_tensor_constant0", torch.tensor([1.0, 2.0]))
    root.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    scaled = graph.call_function(aten.mul.Tensor, (x, graph.get_attr("_tensor_constant0")))
    moved = graph.call_function(aten.add.Tensor, (scaled, graph.get_attr("layers.0.bias")))
    graph.output((graph.call_module("layers.0", (moved,)),))
    gm = torch.fx.GraphModule(root, graph)
    text = print_graph(gm)
    assert "self,  # the graph module" in text
    assert "= self._tensor_constant0" in text
    x = torch.randn(3, 2)
    same(run(text, "forward")(gm, x), gm(x))


def test_every_kind_of_argument():
    def build():
        graph = torch.fx.Graph()
        x, n = graph.placeholder("x"), graph.placeholder("n")
        half = graph.call_function(operator.floordiv, (n, 2))
        rounded = graph.call_function(math.floor, (2.7,))
        biggest = graph.call_function(torch.sym_max, (half, rounded))
        part = graph.call_function(operator.getitem, (x, (slice(None, biggest, None), ...)))
        filled = graph.call_function(aten.full.default, ([2], -math.inf), {"dtype": torch.float64, "device": CPU})
        moved = graph.call_function(aten.clone.default, (part,), {"memory_format": torch.contiguous_format})
        relu = graph.call_function(torch.nn.functional.relu, (moved,))
        sine = graph.call_function(torch.sin, (relu,))
        total = graph.call_method("sum", (sine,), {"dim": 0})
        graph.output((total, filled, {"n": n, "c": complex(1.5, -2)}, (half, [None, "s"]), biggest))
        return torch.fx.GraphModule({}, graph)

    gm = build()
    x = torch.randn(4, 2)
    text = print_graph(gm)
    for spelled in ("import math\n", "torch.nn.functional.relu(", "torch.sin(", "torch.sym_max("):
        assert spelled in text
    got, want = run(text, "forward")(x, 6), gm(x, 6)
    same(got[:2], want[:2])
    assert repr(got[2:]) == repr(want[2:])


class Pair(typing.NamedTuple):
    left: object
    right: object


def test_what_has_no_spelling_is_passed_by_keyword():
    class Opaque:
        def __repr__(self):
            return "None"

    opaque = Opaque()

    def local(x, thing, pair):
        return x + 1, thing, pair

    graph = torch.fx.Graph()
    graph.output(graph.call_function(local, (graph.placeholder("x"), opaque, graph.call_function(local, (1, 2, 3)))))
    text = print_graph(graph)
    assert "    *,\n" in text
    assert "    local_2,  # <function" in text, "the nodes are called `local` and `local_1`"
    got = run(text, "forward")(5, local_2=local, opaque=opaque)
    assert got == (6, opaque, (2, 2, 3))


def test_higher_order_operators_run():
    gm = make_fx(lambda p, x: torch.cond(p, lambda x: x.sin(), lambda x: x.cos(), (x,)))(
        torch.tensor(True), torch.randn(3)
    )
    text = print_graph(gm)
    assert "torch.ops.higher_order.cond(" in text
    x = torch.randn(3)
    for flag in (True, False):
        args = (gm, torch.tensor(flag), x)
        assert torch.equal(run(text, "forward")(*args), x.sin() if flag else x.cos())


def test_a_node_called_like_a_module_does_not_hide_it():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    floor = graph.call_function(math.floor, (x,))
    again = graph.call_function(operator.iadd, (floor, 1))
    graph.output((again,))
    x.name, floor.name, again.name = "math", "torch", "operator"
    text = print_graph(graph)
    namespace: dict = {}
    exec(text, namespace)
    kwargs = {"floor": math.floor} if "floor," in text else {}
    assert namespace["forward"](2.5, **kwargs) == (3,)


def test_one_node_as_several_outputs_is_described_by_position():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((x, x))
    text = print_graph(graph, slots={"x": "args[0]", "output[0]": "first", "output[1]": "second"})
    assert "    x,  # args[0]\n" in text
    assert "        x,  # first\n        x,  # second\n" in text


def test_text_of_many_lines_stays_a_comment():
    graph = torch.fx.Graph()
    graph.output((graph.placeholder("x"),))
    text = print_graph(graph, header="a\nb", slots={"x": "one\ntwo", "output[0]": "z" * 500})
    assert run(text, "forward")(3) == (3,)
    assert "# one two" in text
    assert max(map(len, text.splitlines())) < 200


TRACES = [
    ('  File "/a/b/model.py", line 41, in forward\n    x = self.fc(x)\n', "model.py:41 in forward: x = self.fc(x)"),
    ('File "c:\\a\\model.py", line 1, in f\n  y', "model.py:1 in f: y"),
    ('  File "m.py", line 1, in f\n    y\n  File "n.py", line 2, in <lambda>', "n.py:2 in <lambda>"),
    ('  File "m.py", line 1, in f\n  File "n.py", line 2, in g\n    z', "n.py:2 in g: z"),
    ("nothing of the kind", None),
    (None, None),
]


@pytest.mark.parametrize(("trace", "want"), TRACES)
def test_the_users_line_is_the_innermost(trace, want):
    node = torch.fx.Graph().placeholder("x")
    assert user_line(node) is None
    node.meta["stack_trace"] = trace
    assert user_line(node) == want
