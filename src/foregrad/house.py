"""Whose code a frame, a file or a module is: foregrad's own, or the program's.

foregrad's own code includes the code that it renders and the modules that extend it from outside the package
(`foregrad.extend.register`). A capture looks past such code: its lines are not the user's, and its
objects are not the program's. `foregrad.examples` is a program like any other.
"""

from __future__ import annotations

import itertools
import os
import sys
from types import CodeType, ModuleType
from typing import Any

PACKAGE = os.path.dirname(__file__)
GENERATED = "<foregrad"  # the beginning of the file names of rendered code
_EXAMPLES = os.path.join(PACKAGE, "examples") + os.sep

_files: tuple[str, ...] = (PACKAGE + os.sep, GENERATED)
_modules: frozenset[str] = frozenset()


def file_label(file: str) -> str:
    """A file as people know it: its name without the folder, or the number of a notebook's cell."""
    ipython = sys.modules.get("IPython")
    if ipython is not None:
        compiler = getattr(ipython.get_ipython(), "compile", None)
        named = getattr(compiler, "format_code_name", lambda _: None)(file)
        if named:
            return str(named[1])
    return file.replace("\\", "/").rpartition("/")[2]


def is_house_file(file: str) -> bool:
    """Whether foregrad's own code is in this file."""
    return file.startswith(_files) and not file.startswith(_EXAMPLES)


def is_house_code(code: CodeType) -> bool:
    """Whether code is foregrad's own."""
    return is_house_file(code.co_filename)


def is_house_module(name: Any) -> bool:
    """Whether the module of this name, or of a `__module__`, is foregrad's own."""
    text = str(name)
    return text.partition(".")[0] == "foregrad" or text in _modules


def is_program_module(name: Any) -> bool:
    """Whether the module of this name is neither foregrad's own nor PyTorch's."""
    return str(name).partition(".")[0] != "torch" and not is_house_module(name)


def hide_own_frames(error: BaseException) -> None:
    """Take foregrad's frames out of the traceback of an error that other code raised, all but the outermost, which is
    handling it.
    """
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    if not frames or is_house_code(frames[-1].tb_frame.f_code):
        return  # an error of ours
    kept = [frames[0], *(frame for frame in frames[1:] if not is_house_code(frame.tb_frame.f_code))]
    for frame, inner in itertools.pairwise(kept):
        frame.tb_next = inner


def add_to_house(module: ModuleType) -> None:
    """Count the code of a module that extends foregrad as foregrad's own from now on.

    A capture then takes neither the module's lines nor its objects for the program's.
    """
    global _files, _modules
    _modules |= {module.__name__}
    if module.__file__ is not None and module.__file__ not in _files:
        _files += (module.__file__,)
