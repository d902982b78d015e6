"""Regions that repeat are called, not copied: results, memory and random numbers are as without."""

from __future__ import annotations

import copy
import operator
import random
import weakref

import pytest
import torch
from torch import nn

import foregrad
from foregrad.backends.eager import eager_compiler
from foregrad.graph.role import called_region, role_of
from foregrad.inductor._torch import inductor as door
from foregrad.inductor.regions import outlined
from tests.covering import ALL

needs_compiler = pytest.mark.skipif(not door.cpp_compiler_found(), reason="Inductor needs a C++ compiler")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

torch.manual_seed(0)
WEIGHTS = [torch.randn(8, 8, requires_grad=True) for _ in range(24)]


def x():
    return torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()


def layer(x, w):
    return x + (x @ w).tanh().sin()


def calls_of(gm):
    return [node for node in gm.graph.nodes if called_region(gm, node) is not None]


class Watching:
    """A compiler that takes regions, and remembers how often each of a graph's regions is called."""

    takes_regions = True

    def __init__(self):
        self.calls = []

    def __call__(self, gm, example_inputs):
        names = [node.target for node in calls_of(gm)]
        self.calls.append({name: names.count(name) for name in names})
        return eager_compiler(gm, example_inputs)


def seen(f, args, regions, compiler=None):
    """What a step gives: results, gradients, and the state of the generator."""
    for weight in WEIGHTS:
        weight.grad = None
    args = [value.detach().clone().requires_grad_(value.requires_grad) for value in args]
    torch.manual_seed(3)
    function = foregrad.compile(f, backend=compiler or "eager", regions=regions)
    for _ in range(2):
        out = function(*args)
        results = out if isinstance(out, tuple) else (out,)
        sum(value.square().sum() for value in results).backward()
    found = [*results, *(value.grad for value in (*args, *WEIGHTS) if value.grad is not None)]
    return [(value.detach().clone(), value.stride()) for value in found], torch.get_rng_state()


def assert_same(f, *args, compiler=None):
    expected, state = seen(f, args, False)
    actual, actual_state = seen(f, args, True, compiler)
    assert len(expected) == len(actual)
    for (a, strides), (b, found) in zip(expected, actual, strict=True):
        assert torch.equal(a, b)
        assert strides == found
    assert torch.equal(state, actual_state)


def loop(x, change=layer, at=None, times=9):
    for k, weight in enumerate(WEIGHTS[:times]):
        x = change(x, weight) if k == at else layer(x, weight)
    return x.sum()


# ------------------------------------------------------------------------------------------------ what is found


def test_a_loop_of_24_equal_layers_without_modules_is_found_in_both_halves():
    watching = Watching()
    assert_same(lambda x: loop(x, times=24), x(), compiler=watching)
    forward, backward = watching.calls
    assert max(forward.values()) >= 23
    assert max(backward.values()) >= 22  # ends differ


def test_a_loop_in_a_loop_of_modules():
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(8)))
    watching = Watching()
    foregrad.compile(module, backend=watching, regions=True)(x()).sum().backward()
    assert [max(calls.values()) >= 7 for calls in watching.calls] == [True, True]


def dropped(p):
    return lambda x, w: x + nn.functional.dropout(x @ w, p)


def three(x, w, other):
    return ((x @ w).tanh() @ other).sin() @ w + x


OTHERS = {
    "constant": (lambda x, w: (x @ w) * 2.0 + x, lambda x, w: (x @ w) * 3.0 + x),
    "sign of zero": (lambda x, w: (x @ w) + x * 0.0, lambda x, w: (x @ w) + x * -0.0),
    "kind of number": (lambda x, w: torch.add(x, x @ w, alpha=1), lambda x, w: torch.add(x, x @ w, alpha=1.0)),
    "dtype": (layer, lambda x, w: layer(x.double(), w.double()).float()),
    "stride": (lambda x, w: (x @ w).t().contiguous().t() + x, lambda x, w: (x @ w).t().clone().t() + x),
    "aliasing": (lambda x, w: three(x, w, w), lambda x, w: three(x, w, WEIGHTS[23])),
    "dropout": (dropped(0.2), dropped(0.3)),
    "operator": (layer, lambda x, w: x + (x @ w).sin().tanh()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_differs_is_not_merged(name):
    usual, other = OTHERS[name]

    def f(x):
        for k, weight in enumerate(WEIGHTS[:9]):
            x = (other if k == 4 else usual)(x, weight)
        return x.sum()

    watching = Watching()
    assert_same(f, x(), compiler=watching)
    forward = watching.calls[0]
    assert 2 <= max(forward.values()) <= 4, forward
    assert sum(forward.values()) >= 5


def test_a_layer_with_a_hook_is_not_merged():
    module = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(7)))
    module[3].register_forward_hook(lambda module, args, result: result * 2)
    watching = Watching()
    y = foregrad.compile(module, backend=watching, regions=True)(x())
    assert torch.equal(y, module(x()))
    y.sum().backward()
    assert sorted(watching.calls[0].values()) == [3, 4]  # the hook's own operator comes after the layer's


