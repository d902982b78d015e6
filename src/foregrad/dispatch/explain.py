"""Reports for people: why a function was compiled again, its eager calls, and why."""

from __future__ import annotations

import dataclasses
import html
import itertools
import linecache
import os
import re
import sys
import sysconfig
import time
import traceback
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..errors import ForegradError, ForegradWarning
from ..graph.signature import DecisionInfo
from ..house import is_house_code, is_house_file, with_cells


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """A fact that has changed since a graph was captured. `of_state`: about state, not about an argument."""

    name: str
    before: str
    now: str
    of_state: bool = dataclasses.field(default=False, compare=False)
    fixed: bool = dataclasses.field(default=False, compare=False)  # a size of an argument that shares written memory

    def __str__(self) -> str:
        return f"{self.name} was {self.before}, is {self.now}"

    @property
    def is_length(self) -> bool:
        return self.name.startswith("len(")

    def warn(self, function: str) -> None:
        """Warn that the function needs a graph for each size."""
        warn_user(f"`{function}` makes a graph for each {self.name}. {SIZES_ARE_FIXED}")


@dataclasses.dataclass(frozen=True, slots=True)
class Recompile:
    """One compilation: its number, from 1, and for each earlier graph the reason why it was not right for the call.

    `lifted`: state that is an input from the graph on, since it varies. `earlier`: the number of still older graphs: no
    longer tried, and without entries in `reasons`.
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
        return "\n".join([f"graph {self.number}{varies}:", *(["  ..."] if lines[_SHOWN:] else []), *lines[-_SHOWN:]])


@dataclasses.dataclass(slots=True)
class EagerCalls:
    """Calls that ran eagerly for one reason: their `count` so far, and the `seconds` that `timed` calls took.

    `reason` is the whole text; `why`, `change` (the one change that would compile them) and `line` are its parts.
    """

    reason: str
    count: int = 0
    timed: int = 0
    seconds: float = 0.0

    def call(self, function: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
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
        """The reason why these calls can't be compiled."""
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


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Recompiles:
    """The compilations of one function, in order, and the calls that ran eagerly; `str()` gives a report.

    `filling`: calls that ran eagerly to fill state, so that later calls are compiled; they are not among `eager`.
    """

    name: str
    entries: tuple[Recompile, ...]
    eager: tuple[EagerCalls, ...] = ()
    filling: tuple[EagerCalls, ...] = ()

    @property
    def eager_calls(self) -> int:
        """How many calls ran eagerly, without those of `filling`."""
        return sum(entry.count for entry in self.eager)

    def then(self, other: Recompiles) -> Recompiles:
        """Append a form's report; its first entry explains why the form was needed."""
        later = [
            dataclasses.replace(entry, number=len(self) + entry.number, earlier=entry.earlier + (len(self) if i else 0))
            for i, entry in enumerate(other.entries)
        ]
        return Recompiles(
            self.name, (*self.entries, *later), (*self.eager, *other.eager), (*self.filling, *other.filling)
        )

    def __len__(self) -> int:
        return len(self.entries)

    def lines(self) -> list[str]:
        """A text for each compilation, or for several with one reason, and for each reason's eager calls."""
        lines: list[str] = []
        for name, group in itertools.groupby(self.entries, _only_reason):
            entries = list(group)
            if name is None or len(entries) < _MANY:
                lines += map(str, entries)
                continue
            before, now = entries[0].reasons[-1].before, entries[-1].reasons[-1].now
            numbers = f"{entries[0].number} to {entries[-1].number}"
            lines.append(f"graphs {numbers}: {name}: {len(entries) + 1} values, {before} to {now}")
        filling = (re.sub(" A compiled call .*", " Later calls are compiled.", str(calls)) for calls in self.filling)
        fixed = any(reason.fixed for entry in self.entries for reason in entry.reasons)
        return [*map(str, self.eager), *lines, *([SIZES_ARE_FIXED] if fixed else ()), *filling]

    def __str__(self) -> str:
        times = {0: "not compiled yet", 1: "compiled once"}.get(len(self), f"compiled {len(self)} times")
        return "\n".join([f"{self.name}: {times}", *self.lines()])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


_SHOWN = 3  # earlier graphs
_MANY = 4  # compilations in a row for one reason: these are one line
SIZES_ARE_FIXED = (
    "Sizes stay fixed where arguments share memory and the function writes to it: pass a `.clone()`, or slice inside "
    "the function."
)


def _only_reason(entry: Recompile) -> str | None:
    """The name of the one value that made all earlier graphs wrong, if it is one."""
    names = {reason.name for reason in entry.reasons}
    return names.pop() if len(names) == 1 and not entry.lifted else None


def is_float_text(text: str) -> bool:
    """Whether a text is the text of a float."""
    try:
        return repr(float(text)) == text
    except ValueError:
        return False


