"""Whatever can be called can be a hook: partial applications, methods, objects. Each is called as in eager."""

from __future__ import annotations

import functools
import operator
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import foregrad
from foregrad.errors import ForegradWarning
from tests.covering import each

# Where a hook on a node or a module looks at an object, calls run eagerly, by name.
pytestmark = pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")


def scaled(t, k=1.0, also=0.0):
    return t * k + also


def times(k, t):
    return t * k


def doubled(function):
    @functools.wraps(function)
    def called(*args):
        return function(*args) * 2.0

    return called


class Methods:
    factor = 3.0

    def method(self, t, k=1.0):
        return t * self.factor * k

    @classmethod
    def of_class(cls, t):
        return t * cls.factor

    @staticmethod
    def static(t):
        return t * 5.0

    part = functools.partialmethod(method, k=2.0)


class Called:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, t, k=1.0):
        return t * self.factor * k


class Slotted:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, t):
        return t * self.factor


class Plain(functools.partial):
    pass


class Twice(functools.partial):
    def __call__(self, t):
        return super().__call__(t) * 2.0


CALLABLES = {
    "function": lambda: scaled,
    "lambda": lambda: lambda t: t * 7.0,
    "keyword": lambda: partial(scaled, k=3.0),
    "positional": lambda: partial(times, 3.0),
    "nested": lambda: partial(partial(scaled, k=3.0), also=1.0),
    "overridden": lambda: partial(partial(scaled, k=3.0), k=4.0),
    "partial of a method": lambda: partial(Methods().method, k=2.0),
    "partial of an object": lambda: partial(Called(2.0), k=2.0),
    "partial of an operator": lambda: partial(torch.mul, torch.tensor(3.0)),
    "partial with a tensor": lambda: partial(torch.mul, other=torch.tensor(3.0)),
    "derived partial": lambda: Plain(scaled, k=3.0),
    "derived partial with a call": lambda: Twice(scaled, k=3.0),
    "partial of a derived one": lambda: partial(Twice(scaled, k=3.0)),
    "method": lambda: Methods().method,
    "class method": lambda: Methods.of_class,
    "static method": lambda: Methods.static,
    "partial method": lambda: Methods().part,
    "object": lambda: Called(3.0),
    "object with slots": lambda: Slotted(3.0),
    "decorated": lambda: doubled(scaled),
    "operator": lambda: torch.neg,
    "overload": lambda: torch.ops.aten.neg.default,
    "method of tensors": lambda: torch.Tensor.neg,
    "methodcaller": lambda: operator.methodcaller("mul", 3.0),
}
PARTIALS = [name for name in CALLABLES if "partial" in name or name in ("keyword", "positional", "nested")]
callables = pytest.mark.parametrize("callable_", CALLABLES)


def of_all(hook, gradients):
    return tuple(None if g is None else hook(g) for g in gradients)


def on_node(inputs, outputs, *, hook):
    return of_all(hook, inputs)


def left_in_grad(parameter, *, hook):
    parameter.grad = hook(parameter.grad)


def of_forward(hook, module, inputs, output):
    return hook(output)


def of_arguments(hook, module, args, kwargs):
    return of_all(hook, args), kwargs


def of_backward(module, inputs, outputs, *, hook):
    return of_all(hook, inputs)


def before_backward(hook, module, outputs):
    return of_all(hook, outputs)


def hook_all(module, hook):
    module.register_forward_hook(partial(of_forward, hook))
    module.register_forward_pre_hook(partial(of_arguments, hook), with_kwargs=True)
    module.register_full_backward_hook(partial(of_backward, hook=hook))
    module.register_full_backward_pre_hook(partial(before_backward, hook))


# -------------------------------------------------------------------- inside


def on_tensor(x, hook):
    y = x * 2
    y.register_hook(hook)
    return (y * y).sum()


def on_result(x, hook):
    y = x * 2
    y.register_hook(hook)
    return y


