"""Where in the user's program an operator comes from: source lines and module path."""

from __future__ import annotations

import linecache
import os
import sys
from types import CodeType
from typing import Any

import torch

__all__ = ["Origin", "Origins", "user_line"]

_OURS = os.path.dirname(__file__)
_NOT_THE_USERS = (torch.__path__[0], _OURS, os.path.join(os.path.dirname(_OURS), "_torch"), "<frozen")


class Origin:
    """The stack of user frames, innermost first, and the path of modules that were running."""

    __slots__ = ("frames", "modules")

    def __init__(self, frames: tuple[tuple[CodeType, int], ...], modules: tuple[tuple[str, str], ...]) -> None:
        self.frames = frames
        self.modules = modules

    def text(self) -> str:
        """As in a traceback, outermost first: the form that `node.meta["stack_trace"]` has."""
        lines = []
        for code, line in reversed(self.frames):
            lines.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}')
            source = linecache.getline(code.co_filename, line).strip()
            if source:
                lines.append(f"    {source}")
        return "\n".join(lines)


class Origins:
    """Finds the current origin; one per capture. `root` is the code object where the user's program ends."""

    def __init__(self, root: CodeType) -> None:
        self.root = root
        self.modules: list[tuple[str, str]] = []

    def here(self) -> Origin:
        frames = []
        frame: Any = sys._getframe(1)
        root, is_user = self.root, _IS_USER
        while frame is not None:
            code = frame.f_code
            if code is root:
                break
            user = is_user.get(code)
            if user is None:
                user = is_user[code] = not code.co_filename.startswith(_NOT_THE_USERS)
            if user:
                frames.append((code, frame.f_lineno))
            frame = frame.f_back
        return Origin(tuple(frames), tuple(self.modules))


# Whether a code object is the user's; bounded by the number of functions in the program.
_IS_USER: dict[CodeType, bool] = {}


def user_line(origin: Origin | None) -> str:
    """`file:line in function` of the innermost user frame, for error messages."""
    if origin is None or not origin.frames:
        return "<unknown line>"
    code, line = origin.frames[0]
    source = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}" + (f": {source}" if source else "")
