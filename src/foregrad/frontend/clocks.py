"""Functions that give something else each time they are called, by name: random numbers, times, unique names."""

from __future__ import annotations

import datetime as dt
import os
import random
import secrets
import time
import uuid
from typing import Any

__all__ = ["CLOCKS", "DATES", "DRAWN", "NAMES_OF", "asks_for_date", "is_of_dates"]

NAMES_OF: dict[Any, list[str]] = {
    random: (
        "random uniform randint randrange getrandbits gauss normalvariate lognormvariate expovariate vonmisesvariate "
        "gammavariate betavariate paretovariate weibullvariate triangular _randbelow"
    ).split(),
    time: "time time_ns perf_counter perf_counter_ns monotonic monotonic_ns process_time process_time_ns".split(),
    uuid: "uuid1 uuid4".split(),
    secrets: "token_bytes token_hex token_urlsafe randbelow randbits choice".split(),
    os: ["urandom"],
}
CLOCKS = {getattr(time, name) for name in NAMES_OF[time] if hasattr(time, name)}
DATES = (dt, dt.datetime, dt.date)
_ASKED = {"now", "today", "utcnow"}

DRAWN: dict[int, str] = {
    id(getattr(module, name)): f"{module.__name__}.{name}"
    for module, names in NAMES_OF.items()
    for name in names
    if hasattr(module, name)
} | {id(value): value.__name__ for value in DATES}
"""By id, what people call them. Code may have them under a name of its own: `from time import time`."""


def is_of_dates(value: Any) -> bool:
    """Whether a value is `datetime.now` or the like."""
    return getattr(value, "__self__", None) in DATES[1:] and value.__name__ in _ASKED


def asks_for_date(names: set[str], imports: frozenset[tuple[str, int]]) -> bool:
    """Whether code with these names asks for the date by way of a module that it imports where it runs."""
    return ("datetime", 0) in imports and not _ASKED.isdisjoint(names)
