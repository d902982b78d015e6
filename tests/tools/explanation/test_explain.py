"""`foregrad.explain`: what it finds, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import functools
import io
import json
import random
import re
import sys

import pytest
import torch
from torch import nn

import foregrad
from foregrad.graph.printing import last_frame
from foregrad.partitioners.report import in_bytes
from foregrad.tools.explanation.text import by_modules
from tests.golden.functions import FUNCTIONS


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.linear = 0, nn.Linear(3, 3)

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * self.calls


class Spread(nn.Module):
    def forward(self, x):
        return x * float(x.detach().numpy().std())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.spread = nn.Linear(4, 4), Spread()

    def forward(self, x):
        return self.spread(self.linear(x).relu())


class Seeding(nn.Module):
    def forward(self, x):
        torch.manual_seed(0)
        return x * 2


KEPT = {"sum": torch.zeros(3)}


def adds_to_global(x):
    KEPT["sum"].add_(x.detach())
    return (x * KEPT["sum"]).sum()


def norms():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))


def explain(fn, *args, **kwargs):
    return foregrad.explain(fn, *args, backend="eager", **kwargs)


def state_of(module):
    tensors = [*module.parameters(), *module.buffers()]
    versions = [tensor._version for tensor in tensors]
    modes = [part.training for part in module.modules()]
    return [t.detach().clone() for t in tensors], versions, [t.grad for t in tensors], modes


@pytest.mark.parametrize("closed_over", [False, True])
def test_explaining_leaves_nothing_behind(closed_over):
    model, x = norms(), torch.randn(2, 3, 8, 8, requires_grad=True)
    model[3].eval()
    values, versions, gradients, modes = state_of(model)
    numbers, pythons = torch.get_rng_state(), random.getstate()
    found = explain((lambda x: model(x).square().mean()) if closed_over else model, x)
    assert found.not_measured == ""
    assert found.memory.predicted_saved == found.memory.measured_saved
    now = state_of(model)
    assert all(torch.equal(a, b) for a, b in zip(values, now[0], strict=True))
    assert (versions, gradients, modes) == now[1:]
    assert torch.equal(numbers, torch.get_rng_state())
    assert pythons == random.getstate()
    assert x.grad is None
    assert [fact.name.rpartition(".")[2] for fact in found.program.mutated] == [
        "num_batches_tracked",
        "running_mean",
        "running_var",
    ]


# A GRU writes in place to parts of a product. Functional copies of these are as large as the whole.
LARGER = {"recurrent"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_function_is_explained_and_left_as_it_was(name):
    function, args = FUNCTIONS[name]()
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    values, versions = [t.detach().clone() for t in tensors], [t._version for t in tensors]
    numbers = torch.get_rng_state()
    found = explain(function, *args)
    assert (found.not_measured, found.eager) == ("", ())
    assert found.memory.predicted_saved == found.memory.measured_saved or name in LARGER
    assert all(map(torch.equal, values, tensors))
    assert versions == [t._version for t in tensors]
    assert all(t.grad is None for t in tensors if t.is_leaf)
    assert torch.equal(numbers, torch.get_rng_state())
    assert str(found)


def test_a_step_that_cannot_be_repeated_is_said_not_to_be():
    class State(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))
            self.register_buffer("state", torch.ones(3))

        def forward(self, x):
            self.state.mul_(self.weight)
            return (self.state * x).sum()

    model = State()
    found = explain(model, torch.ones(3))
    assert "a second time" in found.not_measured
    assert found.memory.predicted_peak > 0
    assert not model.state.requires_grad


def test_python_state_is_written_on_the_copy():
    model = Counting()
    found = explain(model, torch.ones(2, 3))
    assert model.calls == 0
    assert [fact.name for fact in found.program.mutated] == ["self.calls"]


def test_a_call_that_writes_to_what_is_not_copied_is_not_run():
    kept = {"sum": torch.zeros(3)}

    def of_closure(x):
        kept["sum"].add_(x.detach())
        return (x * kept["sum"]).sum()

    found = explain(adds_to_global, torch.ones(3, requires_grad=True))
    assert "KEPT['sum']" in found.not_measured
    assert found.memory.measured_saved is None
    assert torch.equal(KEPT["sum"], torch.zeros(3))
    assert explain(of_closure, torch.ones(3, requires_grad=True)).not_measured == ""  # what a closure holds is copied
    assert torch.equal(kept["sum"], torch.zeros(3))


def test_what_cannot_be_copied_is_explained_and_not_run():
    model = nn.Linear(3, 3)
    model.generator = (i for i in range(3))
    found = explain(model, torch.ones(2, 3))
    assert "generator" in found.not_measured
    assert found.memory.predicted_peak > 0
    assert found.time is None


def test_without_measuring_nothing_runs():
    ran = []

    def f(x):
        ran.append(type(x))
        return x.sin().sum()

    found = explain(f, torch.ones(3, requires_grad=True), measure=False)
    assert found.not_measured == "measure=False"
    assert found.work.forward_operators == 2
    assert ran == []


def test_aliases_and_results_are_named():
    def f(x, y):
        y.mul_(2)
        return x, y.view(-1), {"sum": x + y}

    found = explain(f, torch.ones(2, 2, requires_grad=True), torch.ones(2, 2))
    assert [(fact.name, fact.what) for fact in found.program.aliased] == [
        ("out[0]", "is args[0]"),
        ("out[1]", "is a view of args[1]"),
    ]
    assert [place.name for place in found.program.outputs] == ["out[0]", "out[1]", "out[2]['sum']"]
    assert [fact.what for fact in found.program.mutated] == ["written"]


def test_a_saved_value_has_its_name_line_and_reason():
    weight = torch.randn(64, 64, requires_grad=True)

    def f(x):
        hidden = (x @ weight).sin()
        return (hidden @ weight).exp().sum()

    saved = {one.name: one for one in explain(f, torch.randn(128, 64)).memory.saved if one.kind == "saved"}
    assert set(saved) == {"mm", "sin", "exp"}
    assert saved["sin"].variable == "hidden"
    assert saved["mm"].variable == ""  # a part of what the line computes
    assert "hidden = (x @ weight).sin()" in saved["mm"].line
    assert saved["mm"].why.startswith("aten.cos reads it")
    assert saved["sin"].nbytes == 128 * 64 * 4
    assert saved["mm"].born < saved["sin"].born < saved["exp"].born
    assert saved["exp"].dies < saved["mm"].dies


def test_layers_never_exceed_what_is_alive():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    memory = explain(model, torch.randn(2, 8, 32)).memory
    for step, alive in enumerate(memory.alive):
        there = [s.nbytes for s in memory.saved if s.kind == "saved" and s.born <= step <= s.dies]
        assert sum(there) <= alive, step
    middle = [s.nbytes for s in memory.saved if s.kind == "saved" and s.born < memory.forward_steps <= s.dies]
    assert sum(middle) == memory.predicted_saved


def test_advice_on_partitions_is_what_they_come_to():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)])
    found = explain(model, torch.randn(256, 32))
    (said,) = [one for one in found.advice if one.change == "memory_budget=0.0"]
    again = foregrad.explain(model, torch.randn(256, 32), backend="eager", memory_budget=0.0)
    assert again.memory.predicted_saved == again.memory.measured_saved < found.memory.predicted_saved
    assert again.memory.measured_peak < found.memory.measured_peak
    assert f"would keep {in_bytes(again.memory.predicted_saved)} for the backward" in said.text
    assert f"{len(again.memory.again)} operators twice" in said.text


def test_parameters_without_gradients_are_named():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x) + self.idle.weight.detach().sum()

    (said,) = explain(Idle(), torch.ones(2, 3)).advice
    assert said.text.startswith("1 parameter gets no gradient from this call: `idle.weight`.")


def test_compilations_of_the_users_function_are_told_and_not_added_to():
    compiled = foregrad.compile(lambda x: (x * 2).sin().sum(), backend="eager", dynamic=False)
    for size in (2, 3, 4):
        compiled(torch.ones(size, requires_grad=True))
    found = foregrad.explain(compiled, torch.ones(5, requires_grad=True))
    assert (found.backend, len(found.compilations)) == ("eager", 3)
    assert [one.change for one in found.advice] == ["foregrad.mark_dynamic(x, 0)"]
    assert len(foregrad.explain_recompiles(compiled)) == 3


def test_a_compiled_module_is_explained_as_compiled():
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    compiled = foregrad.compile(model, backend="eager", partition="min_cut")
    found = foregrad.explain(compiled, torch.randn(64, 16))
    assert (found.name, found.partition, found.compilations) == ("Sequential", "min_cut", ())
    assert found.memory.predicted_saved == found.memory.measured_saved


def test_all_parts_that_run_eagerly_are_found_at_once(capsys):
    model = nn.Sequential(nn.Linear(4, 4), Block(), Block(), Seeding())
    found = explain(model, torch.randn(5, 4))
    assert [part.name for part in found.eager] == ["1.spread", "2.spread", "3"]
    assert all(part.seconds > 0 for part in found.eager)
    assert "NumPy" in found.eager[0].reason
    assert found.eager[0].change.startswith("Use PyTorch's own functions")
    assert "seeds" in found.eager[2].reason
    (said,) = found.advice
    assert "`1.spread`, `2.spread`, `3`" in said.text
    assert capsys.readouterr().out == ""
    marked = copy.deepcopy(model)
    for part in (marked[1].spread, marked[2].spread, marked[3]):
        foregrad.eager_region(part)
    again = explain(marked, torch.randn(5, 4))
    assert again.program is not None
    assert [part.kind for part in again.eager] == ["region"] * 3


def test_a_function_that_runs_eagerly_says_why():
    def f(x):
        torch.manual_seed(0)
        return x * 2

    found = explain(f, torch.ones(3, requires_grad=True))
    assert found.memory is None
    (part,) = found.eager
    assert "seeds" in part.reason
    assert part.seconds > 0


def test_graph_breaks_of_a_function_of_dynamos_are_told():
    def f(x):
        y = x.sin()
        print("between")
        return y.cos().sum()

    found = explain(torch.compile(f, backend="eager"), torch.ones(3, requires_grad=True))
    breaks = [part for part in found.eager if part.kind == "graph break"]
    assert len(breaks) == 1
    assert 'print("between")' in breaks[0].line
    assert explain(torch.compile(torch.sin, backend="eager"), torch.ones(3)).eager == ()


def test_a_function_that_draws_in_python_is_explained_by_the_form_that_runs():
    def f(x):
        return x * random.random()

    before = random.getstate()
    found = explain(f, torch.ones(3, requires_grad=True))
    assert found.program is not None
    assert random.getstate() == before


def test_tensors_with_a_history_can_be_arguments():
    weight = torch.ones(3, requires_grad=True)
    found = explain(lambda x: (x * x).sum(), weight * 2)
    assert found.not_measured == ""
    assert weight.grad is None


def test_the_functions_own_error_is_the_callers():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        explain(lambda x: x @ x, torch.ones(2, 3))


def test_inference_has_no_backward():
    with torch.no_grad():
        found = explain(norms(), torch.randn(2, 3, 8, 8))
    assert not found.program.has_backward
    assert found.memory.saved == ()
    assert found.memory.measured_peak == pytest.approx(found.memory.predicted_peak, rel=0.02)
    assert "forward alone" in str(found)


def test_autocast_is_measured_as_it_is_captured():
    with torch.autocast("cpu", torch.bfloat16):
        found = explain(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)), torch.randn(64, 16))
    assert found.memory.predicted_saved == found.memory.measured_saved
    workspace = 16 * 64 * 2  # oneDNN lays out a weight anew on processors that multiply tiles
    more = found.memory.measured_peak - found.memory.predicted_peak
    assert min(abs(more), abs(more - workspace)) <= 0.05 * found.memory.predicted_peak


def test_it_prints_as_text_for_rich_and_for_notebooks(capsys, monkeypatch):
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    found = explain(model, torch.randn(64, 16))
    text = str(found)
    assert "peak of memory" in text
    assert "saved for the backward" in text
    assert repr(found) == text
    found.show()
    assert capsys.readouterr().out == text + "\n"
    assert 'srcdoc="&lt;!doctype html' in found._repr_html_().lower()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert found._repr_html_().count("<table>") >= 3
    monkeypatch.undo()
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=160, file=io.StringIO())
    console.print(found)
    assert "cost of a step" in console.file.getvalue()


def test_json_has_the_fields():
    found = explain(nn.Linear(3, 3), torch.ones(2, 3))
    data = json.loads(found.to_json())
    assert data["memory"]["predicted_peak"] == found.memory.predicted_peak
    assert [one["key"] for one in data["operators"]] == [one.key for one in found.operators]
    keys = {one.key for one in found.operators}
    assert all(set(one.reads) <= keys for one in found.operators)


class Cache:
    """A plain object."""

    def __init__(self, keys):
        self.keys = keys


def test_results_in_objects_are_no_saved_bytes():
    def f(x):
        hidden = x.exp()
        return hidden.sum(), Cache(hidden)

    memory = foregrad.explain(f, torch.ones(30, requires_grad=True), backend="eager").memory
    assert memory.predicted_saved == memory.measured_saved == memory.eager_saved == 0


def test_what_prints_is_measured_and_prints_nothing(capsys):
    def f(x):
        print("said")
        return x.sin()

    assert explain(f, torch.ones(3, requires_grad=True)).time is not None
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------------ calls that fill caches
TOLD = []


@functools.lru_cache(None)
def tell_once(text):
    TOLD.append(text)


class Telling(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(3, 3), {}

    def forward(self, x):
        tell_once("loss_type=None")
        return self.linear(x).sum()


class Remembering(Telling):
    def forward(self, x):
        if "mask" not in self.table:
            self.table["mask"] = torch.ones(3)
        return (self.linear(x) * self.table["mask"]).sum()


def through_a_lazy_layer():
    return nn.Sequential(nn.LazyLinear(3), nn.ReLU())


@pytest.mark.parametrize("make", [Telling, Remembering, through_a_lazy_layer])
def test_a_first_call_that_fills_a_cache_is_told_and_the_next_is_explained(make):
    tell_once.cache_clear()
    found = explain(make(), torch.ones(2, 3))
    assert found.program is not None
    assert [part.kind for part in found.eager] == ["first call"]
    assert found.eager[0].reason.startswith("The first call runs eagerly: ")
    assert "; it runs eagerly" not in str(found)


def test_a_cache_in_a_library_is_named_with_the_line_that_defines_its_function(tmp_path, monkeypatch):
    """As `warning_once` of transformers: no line of the user's is near."""
    file = tmp_path / "library_that_warns.py"
    file.write_text(
        "import functools, torch\nNOTED = []\n@functools.lru_cache(None)\ndef warn_once(n):\n    NOTED.append(n)\n"
        "class Net(torch.nn.Module):\n    def forward(self, x):\n        warn_once(len(NOTED))\n        return x * 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import library_that_warns

    monkeypatch.setattr("foregrad.dispatch.explain._LIBRARIES", (str(tmp_path),))
    (part,) = explain(library_that_warns.Net(), torch.ones(2)).eager
    assert f"`warn_once` at {file}:3 in warn_once" in part.reason
    assert str(file) in part.line
    assert part.change == "Call it with equal arguments in each call, or outside."


# ------------------------------------------------------------------------------------------------ what is said is so
def test_nothing_is_measured_of_a_model_without_memory():
    found = explain(nn.Linear(4, 4, device="meta"), torch.ones(2, 4, device="meta"))
    assert "without values (on `meta`" in found.not_measured
    assert (found.time, found.memory.measured_peak) == (None, None)
    assert found.memory.predicted_peak > 0


def test_messages_name_what_they_are_about():
    with pytest.raises(foregrad.errors.UnknownLeafError) as raised:
        foregrad.compile(lambda x: {x.sum(), 3}, backend="eager", on_unsupported="raise")(torch.ones(2))
    assert "of the class builtins.set" in str(raised.value)
    assert "closure" not in str(raised.value)
    with pytest.raises(foregrad.errors.BudgetError) as raised:
        foregrad.compile(lambda x: x.sin().cos().sum(), backend="eager", memory_budget=1)(
            torch.ones(8, requires_grad=True)
        )
    assert "0.0 MiB" not in str(raised.value)
    one = foregrad.compile(lambda n, x: x * (n if isinstance(n, int) else n[0]), backend="eager", dynamic=False)
    one([2], torch.ones(2))
    one(2, torch.ones(2))
    assert "n was a list, is an int" in str(foregrad.explain_recompiles(one))


# ------------------------------------------------------------------------------------------------ names
class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x):
        normed = self.norm(x)
        return x + self.mlp(normed) * normed.sin()


