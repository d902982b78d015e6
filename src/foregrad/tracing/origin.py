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
        self._last: tuple[Any, int, Origin] | None = None

    def here(self) -> Origin:
        frame: Any = sys._getframe(1)
        root, is_user, modules = self.root, _IS_USER, self.modules
        first: Any = None
        frames: list[tuple[CodeType, int]] = []
        while frame is not None:
            code = frame.f_code
            if code is root:
                break
            user = is_user.get(code)
            if user is None:
                user = is_user[code] = not code.co_filename.startswith(_NOT_THE_USERS)
            if user:
                line = frame.f_lineno
                if first is None:
                    # Several operators come from one line: while its frame is there, those below are where they were.
                    first, last = frame, self._last
                    if last is not None and last[0] is frame and last[1] == line:
                        return last[2]
                frames.append((code, line))
            frame = frame.f_back
        origin = Origin(tuple(frames), tuple(modules))
        if first is not None:
            self._last = (first, frames[0][1], origin)
        return origin

    def enter(self, name: str, kind: str) -> None:
        """A module's call begins; one line may call several, so what was found for the line no longer holds."""
        self.modules.append((name, kind))
        self._last = None

    def leave(self) -> None:
        self.modules.pop()
        self._last = None

    def forget(self) -> None:
        """Let go of the last frame, and with it of its variables."""
        self._last = None


# Whether a code object is the user's; bounded by the number of functions in the program.
_IS_USER: dict[CodeType, bool] = {}


def user_line(origin: Origin | None) -> str:
    """`file:line in function` of the innermost user frame, for error messages."""
    if origin is None or not origin.frames:
        return "<unknown line>"
    code, line = origin.frames[0]
    source = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}" + (f": {source}" if source else "")
