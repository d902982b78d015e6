"""What a function asks a wrapper subclass among its inputs besides values, and what it hangs onto it."""

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedError, UnsupportedSideEffectError
from tests.classes.wrappers import TwoTensor, Unit, described, nested, quantised, two


def unit(*size):
    return Unit(torch.randn(size), 1)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.5),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5, foreach=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.5),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.5, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.5),
}


def compiled(function):
    return foregrad.compile(function, backend="eager", on_unsupported="raise")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_over_parameters_that_are_wrappers(name):
    seen = []
    for wrap in (lambda function: function, compiled):
        torch.manual_seed(0)
        weight, bias = torch.nn.Parameter(two(2, 3)), torch.nn.Parameter(torch.randn(3))
        optimizer = OPTIMIZERS[name]([weight, bias])
        step = wrap(lambda optimizer=optimizer: optimizer.step())
        for _ in range(3):
            weight.grad, bias.grad = two(2, 3), torch.randn(3)
            step()
            seen.append(described([weight, bias]))
    assert seen[:3] == seen[3:]
    assert seen[0] != seen[1]


def test_gradients_that_are_there_are_read_in_each_call():
    weight = torch.nn.Parameter(two(2, 2))

    def step():
        with torch.no_grad():
            if weight.grad is not None:
                weight.sub_(weight.grad)

    fast = compiled(step)
    for grad in (None, two(2, 2), two(2, 2), None, two(2, 2)):
        weight.grad = grad
        expected = described([(weight if grad is None else weight - grad).detach()])
        fast()
        assert described([weight.detach()]) == expected


QUESTIONS = {
    "version": lambda w: w._version,
    "is_leaf": lambda w: w.is_leaf,
    "grad_fn": lambda w: type(w.grad_fn).__name__,
    "no_base": lambda w: w._base is None,
    "hooks": lambda w: w._backward_hooks is None,
    "retains": lambda w: w.retains_grad,
    "grad": lambda w: w.grad is None,
    "hung": lambda w: getattr(w, "factor", None),
}


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("make", [two, quantised])
def test_what_is_asked_of_an_argument_is_answered_as_eager_does_and_guarded(question, make):
    ask = QUESTIONS[question]

    def f(w):
        return w * 2, ask(w)

    leaf, other = make(2, 3, grad=True), make(2, 3, grad=True)
    other.factor = 3
    other.register_hook(lambda g: g)
    computed = leaf * 1
    computed.retain_grad()
    values = [leaf, other, make(2, 3), computed, leaf]
    fast = compiled(f)
    for value in values:
        assert fast(value)[1] == f(value)[1]
    with torch.no_grad():
        if make is two:
            leaf.add_(1)
    assert fast(leaf)[1] == f(leaf)[1]


def test_versions_move_with_writes_inside():
    def f(w):
        before = w._version
        with torch.no_grad():
            w.add_(1)
        return w * 2, before, w._version

    w = two(2, 2)
    assert compiled(f)(w)[1:] == (0, 1)
    assert w._version == 1


@pytest.mark.parametrize("is_leaf", [True, False])
def test_hooks_and_retained_gradients_stay_on_an_argument(is_leaf):
    def hooked(w):
        w.register_hook(lambda g: g * 2)
        return (w * 3).sum()

    def retained(w):
        w.retain_grad()
        return (w * 3).sum()

    for f in (hooked, retained):
        seen = []
        for call in (f, compiled(f)):
            leaf = two(2, 2, grad=True)
            w = leaf if is_leaf else leaf * 1
            for _ in range(2):
                y = call(w)
            (y + (w * 7).sum()).backward()
            seen.append(described([leaf.grad, w.grad if f is retained else None]))
        assert seen[0] == seen[1]


def test_what_stays_on_a_wrapper_after_the_call_is_refused_by_name():
    def hangs(w):
        w.factor = 2
        return w * 2

    def gives_gradient(w):
        w.grad = w.detach() * 2
        return w * 2

    def hooks(w):
        w.register_post_accumulate_grad_hook(print)
        return w * 2

    def hangs_on_a_result(w):
        y = w * 2
        y.factor = 2
        return y

    on_result = hangs_on_a_result, "factor is set on a TwoTensor that is a result"
    for f, said in (
        on_result,
        (hangs, "args[0].factor"),
        (gives_gradient, "`.grad` of args[0]"),
        (hooks, "put on args[0]"),
    ):
        with pytest.raises(UnsupportedSideEffectError) as raised:
            compiled(f)(two(2, 2, grad=True))
        assert said in str(raised.value)
    plain = torch.ones(2, requires_grad=True)
    with pytest.raises(UnsupportedError, match="post_accumulate"):
        compiled(hooks)(plain)


def marked(w):
    w.requires_grad_()
    return w * w


def marked_for_a_while(w):
    before = w * 2
    w.requires_grad_()
    between = w * 3
    w.requires_grad_(False)
    return before, between, w * 4