def split_reason(text: str) -> tuple[str, str, str]:
    """(reason, remedy, the user's line) from the text of a refusal."""
    text, line = line_last(text), ""
    if match := re.search(r" \(([^()]*:\d+ in .*)\)$", text):
        text, line = text[: match.start()], match[1]
    else:
        place = re.search(r"(\S+:\d+ in \w+(?:: .*$)?)", text)
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
            return Difference(f"the size found at {only.where}", f"{only.value} or the like", "a different size")
        return Difference(f"the value read at {only.where}", repr(only.value), "a different value")
    lines = list(dict.fromkeys(decision.where for decision in decisions))
    shown = "; ".join(lines[:3]) + ("; ..." if len(lines) > 3 else "")
    return Difference(f"a value read at {shown}", "one", "a different value")


# ------------------------------------------------------------------------------------------ refusals
# The reason why a call can't be compiled, as text, and the warning.


_TORCH = os.path.dirname(torch.__file__) + os.sep
_FOLDERS = {sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib", "stdlib", "platstdlib")}
_LIBRARIES = (_TORCH, *_FOLDERS, "<frozen", "<eval_with_key")


class OneWarning:
    """Gives the one warning of a function and its forms."""

    def __init__(self) -> None:
        self.has_warned = False

    def warn(self, message: str) -> None:
        """Warn at the line of the user's program that is being run, once."""
        if not self.has_warned:
            self.has_warned = True
            warn_user(message)


def reason_of(function: Callable[..., object], name: str, error: BaseException) -> str:
    """The reason for people: the error's message, with the user's line if the message has none."""
    text = str(error).strip() or type(error).__name__
    if not isinstance(error, ForegradError):
        summary = f"{type(error).__name__}: {text.splitlines()[0]}"
        text = f"`{name}` runs eagerly and can't be captured: {_cause_of(error)} (it raised {_shortened(summary)})."
        text += " Make that part a foregrad.eager_region, so that the rest is compiled."
    line = _line_of(error) or _definition(function)
    if line and line.partition(" in ")[0] not in text:
        text += f" ({line})"
    return with_cells(line_last(text))


def line_last(text: str) -> str:
    """A message with the code that it quotes moved from the middle of its sentence to its end."""
    for place in re.finditer(r" at ((\S+):(\d+) in [^\s:]+)", text):
        code = linecache.getline(place[2], int(place[3])).strip()
        quoted = f"{place[1]}: {code}"
        if code and quoted in text and not text.endswith((quoted, f"{quoted})")):
            return f"{text.replace(quoted, place[1])} ({quoted})"
    return text


def _cause_of(error: BaseException) -> str:
    """Why a call that eager runs can't be captured, told by the code that raised an error that is not ours."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    file = innermost.f_code.co_filename
    if is_house_file(file) and isinstance(error, (LookupError, AttributeError, TypeError, AssertionError)):
        return "foregrad fails where eager does not; please report it where you got foregrad, with the program"
    if file.startswith(_TORCH) or is_house_file(file):
        return "PyTorch refuses this for the tensors of a capture: they have neither values nor memory"
    return "the code there does not take the tensors of a capture: they have neither values nor memory"


def _shortened(text: str) -> str:
    text = re.split(r"(?<!e\.g)\. (?=[A-Z])", text)[0].rstrip(".")
    return text if len(text) <= 100 else text[:97] + "..."


def _line_of(error: BaseException) -> str:
    """The innermost line of the user's program that an exception went through; of a library where there is none."""
    lines = [(f.f_code, line) for f, line in traceback.walk_tb(error.__traceback__) if not _is_of_torch(f.f_code)]
    own = [(c, line) for c, line in lines if not (is_house_code(c) or c.co_filename.startswith(_LIBRARIES))]
    if not lines:
        return ""
    code, line = (own or lines)[-1]
    source = linecache.getline(code.co_filename, line).strip()
    return f"{code.co_filename}:{line} in {code.co_name}" + (f": {source}" if source else "")


def _is_of_torch(code: types.CodeType) -> bool:
    """Whether code is PyTorch's or ours."""
    return is_house_code(code) or code.co_filename.startswith((_TORCH, "<frozen", "<eval_with_key"))


def _definition(function: object) -> str:
    while not isinstance(function, (types.FunctionType, type(None))):
        function = getattr(function, "__func__", None) or getattr(function, "func", None)
    if function is None or _is_of_torch(function.__code__):
        return ""
    return f"{function.__code__.co_filename}:{function.__code__.co_firstlineno} in {function.__name__}"


def warn_user(message: str) -> None:
    """Give a `ForegradWarning` at the line of the user's program that is being run."""
    frame: Any = sys._getframe(1)
    level = 2
    while frame is not None and (is_house_code(frame.f_code) or frame.f_code.co_filename.startswith(_TORCH)):
        frame = frame.f_back
        level += 1
    warnings.warn(message, ForegradWarning, stacklevel=level)
