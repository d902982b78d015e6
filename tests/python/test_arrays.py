"""Arrays of NumPy's among the arguments: what becomes a tensor is an input of the graph, all else is as in eager."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap

import numpy as np
import pytest
import torch
from torch import nn

import foregrad
from tests.programs import compiled_alike

MEAN, SCALE = np.full(3, 0.5), np.array([2.0, 3.0, 4.0], dtype="f4")


@dataclasses.dataclass
class Batch:
    values: np.ndarray


def row(i, n=3):
    return np.arange(1, n + 1, dtype="f4") + i


def pair(i):
    """Two arrays, in every second call in one memory."""
    values = row(i, 6)
    return (values[:4], values[2:]) if i % 2 else (values[:4].copy(), values[2:].copy())


def array_and_tensor(i):
    values = row(i, 6)
    return (values[:3] if i % 2 else values[:3].copy()), torch.from_numpy(values)


def written_twice(x, a):
    first, second = torch.from_numpy(a[1:]), torch.from_numpy(a)
    first.zero_()
    return x * second


def written_after(x, a):
    tensor = torch.from_numpy(a)
    tensor.add_(1)
    return x * tensor.sum() + torch.from_numpy(a * 2)


def written_in_numpy(x, a):
    a[0] = 7
    return x * torch.from_numpy(a)


def constant_written(x, a):
    zeros = np.zeros(3)
    b = a + zeros
    zeros[0] = 5
    return x * torch.from_numpy(b) * torch.from_numpy(a + zeros)


# The function, its arguments behind x in the i-th call, how many graphs it may take (0: all calls are eager).
PROGRAMS = {
    "from_numpy": (lambda x, a: x * torch.from_numpy(a), lambda i: (row(i),), 1),
    "as_tensor": (lambda x, a: x * torch.as_tensor(a), lambda i: (row(i),), 1),
    "tensor": (lambda x, a: x * torch.tensor(a, dtype=torch.float64), lambda i: (row(i),), 1),
    "arithmetic": (lambda x, a: x * torch.from_numpy((a.astype("f8") - MEAN) / SCALE), lambda i: (row(i),), 0),
    "converted": (lambda x, a: x * torch.from_numpy(a.astype("f8")), lambda i: (row(i),), 1),
    "converted, written": (lambda x, a: x * torch.from_numpy(a.astype("f4")).add_(1), lambda i: (row(i),), 1),
    "converted to fewer bits": (lambda x, a: x * torch.from_numpy(a.astype("f2")), lambda i: (row(i),), 0),
    "compared": (lambda x, a: x * torch.from_numpy(a > 2.5), lambda i: (row(i),), 0),
    "turned round": (lambda x, a: x[torch.from_numpy(~a)], lambda i: (np.array([-1, i % 2]),), 0),
    "compared with another": (lambda x, a: x * torch.from_numpy(a > SCALE), lambda i: (row(i),), 0),
    "part": (lambda x, a: x * torch.from_numpy(a[1:]).sum(), lambda i: (row(i),), 1),
    "both": (lambda x, a: x * torch.from_numpy(np.exp(a)) + torch.from_numpy(a), lambda i: (row(i),), 0),
    "sizes": (lambda x, a: x * torch.from_numpy(a).sum() * a.shape[0], lambda i: (row(i, 3 + i),), 2),
    "sizes of a part": (lambda x, a: x * torch.from_numpy(a[1:]).sum(), lambda i: (row(i, 3 + i),), 2),
    "kinds": (lambda x, a: x * torch.from_numpy(a), lambda i: (row(i).astype(("f4", "f8", "i4")[i % 3]),), 3),
    "an index": (lambda x, a: x[torch.from_numpy(a)], lambda i: (np.array([i % 3, 0]),), 1),
    "a mask": (lambda x, a: torch.where(torch.from_numpy(a) > 2, x, 0), lambda i: (row(i),), 1),
    "what it is": (lambda x, a: x * (torch.from_numpy(a) if isinstance(a, np.ndarray) else 2), lambda i: (row(i),), 1),
    "in a dict": (lambda x, d: x * torch.from_numpy(d["a"][0]), lambda i: ({"a": [row(i)]},), 1),
    "in an object": (lambda x, b: x * torch.from_numpy(b.values), lambda i: (Batch(row(i)),), 1),
    "array or tensor": (
        lambda x, a: x * torch.as_tensor(a),
        lambda i: (row(i) if i % 2 else torch.ones(3) * i,),
        2,
    ),
    "one or two": (
        lambda x, a, b: x * torch.from_numpy(a) * (2 if a is b else 1),
        lambda i: (lambda a: (a, a if i % 2 else a.copy()))(row(i)),
        2,
    ),
    "written": (lambda x, a: x * torch.from_numpy(a).add_(1), lambda i: (row(i),), 1),
    "a part written": (lambda x, a: x * torch.from_numpy(a[1:]).add_(1).sum(), lambda i: (row(i),), 1),
    "a written part of another": (written_twice, lambda i: (row(i),), 1),
    "written and looked at": (written_after, lambda i: (row(i),), 0),
    "written in NumPy": (written_in_numpy, lambda i: (row(i),), 0),
    "a constant written": (constant_written, lambda i: (row(i),), 0),
    "two tensors that share memory": (
        lambda x, a, b: x * torch.from_numpy(a).add_(1).sum() * torch.from_numpy(b).sum(),
        pair,
        1,
    ),
    "in a tensor's memory": (lambda x, a, t: torch.from_numpy(a).add_(1) * x * t.sum(), array_and_tensor, 1),
    "drawn, too": (
        lambda x, a: x * (torch.from_numpy(a) + torch.from_numpy(np.random.rand(3))) * np.random.rand(),  # noqa: NPY002
        lambda i: (row(i),),
        1,
    ),
    "its numbers": (lambda x, a: x * float(a[0]), lambda i: (row(i),), 0),
    "a loop": (lambda x, a: sum((x * float(v) for v in a), x), lambda i: (row(i),), 0),
    "read-only": (lambda x, a: x * torch.tensor(a), lambda i: (np.broadcast_to(row(i)[:1], (3,)),), 0),
    "other bytes": (lambda x, a: x * torch.tensor(a.astype("f4")), lambda i: (row(i).astype(">f4"),), 0),
    "text": (lambda x, a: x * len(a), lambda i: (np.array(["a", "b"]),), 0),
    "returned in NumPy": (lambda x, a: (x * torch.from_numpy(a)).detach().numpy(), lambda i: (row(i),), 0),
    "arithmetic returned": (lambda x, a: (x * 2, a * 2), lambda i: (row(i),), 0),
}


def arrays_in(value):
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return [value.tolist()]
    if isinstance(value, Batch):
        return arrays_in(value.values)
    return [item for part in (value.values() if isinstance(value, dict) else value) for item in arrays_in(part)]


def results(function, arguments, calls=6):
    found = []
    for i in range(calls):
        np.random.seed(i)  # noqa: NPY002
        x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
        given = arguments(i)
        out = function(x, *given)
        grads = [torch.autograd.grad(o.sum(), x)[0].tolist() for o in [out] if getattr(o, "requires_grad", False)]
        outs = [(type(o), str(o.dtype), o.tolist()) for o in (out if isinstance(out, tuple) else (out,))]
        found.append((outs, grads, arrays_in(given), np.random.rand()))  # noqa: NPY002
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager(name):
    function, arguments, graphs = PROGRAMS[name]
    compiled = compiled_alike(function, lambda f: results(f, arguments), on_unsupported="eager")
    report = foregrad.explain_recompiles(compiled)
    assert len(report) == graphs
    assert bool(report.eager_calls) is (not graphs or name in ("two tensors that share memory", "in a tensor's memory"))


def test_an_array_comes_back_as_it_is_and_a_tensor_over_it_is_over_it():
    compiled = foregrad.compile(lambda a: (a, torch.from_numpy(a), {"a": a}), backend="eager")
    for i in range(3):
        a = row(i)
        same, tensor, table = compiled(a)
        assert same is a
        assert table["a"] is a
        assert tensor.data_ptr() == a.ctypes.data


def test_a_module_that_counts_its_calls():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x, a):
            self.calls += 1
            return x * torch.from_numpy(a) * self.calls

    compiled = foregrad.compile(Counting(), backend="eager")
    x = torch.ones(3)
    for i in range(6):
        assert torch.equal(compiled(x, row(i)), x * torch.from_numpy(row(i)) * (i + 1))
    assert len(foregrad.explain_recompiles(compiled)) <= 3


def test_a_tensor_over_a_part_of_a_drawn_array_that_is_written():
    def f(x):
        a = np.random.randn(3)  # noqa: NPY002
        part, whole = torch.from_numpy(a[1:]), torch.from_numpy(a)
        part.zero_()
        return x * whole

    compiled = foregrad.compile(f, backend="eager")
    for i in range(3):
        np.random.seed(i)  # noqa: NPY002
        found = compiled(torch.ones(3)).tolist()
        np.random.seed(i)  # noqa: NPY002
        assert found == [np.random.randn(3)[0], 0.0, 0.0]  # noqa: NPY002


REACHED = {
    "the argument is written, a number is read": "torch.from_numpy(arr).add_(1)\nreturn x * float(held.sum())",
    "the argument is written, a tensor is read": "torch.from_numpy(arr).add_(1)\nreturn x * torch.from_numpy(held)",
    "it is written, the argument is read": "torch.from_numpy(held).mul_(2)\nreturn x * torch.from_numpy(arr)",
    "elements are written": "held[0] = 5\nreturn x * torch.from_numpy(arr)",
}


@pytest.mark.parametrize("part", [slice(None), slice(1, None), None])
@pytest.mark.parametrize("name", REACHED)
def test_an_array_that_is_given_and_reached_by_another_way(name, part):
    def run(compiled):
        held = np.ones(4)
        scope = {"held": held, "torch": torch}
        source = "def f(x, arr):\n" + textwrap.indent(REACHED[name].replace("(held)", "(held)[:x.shape[0]]"), "    ")
        exec(source, scope)
        f = scope["f"]
        f = foregrad.compile(f, backend="eager", on_unsupported="eager") if compiled else f
        given = held if part is None else held[part]
        with pytest.warns(foregrad.errors.ForegradWarning) if compiled else contextlib.nullcontext():
            return [(f(torch.ones(len(given)), given).tolist(), held.tolist()) for _ in range(3)]

    assert run(compiled=True) == run(compiled=False)


def test_an_array_that_is_reached_is_given_later():
    held = np.ones(3)

    def f(x, arr):
        torch.from_numpy(arr).add_(1)
        return x * torch.from_numpy(held)

    compiled = foregrad.compile(f, backend="eager", on_unsupported="eager")
    assert compiled(torch.ones(3), np.ones(3)).tolist() == [1.0, 1.0, 1.0]
    with pytest.warns(foregrad.errors.ForegradWarning, match="pass it, or use it"):
        assert compiled(torch.ones(3), held).tolist() == [2.0, 2.0, 2.0]