def left_out(w):
    used = w * w
    w.requires_grad_(False)
    frozen = w * 3
    w.requires_grad_()
    return used, frozen, w * 5


def frozen(w):
    used = w * 2
    w.requires_grad_(False)
    return used, w * 3


def gradient_inside(w):
    w.requires_grad_()
    (gradient,) = torch.autograd.grad((w * w * w).sum(), w, create_graph=True)
    return (gradient * gradient).sum()


def marked_in_place(w):
    return w.requires_grad_()


def assigned(w):
    w.data = w.detach() * 2
    return w * 3


def detached(w):
    used = w * 2
    w.detach_()
    return used, w * 3, w.is_leaf


CHANGES = [
    *((f, make) for make in (two, nested, unit) for f in (marked, marked_for_a_while, left_out, gradient_inside)),
    (marked_in_place, two),
    *((f, lambda *size: two(*size, grad=True)) for f in (left_out, frozen)),
    (detached, lambda *size: two(*size, grad=True) * 1),
]


def observed(call, make):
    seen = []
    for seed in range(3):
        torch.manual_seed(seed)
        w = make(2, 3)
        given = call(w)
        results = list(given) if isinstance(given, tuple) else [given]
        seen.append([described([results, w]), w._version])
        losses = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        if losses:
            torch.autograd.backward(losses, [torch.ones_like(loss.detach()) for loss in losses])
        seen.append(described(w.grad) if w.is_leaf else None)
    return seen


@pytest.mark.parametrize(("f", "make"), CHANGES)
def test_a_change_of_the_history_of_an_argument_is_eager_by_name(f, make):
    said = r"`(requires_grad_|detach_)\(\)` at \S*test_subclasses_attributes.py:\d+ .*do it outside"
    call = foregrad.compile(f, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match=said) as warned:
        found = observed(call, make)
    assert found == observed(f, make)
    assert len(warned) == 1
    with pytest.raises(UnsupportedError, match=said):
        foregrad.capture(f, make(2, 3))


@pytest.mark.parametrize("make", [two, lambda *size: two(*size, grad=True), lambda *size: two(*size, grad=True) * 1])
def test_other_values_given_to_an_argument(make):
    assert observed(compiled(assigned), make) == observed(assigned, make)


def test_a_history_that_stays_as_it_is():
    def f(w, x):
        made = (x * 2).detach_()
        return w.requires_grad_() * 2, x.detach_() * 3, made.requires_grad_() * 2

    args = two(2, 3, grad=True), two(2, 3)
    assert described(list(compiled(f)(*args))) == described(list(f(*args)))


def test_a_view_that_is_marked_is_refused():
    with pytest.raises(UnsupportedError, match=r"`requires_grad_\(\)` at .* a view"):
        compiled(lambda w: (w.detach() * 2)[0].requires_grad_())(two(2, 2, grad=True) * 1)


def hook_before_a_view(y):
    y.register_hook(lambda g: g * 2)
    return y[1:]


def hook_on_a_view(y):
    row = y[0]
    row.register_hook(lambda g: g * 2)
    return row


def hook_before_a_view_of_it(y):
    row = y[0]
    row.register_hook(lambda g: g * 2)
    return row[1:]


def hook_after_a_view(y):
    row = y[0]
    y.register_hook(lambda g: g * 2)
    return row


def hook_beside_a_view(y):
    y[0].register_hook(lambda g: g * 2)
    return y[1:]


HOOKS = [hook_before_a_view, hook_on_a_view, hook_before_a_view_of_it, hook_after_a_view, hook_beside_a_view]


@pytest.mark.parametrize("f", HOOKS)
@pytest.mark.parametrize("make", [two, nested, unit])
def test_a_hook_is_not_lost_where_a_view_is_returned(f, make):
    def gradients(call):
        seen = []
        for seed in range(2):
            torch.manual_seed(seed)
            w = make(2, 3).requires_grad_()
            result = call(w)
            result.backward(torch.ones_like(result.detach()))
            seen.append(described(w.grad))
        return seen

    def doubled(w):
        return f(w * 2)

    assert gradients(compiled(doubled)) == gradients(doubled)


def test_a_hook_that_does_something_with_a_wrapper_is_eager_by_name():
    def f(w, seen):
        y = w * 2
        y.register_hook(lambda g: seen.append(described(g)))
        return y.sum()

    said = r"the hook `.*` registered at \S*test_subclasses_attributes.py:\d+ .* on a TwoTensor, and no graph can hold this. Put the hook on"
    call = foregrad.compile(lambda w: f(w, seen), backend="eager", on_unsupported="eager")
    seen = []
    with pytest.warns(ForegradWarning, match=said):
        call(two(2, 3, grad=True)).backward(TwoTensor(torch.ones(()), torch.ones(())))
    assert len(seen) == 1