def test_nothing_is_outlined_where_nothing_repeats_or_it_was_not_asked_for():
    joint = foregrad.capture(lambda x: (x @ WEIGHTS[0]).sin(), x())
    assert outlined(joint.module, regions=True, several=2) is joint.module
    short = foregrad.capture(lambda x: loop(x, times=3), x()).module
    assert outlined(short) is short
    watching = Watching()
    foregrad.compile(loop, backend=watching)(x())
    assert watching.calls == [{}]


def test_compilers_that_do_not_opt_in_get_the_plain_graph():
    graphs = []

    def compiler(gm, example_inputs):
        graphs.append(gm)
        return eager_compiler(gm, example_inputs)

    foregrad.compile(loop, backend=compiler, regions=True)(x())
    assert role_of(graphs[0]).regions is True
    assert calls_of(graphs[0]) == []
    assert len(calls_of(outlined(graphs[0], regions=True, several=2))) >= 8


# ------------------------------------------------------------------------------------------------ what is marked


@foregrad.region
def marked(x, w):
    return torch.relu(x @ w) + x


def test_a_marked_function_is_one_region_wherever_it_is_called_and_whatever_regions_says():
    def f(x):
        return marked(marked(marked(x, WEIGHTS[0]).sin(), WEIGHTS[1]).cos().exp(), WEIGHTS[2]).sum()

    for regions in (False, "auto", True):
        watching = Watching()
        value = x()
        foregrad.compile(f, backend=watching, regions=regions)(value).backward()
        forward, backward = watching.calls
        assert max(forward.values()) == 3
        assert max(backward.values()) == 2  # the last one's tangent is an expanded number
        other = x()
        f(other).backward()
        assert torch.equal(value.grad, other.grad)


def test_a_marked_module_is_one_region():
    module = nn.Sequential(*(foregrad.region(nn.Sequential(nn.Linear(8, 8), nn.Tanh())) for _ in range(4)))
    watching = Watching()
    y = foregrad.compile(copy.deepcopy(module), backend=watching)(x())
    y.sum().backward()
    assert max(watching.calls[0].values()) == 4
    assert torch.equal(y, module(x()))


def test_marked_calls_that_differ_are_apart():
    scaled = foregrad.region(lambda x, factor: (x * factor).sin())
    watching = Watching()

    def f(x):
        for factor in (2.0, 3.0, 2.0, 3.0, 4.0):
            x = scaled(x, factor)
        return x

    y = foregrad.compile(f, backend=watching)(x())
    assert sorted(watching.calls[0].values()) == [2, 2]
    assert torch.equal(y, f(x()))


def test_of_marks_inside_one_another_the_innermost_counts():
    inner = foregrad.region(lambda x: x.sin() * 2)
    outer = foregrad.region(lambda x, w: inner(inner(x) @ w))
    watching = Watching()
    foregrad.compile(lambda x: outer(outer(x, WEIGHTS[0]), WEIGHTS[1]), backend=watching)(x().detach())
    assert sorted(watching.calls[0].values()) == [2, 4]


def test_dynamo_goes_through_a_mark():
    def f(x):
        return marked(marked(x, WEIGHTS[0]), WEIGHTS[1]).sum()

    watching = Watching()
    call = torch.compile(f, backend="foregrad", options={"backend": watching}, fullgraph=True)
    assert torch.equal(call(x()), f(x()))


def test_what_a_marked_function_reads_is_guarded():
    factor = [2.0]
    scaled = foregrad.region(lambda x: x * factor[0])
    f = foregrad.compile(lambda x: scaled(scaled(x)), backend="eager")
    for factor[0] in (2.0, 3.0):
        assert torch.equal(f(torch.ones(3)), torch.full((3,), factor[0] ** 2))


def test_a_class_is_not_marked():
    with pytest.raises(TypeError, match="Mark the `forward` of a class"):
        foregrad.region(nn.Linear)