def on_argument(x, hook):
    x.register_hook(hook)
    return x * x


def before_node(x, hook):
    y = x * 2
    y.grad_fn.register_prehook(partial(of_all, hook))
    return (y * y).sum()


def after_node(x, hook):
    y = x.sin()
    y.grad_fn.register_hook(partial(on_node, hook=hook))
    return (y * y).sum()


def on_several(x, hook):
    y, z = x * 2, x.sin()
    register_multi_grad_hook((y, z), partial(of_all, hook))
    return (y * z).sum()


def on_saved(x, hook):
    with saved_tensors_hooks(hook, hook):
        y = x.sin() * x
    return y.sum()


def on_leaf_inside(x, hook):
    w = torch.ones(2, requires_grad=True)
    w.register_hook(hook)
    w.register_post_accumulate_grad_hook(partial(left_in_grad, hook=hook))
    (w * x.detach()).sum().backward()
    return x * w.grad


def on_module(x, hook):
    module = nn.Identity()
    hook_all(module, hook)
    return module(x * 2)


def of_torch_func(x, hook):
    return torch.func.grad(partial(lambda x, *, f: f(x.sin()).sum(), f=hook))(x) + torch.vmap(hook)(x)


def checkpointed(x, hook):
    return checkpoint(hook, x.sin(), use_reentrant=False).cos()


INSIDE = [on_tensor, on_result, on_argument, before_node, after_node, on_several, on_saved, on_leaf_inside, on_module]
INSIDE += [of_torch_func, checkpointed]


def point():
    return torch.tensor([0.5, 2.0], requires_grad=True)


def twice(function):
    """Two steps with a function."""
    found = []
    for factor in (1, 2):
        x = point()
        y = function(x)
        (y * factor).sum().backward()
        found += [y.detach(), x.grad]
    return found


def same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def by_compile(function):
    return foregrad.compile(function, backend="eager", on_unsupported="eager")


def by_dynamo(function):
    torch._dynamo.reset()
    return torch.compile(function, backend="foregrad", options={"backend": "eager"})


def by_aot_function(function):
    return foregrad.aot_function(function, foregrad.nop)


@pytest.mark.parametrize(("callable_", "program"), each(CALLABLES, INSIDE, times=4))
def test_a_callable_that_a_function_hands_over_is_called_as_in_eager(program, callable_):
    hook, other = CALLABLES[callable_](), CALLABLES[callable_]()
    same(twice(by_compile(lambda x: program(x, hook))), twice(lambda x: program(x, other)))


@pytest.mark.parametrize(("callable_", "program"), each(PARTIALS, [on_tensor, on_result]))
def test_aot_function_calls_partial_applications_as_in_eager(program, callable_):
    hook, other = CALLABLES[callable_](), CALLABLES[callable_]()
    same(twice(by_aot_function(lambda x: program(x, hook))), twice(lambda x: program(x, other)))


@pytest.mark.parametrize(
    ("callable_", "program"),
    each(["keyword", "positional", "nested", "partial of a method", "object"], [on_tensor, on_result, after_node]),
)
def test_behind_dynamo_partial_applications_are_called_as_in_eager(program, callable_):
    hook, other = CALLABLES[callable_](), CALLABLES[callable_]()
    same(twice(by_dynamo(lambda x: program(x, hook))), twice(lambda x: program(x, other)))


class Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, hook):
        ctx.hook = hook
        return hook(x)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.hook(gradient) * 2, None


@callables
def test_a_function_calls_what_its_context_holds_as_in_eager(callable_):
    hook, other = CALLABLES[callable_](), CALLABLES[callable_]()
    compiled = foregrad.compile(lambda x: Handed.apply(x, hook), backend="eager", on_unsupported="eager")
    same(twice(compiled), twice(lambda x: Handed.apply(x, other)))


