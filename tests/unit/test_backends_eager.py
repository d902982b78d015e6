"""The eager backend: right results from generated Python, and values freed as soon as they may be."""

from __future__ import annotations

import math
import operator
import typing

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from foregrad.backends.eager import eager_compiler, render_late
from foregrad.errors import BackendError
from foregrad.graph.meta import NodeMeta, TensorSpec

aten = torch.ops.aten


def graph_of(build, root=None) -> torch.fx.GraphModule:
    """A graph module from a function that fills a graph and returns what it outputs."""
    graph = torch.fx.Graph()
    graph.output(build(graph))
    return torch.fx.GraphModule(root or torch.nn.Module(), graph)


def same(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        if isinstance(b, torch.Tensor):
            assert a.dtype is b.dtype
            assert a.stride() == b.stride()
            assert torch.equal(a, b)
        else:
            assert a == b


# -- results


def test_a_traced_model_gives_eagers_results_bitwise():
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 4), torch.nn.Softmax(-1)
    )
    params = dict(model.named_parameters())

    def step(params, x):
        out = torch.func.functional_call(model, params, (x,))
        return [out, *torch.autograd.grad(out.square().sum(), list(params.values()))]

    x = torch.randn(3, 6)
    gm = make_fx(step)(params, x)
    compiled = eager_compiler(gm)
    same(compiled([*params.values(), x]), step(params, x))
    assert "torch_addmm(" in compiled.source()
    assert "nn_gelu(" in compiled.source()
    assert "aten_native_layer_norm_backward(" in compiled.source()


def test_the_argument_list_is_emptied_and_a_list_comes_back():
    compiled = eager_compiler(graph_of(lambda g: (g.call_function(aten.sin.default, (g.placeholder("x"),)),)))
    args = [torch.ones(2)]
    out = compiled(args)
    assert args == []
    assert type(out) is list
    assert compiled._boxed_call is True


def test_the_wrong_number_of_arguments_is_refused():
    compiled = eager_compiler(graph_of(lambda g: (g.placeholder("x"),)))
    for args in ([], [1, 2]):
        with pytest.raises(ValueError, match="unpack"):
            compiled(args)
    with pytest.raises(ValueError, match="unpack"):
        eager_compiler(graph_of(lambda g: (1,)))([1])


@pytest.mark.parametrize(
    ("result", "want"),
    [
        (lambda x, y: (x, None, x, y, 3, 2.5, "s"), lambda a, b: [a, None, a, b, 3, 2.5, "s"]),
        (lambda x, y: [y], lambda a, b: [b]),
        (lambda x, y: x, lambda a, b: [a]),
        (lambda x, y: (), lambda a, b: []),
        (lambda x, y: ((x, [y, None]), {"k": x}), lambda a, b: [(a, [b, None]), {"k": a}]),
        (lambda x, y: None, lambda a, b: [None]),
    ],
)
def test_outputs_of_every_form(result, want):
    gm = graph_of(lambda g: result(g.placeholder("x"), g.placeholder("y")))
    a, b = object(), object()
    assert eager_compiler(gm)([a, b]) == want(a, b)


def test_as_list_false_keeps_the_graphs_structure():
    for result in (lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"k": (x, 1)}):
        gm = graph_of(lambda g, result=result: result(g.placeholder("x")))
        value = torch.ones(1)
        assert repr(render_late(gm, as_list=False)([value])) == repr(gm(value))


def test_arguments_of_every_form():
    seen = []

    class Pair(typing.NamedTuple):
        left: object
        right: object

    def record(*args, **kwargs):
        seen.append((args, kwargs))

    class Opaque:
        def __repr__(self):  # fx writes constants by their repr
            return "None"

    marker = Opaque()

    def build(g):
        x, y = g.placeholder("x"), g.placeholder("y")
        g.call_function(
            record,
            ([x, (y, None)], {"a": [x], 1: (y,)}, slice(x, None, 2), Pair(x, (y,)), math.inf, -math.inf, torch.float32),
            {"dev": torch.device("cpu"), "marker": marker, "c": 1 - 2j, "nest": ((), [], {}), "t": (x,)},
        )
        return ()

    eager_compiler(graph_of(build))([5, 7])
    args, kwargs = seen[0]
    assert args == (
        [5, (7, None)],
        {"a": [5], 1: (7,)},
        slice(5, None, 2),
        (5, (7,)),
        math.inf,
        -math.inf,
        torch.float32,
    )
    assert type(args[3]) is Pair
    assert kwargs == {"dev": torch.device("cpu"), "marker": marker, "c": 1 - 2j, "nest": ((), [], {}), "t": (5,)}