def test_nodes_to_keep_out_are_in_no_region():
    module = foregrad.capture(loop, x()).module
    keep = {node for node in module.graph.nodes if node.target is torch.ops.aten.tanh.default}
    made = outlined(module, keep, regions=True, several=2)
    assert sum(node.target is torch.ops.aten.tanh.default for node in made.graph.nodes) == 9


def test_writes_are_in_no_region():
    graph = torch.fx.Graph()
    value = graph.placeholder("x")
    value.meta["val"] = torch.zeros(3)
    for _ in range(4):
        for op in (torch.ops.aten.sin.default, torch.ops.aten.add_.Scalar):
            value = graph.call_function(op, (value,) if op is torch.ops.aten.sin.default else (value, 1))
            value.meta["val"] = torch.zeros(3)
    graph.output((value,))
    module = torch.fx.GraphModule({}, graph)
    assert outlined(module, regions=True, several=2) is module


# ------------------------------------------------------------------------------------------------ memory


def test_views_of_what_a_region_makes_share_its_memory():
    def f(x):
        kept = []
        for weight in WEIGHTS[:5]:
            x = (x @ weight).tanh()
            kept += [x.view(8, 4), x.t()]
        return (*kept, x)

    assert_same(f, x())
    out = foregrad.compile(f, backend="eager", regions=True)(x())
    for a, b in zip(out[:10:2], out[1:10:2], strict=True):
        assert a.data_ptr() == b.data_ptr()
    assert len({value.data_ptr() for value in out}) == 5


def test_views_of_inputs_are_views_of_inputs():
    def f(x, *parts):
        kept = []
        for part, weight in zip(parts, WEIGHTS, strict=False):
            x = x + (part.t() @ weight.narrow(0, 0, 4)).tanh().sum()
            kept.append(part.t())
        return (x, *kept)

    parts = [torch.randn(4, 6) for _ in range(6)]
    out = foregrad.compile(f, backend="eager", regions=True)(x(), *parts)
    assert [value.data_ptr() for value in out[1:]] == [part.data_ptr() for part in parts]
    assert [value.shape for value in out[1:]] == [(6, 4)] * 6


def test_a_result_that_is_a_copy_is_no_alias():
    def f(x):
        kept = []
        for weight in WEIGHTS[:6]:
            x = (x @ weight).tanh()
            kept.append(x.clone())
        return (x, *kept)

    out = foregrad.compile(f, backend="eager", regions=True)(x())
    assert len({value.data_ptr() for value in out}) == 7


def test_what_dies_in_a_region_is_freed_in_it():
    graph = torch.fx.Graph()
    values = [graph.placeholder("x")]
    values[0].meta["val"] = torch.zeros(64)
    alive, seen = [], []

    def make(value):
        made = value + 1
        alive.append(weakref.ref(made))
        return made

    def count(value):
        seen.append(sum(ref() is not None for ref in alive))
        return value * 2

    region = torch.fx.Graph()
    given = region.placeholder("given")
    made = region.call_function(operator.mul, (given, 2))
    region.output([region.call_function(count, (made,))])
    run = eager_compiler(torch.fx.GraphModule({}, region))
    for _ in range(3):
        values.append(graph.call_function(make, (values[-1],)))
        values.append(graph.call_function(operator.getitem, (graph.call_function(run, (values[-1],)), 0)))
    graph.output((values[-1],))
    eager_compiler(torch.fx.GraphModule({}, graph))([torch.zeros(64)])
    assert seen == [0, 0, 0]


def test_offsets_of_operands_may_differ():
    stack = torch.randn(9, 8, 8, requires_grad=True)

    def f(x, stack):
        for weight in stack.unbind():
            x = layer(x, weight)
        return x.sum()

    watching = Watching()
    assert_same(f, x(), stack, compiler=watching)
    assert max(watching.calls[0].values()) >= 8


def test_as_strided_counts_from_the_beginning_of_memory():
    stack = torch.randn(6, 4, 8)

    def f(x, stack):
        for part in stack.unbind():
            x = x + torch.as_strided(part, (4, 8), (8, 1), 0).sin()
        return x.sum()

    assert_same(f, x(), stack)


# ------------------------------------------------------------------------------------------------ programs


def test_random_numbers_are_drawn_in_the_order_of_the_program():
    def f(x):
        for k, weight in enumerate(WEIGHTS[:8]):
            x = nn.functional.dropout(layer(x, weight), 0.3)
            if k == 4:
                x = x + torch.rand(8)
        return x.sum()

    assert_same(f, x())


