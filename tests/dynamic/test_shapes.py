"""One graph for many sizes: how many there are, and that each answer is eager's, bit for bit."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import UnsupportedError
from tests.models.zoo import VOCABULARY, ZOO
from tests.parity.oracle import check


class Compiled:
    """A compile function for the oracle that remembers what it made."""

    def __init__(self, dynamic=None, **settings):
        self.settings = {"backend": "eager", "dynamic": dynamic, **settings}

    def __call__(self, fn):
        self.made = foregrad.compile(fn, **self.settings)
        return self.made

    @property
    def count(self):
        return len(self.made.foregrad.specializations)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm_2(x))))


class Transformer(nn.Module):
    def __init__(self, layers=12, width=16, longest=64):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(32, width), nn.Embedding(longest, width)
        self.blocks = nn.ModuleList(Block(width, 2) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 32)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits, tokens):
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def gradients(model, call, tokens):
    model.zero_grad()
    loss = loss_of(call(tokens), tokens)
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_a_transformer_over_fifty_lengths_compiles_twice():
    model, compiled = Transformer(), Compiled()
    call = compiled(model)
    for length in (torch.randperm(50, generator=torch.Generator().manual_seed(1)) + 4).tolist():
        tokens = torch.randint(0, 32, (2, length))
        expected, actual = gradients(model, model, tokens), gradients(model, call, tokens)
        assert all(torch.equal(a, b) for a, b in zip(expected, actual, strict=True)), length
    assert compiled.count == 2


def test_a_transformer_through_min_cut():
    model, compiled = Transformer(layers=2), Compiled(partition="min_cut", dynamic=True)
    call = compiled(model)
    for length in (9, 4, 30, 11):
        tokens = torch.randint(0, 32, (2, length))
        torch.testing.assert_close(gradients(model, call, tokens), gradients(model, model, tokens))
    assert compiled.count == 1


def lengths(*sizes, width=4):
    return [lambda n=n: (torch.randn(2, n, width).requires_grad_(),) for n in sizes]


def pooled(x):
    return x.flatten(1).softmax(-1).sum(0), (x * 1)[:, 1:].transpose(0, 1), x.mean(1)


def test_the_second_size_makes_it_symbolic_and_views_are_taken_of_any():
    compiled = Compiled()
    assert check(pooled, lengths(5, 7, 9, 6, 12, 8), calls=5, compile=compiled) == "equal"
    assert compiled.count == 2


def test_from_the_beginning():
    compiled = Compiled(dynamic=True)
    assert check(pooled, lengths(5, 7, 9, 6, 12, 8), calls=5, compile=compiled) == "equal"
    assert compiled.count == 1


def test_never():
    compiled = Compiled(dynamic=False)
    assert check(pooled, lengths(5, 7, 5, 7, 9), calls=4, compile=compiled) == "equal"
    assert compiled.count == 3


def test_zero_and_one_get_graphs_of_their_own():
    compiled = Compiled(dynamic=True)
    assert check(lambda x: (x * 2).sum(1), lengths(5, 1, 0, 1, 7, 0), calls=5, compile=compiled) == "equal"
    assert compiled.count == 3


def test_sizes_in_what_is_returned():
    def fn(x):
        return x.shape, x.shape[1] * 2 + 1, x.size(1) // 2, x * x.shape[1], {"n": len(x[0])}

    compiled = Compiled(dynamic=True)
    assert check(fn, lengths(5, 7, 4, 6), calls=4, compile=compiled) == "equal"


def test_sizes_are_integers_to_the_program():
    def fn(x):
        rows, half = x.shape[1], x.size(1) / 2
        pair = (rows, rows) if isinstance(rows, int) else tuple(rows)
        kinds = type(rows) is int, isinstance(x.numel(), int), type(half) is float, all(type(n) is int for n in x.shape)
        return x.new_ones(pair).sum(), kinds, math.sqrt(rows), np.prod(x.shape) // 2, x.stride(0) * np.float64(0.5)

    compiled = foregrad.compile(fn, backend="eager", dynamic=True)
    for length in (5, 7, 4):
        found, expected = compiled(torch.ones(2, length)), fn(torch.ones(2, length))
        assert found == expected and [*map(type, found)] == [*map(type, expected)]


def test_branches_on_sizes_are_guards():
    compiled = Compiled(dynamic=True)

    def fn(x):
        return x.sin() if x.shape[1] > 6 else x.cos()

    assert check(fn, lengths(5, 7, 4, 9, 3, 8), calls=5, compile=compiled) == "equal"
    assert compiled.count == 2


def test_a_loop_over_a_size_is_a_graph_for_each():
    def fn(x):
        total = x[:, 0] * 0
        for i in range(x.shape[1]):
            total = total * 0.5 + x[:, i]
        return total

    compiled = Compiled()
    assert check(fn, lengths(3, 5, 4, 5, 3), calls=4, compile=compiled) == "equal"
    assert compiled.count == 3


def test_two_sizes_that_must_agree():
    makers = [lambda n=n: (torch.randn(n, 3).requires_grad_(), torch.randn(n, 3)) for n in (4, 6, 8, 5)]
    compiled = Compiled()
    assert check(lambda a, b: (a * b).sum(0), makers, calls=4, compile=compiled) == "equal"
    assert compiled.count == 2


def test_sizes_that_happen_to_be_equal_are_not_taken_for_one():
    makers = [
        lambda n=n, m=m: (torch.randn(n, 3).requires_grad_(), torch.randn(m)) for n, m in ((4, 4), (6, 6), (8, 5))
    ]
    compiled = Compiled()
    assert check(lambda a, b: (a.sum(0), b * 2), makers, calls=3, compile=compiled) == "equal"
    assert compiled.count == 2


def test_inputs_that_are_written_and_views_of_them():
    def fn(x, cache):
        cache.add_(x.detach().sum())
        cache[:, 1:].mul_(2)
        return x * cache.sum(), cache[:, :2], x.view(-1)

    makers = [lambda n=n: (torch.randn(2, n).requires_grad_().mul(1), torch.ones(2, n)) for n in (4, 6, 8, 5, 7)]
    compiled = Compiled()
    assert check(fn, makers, calls=4, compile=compiled) == "equal"
    assert compiled.count == 2


@pytest.mark.parametrize(
    "layout", [lambda x: x.transpose(1, 2), lambda x: x.permute(2, 0, 1), lambda x: x[..., ::2], lambda x: x[:, :, 1:]]
)
def test_strides_that_follow_from_sizes(layout):
    makers = [lambda n=n: (layout(torch.randn(2, n, 6)).requires_grad_(),) for n in (4, 7, 9, 5)]
    compiled = Compiled()
    assert check(lambda x: (x.sin(), x.sum(0)), makers, calls=3, compile=compiled) == "equal"
    assert compiled.count == 2


def test_some_outputs_only_have_gradients():
    def fn(x):
        y = x.exp()
        return (y @ x.transpose(1, 2)).sum(2), y.sum(), x.cos()

    model = foregrad.compile(fn, backend="eager", dynamic=True)
    for n in (4, 6):
        for chosen in ([0], [1], [2], [0, 2]):
            x = torch.randn(2, n, 3).requires_grad_()
            grads = []
            for call in (fn, model):
                out = call(x)
                grads.append(torch.autograd.grad(sum(out[i].sum() for i in chosen), x)[0])
            assert torch.equal(*grads)


def test_dropout_draws_as_many_numbers_as_there_are_elements():
    compiled = Compiled()
    assert check(lambda x: nn.functional.dropout(x, 0.5) * 2, lengths(4, 6, 8, 5), calls=4, compile=compiled) == "equal"
    assert compiled.count == 2


def test_marked_with_limits():
    fn = foregrad.compile(lambda x: x.sum(1) * 2, backend="eager", dynamic=False)
    x = torch.rand(2, 8)
    foregrad.mark_dynamic(x, 1, min=4, max=16)
    fn(x)
    for n in (4, 16, 9):
        fn(torch.rand(2, n))
    assert len(fn.foregrad.specializations) == 1
    fn(torch.rand(2, 17))
    assert len(fn.foregrad.specializations) == 2


def test_a_mark_that_does_not_fit():
    x = torch.rand(2, 8)
    with pytest.raises(IndexError):
        foregrad.mark_dynamic(x, 2)
    with pytest.raises(ValueError, match="dimension 1 has size 8, which is out of range: min=None, max=4"):
        foregrad.mark_dynamic(x, 1, max=4)
    foregrad.mark_dynamic(x, -1)
    fn = foregrad.compile(lambda t: t.view(2, 4, 2), backend="eager")
    with pytest.raises(foregrad.errors.UnsupportedError, match=r"dimension 1 of args\[0\].*only works for size 8"):
        fn(x)


def test_a_branch_on_values_at_many_sizes():
    def fn(x):
        return x.sin() if x.sum() > 0 else x[x > 0].sum() + x.sum()

    makers = [
        lambda n=n, s=s: (torch.rand(n).mul(s).requires_grad_(),) for n, s in ((4, 1), (6, -1), (8, 1), (5, -1), (7, 1))
    ]
    compiled = Compiled()
    assert check(fn, makers, calls=5, compile=compiled) == "equal"
    assert compiled.count <= 4


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "mistral"])
def test_architectures_over_several_lengths(name):
    pytest.importorskip("transformers")
    entry = ZOO[name]
    model = entry.build("sdpa")
    compiled = Compiled()
    call = compiled(model)
    for length in (6, 9, 7, 12):
        tokens = torch.randint(2, VOCABULARY, (2, length))
        inputs = {**entry.inputs(), "input_ids": tokens, "labels": tokens}
        results = []
        for run in (model, call):
            model.zero_grad()
            loss = run(**inputs).loss
            loss.backward()
            results.append([loss.detach(), *(p.grad for p in model.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), length
    assert compiled.count == 2


def test_the_print_shows_the_symbols():
    compiled = foregrad.compile(lambda x: x.sum(0), backend="eager", dynamic=True)
    compiled(torch.rand(3, 4))
    source = compiled.foregrad.source()
    assert ".size(0)" in source
    assert "2 <= " in source


def test_a_compiler_that_wants_one_size_after_all():
    """A backward is compiled late: conditions that its compiler makes then can't be checked any more."""

    def fixed(module, example_inputs):
        size = int(example_inputs[0].shape[1])

        def run(values):
            assert values[0].shape[1] == size
            return module(*values)

        return foregrad.make_boxed_func(run)

    compiled = foregrad.compile(lambda x: x.sin().sum(0), backend=(foregrad.nop, fixed), dynamic=True)
    for n in (4, 6, 9):
        x = torch.rand(2, n).requires_grad_()
        (grad,) = torch.autograd.grad(compiled(x).sum(), x)
        assert torch.equal(grad, x.cos())


