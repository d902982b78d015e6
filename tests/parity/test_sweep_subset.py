"""A spread of the sweep's cases on every test run; all of them with `python -m tests.parity.sweep`."""

from __future__ import annotations

import pytest

from tests.parity import sweep
from tests.parity.cases import ERROR, PASSED, REFUSED, SKIPPED, WRONG, Case, module_cases, op_cases, run_case
from tests.parity.known import ALLOWED_REFUSALS, KNOWN
from tests.parity.stand_ins import BROKEN, identity, wrapper

SAMPLES = 2
BUDGET_S = 4.0

# Ops that an ahead-of-time compiler gets wrong first: views, mutation, randomness, reductions, several outputs.
ALWAYS = (
    "add as_strided bernoulli bmm cat clone complex copysign cumsum diagonal_scatter dropout einsum expand gather "
    "index_add index_put masked_fill matmul max_reduction_with_dim narrow nn.functional.batch_norm "
    "nn.functional.conv2d nn.functional.cross_entropy nn.functional.dropout nn.functional.embedding "
    "nn.functional.layer_norm nn.functional.scaled_dot_product_attention nn.functional.max_pool2d permute "
    "scatter_add select_scatter slice_scatter softmax sort split squeeze t topk transpose unbind unfold unsqueeze "
    "view view_as_complex where"
).split()


def op_subset() -> list[Case]:
    cases = list(op_cases(["float32", "int64"]))
    chosen = [c for c in cases if c.name in ALWAYS and (c.dtype == "float32" or c.variant == "in-place")]
    return list(dict.fromkeys(chosen + cases[3::50]))


def module_subset() -> list[Case]:
    return list(module_cases(["float32"]))[::9]


def judge(result) -> None:
    text = "\n".join(result.messages.values())
    if str(result.case) in KNOWN:
        pytest.xfail(KNOWN[str(result.case)])
    assert result.status not in (WRONG, ERROR), text
    assert result.status != REFUSED or set(result.reasons) <= ALLOWED_REFUSALS, text
    if result.status == REFUSED and PASSED not in result.counts:
        pytest.skip(f"refused: {', '.join(result.reasons)}")


@pytest.mark.parametrize("case", op_subset(), ids=str)
def test_op_is_the_same_as_eager(case):
    judge(run_case(case, limit=SAMPLES, budget_s=BUDGET_S))


@pytest.mark.parametrize("case", module_subset(), ids=str)
def test_module_is_the_same_as_eager(case):
    judge(run_case(case, limit=1, budget_s=BUDGET_S))


def test_the_sweep_tells_right_refused_and_wrong_apart():
    """One case, through compilers that are right, refuse, are wrong and fail."""

    class UnsupportedError(RuntimeError):
        pass

    def refuse(fn, args, kwargs):
        raise UnsupportedError("no")

    def fail(fn, args, kwargs):
        raise ZeroDivisionError("oops")

    case = Case("op", "sin", "in-place", "float32")
    statuses = [
        run_case(case, limit=1, compile=compile).status
        for compile in (identity, wrapper(refuse), BROKEN["drop_mutations"], wrapper(fail))
    ]
    assert statuses == [PASSED, REFUSED, WRONG, ERROR]


def test_the_sweep_command_runs_cases_in_workers(tmp_path, capsys):
    """The table, both files and the exit status, with a right and a wrong compiler."""
    files = ["--json", str(tmp_path / "sweep.json"), "--markdown", str(tmp_path / "SWEEP.md")]
    chosen = ["--op", "^(t|sin)$", "--limit", "1", "--jobs", "1"]
    assert sweep.main([*chosen, *files, "--stand-in", "identity"]) == 0
    assert "0 failed" in capsys.readouterr().out
    assert "op sin" not in (tmp_path / "SWEEP.md").read_text()
    assert sweep.main([*chosen, *files, "--stand-in", "other_values"]) == 1
    assert "op sin plain float32" in (tmp_path / "SWEEP.md").read_text()


def test_unwritten_memory_is_no_failure():
    for name in ("empty", "empty_like", "new_empty"):
        assert run_case(Case("op", name, "plain", "float32"), limit=2, compile=identity).status in (PASSED, SKIPPED)
