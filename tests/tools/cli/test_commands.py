"""The commands that take `FILE.py:NAME`, and `doctor`: what they print, and how they exit."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys

import pytest

from foregrad.tools import cli

PROGRAM = """
import torch

net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU())
example_inputs = (torch.ones(2, 4),)
batch = {"x": torch.ones(3, requires_grad=True)}


class Net(torch.nn.Module):
    def forward(self, x):
        return x.sin()


def by_name(x):
    return x.exp()


def batches():
    return torch.ones(2)


def made():
    return torch.nn.Tanh()


def wrong(gm, inputs):
    for node in gm.graph.nodes:
        if node.target is torch.ops.aten.sin.default:
            node.target = torch.ops.aten.cos.default
    return gm


def text(x):
    return str(x)


def shapes(x):
    return x @ torch.ones(3)


def needs_more(x, y):
    return x * y


class Sized(torch.nn.Linear):
    def __init__(self, width):
        super().__init__(width, width)


on_meta = torch.nn.Linear(4, 4, device="meta")
number = 3


import foregrad

foregrad.register_backend("wrong-sine", wrong, replace=True)
"""


@pytest.fixture
def run(tmp_path, capsys):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)

    def run(command, name, *options):
        code = cli.main([command, f"{file}:{name}", "--backend", "eager", *options])
        return code, capsys.readouterr()

    yield run
    sys.path.remove(str(tmp_path)) if str(tmp_path) in sys.path else None


@pytest.mark.parametrize(
    "options",
    [("net",), ("Net",), ("made",), ("by_name", "--inputs", "batch"), ("Net", "--inputs", "batches"), ("net.forward",)],
)
def test_verify_of_what_is_equal(run, options):
    code, said = run("verify", *options)
    assert code == 0
    assert "equal bit for bit" in said.out


def test_verify_of_what_is_wrong(run, tmp_path):
    code, said = run("verify", "Net", "--backend", "wrong-sine", "--json", "--folder", str(tmp_path))
    found = json.loads(said.out)
    assert code == 1
    assert found["culprit"]["operator"] == "aten.sin.default"
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(found["reproducer"], run_name="__main__")
    assert stopped.value.code == 1


@pytest.mark.parametrize(
    ("target", "options", "said"),
    [
        ("nothing", (), "has no `nothing`"),
        ("net", ("--inputs", "nothing"), "has no `nothing`"),
        ("number", (), "can't be called"),
        ("by_nam", (), "has no `by_nam`: did you mean `by_name`?"),
        ("zzz", (), "it has Net, by_name, batches"),
        ("Sized", (), "`Sized` in"),
        ("net", ("--backend", "egar"), "there is no backend called `egar`. Did you mean `eager`?"),
        ("net", ("--partition", "mincut"), "did you mean `min_cut`?"),
        ("on_meta", (), "`weight` is on the meta device"),
    ],
)
def test_a_target_that_is_not_there_exits_with_2(run, target, options, said):
    code, out = run("verify", target, *options)
    assert code == 2
    assert said in out.err


@pytest.mark.parametrize("command", ["verify", "explain", "bench"])
@pytest.mark.parametrize(("target", "said"), [("needs_more", "TypeError"), ("shapes", "RuntimeError")])
def test_a_target_that_raises_exits_with_2_and_one_line(run, command, target, said):
    code, out = run(command, target)
    assert code == 2
    told = out.out if command == "verify" else out.err
    assert said in told
    assert len(told.splitlines()) == 1


def test_an_error_that_both_raise_is_well_on_request(run):
    assert run("verify", "needs_more", "--may-raise")[0] == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\nraise ValueError('no data')\n", "raised ValueError: no data (line 2)"),
        ("def f(:\n    pass\n", "raised SyntaxError: invalid syntax (line 1)"),
        ("import torch, no_such_module\n", "raised ModuleNotFoundError: No module named 'no_such_module' (line 1)"),
        ("import sys\nsys.exit(3)\n", "ends the process (sys.exit(3))"),
        ("def f(x):\n    return x\ndef example_inputs():\n    return 1 / 0\n", "raised ZeroDivisionError"),
        ("def f(x):\n    raise OSError('no disk')\nexample_inputs = 1.0\n", "raised OSError: no disk (line 2)"),
    ],
)
def test_a_file_that_raises_exits_with_2_and_one_line(tmp_path, capsys, text, said):
    file = tmp_path / "raising.py"
    file.write_text(text)
    assert cli.main(["explain", f"{file}:f", "--backend", "eager"]) == 2
    told = capsys.readouterr().err
    assert f"foregrad: {file} " in told
    assert said in told
    assert len(told.splitlines()) == 1


def test_the_line_is_found_in_a_file_that_is_named_relatively(tmp_path, capsys, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "raising.py").write_text("x = 1\nraise ValueError('no data')\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(["explain", "folder/raising.py:f"]) == 2
    assert capsys.readouterr().err == "foregrad: folder/raising.py raised ValueError: no data (line 2)\n"


def test_a_reader_that_goes_away_is_no_difference(tmp_path):
    """As in `foregrad doctor | head -1`: status 1 would say that something is broken."""
    command = [sys.executable, "-m", "foregrad", "doctor"]
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        done = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, check=False)
    said = [line for line in done.stderr.splitlines() if "No CUDA runtime" not in line]  # PyTorch's, of its CUDA builds
    assert (done.returncode, said) == (141, [])


def test_inspecting_no_file_exits_with_2_and_a_damaged_one_with_1(tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path / "nofile")]) == 2
    (tmp_path / "text").write_text("no artifact")
    assert cli.main(["inspect", str(tmp_path / "text")]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_fault_of_a_command_is_no_fault_of_the_target(run, monkeypatch):
    def faulty(*_, **__):
        raise AssertionError("ours")

    monkeypatch.setattr("foregrad.tools.cli.target.foregrad.explain", eval("lambda *a, **k: f()", {"f": faulty}))
    monkeypatch.setattr("foregrad.house._files", (__file__, "<string>"))
    with pytest.raises(AssertionError):
        run("explain", "net")


@pytest.mark.parametrize("target", ["program.py", "nowhere.py:net", ":net"])
def test_a_target_of_another_form_exits_with_2(target, capsys):
    assert cli.main(["verify", target]) == 2
    assert capsys.readouterr().err.startswith("foregrad: ")


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
def test_what_can_not_be_compiled_exits_with_3(run):
    code, said = run("verify", "text")
    assert code == 3
    assert "UnsupportedError" in said.err


def test_explain_prints_a_report_and_writes_it(run, tmp_path):
    pytest.importorskip("jinja2")
    code, said = run("explain", "net", "--html", str(tmp_path / "report.html"))
    assert code == 0
    assert "Sequential" in said.out
    assert (tmp_path / "report.html").stat().st_size > 1000


def test_explain_as_json(run, tmp_path):
    code, said = run("explain", "net", "--json", "--html", str(tmp_path / "report.html"))
    assert code == 0
    assert json.loads(said.out)["name"]
    assert "the report is in" in said.err


def test_bench_times_each_backend(run):
    code, said = run("bench", "net", "--steps", "2", "--json")
    assert code == 0
    found = json.loads(said.out)
    assert [one["name"] for one in found] == ["pytorch", "foregrad, eager"]
    assert found[0]["ratio"] == 1.0
    code, said = run("bench", "net", "--steps", "1")
    assert "median" in said.out


def test_doctor_says_what_is_here(capsys):
    code = cli.main(["doctor", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == (1 if found["broken"] else 0)
    assert {"PyTorch", "C++ part", "backend auto", "GPU", "private names"} <= set(found)
    assert cli.main(["doctor"]) == code
    assert "backend auto" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["explain", "--partition", "mincut"],
            "foregrad: there is no partition policy `mincut` (did you mean `min_cut`?",
        ),
        (
            ["verify", "--partition", "mincut"],
            "foregrad: there is no partition policy `mincut` (did you mean `min_cut`?",
        ),
        (["explain", "--html", "no/such/folder.html"], "foregrad: no/such/folder.html can't be written: No such file"),
    ],
)
def test_a_wrong_setting_is_no_error_of_the_target(tmp_path, capsys, arguments, said):
    file = tmp_path / "right.py"
    file.write_text("import torch\ndef f(x):\n    return x.sin()\nexample_inputs = torch.ones(2, requires_grad=True)\n")
    command, *rest = arguments
    assert cli.main([command, f"{file}:f", "--backend", "eager", *rest]) == 2
    assert capsys.readouterr().err.startswith(said)


def test_a_bench_has_at_least_one_step(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "model.py:net", "--steps", "0"])
    assert ended.value.code == 2
    assert "0 is not 1 or more" in capsys.readouterr().err
