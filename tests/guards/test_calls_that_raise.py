"""Calls that raise now and again: the calls in between are compiled, with few graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import foregrad
from foregrad.extend import view


def stable_roots():
    failed = []

    def root(x):
        try:
            return torch.linalg.cholesky(x)
        except torch.linalg.LinAlgError:
            failed.append(len(x))
            return torch.linalg.cholesky(x + 4 * torch.eye(4))

    return root, lambda: failed


def failures_by_kind():
    failed, seen = {}, set()

    def root(x):
        try:
            return torch.linalg.inv(x.clamp(min=0)).sum()
        except torch.linalg.LinAlgError as error:
            failed[f"call {len(failed)}"] = type(error).__name__
            seen.add(len(failed))
            return x.sum()

    return root, lambda: (failed, seen)


def counted_on_an_object():
    class Solver:
        def __init__(self):
            self.failures = 0

        def __call__(self, x):
            try:
                return torch.linalg.cholesky(x).sum()
            except torch.linalg.LinAlgError:
                self.failures += 1
                return x.sum()

    solver = Solver()
    return solver, lambda: solver.failures


class Counts:
    steps = failures = 0


def step(notes):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def training_step(x):
        loss = model(x).square().mean()
        if not loss < 1e3:
            notes(loss)
            raise FloatingPointError("the loss diverges")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return training_step, model


def step_with_a_list():
    losses = []
    function, model = step(lambda loss: losses.append(loss.item()))
    return function, lambda: (losses, model.weight.tolist())


def step_with_counts():
    Counts.steps = Counts.failures = 0

    def failed(loss):
        Counts.failures += 1

    inner, model = step(failed)

    def function(x):
        Counts.steps += 1
        return inner(x)

    return function, lambda: (Counts.steps, Counts.failures, model.weight.tolist())


PROGRAMS = [stable_roots, failures_by_kind, counted_on_an_object, step_with_a_list, step_with_counts]


def made(program, compiles):
    function, state = program()
    called = foregrad.compile(function, backend="eager", on_unsupported="eager") if compiles else function
    done = []
    for call in range(40):
        x = torch.eye(4) * (1 + call / 100)
        try:
            done.append(called(-1e6 * x if call % 4 == 2 else -x if call % 8 == 3 else x))
        except (FloatingPointError, torch.linalg.LinAlgError) as error:
            done.append(str(error))
        done.append(repr(state()))
    return done, called


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_calls_in_between(program):
    expected, _ = made(program, compiles=False)
    done, compiled = made(program, compiles=True)
    for a, b in zip(expected, done, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0) if torch.is_tensor(a) else None
        assert torch.is_tensor(a) or a == b
    assert len(view(compiled).graphs) <= 4
    assert sum(entry.count for entry in foregrad.explain_recompiles(compiled).eager) <= 2


def test_a_number_of_a_class_that_is_set_outside_is_an_input():
    class Options:
        temperature = 1.0

    def function(x):
        return torch.softmax(x / Options.temperature, -1)

    compiled = foregrad.compile(function, backend="eager")
    for call in range(6):
        Options.temperature = 1.0 + call
        assert torch.equal(compiled(torch.arange(3.0)), function(torch.arange(3.0)))
    assert len(view(compiled).graphs) == 2


def test_a_list_that_code_reads_after_all():
    seen = []

    def function(x):
        if x.sum() < 0:
            return x * len(seen)
        return x + 1

    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    for call in range(8):
        x = torch.full((2,), float(call % 2 or -1))
        assert torch.equal(compiled(x), function(x))
        seen.append(call)
