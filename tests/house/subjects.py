"""The subject of every source file: the core, or one of the annexes.

An annex is a subject beside ahead-of-time autograd itself. The core must not import an annex, and an annex imports no
annex but those in `ALLOWED`. Until an annex has a folder of its own, its files are listed here; a folder directly below
`src/foregrad` with an annex's name belongs to that annex without a row.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "foregrad"

# Patterns are paths below src/foregrad; `*` also matches a slash.
ANNEXES: dict[str, tuple[str, ...]] = {
    "python": (
        "_torch/asked.py",
        "_torch/generators.py",
        "_torch/recurrent.py",
        "_torch/settings.py",
    ),
    "regions": (),
    "classes": (
        "_torch/function_classes.py",
        "_torch/jagged.py",
    ),
    "operators": (
        "_torch/control_flow.py",
        "_torch/jagged_attention.py",
        "_torch/torchscript.py",
    ),
    "transforms": ("_torch/transforms.py",),
    "distributed": (
        "graph/collective.py",
        "_torch/checkpoints.py",
        "_torch/distributed.py",
    ),
    "budget": (),
    "inductor": (
        "_torch/inductor.py",
        "_torch/kernels.py",
    ),
    "dynamo": ("dynamo.py", "backends/of_dynamo.py", "_torch/dynamo.py", "_torch/function_bodies.py"),
    "store": ("_torch/expressions.py",),
    "later": (),
    "planning": ("_torch/plans.py",),
    "tools": (
        "testing.py",
        "logs.py",
        "backends/debugging.py",
        "backends/interpreter.py",
        "_torch/testing.py",
        "_torch/tools.py",
    ),
    "fusion": ("fusion.py", "_torch/fusion.py"),
    "joints": ("descriptors.py", "_torch/descriptors.py", "_torch/local_map.py"),
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
    "later": r"process that compiles",
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
    ("joints", "dynamo"),  # a joint graph to be edited may come of Dynamo
    ("dynamo", "transforms"),
    # What another process compiles goes there as the store's data, under the settings in force, for Inductor.
    ("later", "store"),
    ("later", "python"),
    ("later", "inductor"),
    ("regions", "python"),
}


def subject_of(path: Path) -> str:
    """The annex that a source file belongs to, or "core"."""
    name = path.relative_to(PACKAGE).as_posix()
    first = name.partition("/")[0].removesuffix(".py")
    if first in ANNEXES:
        return first
    return next((a for a, patterns in ANNEXES.items() if any(fnmatchcase(name, p) for p in patterns)), "core")


def room_of(path: Path) -> str:
    """The folder directly below `src/foregrad` that holds a file, or "doors" for a file without a folder."""
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else "doors"