def test_numbers_that_compare_equal_stay_apart():
    def build(g):
        return [
            g.call_function(pack, (value,)) for value in (-0.0, 0.0, True, 1, 1.0, math.nan, complex(0.0, -0.0), 0j)
        ]

    def pack(value):
        return repr(value), type(value)

    got = eager_compiler(graph_of(build))([])
    values = (-0.0, 0.0, True, 1, 1.0, math.nan, complex(0.0, -0.0), 0j)
    assert got == [(repr(value), type(value)) for value in values]


def test_symbolic_sizes_are_plain_integers_when_called():
    def build(g):
        n, x = g.placeholder("n"), g.placeholder("x")
        double = g.call_function(operator.mul, (n, 2))
        half = g.call_function(operator.floordiv, (double, 4))
        size = g.call_function(aten.sym_size.int, (x, 0))
        total = g.call_function(operator.add, (half, size))
        return [
            g.call_function(aten.view.default, (x, [half, -1])),
            g.call_function(aten.expand.default, (x, [total, -1, -1])),
            total,
        ]

    x = torch.randn(2, 6)
    for examples in (None, [4, x]):
        compiled = eager_compiler(graph_of(build), examples)
        same(compiled([4, x]), [x.view(2, 6), x.expand(4, -1, -1), 4])
    assert "tensor_view(x, " in compiled.source()
    assert "aten_view(" in eager_compiler(graph_of(build)).source(), "without an example, `n` might be anything"


def test_arguments_given_by_keyword():
    def build(g):
        x, y = g.placeholder("x"), g.placeholder("y")
        return [
            g.call_function(aten.mm.default, (), {"self": x, "mat2": y}),
            g.call_function(aten.sum.dim_IntList, (x,), {"dim": [0], "keepdim": True}),
            g.call_function(aten.add.Tensor, (x, y), {"alpha": 2}),
        ]

    x, y = torch.randn(2, 2), torch.randn(2, 2)
    same(eager_compiler(graph_of(build), [x, y])([x, y]), [x @ y, x.sum(0, keepdim=True), torch.add(x, y, alpha=2)])


def test_a_number_in_a_tensors_place_takes_the_operators_own_door():
    def build(g):
        n, x = g.placeholder("n"), g.placeholder("x")
        return [g.call_function(aten.mul.Tensor, (n, x)), g.call_function(aten.sin.default, (x,))]

    x = torch.randn(2)
    for examples in (None, [2.5, x], [3, x]):
        for number in (3, 2.5):
            same(eager_compiler(graph_of(build), examples)([number, x]), [number * x, x.sin()])


def test_module_attributes_nested_and_repeated():
    root = torch.nn.Module()
    root.block = torch.nn.Module()
    root.block.scale = torch.nn.Parameter(torch.full((2,), 3.0))
    root.register_buffer("shift", torch.ones(2))
    root.sub = torch.nn.Linear(2, 2)

    def build(g):
        x = g.placeholder("x")
        scaled = g.call_function(aten.mul.Tensor, (x, g.get_attr("block.scale")))
        moved = g.call_function(aten.add.Tensor, (scaled, g.get_attr("shift")))
        again = g.call_function(aten.add.Tensor, (moved, g.get_attr("block.scale")))
        return g.call_module("sub", (again,)), g.get_attr("shift")

    compiled = eager_compiler(graph_of(build, root))
    x = torch.randn(2)
    with torch.no_grad():
        same(compiled([x]), [root.sub(x * 3 + 1 + 3), root.shift])
        same(compiled([x]), [root.sub(x * 3 + 1 + 3), root.shift])


def test_an_attribute_that_is_missing_is_named():
    gm = graph_of(lambda g: (g.placeholder("x"), g.get_attr("w")), torch.nn.ParameterDict({"w": torch.ones(1)}))
    del gm.w
    with pytest.raises(BackendError, match=r"self\.w"):
        eager_compiler(gm)


def test_methods_modules_and_python_functions():
    def build(g):
        x = g.placeholder("x")
        y = g.call_method("add", (x, 1), {"alpha": 2})
        z = g.call_function(torch.nn.functional.relu, (y,))
        return (
            g.call_function(torch.sym_max, (3, 4)),
            g.call_function(torch.sin, (z,)),
            g.call_function(math.floor, (2.5,)),
        )

    x = torch.randn(3)
    same(eager_compiler(graph_of(build))([x]), [4, torch.sin(torch.relu(x + 2)), 2])


