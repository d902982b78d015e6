"""Hooks on outputs that a function saves for itself, or computes other outputs from; gradients that would leave it."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad._torch.native import native as native_part
from foregrad.errors import UnsupportedError
from tests.covering import each
from tests.higher.fuzz import Maker, judge

D = torch.float64


def leaf(*shape):
    return torch.randn(*shape, dtype=D).requires_grad_()


SAVED = {
    "exp": lambda x: x.exp(),
    "softmax": lambda x: torch.softmax(x * 1.5, -1),
    "mlp": lambda x: torch.tanh(x @ x.sin()).sigmoid(),
}
HOOKS = {
    "scales": lambda g, seen: g * 3,
    "is not linear": lambda g, seen: g * g,
    "only looks": lambda g, seen: seen.append(g.detach().clone()),
    "writes": lambda g, seen: g.mul_(3),
}


@pytest.mark.parametrize(
    ("hook", "name", "partition", "native"), each(HOOKS, SAVED, ["default", "min_cut"], [True, False], times=3)
)
def test_a_hook_on_an_output_that_is_saved_sees_all_of_each_backward(name, hook, partition, native):
    sides = []
    with foregrad.config.override(native=native):
        for f in (SAVED[name], foregrad.compile(SAVED[name], backend="eager", partition=partition)):
            torch.manual_seed(0)
            x, seen = leaf(3, 3), []
            y = f(x)
            y.register_hook(lambda g: HOOKS[hook](g, seen))  # noqa: B023
            y.retain_grad()
            (first,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
            by_output = torch.autograd.grad(first.pow(2).sum(), y, retain_graph=True)
            (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
            second.sin().sum().backward()
            sides.append([y, first, *by_output, second, x.grad, y.grad, *seen])
    for found, wanted in zip(sides[1], sides[0], strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


def test_a_hook_put_on_between_two_backwards():
    sides = []
    for f in (SAVED["softmax"], foregrad.compile(SAVED["softmax"], backend="eager")):
        torch.manual_seed(0)
        x = leaf(3, 3)
        y = f(x)
        (first,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
        y.register_hook(lambda g: g * 5)
        sides.append([first, *torch.autograd.grad(first.pow(2).sum(), x)])
    torch.testing.assert_close(sides[1], sides[0])


def features_and_score(x, w):
    features = torch.tanh(x @ w)
    return features, features.pow(2).sum()


def transposed_and_score(x):
    view = x.t()
    return view, view.pow(3).sum()


def view_of_features_and_score(x):
    features = x.tanh()
    view = features.t()
    return view, view.pow(2).sum(), features[0]


def written_and_score(x):
    x.mul_(2)
    return x, x.pow(2).sum()


PASSED = {
    "an output": lambda x: features_and_score(x, x),
    "a view of an input": transposed_and_score,
    "a view of an output": view_of_features_and_score,
    "a written input": written_and_score,
}


def chain_of_views(x):
    first = (x * 2).t()
    second = first.exp()
    return first, second[0].pow(2), second[1]


def written_by_another(x):
    other = x.new_ones(3, 3)
    x.mul_(2)
    other.add_(x)
    view = other.t()
    return x, view.sin().sum(), view


def chain_of_outputs(x):
    first = x.tanh()
    second = first.exp()
    return first, second.sin(), second


PASSED |= {
    "an output, by outputs": chain_of_outputs,
    "a view, by views": chain_of_views,
    "a written input, by views": written_by_another,
}


def watch(function, how):
    """What is seen of the gradient where an output that others were computed from is watched."""
    torch.manual_seed(0)
    x, seen = leaf(3, 3), []
    features, score = function(x * 1)[:2]
    score = score.sum()
    if how == "hook":
        features.register_hook(lambda g: seen.append(g.clone()))
        seen += torch.autograd.grad(score, x)
    elif how == "retain_grad":
        features.retain_grad()
        score.backward()
        seen.append(features.grad)
    elif how == "gradient":
        seen += torch.autograd.grad(score, [features, x], allow_unused=True)
    elif how == "gradient alone":
        seen += torch.autograd.grad(score, features, allow_unused=True)
    elif how == "backward":
        (score * 2).backward(inputs=[features])
        seen.append(features.grad)
    else:
        seen += torch.autograd.grad(score + features.sum(), features)
    return seen


WATCHING = ["hook", "retain_grad", "gradient", "gradient alone", "backward", "gradient and outside"]
IN_C = {"an output", "an output, by outputs"}


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("how", WATCHING)
@pytest.mark.parametrize("name", PASSED)
def test_watching_an_output_that_others_are_computed_from(name, how, native):
    """Eager shows the whole gradient there: so does a node in C++; other outputs are refused."""
    with foregrad.config.override(native=native):
        compiled = foregrad.compile(PASSED[name], backend="eager")
        if native and name in IN_C and native_part() is not None:
            torch.testing.assert_close(watch(compiled, how), watch(PASSED[name], how))
            return
        with pytest.raises(UnsupportedError, match=r"computes (base of )?out\[\d\](, .*)? from (out\[0\]|args\[0\])"):
            watch(compiled, how)


@pytest.mark.parametrize("name", PASSED)
def test_what_comes_from_outside_alone_is_seen_by_everybody(name):
    """The output may be asked for its own gradient, may be written to, and passed on."""
    sides = []
    for side in (PASSED[name], foregrad.compile(PASSED[name], backend="eager")):
        torch.manual_seed(0)
        x = leaf(3, 3)
        features, score = side(x * 1)[:2]
        score = score.sum()
        twice = foregrad.compile(lambda t: t * t, backend="eager")(features)
        found = [*torch.autograd.grad(twice.sum(), features, retain_graph=True)]
        found += torch.autograd.grad(twice.sum() + score, x, create_graph=True)
        sides.append([*found, *torch.autograd.grad(found[-1].sin().sum(), x)])
    torch.testing.assert_close(sides[1], sides[0])


def test_hooks_inside_and_on_a_saved_output_are_refused_at_second_order():
    """The hook outside would miss what flows through the saved value in a second backward."""

    def f(x):
        h = x * 2
        h.register_hook(lambda g: g * g)
        return h.exp()

    compiled = foregrad.compile(f, backend="eager")
    sides = []
    for side in (f, compiled):
        torch.manual_seed(0)
        x = leaf(3)
        y = side(x)
        y.register_hook(lambda g: g * 3)
        sides.append(torch.autograd.grad(y.sum(), x))
    torch.testing.assert_close(sides[1], sides[0])
    y = compiled(x)
    y.register_hook(lambda g: g * 3)
    with pytest.raises(UnsupportedError, match="puts hooks on its own tensors"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
    y = compiled(x)
    torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="puts hooks on its own tensors"):
        y.register_hook(lambda g: g * 3)


def test_hooks_of_leaves_that_no_gradient_comes_to_are_not_called():
    """One node has them all as inputs, whichever of its outputs is differentiated."""
    seen = []
    for f in (fn := lambda x, w, u: (x * w, u.sin()), foregrad.compile(fn, backend="eager")):
        x, w, u = leaf(3), leaf(3), leaf(3)
        y, z = f(x, w, u)
        u.register_hook(lambda g: seen.append(g) or g * g)
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True, retain_graph=True)
        first.sum().backward(retain_graph=True)
        y.sum().backward(retain_graph=True)
        assert u.grad is None
        assert not seen
        z.sum().backward()
        assert len(seen) == 1
        seen.clear()


def test_an_output_that_others_are_computed_from_keeps_its_own_gradient():
    x, w = leaf(3, 3), leaf(3, 3)
    features, _ = foregrad.compile(features_and_score, backend="eager")(x, w)
    features.retain_grad()
    features.sum().backward()
    torch.testing.assert_close(features.grad, torch.ones_like(features))


@pytest.mark.parametrize("native", [True, False])
def test_hooks_of_outputs_that_do_not_take_part_are_not_called(native):
    with foregrad.config.override(native=native):
        y, z = foregrad.compile(lambda x: (x.sin(), x.exp()), backend="eager")(x := leaf(3))
        seen = []
        z.register_hook(seen.append)
        y.register_hook(seen.append)
        y.sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(x.grad, x.cos())


def test_inputs_that_no_gradient_flows_to_are_no_part_of_the_graph():
    x, w = leaf(3), leaf(3)
    y = foregrad.compile(lambda x, w: x.sin() * w.detach(), backend="eager")(x, w)
    assert [edge.variable is x for edge, _ in y.grad_fn.next_functions if edge is not None] == [True]
    with pytest.raises(RuntimeError, match="not have been used"):
        torch.autograd.grad(y.sum(), w)


def energy_and_forces(positions, edges):
    energy = (edges * edges).sum() + positions.sin().sum()
    return energy, torch.autograd.grad(energy, positions, create_graph=True)[0]


def test_a_gradient_inside_that_would_go_on_outside_is_refused():
    """Edges that were computed from the positions lead there, in eager."""
    compiled = foregrad.compile(energy_and_forces, backend="eager")
    positions, other = leaf(3), leaf(3)
    for edges in (other * 2, other.sin()):
        for found, wanted in zip(compiled(positions, edges), energy_and_forces(positions, edges), strict=True):
            torch.testing.assert_close(found, wanted)
    with pytest.raises(UnsupportedError, match="computed from it outside"):
        compiled(positions, positions * 2)
    moved = positions * 1.0
    with pytest.raises(UnsupportedError, match="computed from it outside"):
        foregrad.compile(energy_and_forces, backend="eager")(moved, moved.cos())


def test_a_gradient_inside_by_an_input_with_hooks_is_refused():
    """Eager calls them for that gradient too."""
    compiled = foregrad.compile(energy_and_forces, backend="eager")
    positions, edges = leaf(3), leaf(3)
    compiled(positions, edges)
    handle = positions.register_hook(lambda g: g * 2)
    with pytest.raises(UnsupportedError, match="The input has hooks"):
        compiled(positions, edges)
    handle.remove()
    torch.testing.assert_close(compiled(positions, edges), energy_and_forces(positions, edges))


def test_outputs_whose_backward_raises_do_not_hurt_the_others():
    def f(x):
        a = x.exp()
        b = a * a
        c = x.sin()
        a.add_(1)  # b's backward wants what a was
        return b, c

    for run in (f, foregrad.compile(f, backend="eager")):
        x = leaf(3)
        (first,) = torch.autograd.grad(run(x)[1].sum(), x, create_graph=True)
        torch.testing.assert_close(first, x.cos())
        torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], -x.sin())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(run(x)[0].sum(), x)


def test_a_backward_that_raises_does_not_hurt_inputs_that_it_does_not_lead_to():
    def f(x, w):
        a = x.exp()
        b = a * a
        a.add_(1)  # b's backward wants what a was
        return b, b.sin()

    for run in (f, foregrad.compile(f, backend="eager")):
        x, w = leaf(3), leaf(3)
        (found,) = torch.autograd.grad(run(x, w)[0].sum() + w.exp().sum(), w)
        torch.testing.assert_close(found, w.exp())


def test_the_phase_of_eigenvectors_is_checked_at_every_order():
    def f(a):
        return torch.linalg.eig(a)[1]

    for run in (f, foregrad.compile(f, backend="eager")):
        torch.manual_seed(0)
        a = torch.randn(3, 3, dtype=torch.complex128, requires_grad=True)
        with pytest.raises(RuntimeError, match=r"phase|e\^{i phi}"):
            torch.autograd.grad(run(a).real.sum(), a, create_graph=True)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("create_graph", [True, False])
def test_an_output_that_only_its_own_derivative_reads_may_be_written_to(create_graph, native):
    if not native and torch.__version__ < (2, 12):
        pytest.skip("nothing gives one saved tensor of a node in Python there: it raises as if all were read")

    def f(x, w):
        return x.tanh(), (x * w).sin()

    with foregrad.config.override(native=native):
        for run in (f, foregrad.compile(f, backend="eager")):
            x, w = leaf(3), leaf(3)
            y, z = run(x, w)
            with torch.no_grad():
                y.mul_(2)
            (first,) = torch.autograd.grad(z.sum(), x, create_graph=create_graph, retain_graph=True)
            torch.testing.assert_close(first, (x * w).cos() * w)
            if create_graph:
                (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
                torch.testing.assert_close(second, -(x * w).sin() * w * w)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(y.sum(), x)


@pytest.mark.parametrize("hooks", [False, True])
def test_random_programs(hooks):
    """A few; `python -m tests.higher.fuzz` runs more."""
    verdicts, seeds = [], range(16)
    for seed in seeds:
        verdict, said = judge(Maker(seed, hooks).program(), seed)
        assert verdict != "WRONG", (seed, said)
        verdicts.append(verdict)
    assert verdicts.count("equal") > len(seeds) // 2
