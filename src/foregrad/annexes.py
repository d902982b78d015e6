"""The annexes' gifts to the core.

An annex is a subject beside ahead-of-time autograd itself. The core imports none, and asks at a few seams.
`foregrad.ANNEXES` lists the objects at each seam, as entry points do: places `module:name`, loaded when first asked
for. A seam without its annex is empty: the core goes on without the subject, or refuses it by the seam's name.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

from .errors import UnsupportedError

_PACKAGE = __name__.partition(".")[0]
_ABSENT = object()


@functools.cache
def given(seam: str) -> tuple[Any, ...]:
    """The objects at a seam, in the order of the table; those of an annex that is not installed are left out."""
    places: Sequence[str] = importlib.import_module(_PACKAGE).ANNEXES[seam]
    return tuple(found for place in places if (found := _load(place)) is not _ABSENT)


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    try:
        loaded = importlib.import_module(module)  # waits while a second thread imports the module
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith(f"{_PACKAGE}."):
            raise
        return _ABSENT
    return getattr(loaded, name) if name else loaded


def the_one(seam: str) -> Any:
    """The object at a seam that holds one; `UnsupportedError` where it holds none."""
    if not (found := given(seam)):
        raise UnsupportedError(f"this installation of foregrad has no part for {seam}: install all of foregrad.")
    return found[0]
