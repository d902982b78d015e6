"""Pages in plain English: a word that stands for a noun makes a sentence be read twice."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.house.measure import PRONOUNS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_at_most_one_pronoun_in_a_hundred_words(page):
    text = _FENCED.sub("", page.read_text(encoding="utf-8"))
    words, found = len(text.split()), PRONOUNS.findall(text)
    assert len(found) <= max(1, words / 100), found
