"""Eager regions: functions that compiled functions call as they are, with eager's values, gradients and effects."""

# ruff: noqa: NPY002 - programs of users draw from the module itself

import dataclasses
import functools
import gc
import sys
import threading
import types
import warnings
import weakref

import numpy as np
import pytest
import torch
import torch.utils._pytree as pytree
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import foregrad
from foregrad.errors import (
    ForegradWarning,
    UnsupportedAliasError,
    UnsupportedError,
    UnsupportedLayoutError,
    UnsupportedSideEffectError,
)
from foregrad.inductor.backend import why_not
from foregrad.regions import calls

region = foregrad.eager_region


def _same(one, other, *, exactly):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) if exactly else torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(_same(a, b, exactly=exactly) for a, b in zip(one, other, strict=True))
    return one == other


def _steps(make, backend=None, steps=4):
    """What three calls give: results, gradients, the next random numbers, and the log."""
    torch.manual_seed(0)
    np.random.seed(0)
    function, log, parameters = make()
    called = function if backend is None else foregrad.compile(function, backend=backend, on_unsupported="raise")
    found = []
    for step in range(steps):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step)).requires_grad_()
        try:
            out = called(x)
        except ValueError as error:
            found.append(str(error))
            continue
        gradients = torch.autograd.grad(out.float().sum(), [x, *parameters], allow_unused=True) if out.grad_fn else ()
        found.append((out.detach(), [0 if g is None else g for g in gradients], torch.rand(1), np.random.rand()))
    return found, list(log)


def _assert_eagers(make, backend="eager"):
    eager, compiled = _steps(make), _steps(make, backend)
    assert _same(eager, compiled, exactly=backend == "eager"), (eager, compiled)


def numpy():
    log, w = [], torch.randn(4, 4, requires_grad=True)

    @region
    def sine(y):
        log.append(float(y.detach().sum()))
        return torch.from_numpy(np.sin(y.detach().numpy())) + y * 2

    def function(x):
        y = x @ w
        return (sine(y) * y).sum()

    return function, log, [w]


class Counting(nn.Module):
    def __init__(self, log):
        super().__init__()
        self.linear, self.norm, self.calls, self.log = nn.Linear(4, 4), nn.BatchNorm1d(4), 0, log

    def forward(self, x):
        self.calls += 1
        self.log.append(self.calls)
        return torch.tanh(self.norm(self.linear(x)))


def disabled_module():
    log = []
    model = nn.Sequential(nn.Linear(4, 4), torch.compiler.disable(Counting(log)), nn.Linear(4, 2))
    return model, log, list(model.parameters())


def marked_module():
    log = []
    model = nn.Sequential(nn.Linear(4, 4), region(Counting(log)), nn.Linear(4, 2))
    return model, log, list(model.parameters())


def disabled_function():
    log, w = [], nn.Parameter(torch.randn(4))

    @torch.compiler.disable
    def scaled(y, k=2):
        log.append(k)
        return y * w * k

    return lambda x: scaled(x.sin(), k=3).cos().sum(), log, [w]


def method_with_a_state():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.steps, self.history = nn.Linear(4, 4), 0, []

        @region
        def note(self, y):
            self.steps += 1
            self.history.append((self.steps, float(y.mean())))

        def forward(self, x):
            y = self.linear(x)
            self.note(y.detach())
            return y.relu()

    model = Model()
    return model, model.history, list(model.parameters())


def effects_in_order():
    log = []

    @region
    def first(y):
        log.append(("first", float(y.detach().sum())))

    @region
    def second(y):
        log.append(("second", float(y.detach().sum())))

    def function(x):
        first(x)
        y = x * 2
        second(y)
        first(y + 1)
        return y.sum()

    return function, log, []


def only_on_its_branch():
    log = []

    @region
    def positive(y):
        log.append("positive")
        return y * 2

    @region
    def negative(y):
        log.append("negative")
        return y * 3

    return lambda x: positive(x * 1) if x.sum() > 0 else negative(x * 1), log, []


def branch_on_its_result():
    log = []

    @region
    def noted(y):
        log.append("once")
        return y * 2

    def function(x):
        y = noted(x)
        return y.sin() if y.sum() > 0 else y.cos()

    return function, log, []


