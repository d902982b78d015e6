"""One message while a call compiles for long, for who sits before it."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from ..config import config

__all__ = ["told_when_slow"]

_AFTER_S = 2.0
_thread = threading.local()


def _is_wanted() -> bool:
    wanted: bool | None = config.progress
    if wanted is not None:
        return wanted
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it is closed
        return False


@contextlib.contextmanager
def told_when_slow(name: str) -> Iterator[None]:
    """Context: what is compiled for `name`, by the outermost of nested calls."""
    if getattr(_thread, "is_told", False) or not _is_wanted():
        yield
        return
    said = threading.Event()

    def say() -> None:
        said.set()
        print(
            f"foregrad: compiling `{name}`, for the first call or one of a new kind; later calls are quick ...",
            file=sys.stderr,
            flush=True,
        )

    timer = threading.Timer(_AFTER_S, say)
    timer.daemon = True
    begin = time.perf_counter()
    _thread.is_told = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _thread.is_told = False
        if said.is_set():
            print(
                f"foregrad: `{name}` was compiled in {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True
            )
