"""A training step on eager's kernels updates parameters and the optimizer's state where they are, gradient by gradient."""

import contextlib

import pytest
import torch
from torch import nn

import foregrad
from foregrad._torch.memory import _peak
from foregrad.backends import eager, in_place

WIDTH, LAYERS = 256, 6
SIZE = LAYERS * WIDTH * WIDTH * 4  # bytes of the weights

OPTIMIZERS = {
    "SGD": lambda p, **k: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01, **k),
    "AdamW": lambda p, **k: torch.optim.AdamW(p, lr=0.01, **k),
    "RMSprop": lambda p, **k: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True, **k),
}


def trained(optimizer, *, clip=False, **how):
    """(a step, the model, its optimizer)."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    made = OPTIMIZERS[optimizer](model.parameters(), **how)
    x = torch.randn(2, WIDTH)

    def step():
        loss = model(x).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        made.step()
        made.zero_grad()
        return loss.detach()

    return step, model, made


def source(call):
    return call.foregrad.specializations[-1].product.compiled.forward.source()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_gradients_are_freed_one_by_one(optimizer):
    step, model, made = trained(optimizer)
    call = foregrad.compile(trained_step := trained(optimizer)[0], backend="eager")
    for _ in range(3):
        assert torch.equal(step(), call())
    assert _peak(call) < _peak(trained_step) - 0.7 * SIZE
    assert all(parameter.grad is None for parameter in model.parameters())
    assert made.state


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(
    "how", [{"clip": True}, {"foreach": True}, {"foreach": True, "clip": True}, {"capturable": False}]
)
def test_no_more_memory_than_eager(optimizer, how):
    if "capturable" in how and optimizer == "SGD":
        how = {}
    step = trained(optimizer, **how)[0]
    call = foregrad.compile(trained(optimizer, **how)[0], backend="eager")
    for _ in range(3):
        assert torch.equal(step(), call())
    assert _peak(call) <= _peak(step) + 4096


FUSED = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
}


@pytest.mark.parametrize("optimizer", FUSED)
def test_fused_optimizers_write_in_place_and_move_the_versions_that_eager_moves(optimizer):
    """Their kernels move the version of the count of steps alone, so the graph is given the others through `data`."""
    found, peaks = [], []
    for wrap in (lambda function: function, lambda function: foregrad.compile(function, backend="eager")):
        model = trained("SGD")[1]
        made = FUSED[optimizer](model.parameters())
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(0))

        def step(model=model, made=made, x=x):
            loss = model(x).square().mean()
            loss.backward()
            made.step()
            made.zero_grad()
            return loss.detach()

        call = wrap(step)
        losses = [call() for _ in range(50)]
        state = [value for of_one in made.state.values() for value in of_one.values()]
        found.append([losses, *model.parameters(), *state])
        found[-1].append([tensor._version for tensor in (*model.parameters(), *state)])
        peaks.append(_peak(call))
    (losses, *tensors, versions), (our_losses, *ours, our_versions) = found
    assert all(map(torch.equal, [*losses, *tensors], [*our_losses, *ours]))
    assert our_versions == versions
    assert peaks[1] <= peaks[0] + 4096


def test_the_runtime_copies_nothing_that_the_graph_wrote():
    step, _, _ = trained("AdamW")
    call = foregrad.compile(step, backend="eager")
    for _ in range(3):
        call()
    assert "copy_" not in call.foregrad.specializations[-1].source()
    assert "addcdiv_" in source(call)


def test_a_weight_that_is_read_later_is_written_later():
    """The gradient of the first factor needs the second as it was."""
    a, b = (nn.Parameter(torch.linspace(1, 2, 4)) for _ in range(2))
    made = torch.optim.SGD([a, b], lr=0.5)

    def step(x):
        (x * a * b).sum().backward()
        made.step()
        made.zero_grad()
        return a * b

    call, values = foregrad.compile(step, backend="eager"), []
    for run in (step, call):
        with torch.no_grad():
            a.copy_(torch.linspace(1, 2, 4)), b.copy_(torch.linspace(3, 1, 4))
        values.append(
            [run(torch.ones(4)).detach().clone() for _ in range(3)] + [a.detach().clone(), b.detach().clone()]
        )
    assert all(map(torch.equal, *values))


def test_old_values_that_are_kept_are_not_overwritten():
    weight, average, before = nn.Parameter(torch.ones(8)), torch.zeros(8), torch.zeros(8)

    def step(x):
        weight.grad = None
        (weight * x).square().sum().backward()
        old = weight.detach().clone()
        with torch.no_grad():
            before.copy_(weight)
            weight.sub_(weight.grad, alpha=0.1)
            average.lerp_(weight, 0.5)
        return old, weight.grad * 2

    call, values = foregrad.compile(step, backend="eager"), []
    for run in (step, call):
        with torch.no_grad():
            weight.fill_(1), average.zero_(), before.zero_()
        found = []
        for number in range(3):
            found += [value.clone() for value in run(torch.full((8,), number / 4))]
            found += [value.detach().clone() for value in (weight, average, before, weight.grad)]
        values.append(found)
    assert all(map(torch.equal, *values))


@pytest.mark.parametrize("longest", [4000, 1], ids=["whole", "in parts"])
def test_an_error_in_the_middle_says_that_updates_were_made(longest, monkeypatch):
    """As eager's, which stops with the first parameter updated."""
    monkeypatch.setattr(eager, "_LONGEST", longest)
    monkeypatch.setattr(eager, "_PART", longest)
    monkeypatch.setattr(in_place, "_FEW_ELEMENTS", 0)
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    indices = torch.zeros(4, dtype=torch.long)

    def step(index):
        with torch.no_grad():
            first.mul_(2).sub_(1.5)
            second.add_(second.gather(0, index))

    call = foregrad.compile(step, backend="eager")
    call(indices)
    assert first.tolist() == [0.5] * 4
    with pytest.raises(RuntimeError, match="out of bounds") as caught:
        call(indices + 7)
    assert first.tolist() == [-0.5] * 4  # as in eager
    assert second.tolist() == [2.0] * 4
    (note,) = caught.value.__notes__
    assert "2 of 3 writes to parameters" in note


