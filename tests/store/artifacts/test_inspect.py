"""`foregrad inspect FILE` prints what is inside, without the tensors."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import foregrad
from foregrad.tools.cli import main


@pytest.fixture
def path(tmp_path):
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    artifact = foregrad.export(module, (torch.randn(6, 3),), dynamic_shapes=({0: (2, 99)},))
    artifact.specialize((torch.randn(5, 3),), derivatives=0, name="of five")
    artifact.save(tmp_path / "net.foregrad")
    return tmp_path / "net.foregrad"


def test_what_is_inside(path, capsys):
    assert main(["inspect", str(path)]) == 0
    said = capsys.readouterr().out
    for text in (
        "Sequential: version 2 of the format",
        "9 tensors (6 parameters, 3 buffers)",
        "parameter 0.weight: f32[4, 3]  requires grad",
        "buffer 1.running_mean: f32[4]",
        "specialization: train, with gradients",
        "specialization: of five",
        "size 0 of args[0], from 2 to 99",
        "buffer 1.num_batches_tracked",
        "grad mode: True",
        "training: True",
        "aten::addmm",
    ):
        assert text in said, text


@pytest.mark.parametrize("graph", ["joint", "forward", "backward"])
def test_graphs_as_python(path, capsys, graph):
    assert main(["inspect", str(path), "--graph", graph]) == 0
    said = capsys.readouterr().out
    assert f"def {graph}(" in said
    assert "torch.ops.aten.addmm.default(" in said or graph == "backward"


def test_no_tensor_is_read(path, capsys, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch")
    monkeypatch.setattr(safetensors, "load", None)
    assert main(["inspect", str(path)]) == 0


@pytest.mark.parametrize("content", [b"", b"PK", b"not a zip at all", b"PK\x05\x06" + 18 * b"\0"])
def test_other_files(tmp_path, capsys, content):
    (tmp_path / "other").write_bytes(content)
    assert main(["inspect", str(tmp_path / "other")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("foregrad inspect: ")
    assert "can't be read" in said


def test_a_file_that_is_not_there(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_names_that_would_change_the_terminal(tmp_path, capsys):
    def f(x):
        return x + 1

    f.__name__ = "\x1b[31mred"
    foregrad.export(f, (torch.ones(2),)).save(tmp_path / "red")
    assert main(["inspect", str(tmp_path / "red")]) == 0
    said = capsys.readouterr()
    assert "\x1b" not in said.out + said.err


def test_as_json(path, capsys):
    assert main(["inspect", str(path), "--json", "--graph", "joint"]) == 0
    contents = json.loads(capsys.readouterr().out)
    assert contents["name"] == "Sequential"
    assert [tensor["name"] for tensor in contents["tensors"]][:2] == ["0.weight", "0.bias"]
    train, _ = contents["specializations"]
    assert train["sections"]["called under"][0] == "training: True"
    assert "def joint(" in train["graph"]
