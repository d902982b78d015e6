"""A few captures beside threads that draw, forks and interrupts. `python -m tests.guards.stress` does hundreds."""

from __future__ import annotations

import pytest

from tests import forked


@pytest.mark.parametrize(("kind", "count"), [("draws", 2), ("forks", 4), ("calls", 12), ("interrupts", 6)])
def test_a_few(kind, count):
    """In a process of its own: it may hang, and is interrupted."""
    done = forked.run("tests.guards.stress", kind, "--count", str(count))
    assert done.returncode == 0, done.stdout + done.stderr
