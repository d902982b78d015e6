"""Training under `DistributedDataParallel`, on the CPU: what each process sees, for a module made by `SIDES`."""

import copy
import sys

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import foregrad
from tests.distributed.ranks import joined


class Net(nn.Module):
    def __init__(self, *, unused=False):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, x):
        return self.second(nn.functional.dropout(self.norm(self.first(x)).tanh(), 0.25))


VARIANTS = {
    "plain": {},
    "unused parameters": {"find_unused_parameters": True},
    "gradients in buckets": {"gradient_as_bucket_view": True},
    "a static graph": {"static_graph": True},
    "buffers apart": {"broadcast_buffers": False},
    "without synchronization": {},
}

SIDES = {
    "eager": lambda net, settings: DistributedDataParallel(net, **settings),
    "outside": lambda net, settings: foregrad.compile(DistributedDataParallel(net, **settings), backend="eager"),
    "inside": lambda net, settings: DistributedDataParallel(foregrad.compile(net, backend="eager"), **settings),
}


def train(variant, side, rank):
    torch.manual_seed(0)
    net = Net(unused=variant == "unused parameters")
    model = SIDES[side](copy.deepcopy(net), VARIANTS[variant])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = [list(model.state_dict())]
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        x, y = torch.randn(8, 4), torch.randn(8, 2)
        optimizer.zero_grad()
        if variant == "without synchronization":
            with model.no_sync():
                nn.functional.mse_loss(model(x), y).backward()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        seen.append(loss.detach().clone())
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
        seen += [tensor.clone() for tensor in model.state_dict().values()]
    return seen


def is_same(one, two):
    if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor):
        return torch.equal(one, two)
    return one == two


def differences(rank):
    for variant in VARIANTS:
        eager = train(variant, "eager", rank)
        for side in ("outside", "inside"):
            if not all(map(is_same, eager, train(variant, side, rank))):
                yield variant, side


def main(rank, size, store):
    with joined(rank, size, store):
        return "".join(map(str, differences(rank))) or None


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
