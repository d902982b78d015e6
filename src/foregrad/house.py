"""Whose code a frame, a file or a module is: foregrad's own, or the program's.

foregrad's own code includes the code that it renders, and the classes and modules that extend it from outside the
package (`foregrad.extend.register`). A capture looks past such code: its lines are not the user's, and its objects are
not the program's. `foregrad.examples` is a program like any other.
"""

from __future__ import annotations

import hashlib
import inspect
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, ModuleType

PACKAGE = os.path.dirname(__file__)
GENERATED = "<foregrad"  # the beginning of the file names of rendered code
_EXAMPLES = os.path.join(PACKAGE, "examples") + os.sep

_files: tuple[str, ...] = (PACKAGE + os.sep, GENERATED)
_modules: frozenset[str] = frozenset()
_codes: dict[int, CodeType] = {}  # of classes, by id: the hash of code is computed anew each time
_extensions: dict[str, str] = {}


def file_label(file: str) -> str:
    """A file as people know it: its name, after an installed package's name; or the number of a notebook's cell."""
    ipython = sys.modules.get("IPython")
    if ipython is not None:
        compiler = getattr(ipython.get_ipython(), "compile", None)
        named = getattr(compiler, "format_code_name", lambda _: None)(file)
        if named:
            return str(named[1])
    folder, _, name = file.replace("\\", "/").rpartition("/")
    package = re.search(r"/(?:site|dist)-packages/([^/]+)", folder)
    return f"{package[1]}/{name}" if package else name


def with_cells(text: str) -> str:
    """A message with notebook cells named by their numbers, in place of the files that the kernel writes."""
    return re.sub(r"\S*ipykernel_\d+\S*?\.py", lambda file: file_label(file[0]), text)


def is_house_file(file: str) -> bool:
    """Whether foregrad's own code is in the file."""
    return file.startswith(_files) and not file.startswith(_EXAMPLES)


def is_house_code(code: CodeType) -> bool:
    """Whether code is foregrad's own."""
    return id(code) in _codes or is_house_file(code.co_filename)


def is_house_module(name: object) -> bool:
    """Whether the module called `name` is foregrad's own."""
    text = str(name)
    return text.partition(".")[0] == "foregrad" or text in _modules


def is_program_module(name: object) -> bool:
    """Whether the module `name` is neither foregrad's own nor PyTorch's."""
    return str(name).partition(".")[0] != "torch" and not is_house_module(name)


def hide_own_frames(error: BaseException) -> None:
    """Take foregrad's frames out of the traceback of an error that other code raised, all but the outermost: it is
    handling the error.
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


def add_to_house(extension: ModuleType | type) -> None:
    """Count the code of an extension, a class or a whole module, as foregrad's own from now on.

    A capture then ignores the code's lines and the module's objects. Programs must not be in a registered module:
    foregrad would not guard the globals that they read. The rest of a registered class's file stays the program's.
    """
    global _files, _modules
    is_class = isinstance(extension, type)
    module = sys.modules.get(extension.__module__) if isinstance(extension, type) else extension
    if module is None or module.__name__.partition(".")[0] == "foregrad":
        return
    _extensions[extension_name(extension)] = _digest(getattr(module, "__file__", None))
    if is_class:
        _codes.update((id(code), code) for code in _codes_of(extension))
        return
    _modules |= {module.__name__}
    if module.__file__ is not None and module.__file__ not in _files:
        _files += (module.__file__,)


def extension_name(extension: ModuleType | type) -> str:
    """The name of a class or module that extends foregrad, for keys and files."""
    return f"{extension.__module__}.{extension.__qualname__}" if isinstance(extension, type) else extension.__name__


def extensions() -> Mapping[str, str]:
    """By name, a digest of the source of each class and module that extends foregrad from outside."""
    return dict(sorted(_extensions.items()))


def _digest(file: str | None) -> str:
    try:
        with open(file or "", "rb") as source:
            return hashlib.sha256(source.read()).hexdigest()
    except OSError:
        return os.urandom(16).hex()  # a class without a file equals no other process's


def _codes_of(cls: object) -> Iterator[CodeType]:
    waiting: list[object] = [inspect.unwrap(getattr(v, "__func__", getattr(v, "fget", v))) for v in vars(cls).values()]
    waiting = [getattr(function, "__code__", None) for function in waiting]
    while waiting:
        code = waiting.pop()
        if isinstance(code, CodeType):
            yield code
            waiting += code.co_consts