def test_an_operator_that_takes_plain_sizes_only():
    """Its reference for fakes can't take symbols: every size gets a graph of its own."""

    def fn(x, a, b):
        return x.addr(a, b)

    makers = [lambda n=n: (torch.randn(n, 3).requires_grad_(), torch.randn(n), torch.randn(3)) for n in (4, 6, 8)]
    assert check(fn, makers, calls=3, compile=Compiled(dynamic=True)) == "equal"


def test_a_least_size_without_a_greatest():
    """It was captured without symbols, in silence."""
    compiled = foregrad.compile(lambda x: x.sin().sum(), backend="eager")
    for size in (5, 9):
        x = torch.randn(size)
        foregrad.mark_dynamic(x, 0, min=4)
        assert torch.equal(compiled(x), x.sin().sum())
    assert len(compiled.foregrad.specializations) == 1


def copied(x):
    first, second = x.chunk(2)
    first.copy_(second)


def copied_back(x):
    first, second = x.split(x.shape[0] // 2)
    second.copy_(first * 2)


def swapped(x):
    y = x * 1
    first, second = y.chunk(2)
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    x.mul_(y)


@pytest.mark.parametrize(
    ("function", "behind_dynamo"), [(copied, False), (copied_back, False), (swapped, False), (swapped, True)]
)
def test_a_condition_on_sizes_that_has_an_or_is_one_condition(function, behind_dynamo):
    """`copy_` broadcasts: its sizes are equal, or one is 1. Joined to other conditions that undid those before it."""
    torch._dynamo.reset()
    if behind_dynamo:
        compiled = torch.compile(function, backend="foregrad", options={"backend": "eager"})
    else:
        compiled = foregrad.compile(function, backend="eager")
    for size in (4, 6, 8, 12, 4, 2):
        x, y = torch.arange(float(size)), torch.arange(float(size))
        compiled(x)
        function(y)
        assert torch.equal(x, y)


@pytest.mark.parametrize("mark", [foregrad.mark_dynamic, torch._dynamo.mark_dynamic])
def test_a_capture_has_symbols_for_marked_sizes(mark):
    x, layer = torch.randn(4, 3), torch.nn.Linear(3, 2)
    mark(x, 0)
    joint = foregrad.capture(lambda x: layer(x).sin().sum(), x)
    assert [(one.input, one.dim) for one in joint.signature.symbols] == [(0, 0)]
    assert str(foregrad.partition(joint).saved[0]).count("s") >= 1
    assert foregrad.capture(lambda x: layer(x).sum(), torch.randn(4, 3)).signature.symbols == ()


@pytest.mark.parametrize("mark", [foregrad.mark_dynamic, torch._dynamo.mark_dynamic])
def test_a_marked_size_that_a_program_reads_is_refused_in_a_capture(mark):
    x = torch.randn(4, 3)
    mark(x, 0)
    with pytest.raises(
        UnsupportedError, match=r"dimension 0 of args\[0\] was marked as dynamic.*only works for size 4"
    ):
        foregrad.capture(lambda x: sum(x[i].sum() for i in range(x.shape[0])), x)


def test_a_mark_of_dynamo_is_a_mark_for_compile():
    x = torch.randn(4, 3)
    torch._dynamo.mark_dynamic(x, -2, min=3, max=16)
    compiled = foregrad.compile(lambda x: x.sin() * x.shape[0], backend="eager")
    for size in (4, 9, 16, 3):
        y = x if size == 4 else torch.randn(size, 3)
        assert torch.equal(compiled(y), y.sin() * size)
    assert len(foregrad.explain_recompiles(compiled)) == 1
