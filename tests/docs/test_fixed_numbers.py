"""The table of fixed numbers in docs/limits.md has the numbers of the sources."""

import importlib
import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
NAMES = {
    "containers and plain objects": "frontend.tree._MOST_CONTAINERS",
    "numbers in a tuple or list": "python.reads._MOST_TOGETHER",
    "searches that found": "frontend.call._MOST_NESTED",
    "calls in a row": "dispatch.fallbacks._MOST_FILLS",
    "sets of inputs": "runtime.node._MOST_PARTIAL",
    "captures of one call": "python.own_writes._MOST_DISTURBED",
    "captures that one call": "tracing.capture._MOST_RUNS",
    "constants in a graph": "store.later.job._MOST_CONSTANTS",
}


def test_the_page_has_the_numbers_of_the_sources():
    (table,) = re.findall(r"^## Fixed numbers$[^|]*\n((?:\|.*\n)+)", PAGE, flags=re.MULTILINE)
    found = {}
    for row in table.splitlines()[2:]:
        number, counted, _ = (cell.strip() for cell in row.strip("|").split("|"))
        amount, _, unit = number.replace(",", "").partition(" ")
        found[counted] = int(amount) << (20 if unit == "MiB" else 0)
    assert len(found) == len(NAMES)
    for beginning, name in NAMES.items():
        module, _, constant = name.rpartition(".")
        (number,) = (number for counted, number in found.items() if counted.startswith(beginning))
        assert number == getattr(importlib.import_module(f"foregrad.{module}"), constant), name
