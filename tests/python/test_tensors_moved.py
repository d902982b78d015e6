"""Tensors that a call moves from place to place are read where they were before it."""

import collections
import warnings

import pytest
import torch
from torch import nn

import foregrad

PROGRAMS = [
    "self.a, self.b = self.b, self.a\nreturn x * self.a + self.b * 3",
    "self.l.insert(0, self.l.pop())\nreturn x + self.l[0] + 2 * self.l[1]",
    "self.l.reverse()\nreturn x * self.l[0]",
    "self.d['x'], self.d['y'] = self.d['y'], self.d['x']\nreturn x + self.d['x']",
    "self.a = self.l[0]\nself.l[0] = self.a + x\nreturn self.a * 2",
    "self.l[0] = self.a\nself.a = x\nreturn self.l[0] + self.a",
    "t = self.l.pop(0)\nself.l.append(t * 2)\nreturn t + self.l[0]",
    "self.l = self.l[1:] + self.l[:1]\nreturn x + self.l[0]",
    "self.d = {'x': self.d['y'], 'y': self.d['x']}\nreturn x + self.d['x']",
    "self.q.append(x * 2)\nreturn x + self.q[0]",
    "self.q.rotate(1)\nreturn x + self.q[0]",
    "self.q.appendleft(self.q.pop())\nself.a = self.q[0]\nreturn x + self.a",
]


def full(value):
    return torch.full((2,), float(value))


def run(body, wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = full(1), full(2)
            self.l = [full(3), full(4), full(5)]
            self.d = {"x": full(6), "y": full(7)}
            self.q = collections.deque([full(8), full(9)], maxlen=2)

    made = {}
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    exec(f"def forward(self, x):\n{lines}", {"__name__": "moved_by_a_user", "torch": torch}, made)
    Model.forward = made["forward"]
    module = Model()
    call = wrap(module)
    found = []
    for i in range(5):
        out = call(full(i))
        held = [module.a, module.b, *module.l, *module.d.values(), *module.q]
        assert all(type(tensor) is torch.Tensor for tensor in held)
        found.append((out.tolist(), [tensor.tolist() for tensor in held]))
    return found, call


@pytest.mark.parametrize("body", PROGRAMS)
def test_as_in_eager(body):
    with warnings.catch_warnings():
        warnings.simplefilter("error", foregrad.errors.ForegradWarning)
        found, call = run(body, lambda m: foregrad.compile(m, backend="eager"))
    assert found == run(body, lambda m: m)[0]
    if not body.startswith(("self.l = ", "self.d = ")):  # another list in each call is another graph in each
        assert len(foregrad.explain_recompiles(call)) <= 2


def test_a_parameter_made_in_each_call_makes_it_eager():
    class Model(nn.Module):
        def forward(self, x):
            self.scale = nn.Parameter(torch.ones(3))
            return x * self.scale

    model = Model()
    model.scale = None
    call = foregrad.compile(model, backend="eager", on_unsupported="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(4):
            call(torch.ones(3)).sum().backward()
            assert type(model.scale) is nn.Parameter
            assert torch.equal(model.scale.grad, torch.ones(3))


class Sent(nn.Module):
    """Sends its layers to where they are, in each call, as code does that may be given another device."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.recurrent = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.GRU(3, 3)

    def forward(self, x):
        self.linear.to(x.device)
        self.norm.cpu().float()
        self.to(device=x.device, dtype=x.dtype)
        return self.recurrent(self.norm(self.linear(x)))[0]


def test_a_module_that_is_sent_to_where_it_is():
    found = []
    for wrap in (lambda m: m, lambda m: foregrad.compile(m, backend="eager")):
        torch.manual_seed(0)
        model = Sent()
        parameters = list(model.parameters())
        call = wrap(model)
        losses = [call(torch.ones(4, 3) * i).sum() for i in range(3)]
        losses[1].backward()
        assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
        found.append([*losses, *(p.grad for p in parameters), *model.buffers()])
    for eager, ours in zip(*found, strict=True):
        assert torch.equal(eager, ours)


def test_a_module_that_is_sent_elsewhere_is_eagers():
    class Model(nn.Module):
        def forward(self, x):
            return layer.double()(x.double())

    layer = nn.Linear(3, 3)
    call = foregrad.compile(Model(), backend="eager", on_unsupported="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            assert call(torch.ones(2, 3)).dtype is torch.float64
            assert layer.weight.dtype is torch.float64
            assert type(layer.weight) is nn.Parameter
