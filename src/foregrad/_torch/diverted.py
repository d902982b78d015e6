"""Functions of C that do something else for what is captured, by the C++ part. They stay the same objects under every
name, and no other thread sees a difference.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable
from types import BuiltinFunctionType
from typing import Any

from .native import native

__all__ = ["divert"]


def divert(function: Any, instead: Callable[..., Any], types: tuple[type, ...] | None, *, asked: bool = False) -> None:
    """From now on `instead` is called with the arguments, and the function itself where that gives `NotImplemented`.
    Without the C++ part nothing changes.

    `types`: only with such an argument, or with such an item in one. `asked`: only by code that is being captured.
    """
    module = _module()
    if module is not None and isinstance(function, BuiltinFunctionType):
        module.divert(function, instead, types, asked)


@functools.cache
def _module() -> Any:
    module = native()
    if module is not None:
        atexit.register(module.stop_diverting)  # then modules go before what is called in them
    return module
