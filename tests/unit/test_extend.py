"""The public view of compiled functions, and watchers of stages."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad.extend import CompileStage, Watcher, view, watching


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
