"""Where in the user's program an operator comes from: source lines and module path."""

from __future__ import annotations

import dataclasses
import linecache
import re
import sys
from collections.abc import Mapping
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch.fx import traceback

from ...house import is_house_code

_LIBRARIES = (torch.__path__[0], "<frozen")


class _SourceLine(NamedTuple):
    """A function that is known by its name and file only."""

    co_filename: str
    co_name: str


@dataclasses.dataclass(slots=True, eq=False)
class Origin:
    """The stack of user frames, innermost first, and the path of modules that were running.

    `marked_call` is the number of the innermost call that ran of a function or module marked by `foregrad.region`.
    `metadata` is of the node that the innermost line stands for, in code made of a graph. `custom`: the program's note
    by `torch.fx.traceback.annotate`.
    """

    frames: tuple[tuple[CodeType | _SourceLine, int], ...]
    modules: tuple[tuple[str, str], ...]
    metadata: Mapping[str, Any] | None = None
    marked_call: int = 0
    custom: Mapping[str, object] | None = None

    def text(self) -> str:
        """As in a traceback, outermost first: the form that `node.meta["stack_trace"]` has."""
        lines = []
        for code, line in reversed(self.frames):
            lines.append(f'  File "{code.co_filename}", line {line}, in {code.co_name}')
            source = linecache.getline(code.co_filename, line).strip()
            if source:
                lines.append(f"    {source}")
        return "\n".join(lines)


Made = tuple[Origin | None, int | None, Any]  # see `Recorder.made`


class Origins:
    """Finds the current origin; one per capture. `root` is the code object where the user's program ends."""

    def __init__(self, root: CodeType) -> None:
        self.root = root
        self.modules: list[tuple[str, str]] = []
        self._marked_calls, self._calls = 0, [0]  # their count; of each call that runs, the innermost
        self._last: tuple[object, int, Origin] | None = None

    def here(self) -> Origin:
        frame: Any = sys._getframe(1)
        custom = traceback.current_meta.get("custom")
        root, is_user, modules = self.root, _IS_USER, self.modules
        first: Any = None
        metadata: Mapping[str, object] | None = None
        frames: list[tuple[CodeType | _SourceLine, int]] = []
        while frame is not None:
            code = frame.f_code
            if code is root:
                break
            known_code = is_user.get(id(code))
            if known_code is None:
                is_users = not (code.co_filename.startswith(_LIBRARIES) or is_house_code(code))
                known_code = is_user[id(code)] = (is_users, code)
            user = known_code[0]
            if user:
                line = frame.f_lineno
                if first is None:
                    # Several operators come from one line: while its frame is there, the frames below stay the same.
                    first, last = frame, self._last
                    if last is not None and last[0] is frame and last[1] == line and last[2].custom == custom:
                        return last[2]
                if user is True:
                    frames.append((code, line))
                elif (known := user.get(line)) is not None:
                    frames += known.frames
                    metadata = metadata or known.metadata
            frame = frame.f_back
        origin = Origin(tuple(frames), tuple(modules), metadata, self._calls[-1], custom and dict(custom))
        if first is not None:
            self._last = (first, first.f_lineno, origin)
        return origin

    def enter(self, name: str, kind: str, *, is_marked: bool) -> None:
        """A module's call begins."""
        self.modules.append((name, kind))
        self.begin(is_marked=is_marked)

    def leave(self) -> None:
        self.modules.pop()
        self.end()

    def begin(self, *, is_marked: bool = True) -> None:
        """A call begins; one line may have several, so facts found for the line no longer hold."""
        self._marked_calls += is_marked
        self._calls.append(self._marked_calls if is_marked else self._calls[-1])
        self._last = None

    def end(self) -> None:
        self._calls.pop()
        self._last = None

    def resume(self, root: CodeType) -> None:
        """The user's part of a stack ends at the frame of `root` from now on."""
        self.root = root

    def forget(self) -> None:
        """Let go of the last frame and its variables."""
        self._last = None


# Whether a code object is the user's, and the code object itself, which keeps its id its own; bounded by the number of
# functions in the program. By id: the hash of code hashes all its constants, anew each time. For code that was
# generated from the user's code: the user's frames for each line, innermost first.
_IS_USER: dict[int, tuple[bool | Mapping[int, Origin], CodeType]] = {}


def stands_for(code: CodeType, lines: Mapping[int, tuple[str, Mapping[str, object]]]) -> None:
    """Note that `code` was made of the user's: by line, the original stack (as in a traceback) and the node's facts."""
    origins = {
        line: Origin(
            tuple((_SourceLine(file, name), int(number)) for file, number, name in reversed(_FRAME.findall(trace))),
            (),
            metadata,
        )
        for line, (trace, metadata) in lines.items()
    }
    _IS_USER[id(code)] = (origins, code)


_FRAME = re.compile(r'File "([^"\n]*)", line (\d+), in ([^\n]*)')


def user_line(origin: Origin | None) -> str:
    """`file:line in function` of the innermost user frame, for error messages."""
    if origin is None or not origin.frames:
        return "a line outside the function"
    code, line = origin.frames[0]
    source = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}" + (f": {source}" if source else "")
