"""A few captures beside threads that draw, forks and interrupts. `python -m tests.guards.stress` does hundreds."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("kind", "count"), [("draws", 2), ("forks", 8), ("calls", 25), ("interrupts", 12)])
def test_a_few(kind, count):
    """In a process of its own: it may hang, and is interrupted."""
    command = [sys.executable, "-m", "tests.guards.stress", kind, "--count", str(count)]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
