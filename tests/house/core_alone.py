"""A plugin for pytest: the core runs without its annexes. `make test-core` uses it.

Still installed are the annexes that core files import: see arrows.txt.
"""

from __future__ import annotations

import sys

from tests.house.hidden import Hidden
from tests.house.subjects import ANNEXES

REQUIRED = ("python",)


def pytest_load_initial_conftests() -> None:
    """Before any conftest imports foregrad."""
    sys.meta_path.insert(0, Hidden(*(annex for annex in ANNEXES if annex not in REQUIRED)))
