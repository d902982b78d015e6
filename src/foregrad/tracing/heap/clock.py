"""The one clock of a capture: every view taken, and everything that happens in place, has its own time."""

from __future__ import annotations

import itertools

__all__ = ["now"]

now = itertools.count(1).__next__
"""The next sequence number: of a view that is taken, of something that happens in place."""