def numbers():
    @region
    def mean(y):
        return float(y.detach().mean()), "a constant", None

    return lambda x: x * mean(x)[0], [], []


def random_numbers():
    log = []

    @region
    def noisy(y):
        log.append(np.random.rand())
        return y * torch.rand(3, 4) * np.random.rand()

    return lambda x: noisy(x * torch.rand(3, 4)) + torch.rand(3, 4), log, []


def writes_to_an_argument():
    @region
    def triple(y):
        y.mul_(3)
        return y.sum()

    def function(x):
        y = x * 2
        total = triple(y)
        return y * total

    return function, [], []


def writes_by_numpy():
    @region
    def set_first(y):
        y.numpy()[0] = 7.0

    def function(x):
        y = x.detach() * 2
        set_first(y)
        return y + x * 1

    return function, [], []


def sizes_change():
    @region
    def positive(y):
        return y[y > 0]

    return lambda x: positive(x).sin(), [], []


def raises():
    log = []

    @region
    def checked(y):
        log.append("called")
        if y.sum() < 0:
            raise ValueError("negative")
        return y * 1

    return lambda x: checked(x * 1) * 2, log, []


def under_modes():
    log, linear = [], nn.Linear(4, 4)

    @region
    def applied(y):
        out = linear(y)
        log.append((torch.is_grad_enabled(), out.dtype))
        return out

    def function(x):
        with torch.no_grad():
            y = applied(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return y + applied(x).float()

    return function, log, list(linear.parameters())


def sparse():
    @region
    def product(y):
        return torch.sparse.mm(y.relu().to_sparse(), y.t())

    return lambda x: product(x * 2).sin(), [], []


def hooks_of_a_parameter():
    log, w = [], nn.Parameter(torch.randn(4))
    w.register_hook(lambda gradient: gradient * 2)

    @region
    def scaled(y):
        return y * w

    return lambda x: (scaled(x) * w).sum(), log, [w]


def containers():
    @region
    def taken_apart(pair, *, scale):
        a, b = pair["both"]
        return {"product": a * b, "sums": [a + scale, b.detach() + 1]}, b

    def function(x):
        out, b = taken_apart({"both": (x * 2, x.sin())}, scale=3)
        return out["product"] + out["sums"][0] + out["sums"][1] * b

    return function, [], []


class Sine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.from_numpy(np.sin(x.detach().numpy()))

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * torch.from_numpy(np.cos(x.numpy()))


class SineBackwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.from_numpy(np.cos(x.numpy()) * gradient.numpy())


def numpy_in_a_custom_function():
    return lambda x: Sine.apply(x * 2).exp(), [], []


def numpy_in_the_backward_of_a_custom_function():
    return lambda x: SineBackwardOnly.apply(x * 2).exp(), [], []


PROGRAMS = [
    numpy, disabled_module, marked_module, disabled_function, method_with_a_state, effects_in_order, only_on_its_branch,
    branch_on_its_result, numbers, random_numbers, writes_to_an_argument, writes_by_numpy, sizes_change, raises,
    under_modes, sparse, hooks_of_a_parameter, containers, numpy_in_a_custom_function,
    numpy_in_the_backward_of_a_custom_function,
]  # fmt: skip


@pytest.mark.parametrize("make", PROGRAMS, ids=lambda make: make.__name__)
def test_regions_give_what_eager_gives_and_do_what_it_does(make):
    _assert_eagers(make)


# ---------------------------------------------------------------------------------------------- the graph between


@region
def squared(y):
    return y.sin() * y


def around(x):
    return squared(x * 2)


def _compiled(function=around, **options):
    return foregrad.compile(function, backend="eager", on_unsupported="raise", **options)


def test_the_autograd_graph_goes_with_the_saved_tensor():
    graphs = []

    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            ctx.save_for_backward(a)
            return a * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    @region
    def kept(y):
        out = Kept.apply(y)
        graphs.append(weakref.ref(out.grad_fn))
        return out

    called = _compiled(lambda x: kept(x * 2).sum())
    for step in range(4):
        out = called(torch.ones(3, requires_grad=True))
        if step % 2:
            out.backward()
        del out
    gc.collect()
    assert [graph() for graph in graphs] == [None] * 4


def test_keys_go_with_the_calls():
    before = len(calls._kept)
    called = _compiled()
    outs = [called(torch.ones(3, requires_grad=True)) for _ in range(3)]
    assert len(calls._kept) >= before + 3
    del outs, called
    gc.collect()
    assert len(calls._kept) <= before


def test_retain_graph_and_a_second_backward():
    x = torch.randn(3, requires_grad=True)
    out = _compiled()(x).sum()
    first, second = (torch.autograd.grad(out, x, retain_graph=again)[0] for again in (True, False))
    assert torch.equal(first, second)
    assert torch.equal(first, torch.autograd.grad(around(x).sum(), x)[0])
    with pytest.raises(RuntimeError, match="second time"):
        out.backward()


def test_a_second_derivative_is_refused_by_name():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(UnsupportedError, match=r"`squared`.*differentiated twice"):
        torch.autograd.grad(_compiled()(x).sum(), x, create_graph=True)[0].sum().backward()


def test_saved_tensors_hooks_that_copy_are_refused_by_name():
    called, x = _compiled(), torch.randn(3, requires_grad=True)
    called(x)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
        out = called(x).sum()
    with pytest.raises(UnsupportedSideEffectError, match="copied the tensor"):
        out.backward()


def test_partitions_and_budgets_run_a_region_once():
    calls = []

    @region
    def noted(y):
        calls.append(1)
        return y.sin()

    for options in ({"partition": "min_cut"}, {"memory_budget": 0.0}, {}):
        x = torch.randn(3, requires_grad=True)
        calls.clear()
        _compiled(lambda x: noted(x.sin() * 2).cos().sum(), **options)(x).backward()
        assert len(calls) == 1


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_graph_serves_many_sizes(dynamic):
    sizes = []

    @region
    def noted(y):
        sizes.append(len(y))
        return y * 3

    called = _compiled(lambda x: noted(x.sin()).cos(), dynamic=dynamic)
    for size in (4, 5, 6, 7, 4):
        x = torch.randn(size, 3)
        assert torch.equal(called(x), (x.sin() * 3).cos())
    assert sizes == [4, 5, 6, 7, 4]
    assert len(foregrad.explain_recompiles(called).entries) == (1 if dynamic else 2)


def test_what_the_errors_about_sparse_tensors_advise():
    weight, identity = nn.Parameter(torch.ones(3, 2)), torch.eye(3).to_sparse()
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    products = {
        "is a torch.sparse_coo tensor": lambda x: torch.sparse.mm(identity, x),
        "makes a tensor that is not strided": lambda x: torch.sparse_coo_tensor(edges, x[:, 0], (3, 3)) @ x,
    }
    for said, product in products.items():
        with pytest.raises(UnsupportedLayoutError, match=f"{said}.*eager_region"):
            _compiled(lambda x, product=product: product(x * weight))(torch.ones(3, 2))
        advised = region(product)
        called = _compiled(lambda x, advised=advised: advised(x * weight).sin())
        for n in range(3):
            x = torch.full((3, 2), float(n))
            expected = torch.autograd.grad(product(x * weight).sin().sum(), weight)
            assert _same(torch.autograd.grad(called(x).sum(), weight), expected, exactly=True)


def test_threads():
    right = []

    def work():
        x = torch.randn(3, requires_grad=True)
        right.append(torch.equal(*(torch.autograd.grad(f(x).sum(), x)[0] for f in (called, around))))

    called = _compiled()
    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 6


def test_transforms_run_eagerly():
    calls = []

    @region
    def noted(y):
        calls.append(1)
        return y.sin()

    called, x = foregrad.compile(lambda x: noted(x * 2), backend="eager"), torch.randn(2, 3)
    for count in (1, 2, 3):
        assert torch.equal(torch.func.vmap(called)(x), (x * 2).sin())
        assert len(calls) == count


# ---------------------------------------------------------------------------------------------- refusals


def test_an_artifact_holds_none():
    with pytest.raises(UnsupportedError, match="eager region `squared`"):
        foregrad.export(around, (torch.randn(3),))


class Counter:
    count = 0


def _in_a_module():
    class Model(nn.Module):
        count = 0

        @region
        def counted(self, y):
            self.count += 1
            return y * 1

        def forward(self, x):
            return self.counted(x) * self.count

    return Model()


def _on_an_object():
    counter = Counter()

    @region
    def counted(y):
        counter.count += 1
        return y * 1

    return lambda x: counted(x * counter.count) + counter.count


def _on_a_class():
    class Counted(Counter):
        pass

    @region
    def counted(y):
        Counted.count += 1
        return y * 1

    return lambda x: counted(x) * Counted.count


def _in_a_dict():
    counts = {"calls": 0}

    @region
    def counted(y):
        counts["calls"] += 1
        return y * 1

    return lambda x: counted(x) * counts["calls"]


def _in_a_list():
    log = []

    @region
    def logged(y):
        log.append(1)
        return y * 1

    return lambda x: logged(x) * len(log)


def _in_a_variable_of_the_enclosing_function():
    count = 0

    @region
    def counted(y):
        nonlocal count
        count += 1
        return y * 1

    return lambda x: counted(x) * count


STATES = [_in_a_module, _on_an_object, _on_a_class, _in_a_dict, _in_a_list, _in_a_variable_of_the_enclosing_function]


@pytest.mark.parametrize("make", STATES)
def test_a_state_that_a_region_changes_is_not_read_outside(make):
    x = torch.ones(3)
    with pytest.raises(UnsupportedSideEffectError, match="Let the region return"):
        _compiled(make())(x)
    eager = make()
    with pytest.warns(ForegradWarning, match="Let the region return"):
        called = foregrad.compile(make(), backend="eager", on_unsupported="eager")
        assert [called(x).tolist() for _ in range(3)] == [eager(x).tolist() for _ in range(3)]


def test_a_number_that_is_an_argument_by_then_is_not_read_outside():
    def make():
        counter = Counter()

        @region
        def counted(y):
            counter.count += 2 * bool(y[0] > 1)
            return y * 1

        def f(x):
            return counted(x) * counter.count

        return f, counter

    (f, counter), (g, expected) = make(), make()
    compiled = foregrad.compile(f, backend="eager", on_unsupported="eager")
    for counter.count, expected.count in ((1, 1), (2, 2), (3, 3)):
        assert torch.equal(compiled(torch.ones(2)), g(torch.ones(2)))
    with pytest.warns(ForegradWarning, match="counter.*eager region `counted`"):
        assert torch.equal(compiled(torch.ones(2).double() * 2), g(torch.ones(2).double() * 2))
    assert counter.count == expected.count


def test_a_state_that_is_changed_before_a_region():
    class Model(nn.Module):
        @region
        def added(self, y):
            return y + self.last

        def forward(self, x):
            self.last = x * 2
            return self.added(x)

    x = torch.ones(3)
    with pytest.raises(UnsupportedSideEffectError, match="before the eager region `added`"):
        _compiled(Model())(x)
    with pytest.warns(ForegradWarning, match="before the eager region"):
        assert torch.equal(foregrad.compile(Model(), backend="eager", on_unsupported="eager")(x), x * 3)


def test_a_result_in_the_memory_of_an_argument():
    @region
    def transposed(y):
        return y.t()

    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(UnsupportedAliasError, match="Return copies"):
        _compiled(lambda x: transposed(x * 2).sin())(x)
    with pytest.warns(ForegradWarning, match="Return copies"):
        called = foregrad.compile(lambda x: transposed(x * 2).sin(), backend="eager", on_unsupported="eager")
        assert torch.equal(called(x), (x * 2).t().sin())


def test_a_buffer_that_both_write():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        @region
        def add(self, y):
            self.total += y.detach()

        def forward(self, x):
            self.add(x)
            return x + self.total

    x = torch.ones(3)
    with pytest.raises(UnsupportedSideEffectError, match="uses it too"):
        _compiled(Model())(x)
    with pytest.warns(ForegradWarning, match="uses it too"):
        called = foregrad.compile(Model(), backend="eager", on_unsupported="eager")
        assert [called(x)[0].item() for _ in range(3)] == [2.0, 3.0, 4.0]


def list_of_the_call(log):
    note = region(lambda seen, y: seen.append(float(y.detach().sum())))

    def function(x):
        seen = [x]
        note(seen, x)
        log.append(len(seen))
        return x * len(seen)

    return function


def dataclass_of_the_call(log):
    note = region(lambda made: setattr(made, "label", "seen"))

    def function(x):
        made = Made(x * 2)
        note(made)
        log.append(made.label)
        return made.values * 1

    return function


def list_from_before(log):
    note = region(lambda seen, y: seen.append(float(y.detach().sum())))

    def function(x):
        note(log, x)
        return x.sin()

    return function


def list_that_is_kept(log):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, seen):
            ctx.seen = seen
            return torch.from_numpy(x.detach().numpy() * 2)

        @staticmethod
        def backward(ctx, gradient):
            ctx.seen.append(float(gradient.sum()))
            return gradient * 2, None

    def function(x):
        seen = []
        y = Doubled.apply(x, seen)
        y.sum().backward()
        log.append(list(seen))
        return y.detach()

    return function


