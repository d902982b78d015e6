"""Gradients that eager leaves out, and effects of backwards, each as often as in eager."""

import warnings

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import foregrad
from tests.covering import each

log = []
counter = torch.zeros(())


class OneOfTwo(torch.autograd.Function):
    """None for its second input; a region, as it appends to a list."""

    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(p)
        return x * p

    @staticmethod
    def backward(ctx, gradient):
        log.append("one")
        (p,) = ctx.saved_tensors
        return gradient * p, None


class ByValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.save_for_backward(x, p)
        return x * p

    @staticmethod
    def backward(ctx, gradient):
        x, p = ctx.saved_tensors
        log.append("value")
        return gradient * p, None if gradient.sum() > 0 else gradient * x


class NotMaterialized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.set_materialize_grads(False)
        return x * p, x + p

    @staticmethod
    def backward(ctx, first, second):
        log.append((first is None, second is None))
        return first, second


@foregrad.eager_region
def two_results(x, p):
    return x * 2, p.sin()


@foregrad.eager_region
def doubled(p):
    return p * 2


@foregrad.eager_region
def one_of_two(x, p):
    return OneOfTwo.apply(x, p)


def behind_another(x, p):
    first, second = NotMaterialized.apply(p, x)
    return OneOfTwo.apply(first, second)


PROGRAMS = {
    "of a leaf": lambda x, p: OneOfTwo.apply(x.sin(), p),
    "behind operators": lambda x, p: OneOfTwo.apply(x, (p * 2).cos()),
    "where one is added": lambda x, p: OneOfTwo.apply(x, p) + p.sin(),
    "by the value of a gradient": lambda x, p: (ByValue.apply(x, p * 1), -ByValue.apply(x, p)),
    "of a result": lambda x, p: NotMaterialized.apply(x, p),
    "of one result": lambda x, p: NotMaterialized.apply(x, p)[1],
    "of a marked result": two_results,
    "in a marked region": lambda x, p: one_of_two(x, p * 1),
    "behind another region": lambda x, p: OneOfTwo.apply(x, doubled(p)),
    "behind another Function": behind_another,
    "behind one that materializes": lambda x, p: OneOfTwo.apply(x, OneOfTwo.apply(p, x)),
    "past an infinite derivative": lambda x, p: OneOfTwo.apply(x, (p * 0).log()) + p,
}


def _gradients(function, ask):
    x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
    p = torch.tensor([2.0, 3.0, 4.0], requires_grad=True)
    results = function(x, p)
    results = results if isinstance(results, tuple) else (results,)
    found = []
    for some in (results, results[:1], results[1:]):
        if some:
            found.append(ask(sum(result.sum() for result in some), x, p))
    return [[None if g is None else g.tolist() for g in gradients] for gradients in found]


def _backward(loss, x, p):
    x.grad = p.grad = None
    loss.backward(retain_graph=True)
    return x.grad, p.grad


def _grad(loss, x, p):
    return torch.autograd.grad(loss, [x, p], allow_unused=True, retain_graph=True)


def _materialized(loss, x, p):
    return torch.autograd.grad(loss, [x, p], retain_graph=True, materialize_grads=True)


def _of_one(loss, x, p):
    return torch.autograd.grad(loss, [p], allow_unused=True, retain_graph=True)


@pytest.mark.parametrize(("name", "ask"), each(PROGRAMS, [_backward, _grad, _materialized, _of_one], times=2))
def test_an_absent_gradient_stays_absent(name, ask):
    function = PROGRAMS[name]
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    log.clear()
    expected = [_gradients(function, ask) for _ in range(2)], list(log)
    log.clear()
    assert str(([_gradients(compiled, ask) for _ in range(2)], list(log))) == str(expected)  # NaN is NaN


def test_other_compilers_get_the_parts_around_the_call():
    sizes = []

    def compiler(gm, example_inputs):
        sizes.append(len(gm.graph.nodes))
        return gm

    function = PROGRAMS["by the value of a gradient"]
    compiled = foregrad.compile(function, backend=compiler, on_unsupported="raise")
    assert _gradients(compiled, _backward) == _gradients(function, _backward)
    assert len(sizes) > 2


def test_an_optimizer_leaves_a_parameter_without_a_gradient():
    p = torch.nn.Parameter(torch.ones(3))
    compiled = foregrad.compile(lambda x: OneOfTwo.apply(x, p), backend="eager")
    optimizer = torch.optim.AdamW([p], weight_decay=0.5)
    compiled(torch.ones(3, requires_grad=True)).sum().backward()
    optimizer.step()
    assert p.grad is None
    assert torch.equal(p, torch.ones(3))


def test_an_absent_gradient_inside_a_compiled_function_is_absent():
    def step(x, p):
        return torch.autograd.grad(OneOfTwo.apply(x, p).sum(), [x, p], allow_unused=True)[1]

    compiled = foregrad.compile(step, backend="eager", on_unsupported="raise")
    assert compiled(torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)) is None


def test_a_hook_that_would_get_none_is_an_error_by_name():
    def hooked(x, p):
        y = p * 1
        y.register_hook(lambda gradient: log.append(gradient is None))
        return OneOfTwo.apply(x, y)

    compiled = foregrad.compile(hooked, backend="eager", on_unsupported="raise")
    with pytest.raises(foregrad.errors.UnsupportedSideEffectError, match="would get None"):
        _gradients(compiled, _backward)


