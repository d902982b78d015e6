"""Sizes and numbers that vary behind Dynamo: a graph for the first call and one for all others, as in eager."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foregrad
from foregrad.backends.eager import eager_compiler
from tests.covering import each

# Dynamo's own doing, as it looks at a custom Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class Block(nn.Module):
    """A layer of a transformer that, as those of libraries do, views by the length, and takes slices of everything."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.wide, self.narrow = nn.Linear(width, width), nn.Linear(width, 16), nn.Linear(16, width)

    def forward(self, x):
        batch, length, width = x.shape
        heads = [t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).split(width, 2)]
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.narrow(F.gelu(self.wide(x)))


class Language(nn.Module):
    def __init__(self, words=11, width=8):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, tokens):
        tokens = tokens.view(-1, tokens.shape[-1])
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))[None]
        x = self.blocks(x).view(*tokens.shape, x.shape[-1])
        return x[:, slice(0, None), :] @ self.words.weight.T


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.n = n
        return x * n

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.n, None


def leaf(*sizes):
    return torch.randn(*sizes, requires_grad=True)


def attend(x):
    seen = torch.ones(x.shape[1], x.shape[1]).tril()
    return (x @ x.mT / math.sqrt(x.shape[-1])).masked_fill(seen == 0, -1e9).softmax(-1) @ x


# The program, its arguments in call i.
PROGRAMS = {
    "a slice of all": (lambda x: x.view(2, x.shape[1], -1)[:, slice(0, None), :].sin().sum(1), lambda i: (leaf(2, 3 + i, 4),)),
    "two dimensions": (
        lambda x: x.view(x.shape[0], x.shape[1], -1)[:, slice(0, None), :].softmax(1) * x.shape[0],
        lambda i: (leaf(2 + i % 5, 3 + i * 7 % 11, 4),),
    ),
    "two tensors": (lambda x, y: torch.cat([x, y])[0:] * 2, lambda i: (leaf(2 + i % 3, 4), leaf(3 + i * 5 % 7, 4))),
    "attention": (attend, lambda i: (leaf(2, 3 + i, 4),)),
    "padded": (lambda x: F.pad(x, (0, 0, 0, -x.shape[0] % 8)).sin(), lambda i: (leaf(2 + i, 4),)),
    "a value": (lambda x, n: x * n + n / 2, lambda i: (leaf(3, 4), 2 + i)),
    "the end of a slice": (lambda x, n: x[:n].sum(0) * 2, lambda i: (leaf(20, 4), 2 + i)),
    "an index": (lambda x, n: x.flatten()[n], lambda i: (leaf(20, 4), 2 + i)),
    "a number of elements": (lambda x, n: x[:, None] * torch.arange(n), lambda i: (leaf(3), 2 + i)),
    "math": (lambda x, n: x * math.sqrt(n), lambda i: (leaf(3), 2 + i)),
    "a custom backward": (lambda x, n: Scaled.apply(x, n), lambda i: (leaf(3), 2 + i)),
    "a float": (lambda x, s: (x * s + s).view(x.shape[0], -1)[:, slice(0, None)], lambda i: (leaf(3 + i, 2), 0.5 + i)),
}  # fmt: skip


def results(function, args, parameters, seed=0):
    torch.manual_seed(seed)
    y = function(*args)
    leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad] + parameters
    weights = torch.linspace(0.5, 2, y.numel()).view(y.shape)
    return [y.detach(), *torch.autograd.grad((y * weights).sum(), leaves)]


def graphs_for(function, arguments, num_calls, parameters=(), **options):
    """The number of forward graphs that calls took, after each was compared with eager."""
    graphs, parameters = [], list(parameters)

    def compiler(gm, inputs):
        graphs.append(gm)
        return eager_compiler(gm, inputs)

    backend = {"backend": (compiler, eager_compiler), "on_unsupported": "raise"}
    compiled = torch.compile(function, backend="foregrad", options=backend, **options)
    for i in range(num_calls):
        args = arguments(i)
        expected, actual = (results(f, args, parameters) for f in (function, compiled))
        assert all(map(torch.equal, expected, actual)), i
    return len(graphs)


@pytest.mark.parametrize(("name", "dynamic"), each(PROGRAMS, [None, True]))
def test_two_graphs_serve_all_and_one_where_all_is_dynamic(name, dynamic):
    # A length that equals the width is another graph of Dynamo's own.
    most = 2 if dynamic is None or name == "attention" else 1
    assert graphs_for(*PROGRAMS[name], 12, dynamic=dynamic) <= most


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_language_model_with_thirty_lengths(dynamic):
    torch.manual_seed(0)
    model = Language()
    arguments = lambda i: (torch.randint(0, 11, (2, 3 + i)),)
    graphs = graphs_for(model, arguments, 30, model.parameters(), dynamic=dynamic)
    assert graphs == (1 if dynamic else 2)


def test_a_loop_over_a_number_has_a_graph_for_each_as_dynamo_has():
    assert graphs_for(lambda x, n: sum(x * k for k in range(n)), lambda i: (leaf(3), 2 + i % 4), 8) == 4


def test_relations_between_sizes_are_kept():
    """The graph for equal sizes is not taken where they differ."""

    def function(x, y):
        return x.sum(0) * y.sum(0) if x.shape[0] == y.shape[0] else x.sum(0) - y.sum(0)

    arguments = lambda i: (leaf(3 + i % 4, 2), leaf(3 + i * 3 % 5, 2))
    assert graphs_for(function, arguments, 20) <= 4


def test_a_function_that_is_given_integers_may_take_slices_of_everything():
    """Without Dynamo: indexing leaves a slice of everything out where sizes are plain, and not where they vary."""
    compiled = foregrad.compile(lambda x, n: x.view(2, n, -1)[:, slice(0, None), :].sin().sum(1), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(12):
            x = leaf(2, 3 + i, 4)
            expected = x.view(2, 3 + i, -1).sin().sum(1)
            actual = compiled(x, 3 + i)
            assert torch.equal(actual, expected)
            assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (actual, expected)))
    assert len(compiled.foregrad.specializations) == 2


@pytest.mark.parametrize(
    "scale",
    [
        lambda x: math.sqrt(x.shape[1] / 2),
        lambda x: math.cos(x.shape[0] / 2),
        lambda x: math.log2(x.shape[1]) + math.sqrt(x.shape[1] / x.shape[0]),
    ],
)
def test_functions_of_sizes_open_from_the_first_call_on_are_in_one_graph(scale):
    graphs = []

    def compiler(gm, example_inputs):
        graphs.append(gm)
        return eager_compiler(gm, example_inputs)

    def scaled(x):
        return (x * scale(x)).sum()

    options = {"backend": compiler}
    compiled = torch.compile(scaled, backend="foregrad", options=options, dynamic=True)
    for shape in [(2, 20), (3, 21), (4, 5)]:
        x = torch.randn(shape, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        assert torch.equal(compiled(x), scaled(y))
        compiled(x).backward()
        scaled(y).backward()
        assert torch.equal(x.grad, y.grad)
    assert len(graphs) == 2  # a forward and a backward
