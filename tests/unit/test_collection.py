"""The collector rests while a graph is built; what was made meanwhile is old afterwards, and nothing of the program's is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from foregrad.tracing.tape import collection
from foregrad.tracing.tape.collection import Newborns, paused_collection


class _Node:
    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(collection, "_ASKS_FOR_ONE", 1)
    monkeypatch.setattr(collection, "_frozen", collection._frozen)
    gc.unfreeze()  # as the run of tests does
    gc.collect()
    yield
    assert gc.isenabled()
    gc.freeze()


def _young() -> set[int]:
    return {id(value) for value in gc.get_objects(generation=0)}


def test_what_is_made_meanwhile_is_not_young_afterwards() -> None:
    with paused_collection():
        assert not gc.isenabled()
        made = [[i] for i in range(10_000)]
    assert not any(id(one) in _young() for one in made)
    assert gc.get_freeze_count() < 10_000


def test_what_the_program_let_go_of_before_is_collected() -> None:
    gone = weakref.ref(_Node())
    with paused_collection():
        assert gone() is None


def test_what_the_program_froze_stays_frozen() -> None:
    kept = [_Node()]
    gc.freeze()
    with paused_collection():
        Newborns()
    assert gc.get_freeze_count() > collection._FEW
    assert not any(each is kept for each in gc.get_objects())  # which lists nothing that is frozen


def test_newborns_are_what_is_made_since() -> None:
    with paused_collection():
        old = [_Node()]
        newborns = Newborns()
        new = [_Node()]
        assert newborns.has(old) is False
        assert newborns.has(new) is True


def test_what_was_let_go_of_when_old_is_collected_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropped graphs: a program that compiles in a loop would keep them all."""
    monkeypatch.setattr(collection, "_MANY", 1000)
    monkeypatch.setattr(collection, "_enough", 1000)
    monkeypatch.setattr(collection, "_grown_old", 0)
    monkeypatch.setattr(collection, "_latest", 0)
    with paused_collection():
        nodes = [_Node() for _ in range(10_000)]
    gone = weakref.ref(nodes[0])
    del nodes
    gc.collect(1)
    with paused_collection():  # of the backward, which the graph that was made before needs
        assert gone() is not None
    with paused_collection():
        assert gone() is None