def list_that_is_returned(log):
    same = region(lambda seen: {"seen": seen})

    def function(x):
        seen = [x]
        same(seen)["seen"].append(x)
        log.append(len(seen))
        return x * len(seen)

    return function


@dataclasses.dataclass
class Made:
    values: torch.Tensor
    label: str = ""


@pytest.mark.parametrize(
    "make",
    [list_of_the_call, dataclass_of_the_call, list_from_before, list_that_is_kept, list_that_is_returned],
    ids=lambda make: make.__name__,
)
def test_what_a_region_writes_to_its_arguments_is_not_lost(make):
    logs, results = ([], []), []
    compiled = functools.partial(foregrad.compile, backend="eager", on_unsupported="eager")
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        for log, wrap in zip(logs, (lambda function: function, compiled), strict=True):
            function = wrap(make(log))
            results.append([function(torch.full((3,), float(i), requires_grad=True)) for i in range(3)])
    assert logs[0] == logs[1]
    assert all(map(torch.equal, *results))


@dataclasses.dataclass(frozen=True)
class Options:
    factor: torch.Tensor
    times: int = 2


def test_a_frozen_dataclass_that_is_kept_can_not_be_written_to():
    kept = []

    @region
    def scaled(x, options):
        kept.append(options)
        return x * options.factor * options.times

    called = _compiled(lambda x: scaled(x.sin(), Options(x.cos())).cos())
    for _ in range(2):
        x = torch.randn(3, requires_grad=True)
        assert torch.equal(called(x), (x.sin() * x.cos() * 2).cos())
    assert len(kept) >= 2


