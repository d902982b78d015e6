"""Hooks that a function puts on what it returns: they run before whatever the caller does with that gradient."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad.errors import UnsupportedError, UnsupportedSideEffectError
from tests.covering import ALL, each

DOORS = {
    "directly": lambda f: foregrad.compile(f, backend="eager"),
    "under torch.compile": lambda f: torch.compile(f, backend="foregrad", options={"backend": "eager"}),
}


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = 5.0

    def hook(self, gradient):
        return gradient * self.factor

    def forward(self, y):
        y.register_hook(self.hook)


# Dynamo, since 2.15, asks results for `grad` and hides the warning, but not from a filter that makes it an error.
# Up to 2.12 it makes an object of `Function`, which warns.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]

HOOKS = {
    "scales": lambda y, seen: y.register_hook(lambda g: g * 2),
    "clamps": lambda y, seen: y.register_hook(lambda g: g.clamp(-0.5, 0.5)),
    "a function of torch": lambda y, seen: y.register_hook(torch.neg),
    "writes": lambda y, seen: y.register_hook(lambda g: g.mul_(2)),
    "a method": lambda y, seen: Module()(y),
    "two": lambda y, seen: [y.register_hook(lambda g: g * 2), y.register_hook(lambda g: g + 1)],
    "a default": lambda y, seen: y.register_hook(lambda g, k=y.shape[0]: g * k),
    "gives None": lambda y, seen: y.register_hook(lambda g: None),
    "keeps": lambda y, seen: y.register_hook(seen.append),
}
WATCH = {
    "nobody": lambda y, seen: None,
    "retain_grad": lambda y, seen: y.retain_grad(),
    "a hook": lambda y, seen: y.register_hook(lambda g: seen.append(g.clone())),
}
RESULTS = {
    "a result": lambda y: y,
    "a view": lambda y: y.view(3, 1)[:, 0],
    "half a view": lambda y: y[1:],
    "written later": lambda y: y,
    "beside another": lambda y: y,
}


def run(door, hook, watch, result):
    seen = []

    def f(x):
        y = RESULTS[result](x.sin())
        HOOKS[hook](y, seen)
        if result == "written later":
            y.mul_(2)
        return (y, x.cos()) if result == "beside another" else (y,)

    g, found = door(f), []
    for _ in range(2):
        x = torch.arange(3.0, requires_grad=True)
        y, *rest = g(x)
        WATCH[watch](y, seen)
        loss = sum(r.pow(2).sum() for r in (y, *rest))
        if hook != "writes":
            found.append(torch.autograd.grad(loss, y, retain_graph=True)[0])
        loss.backward()
        found += [x.grad, y.grad if y.retains_grad else None]
    return found + seen


# The node is one through either door: without the C++ part, through one.
@pytest.mark.parametrize(("door", "native"), [("directly", True), ("directly", False), ("under torch.compile", True)])
@pytest.mark.parametrize("result", RESULTS)
def test_what_the_caller_sees_has_been_through_the_hooks_inside(door, result, native):
    torch._dynamo.reset()
    for hook, watch in each(HOOKS, WATCH, everything=ALL or native):
        if hook == "writes" and watch != "nobody":
            continue  # eager's own depends on which tensor the engine adds into
        if door == "under torch.compile" and watch != ("nobody" if hook == "writes" else "a hook"):
            continue  # who watches a result is outside of the graph
        if hook == "keeps" and result == "written later":
            continue  # such a hook is traced, and may not change what is outside
        wanted = run(lambda f: f, hook, watch, result)
        with foregrad.config.override(native=native):
            found = run(DOORS[door], hook, watch, result)
        assert len(found) == len(wanted), (hook, watch)
        for a, b in zip(found, wanted, strict=True):
            assert (a is None) == (b is None), (hook, watch)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=0, atol=0, msg=f"{hook}, {watch}")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("order", ["hook, retain_grad", "retain_grad, hook", "hook, retain_grad, hook"])
def test_retain_grad_inside_with_hooks(order, door):
    def f(x):
        y = x.sin()
        for step in order.split(", "):
            if step == "hook":
                y.register_hook(lambda g: g * 3)
            else:
                y.retain_grad()
        return y

    sides = []
    for g in (f, DOORS[door](f)):
        x = torch.arange(3.0, requires_grad=True)
        y = g(x)
        y.pow(2).sum().backward()
        sides.append((y.grad, x.grad))
    torch.testing.assert_close(*sides, rtol=0, atol=0)


def computes_with_its_own(x):
    y = x.sin()
    y.register_hook(lambda g: g * y.detach())
    return y, x.cos()


def returns_what_it_goes_on_with(x):
    y = x.sin()
    y.register_hook(lambda g: g * 2)
    return y, (y * 3).exp()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("how", ["retain_grad", "a hook", "the gradient"])
@pytest.mark.parametrize("function", [computes_with_its_own, returns_what_it_goes_on_with])
def test_hooks_that_are_traced_bar_the_result_from_being_watched(function, how, native):
    with foregrad.config.override(native=native):
        g = foregrad.compile(function, backend="eager")
        sides = []
        for h in (function, g):
            x = torch.arange(3.0, requires_grad=True)
            y, z = h(x)
            (y.pow(2).sum() + z.sum()).backward()
            sides.append(x.grad)
        torch.testing.assert_close(*sides, rtol=0, atol=0)
        y, z = g(torch.arange(3.0, requires_grad=True))
        loss = y.pow(2).sum() + z.sum()
        with pytest.raises(UnsupportedError, match=r"out\[0\]"):
            if how == "a hook":
                y.register_hook(lambda g: g)
            elif how == "retain_grad":
                y.retain_grad()
            else:
                torch.autograd.grad(loss, y)
            loss.backward()


def test_hooks_behind_a_watched_result_are_not_called_where_its_gradient_stops():
    def f(x):
        y = x.sin()
        y.register_hook(lambda g: g * g)
        z = y + x.detach()
        return z, z.sum()

    sides = []
    for g in (f, foregrad.compile(f, backend="eager")):
        x = torch.arange(3.0, requires_grad=True)
        z, total = g(x)
        z.retain_grad()
        (z.pow(2).sum() + total).backward()
        sides.append((z.grad, x.grad))
    torch.testing.assert_close(*sides, rtol=0, atol=0)


def test_a_hook_on_a_view_that_computes_with_other_tensors_is_refused():
    def f(x):
        y = x.sin()[1:]
        y.register_hook(lambda g: g * y.detach())
        return y

    with pytest.raises(UnsupportedSideEffectError, match="on the view out"):
        foregrad.compile(f, backend="eager")(torch.ones(3, requires_grad=True))


def test_a_captured_graph_has_the_hooks_in_it():
    def f(x):
        y = x.sin()
        y.register_hook(lambda g: g * 3)
        return y

    joint = foregrad.capture(f, torch.ones(3, requires_grad=True))
    assert not joint.signature.effects.around
    assert joint.signature.gradients.hooked_inside == (0,)
    assert "tangents_1, 3" in str(joint)
