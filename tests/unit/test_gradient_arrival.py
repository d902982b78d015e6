"""Gradients reach the leaves of a compiled function in eager's order, as hooks and `DistributedDataParallel` see it."""

import pytest
import torch
from torch import nn

import foregrad
from foregrad.graph.joint import queued_to_arrive


class Tied(nn.Module):
    """One weight has its last contribution at the very end."""

    def __init__(self):
        super().__init__()
        self.inside, self.norm = nn.Embedding(10, 8), nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))
        self.out = nn.Linear(8, 10, bias=False)
        self.out.weight = self.inside.weight

    def forward(self, x):
        x = self.inside(x)
        for layer in self.layers:
            x = x + layer(self.norm(x)).relu()
        return self.out(x)


class Function(torch.autograd.Function):
    """Gives three gradients at once."""

    @staticmethod
    def forward(ctx, x, first, second):
        ctx.save_for_backward(x, first, second)
        return x * first * second

    @staticmethod
    def backward(ctx, gradient):
        x, first, second = ctx.saved_tensors
        by_second = (gradient * x * first).sum(0)
        return gradient * first * second, (gradient * x * second).sum(0), by_second


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.linear = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6)), nn.Linear(6, 6)

    def forward(self, x):
        return self.linear(Function.apply(x, self.first, self.second))


MODELS = {
    "linear": (lambda: nn.Sequential(*(nn.Linear(6, 6) for _ in range(9))), lambda: torch.randn(3, 6)),
    "transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 3),
        lambda: torch.randn(2, 5, 16),
    ),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4)),
        lambda: torch.randn(2, 3, 8, 8),
    ),
    "tied": (Tied, lambda: torch.randint(0, 10, (2, 4))),
    "function": (Custom, lambda: torch.randn(3, 6)),
}


def arrival(model, call, x):
    found = []
    for name, parameter in model.named_parameters():
        parameter.grad = None
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: found.append(name))
    call(x).square().sum().backward()
    for parameter in model.parameters():
        parameter._post_accumulate_grad_hooks.clear()
    return found


@pytest.mark.parametrize("of_leaf", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_arrive_as_in_eager(name, of_leaf):
    make, example = MODELS[name]
    model = make()
    fast = foregrad.compile(model, backend="eager", on_unsupported="raise")
    for _ in range(2):
        x = example()
        if not of_leaf and x.is_floating_point():
            x = x.requires_grad_() * 2
        expected = arrival(model, model, x)
        x = x.detach().requires_grad_(x.requires_grad) * 1 if not of_leaf and x.is_floating_point() else x
        assert arrival(model, fast, x) == expected
    assert len(expected) == len(list(model.parameters()))


@pytest.mark.parametrize("count", range(1, 40))
def test_the_order_of_the_queue(count):
    """Against the engine itself, with a tensor besides that waits until the leaves have theirs."""

    class Many(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            return sum(inputs)

        @staticmethod
        def backward(ctx, gradient):
            return (gradient,) * (count + 1)

    leaves = [torch.zeros(1, requires_grad=True) for _ in range(count)]
    other, found = torch.zeros(1, requires_grad=True) * 2, []
    for number, leaf in enumerate(leaves):
        leaf.register_post_accumulate_grad_hook(lambda _, number=number: found.append(number))
    wanted = torch.randperm(count).tolist()
    queued = queued_to_arrive(range(count + 1), wanted, range(count))
    Many.apply(*([*leaves, other][i] for i in queued)).backward()
    assert found == wanted
