"""Programs to start several times: `python -m tests.store.cache.warm NAME[,NAME] BACKEND`. Prints what each computed and what it
had to do.
"""

from __future__ import annotations

import hashlib
import json
import sys

import torch

import foregrad
from tests.store.cache.kept import PREPARED, register


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(6, 8), torch.nn.Linear(8, 1)
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("table", torch.arange(8.0))

    def forward(self, x):
        h = torch.sin(self.norm(self.first(x))) * self.table
        return self.second(h * torch.tensor([1.0, 2.0] * 4)).square().mean()


def train(**options):
    model, x = Net(), torch.randn(5, 6)
    compiled = foregrad.compile(model, **options)
    results = []
    for _ in range(3):
        loss = compiled(x)
        loss.backward()
        results += [loss, *(p.grad.clone() for p in model.parameters())]
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return [*results, *model.buffers()]


def several_sizes(sizes=(5, 9, 3), **options):
    model = Net()
    compiled = foregrad.compile(model, dynamic=True, **options)
    results = []
    for size in sizes:
        x = torch.randn(size, 6, requires_grad=True)
        loss = compiled(x)
        loss.backward()
        results += [loss, x.grad]
    return results


def other_sizes(**options):
    return several_sizes((7, 12, 4), **options)


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = torch.nn.LayerNorm(8), torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 2, 4).permute(2, 0, 3, 1, 4)
        h = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h.transpose(1, 2).reshape(batch, length, width)).sin().sum()


def lengths(sizes=((3, 5), (4, 7)), **options):
    compiled = foregrad.compile(Attention(), dynamic=True, **options)
    results = []
    for size in sizes:
        x = torch.randn(*size, 8, requires_grad=True)
        compiled(x).backward()
        results.append(x.grad)
    return results


def other_lengths(**options):
    return lengths(((5, 12), (2, 6)), **options)


def twice(**options):
    def force(x, w):
        (g,) = torch.autograd.grad((torch.sin(x @ w)).sum(), x, create_graph=True)
        return g.square().sum()

    f = foregrad.compile(force, **options)
    energy = foregrad.compile(lambda x, w: torch.sin(x @ w).sum(), **options)
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    (g,) = torch.autograd.grad(energy(x, w), x, create_graph=True)
    return [*torch.autograd.grad(f(x, w), (x, w)), *torch.autograd.grad(g.square().sum(), (x, w))]


def inference(**options):
    model = Net().eval()
    with torch.no_grad():
        return [foregrad.compile(model, **options)(torch.randn(4, 6))]


def writes(**options):
    def f(x, y):
        x.mul_(torch.sin(y))
        return x.view(-1)[:3], y + 1

    x, y = torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)
    a, b = foregrad.compile(f, **options)(x, y)
    (a.sum() + b.sum()).backward()
    return [x.detach(), a, b, y.grad]


def budget(**options):
    return train(**options, memory_budget=0.3)


def through_dynamo(**options):
    model = Net()
    compiled = torch.compile(model, backend="foregrad", options=options)
    loss = compiled(torch.randn(5, 6))
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


PROGRAMS = {f.__name__: f for f in (train, several_sizes, lengths, twice, inference, writes, budget, through_dynamo)}
OTHER_SIZES = {"several_sizes": other_sizes, "lengths": other_lengths}


def main():
    names, backend = sys.argv[1:]
    register()
    torch.set_num_threads(1)
    told = {name: run(name, backend) for name in names.split(",")}
    print(json.dumps(told if "," in names else told[names]))


def run(name, backend):
    PREPARED.clear()
    torch.manual_seed(0)
    found = (PROGRAMS | {f.__name__: f for f in OTHER_SIZES.values()})[name](backend=backend)
    digest = hashlib.sha256()
    for value in found:
        digest.update(json.dumps(value.detach().double().tolist()).encode())
    told = {"results": digest.hexdigest(), "prepared": len(PREPARED)}
    told["sums"] = [value.detach().double().abs().sum().item() for value in found]
    if backend == "inductor":
        from torch._dynamo.utils import counters

        told |= {key: counters["inductor"][f"fxgraph_cache_{key}"] for key in ("hit", "miss", "bypass")}
        counters.clear()
    return told


if __name__ == "__main__":
    main()
