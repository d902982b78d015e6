"""Sparse gradients (`Embedding(sparse=True)`): calls that need them run eagerly by name, with eager's values."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedLayoutError

ONE, OTHER = torch.tensor([1, 2, 2, 5]), torch.tensor([7, 2, 1, 5])


def looked_up(weight, indices=ONE, **options):
    return F.embedding(indices, weight, sparse=True, **options)


def bag(weight, **options):
    return F.embedding_bag(ONE.view(2, 2), weight, None, sparse=True, **options)


def hooked(hook):
    def function(w):
        scaled = w * 1
        scaled.register_hook(hook)
        return looked_up(scaled).sin()

    return function


PROGRAMS = {
    "as it is": looked_up,
    "in a graph": lambda w: looked_up(w).sin(),
    "padding": lambda w: looked_up(w, padding_idx=2).sin(),
    "no index": lambda w: looked_up(w, ONE[:0]).sin(),
    "at two places": lambda w: looked_up(w).sin() + looked_up(w, OTHER).cos(),
    "tied": lambda w: looked_up(w).sin() @ w.t(),
    "of a product": lambda w: looked_up(w * 2).sin(),
    "sum of bags": lambda w: bag(w, mode="sum").sin(),
    "mean of bags": lambda w: bag(w, mode="mean").sin(),
    "norm": lambda w: looked_up(w, max_norm=1.0).sin(),
    "hook": hooked(lambda gradient: gradient * 2),
}


def weight():
    return torch.linspace(-1, 1, 24).view(8, 3).requires_grad_()


def gradients(function):
    w = weight()
    out = function(w)
    out.sum().backward()
    held = w.grad.coalesce() if w.grad.is_sparse else w.grad
    parts = [held.indices(), held.values()] if held.is_sparse else [held]
    return w.grad.layout, [part.tolist() for part in (out, w, *parts)]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:An output with one or more elements")
def test_runs_eagerly_by_name(name):
    with pytest.warns(ForegradWarning, match=r"torch\.sparse_coo .*sparse=False"):
        found = gradients(foregrad.compile(PROGRAMS[name], backend="eager", on_unsupported="eager"))
    assert found == gradients(PROGRAMS[name])


def test_runs_eagerly_by_name_behind_dynamo():
    torch._dynamo.reset()
    compiled = torch.compile(
        PROGRAMS["at two places"], backend="foregrad", options={"backend": "eager", "on_unsupported": "eager"}
    )
    with pytest.warns(ForegradWarning, match="torch.sparse_coo"):
        found = gradients(compiled)
    assert found == gradients(PROGRAMS["at two places"])


@pytest.mark.parametrize("whole", [False, True])
def test_trains_as_eager_does(whole):
    net = nn.Sequential(nn.Embedding(8, 3, sparse=True), nn.Linear(3, 1))

    def train(wrap):
        own = copy.deepcopy(net)
        optimizers = torch.optim.SparseAdam([own[0].weight]), torch.optim.SGD([own[1].weight, own[1].bias], 0.1)

        forward = own if whole else wrap(own)

        def step(batch):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = forward(batch).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            return loss.detach()

        call = wrap(step) if whole else step
        return [call(batch).item() for batch in (ONE, OTHER, ONE)]

    with pytest.warns(ForegradWarning, match="torch.sparse_coo"):
        losses = train(lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"))
    assert losses == train(lambda f: f)


def test_without_a_gradient_it_is_compiled():
    compiled = foregrad.compile(looked_up, backend="eager", on_unsupported="raise")
    assert torch.equal(compiled(weight().detach()), looked_up(weight()))
    with torch.no_grad():
        assert torch.equal(compiled(weight()), looked_up(weight()))


def test_doors_for_compiler_writers_raise():
    with pytest.raises(UnsupportedLayoutError, match="sparse=False"):
        foregrad.capture(looked_up, weight())
    with pytest.raises(UnsupportedLayoutError, match="sparse=False"):
        foregrad.aot_function(looked_up, foregrad.nop, foregrad.nop)(weight())