def layers():
    return nn.Sequential(*(Layer() for _ in range(5)))


def test_saved_values_are_named_by_their_modules_and_variables():
    found = explain(layers(), torch.randn(4, 8))
    labels = {one.label for one in found.memory.saved}
    assert {"0.mlp.0 output (addmm)", "4.mlp.1 output (gelu)", "2.norm output (normed)"} <= labels
    text = str(found)
    assert "0.mlp.0 to 4.mlp.0 output (addmm)" in text
    assert "called" not in text
    assert "of kind" not in text
    assert "is a view of base" not in text
    assert re.search(r"\n +1\.2 KiB +5 +0\.mlp\.0 to 4", text), text


def test_modules_have_their_bytes_operations_and_time():
    found = explain(layers(), torch.randn(4, 8))
    rows = {one.where: one for one in by_modules(found)}
    assert list(rows)[:2] == ["0 to 4", "0.norm to 4.norm"]
    whole, mlp = rows["0 to 4"], rows["0.mlp to 4.mlp"]
    assert whole.flops == found.work.flops
    assert 0 < mlp.flops <= whole.flops
    assert 0 < mlp.seconds < whole.seconds
    assert 0 < rows["0.mlp.0 to 4.mlp.0"].kept < whole.kept
    assert explain(layers(), torch.randn(4, 8), measure=False).module_seconds == ()
    assert "0.mlp to 4.mlp" in str(found)


