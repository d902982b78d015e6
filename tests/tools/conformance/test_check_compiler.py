"""`check_compiler` finds each planted fault, names it, and writes a program that shows it; a right compiler passes."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import foregrad
from foregrad.errors import UnsupportedError
from foregrad.testing import CaseVerdict, ConformanceError, ConformanceReport, check_compiler, check_partitioner
from foregrad.tools import cli
from foregrad.tools.conformance.cases import Case, CaseProgram, Selection
from foregrad.tools.conformance.check import subject_for
from foregrad.tools.conformance.command import add_check_compiler, add_check_partitioner
from foregrad.tools.conformance.trial import tried
from tests.tools.conformance import planted

HERE = Path(__file__).parent
SMALL = ["gradients/None*", "calls/*", "arguments/*", "random/*", "writes/*", "threads/*", "symbolic sizes/e*"]


def name(function):
    return f"{HERE / 'planted.py'}:{function.__name__}"


def fails(program):
    """Whether a program that shows a fault does so."""
    return subprocess.run([sys.executable, program], check=False, capture_output=True, timeout=300).returncode != 0


@pytest.mark.parametrize("compiler", [planted.right, foregrad.nop, "eager"])
def test_a_right_compiler_passes(compiler):
    report = check_compiler(compiler, only=SMALL)
    assert report.ok, str(report)
    assert report.counts["passed"] == len(report.findings) > 20


# By planted compiler: a case that finds it, the verdict, and words of the finding.
FOUND = {
    planted.gelu_by_tanh: ("gradients/None for a frozen weight", CaseVerdict.WRONG, "aten.gelu.default"),
    planted.drops_none_gradients: (
        "gradients/None first",
        CaseVerdict.WRONG,
        "2 results, and the compiled graph gives 1",
    ),
    planted.keeps_its_arguments: ("arguments/are let go", CaseVerdict.WRONG, "keeps 2 of the 2 arguments"),
    planted.overwrites_its_arguments: (
        "arguments/stay as they are",
        CaseVerdict.WRONG,
        "writes to its argument primals_1",
    ),
    planted.uses_its_memory_again: ("calls/results stay as they are", CaseVerdict.WRONG, "memory"),
    planted.mistakes_a_size_for_a_constant: ("calls/two calls with other values", CaseVerdict.WRONG, "elements differ"),
    planted.seeds_by_itself: ("random/a seed gives the same numbers", CaseVerdict.WRONG, "two seeds give one result"),
    planted.refuses_softmax: ("symbolic sizes/attention", CaseVerdict.REFUSED, "aten._softmax.default"),
    planted.refuses_constants: ("constants/tensors of the program's own", CaseVerdict.REFUSED, "no constants"),
    planted.raises_when_called: ("dtypes/double", CaseVerdict.CRASHED, "aten.cumsum.default"),
}


@pytest.mark.parametrize("compiler", FOUND, ids=lambda compiler: compiler.__name__)
def test_a_planted_fault_is_found_and_named(compiler, tmp_path):
    case, verdict, words = FOUND[compiler]
    report = check_compiler(compiler, only=case, folder=str(tmp_path))
    (finding,) = report.findings
    assert finding.verdict is verdict, str(report)
    assert words in str(finding)
    assert report.ok == (verdict is CaseVerdict.REFUSED)
    assert finding.program is not None
    assert Path(finding.program).is_relative_to(tmp_path)


@pytest.mark.parametrize(
    "compiler",
    [planted.gelu_by_tanh, planted.drops_none_gradients, planted.refuses_constants],
)
def test_the_program_of_a_finding_shows_the_fault_by_itself(compiler, tmp_path):
    (finding,) = check_compiler(compiler, only=FOUND[compiler][0], folder=str(tmp_path)).findings
    assert fails(finding.program)


def test_the_program_has_the_operator_at_fault_alone(tmp_path):
    (finding,) = check_compiler(planted.refuses_softmax, only="symbolic sizes/attention", folder=str(tmp_path)).findings
    text = Path(finding.program).read_text()
    assert text.count("torch.ops.aten.") == 1
    assert "torch.ops.aten._softmax.default" in text


def test_an_operator_of_pytorchs_database_is_checked_in_the_dtypes_asked_for():
    report = check_compiler(foregrad.nop, only="operators/mul *", dtypes=("complex64", "float64"))
    assert [finding.case for finding in report.findings] == ["operators/mul complex64", "operators/mul float64"]
    assert report.ok, str(report)


@pytest.mark.parametrize(
    ("case", "verdict"),
    [
        ("native_group_norm float32", "passed"),  # the kernel raises an error for strided arguments
        ("linalg.eig float32", "passed"),  # the loss depends on a phase, and the kernel says so
        ("nn.functional.ctc_loss float32", "passed"),  # a result has memory that the kernel leaves unwritten
        ("nn.functional.fractional_max_pool3d float32", "passed"),  # no fake kernel for the backward
        ("sparse.sampled_addmm float32", "skipped"),
    ],
)
def test_a_fault_of_eager_is_none_of_the_compiler(case, verdict):
    report = check_compiler(foregrad.nop, only=f"operators/{case}", size="full")
    assert report.counts[verdict] == 1, str(report)


def test_an_error_that_eager_does_not_raise_is_a_fault():
    def raising(gm, inputs):
        def run(*args):
            raise RuntimeError("no such kernel")

        return run

    (finding,) = check_compiler(raising, only="operators/native_group_norm float32", size="full").findings
    assert finding.verdict is CaseVerdict.CRASHED
    assert "no such kernel" in finding.detail


def test_the_written_results_of_a_kernel_with_gaps_are_compared():
    def shifted(gm, inputs):
        def run(*args):
            first, *others = gm(*args)
            return [first + 1, *others]

        return run

    (finding,) = check_compiler(shifted, only="operators/nn.functional.ctc_loss float32", size="full").findings
    assert finding.verdict is CaseVerdict.WRONG


def test_what_foregrad_does_not_capture_is_skipped_by_name():
    def seeds(x):
        import torch

        torch.manual_seed(0)
        return x * 2

    import torch

    case = Case("own/seeds", lambda: [CaseProgram(seeds, (torch.ones(2),))])
    with pytest.raises(UnsupportedError):
        foregrad.aot_function(seeds, foregrad.nop)(torch.ones(2))
    finding = tried(case, subject_for("compiler", foregrad.nop))
    assert finding.verdict is CaseVerdict.SKIPPED
    assert "seeds" in finding.detail


# -------------------------------------------------------------------- partitions


def test_a_right_partition_passes():
    report = check_partitioner(planted.partition_that_is_right, only=["gradients/*", "views/*"])
    assert report.ok, str(report)


def test_a_partition_that_changes_a_gradient_is_found(tmp_path):
    only = "layouts/transposed"
    (finding,) = check_partitioner(planted.partition_that_loses_a_sine, only=only, folder=str(tmp_path)).findings
    assert finding.verdict is CaseVerdict.WRONG
    assert finding.operator == "aten.mul.Tensor"  # which gets the wrong factor
    assert Path(finding.program).read_text().count("torch.ops.aten.") == 2  # that factor is computed there


def test_a_partition_that_raises_an_error_refuses():
    (finding,) = check_partitioner(planted.partition_that_refuses, only="layouts/transposed").findings
    assert finding.verdict is CaseVerdict.REFUSED
    assert "no split for this graph" in finding.detail


# -------------------------------------------------------------------- child processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        (planted.ends_the_process, "SIGSEGV"),
        (planted.stands_still, "still ran after 15 s"),
        (planted.exits_while_it_compiles, "exit status 3"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_process_that_ends_is_a_finding_and_the_suite_goes_on(compiler, words, tmp_path):
    only = ["dtypes/double", "dtypes/cast and back"]
    timeout = 15.0 if compiler is planted.stands_still else 120.0
    report = check_compiler(name(compiler), only=only, isolated=True, timeout=timeout, folder=str(tmp_path))
    first, second = report.findings
    assert first.verdict is CaseVerdict.CRASHED
    assert words in first.detail
    assert "aten.cumsum.default" in Path(first.program).read_text()
    assert second.verdict is CaseVerdict.PASSED, str(report)


@pytest.mark.slow
def test_a_child_process_takes_complex_numbers(tmp_path):
    """Ahead of each graph it writes a program with the inputs."""
    report = check_compiler("eager", only="operators/fft.fft float64", size="full", isolated=True, folder=str(tmp_path))
    assert report.counts["passed"] == 1, str(report)


def test_a_compiler_without_a_name_is_not_isolated():
    with pytest.raises(ValueError, match="has no name that a child process can import"):
        check_compiler(lambda gm, inputs: gm, only="sizes/*", isolated=True)


# -------------------------------------------------------------------- reports, names


def test_a_report_is_a_table_and_plain_data():
    report = check_compiler(planted.refuses_softmax, only="symbolic sizes/*")
    assert report.counts == {"passed": 3, "refused": 1, "wrong": 0, "crashed": 0, "skipped": 0}
    assert report.groups == {"symbolic sizes": report.counts}
    data = json.loads(json.dumps(report.to_json()))
    assert data["ok"] is True
    assert [finding["verdict"] for finding in data["findings"]].count("refused") == 1
    assert "symbolic sizes        3        1        0        0        0" in str(report)
    report.raise_if_wrong()


def test_a_report_with_a_fault_raises():
    report: ConformanceReport = check_compiler(planted.drops_none_gradients, only="gradients/None first")
    with pytest.raises(ConformanceError, match="gradients/None first, backward graph"):
        report.raise_if_wrong()


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"size": "huge"}, "short"), ({"dtypes": ("float31",)}, "float31"), ({"only": "nothing/*"}, "no case nothing")],
)
def test_a_wrong_argument_is_an_error_that_names_it(settings, words):
    with pytest.raises(ValueError, match=words):
        check_compiler(foregrad.nop, **{"only": "sizes/*", **settings})


def test_what_can_not_be_called_is_no_compiler():
    with pytest.raises(TypeError, match="a compiler is a function, not 3"):
        check_compiler(3)


def test_names_of_cases_are_told_apart():
    names = [case.name for case in Selection(only=("[!om]*",)).cases()]
    assert len(names) == len(set(names))


# -------------------------------------------------------------------- the command, the plugin


def run(*arguments):
    return cli.main(arguments, more=(add_check_compiler, add_check_partitioner))


def test_the_command_prints_json_and_gives_its_status(capsys):
    more = ["--only", "gradients/None first", "--in-process", "--json"]
    assert run("check-compiler", name(planted.right), *more) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["passed"] == 1
    assert run("check-compiler", name(planted.drops_none_gradients), *more) == 1
    assert json.loads(capsys.readouterr().out)["findings"][0]["verdict"] == "wrong"
    assert run("check-partitioner", name(planted.partition_that_is_right), *more) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["no_such_module:f"],
        ["tests.tools.conformance.planted:no_such_name"],
        ["no_such_backend"],
        ["eager", "--only", "no/case"],
    ],
)
def test_the_command_names_a_wrong_argument(arguments, capsys):
    assert run("check-compiler", *arguments, "--in-process") == 2
    assert capsys.readouterr().err.startswith("foregrad: ")


def pytest_with(*options):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "foregrad.tools.conformance.pytest_plugin",
        "-p",
        "no:cacheprovider",
    ]
    command += ["-o", "addopts=", "--rootdir", str(HERE), "-c", "/dev/null", *options]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300, env=environment, cwd=HERE)


@pytest.mark.slow
def test_the_plugin_adds_a_test_for_each_case(tmp_path):
    only = ["--foregrad-only", "gradients/None f*", str(tmp_path)]
    right = pytest_with(f"--foregrad-compiler={name(planted.right)}", *only)
    assert right.returncode == 0, right.stdout + right.stderr
    assert "3 passed" in right.stdout
    wrong = pytest_with(f"--foregrad-compiler={name(planted.drops_none_gradients)}", *only)
    assert wrong.returncode == 1
    assert "wrong  gradients/None first, backward graph" in wrong.stdout
    nothing = pytest_with("--foregrad-compiler=no_such_module:f", *only)
    assert nothing.returncode == 4
    assert "no_such_module" in nothing.stderr + nothing.stdout


def test_the_plugin_imports_nothing_heavy_until_it_is_asked():
    code = "import sys, foregrad.tools.conformance.pytest_plugin; print('torch' in sys.modules, 'foregrad.tools.conformance.trial' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("value", [foregrad.testing, check_compiler, check_partitioner], ids=lambda v: v.__name__)
def test_the_example_of_a_public_name_runs(value):
    (example,) = doctest.DocTestFinder(recurse=False).find(value, module=False, globs={})
    assert example.examples
    assert doctest.DocTestRunner().run(example).failed == 0


# ------------------------------------------------------------------------------------------- several cases in one graph


def test_operators_share_a_graph_until_one_is_wrong():
    graphs = []

    def counting(gm, inputs):
        graphs.append(gm)
        return planted.gelu_by_tanh(gm, inputs)

    right = check_compiler(counting, only=["operators/s[iu][ngm]* float32"])
    assert right.ok
    assert len(right.findings) > len(graphs) > 0  # a forward and a backward, for all
    report = check_compiler(counting, only=["operators/nn.functional.[gs]* float32"])
    (fault,) = report.faults
    assert fault.case == "operators/nn.functional.gelu float32"
    assert fault.operator == "aten.gelu.default"
    assert report.counts["passed"] == len(report.findings) - 1 > 2
    assert fails(fault.program)


def test_a_child_that_ends_at_a_shared_graph_tries_each_case():
    only = ["operators/cumsum float32", "operators/su[bm] float32"]
    report = check_compiler(name(planted.exits_while_it_compiles), only=only, isolated=True)
    assert [fault.case for fault in report.faults] == ["operators/cumsum float32"]
    assert report.counts == {"passed": 2, "refused": 0, "wrong": 0, "crashed": 1, "skipped": 0}
