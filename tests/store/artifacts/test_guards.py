"""Calls that an artifact is not for are refused, naming the guard; several kinds of calls in one artifact."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import NamedTuple

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import ArtifactCallError, ArtifactError
from tests.store.artifacts.through_a_file import loaded_again


class Pair(NamedTuple):
    a: torch.Tensor
    b: torch.Tensor


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float


def function(x, pair, batch, options, *, flag=True, index=2):
    return x.sum() * pair.a + pair.b[index] * batch.x * batch.scale + options["w"] if flag else x


def arguments():
    return (torch.ones(2, 3), Pair(torch.ones(()), torch.ones(4)), Batch(torch.ones(()), 0.5), {"w": torch.ones(())})


KEYWORDS = {"flag": True, "index": 2}


@pytest.fixture(scope="module")
def loaded():
    return loaded_again(foregrad.export(function, arguments(), KEYWORDS))


def replaced(position, value):
    args = list(arguments())
    args[position] = value
    return tuple(args), KEYWORDS


CALLS = {
    "another dtype": (
        replaced(0, torch.ones(2, 3, dtype=torch.float64)),
        "args[0].dtype must be torch.float32; there is torch.float64",
    ),
    "another shape": (replaced(0, torch.ones(2, 4)), "args[0].shape must be (2, 3); there is (2, 4)"),
    "another rank": (replaced(0, torch.ones(6)), "args[0].shape must be (2, 3)"),
    "other strides": (replaced(0, torch.ones(3, 2).t()), "args[0].stride() must be (3, 1); there is (1, 2)"),
    "requires grad": (
        replaced(0, torch.ones(2, 3, requires_grad=True)),
        "args[0].requires_grad must be False; there is True",
    ),
    "no tensor": (replaced(0, 3), "args[0] must be a tensor; there is 3"),
    "no container": (replaced(1, (torch.ones(()), torch.ones(4))), "args[1] must be a Pair; there is a tuple"),
    "inside a container": (replaced(1, Pair(torch.ones(()), torch.ones(5))), "args[1].b.shape must be (4,)"),
    "another dataclass": (replaced(2, 4), "args[2] must be a Batch"),
    "another number": (replaced(2, Batch(torch.ones(()), 0.25)), "args[2].scale must be 0.5; there is 0.25"),
    "another key": (replaced(3, {"v": torch.ones(())}), "the list of keys of args[3] must be ('w',); there is ('v',)"),
    "more keys": (replaced(3, {"w": torch.ones(()), "v": 1}), "the list of keys of args[3] must be ('w',)"),
    "too few": ((arguments()[:3], KEYWORDS), "the number of positional arguments must be 4; there is 3"),
    "a flag": ((arguments(), {**KEYWORDS, "flag": False}), "flag must be True; there is False"),
    "an index": ((arguments(), {**KEYWORDS, "index": 3}), "index must be 2; there is 3"),
    "a bool for an index": ((arguments(), {**KEYWORDS, "index": True}), "index must be 2"),
    "a missing keyword": (
        (arguments(), {"flag": True}),
        "the list of keyword arguments must be ('flag', 'index'); there is ('flag',)",
    ),
    "an unknown keyword": (
        (arguments(), {"flag": True, "other": 1}),
        "the list of keyword arguments must be ('flag', 'index')",
    ),
    "one tensor twice": (replaced(3, {"w": None}), ""),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_calls_are_refused_by_name(name, loaded):
    (args, kwargs), said = CALLS[name]
    if name == "one tensor twice":
        one = torch.ones(())
        args, said = (
            (args[0], args[1], Batch(one, 0.5), {"w": one}),
            "args[3]['w'] must be a tensor of its own; there is the same tensor as args[2].x",
        )
    with pytest.raises(ArtifactCallError) as found:
        loaded(*args, **kwargs)
    assert said in str(found.value)
    assert "with gradients: " in str(found.value)


def test_calls_like_the_one_exported_are_answered(loaded):
    assert torch.equal(loaded(*arguments(), **KEYWORDS), function(*arguments(), **KEYWORDS))
    other = dataclasses.make_dataclass("Other", ["x", "scale"])(torch.ones(()), 0.5)  # the class itself is not known
    assert torch.equal(loaded(*replaced(2, other)[0], **KEYWORDS), function(*arguments(), **KEYWORDS))


@contextlib.contextmanager
def default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CONTEXTS = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast of cpu": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": default_dtype,
    "default device": lambda: torch.device("meta"),
    "deterministic algorithms": deterministic,
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_other_contexts_are_refused_by_name(name, loaded):
    args = arguments()
    with CONTEXTS[name](), pytest.raises(ArtifactCallError, match=name if name != "inference mode" else "mode must be"):
        loaded(*args, **KEYWORDS)
    loaded(*args, **KEYWORDS)


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad])
def test_transforms_are_refused(transform):
    loaded = loaded_again(foregrad.export(lambda x: x.sin().sum(), (torch.ones(3),)))
    with pytest.raises(ArtifactCallError, match=r"transform of torch\.func"):
        transform(loaded)(torch.ones(3))


def test_forward_mode_is_refused():
    loaded = loaded_again(foregrad.export(lambda x: x.sin().sum(), (torch.ones(3),)))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(ArtifactCallError, match="forward-mode"):
        loaded(torch.autograd.forward_ad.make_dual(torch.ones(3), torch.ones(3)))


def test_a_parameter_that_was_replaced_is_checked():
    loaded = loaded_again(foregrad.export(nn.Linear(3, 2), (torch.ones(4, 3),)))
    loaded.weight.requires_grad_(False)
    with pytest.raises(ArtifactCallError, match=r"parameter weight\.requires_grad must be True"):
        loaded(torch.ones(4, 3))
    loaded.double()
    with pytest.raises(ArtifactCallError, match=r"parameter (weight|bias)\.dtype must be torch\.float32"):
        loaded(torch.ones(4, 3))


def writes(x, y):
    x.add_(1)
    return (x * y).sum()


def test_shared_memory_is_refused_where_it_is_written():
    loaded = loaded_again(foregrad.export(writes, (torch.ones(3), torch.ones(3))))
    x, y = torch.zeros(3), torch.full((3,), 2.0)
    assert loaded(x, y).item() == 6.0
    assert x.tolist() == [1.0, 1.0, 1.0]
    base = torch.ones(6)
    with pytest.raises(ArtifactCallError, match=r"share memory with args\[0\], written by the call, must be none"):
        loaded(base[:3], base[3:])
    assert base.eq(1).all()


def test_shared_memory_as_at_export():
    base = torch.ones(6)
    artifact = foregrad.export(writes, (base[:4], base[2:]))
    loaded = loaded_again(artifact)
    given, expected = torch.arange(6.0), torch.arange(6.0)
    assert torch.equal(loaded(given[:4], given[2:]), writes(expected[:4], expected[2:]))
    assert torch.equal(given, expected)
    with pytest.raises(ArtifactCallError, match=r"share memory with a written tensor must be args\[0\] and args\[1\]"):
        loaded(torch.ones(4), torch.arange(8.0)[2:6])
    with pytest.raises(ArtifactCallError, match=r"args\[1\]\.storage_offset\(\) must be 2; there is 1"):
        loaded(given[:4], given[1:5])


def test_a_value_that_is_branched_on():
    def branching(x):
        return x * 2 if x.sum() > 0 else x * 3

    artifact = foregrad.export(branching, (torch.ones(3),))
    loaded = loaded_again(artifact)
    assert loaded(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    with pytest.raises(ArtifactCallError, match=r"a value that is read at .*return x \* 2 if"):
        loaded(-torch.ones(3))
    artifact.specialize((-torch.ones(3),))
    loaded = loaded_again(artifact)
    assert loaded(-torch.ones(3)).tolist() == [-3.0, -3.0, -3.0]
    assert loaded(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_sizes_that_may_vary():
    def halves(x, w):
        b, l, d = x.shape
        return (x.reshape(b * (l // 2), 2 * d) @ w).sum()

    args = torch.randn(2, 8, 3), torch.randn(6, 4)
    batch = torch.export.Dim("batch", min=2, max=64)
    artifact = foregrad.export(halves, args, dynamic_shapes={"x": {0: batch, 1: True}})
    loaded = loaded_again(artifact)
    for b, l in ((2, 8), (5, 12), (64, 2 * 31)):
        x = torch.randn(b, l, 3)
        assert torch.equal(loaded(x, args[1]), halves(x, args[1]))
    with pytest.raises(ArtifactCallError, match=r"args\[0\]\.shape\[0\] must be from 2 to 64; there is 65"):
        loaded(torch.randn(65, 8, 3), args[1])
    with pytest.raises(ArtifactCallError, match="the relation between sizes must be such that"):
        loaded(torch.randn(2, 7, 3), args[1])


@pytest.mark.parametrize(
    ("shapes", "error"),
    [
        ({"y": {0: True}}, "names y"),
        ({"x": {7: True}}, "dimension 7"),
        ({"x": {0: (5, 9)}}, "not between 5 and 9"),
        ({"x": {0: 3.5}}, "3.5"),
        ([None, None], "2 entries"),
        ({"x": {1: True}}, "sizes 0 and 1"),
    ],
)
def test_shapes_that_mean_nothing(shapes, error):
    with pytest.raises((ValueError, IndexError), match=error):
        foregrad.export(lambda x: x + 1, (torch.ones(4, 1),), dynamic_shapes=shapes)


def test_a_size_that_is_used_as_a_number():
    with pytest.raises(foregrad.errors.UnsupportedError, match="only works for size 4"):
        foregrad.export(lambda x: x * len(range(x.shape[0])), (torch.ones(4),), dynamic_shapes=True)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))

    def forward(self, x):
        return self.layers(x)


def test_train_and_eval_with_and_without_gradients():
    torch.manual_seed(0)
    module = Model().train()
    artifact = foregrad.export(module, (torch.randn(6, 3),), dynamic_shapes=({0: True},))
    module.eval()
    artifact.specialize((torch.randn(6, 3),), dynamic_shapes=({0: True},))
    with torch.no_grad():
        artifact.specialize((torch.randn(6, 3),), dynamic_shapes=({0: True},))
    names = ["train, with gradients", "eval, with gradients", "eval, without gradients"]
    assert [s.name for s in artifact.specializations] == names
    loaded = loaded_again(artifact)
    assert loaded.training
    for mode in (True, False, True):
        module.train(mode)
        loaded.train(mode)
        for grad in (True, False):
            if mode and not grad:
                with torch.no_grad(), pytest.raises(ArtifactCallError) as found:
                    loaded(torch.randn(5, 3))
                assert str(found.value).count(" | ") == 2  # a reason for each
                continue
            x = torch.randn(5, 3)
            results = []
            for model in (module, loaded):
                torch.manual_seed(1)
                with torch.set_grad_enabled(grad):
                    results.append(model(x))
                if grad:
                    results[-1].sum().backward()
            assert torch.equal(*results)
    for (name, a), (_, b) in zip(module.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    for a, b in zip(module.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_a_loaded_artifact_captures_no_more():
    loaded = loaded_again(foregrad.export(nn.Linear(3, 2), (torch.ones(4, 3),)))
    with pytest.raises(ArtifactError, match="was loaded"):
        loaded.artifact.specialize((torch.ones(5, 3),))


def test_results_in_containers_of_the_users():
    def boxed(x):
        return Pair(x + 1, x + 2), Batch(x * 2, 0.5), {"top": torch.topk(x, 2)}, [x, None, "text"]

    loaded = loaded_again(foregrad.export(boxed, (torch.arange(3.0),)))
    pair, batch, top, rest = loaded(torch.arange(3.0))
    assert (type(pair).__name__, pair._fields, pair.b.tolist()) == ("Pair", ("a", "b"), [2.0, 3.0, 4.0])
    assert (type(batch).__name__, batch.x.tolist(), batch.scale) == ("Batch", [0.0, 2.0, 4.0], 0.5)
    assert "Batch(x=tensor" in repr(batch)
    assert isinstance(top["top"], torch.return_types.topk)
    assert rest[1:] == [None, "text"]
