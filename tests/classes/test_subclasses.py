"""Traceable wrapper subclasses: graphs hold plain tensors, and outside everything is as in eager."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedError

from .wrappers import Converting, Half, Logging, Quantised, Unit, described, nested, quantised, two


def compiled(f, **settings):
    return foregrad.compile(f, backend="eager", on_unsupported="raise", **settings)


def twice(f, make_args, call):
    """What two calls and their backwards give and leave behind."""
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        args = make_args()
        versions = [arg._version for arg in args]
        result = call(*args)
        results = result if isinstance(result, tuple) else (result,)
        found += [described(r) for r in results]
        found += [[r is arg for arg in args] for r in results]
        losses = [r.float().sum() for r in results if r.requires_grad]
        if losses:
            sum(losses[1:], losses[0]).backward(
                torch.ones_like(losses[0].detach()) if type(losses[0]) is not torch.Tensor else None
            )
        found += [described(arg.grad) for arg in args if arg.is_leaf]
        found += [described(arg) for arg in args] + [arg._version - v for arg, v in zip(args, versions, strict=True)]
    return found


def same(f, *makers, graphs=1):
    def make_args():
        return [make() for make in makers]

    fast = compiled(f)
    assert twice(f, make_args, fast) == twice(f, make_args, f)
    assert len(fast.foregrad.specializations) == graphs
    return fast


PROGRAMS = {
    "forward_only": (lambda a, b: (a @ b, a + 1), lambda: two(3, 3), lambda: torch.randn(3, 3)),
    "two_results": (lambda a, b: ((a @ b).relu(), a * 2), lambda: two(3, 3, grad=True), lambda: torch.randn(3, 3)),
    "two_wrappers": (lambda a, b: ((a @ b).sin(), b.sum()), lambda: two(3, 3, grad=True), lambda: two(3, 3, grad=True)),
    "nested": (lambda a, b: (a @ b).relu(), lambda: nested(3, 3, grad=True), lambda: torch.randn(3, 3)),
    "units": (lambda a, b: a * b, lambda: Unit(torch.randn(3), 1).requires_grad_(), lambda: Unit(torch.ones(3), 2)),
    "quantised_weight": (F.linear, lambda: torch.randn(2, 3, requires_grad=True), lambda: quantised(4, 3)),
    "gradient_that_is_plain": (
        lambda w, x: F.linear(x, w).relu(),
        lambda: quantised(3, 3, grad=True),
        lambda: torch.randn(2, 3, requires_grad=True),
    ),
    "the_input_itself": (lambda a: (a, a * 2), lambda: two(3, grad=True)),
    "views_of_results": (lambda a: ((a * 2)[0], (a * 2).t()), lambda: two(3, 3, grad=True)),
    "made_inside": (lambda a, b: TwoTensor(a, b) * 2, lambda: torch.randn(3), lambda: torch.randn(3)),
    "tensor_inside": (lambda a: a.a * 2, lambda: two(3, grad=True)),
    "asked_for_its_class": (lambda a: a * 2 if type(a) is TwoTensor else a, lambda: two(3)),
    "asked_for_being_a_leaf": (lambda a: a * 2 if a.is_leaf else a * 3, lambda: two(3, grad=True)),
    "no_leaf": (lambda a: a * 2 if a.is_leaf else a * 3, lambda: two(3, grad=True) * 1),
    "detached": (lambda a: (a.detach() * 2, a * 2), lambda: two(3, grad=True)),
    "dropout": (lambda a: F.dropout(a, 0.5), lambda: two(9, grad=True)),
    "written_in_the_middle": (lambda a: (a * 2).add_(1), lambda: two(3, grad=True)),
    "gradient_inside": (
        lambda a: torch.autograd.grad((a * a).sum(), a, create_graph=True)[0] * 2,
        lambda: two(3, grad=True),
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_same_as_eager(name):
    f, *makers = PROGRAMS[name]
    same(f, *makers)


def test_a_graph_holds_plain_tensors_only():
    text = str(foregrad.capture(lambda w, x: F.linear(x, w).sum(), two(3, 2, grad=True), torch.randn(4, 2)))
    assert "args[0].a" in text
    assert "tangent of out.b" in text
    assert "TwoTensor" not in text


def test_a_nested_one_is_taken_apart_to_the_ground():
    joint = foregrad.capture(lambda a: a * 2, nested(3))
    assert [str(i.slot) for i in joint.signature.inputs] == [f"args[0].{a}.{b}" for a in "ab" for b in "ab"]


def test_a_write_reaches_the_tensors_inside():
    def f(a):
        a.mul_(2)
        return a + 1

    same(f, lambda: two(3))


def written_without_gradients(a, b):
    with torch.no_grad():
        a.copy_(b)
        b.add_(1)
    return a * b


def written_through_data(a):
    a.data.mul_(2)
    return a + 1


def written_through_views(a):
    a[0].mul_(2)
    a.view(12).add_(1)
    return a * 2, a[1] + 1


def test_writes():
    same(written_without_gradients, lambda: two(3, grad=True), lambda: two(3))
    same(written_through_data, lambda: two(3, grad=True))
    same(written_through_views, lambda: two(4, 3))


def test_more_than_a_write_is_refused():
    def f(a):
        return a.t_() * 2

    def make():
        return two(3, 3)

    with pytest.raises(
        UnsupportedError,
        match=r"a TwoTensor from outside is written to with gradients, or resized, at \S*test_subclasses.py:\d+",
    ):
        compiled(f)(make())
    found = []
    for call in (foregrad.compile(f, backend="eager", on_unsupported="eager"), f):
        torch.manual_seed(0)
        a = make()
        with contextlib.nullcontext() if call is f else pytest.warns(ForegradWarning, match="TwoTensor"):
            found.append((described(call(a)), described(a), a._version))
    assert found[0] == found[1]


def eager_by_name(f, make, match):
    """What two calls and their backwards give is eager's, with one warning."""
    fast = foregrad.compile(f, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match=match) as warned:
        found = twice(f, make, fast)
    assert found == twice(f, make, f)
    assert len(warned) == 1
    assert not fast.foregrad.specializations
    with pytest.raises(UnsupportedError, match=match):
        foregrad.capture(f, *make())


