"""Each block of Python on each page runs, and prints what the page says it prints."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest

from foregrad.backends import registry

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OF_FOREGRAD = ("eager", "nop")


def load_generator():
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generate = load_generator()
PAGES = ["README.md", *sorted(f"docs/{path.relative_to(DOCS)}" for path in DOCS.rglob("*.md"))]
SHOWING = [page for page in PAGES if generate.EXAMPLE.search((ROOT / page).read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", SHOWING)
def test_the_code_on_a_page_runs(page, monkeypatch, tmp_path):
    if library := generate.NEEDS.get(page.removeprefix("docs/")):
        pytest.importorskip(library)
        warnings.simplefilter("ignore")  # the libraries' own
    text = (ROOT / page).read_text(encoding="utf-8")
    # Backends that other tests registered are on no page, and those of a page are in no other test.
    monkeypatch.setattr(registry, "_backends", {name: registry._backends[name] for name in OF_FOREGRAD})
    monkeypatch.chdir(tmp_path)
    filled = generate.fill(text)
    if page.removeprefix("docs/") in generate.PAGES:
        assert filled == text, "run `make docs`"
