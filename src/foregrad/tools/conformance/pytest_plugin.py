"""A plugin of pytest: `pytest --foregrad-compiler=pkg:fn` adds a test for each case of the suite.

Nothing but pytest is imported until the option is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .cases import Case
    from .trial import TrialSubject


def pytest_addoption(parser: Any) -> None:
    """The options."""
    group = parser.getgroup("foregrad")
    what = "package.module:name or file.py:name"
    group.addoption("--foregrad-compiler", metavar="NAME", help=f"check a compiler of graphs: {what}, or a backend")
    group.addoption("--foregrad-partitioner", metavar="NAME", help=f"check a partition of joint graphs: {what}")
    group.addoption("--foregrad-size", default="short", choices=("short", "full"), help="size of foregrad's suite")
    group.addoption(
        "--foregrad-only", action="append", default=[], metavar="PATTERN", help=("only the cases with these names")
    )


def pytest_collection_modifyitems(session: Any, config: Any, items: list[Any]) -> None:
    """Add the cases to the tests that were found."""
    for kind in ("compiler", "partitioner"):
        name = config.getoption(f"--foregrad-{kind}", None)
        if name is not None:
            found = list(_items(session, config, kind, name))
            if not found:
                raise pytest.UsageError("foregrad's suite has no case with this name")
            items.extend(found)


def _items(session: Any, config: Any, kind: str, name: str) -> Iterator[Any]:
    from .cases import Selection
    from .check import subject_for

    try:
        subject = subject_for("partition" if kind == "partitioner" else kind, name)
        cases = Selection(config.getoption("--foregrad-size"), tuple(config.getoption("--foregrad-only"))).cases()
    except Exception as error:
        raise pytest.UsageError(f"--foregrad-{kind}: {error}") from error
    for case in cases:
        yield ConformanceItem.from_parent(session, name=f"{kind}[{case.name}]", case=case, subject=subject)


class ConformanceItem(pytest.Item):
    """A case of the suite as a test: skipped where the compiler refuses the graph."""

    def __init__(self, *, case: Case, subject: TrialSubject, **settings: Any) -> None:
        super().__init__(**settings)
        self.case, self.subject = case, subject

    def runtest(self) -> None:
        """Try the case."""
        from .report import CaseVerdict, ConformanceError
        from .trial import tried

        finding = tried(self.case, self.subject)
        if finding.is_fault:
            raise ConformanceError(str(finding))
        if finding.verdict is not CaseVerdict.PASSED:
            pytest.skip(f"{finding.verdict.value}: {finding.detail}")

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        """The finding alone."""
        from .report import ConformanceError

        return str(excinfo.value) if isinstance(excinfo.value, ConformanceError) else super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Where pytest says the test is."""
        return self.path, None, f"foregrad {self.name}"
