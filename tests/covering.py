"""Products of cases: `make test-all` runs them whole, other runs the few that cover them.

A capture takes a tenth of a second, and a product of programs, doors and ways asks for some in each row. `each` keeps every
row of every table, beside other rows each time. `shared` gives doors that have one table a part each, where one more door
runs the whole table.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

ALL = os.environ.get("FOREGRAD_TESTS") == "all"
T = TypeVar("T")


def each(*tables: Iterable[Any], times: int = 1, everything: bool = ALL) -> list[tuple[Any, ...]]:
    """Every row of the longest table so many times, every row of the others as evenly, beside rows that it was not beside.

    With as many times as the second longest table has rows, nearly every two rows of two tables are beside each other.
    """
    rows = [list(table) for table in tables]
    if everything:
        return list(itertools.product(*rows))
    longest = max(range(len(rows)), key=lambda table: len(rows[table]))
    together: Counter[object] = Counter()
    found = {}
    for _, first in itertools.product(range(times), range(len(rows[longest]))):
        chosen = [(longest, first)]
        for table in range(len(rows)):
            if table != longest:
                places = [(table, row) for row in range(len(rows[table]))]
                # The one that was least often beside the chosen ones, then least often at all.
                best = min(places, key=lambda at: (sum(together[at, other] for other in chosen), together[at]))
                together[best] += 1
                together.update((best, other) for other in chosen)
                chosen.append(best)
        place = tuple(row for _, row in sorted(chosen))
        found[place] = tuple(table[row] for table, row in zip(rows, place, strict=True))
    return list(found.values())


def shared(table: Iterable[T], part: int, parts: int, everything: bool = ALL) -> list[T]:
    """The part of a table, by turns, that one of so many doors has."""
    return list(table) if everything else list(table)[part::parts]
