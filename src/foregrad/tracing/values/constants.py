"""Values that depend on no input: computed while capturing when the program asks for them.

A mask built from `torch.arange`, a number read out of a configuration tensor: the entries they need are run for
real, on demand, and remembered.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._torch.symbols import has_symbolic
from ..heap.recording import Recording
from ..tape.tape import Entry, entries_in, map_entries

_LIMIT_BYTES = 1 << 28


def evaluate(recorder: Recording, func: Any, args: Any, kwargs: Any) -> tuple[bool, Any]:
    """(True, result of `func`) when none of its arguments depends on an input or a random number."""
    entry_args = recorder.to_entries(args)
    entry_kwargs = recorder.to_entries(kwargs)
    for entry in (*entries_in(entry_args), *entries_in(entry_kwargs)):
        if not is_constant(entry):
            return False, None
    with torch.no_grad():
        real_args = map_entries(entry_args, evaluate_entry)
        real_kwargs = map_entries(entry_kwargs, evaluate_entry)
        return True, func(*real_args, **real_kwargs)


def is_constant(entry: Entry) -> bool:
    """Whether the value of an entry depends on no input and no random number."""
    seen: set[Entry] = set()
    stack = [entry]
    while stack:
        entry = stack.pop()
        if entry in seen or entry.value is not None:
            continue
        seen.add(entry)
        if entry.target is None or entry.has_effect or not _has_few_bytes(entry.spec):
            return False
        if has_symbolic(entry.args) or has_symbolic(entry.kwargs):
            return False  # another length, another value
        stack.extend(entries_in(entry.args))
        stack.extend(entries_in(entry.kwargs))
    return True


def _has_few_bytes(spec: Any) -> bool:
    if isinstance(spec, tuple):  # of several results, one of which may be a list
        return all(map(_has_few_bytes, spec))
    return spec is None or (type(spec.nbytes) is int and spec.nbytes <= _LIMIT_BYTES)


def evaluate_entry(entry: Entry) -> Any:
    """The real value of an entry that `evaluate` found to be constant."""
    order: list[Entry] = []
    seen: set[Entry] = set()
    stack: list[tuple[Entry, bool]] = [(entry, False)]
    while stack:
        current, ready = stack.pop()
        if current.value is not None:
            continue
        if ready:
            order.append(current)
        elif current not in seen:
            seen.add(current)
            stack.append((current, True))
            stack.extend((e, False) for e in (*entries_in(current.args), *entries_in(current.kwargs)))
    for current in order:
        assert current.target is not None
        args = map_entries(current.args, lambda e: e.value)
        kwargs = map_entries(current.kwargs, lambda e: e.value)
        current.value = current.target(*args, **kwargs)
    return entry.value
