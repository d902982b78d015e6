"""Random programs over wrapper subclasses: equal to eager's, or refused by name."""

import pytest

from tests.covering import ALL

from .wrapper_programs import CLASSES, Program, judge

REFUSALS = (
    "a result is a view of",
    "a result is a plain tensor that is one of several views",
    "`requires_grad_()` ",
    "the gradient by it would miss",
    "puts a hook on ",
    "runs eagerly and can't be captured",
    "goes past the edges of its source",
)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind != "plain"])
def test_equal_or_refused_by_name(kind):
    said = {seed: judge(Program.drawn(seed, kind)) for seed in range(40 if ALL else 20)}
    assert [seed for seed, verdict in said.items() if verdict == "differs"] == []
    refused = [verdict for verdict in said.values() if verdict != "equal"]
    assert [verdict for verdict in refused if not any(text in verdict for text in REFUSALS)] == []
    assert len(refused) <= len(said) / 10
