"""`Verification`: the findings of `verify`, as a value and as text."""

from __future__ import annotations

import dataclasses
from typing import Any

from .compare import Verdict
from .locate import Culprit


class VerificationError(AssertionError):
    """Raised by `Verification.raise_if_wrong`: the message is the report.

    Example:
        >>> import foregrad
        >>> issubclass(foregrad.VerificationError, AssertionError)  # pytest reports a failure, not an error
        True
    """


@dataclasses.dataclass(frozen=True, slots=True)
class StageResult:
    """One stage by itself: its results beside the previous stage's. `worst`: the result that differs most."""

    name: str
    verdict: Verdict | None  # None: not compared, for the reason in `detail`
    detail: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Verification:
    """The result of comparing a compiled function with eager. `str()` is a report.

    `stages`: each by itself, in order; `differences`: visible differences, by name; `culprit`: the first
    operator that is wrong; `reproducer`: the path of a program that shows it. `seconds`: the whole time;
    `compile_seconds`: the time of the compilation.

    Example:
        >>> import torch, foregrad
        >>> found = foregrad.verify(torch.sin, torch.ones(3, requires_grad=True), backend="eager")
        >>> found.verdict.name, found.num_compared, found.to_json()["reproducer"]
        ('EQUAL', 2, None)
    """

    name: str
    backend: str
    order: int
    verdict: Verdict
    stages: tuple[StageResult, ...]
    differences: tuple[str, ...]
    num_compared: int
    culprit: Culprit | None = None
    stage: str | None = None
    reproducer: str | None = None
    seconds: float = 0.0
    compile_seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether results were compared, and are equal or different by rounding alone."""
        return self.verdict in (Verdict.EQUAL, Verdict.ROUNDING)

    def raise_if_wrong(self) -> None:
        """Raise `VerificationError` with the report unless all is well."""
        if not self.ok:
            raise VerificationError(str(self))

    def to_json(self) -> dict[str, Any]:
        """The findings as plain data."""
        culprit = self.culprit
        return {
            "name": self.name,
            "backend": self.backend,
            "order": self.order,
            "ok": self.ok,
            "verdict": str(self.verdict).lower(),
            "stages": [
                {"name": s.name, "verdict": None if s.verdict is None else str(s.verdict).lower(), "detail": s.detail}
                for s in self.stages
            ],
            "differences": list(self.differences),
            "compared": self.num_compared,
            "culprit": culprit
            and {
                "stage": self.stage,
                "node": culprit.node,
                "operator": culprit.operator,
                "line": culprit.where,
                "gap": str(culprit.gap),
                "ulps": culprit.gap.ulps,
                "operands": list(culprit.operands),
            },
            "reproducer": self.reproducer,
            "seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
        }

    def __str__(self) -> str:
        tail = {1: "values and gradients", 0: "values"}.get(self.order, f"values and gradients to order {self.order}")
        verdict = "; ".join((*self.differences, str(self.verdict))) if self.verdict is Verdict.NOTHING else self.verdict
        lines = [f"{self.name}, compiled with {self.backend}, against eager ({tail}): {verdict}"]
        if self.verdict is Verdict.NOTHING:
            return lines[0]
        lines += [f"  {stage.name:<26} {_verdict(stage)}" for stage in self.stages]
        lines += [f"  {line}" for line in self.differences[:_MOST]]
        if len(self.differences) > _MOST:
            lines.append(f"  ... and {len(self.differences) - _MOST} more")
        if self.culprit is not None:
            lines += self._of_culprit(self.culprit)
        took = f"{self.seconds:.1f} s ({self.compile_seconds:.1f} s to compile)"
        lines.append(f"  {self.num_compared} tensors compared in {took}")
        return "\n".join(lines)

    __repr__ = __str__

    def _of_culprit(self, culprit: Culprit) -> list[str]:
        lines = [f"  first operator that is wrong, in {self.stage}: {culprit.node} = {culprit.operator}"]
        lines += [f"    from {culprit.where}"] if culprit.where else []
        lines.append(f"    {culprit.gap}")
        lines += [f"    operand {operand}" for operand in culprit.operands]
        if self.reproducer is not None:
            size = culprit.piece.size if culprit.piece is not None else 0
            lines.append(f"  {self.reproducer} shows it by itself ({size} operator{'' if size == 1 else 's'})")
        elif self.stage == "capture":
            lines.append("  Its operators by themselves are captured right: it takes the function's Python to see it.")
        return lines


_MOST = 8


def _verdict(stage: StageResult) -> str:
    if stage.verdict is None:
        return f"not compared: {stage.detail}"
    return f"{stage.verdict}{f' ({stage.detail})' if stage.detail else ''}"
