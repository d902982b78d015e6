"""What Dynamo knows of its graphs is used: open sizes, the user's lines, addresses that stay, equal arguments; and what
torch.compile is told arrives: modes, settings, parts that are not to be compiled.
"""

from __future__ import annotations

import copy
import inspect
import logging

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import foregrad
from foregrad.graph.role import role_of
from foregrad.inductor import backend as inductor
from foregrad.inductor._torch import inductor as door

# Dynamo's own doing: it looks at `.grad` of tensors between two graphs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


def compiled(function, *, inner="eager", **kwargs):
    return torch.compile(function, backend="foregrad", options={"backend": inner}, **kwargs)


def recording():
    """(a compiler that runs graphs as they are, the graphs that it was given)."""
    graphs = []

    def compiler(gm, inputs):
        graphs.append(gm)
        return gm

    return compiler, graphs


def sizes_in(gm):
    values = [node.meta["val"] for node in gm.graph.nodes if node.op == "placeholder"]
    return [n for v in values if isinstance(v, torch.Tensor) for n in v.shape]


# ------------------------------------------------------------------------------------------------------ open sizes
def test_open_sizes_are_compiled_once():
    compiler, graphs = recording()
    call = compiled(lambda x, w: (x @ w).relu() * x.shape[0], inner=compiler, dynamic=True)
    w = torch.randn(4, 3, requires_grad=True)
    for size in (5, 6, 9):
        x = torch.randn(size, 4)
        expected = (x @ w).relu() * size
        actual = call(x, w)
        assert torch.equal(actual, expected)
        assert torch.equal(torch.autograd.grad(actual.sum(), w)[0], torch.autograd.grad(expected.sum(), w)[0])
    assert [role_of(gm).phase for gm in graphs] == ["forward", "backward"]
    assert any(isinstance(n, torch.SymInt) for n in sizes_in(graphs[0]))


def test_a_size_that_differs_the_second_time_takes_two_graphs_and_not_three():
    compiler, graphs = recording()
    call = compiled(lambda x: x.sin() + x.shape[0], inner=compiler)
    for size in (4, 5, 6, 7):
        x = torch.randn(size, 3)
        assert torch.equal(call(x), x.sin() + size)
    assert len(graphs) == 2


def test_a_dimension_marked_for_dynamo_is_open_and_the_others_are_not():
    compiler, graphs = recording()
    call = compiled(lambda x: x.sum(1) * 2, inner=compiler)
    for size in (4, 7):
        x = torch.randn(size, 3)
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(call(x), x.sum(1) * 2)
    (gm,) = graphs
    first, second = sizes_in(gm)
    assert isinstance(first, torch.SymInt)
    assert second == 3


def test_an_integer_that_dynamo_left_open_is_compiled_once():
    compiler, graphs = recording()
    call = compiled(lambda x, n: x * n + n, inner=compiler, dynamic=True)
    x = torch.randn(3)
    for n in (3, 4, 8):
        assert torch.equal(call(x, n), x * n + n)
    assert len(graphs) == 1


def test_sizes_one_and_zero_have_graphs_of_their_own():
    call = compiled(lambda x, y: (x + y) * x.shape[0], dynamic=True)
    y = torch.randn(1, 3)
    for size in (5, 1, 0, 6):
        x = torch.randn(size, 3)
        assert torch.equal(call(x, y), (x + y) * size)


# ------------------------------------------------------------------------------------------------------ lines
def test_errors_name_the_users_line():
    def noisy(score, b, h, m, n):
        return score + torch.rand(())  # the culprit

    def function(x):
        y = x.sin()
        return flex_attention(y, y, y, noisy)

    with pytest.raises(Exception, match="draws random numbers") as caught:
        torch.compile(function, backend="foregrad", options={"backend": "eager", "on_unsupported": "raise"})(
            torch.ones(1, 1, 16, 16)
        )
    line = inspect.getsourcelines(noisy)[1] + 1
    assert f"{__file__}:{line}" in str(caught.value)
    assert "eval_with_key" not in str(caught.value).split("Set TORCHDYNAMO_VERBOSE")[0]


def test_nodes_carry_the_users_lines():
    compiler, graphs = recording()

    def function(x):
        y = x.sin()
        return y.exp()

    compiled(function, inner=compiler)(torch.ones(3, requires_grad=True)).sum().backward()
    first = inspect.getsourcelines(function)[1]
    traces = {node.name: node.meta.get("stack_trace", "") for node in graphs[0].graph.nodes}
    assert f'test_dynamo_knowledge.py", line {first + 1}, in function' in traces["sin"]
    assert f'test_dynamo_knowledge.py", line {first + 2}, in function' in traces["exp"]
    assert "eval_with_key" not in "".join(traces.values())


# ------------------------------------------------------------------------------------- addresses, equal arguments
def test_a_tensor_that_keeps_its_address_is_known_as_such():
    compiler, graphs = recording()
    x, state = torch.randn(3), torch.zeros(3)
    torch._dynamo.mark_static_address(state)
    call = compiled(lambda x, state: x * state, inner=compiler)
    for _ in range(2):
        assert torch.equal(call(x, state), x * state)
    (gm,) = graphs
    (static,) = role_of(gm).static_inputs
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    assert len(names) == 2
    assert role_of(gm).static_inputs != (0, 1)
    assert static in (0, 1)