@pytest.mark.parametrize("dynamic", [True, None])
def test_symbolic_sizes_are_operands(dynamic):
    def f(x):
        for weight in WEIGHTS[:5]:
            rows = x.shape[0]
            x = (x @ weight).tanh().reshape(rows * 2, 4).cos().reshape(rows, 8) * rows + x
        return x.sum()

    watching = Watching()
    compiled = foregrad.compile(f, backend=watching, regions=True, dynamic=dynamic)
    for rows in (4, 6, 9):
        given = torch.randn(rows, 8, requires_grad=True)
        expected = torch.autograd.grad(f(given), given)
        assert torch.equal(torch.autograd.grad(compiled(given), given)[0], expected[0])
    assert max(watching.calls[-2].values()) >= 4


def test_gradients_of_gradients():
    def penalty(f):
        given = x()
        (gradient,) = torch.autograd.grad(f(given), given, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), given)[0]

    expected = penalty(loop)
    assert torch.equal(penalty(foregrad.compile(loop, backend="eager", regions=True)), expected)


POINTWISE = [torch.sin, torch.tanh, lambda x: x * 2, lambda x: x.clone(), lambda x: x.reshape(8, 4).t().reshape(4, 8)]


def made_up(seed):
    """A program of equal layers with a few that differ, whose results may be views."""
    draw = random.Random(seed)
    kinds = ["pointwise", "product", "skip", "norm", "dropout", "keep", "split", "before"]
    body = [(draw.choice(kinds), draw.choice(POINTWISE)) for _ in range(draw.randrange(2, 9))]
    times, odd = draw.randrange(2, 8), draw.randrange(10)

    def f(x):
        kept, before = [], x
        for k, weight in enumerate(WEIGHTS[:times]):
            start = x
            for kind, function in body:
                if kind == "product":
                    x = x @ weight
                elif kind == "skip":
                    x = function(x) + start
                elif kind == "norm":
                    x = nn.functional.layer_norm(function(x), (8,))
                elif kind == "dropout":
                    x = nn.functional.dropout(x, 0.25)
                elif kind == "keep" and len(kept) < 12:
                    kept.append(x.t() if draw_view(k) else x)
                elif kind == "split":
                    left, right = x.chunk(2, dim=1)
                    x = torch.cat([right.sin(), left], dim=1)
                elif kind == "before":
                    x, before = x + before.cos(), x
                else:
                    x = function(x)
            if k == odd:
                x = x + torch.rand(8)
        return (x, *kept)

    def draw_view(k):
        return seed % 3 == 0

    return f


@pytest.mark.parametrize("seed", range(40 if ALL else 16))
def test_programs_made_up_are_bitwise_as_eager(seed):
    assert_same(made_up(seed), x())


# ------------------------------------------------------------------------------------------------ models


ARCHITECTURES = ["gpt2", "bert", "llama", "distilbert", "t5", "vit"]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_models_train_as_in_eager(name):
    pytest.importorskip("transformers")
    from tests.models.test_transformers import assert_trains_like_eager
    from tests.models.zoo import ZOO

    if name not in ZOO:
        pytest.skip("not in this zoo")
    entry = ZOO[name]
    model = entry.build("eager", dropout=0.1)
    assert_trains_like_eager(entry, model, lambda model: foregrad.compile(model, backend="eager", regions=True))


# ------------------------------------------------------------------------------------------------ Inductor


class Block(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.norm, self.up, self.down, self.p = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8), p

    def forward(self, x):
        y = nn.functional.gelu(self.up(self.norm(x)))
        return x + nn.functional.dropout(self.down(y), self.p, self.training)


@needs_compiler
def test_inductor_compiles_marked_calls_once(compiled_graphs):
    def f(x):
        return (marked(marked(marked(x, WEIGHTS[0]).sin(), WEIGHTS[1]).cos(), WEIGHTS[2]) * 2).sum()

    value, other = x(), x()
    foregrad.compile(f, backend="inductor")(value).backward()
    f(other).backward()
    torch.testing.assert_close(value.grad, other.grad)
    assert len(compiled_graphs) > 2


def stack_of(p, layers=12):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), *(Block(p) for _ in range(layers)), nn.Linear(8, 3))


def step(model, call, given):
    torch.manual_seed(5)
    model.zero_grad()
    loss = call(given).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.fixture
def compiled_graphs(monkeypatch):
    """How many graphs Inductor compiled, and their numbers of operators."""
    found, compile_graph = [], door.compile_graph

    def watched(gm, *args, **kwargs):
        found.append(sum(node.op == "call_function" for node in gm.graph.nodes))
        return compile_graph(gm, *args, **kwargs)

    monkeypatch.setattr(door, "compile_graph", watched)
    return found


