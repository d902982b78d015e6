"""`verify` against planted faults: what it says, what it names, the program it writes, and what it leaves alone."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import random
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import BackendError, ForegradWarning, UnsupportedError
from foregrad.graph.printing import user_line
from foregrad.tools.verification.compare import Verdict
from tests.tools.verification import planted

ROOT = Path(__file__).parents[3]
aten = torch.ops.aten


def run_alone(path):
    return subprocess.run([sys.executable, path], capture_output=True, text=True, check=False)


def run_here(path):
    """The exit status of a reproducer that is run in this process."""
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(path, run_name="__main__")
    return stopped.value.code


def stages(found):
    return {stage.name: stage.verdict for stage in found.stages}


# ------------------------------------------------------------------------------------------------ nothing wrong
def test_equal_where_eager_runs_the_same_kernels():
    model, args = planted.gpt(layers=1)
    found = foregrad.verify(model, *args, backend="eager")
    assert found.ok
    assert found.verdict is Verdict.EQUAL
    assert found.num_compared > 15
    assert found.culprit is None
    assert found.reproducer is None


def test_second_derivatives_on_request():
    x = torch.randn(4, requires_grad=True)
    found = foregrad.verify(lambda x: (x.sin() * x).sum(), x, backend="eager", order=2)
    assert found.verdict is Verdict.EQUAL
    assert found.num_compared == 3  # a result, a gradient, and the gradient of that
    assert foregrad.verify(lambda x: (x.sin() * x).sum(), x, backend="eager", order=0).num_compared == 1


def test_another_layout_of_a_result_is_wrong_and_of_a_gradient_is_listed():
    from foregrad.tools.verification.verify import CallOutcome, Comparison

    value = torch.ones(2, 2)
    for name, verdict in (("out", Verdict.WRONG), ("gradient of args[0]", Verdict.ROUNDING)):
        sides = [CallOutcome({name: value}, {name: f"strides {s}"}, frozenset()) for s in ((2, 1), (1, 2))]
        found = Comparison.of(*sides)
        assert found.verdict is verdict
        assert found.lines == [f"{name}: eager strides (2, 1), compiled strides (1, 2)"]


def test_rounding_is_no_fault():
    """A decomposition that rounds otherwise is told from one that is wrong."""
    x = torch.randn(64, 64, requires_grad=True)
    table = {aten.silu.default: planted.rounding_otherwise}
    found = foregrad.verify(lambda x: torch.nn.functional.silu(x) * 2, x, backend="eager", decompositions=table)
    assert found.verdict is Verdict.ROUNDING
    assert stages(found)["decompositions"] is Verdict.ROUNDING
    assert found.ok
    found.raise_if_wrong()


def test_inductor_is_rounding():
    from foregrad.inductor.backend import why_not

    if why_not() is not None:
        pytest.skip(why_not())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(8))
    found = foregrad.verify(model, torch.randn(4, 8), backend="inductor")
    assert found.ok, str(found)


# ------------------------------------------------------------------------------------------------ planted faults
def test_a_wrong_decomposition_is_found(tmp_path):
    model, args = planted.gpt()
    table = {aten.gelu.default: planted.gelu_by_a_sigmoid}
    found = foregrad.verify(model, *args, backend="eager", decompositions=table, folder=str(tmp_path))
    assert not found.ok
    assert found.stage == "decompositions"
    assert found.culprit.operator == "aten.gelu.default"
    assert "self.mlp" in found.culprit.where
    assert found.culprit.operands[0].startswith("x0: float32[2, 32, 256] from -")
    assert found.culprit.gap.ulps > 1000
    assert stages(found)["partition"] is Verdict.EQUAL
    done = run_alone(found.reproducer)
    assert done.returncode == 1, done.stderr
    assert "off by up to 0.0" in done.stdout
    with pytest.raises(foregrad.VerificationError, match=r"aten\.gelu"):
        found.raise_if_wrong()


def test_a_fault_as_small_as_an_epsilon_is_found(tmp_path):
    model, args = planted.gpt(layers=1)
    table = {aten.native_layer_norm.default: planted.layer_norm_of_another_epsilon}
    found = foregrad.verify(model, *args, backend="eager", decompositions=table, folder=str(tmp_path))
    assert found.culprit.operator == "aten.native_layer_norm.default"
    assert run_here(found.reproducer) == 1


def test_the_innermost_decomposition_is_named(tmp_path):
    """One that is right, but for another that it is decomposed into."""
    table = {
        aten.silu.default: planted.silu_through_a_wrong_sigmoid,
        aten.sigmoid.default: planted.sigmoid_that_saturates,
    }
    x = torch.linspace(-3, 3, 32)
    found = foregrad.verify(torch.nn.functional.silu, x, backend="eager", decompositions=table, folder=str(tmp_path))
    assert found.culprit.operator == "aten.sigmoid.default, a part of the decomposition of aten.silu.default"
    assert run_here(found.reproducer) == 1


@pytest.mark.parametrize(
    ("compiler", "most"), [(planted.miscompiles_gelu, 1), (planted.miscompiles_the_second_gelu, 20)]
)
def test_a_backend_that_miscompiles_is_found(compiler, most, tmp_path):
    """By itself, or only where the graph has two of the operator: then the program holds both."""
    model, args = planted.gpt()
    found = foregrad.verify(model, *args, backend=compiler, folder=str(tmp_path))
    assert not found.ok
    assert found.stage == "forward of GPT"
    assert found.culprit.operator == "aten.gelu.default"
    assert found.culprit.piece.size <= most
    assert run_here(found.reproducer) == 1


@pytest.mark.parametrize("seconds", [1.0, 0.0], ids=["quick", "slow"])
def test_a_pattern_is_found_with_all_that_belongs_to_it(seconds, tmp_path, monkeypatch):
    """A fault in two operators together: neither shows it. A compiler that is slow gets the graph in pieces."""
    monkeypatch.setattr("foregrad.tools.verification.search._QUICK", seconds)
    args = torch.randn(8), torch.randn(8)
    found = foregrad.verify(planted.Chain(), *args, backend=planted.miscompiles_a_pattern, folder=str(tmp_path))
    assert found.culprit.operator == "aten.neg.default"
    assert found.culprit.piece.size == 2
    assert run_here(found.reproducer) == 1


def test_inputs_are_kept_where_random_ones_do_not_show_it(tmp_path):
    """A fault for one value alone."""
    special = torch.tensor([-1.0, 0.3125, 2.0])

    def wrong(x):
        return torch.where(x == 0.3125, 1.0, 0 - x)

    table = {aten.neg.default: wrong}
    found = foregrad.verify(torch.neg, special, backend="eager", decompositions=table, folder=str(tmp_path))
    assert found.culprit.operator == "aten.neg.default"
    assert list(tmp_path.glob("*.safetensors"))
    done = run_alone(found.reproducer)
    assert done.returncode == 1, done.stderr


def test_a_pass_of_a_backend_that_is_wrong_is_found(tmp_path):
    backend = dataclasses.replace(
        foregrad.get_backend("eager"), name="hasty", prepare_joint=planted.passes_that_lose_a_sign
    )
    args = torch.randn(8, requires_grad=True), torch.randn(8)
    found = foregrad.verify(planted.Chain(), *args, backend=backend, folder=str(tmp_path))
    assert found.stage == "the backend's passes"
    assert found.culprit.operator == "aten.neg.default"
    assert found.culprit.piece.size == 2
    assert run_here(found.reproducer) == 1


def test_a_partition_that_is_wrong_is_found(tmp_path):
    model, args = planted.gpt()
    wrong = planted.partition_that_changes_a_gradient
    found = foregrad.verify(model, *args, backend="eager", partition=wrong, folder=str(tmp_path))
    assert found.stage == "partition"
    assert found.culprit.operator == "aten.gelu_backward.default"
    assert found.culprit.piece.size <= 20
    assert run_here(found.reproducer) == 1


def test_a_partition_that_saves_another_value_is_found(tmp_path):
    args = torch.randn(8, requires_grad=True), torch.randn(8)
    wrong = planted.partition_that_saves_another_value
    found = foregrad.verify(planted.Chain(), *args, backend="eager", partition=wrong, folder=str(tmp_path))
    assert found.stage == "partition"
    assert found.culprit.operator == "aten.tanh_backward.default"
    assert found.culprit.piece.size == 2  # with the tanh whose result it takes
    assert run_here(found.reproducer) == 1


def capture_that_changes(monkeypatch, change):
    """Have each captured graph changed."""
    from foregrad.tracing import capture

    original = capture.capture_call

    def changed(*args, **kwargs):
        captured = original(*args, **kwargs)
        change(captured.joint.graph)
        captured.joint.module.recompile()
        return captured

    monkeypatch.setattr(capture, "capture_call", changed)


def test_of_a_wrong_capture_both_operators_are_named(monkeypatch):
    """The graph's that eager does not run, and eager's that the graph lacks."""

    def change(graph):
        node = next(n for n in graph.nodes if n.target is aten.gelu.default)
        node.target, node.kwargs = aten.silu.default, {}

    capture_that_changes(monkeypatch, change)
    model, args = planted.gpt(layers=1)
    found = foregrad.verify(model, *args, backend="eager")
    assert found.stage == "capture"
    assert (found.culprit.node, found.culprit.operator) == ("gelu", "aten.silu.default")
    assert "aten.gelu.default at gpt.py:" in str(found)
    assert "self.mlp" in found.culprit.where
    assert found.culprit.piece.size == 1
    assert run_here(found.reproducer) == 1
    monkeypatch.undo()
    assert run_here(found.reproducer) == 0


def test_a_wrong_backward_of_a_capture_has_a_program(monkeypatch):
    def change(graph):
        for node in graph.nodes:
            if node.target is aten.tanh_backward.default:
                node.target = aten.sigmoid_backward.default

    capture_that_changes(monkeypatch, change)
    x = torch.randn(8, requires_grad=True)
    found = foregrad.verify(lambda x: (x.sin() * x).tanh().exp(), x, backend="eager")
    assert (found.stage, found.culprit.operator) == ("capture", "aten.sigmoid_backward.default")
    assert found.culprit.piece.size == 1
    assert run_here(found.reproducer) == 1


def test_a_write_through_a_view_that_is_captured_wrong_has_a_program(monkeypatch):
    """With the view, and the memory that it is in: none of the three shows it alone."""

    def change(graph):
        for node in graph.nodes:
            if node.target is aten.neg.default:
                node.replace_all_uses_with(node.args[0])

    def function(x, y):
        z = x.sin() * y
        z[0].neg_()
        return (z * 2).exp()

    capture_that_changes(monkeypatch, change)
    found = foregrad.verify(function, torch.randn(3, 3, requires_grad=True), torch.randn(3, 3), backend="eager")
    assert found.stage == "capture"
    assert found.culprit.piece.size <= 3
    assert run_here(found.reproducer) == 1


def test_a_capture_that_is_wrong_for_this_function_alone_has_no_program(monkeypatch):
    """Each of its operators is captured right by itself, and the report says so."""

    def change(graph):
        for node in graph.nodes:
            if node.target is aten.sin.default and "in function" in str(user_line(node)):
                node.target = aten.cos.default

    def function(x):
        return x.sin() * 2

    capture_that_changes(monkeypatch, change)
    found = foregrad.verify(function, torch.randn(4), backend="eager")
    assert found.stage == "capture"
    assert found.reproducer is None
    assert "captured right" in str(found)


def test_an_operator_that_the_capture_left_out_is_named(monkeypatch):
    def change(graph):
        node = next(n for n in graph.nodes if n.target is aten.neg.default)
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)

    capture_that_changes(monkeypatch, change)
    found = foregrad.verify(lambda x: (-x.abs()).exp(), torch.randn(4), backend="eager")
    assert found.stage == "capture"
    assert found.culprit.node == "exp"  # the first that gets another value
    assert "the first of eager's that the graph lacks is that of aten.neg.default at test_verify.py:" in str(found)


def test_as_it_was_compiled(tmp_path):
    """What `compile` made is verified with its own backend."""
    compiled = foregrad.compile(planted.Chain(), backend=planted.miscompiles_a_pattern)
    args = torch.randn(8), torch.randn(8)
    found = foregrad.verify(compiled, *args, folder=str(tmp_path))
    assert found.culprit.operator == "aten.neg.default"


# ------------------------------------------------------------------------------------------------ what is left alone
class Counts(nn.Module):
    """Writes to a buffer, its argument and Python's state."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        x.mul_(2)
        return self.norm(x) + torch.rand(4)


