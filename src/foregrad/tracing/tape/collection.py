"""No garbage collection while a graph is built: everything made is kept, so there is nothing to find.

A capture allocates hundreds of thousands of small objects. Each few hundred objects make the collector walk the young
generation, and now and then everything that the process has imported: a third of the time for a large graph. Afterwards
they are old at once, unknown to the collector. Graphs are circles, so released graphs stay until everything is walked:
a capture that finds many such objects begins with a full walk.
"""

from __future__ import annotations

import gc

from ...locks import ProcessPatch

_MANY = 1_000_000  # some 100 MB

_ASKS_FOR_ONE = 64
_FEW = 10_000  # Python 3.12 has some hundreds in that generation; a program that freezes has all its modules there

_before: list[bool] = []
_frozen = False
_asks = 0
_grown_old = 0  # objects since everything was walked
_latest = 0  # those of the latest pause: a graph, whose backward is made next
_enough = _MANY  # or a third of the objects there then


def _pause() -> None:
    _before[:] = [gc.isenabled()]
    gc.disable()
    if (_before[0] or _has_frozen()) and not _walked_all():
        gc.collect(1)  # objects dropped before are neither kept with objects made from now on, nor the call's


def _walked_all() -> bool:
    """Walk everything if that is due."""
    global _grown_old, _latest, _enough
    if _grown_old - _latest < _enough:
        return False
    gc.collect()
    _grown_old, _latest, _enough = 0, 0, max(_MANY, len(gc.get_objects()) // 3)
    return True


def _go_on() -> None:
    if _before[0]:
        _let_grow_old()
        gc.enable()


_paused = ProcessPatch(_pause, _go_on)


def paused_collection() -> ProcessPatch:
    """Context: the collector is off, and as it was afterwards. For the whole process, but nothing else notices."""
    return _paused


def _let_grow_old() -> None:
    """No object is young any more: the collector would walk them all, twice, and find next to nothing."""
    global _grown_old, _latest
    if _has_frozen():
        gc.collect(0)
    else:
        _latest = gc.get_count()[0]
        _grown_old += _latest
        gc.freeze()
        gc.unfreeze()


def _has_frozen() -> bool:
    """Whether the program froze objects. They are counted by walking them all, so an answer holds for a while."""
    global _frozen, _asks
    if _asks % _ASKS_FOR_ONE == 0:
        _frozen = gc.get_freeze_count() > _FEW
    _asks += 1
    return _frozen


class Newborns:
    """The objects made since, while the collector is off: its youngest generation."""

    def __init__(self) -> None:
        _let_grow_old()
        self._collections = _collections()
        self._ids: set[int] | None = None

    def has(self, value: object) -> bool | None:
        """Whether an object is new; None: unknown."""
        if not gc.is_tracked(value):
            return True
        if _collections() != self._collections:
            return None
        if self._ids is None or id(value) not in self._ids:
            self._ids = {id(young) for young in gc.get_objects(generation=0)}
        return id(value) in self._ids


def _collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())
