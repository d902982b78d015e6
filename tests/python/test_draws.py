"""Random numbers of Python and NumPy, and times, are drawn anew in each call, in eager's order, or the call is eager."""

# ruff: noqa: NPY002 - programs of users draw from the module itself

import contextlib
import datetime as dt
import functools
import os
import random
import re
import secrets
import time
import uuid
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import foregrad

# What is drawn, and whether calls run eagerly.
PROGRAMS = {
    "random": ("return x * random.random()", False),
    "two": ("a = random.random()\nreturn x * a + random.random()", False),
    "uniform": ("return x * random.uniform(1, 2)", False),
    "gauss": ("return x + random.gauss(0, 1)", False),
    "randint": ("return x * random.randint(1, 5)", False),
    "branch": ("return x * 2 if random.random() < 0.5 else x + 1", False),
    "layer drop": ("for i in range(3):\n    if random.random() > 0.4:\n        x = x * 2 + i\nreturn x", False),
    "choice": ("return x * random.choice([1, 2, 3])", False),
    "shuffle": ("order = [1, 2, 3]\nrandom.shuffle(order)\nreturn x * order[0]", False),
    "sample": ("return x[:, random.sample(range(3), 2)]", False),
    "own name": ("return x * draw()", False),
    "own generator": ("return x * noise.random()", False),
    "two generators": ("return x * noise.random() + random.random()", False),
    "mixup": ("lam = np.random.beta(1.0, 1.0)\nreturn x * lam + (1 - lam) * x.flip(0)", False),
    "rand": ("return x * np.random.rand()", False),
    "normal": ("return x + np.random.normal(0.0, 2.0)", False),
    "integer": ("return x * np.random.randint(0, 5)", False),
    "numpy's branch": ("return x * 2 if np.random.rand() < 0.5 else x", False),
    "with torch's": ("return x * random.random() + torch.rand(3)", False),
    "array": ("return x * torch.from_numpy(np.random.randn(3).astype('f4'))", False),
    "permutation": ("return x[:, np.random.permutation(3)]", False),
    "permutation as a tensor": ("return x[:, torch.from_numpy(np.random.permutation(3))]", False),
    "choice of several": ("return x[:, np.random.choice(3, size=2, replace=False)]", False),
    "compared in PyTorch": ("keep = torch.from_numpy(np.random.rand(2, 3)) > 0.3\nreturn x * keep / 0.7", False),
    "compared in NumPy": ("keep = np.random.rand(2, 3) > 0.3\nreturn x * torch.from_numpy(keep) / 0.7", True),
    "turned round in NumPy": ("keep = np.random.randint(0, 2, 3)\nreturn x * torch.from_numpy(~keep)", True),
    "a part": ("return x * torch.from_numpy(np.random.permutation(5)[1:4])", False),
    "seeded by a draw": ("return x * default_rng(random.randint(0, 2)).random()", False),
    "arithmetic": ("keep = np.random.rand(2, 3) > 0.3\nreturn x * torch.from_numpy(keep.astype('f4') / 0.7)", True),
    "one array, two tensors": ("a = numbers.normal(size=3)\nreturn x * torch.tensor(a) + torch.as_tensor(a)", False),
    "a tensor over an array": (
        "a = np.random.randn(3)\nt, u = torch.from_numpy(a), torch.from_numpy(a)\nt.add_(1)\nreturn x * u",
        False,
    ),
    "new_tensor of an array": ("return x * x.new_tensor(np.random.randn(3)) + x.new(np.random.rand(3))", False),
    "mean of an array": ("a = np.random.randn(3)\nreturn x * len(a) + torch.as_tensor(a.mean())", True),
    "array, number, array": (
        "a = torch.from_numpy(np.random.randn(3))\nb = np.random.rand()\nreturn x * a * b * torch.tensor(numbers.random(3))",
        False,
    ),
    "a number of an array": ("return x * float(np.random.randn(3)[0])", True),
    "a loop over an array": ("for i in np.random.permutation(3):\n    x = x + i\nreturn x", True),
    "written elements": ("a = np.random.randn(3)\na[0] = 0\nreturn x * torch.from_numpy(a)", True),
    "shuffled in place": ("a = np.arange(3)\nnp.random.shuffle(a)\nreturn x[:, a]", True),
    "as many as are drawn": ("a = np.random.rand(3)\nreturn x * torch.from_numpy(a[a > 0.5]).sum()", True),
    "numpy's own generator": ("return x * numbers.random()", False),
    "numpy's own branch": ("return x * 2 if numbers.random() < 0.5 else x - 1", False),
    "an array of numpy's own": ("return x * torch.from_numpy(numbers.random(3))", False),
    "numpy's by own names": ("return x * rand() + beta(1.0, 1.0)", False),
    "a seeded generator made inside": ("return x * default_rng(3).random()", False),
    "numpy's own under two names": ("return x * numbers.random() + again.random()", True),
    "as often as it says": (
        "for _ in range(2 if random.random() < 0.5 else 3):\n    x = x * random.random()\nreturn x",
        False,
    ),
    "function of math": ("return x * math.log(random.random() + 1)", False),
    "text": ("return x * len(str(random.random()))", True),
    "drawn from drawn": ("return x * random.uniform(0, random.random())", True),
}