def test_a_list_that_a_region_begins_to_write_to():
    switch = [False]
    note = region(lambda seen: seen.append(1) if switch[0] else None)

    def function(x):
        seen = [x]
        note(seen)
        return x * len(seen)

    called = foregrad.compile(function, backend="eager", on_unsupported="eager")
    assert called(torch.ones(1)).item() == 1
    switch[0] = True
    with pytest.warns(ForegradWarning, match="changes a container among its arguments"):
        assert called(torch.ones(1)).item() == 2


class Branching(torch.autograd.Function):
    """Its backward reads a value, so that it can't be captured."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight.a)
        return x @ weight.a

    @staticmethod
    def backward(ctx, gradient):
        _, weight = ctx.saved_tensors
        scale = 2.0 if float(gradient.sum()) > 0 else 1.0
        return gradient @ weight.t() * scale, None


def test_a_tensor_that_holds_others():
    weight = TwoTensor(torch.randn(3, 3), torch.randn(3, 3))
    for function in (lambda x: Branching.apply(x, weight), lambda x: region(lambda x, w: x @ w.a)(x, weight)):
        with pytest.warns(ForegradWarning, match="a tensor with inner tensors"):
            called = foregrad.compile(function, backend="eager", on_unsupported="eager")
            x = torch.randn(2, 3, requires_grad=True)
            results = [(y := f(x), *torch.autograd.grad(y.sum(), x)) for f in (function, called)]
        assert all(map(torch.equal, *results))


class Bag:
    """A registered container that is taken apart into lists of its own."""

    def __init__(self, items, scale):
        self.items, self.scale = items, scale


pytree.register_pytree_node(
    Bag, lambda bag: ([[*bag.items], bag.scale], None), lambda parts, _: Bag([*parts[0]], parts[1])
)


def test_a_container_whose_lists_are_made_anew_each_time():
    """What a region does to these can't be seen; the function itself may be given one, and change none."""
    marked = region(lambda bag: bag.items[0] * float(bag.items[0].sum()) + bag.scale)

    def makes(x):
        return marked(Bag([x.sin(), x], 2.0))

    called = foregrad.compile(makes, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match="is given a Bag, flattened into new containers each time"):
        assert torch.equal(called(torch.ones(2)), makes(torch.ones(2)))
    called = foregrad.compile(lambda bag: bag.items[0] * bag.scale, backend="eager", on_unsupported="raise")
    for scale in (2.0, 2.0, 3.0):
        assert called(Bag([torch.ones(2)], scale)).tolist() == [scale] * 2
    with pytest.raises(UnsupportedSideEffectError, match=r"changed args\[0\]"):
        foregrad.compile(lambda bag: bag.items.append(1), backend="eager", on_unsupported="raise")(Bag([1], 2.0))