def test_small_updates_wait_for_an_operator_that_may_raise():
    """So the call can be made again, in eager: what that has done by then is done, and the program's count is right."""
    first, second, counted = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4)), {"steps": 0, "whole": 0}
    indices = torch.zeros(4, dtype=torch.long)

    def step(index):
        counted["steps"] += 1
        with torch.no_grad():
            first.mul_(2).sub_(1.5)
            second.add_(second.gather(0, index))
        counted["whole"] += 1

    call = foregrad.compile(step, backend="eager")
    for _ in range(3):
        first.data.fill_(1), second.data.fill_(1)
        call(indices)
    with pytest.raises(RuntimeError, match="out of bounds") as caught:
        call(indices + 7)
    assert not getattr(caught.value, "__notes__", [])
    assert (first.tolist(), second.tolist()) == ([-0.5] * 4, [2.0] * 4)
    assert counted == {"steps": 4, "whole": 3}


def test_small_updates_are_made_in_place_behind_an_operator_that_may_raise():
    total, mean, row, counted = torch.zeros(()), torch.zeros(3), torch.zeros(3), {"n": 0}

    def step(x, i):
        counted["n"] += 1
        total.add_(1)
        mean.copy_(x.mean(0))
        y = x[i].sin()
        row.copy_(torch.zeros(3).scatter(0, i, 1.0))
        return y

    call, left = foregrad.compile(step, backend="eager"), []
    for function in (step, call):
        for state in (total, mean, row):
            state.zero_()
        counted["n"] = 0
        for index in (1, 1, 9, 1, -9):
            with contextlib.suppress(IndexError, RuntimeError):
                function(torch.ones(4, 3), torch.tensor([index]))
        left.append((total.item(), mean.tolist(), row.tolist(), counted["n"]))
    assert left[0] == left[1]
    text = source(call)
    assert "add_(" in text and "copy_(" in text and "scatter" in text
    assert text.index("scatter") < min(text.index("add_("), text.index("copy_("))
    assert "copy_" not in call.foregrad.specializations[-1].source()


def test_an_error_before_the_first_update_says_nothing():
    weight = nn.Parameter(torch.ones(4))

    def step(index):
        with torch.no_grad():
            weight.add_(weight.gather(0, index))

    call = foregrad.compile(step, backend="eager")
    call(torch.zeros(4, dtype=torch.long))
    with pytest.raises(RuntimeError, match="out of bounds") as caught:
        call(torch.full((4,), 7))
    assert not getattr(caught.value, "__notes__", [])
    assert weight.tolist() == [2.0] * 4
