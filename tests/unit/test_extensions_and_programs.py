"""The code of an extension is not the program's, even in one file with the program; keys and files know the extension."""

from __future__ import annotations

import dataclasses
import os
from typing import ClassVar

import pytest
import torch

import foregrad
from foregrad import house
from foregrad.extend import Aspect, CallEffect, CallGuard, CallPlace, aspect, view
from foregrad.graph import call_effects
from foregrad.store.cache import keeper
from foregrad.store.cache.store import Store
from foregrad.tracing import aspect as seam

SCALE = 2.0
PROCESSES: list[int] = []


@pytest.fixture
def register(monkeypatch):
    """Registers classes, for the test alone."""
    seam.aspect_classes()
    monkeypatch.setattr(seam, "_classes", list(seam._classes))
    monkeypatch.setattr(house, "_codes", dict(house._codes))
    monkeypatch.setattr(house, "_extensions", dict(house._extensions))
    return aspect


class Asking(Aspect):
    """Does what would refuse a capture, were it the program's doing: it asks for the process, in several forms."""

    def positive(self, function, args, kwargs):
        PROCESSES.append(os.getpid())
        return next(function(*args, **kwargs) for _ in [os.getpid()])

    functions: ClassVar = {torch.positive: positive}

    @staticmethod
    def asked():
        return os.getpid()

    def ran(self):
        PROCESSES.append(self.asked())


def test_what_an_aspect_asks_is_not_observed_as_the_program_s(register):
    register(Asking)
    compiled = foregrad.compile(lambda x: torch.positive(x) * 2, backend="eager", on_unsupported="raise")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert PROCESSES
    assert not [effect for effect in view(compiled).graphs[0].effects if effect.kind == "python"]


def test_a_program_in_the_file_of_an_aspect_is_guarded_as_ever(register, monkeypatch):
    register(Asking)
    compiled = foregrad.compile(lambda x: torch.positive(x) * SCALE, backend="eager", on_unsupported="raise")
    assert compiled(torch.ones(1)).item() == 2
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert compiled(torch.ones(1)).item() == 5
    assert len(view(compiled).graphs) == 2


THREADS = [4]


class Threads(Aspect):
    def guards(self, run):
        return [CallGuard("the number of threads", lambda: THREADS[0], THREADS[0])]


def test_a_guard_without_inputs_reads_the_process(register, monkeypatch):
    register(Threads)
    compiled = foregrad.compile(lambda x: x * 2, backend="eager", on_unsupported="raise")
    compiled(torch.ones(1))
    compiled(torch.ones(1))
    monkeypatch.setitem(globals(), "THREADS", [8])
    compiled(torch.ones(1))
    compiled(torch.ones(1))
    first, second = view(compiled).compilations
    assert "the number of threads" in second, (first, second)
    assert len(view(compiled).graphs) == 2


def test_a_guard_of_an_aspect_is_not_exported_without_a_word(register):
    register(Threads)
    with pytest.raises(foregrad.errors.UnsupportedError, match="the number of threads"):
        foregrad.export(torch.sin, (torch.ones(3),))


def test_names_and_digests_of_extensions_are_in_keys(register, tmp_path, monkeypatch):
    joint = foregrad.capture(torch.sin, torch.ones(3))
    kept = keeper.Keeper(Store(tmp_path, 1 << 20), dict)

    def key():
        return kept._key("halves", joint, joint.module, [])

    first = key()
    assert key() == first
    register(Asking)
    second, name = key(), f"{__name__}.Asking"
    assert first != second
    monkeypatch.setitem(house._extensions, name, "the digest of another source")
    assert key() not in (first, second)


@dataclasses.dataclass(frozen=True, slots=True)
class Noted(CallEffect):
    number: int
    place = CallPlace.LEFT
    storable = True

    def lines(self, writer):
        return [f"{writer.bind('noted', PROCESSES)}.append({writer.bind('number', self.number)})"]

    def __str__(self):
        return f"{self.number} is noted"


class Noting(Aspect):
    def effects(self, run):
        return [Noted(-3)]


def test_an_artifact_knows_the_source_of_its_effects(register, monkeypatch, tmp_path):
    register(Noting)
    file = tmp_path / "noted.foregrad"
    foregrad.export(torch.sin, (torch.ones(3),)).save(file)
    PROCESSES.clear()
    foregrad.load(file)(torch.ones(3))
    assert PROCESSES == [-3]
    monkeypatch.setitem(house._extensions, f"{__name__}.Noted", "another")
    with pytest.raises(foregrad.errors.ArtifactError, match=r"Noted, and the source differs"):
        foregrad.load(file)
    monkeypatch.delitem(call_effects.KINDS, f"{__name__}.Noted")
    with pytest.raises(foregrad.errors.ArtifactError, match="Noted"):
        foregrad.load(file)
