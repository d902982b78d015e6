"""The page on the architecture names files that there are."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_files_that_the_page_names_exist():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    assert len(named) > 20
    roots = (ROOT / "src" / "foregrad", ROOT)
    assert {name for name in named if not any((root / name).exists() for root in roots)} == set()


def test_the_excerpts_on_the_page_stand_in_the_programs():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    programs = {path.name: path.read_text() for path in (ROOT / "examples" / "extend").glob("*.py")}
    excerpts = re.findall(r"^```py\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(excerpts) == len(programs)
    assert [excerpt for excerpt in excerpts if not any(excerpt in program for program in programs.values())] == []
    assert [name for name in programs if f"`examples/extend/{name}`" not in page] == []
