"""A conformance suite for compilers of graphs, and for partitioners.

`check_compiler(compiler)` hands a compiler the forward and backward graphs of operators, of small programs that each
show one need of a graph, and of models; it compares with eager. `check_partitioner(partition)` does so for a function
that splits joint graphs. Both give a `ConformanceReport`.

Example:
    >>> import foregrad
    >>> from foregrad.testing import check_compiler
    >>> print(check_compiler(foregrad.nop, only="calls/two calls*").counts)
    {'passed': 2, 'refused': 0, 'wrong': 0, 'crashed': 0, 'skipped': 0}
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .tools.conformance.check import check_compiler, check_partitioner
    from .tools.conformance.report import CaseVerdict, ConformanceError, ConformanceReport, Finding

__all__ = ["CaseVerdict", "ConformanceError", "ConformanceReport", "Finding", "check_compiler", "check_partitioner"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module `foregrad.testing` has no attribute `{name}`")
    home = "check" if name.startswith("check_") else "report"
    return getattr(importlib.import_module(f".tools.conformance.{home}", __package__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
