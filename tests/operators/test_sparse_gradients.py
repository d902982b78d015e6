"""Sparse gradients (`Embedding(sparse=True)`) of compiled functions are eager's: values, indices, state and strides."""

import copy

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedLayoutError
from tests.covering import each

ONE, OTHER = torch.tensor([1, 2, 2, 5]), torch.tensor([7, 2, 1, 5])


def looked_up(weight, indices=ONE, **options):
    return F.embedding(indices, weight, sparse=True, **options)


def bag(weight, indices=ONE, offsets=None, **options):
    indices = indices if offsets is not None else indices.view(2, 2)
    return F.embedding_bag(indices, weight, offsets, sparse=True, **options)


def hooked(hook):
    def function(w):
        scaled = w * 1
        scaled.register_hook(hook)
        return looked_up(scaled).sin()

    return function


def tied_to_a_value(w):
    v = w.tanh()
    return looked_up(v).sin().sum() + (v * 2).sum()


PROGRAMS = {
    "as it is": looked_up,
    "in a graph": lambda w: looked_up(w).sin(),
    "two dimensions": lambda w: looked_up(w, ONE.view(2, 2)).sin(),
    "int32": lambda w: looked_up(w, ONE.int()).sin(),
    "padding": lambda w: looked_up(w, padding_idx=2).sin(),
    "last is padding": lambda w: looked_up(w, padding_idx=-5).sin(),
    "all is padding": lambda w: looked_up(w, torch.tensor([2, 2]), padding_idx=2).sin(),
    "no index": lambda w: looked_up(w, ONE[:0]).sin(),
    "twice": lambda w: looked_up(w).sin() + looked_up(w).cos(),
    "at two places": lambda w: looked_up(w).sin() + looked_up(w, OTHER).cos(),
    "three times": lambda w: looked_up(w).sin() + looked_up(w, OTHER).cos() + looked_up(w, ONE + 1).tan(),
    "padding twice": lambda w: looked_up(w, padding_idx=2).sin() + looked_up(w, OTHER, padding_idx=1).cos(),
    "expanded": lambda w: looked_up(w).sum() + looked_up(w, OTHER).sum(),
    "tied": lambda w: looked_up(w).sin() @ w.t(),
    "tied, first": lambda w: (w * 2).sum() + looked_up(w).sin(),
    "tied four times": lambda w: w.sum() + looked_up(w).sin() + looked_up(w, OTHER).cos() + w.sin().sum(),
    "tied to a value": tied_to_a_value,
    "of a product": lambda w: looked_up(w * 2).sin(),
    "of a square": lambda w: looked_up(w * w).sin(),
    "of a quotient": lambda w: looked_up(w / 3).sin(),
    "negative": lambda w: looked_up(-w).sin(),
    "of a sum": lambda w: looked_up(w + 1).sin(),
    "of a copy": lambda w: looked_up(w.clone()).sin(),
    "sum of bags": lambda w: bag(w, mode="sum").sin(),
    "mean of bags": lambda w: bag(w, offsets=torch.tensor([0, 3]), mode="mean").sin(),
    "weighted bags": lambda w: bag(w, mode="sum", per_sample_weights=torch.full((2, 2), 0.3)).sin(),
    "padding in bags": lambda w: bag(w, mode="sum", padding_idx=2).sin(),
    "bags and rows": lambda w: bag(w, mode="mean").sin().sum() + looked_up(w).cos(),
    "norm": lambda w: looked_up(w, max_norm=1.0).sin(),
    "hook": hooked(lambda gradient: gradient * 2),
}
# Eager's backward raises for these.
RAISING = {
    "by frequency": lambda w: looked_up(w, scale_grad_by_freq=True).sin(),
    "dense by a hook": hooked(lambda gradient: gradient.to_dense()),
}


