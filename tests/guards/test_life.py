"""The life of compiled functions and modules: copies, pickles, state, what is let go of."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import foregrad


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return torch.relu(self.linear(x)).sum()

    def twice(self, x):
        return self.linear(self.linear(x)).sum()


def compiled(model):
    return foregrad.compile(model, backend="eager")


def agree(ours, theirs, x):
    a, b = ours(x), theirs(x)
    assert torch.equal(a, b)
    for p, q in zip(
        torch.autograd.grad(a, list(ours.parameters())), torch.autograd.grad(b, list(theirs.parameters())), strict=True
    ):
        assert torch.equal(p, q)


X = torch.randn(2, 3)


@pytest.mark.parametrize("remake", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_a_copy_is_compiled_and_stands_alone(remake):
    model = compiled(Net())
    model(X)
    other = remake(model)
    assert isinstance(other, Net)
    assert not other.foregrad.specializations
    with torch.no_grad():
        other.linear.weight.zero_()
    assert model.linear.weight.abs().sum() > 0
    reference = Net()
    reference.load_state_dict(other.state_dict())
    agree(other, reference, X)
    assert len(other.foregrad.specializations) == 1
    assert float(other.calls) == 2


@foregrad.compile(backend="eager")
def decorated(x):
    return x * 2


def undecorated(x):
    return x * 2


def test_compiled_functions_are_copied_and_pickled_as_functions_are():
    assert copy.copy(decorated) is decorated
    assert copy.deepcopy(decorated) is decorated
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(foregrad.compile(undecorated, backend="eager"))


def test_a_shallow_copy_shares_parameters():
    model = compiled(Net())
    other = copy.copy(model)
    assert other.linear is model.linear
    agree(other, model, X)
    other.brand_new = 1
    assert not hasattr(model, "brand_new")


def test_state_goes_both_ways():
    plain = Net()
    model = compiled(plain)
    assert model.state_dict().keys() == plain.state_dict().keys()
    model.load_state_dict({k: torch.ones_like(v) for k, v in plain.state_dict().items()})
    assert torch.equal(plain.linear.weight, torch.ones(3, 3))
    model.eval()
    assert not plain.training
    plain.double()
    assert model.linear.weight.dtype is torch.float64
    assert model(X.double()).dtype is torch.float64


def test_the_same_module_compiled_twice():
    plain = Net()
    first, second = compiled(plain), compiled(plain)
    agree(first, second, X)
    again = compiled(first)
    agree(again, plain, X)


def test_a_bound_method():
    model = Net()
    twice = foregrad.compile(model.twice, backend="eager")
    assert torch.equal(twice(X), model.twice(X))
    model.linear = nn.Linear(3, 3)
    assert torch.equal(twice(X), model.twice(X))


def test_a_compiled_method_of_a_class():
    class Decorated(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        @foregrad.compile(backend="eager")
        def forward(self, x):
            return self.linear(x)

    first, second = Decorated(), Decorated()
    for model in (first, second, first):
        assert torch.equal(model(X), model.linear(X))
    gone = [weakref.ref(second), weakref.ref(second.linear.weight)]
    del second, model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    assert torch.equal(first(X), first.linear(X))


def test_a_forward_put_on_a_compiled_module():
    plain = Net()
    model = compiled(plain)
    model(X)
    model.forward = lambda x: x * 3
    assert torch.equal(model(X), X * 3)
    del model.forward
    assert torch.equal(model(X), plain(X))


def test_a_forward_put_on_the_class_of_a_compiled_module():
    class Other(Net):
        pass

    model = compiled(Other())
    model(X)
    Other.forward = lambda self, x: x * 3
    assert torch.equal(model(X), X * 3)


def test_a_dropped_function_frees_its_graphs_and_tensors():
    freed = []

    def make():
        model = Net()
        offset = torch.randn(3)
        f = foregrad.compile(lambda x: model(x) + offset.sum(), backend="eager")
        x = torch.randn(2, 3)
        f(x).backward()
        specialization = f.foregrad.specializations[0]
        freed.extend(map(weakref.ref, (model, model.linear.weight, offset, x, f, specialization.call)))

    make()
    gc.collect()
    assert [ref() for ref in freed] == [None] * len(freed)


def test_arguments_are_not_kept():
    f = foregrad.compile(lambda x, y: (x * y).sum(), backend="eager")
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    f(x, y).backward()
    refs = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


class Box:
    def __init__(self):
        self.tensor, self.items = torch.ones(3), [torch.ones(3)]

    def get(self):
        return self.tensor


WEAK = {
    "attribute": (weakref.ref, lambda r: None if r() is None else r().tensor),
    "item": (weakref.ref, lambda r: None if r() is None else r().items[0]),
    "method": (lambda box: weakref.WeakMethod(box.get), lambda r: None if r() is None else r()()),
    "values": (lambda box: weakref.WeakValueDictionary(a=box), lambda r: r["a"].tensor if "a" in r else None),
}


@pytest.mark.parametrize("name", WEAK)
def test_what_is_referred_to_weakly_is_let_go_of(name):
    make, read = WEAK[name]
    outs = []
    for how in (lambda f: f, compiled):
        box = Box()
        reference, gone = make(box), weakref.ref(box)

        def f(x, reference=reference):
            found = read(reference)
            return x if found is None else x + found

        call = how(f)
        outs.append([call(X).tolist()])
        box.tensor.add_(1)
        outs[-1].append(call(X).tolist())
        del box
        gc.collect()
        assert gone() is None
        outs[-1].append(call(X).tolist())
    assert outs[0] == outs[1]


def test_replaced_weights_are_let_go_of():
    model = compiled(Net())
    model(X)
    model.eval()
    model.train()
    old = weakref.ref(model.linear.weight)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    model(X)
    gc.collect()
    assert old() is None


def test_a_replaced_submodule_is_let_go_of():
    model = compiled(Net())
    model(X)
    old = [weakref.ref(model.linear), weakref.ref(model.linear.weight)]
    model.linear = nn.Linear(3, 3)
    gc.collect()
    assert [ref() for ref in old] == [None, None]
    model(X)
    assert len(model.foregrad.specializations) == 1


def test_an_attribute_that_changes_on_every_call_costs_no_graph():
    plain = Net()
    model = compiled(plain)
    for step in range(20):
        plain.step = step
        model(X)
    assert len(model.foregrad.specializations) == 1


def test_past_the_limit_it_warns_and_runs_eagerly():
    with foregrad.config.override(recompile_limit=2):
        f = foregrad.compile(lambda x: x * 2, backend="eager")
    f(torch.ones(1)), f(torch.ones(2))
    with pytest.warns(foregrad.errors.ForegradWarning, match=r"2 times.*x\.shape was \(2,\), is \(3,\)"):
        assert torch.equal(f(torch.ones(3)), torch.full((3,), 2.0))
    assert torch.equal(f(torch.ones(4)), torch.full((4,), 2.0))
    assert len(f.foregrad.specializations) == 2


def test_past_the_limit_the_remedy_for_sizes_is_not_to_pass_tensors():
    with foregrad.config.override(recompile_limit=2):
        f = foregrad.compile(lambda x: x * 2, backend="eager", dynamic=False)
    f(torch.ones(2)), f(torch.ones(3))
    with pytest.warns(foregrad.errors.ForegradWarning, match=r"With dynamic=False.* each size has its own graph"):
        f(torch.ones(4))


def test_past_the_limit_it_raises_when_asked():
    with foregrad.config.override(recompile_limit=1, error_on_recompile_limit=True):
        f = foregrad.compile(lambda x: x * 2, backend="eager")
    f(torch.ones(1))
    with pytest.raises(foregrad.errors.UnsupportedError, match="limit"):
        f(torch.ones(2))


def test_the_graph_used_last_is_tried_first():
    f = foregrad.compile(lambda x: x * 2, backend="eager")
    for size in (1, 2, 3):
        f(torch.ones(size))
    f(torch.ones(1))
    assert f.foregrad.graphs.calls[0] is f.foregrad.specializations[0].call
    assert len(f.foregrad.graphs.calls) == 3


def test_a_function_that_counts_its_calls_counts_each():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.count = 0

        def forward(self, x):
            self.count += 1
            return x * self.count

    model = Counter()
    compiled_model = compiled(model)
    for n in range(1, 7):
        assert torch.equal(compiled_model(X), X * n)
        assert model.count == n
    assert len(foregrad.explain_recompiles(compiled_model)) == 2  # for none, and for any other number


CACHE = {}


def test_a_function_that_fills_a_cache_once_is_captured_again():
    def f(x):
        if "scale" not in CACHE:
            CACHE["scale"] = 3
        return x * CACHE["scale"]

    CACHE.clear()
    g = foregrad.compile(f, backend="eager")
    assert torch.equal(g(X), X * 3)
    CACHE["scale"] = 4
    assert torch.equal(g(X), X * 4)


def test_a_counter_that_makes_no_difference_counts_all_the_same():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.count = 2.0, 0

        def forward(self, x):
            self.count += 1
            return x * self.scale

    model = Counter()
    compiled_model = compiled(model)
    for n in range(1, 5):
        assert torch.equal(compiled_model(X), X * 2)
        assert model.count == n
    model.scale = 3.0
    assert torch.equal(compiled_model(X), X * 3)  # all else is looked at as ever
    assert model.count == 5


def test_torch_jit_trace_sees_the_modules_own_code():
    model, x = nn.Linear(3, 2), torch.randn(4, 3)
    compiled_before = compiled(model)
    compiled_before(x)
    for each in (compiled(model), compiled_before):
        traced = torch.jit.trace(each, (x,))
        assert torch.equal(traced(x), model(x))
        assert torch.equal(traced(x[:2]), model(x[:2]))
