"""Why a compiled function was compiled again: what differs between a call and those it has graphs for.

This is the slow second look at what the rendered guards decide. A `Fingerprint` remembers a call without its tensors;
`difference()` names the first thing in which another call differs, by the user's name for it.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .._torch.guards import global_state
from ..frontend.call import FlatCall, flatten_call
from ..frontend.expected import describe
from ..frontend.sources import Source
from ..graph.signature import Signature
from .watch import Watch

__all__ = ["Difference", "EagerCalls", "Fingerprint", "Recompile", "Recompiles", "split_reason"]


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Something that was one thing when a graph was captured, and is another now."""

    name: str
    before: str
    now: str

    def __str__(self) -> str:
        return f"{self.name} was {self.before}, is {self.now}"


@dataclasses.dataclass(frozen=True, slots=True)
class Recompile:
    """One compilation: its number, from 1, and for each graph there was, why that was not right for the call.

    `lifted`: state that is an input from this graph on, as it was found to vary. `earlier`: how many graphs come
    before those that `reasons` speak of, and are not tried any more.
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
    """Calls that ran eagerly for one reason: how many they are so far, and the seconds that `timed` of them took.

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
        """The mean time of a call, in seconds; None where none was measured."""
        return self.seconds / self.timed if self.timed else None

    @property
    def why(self) -> str:
        """Why they can't be compiled."""
        return split_reason(self.reason)[0]

    @property
    def change(self) -> str:
        """What to change; "" where nothing is known."""
        return split_reason(self.reason)[1]

    @property
    def line(self) -> str:
        """The user's line."""
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
        """These compilations and calls, then those of another form of the function, the first of which says why these
        graphs are not right.
        """
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


def split_reason(text: str) -> tuple[str, str, str]:
    """(why, what to do, the user's line) of the text that a refusal says."""
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


