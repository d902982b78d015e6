"""What the package says of itself is what the project does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import foregrad

ROOT = Path(__file__).parents[2]


def test_the_citation_has_the_version_and_license():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.*)$", text, re.MULTILINE)[1] == foregrad.__version__
    assert "license: MIT" in text
    assert (ROOT / "LICENSE").read_text(encoding="utf-8").startswith("MIT License")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no tomllib")
def test_each_python_that_is_tested_is_a_classifier():
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    first, last = re.search(
        r"on each Python that is here, 3\.(\d+) to 3\.(\d+)", (ROOT / "Makefile").read_text()
    ).groups()
    assert named == [f"3.{minor}" for minor in range(int(first), int(last) + 1)]
    assert project["requires-python"] == f">=3.{first}"


def test_what_is_promised_of_loading_names_pages_that_are_there():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    for path in re.findall(r"\]\((docs/[\w.]+)", text):
        assert (ROOT / path).is_file()
    assert "#the-file" in text
    assert "## The file\n" in (ROOT / "docs" / "artifacts.md").read_text(encoding="utf-8")


def test_each_request_for_a_report_says_where_to_send_it():
    """There is no address that a file could name: it is where the reader got foregrad."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    asking = re.compile(r"report\s+(?:it|this)\b(?!-)[^\n]*\n?[^\n]*")
    found = [match[0] for file in files for match in asking.finditer(file.read_text(encoding="utf-8"))]
    assert len(found) > 5
    assert [text for text in found if "where you got foregrad" not in text and "#report-a-fault" not in text] == []
    page = (ROOT / "docs" / "howto" / "troubleshooting.md").read_text(encoding="utf-8")
    assert "## Report a fault\n\nReport a fault where you got foregrad" in page
