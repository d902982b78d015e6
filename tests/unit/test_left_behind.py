"""An attribute set to the very tensor that it holds (`self.u = f(..., out=self.u)`) is no tensor left behind."""

from __future__ import annotations

import contextvars
import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import foregrad


class Kept(nn.Module):
    """`state` is written in place and assigned; how, is for each kind another."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.register_buffer("state", torch.ones(4))
        self.plain = torch.ones(4)
        self.table = {"state": torch.ones(4)}

    def forward(self, x):
        with torch.no_grad():
            if self.kind == "out":
                self.state = torch.add(self.state, x.detach().sum(0), out=self.state)
            elif self.kind == "in place":
                self.state = self.state.mul_(0.5)
            elif self.kind == "augmented":
                self.state += 1
            elif self.kind == "itself":
                self.state = self.state
            elif self.kind == "plain attribute":
                self.plain = self.plain.add_(1)
            elif self.kind == "item":
                self.table["state"] = self.table["state"].add_(1)
        return (x * self.state * self.plain * self.table["state"]).sum()


KINDS = ("out", "in place", "augmented", "itself", "plain attribute", "item")


@pytest.mark.parametrize("kind", KINDS)
def test_an_attribute_set_to_what_it_holds(kind):
    eager = Kept(kind)
    module = copy.deepcopy(eager)
    kept = [module.state, module.plain, module.table["state"]]
    compiled = foregrad.compile(module, backend="eager")
    for step in range(3):
        results = []
        for f in (eager, compiled):
            x = torch.full((2, 4), float(step), requires_grad=True)
            out = f(x)
            out.backward()
            results.append((out.detach(), x.grad))
        assert all(map(torch.equal, *results))
    assert len(compiled.foregrad.specializations) == 1
    now = [module.state, module.plain, module.table["state"]]
    assert all(a is b for a, b in zip(now, kept, strict=True))
    assert all(map(torch.equal, now, [eager.state, eager.plain, eager.table["state"]]))


def test_a_buffer_set_to_another_is_set_in_each_call():
    module = Kept("none")
    module.forward = lambda x: setattr(module, "state", module.state + 1) or x.sum()
    compiled = foregrad.compile(module.forward, backend="eager")
    for n in range(1, 4):
        compiled(torch.ones(2, 4))
        assert torch.equal(module.state, torch.full((4,), 1.0 + n))
    assert len(compiled.foregrad.specializations) == 1


def test_spectral_norm_is_compiled_in_training():
    layer = parametrizations.spectral_norm(nn.Linear(4, 4))
    eager = copy.deepcopy(layer)
    compiled = foregrad.compile(layer, backend="eager")
    for _ in range(3):
        x = torch.randn(2, 4)
        assert torch.equal(compiled(x), eager(x))
    assert len(compiled.foregrad.specializations) == 1
    assert all(map(torch.equal, layer.state_dict().values(), eager.state_dict().values()))


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
def test_a_module_that_is_come_by_out_of_sight_keeps_no_tensor_of_a_capture():
    class Keeping(nn.Module):
        last = None

        def forward(self, x):
            self.last = x * 2
            return self.last.sin()

    kept = contextvars.ContextVar("kept")
    kept.set(Keeping())
    compiled = foregrad.compile(lambda x: kept.get()(x), backend="eager")
    for n in range(3):
        x = torch.full((3,), float(n))
        assert torch.equal(compiled(x), (x * 2).sin())
        assert torch.equal(kept.get().last, x * 2)
