"""Effects around the graph in files: held, bounded, refused by name, and read from the fields of version 1."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import foregrad
from foregrad.errors import ArtifactError, UnsupportedSideEffectError
from foregrad.extend import view
from foregrad.graph.call_effects import KINDS, CallEffect, CallPlace
from foregrad.store.artifacts.upgrade import upgraded
from tests.store.artifacts.faults import edited


def marked(x):
    y = x.sin()
    y.retain_grad()
    made = torch.nn.Parameter(x.detach() * 2)
    made.name_of_it = "made"
    return y * 1, y, made


def leaf():
    return torch.arange(3.0, requires_grad=True)


def test_a_result_that_is_a_parameter_with_an_attribute_is_one_after_loading(tmp_path):
    def function(x):
        made = torch.nn.Parameter(x.detach() * 2)
        made.role = ("a", 1)
        return made

    path = tmp_path / "file.foregrad"
    foregrad.export(function, (leaf(),)).save(path)
    loaded = foregrad.load(path)(leaf())
    assert type(loaded) is torch.nn.Parameter
    assert loaded.role == ("a", 1)
    assert torch.equal(loaded, function(leaf()))


def retained(x):
    y = x.sin()
    y.retain_grad()
    return y


def test_a_result_keeps_its_gradient_after_loading(tmp_path):
    path = tmp_path / "file.foregrad"
    foregrad.export(retained, (leaf(),)).save(path)
    result = foregrad.load(path)(leaf())
    result.sum().backward()
    assert torch.equal(result.grad, torch.ones(3))


def edit_effects(effects):
    def edit(data):
        data["program"]["signature"]["effects"] = {"is": "EffectInfo", "around": effects}

    return edit


@pytest.mark.parametrize(
    ("effect", "said"),
    [
        ({"is": "RetainGradient", "target": {"is": "EffectTarget", "number": 7}}, "no result 7"),
        ({"is": "RetainGradient", "target": {"is": "EffectTarget", "number": 1, "is_input": True}}, "no input 1"),
        ({"is": "ChangeInference", "output": 9}, "no output 9"),
        ({"is": "KeepApart", "targets": [0], "others": [3], "message": "said"}, "no input 3"),
        ({"is": "LeaveSettings", "settings": [["grad mode", False]]}, "LeaveSettings"),
        ({"is": "SetGradient", "target": {"is": "EffectTarget", "number": 0}, "result": None}, "SetGradient"),
        ({"is": "LaunchRockets"}, "LaunchRockets"),
    ],
)
def test_a_file_with_an_effect_that_does_not_fit_is_refused(tmp_path, effect, said):
    path = tmp_path / "file.foregrad"
    foregrad.export(retained, (leaf(),)).save(path)
    path.write_bytes(edited(path.read_bytes(), edit_effects([effect]), "programs/0.json"))
    with pytest.raises(ArtifactError, match=said):
        foregrad.load(path)


def test_fields_of_version_1_become_effects():
    old = {
        "apart": [[[0], [1], "said"]],
        "retained": [2],
        "retained_inputs": [0],
        "parameters": [1],
        "attributes": [[1, "name", 3]],
        "other_mode": [4],
        "settings_inside": [["precision", "high"]],
    }
    program = {"signature": {"is": "Signature", "inputs": [], **old}, "derived": []}
    signature = upgraded(program, 1)["signature"]
    assert not old.keys() & signature.keys()
    effects = signature["effects"]["around"]
    kinds = [effect["is"] for effect in effects]
    assert sorted(kinds) == sorted(
        [
            "KeepApart",
            "RunUnder",
            "ChangeInference",
            "RetainGradient",
            "RetainGradient",
            "MakeParameter",
            "GiveAttribute",
        ]
    )
    assert {"is": "RetainGradient", "target": {"is": "EffectTarget", "number": 0, "is_input": True}} in effects
    assert upgraded(program, 2) is program


def with_settings(x):
    torch.set_grad_enabled(False)
    return x * 2


def test_an_effect_that_no_file_can_hold_is_refused_with_what_to_do():
    try:
        with pytest.raises(UnsupportedSideEffectError, match=r"grad mode.*change it outside"):
            foregrad.export(with_settings, (leaf(),))
    finally:
        torch.set_grad_enabled(True)


def test_the_view_tells_of_effects_around_the_graph():
    compiled = foregrad.compile(marked, backend="eager", on_unsupported="raise")
    with pytest.raises(UnsupportedSideEffectError):  # another result is computed from the one that keeps its gradient
        compiled(leaf())
    compiled = foregrad.compile(retained, backend="eager")
    compiled(leaf())
    (effect,) = view(compiled).graphs[0].effects
    assert (effect.kind, effect.name, effect.what) == ("tensor", "out", "retain_grad()")


def test_two_kinds_of_effects_can_not_share_a_name():
    with pytest.raises(TypeError, match="RetainGradient"):

        @dataclasses.dataclass(frozen=True)
        class RetainGradient(CallEffect):
            __module__ = "foregrad.other"
            place = CallPlace.RESULTS

    assert KINDS["RetainGradient"].__module__ == "foregrad.graph.call_effects"


def test_a_name_with_a_backslash_is_told_as_it_is():
    weights = {"a\\d": torch.nn.Parameter(torch.ones(3))}

    def step(x):
        (weights["a\\d"] * x).sum().backward()

    with pytest.raises(UnsupportedSideEffectError) as caught:
        foregrad.export(step, (torch.ones(3),))
    assert f"set .grad of closed-over weights[{'a' + chr(92) + 'd'!r}] to result" in str(caught.value)
