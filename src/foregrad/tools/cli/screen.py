"""The commands' display: a progress bar and a table, with rich where it is installed, else as plain text; or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

Advance = Callable[[int, str], None]
BAR_WIDTH = 24


class PlainScreen:
    """Plain text: a bar that redraws itself on a terminal; into a file or a pipe, one line for each tenth done."""

    def __init__(self, out: TextIO | None = None) -> None:
        self.out = out or sys.stdout

    def say(self, text: str) -> None:
        """Show one line."""
        print(text, file=self.out, flush=True)

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Advance]:
        """A progress bar for the length of a `with`; it gives a function of the count done and a remark."""
        redraw = self.out.isatty()

        def advance(done: int, remark: str) -> None:
            if redraw:
                bar = "#" * (BAR_WIDTH * done // total)
                self.out.write(f"\r{label} [{bar:.<{BAR_WIDTH}}] {done}/{total}  {remark}")
                self.out.flush()
            elif done in {1, total} or done % max(1, total // 10) == 0:
                self.say(f"{label} {done:>{len(str(total))}}/{total}  {remark}")

        try:
            yield advance
        finally:
            if redraw:
                self.out.write("\n")

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Show a table: the first column to the left, the rest to the right."""
        lines = [columns, *rows]
        widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
        rule = "-" * (sum(widths) + 3 * (len(widths) - 1))
        self.say(f"\n{title}\n{rule}")
        for number, line in enumerate(lines):
            first, *others = (
                cell.ljust(width) if at == 0 else cell.rjust(width)
                for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            self.say("   ".join([first, *others]).rstrip())
            if number == 0:
                self.say(rule)
        self.say(rule)


class _RichScreen:
    """A terminal that rich draws on."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console

        self.console = Console(file=out, highlight=False)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False)

    @contextmanager
    def progress(self, label: str, total: int) -> Iterator[Advance]:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[remark]}"), console=self.console) as bar:
            task = bar.add_task(label, total=total, remark="")
            yield lambda done, remark: bar.update(task, completed=done, remark=remark)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        from rich.table import Table
        from rich.text import Text

        table = Table(title=title, title_style="bold", title_justify="left")
        for at, column in enumerate(columns):
            table.add_column(column, justify="left" if at == 0 else "right")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self.console.print()
        self.console.print(table)


Screen = PlainScreen | _RichScreen


def choose_screen(*, plain: bool, out: TextIO | None = None) -> Screen:
    """Rich on a terminal when it is installed and not declined; plain text otherwise. `out`: by default stdout."""
    out = out or sys.stdout
    if plain or not out.isatty():
        return PlainScreen(out)
    try:
        return _RichScreen(out)
    except ImportError:
        return PlainScreen(out)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option `--json`."""
    parser.add_argument("--json", action="store_true", help="print one JSON value in place of text")


def print_json(value: Any) -> None:
    """Print a value for a program."""
    print(json.dumps(value, indent=2))