def test_the_users_objects_and_generators_stay_as_they_were():
    model, x = Counts(), torch.randn(8, 4)
    before, data = copy.deepcopy(model.state_dict()), x.clone()
    torch.manual_seed(5)
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    found = foregrad.verify(model, x, backend="eager")
    assert found.verdict is Verdict.EQUAL, str(found)
    assert torch.equal(x, data)
    assert model.calls == 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


def test_tensors_that_a_function_reaches_are_put_back():
    model = Counts()
    before = copy.deepcopy(model.state_dict())
    found = foregrad.verify(lambda x: model.norm(x) * model.seen.add_(1), torch.randn(8, 4), backend="eager")
    assert found.verdict is Verdict.EQUAL, str(found)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_views_and_arguments_that_are_returned():
    def function(x, y):
        y.add_(1)
        return x, x.t(), y.view(-1), {"sum": (x * y).sum()}

    found = foregrad.verify(function, torch.randn(2, 2, requires_grad=True), torch.randn(2, 2), backend="eager")
    assert found.ok, str(found)  # gradients through results that are views are added up in another order


def test_arguments_with_a_history():
    x = torch.randn(4, requires_grad=True) * 2
    assert foregrad.verify(lambda x: x.exp(), x, backend="eager").verdict is Verdict.EQUAL
    assert x.grad_fn is not None


