"""A compiled training step leaves what eager leaves, bit by bit: parameters, `.grad`, the optimizer, Python's state."""

import copy
import warnings

import pytest
import torch
from torch import nn

import foregrad
from tests.effects.training_steps import PROGRAMS, network


def compiled(function):
    return foregrad.compile(function, backend="eager", on_unsupported="raise")


def is_same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(is_same, a, b))
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager(name):
    run, graphs = PROGRAMS[name]
    torch.manual_seed(0)
    expected, _ = run(lambda function: function)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found, call = run(compiled)
    assert is_same(found, expected)
    assert torch.equal(torch.rand(1), drawn)
    assert 1 <= len(foregrad.explain_recompiles(call)) <= graphs


def test_gradients_that_go_first_are_freed_before_the_graph_runs():
    """Two sets of gradients at a time would be one more than in eager."""
    model, alive = network(), []

    def watching(gm, example_inputs):
        def run(*args):
            alive.append(model[0].weight.grad)
            return gm(*args)

        return run

    @foregrad.compile(backend=watching)
    def step(x):
        model.zero_grad()
        model(x).sum().backward()

    for _ in range(3):
        step(torch.ones(2, 8))
        assert model[0].weight.grad is not None
    assert alive == [None, None, None]


def test_no_gradient_is_copied_that_eager_takes_over():
    model = network()

    @foregrad.compile(backend="eager")
    def step(x):
        model.zero_grad()
        model(x).square().mean().backward()

    step(torch.ones(2, 8))
    (specialization,) = step.foregrad.specializations
    targets = [str(node.target) for node in specialization.product.captured.joint.graph.nodes]
    assert not [target for target in targets if "copy" in target or "clone" in target]


def test_one_gradient_of_two_parameters_is_two_tensors():
    first, second = (nn.Parameter(torch.ones(3)) for _ in range(2))

    @foregrad.compile(backend="eager")
    def step(x):
        first.grad = second.grad = None
        ((first + second) * x).sum().backward()

    step(torch.ones(3))
    first.grad.add_(1)
    assert second.grad.tolist() == [1, 1, 1]


def test_a_backward_that_begins_outside_is_refused_before_it_runs():
    weight = torch.ones(3, requires_grad=True)
    loss = weight.sum()

    def step(x):
        torch.autograd.backward([loss])
        return x + 1

    with pytest.raises(
        foregrad.errors.UnsupportedError, match=r"test_training_steps.* reaches the graph of .*loss before"
    ):
        compiled(step)(torch.ones(1))
    assert weight.grad is None
    loss.backward()


def test_a_gradient_that_is_another_input_too_is_refused_by_name():
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)

    def step(x):
        weight.grad.add_(x)
        (weight * x).sum().backward()

    call = compiled(step)
    call(torch.ones(3))
    assert weight.grad.tolist() == [3, 3, 3]
    with pytest.raises(foregrad.errors.UnsupportedError, match=r"\.grad` of .*weight is args"):
        call(weight.grad)


def test_a_hook_that_sets_a_gradient_runs_in_each_backward_outside():
    weight = torch.ones(3, requires_grad=True)

    def step(x):
        y = x * 2
        y.register_hook(lambda gradient: setattr(weight, "grad", None))
        return (y * weight.detach()).sum()

    call = compiled(step)
    for _ in range(2):
        weight.grad = torch.ones(3)
        loss = call(torch.ones(3, requires_grad=True))
        assert weight.grad is not None
        loss.backward()
        assert weight.grad is None


def _after_accumulation(parameter, state):
    def scale(parameter):
        parameter.grad.mul_(state["scale"])

    parameter.register_post_accumulate_grad_hook(scale)


HOOKS = {
    "on a gradient": lambda p, state: p.register_hook(lambda gradient: gradient * state["scale"]),
    "after accumulation": _after_accumulation,
}


