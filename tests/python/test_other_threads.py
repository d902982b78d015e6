"""Other threads write to the program's state while one captures: what they write stays, as in eager.

A thread writes at a chosen moment: while the function runs, from what a fake tensor runs in the place of a custom
operator; while its backward is derived; or from the compiler, when the capture is over.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import types
import warnings

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning

PATIENCE_S = 60
MEANWHILE: list = []  # what another thread does, while an operator is captured


def in_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def others_write():
    for work in MEANWHILE:
        in_thread(work)


@pytest.fixture(scope="module", autouse=True)
def operator():
    """`test_others::forward` computes a sine; where it is captured, another thread writes, and so in its backward."""
    library = torch.library.Library("test_others", "DEF")
    library.define("forward(Tensor x) -> Tensor")
    library.define("backward(Tensor x, Tensor g) -> Tensor")

    def fake(*tensors):
        if any(type(tensor) is not torch.Tensor for tensor in tensors) or tensors[0].device.type == "meta":
            others_write()
        return torch.empty_like(tensors[0])

    library.impl("forward", lambda x: x.sin(), "CPU")
    library.impl("backward", lambda x, g: g * x.cos(), "CPU")
    torch.library.register_fake("test_others::forward", fake, lib=library)
    torch.library.register_fake("test_others::backward", fake, lib=library)
    torch.library.register_autograd(
        "test_others::forward",
        lambda ctx, g: torch.ops.test_others.backward(ctx.saved_tensors[0], g),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        lib=library,
    )
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def nothing_meanwhile():
    MEANWHILE.clear()
    yield
    MEANWHILE.clear()


@pytest.fixture
def module():
    """A module of the program's, with a function, a counter, an object and a list."""
    made = types.ModuleType("module_of_others")
    sys.modules[made.__name__] = made
    source = """
import torch
count, seen = 0, []
class Thing: pass
class Slotted:
    __slots__ = ("count", "other")
thing, slotted = Thing(), Slotted()
thing.count = slotted.count = 0
def plain(x):
    return torch.ops.test_others.forward(x) * 2
def counts(x):
    global count
    count += 1
    thing.count += 1
    slotted.count += 1
    y = torch.ops.test_others.forward(x) * 2
    thing.last = count
    return y
def appends(x):
    seen.append(1)
    return torch.ops.test_others.forward(x) * 2
"""
    exec(source, vars(made))
    yield made
    del sys.modules[made.__name__]


def compiled(function, by):
    if by == "compile":
        return foregrad.compile(function, backend="eager", on_unsupported="eager")
    return torch.compile(function, backend="foregrad", options={"backend": "eager"})


def sized(n):
    return torch.ones(n + 2, requires_grad=True)


@pytest.mark.parametrize("by", ["compile", "torch.compile"])
@pytest.mark.parametrize("name", ["plain", "counts", "appends"])
def test_names_attributes_and_items_that_another_thread_sets_stay(module, name, by):
    written = []

    def write():
        key = f"name_{len(written)}"
        written.append(key)
        setattr(module, key, len(written))
        setattr(module.thing, key, len(written))
        module.slotted.other = module.Thing.of_class = key
        for stale in written[:-10]:
            vars(module).pop(stale, None)

    MEANWHILE.append(write)
    f = compiled(getattr(module, name), by)
    for n in range(30):
        f(sized(n)).sum().backward()
    assert written
    for key in written[-10:]:
        assert vars(module)[key] == vars(module.thing)[key] == written.index(key) + 1
    assert not any(key in vars(module) for key in written[:-10])
    assert module.slotted.other == module.Thing.of_class == written[-1]
    if name == "counts":
        assert module.count == module.thing.count == module.slotted.count == module.thing.last == 30
    MEANWHILE.clear()
    for key in written[-10:]:
        delattr(module, key)
    f(sized(1)).sum().backward()  # a compiled call repeats none of it
    assert not any(key in vars(module) for key in written)


def test_a_compiler_works_for_long_and_others_assign_400_names(module):
    def compiler(graph, inputs):
        in_thread(lambda: [setattr(module, f"{name}_{i}", i) for i in range(400)])
        return graph.forward

    name = "first"
    f = foregrad.compile(module.counts, backend=compiler)
    for name in ("first", "second", "third"):
        f(sized(len(name))).sum().backward()
        assert all(vars(module)[f"{name}_{i}"] == i for i in range(400))
    assert module.count == 3


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


