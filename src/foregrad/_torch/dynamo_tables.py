"""Dynamo's tables of functions, which it makes when it first needs them. Checked on torch 2.13.0.

The tables hold torch's functions by identity. A table that another thread makes while a capture has some of these
replaced would hold the replacements for the rest of the process: Dynamo would break graphs without need.
"""

from __future__ import annotations

import builtins
import functools
import sys
from typing import Any

__all__ = ["forget_replacements", "note_tables"]

_RULES = "torch._dynamo.trace_rules"
_MODULES = (
    _RULES,
    "torch.overrides",
    *(f"torch._dynamo.variables.{name}" for name in ("torch", "builder", "builtin", "functions", "tensor")),
)
_Cache = type(functools.cache(lambda: None))
_tables: dict[str, list[Any]] = {}  # the loaded tables, by module
_made: set[int] = set()


def note_tables() -> None:
    """Note the tables made so far; called before functions are replaced."""
    _made.clear()
    for name in _MODULES:
        _made.update(id(table) for table in _tables_of(name) if _is_made(table))


def forget_replacements() -> None:
    """Drop the tables made meanwhile, which Dynamo then makes anew; called after functions are restored."""
    for name in _MODULES:
        for table in _tables_of(name):
            if _is_made(table) and id(table) not in _made:
                table.cache_clear()
    by_id: Any = getattr(sys.modules.get(_RULES), "_builtin_function_ids", None)
    if by_id is not None and by_id.function_ids is not None:  # may have the id of a replacement
        by_id.add(id(builtins.print))


def _is_made(table: Any) -> bool:
    return bool(table.cache_info().currsize)


def _tables_of(name: str) -> list[Any]:
    if name in _tables:
        return _tables[name]
    module = sys.modules.get(name)
    if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
        return []
    owners = (module, *(value for value in list(vars(module).values()) if isinstance(value, type)))
    values = [value for owner in owners for value in list(vars(owner).values())]
    plain = [value.__func__ if isinstance(value, staticmethod | classmethod) else value for value in values]
    _tables[name] = list({id(value): value for value in plain if isinstance(value, _Cache)}.values())
    return _tables[name]
