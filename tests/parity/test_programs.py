"""Random programs over aliasing tensors are the same compiled as eager, whatever is mutated, returned or overlaps.

`FOREGRAD_EXAMPLES` sets how many programs each test grows; `python -m tests.parity.fuzz` runs thousands without
hypothesis. A failure prints the program: put it into `regressions.py`.
"""

from __future__ import annotations

import collections
import logging
import os
import warnings

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.covering import ALL
from tests.parity.fuzz import GRAD_SLACK, is_fault, judge, smallest
from tests.parity.oracle import Mismatch, Refused, check
from tests.parity.program_ops import OPS
from tests.parity.programs import PROFILES, DrawnChooser, RandomChooser, grow, load, reduce
from tests.parity.regressions import REFUSED, REGRESSIONS
from tests.parity.stand_ins import BROKEN, identity

EXAMPLES = int(os.environ.get("FOREGRAD_EXAMPLES", "20" if ALL else "8"))


@st.composite
def programs(draw, profile):
    return grow(DrawnChooser(draw), PROFILES[profile])


def same_as_eager(program, compile=None):
    f, make_args = program.load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return check(f, make_args, compile=compile, grad_slack=GRAD_SLACK)


@pytest.mark.parametrize("profile", PROFILES)
def test_random_programs_are_the_same_as_eager(profile):
    """Values, gradients, mutations, aliasing, metadata, randomness and errors of random programs."""

    # Our own reduction takes seconds and knows what may go: hypothesis need not shrink.
    phases = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]

    @settings(max_examples=EXAMPLES, phases=phases, report_multiple_bugs=False, derandomize=True, database=None)
    @given(programs(profile))
    def run(program):
        verdict, _ = judge(program)
        if is_fault(verdict):
            small = smallest(program, verdict)
            pytest.fail(f"{verdict}\n\n{small}\n{judge(small)[1]}", pytrace=False)

    run()


@pytest.mark.parametrize("profile", PROFILES)
def test_no_program_differs(profile):
    """The same programs on every run; hardly any is refused."""
    verdicts = collections.Counter(judge(grow(RandomChooser(seed), PROFILES[profile]))[0] for seed in range(20))
    assert {verdict: count for verdict, count in verdicts.items() if is_fault(verdict)} == {}
    assert sum(count for verdict, count in verdicts.items() if verdict.startswith("Refused")) <= 1


@pytest.fixture
def texts_are_made():
    """Somebody listens to PyTorch's structured trace: the text of each stage is made, as with `TORCH_TRACE`."""
    listener = logging.NullHandler()
    logging.getLogger("torch.__trace").addHandler(listener)
    yield
    logging.getLogger("torch.__trace").removeHandler(listener)


@pytest.mark.usefixtures("texts_are_made")
@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_stored_program_is_the_same_as_eager(name):
    f, make_args = load(REGRESSIONS[name])
    check(f, make_args, grad_slack=GRAD_SLACK)


@pytest.mark.parametrize("name", REGRESSIONS)
def test_a_stored_program_is_the_same_as_itself(name):
    f, make_args = load(REGRESSIONS[name])
    check(f, make_args, compile=identity, strict_view=True, exact_versions=True)


@pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors")
@pytest.mark.parametrize("name", REFUSED)
def test_a_program_that_can_not_be_compiled_is_refused_by_name(name):
    message, source = REFUSED[name]
    f, make_args = load(source)
    with pytest.raises(Refused, match=message):
        check(f, make_args, grad_slack=GRAD_SLACK)


@pytest.mark.parametrize("profile", PROFILES)
def test_grown_programs_are_mostly_valid_and_the_oracle_passes_eager(profile):
    """Eager equals eager, and few programs are rejected: the search is not spent on errors."""
    grown = [grow(RandomChooser(seed), PROFILES[profile]) for seed in range(30)]
    verdicts = collections.Counter(same_as_eager(program, identity) for program in grown)
    assert verdicts["equal"] > 25


def test_every_op_of_the_table_is_used():
    """A few thousand steps use every op, so that none is dead in the table."""
    used = set()
    for number, profile in enumerate(PROFILES.values()):
        for seed in range(120):
            used |= {step.op for step in grow(RandomChooser(1000 * number + seed), profile).body}
    assert {op.name for op in OPS} - used == set()


@pytest.mark.parametrize("name", BROKEN)
def test_random_programs_catch_each_broken_compiler(name):
    """Within a few programs some output, mutation or gradient gives a broken compiler away."""
    for profile in PROFILES.values():
        for seed in range(30):
            try:
                same_as_eager(grow(RandomChooser(seed), profile), BROKEN[name])
            except Mismatch:
                return
    pytest.fail(f"{name} was not caught")


def test_a_failing_program_is_reduced_to_its_core():
    """Dropping steps while it still fails leaves the mutation that the broken compiler lost."""

    def fails(program):
        try:
            same_as_eager(program, BROKEN["mutate_too_much"])
        except Mismatch:
            return True
        except Exception:
            return False
        return False

    program = grow(RandomChooser(3), PROFILES["everything"])
    assert fails(program)
    small = reduce(program, fails)
    assert fails(small)
    assert len(small.body) == 0
