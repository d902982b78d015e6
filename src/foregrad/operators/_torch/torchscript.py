"""TorchScript inside of captured functions: no recorder sees its plans run. Checked on torch 2.13.0."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import UnsupportedOpError
from ...locks import Bind


def install(bind: Bind, is_capturing: Callable[[], bool]) -> None:
    """In a capture, calls of TorchScript are refused."""
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        bind(kind, "__call__", _refused(kind.__call__, is_capturing))


def _refused(original: Any, is_capturing: Callable[[], bool]) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_capturing() or _is_of_cpp(self):
            return original(self, *args, **kwargs)
        raise UnsupportedOpError(
            f"the function calls `{self.name}` of TorchScript; a capture can't look inside. Use the Python source, or "
            "call it in a function that `foregrad.eager_region` marks."
        )

    return call


def _is_of_cpp(function: Any) -> bool:
    """Whether a method belongs to a class in C++, without a graph."""
    try:
        return isinstance(function, torch._C.ScriptMethod) and function.graph is None
    except RuntimeError:
        return True