class Fingerprint:
    """A call as its graph's guards see it, in words."""

    def __init__(self, call: FlatCall, signature: Signature, tensors: tuple[Any, ...], watch: Watch) -> None:
        self.tree = call.tree
        self.paths = [user_name(call.function, path) for path in call.paths]
        self.leaves = [_facts(leaf) for leaf in call.leaves]
        self.open = _open(signature)
        self.decisions = signature.decisions
        self.first_of = call.first_of
        self.state = global_state()
        self.watch = watch
        self.sources = [
            (str(info.slot), info.source, _facts(tensor))
            for info, tensor in zip(signature.inputs, tensors, strict=True)
            if isinstance(info.source, Source) and info.source.steps
        ]

    def difference(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Difference:
        """The first difference between this call and one with these arguments, made now."""
        call = flatten_call(function, args, kwargs, objects=True)
        return (
            self._arguments(call)
            or self._state()
            or self._reads()
            or self._closures()
            or self._details(call)
            or (None if self.open else self._values())
            or self._arguments(call, everything=True)
            or self._values()
            or Difference("which arguments share memory", "one way", "another")
        )

    def _arguments(self, call: FlatCall, *, everything: bool = False) -> Difference | None:
        """What differs among the arguments; what the graph is not specialized to only when `everything` is to be."""
        if call.tree != self.tree:
            ours, theirs = _names(self.paths), _names([user_name(call.function, path) for path in call.paths])
            return Difference("the structure of the arguments", ours, theirs)
        for index, (path, before, leaf) in enumerate(zip(self.paths, self.leaves, call.leaves, strict=True)):
            free = self.open.get(index, ())
            found = _compare(path, before, _facts(leaf), () if everything else free)
            if found is not None:
                return dataclasses.replace(found, before=f"{found.before} or the like") if free else found
            first = call.first_of[index]
            if first != self.first_of[index]:
                said = [
                    "a tensor of its own" if i == index else f"the same tensor as {self.paths[i]}"
                    for i in (self.first_of[index], first)
                ]
                return Difference(path, *said)
        return None

    def _details(self, call: FlatCall) -> Difference | None:
        """Facts that matter to some graphs only, looked at when nothing else differs."""
        for path, before, leaf in zip(self.paths, self.leaves, call.leaves, strict=True):
            now = _facts(leaf)
            for fact in _DETAILS:
                if before.get(fact) != now.get(fact):
                    return Difference(f"{path}.{fact}", before[fact], now[fact])
        return None

    def _values(self) -> Difference | None:
        """What the program read from tensors: all that is left to differ, where it did so."""
        if not self.decisions:
            return None
        if len(self.decisions) == 1:
            (only,) = self.decisions
            if only.symbol is not None:
                return Difference(f"the size found at {only.where}", f"{only.value} or the like", "another")
            return Difference(f"the value read at {only.where}", repr(only.value), "another")
        lines = list(dict.fromkeys(decision.where for decision in self.decisions))
        shown = "; ".join(lines[:3]) + ("; ..." if len(lines) > 3 else "")
        return Difference(f"a value read at {shown}", "one", "another")

    def _state(self) -> Difference | None:
        for name, now in global_state().items():
            if now != self.state[name]:
                return Difference(name, str(self.state[name]), str(now))
        return None

    def _reads(self) -> Difference | None:
        found = self.watch.difference()
        return None if found is None else Difference(*found)

    def _closures(self) -> Difference | None:
        for name, source, before in self.sources:
            try:
                now = source.get()
            except (KeyError, AttributeError, IndexError, TypeError, ValueError):
                return Difference(name, "there", "gone")
            found = _compare(name, before, _facts(now))
            if found is not None:
                return found
        return None


def user_name(function: Callable[..., Any], path: str) -> str:
    """`args[0]["x"]` by the parameter's own name."""
    if not path.startswith("args["):
        return path
    number, _, rest = path[len("args[") :].partition("]")
    try:
        parameters = list(inspect.signature(function).parameters.values())
        parameter = parameters[int(number)]
    except (ValueError, TypeError, IndexError):
        return path
    if any(p.kind is p.VAR_POSITIONAL for p in parameters[: int(number) + 1]):
        return path
    return parameter.name + rest


def _facts(value: Any) -> dict[str, str]:
    """What guards look at in a leaf, each as text."""
    if not isinstance(value, torch.Tensor):
        return {"": f"{describe(value)}", "type": type(value).__name__}
    return {
        "type": type(value).__name__,
        "dtype": str(value.dtype),
        "device": str(value.device),
        "shape": str(tuple(value.shape)),
        "requires_grad": str(value.requires_grad),
        "stride()": str(value.stride()) if value.layout is torch.strided else "none",
        "layout": str(value.layout),
        "storage_offset()": str(value.storage_offset()) if value.layout is torch.strided else "none",
        "is_inference()": str(value.is_inference()),
        "is_leaf": str(value.is_leaf),
        "is a view": str(value._base is not None),
        "is_conj(), is_neg()": f"{value.is_conj()}, {value.is_neg()}",
    }


_DETAILS = ("storage_offset()", "is_leaf", "is a view")


def _open(signature: Signature) -> dict[int, tuple[str, ...]]:
    """For each argument whose sizes or value are symbolic, the facts that are then no reason by themselves."""
    found: dict[int, tuple[str, ...]] = {}
    for info in signature.symbols:
        argument = signature.inputs[info.input].argument
        if argument is not None:
            found[argument] = ("",) if info.dim is None else ("shape", "stride()")
    found |= {i.argument: ("",) for i in signature.inputs if i.number is float and i.argument is not None}
    return found


def _compare(name: str, before: dict[str, str], now: dict[str, str], free: tuple[str, ...] = ()) -> Difference | None:
    if ("" in before) != ("" in now):
        return Difference(name, before.get("", "a tensor"), now.get("", "a tensor"))
    for fact, was in before.items():
        if was != now[fact] and fact not in _DETAILS and fact not in free:
            return Difference(f"{name}.{fact}" if fact else name, was, now[fact])
    return None


def _names(paths: list[str]) -> str:
    return f"({', '.join(paths[:12])}{', ...' if len(paths) > 12 else ''})"
