"""Functions that draw otherwise from call to call: values and the generators' states are eager's after each call."""

# ruff: noqa: NPY002 - programs of users draw from the module itself

import contextlib
import random
import warnings

import numpy as np
import pytest
import torch

import foregrad
from tests.covering import ALL

PROGRAMS = {
    "a draw behind a branch": "if random.random() < 0.5:\n    x = x * random.randint(0, 3)\nreturn x",
    "continue": (
        "for i in range(3):\n    if random.random() < 0.4:\n        continue\n    x = x + random.uniform(0, i)\nreturn x"
    ),
    "a range from an earlier draw": "h = random.randint(2, 4)\ny = random.randint(2, 9 - h)\nreturn x * h + y",
    "ranges from a range": (
        "a = random.randint(2, 5)\nb = random.randint(a, a * 2)\nc = random.randint(0, b - a)\nreturn x * a + b - c"
    ),
    "NumPy behind Python": (
        "if random.random() < 0.5:\n    x = x[:, np.random.permutation(3)]\nelif np.random.rand() < 0.5:\n    x = x + 1\n"
        "return x * np.random.normal()"
    ),
    "torch's behind Python's": "return x + torch.rand(3) if random.random() < 0.5 else x * random.random()",
    "a counter": "S['n'] += 1\nif random.random() < 0.5:\n    x = x * random.randint(1, 3)\nreturn x * S['n']",
    "a list": "S['drawn'].append(random.random())\nif S['drawn'][-1] < 0.5:\n    x = x * random.randint(1, 3)\nreturn x",
    "own generators": (
        "k = own.randint(2, 6)\nif numbers.random() < 0.5:\n    x = x + numbers.normal()\nreturn x * own.randint(0, k)"
    ),
    "an error behind a branch": "if random.random() < 0.3:\n    raise ValueError(random.random())\nreturn x * random.random()",
    "an error of a draw": (
        "k = random.randint(0, 9)\nif k > 6:\n    return x * random.sample(range(k - 6), 2)[0]\nreturn x * k"
    ),
    "a range that some draws make empty": (
        "k = random.randint(0, 9)\nreturn x * random.randint(k, 6) if k < 6 else x * k"
    ),
    "as long as it goes on": "while random.random() < 0.4:\n    x = x + random.random()\nreturn x",
}


PLAIN = (
    "x = x + random.uniform(1, 3)", "x = x[:, np.random.permutation(x.shape[1])]", "S['n'] += 1",
    "x = x + torch.rand(1)", "x = x * random.choice([1, 2, 3])", "x = x.sin()",
)  # fmt: skip


def made(rng):
    """The text of a random program."""
    lines, numbers = [], []

    def statement(depth, ind):
        kind = rng.randrange(12)
        if kind == 0:
            numbers.append(f"n{len(numbers)}")
            lines.append(f"{ind}{numbers[-1]} = random.randint({rng.randint(0, 3)}, {rng.randint(4, 9)})")
        elif kind == 1 and numbers and not depth:
            of = rng.choice(numbers)
            top = rng.choice([f"9 - {of}", f"{of} * 2", f"{of} + 3", f"{of} // 2", f"max({of}, 2)", f"3 - {of}"])
            numbers.append(f"n{len(numbers)}")
            lines.append(f"{ind}{numbers[-1]} = random.randint(0, {top})")
        elif kind == 2 and numbers:
            lines.append(f"{ind}x = x * {rng.choice(numbers)}")
        elif kind < 7 and depth < 2:
            ask = ["random.random() < 0.5", "np.random.rand() < 0.3", *(f"{n} < {rng.randint(1, 6)}" for n in numbers)]
            lines.append(f"{ind}if {rng.choice(ask)}:")
            known = len(numbers)
            for _ in range(rng.randint(1, 2)):
                statement(depth + 1, f"{ind}    ")
            lines.append(f"{ind}    x = x + 1")
            del numbers[known:]
        else:
            lines.append(ind + rng.choice(PLAIN))

    for _ in range(rng.randint(3, 7)):
        statement(0, "")
    return "\n".join([*lines, "return x"])


