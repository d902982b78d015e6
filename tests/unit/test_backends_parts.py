"""The eager backend cuts a long graph in parts: results, memory, errors and text are as those of one function."""

from __future__ import annotations

import traceback

import pytest
import torch

import foregrad
from foregrad.backends import eager


class Model(torch.nn.Module):
    """Values that live for one line, for a few and to the end, several results of one operator, views, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(6)])
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        first = x.sin()
        for layer in self.layers:
            values, _ = layer(x).max(0, keepdim=True)
            x = torch.nn.functional.dropout(x * values.t().t(), 0.5, self.training) + first
        return x, first


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(eager, "_LONGEST", 3)
    monkeypatch.setattr(eager, "_PART", 3)


def step(function, model, x):
    torch.manual_seed(0)
    model.zero_grad()
    x = x.clone().requires_grad_()
    out, first = function(x)
    (out * first).sum().backward()
    return [out, first, x.grad, model.calls, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("partition", ["default", "min_cut"])
def test_a_step_in_parts_is_eagers(short, partition):
    model, again, x = Model(), Model(), torch.randn(4, 4)
    again.load_state_dict(model.state_dict())
    compiled = foregrad.compile(again, backend="eager", partition=partition)
    for _ in range(2):
        for got, want in zip(step(compiled, again, x), step(model, model, x), strict=True):
            assert torch.equal(got, want)


def test_an_artifact_runs_in_parts(short, tmp_path):
    model, x = Model().eval(), torch.randn(4, 4)
    want = [value.clone() for value in model(x)]
    foregrad.export(model, (x,)).save(tmp_path / "model")
    for got, value in zip(foregrad.load(tmp_path / "model")(x), want, strict=True):
        assert torch.equal(got, value)


def chain(length, last=torch.ops.aten.sin.default):
    graph = torch.fx.Graph()
    value = first = graph.placeholder("x")
    for _ in range(length):
        value = graph.call_function(torch.ops.aten.sin.default, (value,))
    graph.output((graph.call_function(last, (value, first)), first))
    return torch.fx.GraphModule({}, graph)


def test_a_graph_of_more_lines_than_a_function_takes():
    compiled = eager.eager_compiler(chain(eager._LONGEST + 500, torch.ops.aten.add.Tensor))
    assert compiled.source().count("def part_") == 5
    x = want = torch.rand(3)
    for _ in range(eager._LONGEST + 500):
        want = want.sin()
    got, first = compiled([x])
    assert torch.equal(got, want + x)
    assert first is x


def test_a_value_takes_the_name_of_a_value_used_last_there(short):
    compiled = eager.eager_compiler(chain(7, torch.ops.aten.add.Tensor))
    assert compiled.source().count("sin_default = torch_sin(sin_default)") == 6
    kept = torch.rand(3)
    assert compiled([kept])[1] is kept


def test_values_that_are_used_again_keep_their_names(short):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    values = [x]
    for _ in range(8):  # each is used by the line after next too, and two of a line's operands end at once
        values.append(graph.call_function(torch.ops.aten.add.Tensor, tuple(values[-2:]) if values[1:] else (x, x)))
    graph.output((values[-1], values[4]))
    (last, middle), want = eager.eager_compiler(torch.fx.GraphModule({}, graph))([torch.ones(2)]), [1, 2]
    for _ in range(7):
        want.append(want[-2] + want[-1])
    assert (last.tolist(), middle.tolist()) == ([want[-1]] * 2, [want[4]] * 2)


def test_an_error_names_its_line(short):
    compiled = eager.eager_compiler(chain(7, torch.ops.aten.mm.default))
    with pytest.raises(RuntimeError, match="mat") as raised:
        compiled([torch.ones(3)])
    frame = traceback.extract_tb(raised.tb)[-1]
    assert frame.name == "part_4"
    assert "aten_mm(" in frame.line
    assert frame.line in compiled.source()