class Answer:
    """An object that is no container to PyTorch, and equal to itself alone."""


def test_objects_among_the_results_are_compared_by_their_class():
    def function(x):
        return {"sum": x.sum(), "name": "a", "answer": Answer(), "nothing": None}

    assert foregrad.verify(function, torch.ones(2), backend="eager").verdict is Verdict.EQUAL


# ------------------------------------------------------------------------------------------------ errors, and data
def test_both_raise():
    def function(x):
        raise KeyError("no")

    found = foregrad.verify(function, torch.ones(2), backend="eager")
    assert not found.ok
    assert found.verdict is Verdict.NOTHING
    assert "both raise KeyError: 'no'; nothing was compared" in str(found)
    with pytest.raises(foregrad.VerificationError, match="both raise KeyError"):
        found.raise_if_wrong()


def test_a_function_without_results_is_not_verified():
    found = foregrad.verify(lambda x: None, torch.ones(2), backend="eager", order=0)
    assert (found.ok, found.num_compared) == (False, 0)
    assert str(found).endswith("nothing was compared")


def test_values_that_are_not_there_are_named():
    with pytest.raises(ValueError, match="`weight` is on the meta device"):
        foregrad.verify(nn.Linear(2, 2, device="meta"), torch.ones(2), backend="eager")
    with pytest.raises(ValueError, match=r"`args\[0\]` is on the meta device"):
        foregrad.verify(torch.sin, torch.ones(2, device="meta"), backend="eager")


