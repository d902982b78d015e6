"""The reasons given for compiling again: the user's name, what was there, what is there."""

from __future__ import annotations

import logging
import random

import pytest
import torch
from torch import nn

import foregrad


def reason(fn, first, change, second):
    f = foregrad.compile(fn, backend="eager")
    f(*first)
    change()
    f(*second)
    report = foregrad.explain_recompiles(f)
    assert len(report) == 2
    return str(report.entries[1].reasons[0])


def nothing():
    pass


X = torch.ones(2, 3)


def masked(x, options):
    return x * options["mask"] * options["scale"]


def starred(*args):
    return args[0]["mask"] * 2


@pytest.mark.parametrize(
    ("fn", "first", "second", "said"),
    [
        (lambda x: x * 2, (X,), (X[:1],), "x.shape was (2, 3), is (1, 3)"),
        (lambda x: x * 2, (X,), (X.double(),), "x.dtype was torch.float32, is torch.float64"),
        (lambda x: x * 2, (X,), (X.clone().requires_grad_(),), "x.requires_grad was False, is True"),
        (lambda x: x * 2, (X,), (torch.ones(3, 2).t(),), "x.stride() was (3, 1), is (1, 2)"),
        (lambda x, n: x * n, (X, 1), (X, 2), "n was 1, is 2"),
        (lambda x, n: x * n, (X, 1), (X, X), "n was 1, is a tensor"),
        (
            masked,
            (X, {"mask": X, "scale": 1}),
            (X, {"mask": X[:1], "scale": 1}),
            'options["mask"] was the same tensor as x',
        ),
        (starred, ({"mask": X},), ({"mask": X[:1]},), 'args[0]["mask"].shape was (2, 3), is (1, 3)'),
        (lambda x, y: x * y, (X, X.clone()), (X, X), "y was a tensor of its own, is the same tensor as x"),
    ],
)
def test_arguments_are_named(fn, first, second, said):
    assert reason(fn, first, nothing, second).replace("'", '"').startswith(said)


def test_attributes_of_modules_are_named():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))
    model.add_module("dropout", nn.Dropout(0.5))

    def change():
        model.dropout.p = 0.25

    assert reason(model, (X,), change, (X,)) == "self.dropout.p was 0.5, is 0.25"


def test_contexts_are_named():
    f = foregrad.compile(lambda x: x * 2, backend="eager")
    f(X)
    with torch.no_grad():
        f(X)
    with torch.autocast("cpu", torch.float16):
        f(X)
    first, second = [str(entry.reasons[0]) for entry in foregrad.explain_recompiles(f).entries[1:]]
    assert first == "grad mode was True, is False"
    assert "autocast of cpu was False, is True" in second


def test_closed_over_values_are_named():
    scale = 2

    def f(x):
        return x * scale

    def change():
        nonlocal scale
        scale = 3

    assert reason(f, (X,), change, (X,)) == "scale was 2, is 3"


def test_parameters_are_named():
    model = nn.Linear(3, 3)

    def change():
        model.weight.requires_grad_(False)

    assert reason(model, (X,), change, (X,)) == "parameter weight.requires_grad was True, is False"


def test_recompiles_are_logged(caplog):
    f = foregrad.compile(lambda x: x * 2, backend="eager")
    with caplog.at_level(logging.INFO, logger="foregrad.recompiles"):
        f(X)
        assert not caplog.records
        f(X[:1])
    assert [record.getMessage() for record in caplog.records] == [
        "<lambda> is compiled again, graph 2: x.shape was (2, 3), is (1, 3)"
    ]


def test_only_what_foregrad_compiled_is_explained():
    with pytest.raises(TypeError, match=r"takes a result of foregrad\.compile, not nothing"):
        foregrad.explain_recompiles(nothing)


def test_a_value_read_from_a_tensor_is_named_by_its_line():
    f = foregrad.compile(lambda x: x * 2 if x.sum() > 0 else x * 3, backend="eager")
    f(torch.ones(2)), f(-torch.ones(2))
    assert "not graph 1: the value read at" in str(foregrad.explain_recompiles(f))
    assert "was True, is a different value" in str(foregrad.explain_recompiles(f))


