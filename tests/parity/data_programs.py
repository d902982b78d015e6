"""What users write with `.data` and `set_`: weights decayed, clamped, swapped, backed up, pruned, cast, flattened."""

from __future__ import annotations

import textwrap
from typing import Any

import torch

__all__ = ["EAGER", "MODULES", "PROGRAMS", "module_of", "source_of"]

# They give a tensor other sizes or another dtype, and gradients flow to it, or call `set_`: that runs eagerly.
EAGER = {
    "prune rows clone", "half then use", "double then use", "grow rows",
    "transpose data", "flat data", "free then use", "prune and return", "prune both", "prune one",
    "prune and put back", "prune twice", "prune both, one twice", "prune then decide", "prune beside writes",
    "grow embedding", "product then use", "resize then requires", "freeze prune unfreeze", "nonleaf data then inplace",
    "prune then inner grad", "set to tensor", "set plain", "set new storage",
}  # fmt: skip

P, X = "torch.nn.Parameter(torch.randn(2, 3))", "torch.randn(2, 3)"
N = f"{P} * 1"

# By name: what makes the arguments, what they are called, the body.
PROGRAMS = {
    "decay data": ((P,), "p", "p.data = p.data * 0.9"),
    "decay data then use": ((P, X), "p, x", "p.data = p.data * 0.9; return (p * x).sum()"),
    "use then decay": ((P, X), "p, x", "y = (p * x).sum(); p.data = p.data * 0.9; return y"),
    "use then decay copy": ((P, X), "p, x", "y = (p + x).sum(); p.data.mul_(0.9); return y"),
    "copy into data": ((P, X), "p, x", "p.data.copy_(x)"),
    "copy into data use": ((P, X), "p, x", "p.data.copy_(x); return p * 2"),
    "ema to param": ((P, P), "p, e", "p.data = e.data"),
    "ema to param use": ((P, P), "p, e", "p.data = e.data; return p.sin()"),
    "ema update": ((P, P), "p, e", "e.data.mul_(0.99).add_(p.data, alpha=0.01); return p.sin()"),
    "ema update assign": ((P, P), "p, e", "e.data = 0.99 * e.data + 0.01 * p.data; return p.sin()"),
    "ema lerp": ((P, P), "p, e", "with torch.no_grad():\n    e.lerp_(p, 0.01)\nreturn p * 2"),
    "swap data": ((P, P), "p, e", "t = p.data; p.data = e.data; e.data = t"),
    "swap data use": ((P, P), "p, e", "t = p.data; p.data = e.data; e.data = t; return p * e"),
    "swap tuple": ((P, P), "p, e", "p.data, e.data = (e.data, p.data); return p.sin() + e"),
    "swap eval swap back": (
        (P, P),
        "p, e",
        "p.data, e.data = (e.data, p.data); y = p.sin(); p.data, e.data = (e.data, p.data); return y",
    ),
    "swap eval nograd": (
        (P, P),
        "p, e",
        "keep = p.data\np.data = e.data\nwith torch.no_grad():\n    y = p.sin()\np.data = keep\nreturn y",
    ),
    "backup clone restore": (
        (P, P),
        "p, e",
        "b = p.data.clone(); p.data.copy_(e.data); y = p.exp().sum(); p.data.copy_(b); return y",
    ),
    "backup clone assign": (
        (P, P),
        "p, e",
        "b = p.data.clone(); p.data = e.data; y = (p * 2).sum(); p.data = b; return y",
    ),
    "clamp data": ((P,), "p", "p.data.clamp_(-0.1, 0.1); return p * 2"),
    "clamp assign": ((P,), "p", "p.data = p.data.clamp(-0.1, 0.1); return p * 2"),
    "norm data": ((P,), "p", "p.data.div_(p.data.norm()); return p * 2"),
    "norm assign": ((P,), "p", "p.data = p.data / p.data.norm(); return p * 2"),
    "half data": ((P,), "p", "p.data = p.data.half()"),
    "half plain": ((X,), "x", "x.data = x.data.half(); return x * 2"),
    "prune mask": ((P,), "p", "p.data = p.data * (p.data.abs() > 0.5); return p * 2"),
    "free data": ((P,), "p", "y = p * 2; p.data = torch.empty(0); return y"),
    "free data new": ((P,), "p", "y = (p * p).sum(); p.data = p.data.new_empty(0); return y"),
    "zeros data": ((P,), "p", "p.data = torch.zeros_like(p); return p.sin()"),
    "grad step": ((P, X), "p, x", "p.data = p.data - 0.1 * x; return p * 2"),
    "grad step inplace": ((P, X), "p, x", "p.data -= 0.1 * x; return p * 2"),
    "grad step add": ((P, X), "p, x", "p.data.add_(x, alpha=-0.1); return p * p"),
    "inner sgd": (
        (P, X),
        "p, x",
        "g, = torch.autograd.grad((p * x).pow(2).sum(), p); p.data = p.data - 0.1 * g; return (p * x).sum()",
    ),
    "inner sgd inplace": (
        (P, X),
        "p, x",
        "g, = torch.autograd.grad((p * x).pow(2).sum(), p); p.data.add_(g, alpha=-0.1); return (p * x).sum()",
    ),
    "inner sgd nograd": (
        (P, X),
        "p, x",
        "g, = torch.autograd.grad((p * x).pow(2).sum(), p)\nwith torch.no_grad():\n    p -= 0.1 * g\nreturn (p * x).sum()",
    ),
    "buffer assign": ((X, X), "x, b", "b.data = x.mean(0); return x + b"),
    "buffer running": ((X, X), "x, b", "b.data = 0.9 * b.data + 0.1 * x; return x * b"),
    "buffer copy": ((X, X), "x, b", "b.copy_(0.9 * b + 0.1 * x); return x * b"),
    "data of nonleaf": ((N, P), "x, y", "x.data = y.data; return x * y"),
    "data of nonleaf clone": ((N, P), "x, y", "x.data = x.data.clone(); return x * y"),
    "data of intermediate": ((N, P), "x, y", "z = x * y; z.data = z.data.clamp(0, 1); return z"),
    "data of intermediate use": ((N, P), "x, y", "z = x * y; z.data = z.data.clamp(0, 1); return z.sin()"),
    "data mul intermediate": ((N, P), "x, y", "z = x * y; z.data.mul_(2); return z.sin()"),
    "data intermediate half": ((N, P), "x, y", "z = x + y; z.data = z.data.round(); return z"),
    "ste": ((N, P), "x, y", "z = x.clone(); z.data = torch.sign(x.data); return z * y"),
    "ste detach": ((N, P), "x, y", "z = x.clone(); z.data = (x > 0).float(); return (z * y).sum()"),
    "quant weight restore": (
        (N, P),
        "x, y",
        "w = y.data.clone(); y.data = (y.data * 8).round() / 8; out = (x * y).sum(); y.data = w; return out",
    ),
    "quant weight restore p": (
        (P,),
        "p",
        "w = p.data; p.data = (p.data * 8).round() / 8; out = (p * 3).sum(); p.data = w; return out",
    ),
    "set to tensor": ((P, X), "p, x", "with torch.no_grad():\n    p.set_(x)"),
    "set plain": ((X, X), "x, y", "x.set_(y)"),
    "set new storage": (
        (X, X),
        "x, y",
        "t = torch.empty(0); t.set_(x.untyped_storage(), 0, x.shape, x.stride()); t.add_(1); return t",
    ),
    "detach data req": ((P,), "p", "p.data = p.data.detach().clone(); p.requires_grad_(False); return p * 2"),
    "freeze then data": ((P,), "p", "p.requires_grad_(False); p.data = p.data * 2; return p * 2"),
    "data then freeze unfreeze": (
        (P,),
        "p",
        "p.requires_grad_(False); p.data = p.data * 2; p.requires_grad_(True); return p * 2",
    ),
    "data then requires": ((X,), "x", "x.data = x.data * 2; x.requires_grad_(); return x * 3"),
    "tie data": ((P, P), "p, e", "p.data = e.data; p.data.add_(1); return p * e"),
    "view data": ((P, X), "p, x", "p.data = x.view(-1)[:6].view(2, 3); return p * 2"),
    "flatten params": (
        (P, X),
        "p, x",
        "flat = torch.cat([p.data.view(-1), x.view(-1)]); p.data = flat[:6].view(2, 3); x.data = flat[6:].view(2, 3); return flat",
    ),
    "flatten params use": (
        (P, X),
        "p, x",
        "flat = torch.cat([p.data.view(-1), x.view(-1)]); p.data = flat[:6].view(2, 3); x.data = flat[6:].view(2, 3); return (p * x, flat)",
    ),
    "dropconnect": (
        (P,),
        "p",
        "raw = p.data.clone(); p.data = torch.nn.functional.dropout(p.data, 0.5); y = (p * 2).sum(); p.data = raw; return y",
    ),
    "channels last data": ((P,), "p", "p.data = p.data.as_strided((2, 3), (1, 2)).clone(); return p * 2"),
    "to data": ((P,), "p", "p.data = p.data.to(torch.float64).to(torch.float32); return p * 2"),
    "data index": ((P, P), "p, e", "p.data[0] = e.data[1]; return p * 2"),
    "data fill": ((P, P), "p, e", "p.data.fill_(1.0); e.data.zero_(); return p * e"),
    "data uniform": ((P,), "p", "p.data.uniform_(-1, 1); return p * 2"),
    "data normal assign": ((P,), "p", "p.data = torch.randn_like(p); return p * 2"),
    "data no grad assign": ((P,), "p", "with torch.no_grad():\n    p.data = p * 0.5\nreturn p * 2"),
    "data assign inside expr": ((P,), "p", "y = p.sin(); p.data = y.detach(); return y + p"),
    "data assign result": ((P,), "p", "y = p.detach() * 2; p.data = y; return y"),
    "data assign then inplace nograd": (
        (P,),
        "p",
        "p.data = p.data.clone()\nwith torch.no_grad():\n    p.mul_(2)\nreturn p * 2",
    ),
    "nonleaf data then inplace": ((N, P), "x, y", "x.data = x.data.clone(); x.mul_(y); return x"),
    "view nonleaf data": ((N, P), "x, y", "v = x[0]; x.data = x.data.clone(); return (v * 2, x * y)"),
    "param view then data": ((P,), "p", "v = p[0]; p.data = p.data.clone(); return (v * 2, p * 2)"),
    "data view after": ((P,), "p", "p.data = p.data.clone(); return (p[0], p.t())"),
    "prune rows": ((P,), "p", "p.data = p.data[:2]; return p * 2"),
    "prune rows clone": ((P,), "p", "p.data = p.data[:1].clone(); return (p * p).sum()"),
    "half then use": ((P,), "p", "p.data = p.data.half(); return p * 2"),
    "double then use": ((P,), "p", "p.data = p.data.double(); return (p * p).sum()"),
    "grow rows": ((P,), "p", "p.data = torch.cat([p.data, p.data.new_zeros(1, 3)]); return (p * p).sum()"),
    "transpose data": ((P,), "p", "p.data = p.data.t(); return (p * p).sum()"),
    "flat data": ((P,), "p", "p.data = p.data.view(-1); return p.sin()"),
    "free then use": ((P,), "p", "p.data = torch.empty(0); return p.sin()"),
    "prune and return": ((P,), "p", "p.data = p.data[:1]; return p, p * p, p[0]"),
    "prune both": ((P, P), "p, e", "p.data = p.data[:1]; e.data = e.data[:1]; return p * e"),
    "prune one": ((P, P), "p, e", "p.data = p.data[:1]; return p * e[:1], e.sin()"),
    "prune and put back": ((P,), "p", "w = p.data; p.data = p.data[:1]; y = p * 2; p.data = w; return y"),
    "prune twice": ((P,), "p", "p.data = p.data[:1]; y = p * 2; p.data = p.data[:, :1]; return y"),
    "prune both, one twice": (
        (P, P),
        "p, e",
        "p.data = p.data[:1]; y = p * 2; e.data = e.data[:1]; z = e * 2; p.data = p.data[:, 0]; return y, z",
    ),
    "prune then decide": (
        (P,),
        "p",
        "p.data = p.data[:1]\nif p.sum().item() > 0:\n    return p * 2\nreturn p * 3",
    ),
    "prune beside writes": ((P, X), "p, x", "x.mul_(2); p.data = p.data[:1]; x.add_(1); return p * x[:1]"),
    "grow embedding": (
        (P, "torch.tensor([0, 2])"),
        "p, x",
        "p.data = torch.cat([p.data, p.data[:1]]); return torch.nn.functional.embedding(x, p)",
    ),
    "product then use": ((P, P), "p, e", "p.data = (p.data @ e.data.t()).contiguous(); return (p * p).sum()"),
    "resize then requires": ((X,), "x", "x.resize_(2); x.requires_grad_(); return x * 2"),
    "freeze prune unfreeze": (
        (P,),
        "p",
        "p.requires_grad_(False); p.data = p.data[:1]; p.requires_grad_(); return p * 2",
    ),
    "prune then inner grad": (
        (P,),
        "p",
        "p.data = p.data[:1]; g, = torch.autograd.grad((p * p).sum(), p); return g, p * 2",
    ),
}