@pytest.mark.parametrize("name", HOOKS)
def test_what_hooks_of_parameters_read_in_a_backward_inside_is_looked_at_in_each_call(name):
    found = []
    for wrap in (lambda function: function, compiled):
        weight, state = torch.nn.Parameter(torch.ones(3)), {"scale": 1.0}
        HOOKS[name](weight, state)
        call = wrap(lambda x, weight=weight: (weight * x).sum().backward())
        for state["scale"] in (1.0, 1.0, 0.5, 0.25):
            weight.grad = None
            call(torch.ones(3))
            found.append(weight.grad)
    assert is_same(found[:4], found[4:])


def _with_a_hook_on_a_module(wrap):
    torch.manual_seed(0)
    model, norms, state = network(), [], {"scale": 1.0}

    def hook(module, into, out):
        norms.append(out[0].norm())
        return (into[0] * state["scale"],)

    model[2].register_full_backward_hook(hook)
    call = wrap(lambda x: model(x).square().sum().backward())
    for state["scale"] in (1.0, 1.0, 0.5, 0.25):
        model.zero_grad()
        call(torch.ones(2, 8))
        norms.extend(p.grad for p in model.parameters())
    return norms


def test_a_hook_of_a_module_runs_in_each_backward_inside():
    found, expected = map(_with_a_hook_on_a_module, (compiled, lambda function: function))
    assert len(found) == 20 and is_same(found, expected)


def test_a_parameter_with_a_gradient_is_given_back_and_is_a_key():
    weight, kept = torch.nn.Parameter(torch.ones(3)), {}

    @compiled
    def keep(x):
        kept[weight] = weight.detach() * x
        return weight

    weight.grad = torch.ones(3)
    for n in range(3):
        assert keep(torch.full((3,), float(n))) is weight
        assert list(kept) == [weight] and torch.equal(kept[weight], torch.full((3,), float(n)))


def test_a_container_that_is_emptied_in_each_call():
    losses, seen = [], {}

    @compiled
    def finish():
        total = torch.stack(losses).sum() * seen["scale"]
        del losses[:]
        seen.clear()
        return total

    for n in (2, 2, 3, 2):
        losses.extend(torch.ones(n).unbind())
        seen["scale"] = 2.0
        assert finish() == 2 * n and losses == [] and seen == {}


def _lbfgs(model, x):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return lambda: optimizer.step(closure)


def test_a_refusal_by_name_says_what_to_move_out():
    found = []
    for how in (None, "eager"):
        torch.manual_seed(0)
        model, x = network(), torch.randn(4, 8)
        step = _lbfgs(model, x)
        call = foregrad.compile(step, backend="eager", on_unsupported=how) if how else step
        if not found:
            found.append([[call() for _ in range(5)], *model.parameters()])
            continue
        with pytest.warns(foregrad.errors.ForegradWarning, match="LBFGS outside"):
            found.append([[call() for _ in range(5)], *model.parameters()])
    assert is_same(*found)


CHANGES = {
    "a state dict is loaded": lambda o, model: o.load_state_dict(o.state_dict()),
    "a group is added": lambda o, model: o.add_param_group({"params": [model[1]], "lr": 0.5}),
    "a parameter is frozen": lambda o, model: model[0][0].weight.requires_grad_(False),
    "the weight decay is another": lambda o, model: o.param_groups[0].update(weight_decay=0.3),
    "a gradient is there": lambda o, model: setattr(model[0][0].bias, "grad", torch.ones(16)),
    "the state is cleared": lambda o, model: o.state.clear(),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_changes_between_steps_are_noticed(optimizer, name):
    """And `state_dict()` is eager's after each step."""
    found = []
    for wrap in (lambda function: function, lambda function: foregrad.compile(function, backend="eager")):
        torch.manual_seed(0)
        model = [network(), nn.Parameter(torch.ones(3))]
        made = optimizer(model[0].parameters(), lr=0.1)

        def step(x, model=model, made=made):
            loss = (model[0](x) * model[1]).square().mean()
            loss.backward()
            made.step()
            made.zero_grad()
            return loss.detach()

        call, states = wrap(step), []
        for number in range(10):
            if number == 5:
                CHANGES[name](made, model)
            states.append(call(torch.randn(4, 8)))
            states.append(copy.deepcopy(made.state_dict()["state"]))
        found.append([states, made.state_dict()["param_groups"], [*model[0].parameters(), model[1]]])
    assert is_same(*found)
