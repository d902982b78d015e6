"""Calls from several threads, from inside themselves, from hooks."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode

import foregrad
from tests import forked

PATIENCE_S = 120  # a deadlock, not a slow machine

pytestmark = pytest.mark.usefixtures("captures_may_wait")


def together(work, count):
    """Run work(0) ... work(count - 1) at the same time; their results."""
    barrier = threading.Barrier(count)

    def start(index):
        barrier.wait(PATIENCE_S)
        return work(index)

    with ThreadPoolExecutor(count) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(start, i) for i in range(count)]]


def test_two_threads_that_race_for_the_first_call_compile_once():
    f = foregrad.compile(lambda x: (x.sin() * 2).sum(), backend="eager")
    x = torch.randn(5, requires_grad=True)
    results = together(lambda _: f(x), 2)
    assert torch.equal(results[0], results[1])
    assert len(foregrad.explain_recompiles(f)) == 1


def test_eight_threads_and_three_shapes_make_three_graphs():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    f = foregrad.compile(lambda x: model(x).sum(), backend="eager")

    def work(index):
        generator = torch.Generator().manual_seed(index)
        for turn in range(60):
            x = torch.randn((index + turn) % 3 + 1, 4, generator=generator).requires_grad_()
            y = x.detach().clone().requires_grad_()
            (ours,) = torch.autograd.grad(f(x), x)
            (theirs,) = torch.autograd.grad(model(y).sum(), y)
            assert torch.equal(ours, theirs)
        return True

    assert all(together(work, 8))
    assert len(f.foregrad.specializations) == 3
    assert len(f.foregrad.graphs.calls) == 3


def test_threads_that_race_for_the_first_backward_compile_it_once():
    compiled = []

    def compiler(module, inputs):
        compiled.append(module)
        return module.forward

    f = foregrad.compile(lambda x: (x.sin().sum(), x.cos().sum()), backend=(compiler, compiler))
    inputs = [torch.randn(4, requires_grad=True) for _ in range(4)]
    outputs = [f(x) for x in inputs]
    grads = together(lambda i: torch.autograd.grad(sum(outputs[i]), inputs[i])[0], 4)
    for x, grad in zip(inputs, grads, strict=True):
        assert torch.equal(grad, x.cos() - x.sin())
    assert len(compiled) == 2  # forward, backward
    # And the backward of one output alone, in all threads at once.
    outputs = [f(x) for x in inputs]
    grads = together(lambda i: torch.autograd.grad(outputs[i][0], inputs[i])[0], 4)
    for x, grad in zip(inputs, grads, strict=True):
        assert torch.equal(grad, x.cos())
    assert len(compiled) == 3


def test_a_compiled_function_inside_another_is_inlined():
    inner = foregrad.compile(lambda x: x.sin(), backend="eager")
    outer = foregrad.compile(lambda x: inner(x) * 2, backend="eager")
    x = torch.randn(3, requires_grad=True)
    outer(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos() * 2)
    assert not inner.foregrad.specializations
    inner(x)
    assert len(inner.foregrad.specializations) == 1


def test_a_function_that_calls_itself():
    @foregrad.compile(backend="eager")
    def power(x, n):
        return x if n == 0 else x * power(x, n - 1)

    x = torch.randn(3)
    assert torch.equal(power(x, 3), x * (x * (x * x)))
    assert torch.equal(power(x, 2), x * (x * x))


def test_a_call_from_a_hook_of_its_own_backward():
    f = foregrad.compile(lambda x: (x * x).sum(), backend="eager")
    seen = []
    x, y = torch.randn(3, requires_grad=True), torch.randn(4, requires_grad=True)

    def hook(grad):
        with torch.enable_grad():
            seen.append(torch.autograd.grad(f(y), y)[0])

    x.register_hook(hook)
    f(x).backward()
    assert torch.equal(seen[0], 2 * y)
    assert torch.equal(x.grad, 2 * x)


def test_a_backward_in_another_thread():
    f = foregrad.compile(lambda x: x.exp().sum(), backend="eager")
    x = torch.randn(3, requires_grad=True)
    out = f(x)
    thread = threading.Thread(target=out.backward)
    thread.start()
    thread.join(PATIENCE_S)
    assert torch.equal(x.grad, x.detach().exp())


def test_a_capture_in_one_thread_leaves_others_alone():
    """While one thread captures, another runs modules as ever."""
    inside, done = threading.Event(), threading.Event()
    model = nn.Linear(3, 3)

    def f(x):
        inside.set()
        assert done.wait(PATIENCE_S)
        return model(x)

    compiled = foregrad.compile(f, backend="eager")
    x = torch.randn(2, 3)

    def other():
        inside.wait(PATIENCE_S)
        try:
            return model(x), type(model(x))
        finally:
            done.set()

    results = together(lambda i: compiled(x) if i == 0 else other(), 2)
    assert torch.equal(results[0], results[1][0])
    assert results[1][1] is torch.Tensor


LEAVES_SHARED = """
import sys, threading, torch, foregrad
from torch.autograd.graph import get_gradient_edge

torch.set_num_threads(1)
sys.setswitchinterval(1e-5)
p, x = torch.randn(4, requires_grad=True), torch.randn(4)
held = get_gradient_edge(p)  # Python alone holds its accumulator: whoever looks at it waits for the GIL
with foregrad.config.override(native={native}):
    f = foregrad.compile(lambda x: x * p * p, backend="eager")
f(x)

def repeat(function):
    for _ in range(4000):
        function(x)

threads = [threading.Thread(target=repeat, args=(each,)) for each in (f, lambda x: x * p * p) * 2]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""


def test_leaves_that_eager_code_uses_at_the_same_time(tmp_path):
    """Threads that wait for each other do so without Python: only another process gets out of that."""
    script = tmp_path / "script.py"
    script.write_text(LEAVES_SHARED.format(native=foregrad.config.native))
    done = forked.run(str(script), seconds=PATIENCE_S)
    assert done.returncode == 0, done.stderr


def test_other_threads_see_nothing_that_a_capture_replaces():
    model, plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.ones(3)
    with FakeTensorMode() as mode:
        fake = torch.ones(3)
    asked = {
        "a storage's device": lambda: plain.untyped_storage().device,
        "shared memory": lambda: torch.ones(3).share_memory_().is_shared(),
        "a pickle": lambda: pickle.loads(pickle.dumps(plain)).tolist(),
        "a copy": lambda: copy.deepcopy(plain).tolist(),
        "a fake's class": lambda: fake.__class__,
        "a fake's type": lambda: type(fake),
        "a fake's attributes": lambda: sorted(set(vars(fake)) & {"_fake_device", "fake_mode"}),
        "whether it is fake": lambda: isinstance(fake, FakeTensor) and fake.fake_mode is mode,
    }
    expected, ended, other = {name: ask() for name, ask in asked.items()}, threading.Event(), []

    def look():
        while not ended.is_set():
            for name, ask in asked.items():
                try:
                    found = ask()
                except Exception as error:
                    found = error
                if found != expected[name]:
                    other.append((name, found))

    def function(x):
        attributes = x.__class__, type(x), x.__dict__, dir(x), x.untyped_storage().device
        return model(x).sum() * len(attributes)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        for _ in range(30):
            foregrad.compile(function, backend="eager")(torch.ones(2, 4))
    finally:
        ended.set()
        thread.join(PATIENCE_S)
        sys.setswitchinterval(interval)
    assert other[:3] == []
