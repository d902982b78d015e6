"""Reports of why a function was compiled again, and of calls that ran eagerly."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..graph.signature import DecisionInfo


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A fact that has changed since a graph was captured. `of_state`: about state, not about an argument."""

    name: str
    before: str
    now: str
    of_state: bool = dataclasses.field(default=False, compare=False)

    def __str__(self) -> str:
        return f"{self.name} was {self.before}, is {self.now}"


@dataclasses.dataclass(frozen=True, slots=True)
class Recompile:
    """One compilation: its number, from 1, and for each earlier graph the reason why it was not right for the call.

    `lifted`: state that is an input from this graph on, since it varies. `earlier`: the number of still older graphs,
    which are no longer tried and have no entry in `reasons`.
    """

    number: int
    reasons: tuple[Difference, ...]
    lifted: tuple[str, ...] = ()
    earlier: int = 0

    def __str__(self) -> str:
        varies = f" with {', '.join(self.lifted)} as input" if self.lifted else ""
        if not self.reasons:
            return f"graph {self.number}{varies}: the first call"
        lines = [f"  not graph {self.earlier + i}: {reason}" for i, reason in enumerate(self.reasons, 1)]
        return "\n".join([f"graph {self.number}{varies}:", *lines])


@dataclasses.dataclass(slots=True)
class EagerCalls:
    """Calls that ran eagerly for one reason: their `count` so far, and the `seconds` that `timed` of them took.

    `reason` is the whole text; `why`, `change` (the one change that would compile them) and `line` are its parts.
    """

    reason: str
    count: int = 0
    timed: int = 0
    seconds: float = 0.0

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function eagerly, and measure that."""
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - begin
            self.timed += 1

    @property
    def seconds_per_call(self) -> float | None:
        """The mean time of a call, in seconds; None if no call was measured."""
        return self.seconds / self.timed if self.timed else None

    @property
    def why(self) -> str:
        """The reason why such calls can't be compiled."""
        return split_reason(self.reason)[0]

    @property
    def change(self) -> str:
        """The remedy; "" if none is known."""
        return split_reason(self.reason)[1]

    @property
    def line(self) -> str:
        """The user's line that is the cause."""
        return split_reason(self.reason)[2]

    def __str__(self) -> str:
        took = self.seconds_per_call
        each = "" if took is None else f", {took * 1e3:.3g} ms each"
        return f"ran eagerly: {self.count} call{'' if self.count == 1 else 's'}{each}: {self.reason}"


@dataclasses.dataclass(frozen=True, slots=True)
class Recompiles:
    """The compilations of one function, in order, and the calls that ran eagerly; `str()` of it is a report."""

    name: str
    entries: tuple[Recompile, ...]
    eager: tuple[EagerCalls, ...] = ()

    @property
    def eager_calls(self) -> int:
        """How many calls ran eagerly."""
        return sum(entry.count for entry in self.eager)

    def then(self, other: Recompiles) -> Recompiles:
        """Append the report of another form; its first entry explains why the form was needed."""
        later = [
            dataclasses.replace(entry, number=len(self) + entry.number, earlier=entry.earlier + (len(self) if i else 0))
            for i, entry in enumerate(other.entries)
        ]
        return Recompiles(self.name, (*self.entries, *later), (*self.eager, *other.eager))

    def __len__(self) -> int:
        return len(self.entries)

    def __str__(self) -> str:
        times = {0: "not compiled yet", 1: "compiled once"}.get(len(self), f"compiled {len(self)} times")
        return "\n".join([f"{self.name}: {times}", *map(str, self.entries), *map(str, self.eager)])


def is_float_text(text: str) -> bool:
    """Whether a text is the text of a float."""
    try:
        return repr(float(text)) == text
    except ValueError:
        return False


def split_reason(text: str) -> tuple[str, str, str]:
    """(reason, remedy, the user's line) from the text of a refusal."""
    line = ""
    if match := re.search(r" \(([^()]*:\d+ in .*)\)$", text):
        text, line = text[: match.start()], match[1]
    else:
        place = re.search(r"(\S+:\d+ in \w+(?:: .*?(?= hands a| seeds|$))?)", text)
        line = place[1] if place else ""
    sentences = re.split(r"(?<=[.!?]) (?=[A-Z`])", text.strip())
    if len(sentences) == 1:
        return text, "", line
    return " ".join(sentences[:-1]), sentences[-1], line


def decided(decisions: Sequence[DecisionInfo]) -> Difference:
    """The difference of a call that passes all guards: the values that the program branched on."""
    if not decisions:
        return Difference("the run of the graph", "as captured", "otherwise")
    if len(decisions) == 1:
        (only,) = decisions
        if only.symbol is not None:
            return Difference(f"the size found at {only.where}", f"{only.value} or the like", "another")
        return Difference(f"the value read at {only.where}", repr(only.value), "another")
    lines = list(dict.fromkeys(decision.where for decision in decisions))
    shown = "; ".join(lines[:3]) + ("; ..." if len(lines) > 3 else "")
    return Difference(f"a value read at {shown}", "one", "another")
