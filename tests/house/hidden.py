"""foregrad without an annex: `python -m tests.house.hidden ANNEX PROGRAM` hides the annex's files, then runs a program."""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any

from tests.house.subjects import PACKAGE, module_of, subject_of


class Hidden(importlib.abc.MetaPathFinder):
    """The modules of these annexes are not found."""

    def __init__(self, *annexes: str) -> None:
        self.modules = {module_of(path) for path in PACKAGE.rglob("*.py") if subject_of(path) in annexes}

    def find_spec(self, name: str, *_: Any) -> None:
        if name in self.modules:
            raise ModuleNotFoundError(f"No module named {name!r}: it is hidden", name=name)


if __name__ == "__main__":
    sys.meta_path.insert(0, Hidden(*sys.argv[1].split(",")))
    exec(compile(sys.argv[2], "<program>", "exec"), {"__name__": "program"})
