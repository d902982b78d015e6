"""The sweep's results as text: a summary for the screen, tables for a document."""

from __future__ import annotations

import collections
from typing import Any

from tests.parity.known import ALLOWED_REFUSALS, KNOWN

STATUSES = ("pass", "refused", "skip", "WRONG", "ERROR", "TIMEOUT", "CRASH")
BAD = ("WRONG", "ERROR", "TIMEOUT", "CRASH")


def failures(results: list[Any]) -> list[Any]:
    return [result for result in results if result.status in BAD]


def unexpected_refusals(results: list[Any]) -> list[Any]:
    """Refused for a reason that is none of the allowed ones."""
    return [r for r in results if r.status == "refused" and set(r.reasons) - ALLOWED_REFUSALS]


def counted(results: list[Any]) -> list[list[str]]:
    """Rows of the summary: a group of cases, then how many of each status, then the samples."""
    groups: dict[str, list[Any]] = collections.defaultdict(list)
    for result in results:
        groups[f"{result.case.kind} {result.case.variant} {result.case.dtype}"].append(result)
    if len(groups) > 1:
        groups["all"] = results
    rows = []
    for name, group in groups.items():
        by_status = collections.Counter(result.status for result in group)
        samples = sum(sum(result.counts.values()) for result in group)
        rows.append([name, str(len(group)), *(str(by_status[status]) for status in STATUSES), str(samples)])
    return rows


def reasons(results: list[Any], statuses: tuple[str, ...]) -> list[tuple[str, list[Any]]]:
    """Reason -> the cases that have it, most frequent first."""
    by_reason: dict[str, list[Any]] = collections.defaultdict(list)
    for result in results:
        if result.status in statuses:
            for reason in result.reasons:
                by_reason[reason].append(result)
    return sorted(by_reason.items(), key=lambda item: -len(item[1]))


def summary(results: list[Any], took_s: float) -> str:
    lines = [_row(["cases", "all", *STATUSES, "samples"])]
    lines += [_row(row) for row in counted(results)]
    for title, statuses in (("refused", ("refused",)), ("failed", BAD)):
        found = reasons(results, statuses)
        if not found:
            continue
        lines.append(f"\n{title}, by reason:")
        for reason, cases in found:
            names = ", ".join(f"{r.case.name}{'_' if r.case.variant == 'in-place' else ''}" for r in cases[:8])
            lines.append(f"  {len(cases):4}  {reason}: {names}{', ...' if len(cases) > 8 else ''}")
    bad = failures(results)
    known = [result for result in bad if str(result.case) in KNOWN]
    lines.append(f"\n{len(results)} cases in {took_s:.0f} s: {len(bad)} failed, {len(known)} of them known")
    refused = [r for r in unexpected_refusals(results) if str(r.case) not in KNOWN]
    if refused:
        lines.append(
            f"{len(refused)} refused for a reason that is not allowed: {', '.join(str(r.case) for r in refused)}"
        )
    return "\n".join(lines)


def _row(cells: list[str]) -> str:
    return f"{cells[0]:28}" + "".join(f"{cell:>9}" for cell in cells[1:])


def markdown(results: list[Any], took_s: float) -> str:
    """Counts, then each refused and each failed case with its reason."""
    head = ["cases", "all", *STATUSES, "samples"]
    lines = ["# Sweep: every op and module against eager", ""]
    lines += [_cells(head), "|" + " --- |" + " ---: |" * (len(head) - 1)]
    lines += [_cells(row) for row in counted(results)]
    lines += ["", f"{took_s:.0f} s. A case passes when all its samples do; it is refused when one sample is.", ""]
    for title, statuses in (("Refused", ("refused",)), ("Failed", BAD)):
        rows = [result for result in results if result.status in statuses]
        if not rows:
            continue
        lines += [f"## {title}", "", "| case | samples | reason |", "| --- | --- | --- |"]
        for result in rows:
            counts = ", ".join(f"{number} {status}" for status, number in result.counts.items())
            for reason in result.reasons:
                text = result.messages[reason].splitlines()
                said = " ".join(text[: 1 if title == "Refused" else 2])[:200].replace("|", "\\|")
                mark = f" (known: {KNOWN[str(result.case)]})" if str(result.case) in KNOWN else ""
                lines.append(f"| {result.case} | {counts} | {reason}: {said}{mark} |")
        lines.append("")
    truncated = [str(result.case) for result in results if result.truncated]
    if truncated:
        lines += ["## Cut short by the limit or the time", "", ", ".join(truncated), ""]
    return "\n".join(lines)


def _cells(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
