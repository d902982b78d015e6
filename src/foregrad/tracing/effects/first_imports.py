"""Modules that a function is the first to import: the call that does so is eager.

The code of a module runs once for the process. What it makes (tensors, counters, entries in a registry) is there to
stay, so it can be no part of a capture.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ...errors import EscapedTensorError
from ...frontend.libraries import is_outside

__all__ = ["FirstImports"]


class FirstImports:
    """A finder of modules that finds none: it refuses what the capturing thread is about to import."""

    def __init__(self, name: str, fail: Callable[[EscapedTensorError], Any]) -> None:
        self.name, self.fail = name, fail
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Context: the function runs."""
        sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            with contextlib.suppress(ValueError):
                sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> None:
        """The import system asks each finder for a module that is not loaded. The others know whether there is one."""
        if threading.get_ident() != self._thread or is_outside(name):
            return
        others = [finder for finder in sys.meta_path if not isinstance(finder, FirstImports)]
        if any(finder.find_spec(name, path, target) is not None for finder in others):
            self.fail(
                EscapedTensorError(
                    f"`{self.name}` is the first to import `{name}`, whose code runs once for the process: it is no "
                    "part of a graph. Import it before."
                )
            )