def without_gradients(a):
    with torch.no_grad():
        return a[0]


OF_AN_ARGUMENT = {
    "view": lambda a: a.view(-1),
    "row": lambda a: (a * 2, a[0]),
    "transposed": lambda a: a.t(),
    "parts": lambda a: a.split(2),
    "taken_without_gradients": without_gradients,
    "detached": lambda a: (a * a, a.detach()),
    "a_view_of_it_detached": lambda a: (a * a, a.detach()[0]),
}


@pytest.mark.parametrize("make", [two, nested])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", OF_AN_ARGUMENT)
def test_a_view_of_an_argument_that_is_returned_is_eager_by_name(name, grad, make):
    said = r"a result is (a view|one of several views) of a TwoTensor.* at \S*test_subclasses.py:\d+ .*return copies"
    eager_by_name(OF_AN_ARGUMENT[name], lambda: [make(4, 3, grad=grad) * 1], said)


def test_one_of_several_plain_tensors_that_are_views_of_a_wrapper_is_refused():
    with pytest.raises(UnsupportedError, match="one of several views of a Quantised"):
        compiled(lambda a: a.split(2)[0])(quantised(4, 3, grad=True))


RESULTS_OF_ONE = {
    "views": lambda b: (b[0], b[1]),
    "itself_and_a_view": lambda b: (b, b.t(), b[0]),
    "a_view_and_itself": lambda b: (b.view(-1), b),
    "twice": lambda b: (b, b),
    "a_view_twice": lambda b: (lambda view: (view, view))(b[0]),
    "chunks": lambda b: b.chunk(2),
    "detached": lambda b: (b.detach(), b),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", RESULTS_OF_ONE)
def test_results_that_are_one_or_views_of_one_are_eager_by_name(name, grad):
    def f(a):
        return RESULTS_OF_ONE[name](a * 2)

    said = r"(two results are one TwoTensor, views of one|one of several views of a TwoTensor).* at \S*test_subclasses.py:\d+ .*return copies"
    eager_by_name(f, lambda: [two(2, 3, grad=grad)], said)


@pytest.mark.parametrize("view", [lambda y: y.view(-1), lambda y: y.t(), lambda y: y[0]])
def test_a_write_to_a_returned_view_of_what_the_backward_needs_is_eagers_error(view):
    def f(a):
        y = a.exp()
        return view(y), (y * y).sum()

    for call in (f, compiled(f)):
        shown, loss = call(two(2, 3, grad=True))
        with torch.no_grad():
            shown.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward(torch.ones_like(loss.detach()))


def test_other_metadata_get_a_graph_of_their_own():
    fast = compiled(lambda a: a * 2)
    found = [fast(Unit(torch.ones(3), metres)).metres for metres in (1, 2, 1)]
    assert found == [1, 2, 1]
    assert len(fast.foregrad.specializations) == 2


def test_another_class_gets_a_graph_of_its_own():
    fast = compiled(lambda a: a * 2)
    for a in (two(3), torch.randn(3), nested(3), two(3, grad=True), two(4)):
        assert described(fast(a)) == described(a * 2)
    assert len(fast.foregrad.specializations) == 5


def test_what_a_class_does_besides_is_done_in_each_call(monkeypatch):
    def f(a):
        return a.sin().cos()

    def noted(function, a):
        Logging.seen.clear()
        result = function(a)
        return described(result), list(Logging.seen)

    monkeypatch.setattr(Logging, "notes", True)
    a = Logging(torch.randn(3))
    fast = foregrad.compile(f, backend="eager", on_unsupported="raise")
    for _ in range(3):
        assert noted(fast, a) == noted(f, a)


def test_what_a_class_does_besides_in_a_backward_is_eager_by_name(monkeypatch):
    def f(a):
        return a.sin()

    monkeypatch.setattr(Logging, "notes", True)
    a = Logging(torch.randn(3)).requires_grad_()
    with pytest.warns(ForegradWarning, match=r"the backward of `f` changes Logging.seen"):
        foregrad.compile(f, backend="eager", on_unsupported="eager")(a)


def test_the_same_wrapper_twice():
    def f(a, b):
        return a * b

    fast = compiled(f)
    a, b = two(3, grad=True), two(3, grad=True)
    for args in ((a, b), (a, a), (b, a)):
        for fn in (fast, f):
            a.grad = b.grad = None
            fn(*args).sum().backward(TwoTensor(torch.tensor(1.0), torch.tensor(2.0)))
            if fn is fast:
                expected = described(a.grad), described(b.grad)
        assert expected == (described(a.grad), described(b.grad))


def test_a_gradient_with_other_metadata_is_converted_by_its_class():
    a = Converting(torch.ones(3), 1).requires_grad_()
    compiled(lambda a: a * 2)(a).backward(Converting(torch.ones(3), 5))
    assert (a.grad.metres, a.grad.values_.tolist()) == (1, [2.0, 2.0, 2.0])


def halved(*size, grad=False):
    return Half(torch.randn(size), True).requires_grad_(grad)


def test_a_gradient_that_holds_tensors_of_another_size():
    same(lambda a, b: a * b.exp(), lambda: halved(2, 3, grad=True), lambda: halved(2, 3, grad=True))
    same(lambda a: (a * 2, a.sin()), lambda: halved(2, 3, grad=True) * 1)

    def of(fn):
        a = Half(torch.ones(2), True).requires_grad_()
        (first,) = torch.autograd.grad((fn(a)), a, Half(torch.ones(4), False), create_graph=True)
        (second,) = torch.autograd.grad(first, a, Half(torch.ones(4), False))
        return described([first, second])

    assert of(compiled(lambda a: a * a * a)) == of(lambda a: a * a * a)


def test_two_of_one_kind_whose_gradients_are_not():
    """Each is known by itself: by its parameter, in a module."""

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(Half(torch.ones(2), True))
            self.b = torch.nn.Parameter(Half(torch.ones(2), True))

        def forward(self, x):
            return self.a * x, Identity.apply(self.b)

    def run(call, model):
        results = call(Half(torch.ones(4), False))
        torch.autograd.backward(results, [Half(torch.ones(4), False), Half(torch.ones(2), True)])
        return described([model.a.grad, model.b.grad])

    model, other = Both(), Both()
    assert run(compiled(model), model) == run(other, other)
    assert model.a.grad.is_half is not model.b.grad.is_half


class Identity(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.detach().clone()

    @staticmethod
    def backward(ctx, gradient):
        return Half(gradient.part * 1, gradient.is_half)


def test_second_derivatives():
    def f(a, x):
        return a * a * x

    def of(fn):
        torch.manual_seed(0)
        a, x, ones = two(3, grad=True), torch.randn(3), TwoTensor(torch.ones(3), torch.ones(3))
        (first,) = torch.autograd.grad(fn(a, x), a, ones, create_graph=True)
        (second,) = torch.autograd.grad(first, a, ones)
        return described(second)

    assert of(compiled(f)) == of(f)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 2))


