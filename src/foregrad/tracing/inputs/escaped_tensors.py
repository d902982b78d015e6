"""Tensors of a capture that the function leaves in objects that outlive the call: caches, states, results on `self`.

They stand for values that are never computed. When the capture is over they are taken out again and what was there
before is put back. Where the function looked at such a place before it wrote there (a cache to be filled, a state to be
carried on), its first run tells nothing about its next: `EscapedTensorError`. A place that is only written to is one
that compiled calls leave alone. A place that holds the stand-in of the very tensor that was there is as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...frontend.expected import ABSENT
from ...frontend.opaque import is_cached_function
from ...frontend.reads import Reads, ReadSite, items_in
from ...subclasses.spec import is_of_capture
from .cached_results import cached_functions, take_out

__all__ = ["EscapedTensors"]


class EscapedTensors:
    """What one capture leaves behind, by way of what was read and of the modules that ran."""

    def __init__(self, reads: Reads) -> None:
        self.reads = reads
        self._before: dict[int, tuple[torch.nn.Module, dict[str, Any], dict[str, Any]]] = {}

    def enter(self, module: torch.nn.Module) -> None:
        """A module runs."""
        if id(module) not in self._before and id(module) not in self.reads.made_here:
            table = object.__getattribute__(module, "__dict__")
            self._before[id(module)] = (module, dict(table), dict(_buffers(table)))

    def take_back(self, real_of: Callable[[Any], Any], *, is_whole: bool) -> tuple[list[str], list[str]]:
        """Put back what was there; the names of places that were looked at first, and of those only written to.

        `real_of(tensor)` is what a stand-in stands for. `is_whole`: the capture came to its end, and `reads` knows all
        that was looked at.
        """
        looked_at: list[str] = []
        for place in self.reads.places.values():
            looked_at += _take_back(place, real_of)
        cached = cached_functions()
        if not is_whole:
            cached.find()
        looked_at += cached.take_out(_is_ours)
        written: list[str] = []
        for module, table, buffers in self._before.values():
            own = object.__getattribute__(module, "__dict__")
            for now, before in ((own, table), (_buffers(own), buffers)):
                for name in [name for name, value in now.items() if _is_ours(value)]:
                    _put(now, name, before.get(name, ABSENT))
                    written.append(f"{type(module).__name__}.{name}")
        self.reads.release()
        return looked_at, written


def _buffers(table: dict[str, Any]) -> Any:
    """Those in the `__dict__` of a module. A traced module has none there: another module holds its state."""
    return table.get("_buffers", {})


def _take_back(place: ReadSite, real_of: Callable[[Any], Any]) -> list[str]:
    if place.kind == "asked" and is_cached_function(place.holder):
        return [f"the cache of {place.name}"] if take_out(place.holder, _is_ours) else []
    if place.kind not in ("dict", "list", "object"):
        return []
    found = []
    for key, expected in list(place.items.items()):
        before, now = expected.before(), place.look(key)
        if _is_ours(now) and not _is_ours(before):
            put = _put_attribute if place.kind == "object" else _put
            put(place.holder, key, before)
            if not (isinstance(before, torch.Tensor) and real_of(now) is before):
                found.append(place.path(key))
    for key in sorted(place.appeared(), key=str):
        if _is_ours(place.look(key)):
            _put(place.holder, key, ABSENT)
            found.append(place.path(key))
    if place.keys is not None:
        items = items_in(place.holder)[len(place.keys) if place.kind == "list" else 0 :]
        added = [key for key, item in items if key not in place.items and _is_ours(item)]
        for key in reversed(added):
            _put(place.holder, key, ABSENT)
        found += [place.path(key) for key in added]
    return found


def _put(holder: Any, key: Any, value: Any) -> None:
    if value is ABSENT:
        del holder[key]
    else:
        holder[key] = value


def _put_attribute(holder: Any, name: str, value: Any) -> None:
    if value is ABSENT:
        delattr(holder, name)
    else:
        setattr(holder, name, value)


def _is_ours(value: Any, depth: int = 3) -> bool:
    """Whether it is a tensor of a capture, or a container made in one."""
    if isinstance(value, torch.Tensor):
        return is_of_capture(value)
    if depth and type(value) in (tuple, list, dict):
        return any(_is_ours(item, depth - 1) for item in (value.values() if type(value) is dict else value))
    return False