def test_higher_order_operators_get_their_subgraphs():
    def f(pred, x):
        return torch.cond(pred, lambda x: x.sin(), lambda x: x.cos(), (x,))

    x = torch.randn(3)
    gm = make_fx(f)(torch.tensor(True), x)
    compiled = eager_compiler(gm)
    assert "(pred_1, true_graph_0, false_graph_0, (x_1,))" in compiled.source()
    for flag in (True, False):
        same(compiled([torch.tensor(flag), x]), [x.sin() if flag else x.cos()])


def test_names_that_clash_with_ours():
    def build(g):
        args, forward, under = g.placeholder("args"), g.placeholder("forward"), g.placeholder("torch_mul")
        for node, name in ((args, "args"), (forward, "forward"), (under, "torch_mul")):
            node.name = name
        odd = g.call_function(aten.mul.Tensor, (args, under))
        odd.name = "_"
        return odd, forward

    x, y = torch.tensor([2.0]), torch.tensor([5.0])
    gm = graph_of(build)
    same(eager_compiler(gm, [x, x, y])([x, x, y]), [x * y, x])


def test_a_write_with_no_users_still_happens():
    def build(g):
        x, y = g.placeholder("x"), g.placeholder("y")
        g.call_function(aten.copy_.default, (x, y))
        return ()

    x = torch.zeros(2)
    assert eager_compiler(graph_of(build))([x, torch.ones(2)]) == []
    assert x.tolist() == [1, 1]


def test_no_users_of_a_fast_call_that_returns_several():
    def build(g):
        g.call_function(aten.native_dropout.default, (g.placeholder("x"), 0.5, True))
        return ()

    assert eager_compiler(graph_of(build), [torch.ones(2)])([torch.ones(2)]) == []


# -- several outputs


def picks_of(g, op, args, indices):
    node = g.call_function(op, args)
    return [g.call_function(operator.getitem, (node, index)) for index in indices]


@pytest.mark.parametrize("indices", [[0, 1, 2], [0], [2], [0, 2], [2, 0], [1, 1], [0, 0, 2], []])
def test_each_way_to_pick_outputs(indices):
    x = torch.randn(3, 4)
    gm = graph_of(
        lambda g: tuple(
            picks_of(g, aten.native_layer_norm.default, (g.placeholder("x"), [4], None, None, 1e-5), indices)
        )
    )
    want = aten.native_layer_norm.default(x, [4], None, None, 1e-5)
    same(eager_compiler(gm, [x])([x]), [want[index] for index in indices])


def test_outputs_without_users_are_dropped_at_once():
    def build(g):
        first, _, third = picks_of(
            g, aten.native_layer_norm.default, (g.placeholder("x"), [4], None, None, 1e-5), [0, 1, 2]
        )
        return first, third

    source = eager_compiler(graph_of(build), [torch.ones(2, 4)]).source()
    assert "getitem, _, getitem_2 = torch_native_layer_norm(x, (4,), None, None, 1e-05); del _; del x" in source


def test_a_list_of_unknown_length_and_its_picks():
    x = torch.arange(7)
    gm = graph_of(lambda g: tuple(picks_of(g, aten.split.Tensor, (g.placeholder("x"), 3), [2, 0])))
    same(eager_compiler(gm, [x])([x]), [x[6:], x[:3]])


def test_several_outputs_returned_whole_are_what_the_operator_returns():
    """The bindings return named tuples, and tuples for lists; the operators don't."""
    x = torch.randn(4)
    gm = graph_of(
        lambda g: (
            g.call_function(aten.sort.default, (x_ := g.placeholder("x"),)),
            g.call_function(aten.split.Tensor, (x_, 2)),
        )
    )
    ordered, parts = eager_compiler(gm, [x])([x])
    assert type(ordered) is tuple
    assert type(parts) is list


def test_negative_and_computed_indices_are_left_alone():
    x = torch.arange(6)

    def build(g):
        parts = g.call_function(aten.split.Tensor, (g.placeholder("x"), 2))
        last = g.call_function(operator.getitem, (parts, -1))
        return last, g.call_function(operator.getitem, (parts, slice(0, 2)))

    last, both = eager_compiler(graph_of(build), [x])([x])
    assert last.tolist() == [4, 5]
    assert [part.tolist() for part in both] == [[0, 1], [2, 3]]


