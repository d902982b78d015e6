"""The command line: what it lists, what the demo shows and when it says no; and that the documentation is whole.

Most tests put a stand-in for the compiler in place, so that they are about the command alone; the last ones run it
for real.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import operator
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import fx, nn

import foregrad
from foregrad import errors
from foregrad.tools import cli
from foregrad.tools.cli import demo_package, screen

demo = demo_package()
measure, race, text = demo.measure, demo.race, demo.text

ROOT = Path(__file__).parents[3]
COMMANDS = ("bench", "build-native", "cache", "demo", "doctor", "explain", "inspect", "verify")


def a_graph(ops):
    """A graph with so many operators, and one unpacking, which is none."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    for _ in range(ops):
        x = graph.call_function(torch.sin, (x,))
    graph.output(graph.call_function(operator.getitem, (x, 0)))
    return fx.GraphModule(nn.Module(), graph)


class StandIn:
    """The public names that the demo calls, doing next to nothing."""

    def __init__(self, wrap=lambda module: module):
        self.wrap = wrap

    def install(self, monkeypatch):
        parts = SimpleNamespace(forward=a_graph(3), backward=a_graph(4), saved_bytes=5 * 2**20)
        monkeypatch.setattr(foregrad, "compile", lambda module, *, backend: self.wrap(module), raising=False)
        monkeypatch.setattr(foregrad, "capture", lambda fn, *args: a_graph(7), raising=False)
        monkeypatch.setattr(foregrad, "partition", lambda joint, policy: parts, raising=False)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command in this process: (exit code, what it printed)."""
    monkeypatch.setattr(demo, "GPTConfig", small_config)

    def run(*arguments):
        code = cli.main(list(arguments))
        return code, capsys.readouterr().out

    return run


def small_config():
    return demo.gpt.GPTConfig(context=16, layers=1, heads=2, width=16)


# ------------------------------------------------------------------------------------------------ the command
def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out.startswith("foregrad ")


def test_help_lists_only_what_exists(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    listed = capsys.readouterr().out
    assert all(name in listed for name in COMMANDS)
    assert "exit status" in listed


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert f"example: foregrad {command}" in said


def test_a_command_is_required(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([])
    assert stopped.value.code == 2
    assert "required" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--steps", "x"], ["--print", "nothing"], ["--seconds", "x"]])
def test_bad_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["demo", *arguments])
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_ctrl_c_ends_the_command_quietly(monkeypatch, capsys):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "read_sources", lambda: interrupt(None))
    assert cli.main(["demo"]) == 130
    assert "stopped" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------- the demo
def test_equal_runs_end_in_a_summary_and_exit_0(run, monkeypatch):
    StandIn().install(monkeypatch)
    code, out = run("demo", "--steps", "3", "--plain")
    assert code == 0
    assert "3 steps, eager against foregrad" in out
    table = {line.split("  ")[0].strip(): line.split()[-1] for line in out.splitlines() if line}
    assert table["steps"] == "3"
    assert table["bitwise equal"] == "yes"
    assert table["operators in the joint graph"] == "7"
    assert table["operators in the forward half"] == "3"
    assert table["operators in the backward half"] == "4"
    assert "5.00 MiB" in out
    assert out.splitlines()[-1].startswith("Equal bit for bit")


class OneMore(nn.Module):
    """Runs a module, and something besides."""

    def __init__(self, module, besides):
        super().__init__()
        self.module = module
        self.besides = besides

    def forward(self, *args):
        loss = self.module(*args)
        return self.besides(loss)


def draw_once(loss):
    torch.rand(1)
    return loss


@pytest.mark.parametrize(
    ("besides", "first"),
    [
        (lambda loss: loss * (1 + 1e-6), "the loss of step 1"),
        (draw_once, "the random state after step 1"),
        (lambda loss: loss.detach() + (loss - loss.detach()) * 0.5, "tensors at the end, the first: parameter"),
    ],
    ids=["values", "random numbers", "gradients"],
)
def test_a_difference_is_named_and_exits_1(run, monkeypatch, besides, first):
    """A wrong value, one random number too many, or a wrong gradient: each is found, by the place it shows first."""
    StandIn(lambda module: OneMore(module, besides)).install(monkeypatch)
    steps = "1" if "end" in first else "2"
    code, out = run("demo", "--steps", steps, "--plain")
    assert code == 1
    assert f"NOT EQUAL. First difference: {'' if 'end' in first else first}" in out
    assert first in out


def test_time_ends_the_training_early(run, monkeypatch):
    StandIn().install(monkeypatch)
    code, out = run("demo", "--steps", "500", "--seconds", "0", "--plain")
    assert code == 0
    assert "1 steps, eager against foregrad" in out
    assert "Stopped after 0 s (--seconds), at step 1 of 500." in out
    assert "first step, with the capture" in out
    assert "median" not in out


def test_the_summary_as_json(monkeypatch, capsys):
    """One value on standard output; the progress is on the other."""
    monkeypatch.setattr(demo, "GPTConfig", small_config)
    StandIn().install(monkeypatch)
    assert cli.main(["demo", "--steps", "2", "--json"]) == 0
    said = capsys.readouterr()
    summary = json.loads(said.out)
    assert (summary["steps"], summary["difference"]) == (2, None)
    assert summary["operators"] == {"joint": 7, "forward": 3, "backward": 4}
    assert "training 2/2" in said.err


def test_printing_a_stage_trains_nothing(run, monkeypatch):
    StandIn().install(monkeypatch)
    monkeypatch.setattr(race.Race, "run", None)
    code, out = run("demo", "--print", "joint")
    assert code == 0
    assert "torch.sin" in out or "GraphModule" in out


# ------------------------------------------------------------------------------------------------- its pieces
@pytest.mark.parametrize(
    ("left", "right", "same"),
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor(0.0), torch.tensor(-0.0), False),
        (torch.tensor(1.0), torch.tensor(1.0 + 2**-23), False),
        (torch.tensor([1.0]), torch.tensor(1.0), False),
        (torch.tensor(1), torch.tensor(1.0), False),
        (torch.ones(2, 3).t(), torch.ones(3, 2), True),
        (torch.ones(0), torch.ones(0), True),
    ],
)
def test_same_bits(left, right, same):
    """Equality of bits, not of numbers; strides are no bits."""
    assert race.same_bits(left, right) is same


def test_optimizer_state_is_compared():
    """Two runs that differ only in what the optimizer remembers are told apart."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    runners = []
    for name in ("eager", "foregrad"):
        twin = copy.deepcopy(model)
        runners.append(race.Runner.start(name, twin, lambda x, _, twin=twin: twin(x).sum(), rate=0.1, seed=0))
    result = race.Race(*runners)
    steps = result.run(lambda: (torch.ones(2, 3), torch.ones(1)), steps=1, seconds=60)
    assert next(steps) == 1
    state = runners[1].optimizer.state[runners[1].model.weight]
    state["exp_avg"].add_(1)
    assert list(steps) == []
    assert result.difference == "1 tensors at the end, the first: optimizer's exp_avg of weight"