def weight(dtype=torch.float32):
    return torch.randn(10, 4, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()


def compiled(function, **settings):
    return foregrad.compile(function, **{"backend": "eager", "on_unsupported": "raise", **settings})


def assert_same(one, other, equal=torch.equal):
    if one is None or other is None:
        assert one is other
        return
    assert (one.layout, one.dtype, one.shape) == (other.layout, other.dtype, other.shape)
    if one.layout is torch.sparse_coo:
        assert one.is_coalesced() is other.is_coalesced()
        assert torch.equal(one._indices(), other._indices())
        one, other = one._values(), other._values()
        if equal is torch.equal:
            assert one.stride() == other.stride()
    assert equal(one, other)


def gradients(function, w, steps=2):
    found = []
    for _ in range(steps):
        result = function(w)
        result.sum().backward()
        found += [result.detach(), w.grad.clone()]
    return [*found, w.grad]


@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_eagers(name):
    function = PROGRAMS[name]
    for one, other in zip(gradients(function, weight()), gradients(compiled(function), weight()), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("name", RAISING)
def test_raises_as_eager_does(name):
    for function in (RAISING[name], compiled(RAISING[name])):
        with pytest.raises(RuntimeError, match="sparse"):
            function(weight()).sum().backward()


@pytest.mark.parametrize(
    "name", ["of a product", "padding", "tied", "tied to a value", "at two places", "mean of bags"]
)
@pytest.mark.filterwarnings("ignore")
def test_inductor_gets_what_is_dense(name):
    function = PROGRAMS[name]
    made = compiled(function, backend="inductor")
    for one, other in zip(gradients(function, weight()), gradients(made, weight()), strict=True):
        assert_same(one, other, torch.allclose)


indices = st.lists(st.integers(0, 9), max_size=6).map(lambda found: torch.tensor(found, dtype=torch.int64))
uses = st.one_of(
    st.tuples(st.just("rows"), indices, st.sampled_from([None, 2, 7])),
    st.tuples(st.just("bags"), indices.filter(len), st.sampled_from(["sum", "mean"])),
    st.tuples(st.just("dense"), st.just(None), st.just(None)),
    st.tuples(st.just("scaled"), indices, st.just(None)),
)


def used(w, use):
    kind, at, option = use
    if kind == "rows":
        return looked_up(w, at, padding_idx=option).sin().sum()
    if kind == "bags":
        return bag(w, at, torch.tensor([0, len(at) // 2]), mode=option).sin().sum()
    return w.cos().sum() if kind == "dense" else looked_up(w * 3, at).sin().sum()


@settings(max_examples=40, deadline=None)
@example([("dense", None, None), ("rows", ONE[:0], None)], {1})
@given(st.lists(uses, min_size=1, max_size=4), st.sets(st.integers(0, 3), min_size=1))
def test_any_uses_and_any_of_the_results(program, picked):
    """Each use is a result of its own; only some of them are differentiated."""
    picked = sorted({i % len(program) for i in picked})
    found = []

    def function(w):
        return [used(w, use) for use in program]

    for called in (function, compiled(function)):
        w = weight()
        for _ in range(2):
            results = called(w)
            sum(results[i] for i in picked).backward()
        found.append(w.grad)
    assert_same(*found)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(20, 4, sparse=True, padding_idx=3)
        self.bags = nn.EmbeddingBag(20, 4, sparse=True, mode="mean")
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.head(self.rows(x).sin().sum(1))
        return hidden.sum(-1) + self.bags(x).sin().sum(-1)


def trained(model, call, optimizer):
    sparse = [model.rows.weight, model.bags.weight]
    steps = [optimizer(sparse, lr=0.1), torch.optim.SGD(model.head.parameters(), lr=0.1)]
    for number in range(4):
        for step in steps:
            step.zero_grad()
        for batch in range(2):
            generator = torch.Generator().manual_seed(10 * number + batch)
            call(torch.randint(0, 20, (3 + number, 5), generator=generator)).square().sum().backward()
        for step in steps:
            step.step()
    return [p.detach() for p in model.parameters()], [p.grad for p in model.parameters()]


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize(
    ("options", "optimizer"),
    each(
        [{}, {"dynamic": True}, {"partition": "min_cut"}, {"memory_budget": 0.5}, {"native": False}],
        ["SGD", "SparseAdam", "Adagrad"],
    ),
    ids="".join,
)
def test_trains_as_eager_does(optimizer, options):
    torch.manual_seed(0)
    plain = Model()
    model = copy.deepcopy(plain)
    options = dict(options)
    with foregrad.config.override(native=options.pop("native", True)):
        one = trained(plain, plain, getattr(torch.optim, optimizer))
        other = trained(model, compiled(model, **options), getattr(torch.optim, optimizer))
    for a, b in zip([*one[0], *one[1]], [*other[0], *other[1]], strict=True):
        assert_same(a, b)


def test_batches_of_any_size_share_a_graph():
    made, w = compiled(lambda w, x: looked_up(w, x, padding_idx=2).sin().sum() + looked_up(w, x).cos().sum()), weight()
    for size in (4, 3, 7, 5):
        made(w, torch.arange(size)).backward()
    assert len(foregrad.explain_recompiles(made)) == 2


def test_gradients_of_some_inputs():
    found = []
    for made in (lambda function: function, compiled):
        w, u = weight(), weight()
        function = made(lambda w, u: (looked_up(w).sin() * looked_up(u, OTHER).tan()).sum())
        found.append(torch.autograd.grad(function(w, u), [u]) + torch.autograd.grad(function(w, w), [w]))
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


def test_the_gradient_is_in_the_memory_of_the_indices_as_eagers_is():
    for made in (lambda function: function, compiled):
        w, x = weight(), ONE.clone()
        made(lambda w, x: looked_up(w, x).sin().sum())(w, x).backward()
        x[0] = 9
        assert w.grad._indices()[0, 0] == 9


def test_hooks_of_parameters_and_of_saved_tensors():
    found = []
    for made in (lambda function: function, compiled):
        w, seen = weight(), []
        w.register_hook(lambda gradient: gradient * 3)
        w.register_post_accumulate_grad_hook(lambda p, seen=seen: seen.append(p.grad.clone()))
        function = made(lambda w: looked_up(w, padding_idx=2).sin().sum())
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            result = function(w)
        result.backward(retain_graph=True)
        result.backward()
        base = weight()
        function(base * 2).backward()
        found.append([*seen, w.grad, base.grad])
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


def test_steps_taken_inside():
    def step(w):
        loss = looked_up(w).sin().sum()
        (gradient,) = torch.autograd.grad(loss, w)
        with torch.no_grad():
            w.add_(gradient * -0.1)
        return loss

    one, other = weight(), weight()
    made = compiled(step)
    for _ in range(2):
        assert torch.equal(step(one), made(other))
        assert torch.equal(one, other)


def test_a_derivative_of_the_gradient():
    def function(w, v):
        return (looked_up(w) * v).sin().sum()

    found = []
    for called in (function, compiled(function)):
        w, v = weight(), torch.ones(4, requires_grad=True)
        (gradient,) = torch.autograd.grad(called(w, v), [v], create_graph=True)
        found.append(torch.autograd.grad(gradient.square().sum(), [w, v]))
    for one, other in zip(*found, strict=True):
        assert_same(one, other)
    with pytest.raises(UnsupportedLayoutError, match="is sparse and can't be differentiated again"):
        torch.autograd.grad(compiled(function)(w, v), [w], create_graph=True)


def test_compilers_get_dense_graphs():
    seen = []

    def compiler(graph, inputs):
        seen.extend(node.meta["val"] for node in graph.graph.nodes if node.op == "call_function")
        return foregrad.make_boxed_func(graph.forward)

    one, other = weight(), weight()
    function = PROGRAMS["tied to a value"]
    foregrad.aot_function(function, fw_compiler=compiler, bw_compiler=compiler)(one).backward()
    function(other).backward()
    assert_same(one.grad, other.grad)
    assert seen
    assert all(value.layout is torch.strided for value in seen)


def test_joint_graphs_and_halves_hold_together():
    joint = foregrad.capture(PROGRAMS["tied four times"], weight())
    joint.check()
    halves = foregrad.partition(joint)
    halves.check()
    assert "embedding_sparse_backward" in str(halves)


def test_artifacts(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True, padding_idx=1), nn.Linear(4, 2))
    foregrad.export(model, (ONE,)).save(tmp_path / "model")
    loaded = foregrad.load(tmp_path / "model")
    for called in (model, loaded):
        called(ONE).sin().sum().backward()
    for one, other in zip(model.parameters(), loaded.parameters(), strict=True):
        assert_same(one.grad, other.grad)


def test_through_torch_compile():
    torch._dynamo.reset()
    found = []
    for made in (lambda m: m, lambda m: torch.compile(m, backend="foregrad", options={"backend": "eager"})):
        torch.manual_seed(0)
        model = nn.Embedding(10, 4, sparse=True, padding_idx=1)
        for size in (4, 3, 6):
            made(model)(torch.arange(size)).sin().sum().backward()
        found.append(model.weight.grad)
    assert_same(*found)
    torch._dynamo.reset()


def test_other_uses_of_sparse_gradients_run_eagerly():
    function = hooked(lambda gradient: gradient / gradient.norm())
    one, other = weight(), weight()
    function(one).sum().backward()
    made = compiled(function, on_unsupported="eager")
    with pytest.warns(ForegradWarning, match="sparse gradients of embeddings"):
        made(other).sum().backward()
    assert_same(one.grad, other.grad)