@callables
def test_a_hook_put_on_an_argument_after_accumulation_runs_eagerly_by_name(callable_):
    def program(x, hook):
        x.register_post_accumulate_grad_hook(partial(left_in_grad, hook=hook))
        return x * x

    hook, other = CALLABLES[callable_](), CALLABLES[callable_]()
    with pytest.warns(ForegradWarning, match="register_post_accumulate_grad_hook"):
        found = twice(foregrad.compile(lambda x: program(x, hook), backend="eager", on_unsupported="eager"))
    same(found, twice(lambda x: program(x, other)))


# -------------------------------------------------------------------- outside


def two(x):
    return x.sin() * 2, x.cos()


def on_results_outside(make, hook):
    x = point()
    y, z = make(two)(x)
    y.register_hook(hook)
    z.register_hook(hook)
    (y * z).sum().backward()
    return [y.detach(), x.grad]


def on_a_result_that_gets_no_gradient(make, hook):
    x = point()
    y, z = make(two)(x)
    y.register_hook(hook)
    z.register_hook(hook)
    z.sum().backward()
    return [x.grad]


def on_leaves_outside(make, hook):
    x, unused = point(), point()
    for leaf in (x, unused):
        leaf.register_hook(hook)
        leaf.register_post_accumulate_grad_hook(partial(left_in_grad, hook=hook))
    y, z = make(lambda a, b: (a.sin(), b.cos()))(x, unused)
    y.sum().backward(retain_graph=True)
    first = x.grad
    (y.sum() + z.sum()).backward()
    return [first, x.grad, unused.grad]


def on_the_node_outside(make, hook):
    x = point()
    y, _ = make(two)(x)
    y.grad_fn.register_prehook(partial(of_all, hook))
    y.sum().backward()
    return [x.grad]


def on_several_outside(make, hook):
    x, seen = point(), []
    y, z = make(two)(x)
    register_multi_grad_hook((y, z), partial(lambda gradients, *, f: seen.extend(map(f, gradients)), f=hook))
    (y * z).sum().backward()
    return [x.grad, *seen]


def on_saved_outside(make, hook):
    x = point()
    with saved_tensors_hooks(partial(times, 1.0), partial(lambda f, t: f(t), hook)):
        y = make(torch.sin)(x)
    y.sum().backward()
    return [x.grad]


class Scales(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.inner = nn.Identity()

    def forward(self, x):
        return self.inner(x * self.weight).sin()


def on_modules_outside(make, hook):
    module, x = Scales(), point()
    hook_all(module.inner, hook)
    module.weight.register_hook(hook)
    y = make(module)(x)
    y.sum().backward()
    return [y.detach(), x.grad, module.weight.grad]


def on_what_a_step_accumulates(make, hook):
    weight, x = point(), torch.ones(2)
    weight.register_hook(hook)
    weight.register_post_accumulate_grad_hook(partial(left_in_grad, hook=hook))

    def step(x):
        (weight * x).sum().backward()
        return weight.grad * 1

    step = make(step)
    return [step(x), step(x), weight.grad]


def compiled_itself(make, hook):
    return [*twice(make(hook)), *twice(make(partial(lambda x, *, f: f(x).sin(), f=hook)))]


OUTSIDE = [on_results_outside, on_a_result_that_gets_no_gradient, on_leaves_outside, on_the_node_outside]
OUTSIDE += [on_several_outside, on_saved_outside, on_modules_outside, on_what_a_step_accumulates, compiled_itself]


@pytest.mark.parametrize(("callable_", "program"), each(CALLABLES, OUTSIDE, times=3))
def test_a_callable_around_a_compiled_function_is_called_as_in_eager(program, callable_):
    same(program(by_compile, CALLABLES[callable_]()), program(lambda f: f, CALLABLES[callable_]()))


@pytest.mark.parametrize(
    ("callable_", "program", "make"), each(PARTIALS, OUTSIDE[:4], [by_aot_function, by_dynamo], times=3)
)
def test_a_partial_application_is_called_as_in_eager_by_the_other_doors(program, make, callable_):
    same(program(make, CALLABLES[callable_]()), program(lambda f: f, CALLABLES[callable_]()))


class Row(nn.Linear):
    def forward(self, x):
        return (super().forward(x),)


def test_aot_module_simplified_calls_partial_applications_as_in_eager():
    def gradients(make):
        torch.manual_seed(0)
        module, x = Row(2, 2), point()
        (y,) = make(module, x)(x)
        y.register_hook(partial(scaled, k=3.0))
        y.sum().backward()
        return [x.grad]

    def simplified(module, x):
        return foregrad.aot_module_simplified(module, (x,), foregrad.nop)

    same(gradients(simplified), gradients(lambda module, x: module))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_hook_after_accumulation_is_called_for_leaves_that_a_gradient_comes_to(create_graph):
    def run(make):
        a, b, log = point(), point(), []
        function = make(lambda a, b: (a.sin() * 2, a * b.cos()))
        for leaf, name in ((a, "a"), (b, "b")):
            leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: log[-1].append((name, leaf.grad.tolist())))
        for roots in ("y", "z", "y", "yz", "y+b"):
            log.append([])
            y, z = function(a, b)
            losses = {"y": [y], "z": [z], "yz": [y, z], "y+b": [y, b]}[roots]  # the last gives b a gradient elsewhere
            torch.cat(losses).sum().backward(create_graph=create_graph)
            log[-1].sort()
        a.grad = b.grad = None
        return log

    assert run(lambda f: foregrad.compile(f, backend="eager")) == run(lambda f: f)


