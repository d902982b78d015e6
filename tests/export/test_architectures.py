"""Architectures, saved in one process and trained in another that can't import them: the same bits."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

import foregrad
from tests.export.architectures import ARCHITECTURES

HERE = pathlib.Path(__file__).parent
SOURCE = str(pathlib.Path(foregrad.__file__).parents[1])


def run(arguments, path, folder):
    done = subprocess.run(
        [sys.executable, "-P" if sys.version_info >= (3, 11) else "-s", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def reports(tmp_path, names):
    run(["-m", "tests.export.save_models", tmp_path, *names], os.pathsep.join([SOURCE, str(HERE.parents[1])]), tmp_path)
    said = run([HERE / "load_models.py", tmp_path], SOURCE, tmp_path)
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert sorted(report["name"] for report in found) == sorted(names)
    return found


@pytest.mark.slow
def test_architectures(tmp_path):
    """Losses, gradients, parameters and buffers of five steps; no class at hand; the size of the files."""
    for report in reports(tmp_path, list(ARCHITECTURES)):
        assert report["importable"] == [], report
        assert report["differing"] == [], report
        assert report["count"] > 10
        assert report["bytes"] <= report["allowed"], report


@pytest.mark.slow
def test_models_of_transformers(tmp_path):
    """Whose outputs are of classes that the second process does not know."""
    pytest.importorskip("transformers")
    for report in reports(tmp_path, ["zoo:gpt2", "zoo:bert", "zoo:llama"]):
        assert (report["importable"], report["differing"]) == ([], []), report
        assert report["bytes"] <= report["allowed"], report