def test_what_cannot_be_compiled_raises():
    with pytest.warns(ForegradWarning, match="text"), pytest.raises(UnsupportedError, match="eagerly"):
        foregrad.verify(lambda x: (x.sin(), str(x)), torch.ones(2), backend="eager")


def test_a_backend_that_fails_raises():
    with pytest.raises(BackendError, match="crash-on"):
        foregrad.verify(lambda x: x.sin(), torch.ones(2), backend="crash-on:aten.sin")


def test_a_report_as_data():
    found = foregrad.verify(lambda x: x.sin(), torch.ones(2), backend=planted.miscompiles_gelu)
    data = json.loads(json.dumps(found.to_json()))
    assert data["verdict"] == str(found.verdict) == "equal bit for bit"
    assert data["ok"] is True
    assert data["backend"] == "miscompiles_gelu"
    assert data["stages"][-1] == {"name": "the compiled function", "verdict": "equal bit for bit", "detail": ""}


# ------------------------------------------------------------------------------------------------ calls that fill caches
NOTED = []


@functools.lru_cache(None)
def note_once(text):
    NOTED.append(text)


class Noting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.table = nn.Linear(3, 3), nn.BatchNorm1d(3), {}

    def forward(self, x):
        note_once("loss_type=None")
        return self.norm(self.linear(x)).square().sum()


class Keeping(Noting):
    def forward(self, x):
        if "mask" not in self.table:
            self.table["mask"] = torch.ones(3)
        return (self.norm(self.linear(x)) * self.table["mask"]).square().sum()


@pytest.mark.parametrize("make", [Noting, Keeping])
def test_calls_that_fill_caches_come_before_the_compiled_one(make):
    note_once.cache_clear()
    found = foregrad.verify(make(), torch.randn(4, 3), backend="eager")
    assert found.verdict is Verdict.EQUAL
    assert found.num_compared >= 6
