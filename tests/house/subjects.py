"""The subject of every source file: the core, or one of the annexes.

An annex is a subject beside ahead-of-time autograd itself. The core must not import an annex, and an annex imports no
annex but those in `ALLOWED`.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "foregrad"

# An annex is a folder of this name below src/foregrad, with its own door to private PyTorch (`_torch`). The patterns,
# paths below src/foregrad, name public modules of an annex and backends of the tools; `*` also matches a slash.
ANNEXES: dict[str, tuple[str, ...]] = {
    "python": (),
    "regions": (),
    "classes": (),
    "operators": (),
    "transforms": (),
    "distributed": (),
    "budget": (),
    "inductor": (),
    "dynamo": (),
    "store": (),
    "planning": (),
    "tools": ("testing.py", "logs.py", "backends/debugging.py", "backends/interpreter.py"),
    "fusion": (),
    "joints": ("descriptors.py", "_torch/descriptors.py"),
}

# Words by which a core file names an annex's subject, in code or text.
NAMED_BY = {
    "python": r"python_?state|program_?state|python_?write|\bdraw|\breads\b|journal|observe",
    "regions": r"eager_?region|hook|custom_?function",
    "classes": r"wrapper|jagged|torch_function",
    "operators": r"sparse|attention|packed|torchscript|higher_?order_?op",
    "transforms": r"transform|vmap|functorch|\bjvp",
    "distributed": r"collective|distributed|(?<![a-z])dtensor|checkpoint",
    "budget": r"budget",
    "inductor": r"inductor|repeat",
    "dynamo": r"dynamo",
    "store": r"artifact|(?<!functools\.)\bcached?\b|keeper",
    "planning": r"\bplanning\b|foregrad\.plan\b",
    "tools": r"explain|explanation|verif",
    "fusion": r"foregrad\.fusion|pictures? of graphs",
    "joints": r"descriptor",
}

# The doors load what they offer when it is first asked for: their imports are no arrows.
DOORS = ("__init__.py", "__main__.py")

ALLOWED = {
    ("store", "python"),
    ("tools", "store"),
    ("dynamo", "transforms"),
    ("regions", "python"),
}


def subject_of(path: Path) -> str:
    """The annex that a source file belongs to, or "core"."""
    name = path.relative_to(PACKAGE).as_posix()
    first = name.partition("/")[0].removesuffix(".py")
    if first in ANNEXES:
        return first
    return next((a for a, patterns in ANNEXES.items() if any(fnmatchcase(name, p) for p in patterns)), "core")


def module_of(path: Path) -> str:
    parts = ("foregrad", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(path: Path) -> str:
    """The folder directly below `src/foregrad` that holds a file, or "doors" for a file without a folder."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "doors"
