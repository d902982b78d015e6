"""A conformance suite's findings: a verdict for each case, and a table."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any


class CaseVerdict(enum.Enum):
    """The outcome of a case.

    `REFUSED`: the compiler raised an error for a graph; foregrad runs a refused graph on eager's kernels. `WRONG`: it
    compiled the graph, and the contract does not hold. `CRASHED`: the compiled graph raised an error, or the process
    ended or hung. `SKIPPED`: the case can't run here, for a reason that is no fault of the compiler.
    """

    PASSED = "passed"
    REFUSED = "refused"
    WRONG = "wrong"
    CRASHED = "crashed"
    SKIPPED = "skipped"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one case: its name, `group/what`, the verdict and why, the operator at fault where one is known.

    `graph`: "forward", "backward" or "inference", if one graph is at fault. `program`: the path of a program of a few
    operators that shows the fault.
    """

    case: str
    verdict: CaseVerdict
    detail: str = ""
    graph: str = ""
    operator: str = ""
    program: str | None = None
    seconds: float = 0.0

    @property
    def group(self) -> str:
        """The part of the suite that the case belongs to."""
        return self.case.partition("/")[0]

    @property
    def is_fault(self) -> bool:
        """Whether the compiler broke the contract: wrong or crashed."""
        return self.verdict in (CaseVerdict.WRONG, CaseVerdict.CRASHED)

    def to_json(self) -> dict[str, Any]:
        """The finding as plain data."""
        return {**dataclasses.asdict(self), "verdict": self.verdict.value}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """The finding that `to_json` wrote."""
        return cls(**{**data, "verdict": CaseVerdict(data["verdict"])})

    def __str__(self) -> str:
        graph = f", {self.graph} graph" if self.graph else ""
        lines = [f"{self.verdict.value}  {self.case}{graph}{f': {self.operator}' if self.operator else ''}"]
        lines += [f"    {line}" for line in self.detail.splitlines()[:_MOST_LINES]]
        return "\n".join([*lines, *([f"    {self.program} shows it by itself"] if self.program else [])])


class ConformanceError(AssertionError):
    """Raised by `ConformanceReport.raise_if_wrong`: the message is the report."""


@dataclasses.dataclass(frozen=True)
class ConformanceReport:
    """The suite's findings about a compiler or partitioner. `str()` is a table and the faults.

    `name`: the compiler's; `size`: the suite's; `findings`: in the suite's order; `seconds`: the suite's time.
    """

    name: str
    size: str
    findings: tuple[Finding, ...]
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong and nothing crashed. A refusal is no fault."""
        return not self.faults

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are wrong or crashed."""
        return tuple(finding for finding in self.findings if finding.is_fault)

    @property
    def counts(self) -> dict[str, int]:
        """How many cases have each verdict, by its name."""
        return _counts(self.findings)

    @property
    def groups(self) -> dict[str, dict[str, int]]:
        """`counts` for each part of the suite."""
        names = dict.fromkeys(finding.group for finding in self.findings)
        return {name: _counts([f for f in self.findings if f.group == name]) for name in names}

    def raise_if_wrong(self) -> None:
        """Raise `ConformanceError` with the report unless all is well."""
        if not self.ok:
            raise ConformanceError(str(self))

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "name": self.name,
            "size": self.size,
            "ok": self.ok,
            "counts": self.counts,
            "groups": self.groups,
            "findings": [finding.to_json() for finding in self.findings],
            "seconds": self.seconds,
        }

    def table(self) -> str:
        """The counts of each part of the suite, as text."""
        columns = [verdict.value for verdict in CaseVerdict]
        rows = [["", *columns]]
        rows += [[name, *(str(counts[c]) for c in columns)] for name, counts in self.groups.items()]
        rows.append(["all", *(str(self.counts[c]) for c in columns)])
        width = max(len(row[0]) for row in rows)
        return "\n".join(row[0].ljust(width) + "".join(cell.rjust(9) for cell in row[1:]) for row in rows)

    def __str__(self) -> str:
        said = "nothing is wrong" if self.ok else f"{len(self.faults)} cases are wrong or crash"
        lines = [f"{self.name}, {self.size} suite, {len(self.findings)} cases in {self.seconds:.0f} s: {said}", ""]
        lines.append(self.table())
        for title, findings in (("", self.faults), ("refused:", self._with(CaseVerdict.REFUSED))):
            lines += ["", title] if title and findings else [""] if findings else []
            lines += [str(finding) for finding in findings[:_MOST]]
            if len(findings) > _MOST:
                lines.append(f"... and {len(findings) - _MOST} more, see `findings`")
        skipped = dict.fromkeys(f"{finding.group}: {finding.detail}" for finding in self._with(CaseVerdict.SKIPPED))
        lines += ["", *(f"skipped: {text}" for text in skipped)] if skipped else []
        return "\n".join(lines)

    def _with(self, verdict: CaseVerdict) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.verdict is verdict)


_MOST, _MOST_LINES = 20, 6


def _counts(findings: Sequence[Finding]) -> dict[str, int]:
    return {verdict.value: sum(f.verdict is verdict for f in findings) for verdict in CaseVerdict}