@pytest.mark.parametrize("name", ["count", "seen", "known", "mode"])
def test_what_both_write_is_put_back_as_a_difference(name, monkeypatch):
    """The other thread writes when the run is over, while the graph is put together."""
    from foregrad.tracing import capture

    thing = types.SimpleNamespace(count=0, seen=[], known={0}, mode="none")

    class Thing:
        pass

    own = Thing()
    own.__dict__.update(vars(thing))
    writes = {
        "count": (lambda n: setattr(own, "count", own.count + n)),
        "seen": own.seen.append,
        "known": own.known.add,
        "mode": lambda n: setattr(own, "mode", n),
    }
    others = []

    def write():
        others.append(len(others) + 10)
        writes[name](others[-1])

    def f(x):
        if name == "count":
            own.count += 1
        elif name == "seen":
            own.seen.append(1)
        elif name == "known":
            own.known.add(1)
        else:
            own.mode = 1
        return x.sin()

    plain = capture.check_sizes
    monkeypatch.setattr(capture, "check_sizes", lambda *args, **kwargs: [in_thread(write), plain(*args, **kwargs)][1])
    call = foregrad.compile(f, backend="eager", on_unsupported="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForegradWarning)
        call(sized(1))
    assert others
    expected = {"count": sum(others) + 1, "seen": [*others, 1], "known": {0, 1, *others}, "mode": 1}
    assert getattr(own, name) == expected[name]


class Counter:
    def __init__(self):
        self.count, self.seen, self.last = 0, [], None


LOCK = threading.Lock()


@pytest.mark.parametrize("by", ["compile", "torch.compile"])
@pytest.mark.parametrize("taken", ["inside", "around"])
def test_a_counter_under_a_lock_counts_every_call(taken, by, monkeypatch):
    counter, interval = Counter(), sys.getswitchinterval()
    layers = [torch.nn.Linear(8, 8) for _ in range(3)]

    def inside(x):
        with LOCK:
            counter.count += 1
        for layer in layers:
            x = layer(x).sin()
        return x

    def around(x):
        counter.count += 1
        return x.sin()

    call = compiled({"inside": inside, "around": around}[taken], by)

    def work():
        for i in range(12):
            x = torch.randn(*[1] * (i % 4), 8)
            with LOCK if taken == "around" else contextlib.nullcontext():
                call(x)

    threads = [threading.Thread(target=work) for _ in range(3)]
    sys.setswitchinterval(1e-4)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForegradWarning)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(PATIENCE_S)
    finally:
        sys.setswitchinterval(interval)
    assert counter.count == 36


@pytest.mark.parametrize("by", ["compile", "torch.compile"])
def test_a_number_that_another_thread_counts_is_read_as_it_is(by):
    """It differs in each call, so that it becomes an argument; and it is counted while that is captured."""
    counter, captured = Counter(), []

    def count():
        captured.append(1)
        counter.count += 1

    def f(x):
        return torch.ops.test_others.forward(x) + counter.count * 2

    call, x = compiled(f, by), torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ForegradWarning)
        for n in range(12):
            MEANWHILE[:] = [count] if n < 8 else []
            call(x if n % 3 else sized(n))
            counter.count += 1
            assert type(counter.count) is int
            assert counter.count == n + 1 + len(captured)
        for _ in range(3):
            assert torch.equal(call(x), x.sin() + counter.count * 2)
            counter.count += 1


def test_a_function_that_writes_under_a_lock_runs_eagerly_by_name():
    counter = Counter()
    locks = types.SimpleNamespace(by_name=threading.RLock())

    def f(x):
        counter.count += 1
        with locks.by_name:
            counter.last = x.shape
        return x.sin()

    def reads(x):
        with locks.by_name:
            return x * counter.count

    call = foregrad.compile(f, backend="eager", on_unsupported="eager")
    with pytest.warns(ForegradWarning, match=r"takes a lock .* in f, and"):
        call(sized(1))
    call(sized(1))
    in_thread(lambda: locks.by_name.acquire() and locks.by_name.release())
    assert counter.count == 2
    call = foregrad.compile(reads, backend="eager", on_unsupported="raise")
    assert torch.equal(call(sized(1)), sized(1) * 2)


class Stopped(Exception):
    pass


@pytest.mark.usefixtures("captures_may_wait")
@pytest.mark.parametrize("stop", ["signal", "exit"])
@pytest.mark.parametrize("first", [True, False], ids=["first call", "later call"])
def test_an_interrupt_leaves_all_that_was_done_before_it(first, stop):
    def program(wrap):
        counter, armed = Counter(), []

        def f(x):
            counter.count += 1
            counter.seen.append(counter.count)
            y = x.sin()
            if armed:
                armed.clear()
                if stop == "exit":
                    raise SystemExit
                signal.raise_signal(signal.SIGINT)
            counter.last = 1
            return y

        call = wrap(f)
        for n in range(0 if first else 3):
            call(sized(n))
        counter.last = None
        armed.append(1)
        with pytest.raises(SystemExit if stop == "exit" else Stopped):
            call(sized(9))
        left = vars(counter).copy(), [*counter.seen]
        call(sized(9))
        return left, vars(counter)

    def handler(*_):
        raise Stopped

    before = signal.signal(signal.SIGINT, handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ForegradWarning)
            ours = program(lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"))
    finally:
        signal.signal(signal.SIGINT, before)
    before = signal.signal(signal.SIGINT, handler)
    try:
        assert ours == program(lambda f: f)
    finally:
        signal.signal(signal.SIGINT, before)
    assert all(type(value) is int for value in ours[1]["seen"])
