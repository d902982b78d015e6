"""The public view of compiled functions, and watchers of stages."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad.extend import CompileStage, Watcher, as_compiled, module_behind, phase, view, watching


class Counted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.frozen = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("calls", torch.zeros(()))
        self.seen = []

    def forward(self, x, scale=2.0):
        self.calls += 1
        self.seen.append("a call")
        return (x * self.weight).sum() * scale, x[0]


@pytest.fixture
def compiled():
    model = foregrad.compile(Counted(), backend="eager")
    model(torch.ones(3))
    return model


def test_a_view_has_the_graph_and_its_halves(compiled):
    (graph,) = view(compiled).graphs
    assert graph.joint.signature.num_forward_outputs == len(graph.joint.signature.graph_outputs.slots)
    assert [node.name for node in graph.halves.saved_nodes]
    assert "def " in graph.source
    assert graph.source == compiled.foregrad.specializations[0].source()


def test_a_view_names_inputs_as_the_user_does(compiled):
    (graph,) = view(compiled).graphs
    assert {(place.name, place.kind) for place in graph.inputs} == {
        ("args[0]", "argument"),
        ("weight", "parameter"),
        ("calls", "buffer"),
    }
    by_name = {place.name: place for place in graph.inputs}
    assert by_name["weight"].has_gradient
    assert not by_name["args[0]"].has_gradient
    assert by_name["weight"].spec.shape == (3,)
    assert by_name["args[0]"].is_argument


def test_a_view_tells_effects_of_both_kinds_and_aliases(compiled):
    (graph,) = view(compiled).graphs
    assert ("tensor", "buffer calls") in {(effect.kind, effect.name) for effect in graph.effects}
    assert any(effect.kind == "python" and "seen" in effect.name for effect in graph.effects)
    assert [alias.what for alias in graph.aliases if alias.name == "out[1]"] == ["is a view of args[0]"]


def test_a_view_tells_guards_by_kind(compiled):
    (graph,) = view(compiled).graphs
    kinds = {guard.kind for guard in graph.guards}
    assert {"argument", "parameter", "buffer", "setting"} <= kinds


def test_a_view_has_a_graph_for_each_compilation_and_the_eager_calls():
    f = foregrad.compile(lambda x: x.sin(), backend="eager", dynamic=False)
    for n in (2, 3):
        f(torch.ones(n))
    assert len(view(f).graphs) == len(view(f).compilations) == 2
    assert view(f).eager == ()

    def prints_memory(x):
        return x * x.data_ptr()

    g = foregrad.compile(prints_memory, backend="eager", on_unsupported="eager")
    with pytest.warns(foregrad.errors.ForegradWarning):
        g(torch.ones(2))
    assert view(g).graphs == ()
    assert len(view(g).eager) == 1


def test_what_is_not_compiled_has_no_view():
    with pytest.raises(TypeError, match="compiled by foregrad"):
        view(torch.sin)


def test_a_view_can_not_be_changed(compiled):
    with pytest.raises(AttributeError):
        view(compiled).graphs[0].source = ""


class Names(Watcher):
    def __init__(self):
        self.stages: list[CompileStage] = []

    def stage(self, stage):
        self.stages.append(stage)


def test_watchers_hear_of_each_stage_in_order():
    names = Names()
    with watching(names):
        x = torch.ones(2, requires_grad=True)
        foregrad.compile(lambda x: x.sin().sum(), backend="eager")(x).backward()
    assert [stage.name for stage in names.stages] == [
        "capture",
        "partition",
        "halves",
        "compile forward",
        "guards",
        "compile backward",
    ]
    capture, partition, halves, forward, guards, backward = names.stages
    assert capture.after is partition.before is capture.joint
    assert forward.before is halves.after.forward
    assert backward.before is halves.after.backward
    assert forward.role.phase == "forward"
    assert "def " in guards.after
    assert all(stage.seconds >= 0 for stage in names.stages)
    assert capture.tensors[0] is x


def test_a_watcher_may_wrap_what_compilers_return():
    class Doubling(Watcher):
        def compiled(self, stage):
            return lambda values: [2 * value for value in stage.after(values)]

    with watching(Doubling()):
        f = foregrad.compile(lambda x: x.sin(), backend="eager")
        assert torch.equal(f(torch.ones(2)), 2 * torch.ones(2).sin())


def test_watchers_that_left_hear_nothing():
    names = Names()
    with watching(names):
        pass
    foregrad.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
    assert names.stages == []


def test_a_stage_names_the_callable_that_made_it():
    names = Names()
    with watching(names):
        f = foregrad.compile(lambda x: x.sin().sum(), backend="count", partition="min_cut")
        f(torch.ones(2, requires_grad=True)).backward()
    made = {stage.name: stage.compiler for stage in names.stages if stage.compiler is not None}
    assert made.keys() == {"partition", "compile forward", "compile backward"}
    assert made["partition"] is view(f).partition is foregrad.min_cut_rematerialization_partition
    assert made["compile forward"] is view(f).compiler


def test_a_part_of_a_graph_is_compiled_again_by_itself():
    names = Names()
    with watching(names):
        foregrad.compile(lambda x: x.sin() + 1, backend="eager")(torch.ones(2))
    stage = next(stage for stage in names.stages if stage.name == "compile inference")
    assert torch.equal(stage.again(stage.before)([torch.zeros(2)])[0], torch.ones(2))


def test_a_function_is_compiled_for_a_call_that_does_not_run():
    ran = []

    def f(x):
        ran.append(1)
        return x.sin()

    compiled = foregrad.compile(f, backend="eager")
    graph = as_compiled(compiled).graph_for((torch.ones(2),), {})
    assert ran == []
    assert [node.name for node in graph.joint.graph.nodes if node.op == "call_function"] == ["sin"]
    compiled(torch.ones(2))
    assert len(view(compiled).graphs) == len(ran) == 1


def test_an_error_of_a_capture_is_told_in_parts():
    def reads_memory(x):
        return x * x.data_ptr()

    compiled = as_compiled(foregrad.compile(reads_memory, backend="eager"))
    with pytest.raises(foregrad.errors.UnsupportedError) as caught:
        compiled.graph_for((torch.ones(2),), {})
    refused = compiled.refusal(caught.value)
    assert refused.why
    assert refused.change
    assert "reads_memory" in refused.line


def test_another_function_is_compiled_in_the_same_way(compiled):
    names = Names()
    other = as_compiled(compiled).like(lambda x: x.cos(), "other", on_unsupported="raise", watcher=names)
    assert torch.equal(other(torch.ones(2)), torch.ones(2).cos())
    assert {stage.function for stage in names.stages} == {"other"}
    assert view(compiled).compiler is other.view().compiler


def test_a_graph_is_split_by_another_partition(compiled):
    f = foregrad.compile(lambda x: x.sin().exp().sum(), backend="eager")
    f(torch.ones(3, requires_grad=True))
    (graph,) = view(f).graphs
    other = as_compiled(f).split(graph.joint, foregrad.min_cut_rematerialization_partition)
    assert graph.halves.saved_bytes > other.saved_bytes


def test_the_module_behind_a_compiled_one_is_the_users(compiled):
    model = Counted()
    assert module_behind(foregrad.compile(model, backend="eager")) is model
    assert module_behind(model) is None
    assert as_compiled(model) is None


def test_a_part_of_a_compilers_work_has_its_own_line_in_the_times():
    def compiler(module, inputs):
        with phase("tuning of a test"):
            return module

    foregrad.compile(torch.sin, backend=compiler)(torch.ones(2))
    assert [time.function for time in foregrad.compile_times().entries if time.phase == "tuning of a test"] == ["sin"]