def program(body, **more):
    world = {"torch": torch, "random": random, "np": np, "math": __import__("math"), "__name__": "draws_of_a_user"}
    world |= {"draw": random.random, "noise": random.Random(3), "numbers": np.random.default_rng(3)}
    world |= {"rand": np.random.rand, "beta": np.random.beta, "default_rng": np.random.default_rng}
    world["again"] = world["numbers"]
    world |= more
    exec("def f(x):\n" + "\n".join(f"    {line}" for line in body.splitlines()), world)
    return world["f"]


def run(body, wrap, calls=6):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    call = wrap(program(body))
    found = []
    for i in range(calls):
        x = torch.full((2, 3), float(i), requires_grad=True)
        out = call(x)
        out.sum().backward()
        found.append((out.tolist(), x.grad.tolist(), random.random(), np.random.rand(), torch.rand(()).item()))
    return found, call


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager(name):
    body, may_be_eager = PROGRAMS[name]
    expected, _ = run(body, lambda f: f)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", foregrad.errors.ForegradWarning)
        found, call = run(body, lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"))
    assert found == expected
    report = foregrad.explain_recompiles(call)
    assert bool(report.eager_calls) is may_be_eager, str(report)
    assert len([w for w in caught if w.category is foregrad.errors.ForegradWarning]) == may_be_eager


def test_drawn_in_training_only():
    class Drop(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls if self.training and random.random() < 0.5 else x + 1

    def run(wrap):
        random.seed(0)
        module = Drop()
        call = wrap(module)
        found = []
        for i in range(12):
            module.train(i % 3 != 1)
            found.append((call(torch.ones(2)).tolist(), module.calls, random.random()))
        return found, call

    found, call = run(lambda m: foregrad.compile(m, backend="eager"))
    assert found == run(lambda m: m)[0]
    assert foregrad.explain_recompiles(call).eager_calls == 0


def test_the_time_is_that_of_the_call():
    compiled = foregrad.compile(lambda x: (x + 1, time.time()), backend="eager")
    times = [compiled(torch.ones(2))[1] for _ in range(3)]
    assert times == sorted(times)
    assert len(set(times)) == 3
    assert type(times[2]) is float


TWICE = {
    "time": "begin = time.time()\ny = x.sin()\nreturn y, time.time() - begin",
    "own name": "begin = clock()\ny = x.sin()\nreturn y, clock() - begin",
    "in a context": "with Timer() as timer:\n    y = x.sin()\nreturn y, timer.took",
}


class Timer:
    def __enter__(self):
        self.began = time.perf_counter()
        return self

    def __exit__(self, *_):
        self.took = time.perf_counter() - self.began


@pytest.mark.parametrize("name", TWICE)
def test_between_two_times_lies_what_lies_there_in_eager(name):
    function = program(TWICE[name], time=time, clock=time.perf_counter, Timer=Timer)
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with pytest.warns(foregrad.errors.ForegradWarning, match="takes the time more than once"):
        y, took = compiled(torch.ones(2))
    assert torch.equal(y, torch.ones(2).sin())
    assert took >= 0
    assert foregrad.explain_recompiles(compiled).eager_calls == 1


UNSEEDED = (
    "default_rng()", "np.random.default_rng()", "np.random.RandomState()", "np.random.Generator(np.random.PCG64())",
    "np.random.default_rng(np.random.SeedSequence())", "random.Random()",
)  # fmt: skip


@pytest.mark.parametrize("made", UNSEEDED)
def test_a_generator_that_is_given_no_seed_gives_other_numbers_in_each_call(made):
    drawn = "rand" if "State" in made else "random"
    function = program(f"return x * {made}.{drawn}()")
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    named = (
        "seeds it with no fixed number"
        if made == "random.Random()"
        else r"calls `random.getrandbits` at <string>:2 in f"
    )
    with pytest.warns(foregrad.errors.ForegradWarning, match=named):
        assert len({compiled(torch.ones(1)).item() for _ in range(3)}) == 3


ASKED_OUTSIDE = {  # other clocks, unique names and what the system draws: each with the name that the warning has
    **{f"time.{name}()": f"time.{name}" for name in ("monotonic", "process_time", "time_ns", "perf_counter_ns")},
    "ticks()": "monotonic",
    "functools.partial(time.monotonic)()": "time.monotonic",
    "next(map(os.urandom, [8]))": "os.urandom",
    "datetime.now()": "datetime.now",
    "uuid.uuid4()": "uuid.uuid4",
    "functools.partial(uuid.uuid1)()": "uuid.uuid1",
    "secrets.token_hex(8)": "random.randbytes",
    "token(8)": "random.randbytes",
    "secrets.randbelow(1 << 40)": "random.getrandbits",
    "secrets.randbits(40)": "random.getrandbits",
    "secrets.choice(range(1 << 40))": "random.getrandbits",
    "random.SystemRandom().random()": "random.random",
    "random.Random(2).random() + random.SystemRandom().random()": "random.random",
}


@pytest.mark.parametrize("asked", ASKED_OUTSIDE)
def test_other_clocks_and_what_the_system_draws_are_refused_by_name(asked):
    world = {"functools": functools, "time": time, "uuid": uuid, "os": os, "secrets": secrets}
    world |= {"datetime": dt.datetime, "ticks": time.monotonic, "token": secrets.token_hex}
    function = program(f"return x + 1, {asked}", **world)
    with pytest.raises(foregrad.errors.UnsupportedSideEffectError, match=re.escape(f"calls `{ASKED_OUTSIDE[asked]}`")):
        foregrad.capture(function, torch.ones(2))
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with pytest.warns(foregrad.errors.ForegradWarning, match="<string>:2 in f") as caught:
        results = []
        for _ in range(3):
            results.append(compiled(torch.ones(2)))
            time.sleep(0.001)
    assert len([w for w in caught if w.category is foregrad.errors.ForegradWarning]) == 1
    assert len({result[1] for result in results}) == 3
    assert foregrad.explain_recompiles(compiled).eager_calls == 3


class Timed:
    def __enter__(self, clock=time.perf_counter):
        self.since = clock()

    def __exit__(self, *_):
        pass


@pytest.mark.parametrize("runs", [False, True])
def test_a_clock_that_is_a_default_is_refused_where_the_function_runs(runs):
    timed = Timed()

    @foregrad.compile(backend="eager", on_unsupported="eager")
    def function(x):
        if len(x) == 2 or timed is None:
            with contextlib.suppress(Exception), timed:
                return x * 2
        return x * 3

    x = torch.ones(2 if runs else 3)
    with (
        pytest.warns(foregrad.errors.ForegradWarning, match="reach perf_counter") if runs else warnings.catch_warnings()
    ):
        assert [function(x).tolist() for _ in range(2)] == [[2.0 if runs else 3.0] * len(x)] * 2
    report = foregrad.explain_recompiles(function)
    assert (len(report), report.eager_calls) == ((0, 2) if runs else (1, 0))


def test_nothing_is_left_in_place_of_the_functions():
    before = random.random, random.Random.random, np.random.rand, time.time, uuid.uuid4
    run(PROGRAMS["own name"][0], lambda f: foregrad.compile(f, backend="eager"))
    assert before == (random.random, random.Random.random, np.random.rand, time.time, uuid.uuid4)
    assert type(random.random).__name__ == "builtin_function_or_method"


def test_other_sizes_have_draws_of_their_own():
    """The last batch of an epoch is smaller: `np.random.permutation(len(x))` has another argument then."""

    def mixed(x):
        share = np.random.beta(0.4, 0.4)
        return share * x + (1 - share) * x[np.random.permutation(x.shape[0])]

    def run(wrap):
        np.random.seed(0)
        call = wrap(mixed)
        return [
            (call(torch.arange(2.0 * n).reshape(n, 2)).tolist(), np.random.rand()) for n in [4, 4, 3, 4, 3, 5]
        ], call

    found, call = run(lambda f: foregrad.compile(f, backend="eager"))
    assert found == run(lambda f: f)[0]
    report = foregrad.explain_recompiles(call)
    assert (len(report), report.eager_calls) == (3, 0)


def test_a_tensor_that_only_some_calls_make_of_an_array():
    def some(x):
        a = np.random.randn(3)
        x = x + torch.from_numpy(a)
        return x + torch.tensor(a[:1]) if random.random() < 0.5 else x

    def run(wrap):
        np.random.seed(0)
        random.seed(0)
        call = wrap(some)
        return [call(torch.ones(3)).tolist() for _ in range(8)], call

    found, call = run(lambda f: foregrad.compile(f, backend="eager"))
    assert found == run(lambda f: f)[0]
    assert foregrad.explain_recompiles(call).eager_calls == 0


def test_an_array_that_is_looked_at_when_a_tensor_over_it_was_written():
    def written(x):
        a = np.random.randn(3)
        torch.from_numpy(a).zero_()
        return x + torch.from_numpy(np.random.randn(3)) * torch.from_numpy(a[:1])

    compiled = foregrad.compile(written, backend="eager")
    for i in range(3):
        assert torch.equal(compiled(torch.ones(3) * i), torch.ones(3, dtype=torch.float64) * i)


def test_a_drawn_array_that_is_returned():
    compiled = foregrad.compile(lambda x: (x * 2, np.random.rand(2)), backend="eager")
    for i in range(3):
        np.random.seed(i)
        _, found = compiled(torch.ones(3))
        np.random.seed(i)
        assert found.tolist() == np.random.rand(2).tolist()