def states(world):
    numpys = np.random.get_state()
    own = world["own"].getstate(), repr(world["numbers"].bit_generator.state)
    return random.getstate(), numpys[1].tolist(), numpys[2], torch.get_rng_state().tolist(), own


def run(body, wrap, calls, sizes=(3,)):
    world = {"torch": torch, "random": random, "np": np, "__name__": "draws_of_a_user", "S": {"n": 0, "drawn": []}}
    world |= {"own": random.Random(3), "numbers": np.random.default_rng(3)}
    exec("def f(x):\n" + "\n".join(f"    {line}" for line in body.splitlines()), world)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    call, found = wrap(world["f"]), []
    for i in range(calls):
        x = torch.arange(2.0 * sizes[i % len(sizes)]).reshape(2, -1).requires_grad_()
        result = None
        with contextlib.suppress(ValueError):
            result = call(x)
            result.sum().backward()
        values = None if result is None else (result.tolist(), x.grad.tolist())
        found.append((values, states(world), repr(world["S"])))
    return found, call


def compiled(function):
    return foregrad.compile(function, backend="eager", on_unsupported="eager")


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_sequence_of_draws_has_graphs(name):
    expected, _ = run(PROGRAMS[name], lambda f: f, 40)
    found, call = run(PROGRAMS[name], compiled, 40)
    assert found == expected
    assert foregrad.explain_recompiles(call).eager_calls == 0


@pytest.mark.parametrize("seed", range(12 if ALL else 6))
def test_random_programs(seed):
    rng = random.Random(seed)
    body, sizes = made(rng), rng.choice([(3,), (3, 3, 2)])
    expected, _ = run(body, lambda f: f, 60, sizes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", foregrad.errors.ForegradWarning)
        found, _ = run(body, compiled, 60, sizes)
    at = next((i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), None)
    assert at is None, f"call {at} of\n{body}"


def test_a_range_from_an_earlier_draw_needs_one_plan():
    body = "h = random.randint(2, 50)\ny = random.randint(h, 100 - h // 2)\nreturn x * h + y"
    found, call = run(body, compiled, 40)
    assert found == run(body, lambda f: f, 40)[0]
    assert len(foregrad.explain_recompiles(call)) == 1


def test_the_report_names_the_draws():
    _, call = run(PROGRAMS["a draw behind a branch"], compiled, 6)
    assert "the sequence of draws was another, is random.random" in str(foregrad.explain_recompiles(call))


def test_no_end_of_sequences_runs_eagerly_and_names_the_line_that_draws():
    body = "def often(x):\n    for i in range(12):\n        if random.random() < 0.5:\n            x = x + random.uniform(0, i)\n"
    body += "    return x\nreturn often(x)"
    expected, _ = run(body, lambda f: f, 30)
    with pytest.warns(
        foregrad.errors.ForegradWarning, match=r"takes from random\.\w+ at <string>:[45] in often differ"
    ):
        found, call = run(body, compiled, 30)
    assert found == expected
    report = foregrad.explain_recompiles(call)
    assert (len(report), report.eager_calls) == (4, 26)


def test_graphs_go_on_to_serve_where_a_rare_path_is_refused():
    body = "if random.random() < 0.1:\n    return x * float(str(random.random())[:4])\n"
    body += "return x * random.random() if random.random() < 0.5 else x"
    expected, _ = run(body, lambda f: f, 60)
    with pytest.warns(foregrad.errors.ForegradWarning):
        found, call = run(body, compiled, 60)
    assert found == expected
    assert foregrad.explain_recompiles(call).eager_calls < 15


def test_a_refusal_is_an_error_where_that_is_asked_for():
    body = "return x * random.uniform(0, random.random())"
    with pytest.raises(foregrad.errors.UnsupportedError, match=r"random\.random|random\.uniform"):
        run(body, lambda f: foregrad.compile(f, backend="eager", on_unsupported="raise"), 2)