@needs_compiler
def test_inductor_compiles_a_region_once(compiled_graphs):
    model, given = stack_of(0.0), torch.randn(16, 8)
    expected = step(model, model, given)
    whole = step(model, foregrad.compile(model, backend="inductor", regions=False), given)
    sizes = sum(compiled_graphs)
    for regions in (True, "auto"):
        compiled_graphs.clear()
        call = foregrad.compile(model, backend="inductor", regions=regions)
        for _ in range(2):
            actual = step(model, call, given)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(actual, whole, atol=1e-6, rtol=1e-5)
        assert sum(compiled_graphs) < sizes / 2
        assert len(compiled_graphs) <= 8


@needs_compiler
def test_layers_are_compiled_once_by_default_also_behind_dynamo(compiled_graphs):
    model, given = stack_of(0.0), torch.randn(16, 8)
    expected = step(model, model, given)
    for call in (
        foregrad.compile(model, backend="inductor"),
        torch.compile(model, backend="foregrad", options={"backend": "inductor"}),
    ):
        compiled_graphs.clear()
        torch.testing.assert_close(step(model, call, given), expected, atol=1e-5, rtol=1e-4)
        assert len(compiled_graphs) > 2  # not one for each half


def convolutions(x):
    for kernel in [torch.ones(2, 2, 1)] * 9:
        x = nn.functional.conv1d(x[None], kernel)[0].sin().cos().tanh().exp().relu().sin().cos().tanh() + x.abs()
    return x


def updated(x, state):
    for weight in WEIGHTS[:9]:
        x = nn.functional.layer_norm((x @ weight).tanh() * 2 + x, (8,)).sin()
    state.add_(x)
    return x.sum()


@needs_compiler
@pytest.mark.parametrize("kind", ["convolutions", "writes its inputs", "memory budget", "regions=False"])
def test_what_does_not_gain_is_compiled_whole(kind, compiled_graphs):
    f, args, settings = updated, (x().detach(), torch.zeros(4, 8)), {}
    if kind == "convolutions":
        f, args = convolutions, (torch.randn(2, 8),)
    elif kind != "writes its inputs":
        f, args = lambda x: updated(x, torch.zeros(4, 8)), (x(),)
        settings = {"memory_budget": 1.0} if kind == "memory budget" else {"regions": False}
    copies = [value.clone() for value in args]
    out = foregrad.compile(f, backend="inductor", **settings)(*args)
    torch.testing.assert_close(out, f(*copies), atol=1e-4, rtol=1e-4)
    assert len(compiled_graphs) == 1


@needs_compiler
def test_inductor_draws_the_numbers_that_it_draws_without_regions(compiled_graphs):
    model, given = stack_of(0.3), torch.randn(16, 8)
    whole = step(model, foregrad.compile(model, backend="inductor", regions=False), given)
    compiled_graphs.clear()
    actual = step(model, foregrad.compile(model, backend="inductor", regions=True), given)
    torch.testing.assert_close(actual, whole, atol=1e-6, rtol=1e-5)
    assert len(compiled_graphs) > 2


@needs_compiler
def test_inductor_with_symbolic_sizes():
    model = stack_of(0.0)
    call = foregrad.compile(model, backend="inductor", regions=True, dynamic=True)
    for rows in (16, 5, 9):
        given = torch.randn(rows, 8)
        torch.testing.assert_close(step(model, call, given), step(model, model, given), atol=1e-5, rtol=1e-4)


@needs_compiler
def test_inductor_in_inference_and_with_results_that_are_views():
    def f(x):
        kept = []
        for weight in WEIGHTS[:9]:
            x = nn.functional.layer_norm((x @ weight).tanh() * 2 + x, (8,)).sin()
            kept += [x.t(), x.view(8, 4)]
        return (*kept, x)

    with torch.no_grad():
        given = x().detach()
        out, expected = foregrad.compile(f, backend="inductor", regions=True)(given), f(given)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    assert [value.stride() for value in out] == [value.stride() for value in expected]
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(out[:18:2], out[1:18:2], strict=True))


def test_other_values_are_refused():
    with pytest.raises(ValueError, match="regions is True"):
        foregrad.compile(loop, regions="always")
    with pytest.raises(Exception, match="regions"):
        torch.compile(lambda x: x + 1, backend="foregrad", options={"regions": 3})(torch.ones(2))


def test_a_compiled_module_that_is_copied_keeps_the_setting():
    model = stack_of(0.0)
    watching = Watching()
    again = copy.deepcopy(foregrad.compile(model, backend=watching, regions=True))
    again(torch.randn(4, 8))
    assert max(watching.calls[-1].values()) >= 8
