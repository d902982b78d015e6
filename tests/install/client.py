"""A program that uses foregrad, as type checkers see it from outside."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import foregrad


@foregrad.compile(backend="eager")
def loss_of(x: Tensor, scale: float) -> Tensor:
    return (x * scale).square().mean()


class Net(nn.Module):
    width: int = 3

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


def train(step: Callable[[Tensor, float], Tensor]) -> float:
    x = torch.ones(4, requires_grad=True)
    step(x, 2.0).backward()
    return float(step(x, 2.0))


net: Net = foregrad.compile(Net(), backend="eager")
width: int = net.width
loss: float = train(loss_of)
found: foregrad.Verification = foregrad.verify(Net(), torch.ones(2, 3), backend="eager")
is_well: bool = found.ok
graph: foregrad.JointGraph = foregrad.capture(loss_of, torch.ones(2), 1.0)
seconds: float = foregrad.compile_times().seconds
print(width, loss, is_well, type(graph).__name__, seconds > 0)