# The same in the `forward(self, x)` of a module with `weight`, `bias`, and buffers `ema` and `n`.
MODULES = {
    "weight data": "self.weight.data = self.weight.data * 0.9; return x @ self.weight",
    "clamp": "self.weight.data.clamp_(-0.5, 0.5); return x @ self.weight",
    "ema": "self.ema.data = 0.9 * self.ema + 0.1 * self.weight.data; return x @ self.weight",
    "use ema": "w = self.weight.data; self.weight.data = self.ema; y = x @ self.weight; self.weight.data = w; return y",
    "use ema data": "w = self.weight.data; self.weight.data = self.ema.data; y = x @ self.weight + self.bias; self.weight.data = w; return y",
    "swap": "self.weight.data, self.ema.data = (self.ema.data, self.weight.data); return x @ self.weight",
    "set from input": "self.weight.data = x.detach().t() @ x.detach(); return x @ self.weight",
    "buffer new": "self.n.data = self.n + 1; return x * self.n",
    "weight norm": "self.weight.data = self.weight.data / self.weight.data.norm(dim=1, keepdim=True); return torch.nn.functional.linear(x, self.weight, self.bias)",
    "spectral": "with torch.no_grad():\n    v = self.bias / self.bias.norm()\n    u = self.weight @ v\n    self.n.data = u.dot(u)\nreturn x @ (self.weight / self.n)",
    "clone backup": "b = {n: p.data.clone() for n, p in self.named_parameters()}\nfor p in self.parameters():\n    p.data.add_(0.1)\ny = x @ self.weight + self.bias\nfor n, p in self.named_parameters():\n    p.data.copy_(b[n])\nreturn y",
    "clone backup assign": "b = {n: p.data.clone() for n, p in self.named_parameters()}\nfor p in self.parameters():\n    p.data = p.data + 0.1\ny = x @ self.weight + self.bias\nfor n, p in self.named_parameters():\n    p.data = b[n]\nreturn y",
    "sam": "old = [p.data for p in self.parameters()]\nfor p in self.parameters():\n    p.data = p.data * 1.1\ny = (x @ self.weight + self.bias).tanh()\nfor p, o in zip(self.parameters(), old):\n    p.data = o\nreturn y",
    "bias free": "y = x @ self.weight + self.bias; self.bias.data = self.bias.data.new_empty(0).resize_(3).zero_(); return y",
}


def source_of(name: str) -> str:
    """With `make_args` and `f`, as `tests.parity.programs.load` takes it."""
    arguments, names, body = PROGRAMS[name]
    made = f"def make_args():\n    return ({', '.join(arguments)},)"
    return f"{made}\n\n\ndef f({names}):\n{_indented(body)}\n"


def module_of(name: str) -> torch.nn.Module:
    space: dict[str, Any] = {"torch": torch}
    exec(f"def forward(self, x):\n{_indented(MODULES[name])}\n", space)
    return type("Module", (_Module,), {"forward": space["forward"]})()


class _Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 3))
        self.bias = torch.nn.Parameter(torch.randn(3))
        self.register_buffer("ema", torch.randn(3, 3))
        self.register_buffer("n", torch.zeros(()))


def _indented(body: str) -> str:
    return textwrap.indent(body, "    ")
