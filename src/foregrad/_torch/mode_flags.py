"""PyTorch's flags that some dispatch mode is on: the flags are per process, a mode is per thread.

Each mode restores the flags that it found. Two modes on two threads that exit in the order of their entry leave the
flags set, and Dynamo compiles nothing any more. `flags_kept` restores them once no thread is inside of it.
Checked on torch 2.11.0, 2.13.0.

Known weakness: a mode of the program's that is on in one thread meanwhile, and was not before, goes unseen then.
"""

from __future__ import annotations

from torch.utils import _python_dispatch

from ..locks import InPlace

__all__ = ["flags_kept"]

_NAMES = (
    "_is_in_torch_dispatch_mode",
    "_is_in_non_infra_torch_dispatch_mode",
    "_is_in_any_mode_without_ignore_compile_internals",
)
_TELL = "set_is_in_mode_without_ignore_compile_internals"
_clear: list[str] = []


def _note() -> None:
    _clear[:] = [name for name in _NAMES if vars(_python_dispatch).get(name) is False]


def _put_back() -> None:
    for name in _clear:
        setattr(_python_dispatch, name, False)
    if _NAMES[-1] in _clear:
        vars(_python_dispatch)[_TELL](False)


flags_kept = InPlace(_note, _put_back)
