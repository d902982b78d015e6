"""Programs as people write them, whose calls leave something in Python's state or draw from its generators and clocks.

Each defines `make()`, which gives what is called (a module, or a function) and a function that says what the calls have
left behind. `python -m tests.python.user_programs` runs all of them and says which differ from eager, and which ran
eagerly.
"""

# ruff: noqa: NPY002 - programs of users draw from the module itself

import importlib
import random
import sys
import time
import warnings
from collections import deque

import numpy as np
import torch
from torch import nn

import foregrad
from tests.python.user_containers import CONTAINERS
from tests.python.user_draws import DRAWN
from tests.python.user_objects import BACKWARDS, OBJECTS

MODULES = "torch collections dataclasses datetime functools math os random secrets time types uuid".split()
# What gives another value in each call of eager, too: (body, how to tell that a call gave the time of its own).
CLOCKS = {
    "time": "out.append(time.time())",
    "from time import time": "out.append(clock())",
    "perf_counter under a name": "out.append(ticks())",
    "datetime.now": "out.append(datetime.datetime.now().timestamp())",
    "datetime.utcnow by its class": "out.append(Datetime.now(datetime.timezone.utc).timestamp())",
    "date.today": "out.append(datetime.date.today().toordinal() + next_one())",
    "monotonic_ns": "out.append(time.monotonic_ns())",
    "uuid4": "out.append(uuid.uuid4().hex)",
    "uuid4 under a name": "out.append(unique().hex)",
    "secrets": "out.append(secrets.token_hex(8))",
    "token under a name": "out.append(token(8))",
    "os.urandom": "out.append(os.urandom(8))",
    "SystemRandom": "out.append(random.SystemRandom().random())",
    "strftime": "out.append(time.strftime('%H:%M:%S') + str(next_one()))",
    "in a cell": "out.append(in_a_cell())",
    "of a class": "out.append(Timer.clock())",
    "of an object": "out.append(timer.clock())",
    "in a list": "out.append(clocks[0]())",
    "in a tuple": "out.append(clocks_too[0]())",
    "a default": "out.append(stamp())",
    "a partial function": "out.append(soon())",
    "imported inside": "from datetime import datetime as D\nout.append(D.now().timestamp())",
    "time imported inside": "from time import time as t\nout.append(t())",
    "now under a name": "out.append(now().timestamp())",
    "a generator seeded by nothing": "out.append(random.Random().random())",
    "numpy's seeded by nothing": "out.append(np.random.default_rng().random())",
}

EAGER = {  # those that may run eagerly
    "read by a partial function",
    "gumbel with numpy",
    "masked by an array",
    "masked by chance, in numbers",
}


def world_of(text, name):
    world = {module: importlib.import_module(module) for module in MODULES}
    world |= {"nn": nn, "F": nn.functional, "np": np, "__name__": f"program_of_{abs(hash(name))}"}
    exec(compile(text, f"<{name}>", "exec"), world)
    if "make" not in world:
        world["make"] = lambda: (world["step"], lambda: None)
    return world


def shown(value):
    if isinstance(value, torch.Tensor):
        assert type(value) in (torch.Tensor, nn.Parameter), type(value)
        return type(value).__name__, value.tolist(), value.requires_grad, value.is_leaf
    if isinstance(value, dict):
        return [(key, shown(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value).__name__, [shown(item) for item in value]
    return type(value).__name__, repr(value)


def run(text, name, wrap, calls=6, between=lambda i, call: None):
    """What the calls give and leave behind, and what was called."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    given, look = world_of(text, name)["make"]()
    call = wrap(given)
    found = []
    for i in range(calls):
        between(i, given)
        x = ((torch.arange(6.0).reshape(2, 3) + i) / 4).requires_grad_()
        out = call(x)
        out.sum().backward()
        grads = [shown(p.grad) for p in given.parameters()] if isinstance(given, nn.Module) else []
        drawn = random.random(), np.random.rand(), torch.rand(()).item()
        found.append((out.tolist(), x.grad.tolist(), grads, shown(look()), drawn))
    return found, call


def compiled(given):
    return foregrad.compile(given, backend="eager", on_unsupported="eager")


def through_dynamo(given):
    torch._dynamo.reset()
    return torch.compile(given, backend="foregrad", options={"backend": "eager"})


def dynamo_alone(given):
    torch._dynamo.reset()
    return torch.compile(given, backend="eager")


def check(text, name, wrap=compiled):
    """(what differs or None, how many calls ran eagerly, how many graphs there are, what was said)."""
    expected, _ = run(text, name, lambda given: given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found, call = run(text, name, wrap)
        except Exception as error:
            return f"{type(error).__name__}: {error}"[:400], 0, 0, ""
    wrong = next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), None)
    said = None if wrong is None else f"call {wrong}: {expected[wrong]} != {found[wrong]}"
    warned = "; ".join(str(w.message)[:150] for w in caught if issubclass(w.category, foregrad.errors.ForegradWarning))
    if wrap is not compiled:
        return said, 0, 0, warned
    report = foregrad.explain_recompiles(call)
    return said, report.eager_calls, len(report), warned


def clocks(body, name, wrap=compiled):
    """What four calls of a program give that no two calls may give alike; how many ran eagerly."""
    lines = "\n".join("    " + line for line in body.splitlines())
    setup = "import itertools\nnumbers = itertools.count()\nDatetime = datetime.datetime\n"
    setup += "clock, ticks = time.time, time.perf_counter\nunique, token = uuid.uuid4, secrets.token_hex\n"
    setup += "class Timer:\n    clock = time.perf_counter\n"
    setup += "timer = types.SimpleNamespace(clock=time.time)\nclocks, clocks_too = [time.time], (time.time,)\n"
    setup += "def stamp(clock=time.time):\n    return clock()\nsoon = functools.partial(time.time)\n"
    setup += "now = datetime.datetime.now\n"
    setup += "def holding(clock):\n    return lambda: clock()\nin_a_cell = holding(time.time)\n"
    setup += "def next_one():\n    return next(numbers)\n"
    world = world_of(f"{setup}def step(x):\n    out = []\n{lines}\n    return x + 1, out[0]\n", name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        call = wrap(world["step"])
        found = []
        for _ in range(4):
            found.append(call(torch.ones(2))[1])
            time.sleep(0.001)
    return found, foregrad.explain_recompiles(call).eager_calls if wrap is compiled else 0


def main():
    wrap = through_dynamo if "dynamo" in sys.argv else compiled
    chosen = [word for word in sys.argv[1:] if word != "dynamo"]
    for title, programs in (("state", CONTAINERS), ("objects", OBJECTS), ("drawn", DRAWN), ("backward", BACKWARDS)):
        differ = eager = 0
        for name, text in programs.items():
            if chosen and not any(word in name for word in chosen):
                continue
            said, calls, graphs, warned = check(text, name, wrap)
            differ += said is not None
            eager += calls > 2
            print(f"{'DIFFERS' if said else 'same':8}{calls:3} eager {graphs:3} graphs  {name}  {said or warned or ''}")
        print(f"{title}: {len(programs)} programs, {differ} differ, {eager} ran eagerly in more than two calls")
    for name, body in CLOCKS.items():
        if not chosen or any(word in name for word in chosen):
            found, calls = clocks(body, name, wrap)
            print(f"{'same' if len(set(found)) == 4 else 'FROZEN':8}{calls:3} eager  {name}  {found[:2]}")


if __name__ == "__main__":
    main()
