"""Ordinary programs of somebody else's that once differed from eager without a word, as rules."""

import pprint
import random
import sys
import types
import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad.errors import ForegradWarning


def same(make, calls, *, eager_for=None):
    """`calls(f)` observes the same of the function that `make()` gives compiled as eagerly; `eager_for`: the warning."""
    random.seed(0)
    expected = calls(make())
    random.seed(0)
    compiled = foregrad.compile(make(), backend="eager", on_unsupported="eager")
    if eager_for is None:
        assert calls(compiled) == expected
        assert foregrad.explain_recompiles(compiled).eager_calls == 0
    else:
        with pytest.warns(ForegradWarning, match=eager_for):
            assert calls(compiled) == expected


def test_a_gradient_that_is_there_no_more_is_seen():
    def observed(wrap):
        w = torch.ones(2, requires_grad=True)
        f = wrap(lambda x: x * w * (1 if w.grad is None else 2))
        found = []
        for i in range(5):
            if i == 3:
                w.grad = None
            y = f(torch.ones(2))
            y.sum().backward()
            found.append(y[0].item())
        return found

    assert observed(lambda f: foregrad.compile(f, backend="eager")) == observed(lambda f: f)


def test_a_state_of_random_that_is_put_back_makes_the_call_eager():
    def f(x):
        state = random.getstate()
        k = random.random()
        random.setstate(state)
        return x * k + random.random()

    same(lambda: f, lambda call: [(call(torch.ones(1)).item(), random.random()) for _ in range(3)], eager_for="state")


def test_what_pprint_prints_is_printed_in_each_call(capsys):
    def f(x):
        pprint.pprint({"n": x.shape[0]})  # noqa: T203
        return x * 2

    with pytest.warns(ForegradWarning, match="pprint"):
        call = foregrad.compile(f, backend="eager", on_unsupported="eager")
        for _ in range(3):
            call(torch.ones(2))
    assert capsys.readouterr().out == "{'n': 2}\n" * 3


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, a, b):
        return (0 if a is None else a) + (50 if b is None else b)


def gradient_of(call, of=lambda results: results[0]):
    x = torch.ones(2, requires_grad=True)
    of(call(x)).sum().backward()
    return x.grad.tolist()


def test_a_backward_that_is_told_of_missing_gradients_makes_several_results_eager():
    same(lambda: lambda x: Pair.apply(x), gradient_of, eager_for="receive a gradient")


def test_one_result_of_such_a_function_is_compiled():
    same(lambda: lambda x: Pair.apply(x)[0] * 2, lambda call: gradient_of(call, lambda y: y))


class Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, options):
        ctx.options = options
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * ctx.options.get("m", 1), None


def test_an_object_that_a_context_holds_is_read_in_the_backward():
    def make():
        options = {}
        return (lambda x: Held.apply(x, options)), options

    def observed(f, options):
        found = []
        for m in (1.0, 10.0, 20.0):
            x = torch.ones(1, requires_grad=True)
            y = f(x)
            options["m"] = m
            y.sum().backward()
            found.append(x.grad.item())
        return found

    expected = observed(*make())
    f, options = make()
    call = foregrad.compile(f, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match="the context of `Held` holds"):
        assert observed(call, options) == expected


def test_values_that_a_context_holds_are_compiled():
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, k):
            ctx.k, ctx.sizes = k, [*x.shape]
            return x * k

        @staticmethod
        def backward(ctx, g):
            return g * ctx.k * len(ctx.sizes), None

    same(lambda: lambda x: Scaled.apply(x, 3.0), lambda call: gradient_of(call, lambda y: y))


def test_another_backward_of_a_function_is_seen():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, g):
            return g * 2

    call = foregrad.compile(lambda x: Doubled.apply(x), backend="eager")
    assert gradient_of(call, lambda y: y) == [2.0, 2.0]
    Doubled.backward = staticmethod(lambda ctx, g: g * 5)
    assert gradient_of(call, lambda y: y) == [5.0, 5.0]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_of_what_needs_no_gradient_gives_none():
    layer = torch.nn.Linear(3, 3)

    def f(x):
        return checkpoint(layer, x, use_reentrant=True).relu()

    call = foregrad.compile(f, backend="eager")
    for needs in (True, False):
        x = torch.ones(2, 3, requires_grad=needs)
        assert call(x).requires_grad == f(x).requires_grad == needs


