"""Texts for a person who has never seen foregrad: docstrings of public names, messages, printed graphs."""

from __future__ import annotations

import inspect
import pickle
import warnings

import pytest
import torch
from torch import nn

import foregrad
from foregrad import errors

POLICIES = {
    "everything_saveable": {"tanh", "select"},
    "nothing_saveable": set(),
    "dots_saveable": {"mm", "select"},
    "dots_with_no_batch_dims_saveable": {"mm"},
}


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    batched = x.tanh() @ w  # `bmm`; the backward reads a `select` of its result
    return ((batched[0] @ w[0]).tanh() @ w[1]).tanh().sum()  # `mm`, twice


def saved_by(policy: foregrad.Policy) -> set[str]:
    x, w = (torch.rand(2, 4, 4, requires_grad=True) for _ in range(2))
    parts = foregrad.partition(foregrad.capture(chain, x, w), policy)
    return {name for name in ("mm", "select", "tanh") for saved in parts.report().saved if saved.name.startswith(name)}


@pytest.mark.parametrize("name", POLICIES)
def test_a_named_policy_says_what_it_saves(name: str) -> None:
    policy = getattr(foregrad, name)
    text = inspect.getdoc(policy)
    assert text is not None
    assert text != inspect.getdoc(foregrad.Policy)
    assert text.startswith("Save ")
    assert name in (inspect.getdoc(foregrad.Policy) or "")  # `help` of an instance shows the text of its class
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert saved_by(policy) == POLICIES[name]


def test_the_default_decompositions_have_help_of_their_own() -> None:
    table = foregrad.default_decompositions
    assert isinstance(table, dict)
    assert table
    assert "fuser" in (inspect.getdoc(table) or "")


def test_a_captured_branch_is_followed_and_its_condition_listed() -> None:
    x = torch.ones(2, requires_grad=True)
    joint = foregrad.capture(lambda x: x * 3 if x.sum() > 0 else -x, x)
    text = str(joint)
    assert "decided at" in text
    assert [node.name for node in joint.graph.nodes if node.op == "call_function"] == ["sum_1", "gt", "mul", "mul_1"]


def test_a_printed_graph_names_results_that_are_arguments() -> None:
    x = torch.ones(2, requires_grad=True)
    text = str(foregrad.capture(lambda x: x if x.sum() > 0 else -x, x))
    assert "# out is args[0]\n" in text
    text = str(foregrad.capture(lambda x, y: (x * 2, y.view(2, 1), y), x, y=torch.ones(2)))
    assert "# out[1] is a view of y\n# out[2] is y\n" in text
    assert "# out[0]" not in text


def test_a_branch_on_a_value_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(errors.UnsupportedDataDependentError):
        foregrad.capture(lambda x: x if x.sum() > 0 else -x, torch.ones(2, device="meta"))


def test_sizes_zero_and_one_of_a_marked_dimension_get_graphs_of_their_own() -> None:
    double = foregrad.compile(lambda x: x * 2, backend="eager")
    x = torch.ones(5)
    foregrad.mark_dynamic(x, 0)
    for size, graphs in ((5, 1), (2, 1), (9, 1), (1, 2), (0, 3)):
        assert torch.equal(double(x if size == 5 else torch.ones(size)), torch.ones(size) * 2)
        assert len(double.foregrad.specializations) == graphs


def test_a_marked_dimension_that_a_layer_fixes_is_not_blamed_on_python() -> None:
    linear, x = nn.Linear(8, 4), torch.randn(5, 8)
    foregrad.mark_dynamic(x, 1)
    with pytest.warns(errors.ForegradWarning, match="only works for size 8: an operator needs this size") as caught:
        out = foregrad.compile(linear, backend="eager", on_unsupported="eager")(x)
    assert "int()" not in str(caught[0].message)
    assert torch.equal(out, linear(x))
    with pytest.raises(errors.UnsupportedError, match="only works for size 8"):
        foregrad.compile(linear, backend="eager", on_unsupported="raise")(x)
    with pytest.raises(errors.UnsupportedError, match="only works for size 8"):
        foregrad.capture(linear, x)


