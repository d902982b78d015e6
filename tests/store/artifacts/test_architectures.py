"""Architectures, saved in one process and trained in another that can't import them: the same bits."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

import foregrad
from tests import forked
from tests.store.artifacts.architectures import ARCHITECTURES

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


MODELS = ["zoo:gpt2", "zoo:bert", "zoo:llama"] if importlib.util.find_spec("transformers") else []


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """By name, what the second process says of each."""
    folder, names = tmp_path_factory.mktemp("saved"), [*ARCHITECTURES, *MODELS]
    saved = forked.run("tests.store.artifacts.save_models", str(folder), *names)
    assert saved.returncode == 0, saved.stderr[-3000:]
    said = run([HERE / "load_models.py", folder], SOURCE, folder)
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert sorted(report["name"] for report in found) == sorted(names)
    return {report["name"]: report for report in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name, reports):
    """Losses, gradients, parameters and buffers of five steps; no class at hand; the size of the files."""
    report = reports[name]
    assert report["importable"] == [], report
    assert report["differing"] == [], report
    assert report["count"] > 10
    assert report["bytes"] <= report["allowed"], report


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name, reports):
    """Whose outputs are of classes that the second process does not know."""
    report = reports[name]
    assert (report["importable"], report["differing"]) == ([], []), report
    assert report["bytes"] <= report["allowed"], report
