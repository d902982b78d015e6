"""Random calls and changes, compiled and eager side by side: a few of what `python -m tests.guards.sequences` runs."""

from __future__ import annotations

import pytest

from tests.guards.sequences import judge


@pytest.mark.parametrize("seed", range(12))
def test_a_sequence_is_the_same_as_eager(seed):
    assert not judge(seed)
