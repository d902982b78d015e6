"""A plugin for pytest: the core runs without its annexes, but for those named in `FOREGRAD_TEST_WITH`. `make test-core`
uses it.
"""

from __future__ import annotations

import os
import sys

import pytest

from tests.house.hidden import Hidden
from tests.house.subjects import ANNEXES

KEPT = os.environ.get("FOREGRAD_TEST_WITH", "").split(",")
# Parts of the names of tests about hooks and custom Functions: the core refuses both.
OF_REGIONS = ("tensor_hook", "custom_function", "custom function", "as_in_eager[function-")


def pytest_load_initial_conftests() -> None:
    """Before any conftest imports foregrad."""
    sys.meta_path.insert(0, Hidden(*(annex for annex in ANNEXES if annex not in KEPT)))


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Without Python's state, functions count as functions of their arguments: foregrad warns of that once."""
    config.addinivalue_line("filterwarnings", "ignore:this installation of foregrad has no part for Python's state")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    owned = [item for item in items if "regions" not in KEPT and any(part in item.name for part in OF_REGIONS)]
    config.hook.pytest_deselected(items=owned)
    items[:] = [item for item in items if item not in owned]