def test_a_size_that_depends_on_values_is_named_by_its_line():
    f = foregrad.compile(lambda x, m: x[m] * 2, backend="eager")
    for k in (3, 4, 0):
        f(torch.ones(5), torch.arange(5) < k)
    report = str(foregrad.explain_recompiles(f))
    assert "not graph 1: the value read at" in report
    assert "not graph 2: the size found at" in report


@pytest.mark.parametrize("which", ["x", "weight", "bias"])
def test_of_many_tensors_without_attributes_the_one_that_has_got_one_is_named(which):
    linear, x = nn.Linear(3, 3), torch.ones(2, 3)

    def counting(x):
        return linear(x) * (1 + sum(len(vars(t)) for t in (x, linear.weight, linear.bias)))

    where = {"x": x, "weight": linear.weight, "bias": linear.bias}[which]
    said = reason(counting, (x,), lambda: setattr(where, "mark", 1), (x,))
    assert said.endswith(f"{which}.__dict__) was (), is ('mark',)")
    f = foregrad.compile(counting, backend="eager")
    assert torch.equal(f(x), counting(x))
    where.other = 2
    assert torch.equal(f(x), counting(x))


def test_a_function_replaced_by_another_is_named_with_its_line():
    space = {}
    exec(compile("def block(x): return x + 1\ndef calls(x): return block(x)\n", "/somewhere/cells.py", "exec"), space)
    compiled = foregrad.compile(space["calls"], backend="eager")
    compiled(torch.ones(2))
    exec(compile("\n\n\ndef block(x): return x + 2\n", "/somewhere/cells.py", "exec"), space)
    compiled(torch.ones(2))
    assert "block was block of cells.py:1, is block of cells.py:4" in str(foregrad.explain_recompiles(compiled))


def test_functions_of_one_line_are_told_apart():
    def make():
        return lambda x: x + 1

    space = {"block": make()}
    exec("def calls(x): return block(x)", space)
    compiled = foregrad.compile(space["calls"], backend="eager")
    compiled(torch.ones(2))
    kept = space["block"]
    space["block"] = make()
    compiled(torch.ones(2))
    report = str(foregrad.explain_recompiles(compiled))
    assert "is another object" in report
    assert "0x" not in report
    del kept


def test_many_compilations_for_one_reason_are_one_line():
    compiled = foregrad.compile(lambda x: x * 2, backend="eager", dynamic=False)
    for size in range(9, 25):
        compiled(torch.ones(4, size))
    found = foregrad.explain_recompiles(compiled)
    assert str(found).splitlines()[1:] == [
        "graph 1: the first call",
        "graphs 2 to 16: x.shape: 16 values, (4, 9) to (4, 24)",
    ]
    assert repr(found) == str(found)
    assert found._repr_html_().startswith("<pre>&lt;lambda&gt;: compiled 16 times\n")


def _draws(x):
    return x * sum(random.sample(range(9), random.randint(1, 5)))


def _writes_text(x):
    print("loss %f" % x.sum().item())  # noqa: UP031
    return x


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize(
    ("function", "said"),
    [(_draws, "takes from random.sample at "), (_writes_text, "by an f-string, not by `%`")],
)
def test_reasons_name_what_the_program_calls(function, said, capsys):
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    for seed in range(8):
        random.seed(seed)
        compiled(torch.full((3,), seed))
    report = str(foregrad.explain_recompiles(compiled))
    assert said in report
    assert report.splitlines()[1].startswith("ran eagerly: ")


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
def test_calls_past_the_limit_name_the_value_and_graphs_the_last_earlier_ones():
    with foregrad.config.override(recompile_limit=6):
        compiled = foregrad.compile(lambda x, a, b: x * len(a) * len(b), backend="eager")
        for number in range(8):
            compiled(torch.ones(2), *(("a" * number, "") if number % 2 else ("", "b" * number)))
    report = str(foregrad.explain_recompiles(compiled))
    assert "the limit; this call fits no graph: " in report.splitlines()[1]
    assert "  ...\n  not graph 3: " in report
    assert "  not graph 1: " not in report.partition("graph 6")[2]
