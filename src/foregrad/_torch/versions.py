"""The versions of PyTorch that the tests run on, and the installed version."""

from __future__ import annotations

import functools
import operator
import re
import warnings

import torch

from ..errors import ForegradWarning

OLDEST, NEWEST = (2, 11), (2, 15)
"""The minor versions of PyTorch that the tests run on, the first and the last."""


def is_at_least(*version: int) -> bool:
    """Whether the installed PyTorch is this version, or a later version."""
    return bool(operator.ge(torch.__version__, version))


def untested(version: str | None = None) -> str | None:
    """The warning for a version of PyTorch (default: the installed one) without tests; None for tested versions."""
    text = torch.__version__ if version is None else version
    numbers = re.match(r"(\d+)\.(\d+)", text)
    minor = (int(numbers[1]), int(numbers[2])) if numbers else NEWEST
    if OLDEST <= minor <= NEWEST:
        return None
    tested = " to ".join(f"{major}.{minor}" for major, minor in (OLDEST, NEWEST))
    return (
        f"foregrad is tested with PyTorch {tested}, this is {text}: functions of PyTorch that have changed run "
        "eagerly or raise. `python -m foregrad doctor` lists the differences of this version."
    )


@functools.cache
def warn_if_untested() -> None:
    """Warn of an untested PyTorch, once in a process."""
    message = untested()
    if message is not None:
        warnings.warn(message, ForegradWarning, stacklevel=2)
