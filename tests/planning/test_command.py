"""`foregrad plan FILE.py:NAME` says what `foregrad.plan` does."""

from __future__ import annotations

import json

import pytest

import foregrad
from foregrad.tools.cli import main

MODEL = """
import torch

with torch.device("meta"):
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    example_inputs = (torch.empty(512, 64),)
"""


@pytest.fixture
def target(tmp_path):
    file = tmp_path / "planned.py"
    file.write_text(MODEL)
    return f"{file}:net"


def test_the_plan_as_text_and_page(target, tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert main(["plan", target, "--device", "h100", "--optimizer", "adamw", "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("plan of Sequential")
    assert "state of AdamW" in said
    assert page.read_text().startswith("<!doctype html>")


def test_the_plan_as_json(target, capsys):
    settings = ["--budget", "80GiB", "--mesh", "dp=2,fsdp=8", "--json"]
    assert main(["plan", target, "--device", "h100", *settings]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["budget"], data["ranks"]) == (80 << 30, {"dp": 2, "fsdp": 8, "tp": 1})


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--device", "h1000"], 2, "--device knows no `h1000`: did you mean `h100`?"),
        (["--device", "h100", "--optimizer", "Adamm"], 2, "--optimizer knows no `Adamm`: did you mean `Adam`?"),
        (["--device", "l4", "--budget", "1KiB"], 3, "BudgetError: a budget of 1.0 KiB can't be met"),
        (["--device", "l4", "--budget", "much"], 2, "is no memory budget"),
        (["--device", "l4", "--mesh", "pp=2"], 3, "'pp' of a mesh is not planned"),
        (["--device", "l4", "--mesh", "fsdp"], 2, "--mesh is of the form"),
        (["--device", "l4", "--sizes", "planned.py:4"], 2, "--sizes is of the form"),
    ],
)
def test_what_is_refused(target, capsys, arguments, status, message):
    assert main(["plan", target, *arguments]) == status
    assert message in capsys.readouterr().err


def test_a_value_that_is_not_there_is_said(tmp_path, capsys):
    file = tmp_path / "asks.py"
    lines = MODEL.replace("net = ", "layers = ") + "\n\ndef net(x):\n    return layers(x).sum() * x.max().item()\n"
    file.write_text(lines)
    line = len(lines.splitlines())
    assert main(["plan", f"{file}:net", "--device", "l4"]) == 3
    assert f"sizes={{'asks.py:{line}': 128}}" in capsys.readouterr().err
    assert main(["plan", f"{file}:net", "--device", "l4", "--sizes", f"asks.py:{line}=2.5"]) == 0


def test_nothing_that_fits_is_a_status(target, monkeypatch, capsys):
    tiny = foregrad.planning.Device("tiny", 1 << 10, 1e9, {"float32": 1e9})
    monkeypatch.setitem(foregrad.planning.DEVICES, "tiny", tiny)
    assert main(["plan", target, "--device", "tiny"]) == 1
    assert "no choice fits" in capsys.readouterr().out
