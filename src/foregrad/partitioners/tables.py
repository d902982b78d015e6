"""Tables of reports, as plain text or for rich; bytes and counts as people read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """A table: the first `right` columns are numbers; `left_out` more rows are not shown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    left_out: int = 0
    right: int = 1

    def __str__(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(self.columns))]
        text = [self.title]
        for line in lines:
            cells = [
                cell.rjust(width) if at < self.right else cell.ljust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            ]
            text.append("  " + "  ".join(cells).rstrip())
        if self.left_out > 0:
            text.append(f"  and {self.left_out} more")
        return "\n".join(text)

    def rich(self) -> Any:
        """The table as rich draws it."""
        from rich.table import Table as RichTable
        from rich.text import Text

        caption = f"and {self.left_out} more" if self.left_out > 0 else None
        table = RichTable(title=self.title, title_justify="left", caption=caption, caption_justify="left")
        for at, column in enumerate(self.columns):
            table.add_column(column, justify="right" if at < self.right else "left", overflow="fold")
        for row in self.rows:
            table.add_row(*map(Text, row))
        return table


def in_bytes(count: int) -> str:
    """Bytes with a unit."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def amount(count: float) -> str:
    """A count with a prefix: 3.2 G."""
    for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {prefix}"
    return f"{count:.0f} "
