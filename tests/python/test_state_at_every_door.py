"""What a function writes to Python's state is an effect at every door: it is carried, replayed, or refused by its place."""

from __future__ import annotations

import pytest
import torch
import torch.func as tf
from torch import nn

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedSideEffectError
from tests.python import counting_module

X = torch.ones(2)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.count = 0
        self.last = None

    def forward(self, x):
        self.count += 1
        self.last = (x * 2).detach()
        return (x.sin(),)


class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.last, self.total, self.log = None, None, []

    def forward(self, x):
        y = x * self.weight
        self.last = y.detach()
        self.total = y.sum().item()
        self.log.append(y.sum().detach())
        return (y,)


def test_a_captured_graph_carries_them_and_capture_leaves_none():
    module = Counting()
    joint = foregrad.capture(module, X)
    assert [write.path for write in joint.signature.effects.python_writes] == ["self.count", "self.last"]
    assert (module.count, module.last) == (0, None)
    assert "object at" not in repr(joint.signature.effects.python_writes)


def test_aot_function_replays_them():
    module = Counting()
    compiled = foregrad.aot_function(module.forward, foregrad.nop)
    for count in range(1, 5):
        compiled(X * count)
        assert module.count == count
        assert torch.equal(module.last, X * count * 2)


def test_without_guards_tensors_are_replayed():
    module = Keeping()
    compiled = foregrad.aot_module_simplified(module, [X], foregrad.nop)
    assert module.last is None
    for count in range(1, 4):
        compiled(X * count)
        assert torch.equal(module.last, X * count)
        assert module.total == 2 * count
        assert len(module.log) == count


def test_without_guards_a_counter_is_refused():
    with pytest.raises(UnsupportedSideEffectError, match=r"writes mod\.count"):
        foregrad.aot_module_simplified(Counting(), [X], foregrad.nop)


def test_an_exported_graph_refuses_them():
    with pytest.raises(RuntimeError, match=r"writes self\.count, self\.last"):
        foregrad.aot_export_module(Counting(), [X], trace_joint=False)


TRANSFORMS = {
    "vmap": lambda f: lambda x: tf.vmap(f)(x.expand(3, 2)),
    "grad": lambda f: tf.grad(lambda x: f(x)[0].sum()),
    "jvp": lambda f: lambda x: tf.jvp(f, (x,), (x,)),
    "hessian": lambda f: tf.hessian(lambda x: f(x)[0].sum()),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_under_a_transform_they_happen_as_often_as_in_eager(name):
    counts = []
    for compiles in (False, True):
        module = Counting()
        function = module.forward
        if compiles:
            function = foregrad.compile(function, backend="eager", on_unsupported="eager")
        counts.append([])
        for _ in range(4):
            if compiles and len(counts[1]) == 1:
                with pytest.warns(ForegradWarning, match=r"writes self\.count, self\.last"):
                    TRANSFORMS[name](function)(X)
            else:
                TRANSFORMS[name](function)(X)
            counts[-1].append(module.count)
    assert counts[0] == counts[1] == [1, 2, 3, 4]
    (entry,) = foregrad.explain_recompiles(function).eager
    assert entry.count == 3


def test_under_a_transform_they_are_an_error_where_asked():
    compiled = foregrad.compile(Counting().forward, backend="eager", on_unsupported="raise")
    tf.vmap(compiled)(X.expand(3, 2))
    with pytest.raises(UnsupportedSideEffectError):
        tf.vmap(compiled)(X.expand(3, 2))


def test_a_global_counter_beside_code_that_asks_for_types():
    """`type` is bound in that module during a capture, which is no change of the program's."""
    counting_module.count = 0
    compiled = foregrad.compile(counting_module.counting, backend="eager")
    for count in range(1, 4):
        compiled(X.clone().requires_grad_()).sum().backward()
        assert counting_module.count == count


def test_under_a_transform_a_cache_is_filled_once():
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = {}

        def forward(self, x):
            if x.shape[-1] not in self.tables:
                self.tables[x.shape[-1]] = torch.arange(float(x.shape[-1]))
            return x * self.tables[x.shape[-1]]

    module = Cached()
    compiled = foregrad.compile(module.forward, backend="eager")
    for size in (2, 3):
        for _ in range(3):
            x = torch.ones(4, size)
            assert torch.equal(tf.vmap(compiled)(x), x * torch.arange(float(size)))
    assert len(compiled.foregrad.transformed.layered) == 2
