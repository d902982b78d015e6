"""The forward of an artifact as a `torch.export.ExportedProgram` computes what eager does, at every size it allows."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import foregrad
from foregrad.errors import ArtifactError
from tests.store.artifacts.architectures import ARCHITECTURES


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, *, scale=1.0):
        self.calls += 1
        y = self.norm(self.linear(x)) * scale
        return {"y": y, "flat": y.view(-1), "calls": self.calls * 1}


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = torch.nn.Embedding(11, 6)
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids):
        return self.head(self.tokens(ids).tanh()), tuple(ids.shape)


class Views(torch.nn.Module):
    def forward(self, x, pair):
        first, second = pair
        parts = x.split(2, dim=0)
        return x.t(), parts[0] + first, [second, None, 3], parts[1]


def mlp():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Dropout(0.0), torch.nn.Linear(8, 2))


CASES = {
    "mlp": (mlp, (torch.randn(5, 4),), {}),
    "mlp without gradients": (lambda: mlp().requires_grad_(False), (torch.randn(5, 4),), {}),
    "buffers": (Counting, (torch.randn(5, 4),), {"scale": 2.0}),
    "evaluation": (lambda: Counting().eval(), (torch.randn(5, 4),), {}),
    "tied": (Tied, (torch.randint(0, 11, (2, 3)),), {}),
    "views": (Views, (torch.randn(4, 2), (torch.ones(2), torch.ones(1))), {}),
    "transformer": (lambda: torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), (torch.randn(2, 3, 8),), {}),
    "convolution": (lambda: torch.nn.Conv2d(2, 3, 3), (torch.randn(1, 2, 6, 6),), {}),
}  # fmt: skip


def same(a, b):
    flat, tree = torch.utils._pytree.tree_flatten(a)
    other, also = torch.utils._pytree.tree_flatten(b)
    assert tree == also
    for x, y in zip(flat, other, strict=True):
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize("name", list(CASES))
def test_it_computes_what_eager_does(name):
    make, args, kwargs = CASES[name]
    torch.manual_seed(0)
    model = make()
    artifact = foregrad.export(copy.deepcopy(model), args, kwargs)
    program = artifact.exported_program()
    assert isinstance(program, torch.export.ExportedProgram)
    assert set(program.state_dict) == set(dict(artifact.module().state_dict(keep_vars=True)))
    run = program.module(check_guards=False)
    for _ in range(2):
        same(run(*args, **kwargs), model(*args, **kwargs))
    for key, value in model.state_dict().items():
        assert torch.equal(run.state_dict()[key], value), key


def test_sizes_that_may_vary():
    model = mlp()
    artifact = foregrad.export(model, (torch.randn(5, 4),), dynamic_shapes=({0: (2, 64)},))
    program = artifact.exported_program()
    run = program.module()
    for size in (2, 7, 64):
        x = torch.randn(size, 4)
        same(run(x), model(x))
    with pytest.raises((AssertionError, RuntimeError)):
        run(torch.randn(65, 4))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable:UserWarning")  # of PyTorch's loading, up to 2.12
def test_it_is_saved_by_pytorch_and_exported_back():
    model, x = mlp(), torch.randn(5, 4)
    program = foregrad.export(model, (x,)).exported_program()
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    same(torch.export.load(file).module()(x), model(x))
    back = foregrad.export(program, (x,)).module()
    same(back(x), model(x))


def test_what_it_can_not_say_is_refused_by_name():
    def resized(x):
        x.t_()
        return x * 2

    with pytest.raises(ArtifactError, match="effects on its inputs besides writes"):
        foregrad.export(resized, (torch.randn(2, 3),)).exported_program()


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_architectures(name):
    make, inputs = ARCHITECTURES[name]
    torch.manual_seed(0)
    model, args = make().eval(), [make_input() for make_input in inputs]
    program = foregrad.export(copy.deepcopy(model), args).exported_program()
    results = []
    for run in (program.module(check_guards=False), model):
        torch.manual_seed(1)  # one of them draws
        results.append(run(*args))
    same(*results)