# -------------------------------------------------------------------- what hooks look at


class Box:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, t):
        return t * self.factor

    def method(self, t):
        return t * self.factor


def by_box(box, t):
    return t * box.factor


def of_list(numbers, t):
    return t * numbers[0]


def with_default():
    numbers = [3.0]

    def hook(t, numbers=numbers):
        return t * numbers[0]

    return hook, lambda: numbers.__setitem__(0, 5.0)


def boxed(made):
    def make():
        box = Box(3.0)
        return made(box), lambda: setattr(box, "factor", 5.0)

    return make


def listed():
    numbers = [3.0]
    return partial(of_list, numbers), lambda: numbers.__setitem__(0, 5.0)


def of_a_class():
    cls = type("Own", (Box,), {"factor": 3.0, "__init__": lambda self: None})
    return cls(), lambda: setattr(cls, "factor", 5.0)


CHANGING = {
    "object": boxed(lambda box: box),
    "method": boxed(lambda box: box.method),
    "partial of an object": boxed(partial),
    "positional": boxed(lambda box: partial(by_box, box)),
    "keyword": boxed(lambda box: partial(lambda t, *, box: t * box.factor, box=box)),
    "partial with a list": listed,
    "default": with_default,
    "option of a class": of_a_class,
}


@pytest.mark.parametrize(
    ("callable_", "program"),
    each(CHANGING, [on_tensor, on_result, on_argument, before_node, after_node, on_module], times=3),
)
def test_a_hook_looks_at_what_is_there_when_it_runs(program, callable_):
    def run(make):
        hook, change = CHANGING[callable_]()
        function, found = make(lambda x: program(x, hook)), []
        for i in range(3):
            x = point()
            y = function(x)
            if i == 1:
                change()  # between a forward and its backward
            y.sum().backward()
            found += [y.detach(), x.grad]
        return found

    same(run(lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager")), run(lambda f: f))


def test_a_hook_on_a_node_that_looks_at_state_runs_eagerly_by_name():
    box = Box(3.0)
    compiled = foregrad.compile(lambda x: after_node(x, box), backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match="put on a tensor or a node at .* reads Python state"):
        compiled(point())


def test_an_object_that_the_call_makes_is_traced_with_what_it_holds():
    def function(x):
        y = x * 2
        y.register_hook(Box(x.detach().exp()))
        return (y * y).sum()

    same(twice(foregrad.compile(function, backend="eager", on_unsupported="raise")), twice(function))
