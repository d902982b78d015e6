"""Hooks on the backward of modules that look at Python's state, or change it, run in each backward."""

import functools
import warnings

import pytest
import torch

import foregrad

CALLS = 4


class Held:
    def __init__(self):
        self.scale, self.count, self.seen, self.table = 2.0, 0, [], {}


def appends(held):
    return lambda module, given, out: held.seen.append(out[0].detach().clone())


def counts(held):
    def hook(module, given, out):
        held.count += 1

    return hook


def scales(held):
    return lambda module, given, out: (given[0] * held.scale,)


def keeps_on_the_module(held):
    def hook(module, given, out):
        module.gradient = out[0].detach()

    return hook


def reads_a_value(held):
    return lambda module, given, out: held.table.update(norm=out[0].norm().item())


def branches_on_a_gradient(held):
    def hook(module, given, out):
        if out[0].sum() <= held.scale:
            return None
        held.count += 1
        return (given[0] * 2,)

    return hook


def per_sample(held):
    def hook(module, given, out):
        held.seen.append(torch.einsum("bi,bj->bij", out[0], module.activations))

    return hook


def a_partial(held):
    def hook(held, module, given, out, *, times):
        held.count += times

    return functools.partial(hook, held, times=3)


HOOKS = [
    appends,
    counts,
    scales,
    keeps_on_the_module,
    reads_a_value,
    branches_on_a_gradient,
    per_sample,
    a_partial,
]


class Model(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)
        self.held = Held()
        self.second.register_forward_hook(lambda module, given, out: setattr(module, "activations", given[0].detach()))
        self.second.register_full_backward_hook(make(self.held))

    def forward(self, x):
        return self.second(self.first(x).sin()).square().sum()


def state(model):
    grads = [p.grad for p in model.parameters()]
    held = [model.held.count, *model.held.seen, *model.held.table.items()]
    return [*grads, *held, getattr(model.second, "gradient", None)]


def same(one, other):
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def dynamo(model):
    return torch.compile(model, backend="foregrad", options={"backend": "eager"})


def compiled(model):
    return foregrad.compile(model, backend="eager", on_unsupported="raise")


@pytest.mark.parametrize("make", HOOKS)
@pytest.mark.parametrize("compile", [compiled, dynamo])
def test_each_backward_runs_them(make, compile):
    models = Model(make), Model(make)
    called = compile(models[0]), models[1]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute", UserWarning)  # of Dynamo itself
        for i in range(CALLS):
            x = torch.randn(5, 3)
            for model, call in zip(models, called, strict=True):
                loss = call(x)
                model.held.scale = i - 1.0  # looked at by the backward
                loss.backward()
            same(state(models[0]), state(models[1]))
    if compile is compiled:
        assert len(list(called[0].foregrad.all_specializations())) == 1


@pytest.mark.parametrize("make", HOOKS)
def test_a_backward_inside_runs_them(make):
    models = Model(make), Model(make)

    def step(model, x):
        model.zero_grad()
        model(x).backward()

    called = foregrad.compile(step, backend="eager", on_unsupported="raise")
    for i in range(CALLS):
        x = torch.randn(5, 3)
        for model, call in zip(models, (called, step), strict=True):
            model.held.scale = i - 1.0
            call(model, x)
        same(state(models[0]), state(models[1]))
    assert len(list(called.foregrad.all_specializations())) <= 3