def test_saved_bytes_count_each_storage_once_and_no_parameters():
    """sin saves its input, the product both of its own; the weight belongs to the caller."""
    weight = torch.ones(256, requires_grad=True)

    def call():
        x = weight.sin()  # saves weight
        return x * x[:128].repeat(2)  # saves x, and 1 KiB more

    assert measure.measure_saved_bytes(call, owned=[weight]) == 2 * 256 * 4
    assert measure.measure_saved_bytes(call, owned=[]) == 3 * 256 * 4


def test_batches_are_the_same_for_a_seed_and_leave_the_random_state_alone():
    before = torch.get_rng_state()
    draws = [text.Batches(bytes(range(200)), batch=2, context=8, seed=7).draw() for _ in range(2)]
    assert torch.equal(before, torch.get_rng_state())
    (tokens, targets), (tokens_again, _) = draws
    assert tokens.shape == targets.shape == (2, 8)
    assert torch.equal(tokens, tokens_again)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])


def test_a_text_too_short_is_refused():
    with pytest.raises(ValueError, match="too short"):
        text.Batches(b"ab", batch=1, context=2, seed=0)


def test_the_text_is_pythons_own_sources():
    sources = text.read_sources(10_000)
    assert len(sources) == 10_000
    assert b"import" in sources


