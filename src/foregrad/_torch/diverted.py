"""Functions of C that do something else for what is captured, by the C++ part. They stay the same objects under every
name, and no other thread sees a difference.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from typing import Any

from .native import native

__all__ = ["divert"]


def divert(function: Any, instead: Callable[..., Any], types: tuple[type, ...] | None, *, asked: bool = False) -> bool:
    """From now on `instead` is called with the arguments, and the function itself where that gives `NotImplemented`.
    False where the C++ part is not there: then nothing changes.

    `types`: only with such an argument, or with such an item in one. `asked`: only by code that is being captured.
    """
    module = _module()
    if module is not None:
        module.divert(function, instead, types, asked)
    return module is not None


@functools.cache
def _module() -> Any:
    module = native()
    if module is not None:
        atexit.register(module.stop_diverting)  # then modules go before what is called in them
    return module