# -- slices


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((0, 1, 3), "x[1:3]"),
        ((0, 0, 3), "x[0:3]"),
        ((0, 1, 2**63 - 1), "x[1:]"),
        ((0, -2, 2**63 - 1), "x[-2:]"),
        ((0, -3, -1), "x[-3:-1]"),
        ((0, 1, 100), "x[1:100]"),
        ((0, 0, 4, 2), "x[0:4:2]"),
        ((1, 1, 3), "x[..., 1:3]"),
        ((1, 0, 5, 2), "x[..., 0:5:2]"),
        ((0, 0, 4), "aten_slice_Tensor(x, 0, 0, 4)"),
        ((0, 0, 9), "aten_slice_Tensor(x, 0, 0, 9)"),
        ((0, 0, -1), "aten_slice_Tensor(x, 0, 0, -1)"),
        ((0, 0, 0), "aten_slice_Tensor(x, 0, 0, 0)"),
        ((-1, 1, 3), "aten_slice_Tensor(x, -1, 1, 3)"),
        ((0, None, 3), "aten_slice_Tensor(x, 0, None, 3)"),
        ((1,), "aten_slice_Tensor(x, 1)"),
    ],
)
def test_a_slice_becomes_indexing_only_where_that_is_the_same_call(args, text):
    x = torch.randn(4, 6)

    def build(g):
        node = g.placeholder("x")
        node.meta["val"] = x
        return (g.call_function(aten.slice.Tensor, (node, *args)),)

    compiled = eager_compiler(graph_of(build))
    assert text in compiled.source()
    with Calls() as ours:
        (got,) = compiled([x])
    with Calls() as theirs:
        want = aten.slice.Tensor(x, *args)
    assert ours.seen == theirs.seen
    assert (got.shape, got.stride(), got.storage_offset()) == (want.shape, want.stride(), want.storage_offset())


class Calls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((str(func), args[1:], kwargs or {}))
        return func(*args, **(kwargs or {}))


def test_without_a_known_shape_only_partial_slices_of_the_first_dimension_are_indexed():
    def build(g):
        x = g.placeholder("x")
        return [g.call_function(aten.slice.Tensor, (x, *args)) for args in ((0, 1, 3), (0, 0, 3), (1, 1, 3))]

    source = eager_compiler(graph_of(build), [torch.ones(4, 4)]).source()
    assert source.count("aten_slice_Tensor(") == 2
    assert "x[1:3]" in source


# -- the text


def test_the_source_is_what_one_would_write():
    def build(g):
        x, w = g.placeholder("x"), g.placeholder("w")
        h = g.call_function(aten.mm.default, (x, w))
        h.meta = NodeMeta(spec=TensorSpec((2, 3), (3, 1), torch.float32, torch.device("cpu")))
        y = g.call_function(aten.tanh_backward.default, (h, h))
        z = g.call_function(aten._to_copy.default, (y,), {"dtype": torch.float64})
        return z, None, w

    source = eager_compiler(graph_of(build), [torch.ones(2, 2), torch.ones(2, 3)]).source()
    assert source == (
        "def forward(args):\n"
        "    x, w = args\n"
        "    args.clear()\n"
        "    mm_default = torch_mm(x, w); del x  # f32[2, 3]\n"
        "    tanh_backward_default = aten_tanh_backward(mm_default, mm_default); del mm_default\n"
        "    _to_copy_default = tensor_to(tanh_backward_default, float64, copy=True); del tanh_backward_default\n"
        "    return [_to_copy_default, None, w]\n"
    )


def chain(count):
    def build(g):
        value = g.placeholder("x")
        for _ in range(count):
            value = g.call_function(aten.sin.default, (value,))
        return (value,)

    return graph_of(build)


def test_compiling_makes_no_late_meta():
    def never():
        raise AssertionError("made a fake value that nobody asked for")

    gm = chain(3)
    for node in gm.graph.nodes:
        spec = TensorSpec((2,), (1,), torch.float32, torch.device("cpu"))
        node.meta = NodeMeta(spec=spec, late={"val": never, "stack_trace": never})
    same(eager_compiler(gm)([torch.zeros(2)]), [torch.zeros(2)])


def test_random_operators_draw_the_same_numbers():
    gm = graph_of(lambda g: (g.call_function(aten.bernoulli.p, (g.placeholder("x"), 0.5)),))
    x = torch.ones(64)
    torch.manual_seed(3)
    (got,) = eager_compiler(gm, [x])([x])
    torch.manual_seed(3)
    assert torch.equal(got, aten.bernoulli.p(x, 0.5))