def test_a_relation_names_the_argument_and_its_value() -> None:
    weight = torch.ones(2, requires_grad=True)

    @foregrad.compile(backend="eager")
    def step(i: int) -> torch.Tensor:
        return weight * 2 if (i + 1) % 4 == 0 else weight * 3

    for i in range(7):
        step(i)
    text = str(foregrad.explain_recompiles(step))
    assert "the relation between sizes was such that ((1 + i) % 4) == 0, is i = 4" in text
    assert "size None" not in text


def test_a_relation_names_dimensions_of_tensors() -> None:
    @foregrad.compile(backend="eager")
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.shape[0] == y.shape[0] * 2 else x - 1

    for rows, half in ((4, 2), (6, 3), (8, 5)):
        f(torch.ones(rows), torch.ones(half))
    text = str(foregrad.explain_recompiles(f))
    assert "x.shape[0]" in text
    assert "x.shape[0] = 8, y.shape[0] = 5" in text or "y.shape[0] = 5, x.shape[0] = 8" in text


def test_example_inputs_are_told_from_a_backend() -> None:
    linear, x = nn.Linear(8, 4), torch.ones(2, 8)
    for inputs in ((x,), (x, x), ((x,),)):
        with pytest.raises(TypeError, match="takes no example inputs: call its result with them"):
            foregrad.compile(linear, *inputs)
    with pytest.raises(TypeError, match="backend is a keyword"):
        foregrad.compile(linear, "eager")


def test_a_warning_has_the_line_of_the_program_at_its_end() -> None:
    def spread(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.detach().numpy().std())

    compiled = foregrad.compile(spread, backend="eager", on_unsupported="eager")
    with pytest.warns(errors.ForegradWarning) as caught:
        compiled(torch.ones(2))
    message = str(caught[0].message)
    assert "in spread hands a tensor to NumPy" in message
    assert "in spread: return x * float(x.detach().numpy().std())) Calls like this" in message
    (calls,) = foregrad.explain_recompiles(compiled).eager
    assert calls.line.endswith("in spread: return x * float(x.detach().numpy().std())")
    assert calls.why.endswith("no graph can hold its work.")
    assert "return x" not in calls.change


def test_a_warning_of_texts_has_the_line_of_the_program_at_its_end() -> None:
    @foregrad.compile(backend="eager")
    def f(x: torch.Tensor) -> torch.Tensor:
        loss = x.sum()
        text = f"{loss.item():.3f}"
        print("loss", text)
        print(text)
        return loss

    with pytest.warns(errors.ForegradWarning) as caught:
        for size in (2, 3, 4):
            f(torch.ones(size))
    message = str(caught[0].message)
    assert "in f, or branches on the value" in message
    assert 'in f: text = f"{loss.item():.3f}") Calls like this' in message


def test_calls_that_fill_a_cache_are_counted_without_a_warning() -> None:
    cache: dict[int, torch.Tensor] = {}

    @foregrad.compile(backend="eager")
    def f(x: torch.Tensor) -> torch.Tensor:
        if cache.get(0) is None:
            cache[0] = torch.arange(2.0)
        return x + cache[0]

    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.ForegradWarning)
        for _ in range(3):
            f(torch.ones(2))
    found = foregrad.explain_recompiles(f)
    assert (len(found), found.eager_calls, [calls.count for calls in found.filling]) == (1, 0, [1]), found
    assert "ran eagerly: 1 call: `f` fills" in str(found)


def test_every_eager_call_of_a_step_of_lbfgs_is_counted() -> None:
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    @foregrad.compile(backend="eager", on_unsupported="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return optimizer.step(closure)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.ForegradWarning)
        for count in range(1, 5):
            step(x)
            found = foregrad.explain_recompiles(step)
            assert sum(calls.count for calls in (*found.filling, *found.eager)) == count
            assert str(found).count("ran eagerly: ") == min(count, 3)


def test_a_result_that_is_no_number_is_planned_with_a_gradient_of_ones() -> None:
    model, x = nn.Linear(8, 4), torch.randn(4, 8)
    bare, summed = foregrad.plan(model, x), foregrad.plan(lambda x: model(x).sum(), x)
    assert bare.trained == 36
    assert bare.total.flops == summed.total.flops
    with pytest.raises(errors.PlanError, match="none is called `loss`"):
        foregrad.plan(lambda x: (model(x), model(x) * 2), x)
