"""What is known of a tangent before it comes: a derivative is compiled for each pattern of these."""

from __future__ import annotations

__all__ = ["ABSENT", "CONSTANT", "STOP", "VARIABLE"]

ABSENT, CONSTANT, VARIABLE = 0, 1, 2  # did not come in; came without requiring grad; requires grad
STOP = 3  # did not come in: what arrives at the output inside, of others, is asked for, and goes no further
