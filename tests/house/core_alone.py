"""A plugin for pytest: the core runs without its annexes. `make test-core` uses it.

One stays: each capture asks the annex "python" where the program reads its tensors.
"""

from __future__ import annotations

import sys

import pytest

from tests.house.hidden import Hidden
from tests.house.subjects import ANNEXES

REQUIRED = ("python",)
# Parts of the names of tests about hooks and custom Functions: the core refuses both.
OF_REGIONS = ("tensor_hook", "custom_function", "custom function", "as_in_eager[function-")


def pytest_load_initial_conftests() -> None:
    """Before any conftest imports foregrad."""
    sys.meta_path.insert(0, Hidden(*(annex for annex in ANNEXES if annex not in REQUIRED)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    owned = [item for item in items if any(part in item.name for part in OF_REGIONS)]
    config.hook.pytest_deselected(items=owned)
    items[:] = [item for item in items if item not in owned]
