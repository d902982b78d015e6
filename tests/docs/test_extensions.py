"""The programs of examples/extend, each an extension in one file outside the package, print what they say they print."""

from __future__ import annotations

import re
import runpy
import types
from pathlib import Path

import pytest

from foregrad import house
from foregrad.backends import registry
from foregrad.graph import call_effects
from foregrad.tracing import aspect as seam

PROGRAMS = sorted((Path(__file__).resolve().parents[2] / "examples" / "extend").glob("*.py"))
KINDS = {"aspect", "backend", "effect", "graph_pass", "guard", "partition", "watcher"}


@pytest.fixture
def nothing_stays(monkeypatch):
    """An extension is registered for the test alone."""
    seam.aspect_classes()
    monkeypatch.setattr(seam, "_classes", list(seam._classes))
    monkeypatch.setattr(call_effects, "KINDS", dict(call_effects.KINDS))
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))
    monkeypatch.setattr(house, "_codes", dict(house._codes))
    monkeypatch.setattr(house, "_extensions", dict(house._extensions))


def test_there_is_a_program_for_each_kind_of_extension():
    assert {path.stem for path in PROGRAMS} == KINDS


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_extension_prints_what_its_comments_say(path, nothing_stays, capsys):
    text = path.read_text()
    assert text.count("\n") <= 60
    expected = [found[1] for line in text.splitlines() if (found := re.search(r"\)  # (?!noqa|too)(.+)$", line))]
    runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == len(expected) >= 2
    for line, wanted in zip(printed, expected, strict=True):
        assert re.fullmatch(".+".join(map(re.escape, wanted.split("..."))), line), (line, wanted)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_an_extension_imports_nothing_private_of_foregrad(path):
    imported = re.findall(r"^(?:from|import) (foregrad[\w.]*)", path.read_text(), re.MULTILINE)
    assert imported
    assert set(imported) <= {"foregrad", "foregrad.errors", "foregrad.extend", "foregrad.partitioners"}


def test_the_names_of_the_seam_are_public_and_documented():
    from foregrad import extend

    for name in extend.__all__:
        value = getattr(extend, name)
        assert isinstance(value, types.FunctionType | type) or callable(value), name
        assert value.__doc__, name
