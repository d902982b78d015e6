"""The rendered runtime of ordinary functions, as text, and how often a capture runs each of them: once, but for one.

`FOREGRAD_UPDATE_GOLDEN=1 python -m pytest tests/golden` writes the texts anew: read what changed.
"""

from __future__ import annotations

import os
import pathlib

import pytest

import foregrad
import foregrad.tracing.capture
from tests.golden.functions import FUNCTIONS

HERE = pathlib.Path(__file__).parent
TEXTS = HERE / "texts"


@pytest.fixture
def runs(monkeypatch):
    """How often each capture ran the function."""
    counted = []
    run = foregrad.tracing.capture.run_function

    def counting(*args):
        counted.append(args[0])
        return run(*args)

    monkeypatch.setattr(foregrad.tracing.capture, "run_function", counting)
    return counted


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_ordinary_function_renders_to_its_text_after_one_run(name, runs):
    function, args = FUNCTIONS[name]()
    with foregrad.config.override(native=False, check=True):
        compiled = foregrad.compile(function, backend="eager")
        compiled(*args)
    (specialization,) = compiled.foregrad.specializations
    text = specialization.source().replace(f"{HERE}{os.sep}", "")
    path = TEXTS / f"{name}.txt"
    if os.environ.get("FOREGRAD_UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
    assert len(runs) == 1


def test_every_text_belongs_to_a_function():
    assert {path.stem for path in TEXTS.glob("*.txt")} == set(FUNCTIONS)
    assert len(FUNCTIONS) >= 40
