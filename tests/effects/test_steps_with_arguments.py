"""A training step that is given its model, optimizer, scheduler and scaler, as many are written."""

import dataclasses
import gc
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import foregrad
from tests.effects.test_training_steps import compiled, is_same
from tests.effects.training_steps import network, seen

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "of the program": lambda p: Counting(p),
}


class Counting(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["steps"], state["mean"] = 0, torch.zeros_like(p)
                state["steps"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                p.sub_(state["mean"] / (1 - 0.9 ** state["steps"]), alpha=group["lr"])


@dataclasses.dataclass
class Trainer:
    model: Any
    optimizer: Any
    scheduler: Any
    scaler: Any
    losses: Any = 0.0


def train(t, x, y):
    loss = nn.functional.cross_entropy(t.model(x), y)
    t.scaler.scale(loss).backward()
    t.scaler.step(t.optimizer)
    t.scaler.update()
    t.scheduler.step()
    t.optimizer.zero_grad()
    t.losses = t.losses + loss.detach()
    return loss.detach()


def one_by_one(model, optimizer, scheduler, scaler, x, y):
    return train(types.SimpleNamespace(**vars(Trainer(model, optimizer, scheduler, scaler))), x, y)


def _parts(make):
    model = network()
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return model, optimizer, scheduler, torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("how", ["one by one", "in an object"])
def test_as_in_eager(how, name):
    found = []
    for wrap in (lambda f: f, compiled):
        torch.manual_seed(0)
        parts = _parts(OPTIMIZERS[name])
        given, call = (parts, wrap(one_by_one)) if how == "one by one" else ((Trainer(*parts),), wrap(train))
        steps = [(call(*given, torch.randn(4, 8), torch.randint(0, 3, (4,))), seen(parts[0])) for _ in range(12)]
        found.append([steps, *(part.state_dict() for part in parts[1:])])
    assert is_same(*found)
    assert 0 < len(foregrad.explain_recompiles(call)) <= 6


def test_each_model_with_its_optimizer():
    """And one with the optimizer of another, which has no gradient to step on."""
    found = []
    for wrap in (lambda f: f, compiled):
        torch.manual_seed(0)
        pairs = [_parts(OPTIMIZERS["AdamW"])[:2] for _ in range(2)]

        def step(model, optimizer, x):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        call = wrap(step)
        for number in range(12):
            call(*pairs[number // 2 % 2], torch.randn(4, 8))
        call(pairs[0][0], pairs[1][1], torch.randn(4, 8))
        found.append([seen(*(model for model, _ in pairs)), [optimizer.state_dict() for _, optimizer in pairs]])
    assert is_same(*found)
    assert 0 < len(foregrad.explain_recompiles(call)) <= 3


def test_the_compiled_step_keeps_no_argument_alive():
    def step(model, optimizer, scaler, x):
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    call = compiled(step)
    model, optimizer, _, scaler = parts = _parts(OPTIMIZERS["AdamW"])
    for _ in range(4):
        call(model, optimizer, scaler, torch.randn(4, 8))
    given = [weakref.ref(part) for part in (model, optimizer, scaler)]
    del model, optimizer, scaler, parts, _
    gc.collect()
    assert [part() for part in given] == [None] * 3
    assert 0 < len(foregrad.explain_recompiles(call)) <= 3


def test_an_optimizer_that_the_function_makes_is_another_one_in_each_call():
    model = network()
    call = compiled(lambda x: (torch.optim.SGD(model.parameters(), lr=0.1), x + 1))
    made = [call(torch.ones(1))[0] for _ in range(3)]
    assert len({id(optimizer) for optimizer in made}) == 3
    assert all(optimizer.param_groups[0]["params"][0] is model[0].weight for optimizer in made)
