"""The documentation site builds without a network, has no broken link, and loads nothing from elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mkdocs", reason="the extra `docs` is not installed")
pytest.importorskip("mkdocstrings", reason="the extra `docs` is not installed")

ROOT = Path(__file__).resolve().parents[2]
LOADED = re.compile(r"<(?:script|img|link|iframe)\b[^>]*?\b(?:src|href)=[\"']?(https?://[^\"' >]+)")
HEADING = re.compile(r'<h3 id="foregrad\.([\w.]+)"')


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "DISABLE_MKDOCS_2_WARNING": "true", "NO_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built_and_none_is_broken(site):
    """`--strict` refuses a link to no page, to no heading, and a page that the navigation leaves out."""
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert {path for path in pages if not (site / path).exists()} == set()


def test_no_page_loads_anything_from_elsewhere(site):
    fetched = {found for page in site.rglob("*.html") for found in LOADED.findall(page.read_text(encoding="utf-8"))}
    assert fetched == set()


def test_every_public_name_is_in_the_reference(site):
    import foregrad

    shown = {name for page in (site / "api").glob("*.html") for name in HEADING.findall(page.read_text("utf-8"))}
    shown = {name.rpartition(".")[2] for name in shown}
    assert set(foregrad.__all__) - shown == {"config", "errors"}  # have pages of their own


def test_the_site_has_no_stray_files(site):
    assert {path.suffix for path in site.rglob("*") if path.is_file()} & {".py", ".pyc", ".md"} == set()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_search_works_from_disk(site):
    """With the theme's own script, in the frame that stands for a worker there."""
    command = ["node", str(Path(__file__).with_name("search_from_disk.js")), str(site), "recompile_limit"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert "api/config.html#foregrad.config.Config.recompile_limit" in done.stdout.splitlines()
