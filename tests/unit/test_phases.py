"""The time that compilations take, by phase, and what is said to who waits."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time

import pytest
import torch

import foregrad
from foregrad import phases
from tests import forked


def test_each_phase_of_a_function_is_counted_by_its_name():
    def timed_here(x):
        return (x.sin() * x).sum()

    x = torch.randn(4, requires_grad=True)
    compiled = foregrad.compile(timed_here, backend="eager")
    compiled(x).backward()
    found = {e.phase: e for e in foregrad.compile_times().entries if e.function == "timed_here"}
    assert set(found) == {"capture", "partition", "compile forward", "guards", "compile backward"}
    assert all(entry.count == 1 for entry in found.values())
    compiled(x).backward()
    assert [e for e in foregrad.compile_times().entries if e.function == "timed_here"] == list(found.values())
    compiled(torch.randn(5, requires_grad=True)).backward()
    again = {e.phase: e.count for e in foregrad.compile_times().entries if e.function == "timed_here"}
    assert again["guards"] == 2


def test_a_phase_inside_another_is_not_counted_twice():
    foregrad.compile_times(clear=True)
    with phases.compiling("outer"), phases.phase("capture"):
        time.sleep(0.02)
        with phases.phase("partition"):
            time.sleep(0.1)
        with phases.compiling("inner"), phases.phase("capture"):
            time.sleep(0.1)
    found = {(e.function, e.phase): e.seconds for e in foregrad.compile_times(clear=True).entries}
    assert found["outer", "capture"] < 0.09
    assert found["outer", "partition"] >= 0.09
    assert found["inner", "capture"] >= 0.09
    assert foregrad.compile_times().seconds == 0


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("out", [Terminal(), io.StringIO()], ids=["terminal", "file"])
def test_who_waits_at_a_terminal_is_told_how_far_it_is(out, monkeypatch):
    monkeypatch.setattr(phases, "_AFTER_S", 0.05)
    monkeypatch.setattr(phases, "_EVERY_S", 0.05)
    monkeypatch.setattr(sys, "stderr", out)
    with phases.compiling("net"), phases.phase("compile forward"):
        phases.counted(3, 17, "kernels")
        time.sleep(0.4)
    said = out.getvalue()
    if not out.isatty():
        assert said == ""
        return
    assert said.startswith("foregrad: compiling `net`")
    assert "compile forward, kernels 3 of 17" in said
    assert "`net` took 0 s (compile forward 0." in said


def test_nothing_is_said_of_what_is_quick(monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    foregrad.compile(torch.tanh, backend="eager")(torch.ones(2))
    assert out.getvalue() == ""


def test_outside_of_a_compilation_nothing_is_noted():
    before = foregrad.compile_times()
    with phases.phase("capture"):
        phases.counted(1, 2, "kernels")
    assert foregrad.compile_times() == before


LOGGED = """
import torch, foregrad
def net(x, n=1):
    return (x.sin() * n).sum()
f = foregrad.compile(net, backend="eager")
f(torch.ones(3, requires_grad=True)).backward()
f(torch.ones(3, requires_grad=True), 2)
"""


@pytest.mark.parametrize(
    ("logs", "there", "not_there"),
    [
        ("graphs", ["[foregrad.graphs] # joint graph of net"], ["foregrad.guards", "foregrad.partition"]),
        ("partition", ["[foregrad.partition] net: "], ["def forward(", "foregrad.graphs"]),
        ("+partition", ["[foregrad.partition] net: ", "# forward of net", "# backward of net"], ["foregrad.graphs"]),
        ("guards", ["[foregrad.guards] net:", "def call(args, kwargs):"], ["foregrad.graphs"]),
        ("recompiles", ["[foregrad.recompiles] net is compiled again, graph 2"], ["not graph 1"]),
        ("+recompiles,graphs", ["net: not graph 1: ", "foregrad.graphs"], []),
        ("all,-guards", ["foregrad.graphs", "foregrad.partition", "foregrad.recompiles"], ["foregrad.guards"]),
        ("", [], ["foregrad"]),
    ],
)
def test_what_is_logged(logs, there, not_there, capsys):
    try:
        foregrad.set_logs(logs)
        exec(LOGGED, {})
    finally:
        foregrad.set_logs("")
    said = capsys.readouterr()
    assert [text for text in there if text not in said.err] == []
    assert [text for text in not_there if text in said.err] == []
    assert said.out == ""


def test_the_environment_says_what_is_logged_and_where_the_structured_trace_is(tmp_path):
    """`tlparse` shows what `TORCH_TRACE` holds."""
    environment = {**os.environ, "FOREGRAD_LOGS": "+recompiles,graphs", "TORCH_TRACE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", LOGGED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "net: not graph 1: " in done.stderr
    assert "[foregrad.graphs] # joint graph of net" in done.stderr
    assert "foregrad.guards" not in done.stderr
    assert done.stdout == ""
    text = "".join(file.read_text() for file in tmp_path.iterdir())
    for name in ("foregrad_joint_graph", "foregrad_partition", "foregrad_guards"):
        assert f'"name": "{name}"' in text
    assert "def joint(" in text


def test_an_unknown_name_is_an_error_that_lists_the_known():
    done = forked.run_text(LOGGED, bare=True, FOREGRAD_LOGS="graphs,guard")
    assert done.returncode == 1
    assert "ValueError: foregrad logs no `guard`. Did you mean `guards`? Known: all, backends, " in done.stderr


@pytest.mark.parametrize(("call", "verb"), [(foregrad.verify, "verifying"), (foregrad.explain, "explaining")])
def test_verify_and_explain_say_what_they_are_at(call, verb, monkeypatch):
    out = Terminal()
    monkeypatch.setattr(phases, "_AFTER_S", 0.02)
    monkeypatch.setattr(sys, "stderr", out)
    foregrad.compile_times(clear=True)

    def slow(module, inputs):
        time.sleep(0.1)
        return module

    call(torch.sin, torch.ones(2, requires_grad=True), backend=slow)
    assert out.getvalue().startswith(f"foregrad: {verb} `sin` ...\n")
    assert "`sin` took" in out.getvalue()
    compiled = {"capture", "partition", "guards", "compile forward", "compile backward"}
    assert {entry.phase for entry in foregrad.compile_times().entries} <= compiled