def test_operators_have_their_calls_and_time():
    found = explain(layers(), torch.randn(4, 8))
    rows = {op: (calls, seconds) for op, calls, seconds in found.operator_seconds}
    assert rows["aten.addmm"][0] == 10
    assert rows["aten.gelu_backward"][0] == 5
    assert all(seconds >= 0 for _, seconds in rows.values())
    times = [seconds for _, _, seconds in found.operator_seconds]
    assert times == sorted(times, reverse=True)
    assert re.search(r"share +calls +operator", str(found))
    assert explain(layers(), torch.randn(4, 8), measure=False).operator_seconds == ()


def test_the_users_own_lines_have_bytes_and_operations():
    found = explain(layers(), torch.randn(4, 8))
    own = found.sources[-1]
    assert own.title == "your code"
    (line,) = (text for text in own.lines if "normed.sin()" in text)
    assert re.match(r" +[\d.]+ KiB  [\d.]+ kFLOP +test_explain.py:\d+  return x", line)
    assert len(own.lines) == len(own.keys)
    assert own.keys[own.lines.index(line)] in {one.key for one in found.operators}


def test_advice_says_what_it_would_keep():
    found = explain(layers(), torch.randn(512, 8))
    (one,) = (one.text for one in found.advice if one.change == "memory_budget=0.0")
    assert re.search(
        r"would keep .* for the backward instead of .* \(peak .* instead of .*\) and compute \d+ operators", one
    )
    assert all(one.change for one in found.advice), "a fact is no advice"


@pytest.mark.parametrize("folder", ["/usr/lib/python3/dist-packages/", "C:\\venv\\Lib\\site-packages\\"])
def test_lines_of_installed_packages_name_the_package(folder):
    """Two packages may have files of one name."""
    trace = f'  File "{folder}one/models/modeling.py", line 3, in forward\n    return x'
    assert last_frame(trace) == ("one/modeling.py", "3", "forward", "return x")
    assert last_frame(trace.replace("one/models", "my/models").replace("-packages", ""))[0] == "modeling.py"
    assert last_frame(trace.replace("one/models/", ""))[0] == "modeling.py"


def test_a_column_without_words_is_left_out():
    """The lines of a model of PyTorch's own are not the user's."""
    for model, has_lines in ((nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), False), (layers(), True)):
        found = foregrad.explain(model, torch.randn(2, 3, 8), backend="eager", measure=False)
        assert bool(re.search(r"values  what .* line\n", str(found))) is has_lines, found