def test_a_static_tensor_that_shares_memory_with_one_that_is_written():
    """Its address stays, and may still be a part of another argument's memory."""

    def write(x, state):
        x.add_(1)
        return x * state

    sides = []
    for run in (write, compiled(write)):
        whole = torch.arange(10.0)
        apart, inside = torch.ones(8), whole[2:]
        for state in (apart, inside):
            torch._dynamo.mark_static_address(state)
        sides.append([run(whole[:8], state).clone() for state in (apart, inside)])
    for expected, actual in zip(*sides, strict=True):
        assert torch.equal(expected, actual)


def test_arguments_that_are_one_tensor_and_then_are_not():
    def function(x, y):
        x.mul_(2)
        return x + y

    call = compiled(function)
    for same in (True, False, True):
        sides = []
        for run in (function, call):
            x = torch.arange(3.0)
            y = x if same else torch.ones(3)
            sides.append((run(x, y), x, y))
        for expected, actual in zip(*sides, strict=True):
            assert torch.equal(expected, actual)


# ------------------------------------------------------------------------------------------- what is told to torch
def test_autocast_around_a_graph_break_and_in_training():
    linear, last = nn.Linear(4, 4), nn.Linear(4, 2)

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = linear(x)
            torch._dynamo.graph_break()
            return last(y)

    grads = []
    for run in (function, compiled(function)):
        x = torch.ones(3, 4, requires_grad=True)
        out = run(x)
        assert out.dtype is torch.bfloat16
        out.float().pow(2).sum().backward()
        grads.append((out, x.grad, linear.weight.grad, last.weight.grad))
        linear.zero_grad(), last.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_a_compiled_loss():
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    call = compiled(loss, fullgraph=True)
    target = torch.tensor([0, 2, 1])
    sides = []
    for run in (loss, call):
        logits = torch.arange(12.0).view(3, 4).requires_grad_()
        value = run(logits, target)
        value.backward()
        sides.append((value, logits.grad))
    assert all(torch.equal(a, b) for a, b in zip(*sides, strict=True))


def test_fullgraph_refuses_a_break_and_without_it_there_are_two():
    def function(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    x = torch.ones(3)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(function, fullgraph=True)(x)
    assert torch.equal(compiled(function)(x), function(x))


def test_a_disabled_module_runs_as_it_is_between_two_graphs():
    compiler, graphs = recording()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.middle, self.last = (nn.Linear(3, 3) for _ in range(3))

        def forward(self, x):
            return self.last(self.outside(self.first(x)))

        @torch.compiler.disable
        def outside(self, x):
            return self.middle(x)

    model = Model()
    twin = copy.deepcopy(model)
    x = torch.randn(2, 3)
    expected, actual = model(x), compiled(twin, inner=compiler)(x)
    assert torch.equal(expected, actual)
    expected.sum().backward()
    actual.sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert [role_of(gm).phase for gm in graphs].count("forward") == 2


@pytest.fixture
def settings_seen(monkeypatch):
    """The settings of Inductor in force as each graph comes to it; nothing is compiled."""
    from torch._inductor import config

    seen = []

    def compile_graph(gm, example_inputs, **kwargs):
        seen.append((config.max_autotune, config.triton.cudagraphs, kwargs["static_inputs"]))
        return foregrad.make_boxed_func(gm.forward), [None] * len(next(iter(reversed(gm.graph.nodes))).args[0])

    monkeypatch.setattr(door, "compile_graph", compile_graph)
    monkeypatch.setattr(inductor, "why_not", lambda devices=(): None)
    inductor._say_once.cache_clear()
    yield seen
    inductor._say_once.cache_clear()


@pytest.mark.parametrize(
    ("mode", "tuned", "graphs"),
    [
        ("default", False, False),
        ("reduce-overhead", False, True),
        ("max-autotune", True, True),
        ("max-autotune-no-cudagraphs", True, False),
    ],
)
def test_a_mode_is_inductors_settings(settings_seen, mode, tuned, graphs, caplog):
    linear = nn.Linear(3, 3)
    with caplog.at_level(logging.WARNING, "foregrad"):
        torch.compile(lambda x: linear(x), backend="foregrad", mode=mode)(torch.ones(2, 3)).sum().backward()
    assert [seen[:2] for seen in settings_seen] == [(tuned, graphs)] * 2
    assert bool(settings_seen[0][2]) == graphs
    assert caplog.text.count("not on a CUDA device") == graphs


def test_a_setting_of_inductors_is_in_force(settings_seen):
    options = {"backend": "inductor", "inductor": {"max_autotune": True}}
    torch.compile(lambda x: x + 1, backend="foregrad", options=options)(torch.ones(2))
    assert settings_seen[0][0] is True


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inductor": {"max_autotun": True}}, r"Inductor has no setting `max_autotun`. Did you mean `max_autotune`"),
        ({"inductor": True}, r"the option `inductor` of the backend `foregrad` is a table"),
        ({"check": "yes"}, r"the option `check` of the backend `foregrad` is True or False, not 'yes'"),
        ({"decompositions": 3}, r"the option `decompositions` of the backend `foregrad` is a table"),
        ({"partition": "min-cut"}, r"no partition policy `min-cut`"),
        ({"memory_budget": "3 apples"}, r"'3 apples' is no memory budget"),
    ],
)
def test_wrong_values_are_named(options, message):
    with pytest.raises(Exception, match=message):
        torch.compile(lambda x: x + 1, backend="foregrad", options=options)(torch.ones(2))
