"""Figures that README and the documentation quote are those of benchmarks/RESULTS.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks" / "RESULTS.json").read_text())
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_demo_in_readme():
    (block,) = re.findall(r"^200 steps, eager against foregrad$(.+?)^Equal bit", README, flags=re.MULTILINE | re.DOTALL)
    rows = [re.split(r" {2,}", line.strip()) for line in block.splitlines() if line.strip("- ")]
    assert rows[1:] == [[cell for cell in row if cell] for row in RESULTS["The demo"]["rows"]]


# A row of README's, and the beginnings of those that it stands for.
PROGRAMS = {
    "`torch.func.vmap`, `grad` and `jvp`": ["`torch.func.vmap`", "`torch.func.grad`", "`torch.func.jvp`"],
    "a counter that each call increments": ["a counter in a dict"],
}


def verdict(cell):
    """README leaves out the class of an error, and says what later versions of PyTorch do."""
    return re.sub(r"^raises? .*|^raise$", "raises", cell.partition(";")[0])


def test_the_comparison_in_readme():
    (table,) = re.findall(r"^\| program \| foregrad .*\n\| ---.*\n((?:\|.*\n)+)", README, flags=re.MULTILINE)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    measured = RESULTS["What compilers do with small programs"]["rows"]
    for program, *cells in rows:
        key = next((key for key in PROGRAMS if program.startswith(key)), None)
        beginnings = PROGRAMS[key] if key else [program.partition(",")[0]]
        for beginning in beginnings:
            (found,) = [row for row in measured if row[0].startswith(beginning)]
            assert [verdict(cell) for cell in found[1:]] == [verdict(cell) for cell in cells], program


def test_the_times_of_plans():
    page = (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")
    (times,) = re.findall(
        r"GPT-2 of 24 layers takes ([\d.]+) s, one for 96 layers takes ([\d.]+) s", " ".join(page.split())
    )
    for name, seconds in zip(("gpt2-24", "gpt2-96"), times, strict=True):
        assert f"found in {seconds} s" in RESULTS[f"A memory budget: {name}"]["notes"]


SPEED = (ROOT / "docs" / "howto" / "speed.md").read_text(encoding="utf-8")
INDUCTOR = "Inductor inside foregrad against torch.compile(backend='inductor')"
MODELS = {
    "GPT-2 of 2 layers": "gpt2",
    "ResNet-50": "resnet-50",
    "BERT of transformers": "transformers-bert",
    "GPT-2 of transformers": "transformers-gpt2",
    "perceptron of 6 layers": "mlp",
}


def test_the_ratios_to_torch_compile():
    rows = {tuple(row[:2]): row for row in RESULTS[INDUCTOR]["rows"]}
    for model, key in MODELS.items():
        _, _, compiling, step, _ = rows[key, "foregrad.compile"]
        ratios = [re.search(r"\((.+)x\)", cell)[1] for cell in (compiling, step)]
        ours, eager = (float(cell.partition(" ")[0]) for cell in (step, rows[key, "eager"][3]))
        assert f"| {model} | {ratios[0]} | {ratios[1]} | {ours / eager:.2f} |" in SPEED


def test_the_steps_on_kernels_of_eager():
    rows = {row[0]: row for row in RESULTS["A training step"]["rows"]}
    for model, key in {
        "GPT-2 of 24 layers, 128 wide": "gpt2-24",
        "ResNet-50": "resnet-50",
        "GPT-2 of 6 layers, 128 wide": "gpt2-6",
    }.items():
        eager, ours = (cell.partition(" ")[0] for cell in rows[key][1:3])
        assert f"| forward and backward, {model} | {eager} ms | {ours} ms |" in SPEED
    demo = {row[0]: row for row in RESULTS["The demo"]["rows"]}["median step"]
    assert f"| a training step, the demo's GPT | {demo[1]} | {demo[2]} |" in SPEED


def test_the_overhead_of_a_call():
    table = RESULTS["Overhead of a call"]
    named = [table["columns"].index(name) for name in ("ours - graphs", "PyTorch - graphs")]
    (ours, theirs), (ours_both, theirs_both) = ([row[column] for column in named] for row in table["rows"][:2])
    assert f"| forward | {theirs} µs | {ours} µs |" in SPEED
    assert f"| forward and backward | {theirs_both} µs | {ours_both} µs |" in SPEED
