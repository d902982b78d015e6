"""A plugin for pytest: the core runs without its annexes, but for those named in `FOREGRAD_TEST_WITH`. `make test-core`
uses it.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.house.hidden import Hidden
from tests.house.subjects import ANNEXES


def pytest_load_initial_conftests() -> None:
    """Before any conftest imports foregrad."""
    kept = os.environ.get("FOREGRAD_TEST_WITH", "").split(",")
    sys.meta_path.insert(0, Hidden(*(annex for annex in ANNEXES if annex not in kept)))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Without Python's state, functions count as functions of their arguments: foregrad warns of that once."""
    config.addinivalue_line("filterwarnings", "ignore:this installation of foregrad has no part for Python's state")
