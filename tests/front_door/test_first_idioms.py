"""The idioms that a newcomer brings make at most as many graphs as under PyTorch's own compiler."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import foregrad


def a_call_that_fills_a_cache():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=32)
    model = transformers.GPT2LMHeadModel(config).eval()

    def calls(step):
        for _ in range(3):
            ids = torch.randint(32, (2, 8))
            step(input_ids=ids, labels=ids).loss.backward()

    return model, calls


def views_of_one_batch():
    embedding, head = nn.Embedding(32, 8), nn.Linear(8, 32)

    def loss(x, y):
        return nn.functional.cross_entropy(head(embedding(x)).flatten(0, 1), y.flatten())

    def calls(step):
        for length in range(10, 20):
            batch = torch.randint(32, (4, length))
            step(batch[:, :-1], batch[:, 1:]).backward()

    return loss, calls


def attention_of_one_tensor():
    def calls(step):
        for length in range(10, 16):
            x = torch.randn(2, length, 8)
            step(x, x, x)[0].sum().backward()

    return nn.MultiheadAttention(8, 2, batch_first=True), calls


def a_loss_that_is_printed():
    model = nn.Linear(8, 1)

    def loss(x):
        found = model(x).square().mean()
        print(f"loss {found.item():.3f}")
        return found

    def calls(step):
        for _ in range(5):
            step(torch.randn(4, 8)).backward()

    return loss, calls


def a_loss_that_is_read():
    """Summed up, compared, returned, listed: all of a training loop's ways with a number."""
    model, losses = nn.Linear(8, 1), []

    def loss(x, best):
        found = model(x).square().mean()
        number = found.item()
        if number != number:
            raise ValueError("the loss is no number")
        losses.append(number)
        return found, min(best, number)

    def calls(step):
        for _ in range(5):
            step(torch.randn(4, 8), 1e9)[0].backward()

    return loss, calls


@pytest.mark.filterwarnings("ignore")  # Dynamo's, of graph breaks
@pytest.mark.parametrize(
    "idiom",
    [
        a_call_that_fills_a_cache,
        views_of_one_batch,
        attention_of_one_tensor,
        a_loss_that_is_printed,
        a_loss_that_is_read,
    ],
)
def test_an_idiom_makes_at_most_pytorchs_graphs(idiom):
    torch._dynamo.reset()
    function, calls = idiom()
    ours = foregrad.compile(function, backend="eager")
    counter = CompileCounterWithBackend("aot_eager")
    theirs = torch.compile(function, backend=counter)
    with contextlib.redirect_stdout(io.StringIO()):
        calls(ours)
        calls(theirs)
    found = foregrad.explain_recompiles(ours)
    assert len(found) <= counter.frame_count
    assert len(found) <= 2
    assert found.eager_calls <= (idiom is a_call_that_fills_a_cache)  # the one call that fills the cache
