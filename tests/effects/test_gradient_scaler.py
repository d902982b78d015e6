"""`torch.amp.GradScaler` inside a compiled step: eager's bits, its `state_dict()` at any time, a few graphs."""

import copy
import itertools

import pytest
import torch
from torch import nn

import foregrad
from tests.effects.test_training_steps import compiled, is_same
from tests.effects.training_steps import network

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "SGD, foreach": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "SGD, fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def scaling(growth=3, **more):
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=growth, **more)


def left(model, optimizer, scaler):
    """What a call leaves: parameters, gradients, the states of optimizer and scaler. Infinite and missing numbers are
    told by their bits.
    """
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    bits = [None if t is None else t.detach().clone().view(torch.int32) for t in tensors]
    states = scaler.state_dict(), copy.deepcopy(optimizer.state_dict())
    return [bits, *states, len(scaler._per_optimizer_states) if scaler.is_enabled() else 0]


def inputs(count, infinite=()):
    for number in range(count):
        yield torch.randn(4, 8) * (float("inf") if number in infinite else 1), torch.randint(0, 3, (4,))


def trained(wrap, make, body, count=12, infinite=(4, 5, 9), scaler=scaling, between=lambda number, *parts: None):
    """What some calls of `body(model, optimizer, scaler, x, y)` leave, each."""
    torch.manual_seed(0)
    model = network()
    parts = model, make(model.parameters()), scaler()
    call, found = wrap(lambda x, y: body(*parts, x, y)), []
    for number, batch in enumerate(inputs(count, infinite)):
        between(number, *parts)
        given = call(*batch)
        found.append([given if given is None else given.clone().view(torch.int32), left(*parts)])
    return found, call


def check(make, body, graphs, **more):
    expected, _ = trained(lambda f: f, make, body, **more)
    found, call = trained(compiled, make, body, **more)
    assert is_same(found, expected)
    assert 0 < len(foregrad.explain_recompiles(call)) <= graphs
    return expected


def clipped(model, optimizer, scaler, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fifty_steps_with_infinite_ones(name):
    """One graph for the first call, one for a step, one for a step that is skipped."""
    found = check(OPTIMIZERS[name], clipped, 3, count=50, infinite=(3, 7, 30, 31))
    scales = [left[1]["scale"] for _, left in found]
    assert max(scales) > 1024.0
    assert sum(b < a for a, b in itertools.pairwise(scales)) == 4


@pytest.mark.parametrize("name", ["SGD", "AdamW, fused"])
def test_one_that_is_not_enabled(name):
    check(OPTIMIZERS[name], clipped, 2, infinite=(), scaler=lambda: scaling(enabled=False))


def test_not_unscaled_by_hand():
    def body(model, optimizer, scaler, x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    check(OPTIMIZERS["AdamW"], body, 3)


def test_a_scale_set_by_hand_inside_and_a_list_of_losses():
    def body(model, optimizer, scaler, x, y):
        optimizer.zero_grad()
        for loss in scaler.scale([nn.functional.cross_entropy(model(x), y)]):
            loss.backward()
        scaler.step(optimizer)
        scaler.update(32.0)

    check(OPTIMIZERS["SGD"], body, 3)


def test_a_state_dict_that_is_loaded_between():
    def between(number, model, optimizer, scaler):
        if number == 6:
            scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0, "growth_factor": 4.0})

    check(OPTIMIZERS["SGD"], clipped, 5, between=between)


def test_two_optimizers():
    def make(parameters):
        first, *others = parameters
        return torch.optim.SGD([first], lr=0.1), torch.optim.AdamW(others)

    found = []
    for wrap in (lambda f: f, compiled):
        torch.manual_seed(0)
        model, scaler = network(), scaling()
        optimizers = make(model.parameters())

        def step(x, y, model=model, scaler=scaler, optimizers=optimizers):
            model.zero_grad()
            scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
            scaler.unscale_(optimizers[1])
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()

        call = wrap(step)
        for x, y in inputs(12, (4, 5, 9)):
            call(x, y)
            found.append([left(model, optimizer, scaler) for optimizer in optimizers])
    assert is_same(found[12:], found[:12])
    assert 0 < len(foregrad.explain_recompiles(call)) <= 3


def gathered(model, optimizer, scaler, x, y, is_last):
    scaler.scale(nn.functional.cross_entropy(model(x), y) / 2).backward()
    if is_last:
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _gathering(wrap, labels):
    """What calls leave that gather two batches a step; `labels` by the number of the call."""
    torch.manual_seed(0)
    model = network()
    parts = model, torch.optim.AdamW(model.parameters(), lr=0.01), scaling()
    call, found = wrap(lambda *batch: gathered(*parts, *batch)), []
    for number, (x, y) in enumerate(inputs(16, (6, 11))):
        try:
            call(x, labels.get(number, y), number % 2 == 1)
        except (IndexError, RuntimeError) as error:
            found.append(type(error))
        found.append(left(*parts))
    return found, call


@pytest.mark.parametrize("failing", [(), (8, 10, 13)], ids=["", "some raise"])
def test_gradients_of_two_batches(failing):
    """A call whose loss raises leaves what it found, gradients of the call before as well, and the next goes on."""
    labels = {number: torch.tensor([0, 1, 2, 9]) for number in failing}
    expected, _ = _gathering(lambda f: f, labels)
    found, call = _gathering(compiled, labels)
    assert is_same(found, expected)
    assert sum(x is IndexError or x is RuntimeError for x in found) == len(failing)
    assert len(foregrad.explain_recompiles(call)) <= 8  # with gradients or without, last or not, skipped or taken


@pytest.mark.parametrize("label", [99, -100], ids=["in the loss", "after the update"])
def test_a_step_that_raises_leaves_what_eager_leaves(label):
    """The loss refuses the first label and ignores the second, which the look-up of a row refuses."""

    def body(model, optimizer, scaler, x, y):
        clipped(model, optimizer, scaler, x, y)
        return nn.functional.embedding(y, model[0].weight)

    ends = []
    for wrap in (lambda f: f, compiled):
        torch.manual_seed(0)
        model = network()
        parts = model, torch.optim.SGD(model.parameters(), lr=0.1), scaling()
        call = wrap(lambda x, y, parts=parts: body(*parts, x, y))
        for _ in range(3):
            call(torch.ones(4, 8), torch.tensor([0, 1, 2, 0]))
        before = left(*parts)
        with pytest.raises(IndexError):
            call(torch.ones(4, 8), torch.tensor([0, 1, 2, label]))
        ends.append(left(*parts))
        assert is_same(ends[-1], before) == (label == 99)
    assert is_same(*ends)


def test_an_update_outside_is_refused_by_name():
    def body(model, optimizer, scaler, x, y):
        optimizer.zero_grad()
        scaler.scale(nn.functional.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)

    def between(number, model, optimizer, scaler):
        if number:
            scaler.update()

    expected, _ = trained(lambda f: f, OPTIMIZERS["SGD"], body, between=between)
    with pytest.warns(foregrad.errors.ForegradWarning, match=r"scaler\.update\(\)` in the step"):
        found, _ = trained(
            lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"),
            OPTIMIZERS["SGD"],
            body,
            between=between,
        )
    assert is_same(found, expected)
