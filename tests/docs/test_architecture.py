"""The page on the architecture names files that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_files_that_the_page_names_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", page)) - {"passes/negations.py"}  # the example's own
    assert len(named) > 20
    roots = (ROOT / "src" / "foregrad", ROOT)
    assert {name for name in named if not any((root / name).exists() for root in roots)} == set()