def test_what_is_no_function():
    with pytest.raises(TypeError, match="marks a function"):
        region(nn.Linear)
    with pytest.raises(TypeError, match="marks a function"):
        region(3)


# ---------------------------------------------------------------------------------------------- with Inductor


@pytest.fixture
def recursion_limit_kept():
    """Inductor raises it when it first meets something, for good."""
    before = sys.getrecursionlimit()
    yield
    sys.setrecursionlimit(before)


@pytest.mark.skipif(why_not() is not None, reason="Inductor can't compile here")
@pytest.mark.usefixtures("recursion_limit_kept")
@pytest.mark.parametrize("make", [numpy, effects_in_order], ids=lambda make: make.__name__)
def test_the_rest_is_compiled_by_inductor(make):
    _assert_eagers(make, "inductor")


class Scaler:
    factor = 2.0

    def scale(self, x):
        return x * self.factor

    @classmethod
    def times(cls, x):
        return x * cls.factor


SCALER, OTHER = Scaler(), Scaler()
METHODS = {
    "of an object": lambda: SCALER.scale,
    "of a class": lambda: Scaler.times,
    "of a subclass": lambda: type(OTHER).times,
    "of a module": lambda: LINEAR.extra_repr,
    "of an instance, set there": lambda: SCALER.own,
}
LINEAR = torch.nn.Linear(2, 2)
SCALER.own = OTHER.scale


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("mark", [foregrad.eager_region, torch.compiler.disable], ids=["region", "disabled"])
def test_a_region_is_given_a_method_of_an_older_object(how, mark):
    """Each look at the object makes a method, as in Lightning's `log`."""
    called = []

    @mark
    def applied(method, x):
        called.append(method)
        return x * len(method()) if how == "of a module" else method(x)

    def call(x):
        return applied(METHODS[how](), x).sin()

    compiled, x = foregrad.compile(call, backend="eager"), torch.ones(2)
    for factor in (2.0, 3.0, 4.0):
        SCALER.factor = OTHER.factor = factor
        assert torch.equal(compiled(x), call(x))
        first, second = called[-2:]
        assert first == second
    Scaler.factor, kept = 5.0, Scaler.factor
    assert torch.equal(compiled(x), call(x))
    Scaler.factor = kept
    assert len(foregrad.explain_recompiles(compiled)) == 1


MADE = {
    "of an object made in the call": lambda factor: Scaler().scale,
    "made of a function made in the call": lambda factor: types.MethodType(lambda self, x: x * factor, SCALER),
}


@pytest.mark.parametrize("how", MADE)
def test_a_method_that_the_call_makes_is_that_of_each_call(how):
    @foregrad.eager_region
    def applied(method, x):
        return method(x)

    def call(x, factor):
        return applied(MADE[how](factor), x)

    compiled = foregrad.compile(call, backend="eager", on_unsupported="eager")
    for factor in (2.0, 3.0):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert torch.equal(compiled(torch.ones(2), factor), call(torch.ones(2), factor))
    assert foregrad.explain_recompiles(compiled).eager