def test_what_hangs_on_a_tensor_is_looked_into():
    def observed(wrap):
        weight = torch.ones(2)
        weight.table, weight.object = {"k": 1.0, "n": 0}, types.SimpleNamespace(k=1.0)

        def f(x):
            weight.table["n"] += 1
            return (x * weight).sum() * weight.table["k"] * weight.object.k

        f, found = wrap(f), []
        for step in range(4):
            if step == 2:
                weight.table["k"] = 3.0
            if step == 3:
                weight.object.k = 5.0
            found.append((f(torch.ones(2)).item(), weight.table["n"]))
        return found

    assert observed(lambda f: foregrad.compile(f, backend="eager")) == observed(lambda f: f)


@pytest.mark.parametrize("tell", [id, hash])
def test_what_tells_one_argument_from_another_is_asked_in_each_call(tell):
    def make():
        seen = {}

        def f(x):
            seen[tell(x)] = len(seen)
            return x * len(seen)

        return f

    inputs = [torch.ones(2) for _ in range(3)]
    same(make, lambda call: [call(x).tolist() for x in inputs], eager_for=f"calls `{tell.__name__}` of an argument")


def test_what_tells_one_parameter_from_another_is_compiled():
    layer = torch.nn.Linear(2, 2)
    rates = {id(p): rate for rate, p in enumerate(layer.parameters(), 2)}
    same(lambda: lambda x: layer(x) * rates[id(layer.bias)], lambda call: [call(torch.ones(2)).tolist() for _ in "ab"])


def test_the_id_of_an_object_among_the_arguments_is_asked_in_each_call():
    class Thing:
        pass

    things = [Thing() for _ in range(3)]
    observed = lambda call: [call(torch.ones(1), t)[1] == id(t) for t in things]
    same(lambda: lambda x, t: (x * 2, id(t)), observed, eager_for="calls `id` of an argument")


def test_attributes_that_a_function_or_class_lacks_at_first():
    def make():
        class Held:
            pass

        def f(x):
            f.calls = getattr(f, "calls", 0) + 1
            return x * f.calls + getattr(Held, "more", 0)

        f.held = Held
        return f

    def make_without():
        f = make()
        del f.held  # nothing is there in the first call
        return f

    same(make_without, lambda call: [call(torch.ones(1)).item() for _ in range(4)])

    def given_later(call):
        found = [call(torch.ones(1)).item()]
        call.held.more = 5
        return [*found, call(torch.ones(1)).item()]

    same(make, given_later)


def test_each_code_names_others_in_one_module():
    def make():
        module = types.ModuleType("held_module")
        module.factor = 2.0
        module.scaled = lambda x: x * module.factor
        f = lambda x: module.scaled(x)
        f.module = module
        return f

    def calls(call):
        module = call.module
        found = [call(torch.ones(1)).item()]
        module.factor = 3.0
        return [*found, call(torch.ones(1)).item()]

    same(make, calls)


def test_a_backward_reads_its_own_class_when_it_runs():
    def make():
        class Scaled(torch.autograd.Function):
            factor = 1.0

            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                return gradient * Scaled.factor

        f = lambda x: Scaled.apply(x) * 2
        f.scaled = Scaled
        return f

    def calls(call):
        scaled, found = call.scaled, []
        for factor in (3.0, 5.0, 7.0):
            x = torch.ones(1, requires_grad=True)
            y = call(x)
            scaled.factor = factor
            y.backward()
            found.append(x.grad.item())
        return found

    same(make, calls)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("action", ["always", "default", "error"])
def test_a_warning_is_given_as_the_filters_of_each_call_say(level, action):
    def f(x):
        warnings.warn(f"an old way, {x.shape[0]}", DeprecationWarning, stacklevel=level)
        return x * 2

    def run(function):
        vars(sys.modules[__name__]).pop("__warningregistry__", None)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.filterwarnings(action, message="an old way")
            for n in (2, 3, 2):
                try:
                    function(torch.ones(n))
                except DeprecationWarning as error:
                    assert action == "error" and str(error) == f"an old way, {n}"
        return [(str(w.message), w.category, w.filename, w.lineno) for w in caught if w.category is DeprecationWarning]

    compiled = foregrad.compile(f, backend="eager", on_unsupported="eager")
    assert run(compiled) == run(f)
    if action != "error":
        assert foregrad.explain_recompiles(compiled).eager_calls == 0
