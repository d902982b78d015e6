"""Arguments and results of an operator, taken apart: tensors in lists, entries of several values."""

from __future__ import annotations

import operator
from typing import Any

import torch

from ..tape.opinfo import OpInfo
from ..tape.tape import Entry
from .alias import Value
from .recording import Recording

__all__ = ["as_entries", "as_tuple", "bind", "by_position", "flat_entries", "split", "tensors"]


def by_position(info: OpInfo, args: Any, kwargs: Any) -> dict[int, Any]:
    given = dict(enumerate(args))
    for i, name in enumerate(info.argument_names):
        if name in kwargs:
            given[i] = kwargs[name]
    return given


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors(item)]
    return []


def as_tuple(out: Any) -> tuple[Any, ...]:
    if out is None:
        return ()
    return tuple(out) if isinstance(out, (list, tuple)) else (out,)


def as_entries(rec: Recording, entry: Entry, result: Any) -> list[Any]:
    if isinstance(result, torch.Tensor):
        return [entry]
    parts: list[Any] = split(rec, entry)
    return parts


def split(rec: Recording, entry: Entry) -> Any:
    """An entry of several values as one entry each, nested as they are."""
    if not isinstance(entry.spec, tuple):
        return entry
    return [
        split(rec, rec.emit(operator.getitem, entry, i, spec=spec)) if spec is not None else None
        for i, spec in enumerate(entry.spec)
    ]


def flat_entries(values: Any) -> list[Entry]:
    flat: list[Entry] = []
    for value in values:
        if isinstance(value, Entry):
            flat.append(value)
        elif isinstance(value, list):
            flat.extend(flat_entries(value))
    return flat


def bind(rec: Recording, tensor: torch.Tensor, entry: Entry) -> None:
    rec.values[id(tensor)] = Value(tensor, entry, rec.spec_of(tensor))
