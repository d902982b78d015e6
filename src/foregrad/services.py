"""Services: modules that answer the spine for one subject. `foregrad.SERVICES` lists them by the subject's name.

The spine asks a service by name and never imports its module: a subject may be read, tested and replaced alone.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

_PACKAGE = __name__.partition(".")[0]


@functools.lru_cache(None)
def service(name: str) -> Any:
    """The module that answers for a subject. Raises `KeyError` for a subject that has none."""
    return importlib.import_module(importlib.import_module(_PACKAGE).SERVICES[name])