# ---------------------------------------------------------------------------------------------- effects of backwards


@torch.library.custom_op("absent_gradients::note", mutates_args=())
def note(x: torch.Tensor) -> None:
    log.append("note")


@note.register_fake
def _(x):
    return None


@torch.library.custom_op("absent_gradients::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    log.append("noted")
    return x.clone()


@noted.register_fake
def _(x):
    return torch.empty_like(x)


torch.fx.node.has_side_effect(torch.ops.absent_gradients.noted.default)


@torch.library.custom_op("absent_gradients::count", mutates_args=("c",))
def count(x: torch.Tensor, c: torch.Tensor) -> None:
    c.add_(1)


def _function(effect):
    class Acting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, gradient):
            x, w = ctx.saved_tensors
            effect(gradient)
            return gradient * w, gradient * x

    return lambda x, w, z: (Acting.apply(x.sin(), w).exp(), Acting.apply(z * 2, w) * z)


class Noting(torch.autograd.Function):
    """Traced, not a region."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        torch.ops.absent_gradients.noted(gradient)
        return gradient * 2


class NotingNothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        torch.ops.absent_gradients.note(gradient)
        return gradient * 2


def traced(x, w, z):
    return Noting.apply(x.sin()) * w, Noting.apply(z) * w


def traced_without_results(x, w, z):
    return NotingNothing.apply(x.sin()) * w, NotingNothing.apply(z) * w


EFFECTS = {
    "traced": traced,
    "traced, without results": traced_without_results,
    "an operator without results": _function(lambda g: note(g)),
    "an operator with effects": _function(lambda g: noted(g)),
    "a write": _function(lambda g: count(g, counter)),
    "a print": _function(lambda g: print("backward")),
    "a list": _function(lambda g: log.append("list")),
    "a check": _function(lambda g: torch._assert_async((g < 100).all())),
    "a draw": _function(lambda g: torch.rand(2)),
}
WAYS = {
    "all": lambda a, b, x, z: (a + b).sum().backward(),
    "first": lambda a, b, x, z: a.sum().backward(),
    "second": lambda a, b, x, z: b.sum().backward(),
    "inputs": lambda a, b, x, z: (a + b).sum().backward(inputs=[x]),
    "other inputs": lambda a, b, x, z: (a + b).sum().backward(inputs=[z]),
    "twice": lambda a, b, x, z: [(a + b).sum().backward(retain_graph=True) for _ in range(2)],
    "in parts": lambda a, b, x, z: [a.sum().backward(retain_graph=True), b.sum().backward()],
}


@pytest.mark.parametrize(("effect", "way"), each(EFFECTS, WAYS, times=4))
def test_an_effect_of_a_backward_happens_as_often_as_in_eager(effect, way, capsys):
    def observed(function):
        found = []
        torch.manual_seed(0)
        log.clear()
        counter.zero_()
        for _ in range(2):
            x, w, z = (torch.tensor([value, 0.5]).requires_grad_() for value in (0.1, 0.2, 0.3))
            WAYS[way](*function(x, w, z), x, z)
            found.append([None if t.grad is None else t.grad.tolist() for t in (x, w, z)])
        return found, list(log), float(counter), capsys.readouterr().out, torch.rand(1).item()

    function = EFFECTS[effect]
    expected = observed(function)
    assert observed(foregrad.compile(function, backend="eager", on_unsupported="raise")) == expected


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_effects_of_a_traced_backward_behind_dynamo():
    for way in WAYS.values():
        found = []
        compiled = torch.compile(traced, backend="foregrad", options={"backend": "eager"})
        for function in (traced, compiled):
            log.clear()
            x, w, z = (torch.full((2,), value, requires_grad=True) for value in (0.1, 0.2, 0.3))
            way(*function(x, w, z), x, z)
            found.append([*log, *(None if t.grad is None else t.grad.tolist() for t in (x, w, z))])
        assert found[0] == found[1]


# ---------------------------------------------------------------------------------------------- checkpoints


@foregrad.eager_region
def marked(x):
    log.append("marked")
    return x.sin()


class Logged(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        log.append("forward")
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        log.append("backward")
        (x,) = ctx.saved_tensors
        return gradient * x.cos()


def _noted_sine(x):
    note(x)
    return x.sin()


def _printed_sine(x):
    torch.ops.aten._print("sine")
    return noted(x).detach() * 0 + x.sin()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("part", [marked, Logged.apply, _noted_sine, _printed_sine])
def test_what_a_checkpointed_part_does_it_does_again_in_the_backward(part, use_reentrant, capfd):
    def function(x):
        return checkpoint(lambda t: part(t * 2).exp(), x * 1, use_reentrant=use_reentrant).sum()

    def observed(function):
        log.clear()
        for _ in range(2):
            x = torch.tensor([0.1, 0.2], requires_grad=True)
            loss = function(x)
            log.append("between")
            loss.backward()
        return list(log), x.grad.tolist(), capfd.readouterr().out

    expected = observed(function)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", foregrad.errors.ForegradWarning)
        assert observed(foregrad.compile(function, backend="eager", on_unsupported="eager")) == expected
    with pytest.raises(foregrad.errors.UnsupportedSideEffectError, match="checkpointed part"):
        foregrad.compile(function, backend="eager", on_unsupported="raise")(torch.ones(2, requires_grad=True))