def test_hooks_of_several_gradients():
    class Pair(torch.nn.Module):
        def forward(self, a, n, b):
            return a * b, n, b.sin()

    class Around(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.pair, self.seen = Pair(), []
            self.pair.register_full_backward_pre_hook(self.before)
            self.pair.register_full_backward_hook(self.after)

        def before(self, module, out):
            self.seen.append([g if g is None else g.clone() for g in out])
            return tuple(g if g is None else g * 2 for g in out)

        def after(self, module, given, out):
            self.seen.append([g if g is None else g.clone() for g in (*given, *out)])
            return tuple(g if g is None else g + len(self.seen) for g in given)

        def forward(self, x, y):
            p, _, q = self.pair(x * 2, 7, y * 3)
            return p.sum() + (q * q).sum()

    modules = Around(), Around()
    called = compiled(modules[0]), modules[1]
    for _ in range(CALLS):
        x, y = torch.randn(2, 3)
        grads = []
        for call in called:
            a, b = x.clone().requires_grad_(), y.clone().requires_grad_()
            call(a, b).backward()
            grads.append([a.grad, b.grad])
        same(*grads)
        for one, other in zip(modules[0].seen, modules[1].seen, strict=True):
            same(one, other)
    assert len(list(called[0].foregrad.all_specializations())) == 1


def test_a_first_module_without_gradients_for_its_input():
    models = [torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    seen = [], []
    for model, out in zip(models, seen, strict=True):
        model[0].register_full_backward_hook(lambda module, given, of, out=out: out.append((given, of[0].clone())))
    called = compiled(models[0]), models[1]
    x = torch.randn(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own, for each
        for _ in range(CALLS):
            for call in called:
                call(x).sum().backward()
    assert len(seen[0]) == len(seen[1]) == CALLS
    for (given, of), (given_2, of_2) in zip(*seen, strict=True):
        assert given == given_2 == (None,) and torch.equal(of, of_2)
    same([p.grad for p in models[0].parameters()], [p.grad for p in models[1].parameters()])


def test_hooks_on_all_modules():
    seen = []
    handle = torch.nn.modules.module.register_module_full_backward_hook(
        lambda module, given, out: seen.append(type(module).__name__)
    )
    try:
        called = compiled(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)))
        for _ in range(2):
            called(torch.randn(2, 3, requires_grad=True)).sum().backward()
    finally:
        handle.remove()
    assert seen == 2 * ["Linear", "Tanh", "Linear", "Sequential"]


def test_hooks_that_come_and_go():
    model = Model(counts)
    called = compiled(model)
    x = torch.randn(2, 3)
    called(x).backward()
    handle = model.first.register_full_backward_hook(counts(model.held))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        called(x).backward()
    assert model.held.count == 3
    handle.remove()
    called(x).backward()
    assert model.held.count == 4


def test_an_error_of_a_hook_is_the_backwards():
    def raises(held):
        def hook(module, given, out):
            held.count += 1
            raise ValueError(f"the backward {held.count}")

        return hook

    model = Model(raises)
    called = compiled(model)
    for i in (1, 2):
        with pytest.raises(ValueError, match=f"the backward {i}"):
            called(torch.randn(2, 3)).backward()


@pytest.mark.parametrize("found", [(torch.ones(7, 7),), (), 3])
def test_a_wrong_result_of_a_hook_raises(found):
    def wrong(held):
        def hook(module, given, out):
            held.count += 1
            return found

        return hook

    for compile in (compiled, lambda model: model):
        with pytest.raises((RuntimeError, TypeError)):
            compile(Model(wrong))(torch.randn(2, 3)).backward()


def test_two_backwards_of_one_call():
    models = Model(appends), Model(appends)
    called = compiled(models[0]), models[1]
    x = torch.randn(2, 3)
    for model, call in zip(models, called, strict=True):
        loss = call(x)
        loss.backward(retain_graph=True)
        loss.backward()
        assert len(model.held.seen) == 2
    same(state(models[0]), state(models[1]))


def test_a_second_derivative_raises_and_is_eager_when_compiled_again():
    models = Model(counts), Model(counts)
    called = foregrad.compile(models[0], backend="eager"), models[1]
    x = torch.randn(2, 3)
    called[0](x), called[1](x)
    with pytest.raises(foregrad.errors.UnsupportedOpError, match="differentiated"):
        y = x.clone().requires_grad_()
        torch.autograd.grad(called[0](y), y, create_graph=True)[0].sum().backward()
    gradients = []
    called = foregrad.compile(models[0], backend="eager", on_unsupported="eager"), models[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            for call in called:
                y = x.clone().requires_grad_()
                torch.autograd.grad(call(y), y, create_graph=True)[0].sum().backward()
                gradients.append(y.grad)
    same(gradients[::2], gradients[1::2])


def test_without_gradients_no_hook_is_looked_at():
    model = Model(counts)
    called = compiled(model)
    with torch.no_grad():
        called(torch.randn(2, 3))
    assert model.held.count == 0


def test_a_part_that_is_checkpointed():
    models = Model(counts), Model(counts)

    def step(model, x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    called = foregrad.compile(step, backend="eager", on_unsupported="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(CALLS):
            x = torch.randn(2, 3)
            for model, call in zip(models, (called, step), strict=True):
                call(model, x).backward()
    same(state(models[0]), state(models[1]))


def reads_what_it_has_appended(seen):
    def step(x):
        y = x * 2
        y.register_hook(lambda g: seen.append(g.norm()))
        y.sum().backward()
        return y.detach() * seen[-1]

    return step


def reads_what_the_step_has_set(held):
    def step(x):
        y = x * 2
        held.scale = x.detach().sum()
        y.register_hook(lambda g: g * held.scale)
        y.sum().backward()
        return y.detach()

    return step


def appends_between(seen):
    def step(x):
        seen.append("before")
        y = x * 2
        y.register_hook(lambda g: seen.append(g.norm().item()))
        y.sum().backward()
        seen.append("after")
        return y.detach()

    return step


@pytest.mark.parametrize(
    ("make", "held"), [(reads_what_it_has_appended, list), (reads_what_the_step_has_set, Held), (appends_between, list)]
)
def test_hooks_on_tensors_in_a_backward_inside_are_a_part_of_the_step(make, held):
    both = held(), held()
    called = foregrad.compile(make(both[0]), backend="eager", on_unsupported="eager"), make(both[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for i in range(CALLS):
            found = []
            for call in called:
                x = torch.full((2,), float(i)).requires_grad_()
                found.append([call(x), x.grad])
            same(*found)
    same(*([getattr(one, "scale", None)] if held is Held else one for one in both))