def of_two_tensors(model):
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            module._parameters[name] = torch.nn.Parameter(TwoTensor(parameter.detach(), parameter.detach() + 0.5))
    return model


def with_quantised_weights(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            scale = module.weight.detach().abs().amax(1, keepdim=True) / 127
            numbers = (module.weight.detach() / scale).round().to(torch.int8)
            module.weight = torch.nn.Parameter(Quantised(numbers, scale), requires_grad=False)
    return model


def trained(model, call):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(3):
        torch.manual_seed(step)
        result = call(torch.randn(5, 4))
        loss = (result * result).mean()
        loss.backward(TwoTensor(torch.ones(()), torch.ones(())) if isinstance(loss, TwoTensor) else None)
        found += [described(result), *(described(p.grad) for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        found += [described(p) for p in model.parameters()]
    return found


@pytest.mark.parametrize("convert", [of_two_tensors, with_quantised_weights])
@pytest.mark.parametrize("through_dynamo", [False, True])
def test_training(convert, through_dynamo):
    def compile_it(model):
        if through_dynamo:
            return torch.compile(model, backend="foregrad", options={"backend": "eager"})
        return compiled(model)

    model = convert(network())
    expected = trained(model, model)
    model = convert(network())
    assert trained(model, compile_it(model)) == expected


def test_a_parameter_that_is_replaced():
    model = of_two_tensors(torch.nn.Sequential(torch.nn.Linear(3, 3, bias=False)))
    fast, x = compiled(model), torch.randn(2, 3)
    fast(x)
    for new in (two(3, 3), quantised(3, 3), torch.randn(3, 3)):
        model[0].weight = torch.nn.Parameter(new, requires_grad=False)
        assert described(fast(x)) == described(model(x))


def test_inductor_compiles_the_graphs():
    a, b = two(8, grad=True), torch.randn(8)
    result = foregrad.compile(lambda a, b: (a * b).sin().sum(), backend="inductor", on_unsupported="raise")(a, b)
    result.backward(TwoTensor(torch.ones(()), torch.ones(())))
    torch.testing.assert_close(a.grad.b, a.b.mul(b).cos() * b)


def test_no_stand_in_is_left_behind():
    holder = []

    def f(a):
        holder.append(a * 2)
        return a + 1

    fast = foregrad.compile(f, backend="eager", on_unsupported="eager")
    fast(two(3))
    from torch._subclasses.fake_tensor import FakeTensor

    assert not any(isinstance(t, FakeTensor) for w in holder for t in (w.a, w.b))