def test_a_python_without_sources_reads_those_of_pytorch(monkeypatch, tmp_path):
    monkeypatch.setattr(text.sysconfig, "get_path", lambda name: str(tmp_path))
    assert b"torch" in text.read_sources(100_000)


class Terminal(io.StringIO):
    """A file that says it is a terminal."""

    def isatty(self):
        return True


def test_a_plain_bar_redraws_itself_on_a_terminal_and_writes_lines_elsewhere():
    for out, expected in ((Terminal(), "\rwork ["), (io.StringIO(), "work 20/20  done\n")):
        with screen.PlainScreen(out).progress("work", 20) as advance:
            for done in range(1, 21):
                advance(done, "done")
        assert expected in out.getvalue()
    assert len(out.getvalue().splitlines()) == 11


def test_a_terminal_without_rich_gets_plain_text(monkeypatch):
    monkeypatch.setattr(screen.sys, "stdout", Terminal())
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert isinstance(screen.choose_screen(plain=False), screen.PlainScreen)


def test_a_terminal_with_rich_gets_its_bar_and_table(monkeypatch):
    pytest.importorskip("rich")
    out = Terminal()
    monkeypatch.setattr(screen.sys, "stdout", out)
    chosen = screen.choose_screen(plain=False)
    assert not isinstance(chosen, screen.PlainScreen)
    chosen.say("[not markup]")
    with chosen.progress("work", 2) as advance:
        advance(2, "done")
    chosen.table("title", ("", "a"), [("row", "1 [x]")])
    for shown in ("[not markup]", "work", "2/2", "title", "row", "1 [x]"):
        assert shown in out.getvalue()


# ------------------------------------------------------------------------------------------ the documentation
def load_generator():
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_error_is_documented_as_its_docstring_says():
    """docs/errors.md lists each class of foregrad.errors, once, and is what docs/generate.py makes."""
    page = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
    headings = [line.removeprefix("## ") for line in page.splitlines() if line.startswith("## ")]
    assert sorted(headings) == sorted(f"`{name}`" for name in errors.__all__)
    assert page == load_generator().errors_page(), "run `make docs`"


# ----------------------------------------------------------------------------------------------- for real
@pytest.mark.parametrize("stage", ["joint", "forward", "backward", "runtime"])
def test_each_stage_prints_a_program(run, stage):
    """What `--print` shows is Python."""
    code, out = run("demo", "--print", stage)
    assert code == 0
    compile(out, stage, "exec")


def test_the_demo_is_equal_bit_for_bit():
    """The command itself, in a process of its own, on the model of its own size."""
    command = [sys.executable, "-m", "foregrad", "demo", "--steps", "5", "--plain"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("Equal bit for bit")
    assert done.stderr == ""


# Those for several processes are run in tests/distributed.
EXAMPLES = [path for path in sorted((ROOT / "examples").glob("*.py")) if "torchrun" not in path.read_text()]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run(example, capsys, monkeypatch, tmp_path):
    few = {"plan_70b": ["8"]}  # layers: a plan of all 80 takes fifteen seconds, and says no more
    monkeypatch.setattr(sys, "argv", [str(example), *few.get(example.stem, ())])
    monkeypatch.chdir(tmp_path)  # they draw pictures where they are run
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out
