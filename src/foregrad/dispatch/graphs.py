"""The graphs of one compiled function, in the order in which calls try them, and the limit on their number.

A program may branch on values of its inputs: each path is a graph, up to a limit. A call tries the graphs whose guards
it passes. Each runs as far as its forward, and its results are dropped if a decision comes out otherwise. So every
further graph makes a call that fits none dearer: past the limit such calls run eagerly, and if no other calls come, the
graphs are given up.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..config import Config
from ..errors import UnsupportedDataDependentError
from ..graph.console import CONSOLE
from ..graph.source import source_of
from ..identity import ById
from ..locks import make_lock
from ..runtime.node import NodeSource
from .explain import Difference, decided
from .guard_list import MISS, GuardList
from .pipeline import Product
from .refusals import Once, warn_user
from .watch import Watch

Call = Callable[..., Any]


@dataclasses.dataclass(slots=True)
class _Record:
    """One compilation: the `place` of the difference that it was for, None for other reasons, and its use."""

    place: Any
    served_again: bool = False


@dataclasses.dataclass(slots=True, eq=False)
class _Noticing:
    """The function of a graph until its second call. No graph is kept alive by it."""

    call: Call
    record: _Record
    graphs: weakref.ref[Graphs]

    def __call__(self, args: Any, kwargs: Any) -> Any:
        result, graphs = self.call(args, kwargs), self.graphs()
        if result is not MISS and graphs is not None:
            self.record.served_again = True
            graphs.noticed(self)
        return result


class Graphs:
    """The `specializations`, the oldest first, and `calls`, their functions, the one used last first."""

    def __init__(self) -> None:
        self.specializations: list[Specialization] = []
        self.calls: tuple[Call, ...] = ()
        self._order = make_lock()  # held to set `calls`, never while anything runs
        self._history: list[_Record] = []
        self._noticing: ById[Call, Call] = ById()  # by a graph's function: its `_Noticing`

    def to_front(self, call: Call) -> None:
        if self._order.acquire(blocking=False):  # if another thread reorders now, its order is as good
            try:
                if call in self.calls:
                    self.calls = (call, *(c for c in self.calls if c is not call))
            finally:
                self._order.release()

    def add(self, specialization: Specialization, place: Any = None) -> None:
        """Add the graph for the call at hand. `place`: the place of the difference that it was made for."""
        self.specializations.append(specialization)
        record, call = _Record(place), specialization.call
        self._history.append(record)
        noticing = _Noticing(call, record, weakref.ref(self))
        with self._order:
            self._noticing[call] = noticing
            self.calls = (noticing, *self.calls)

    def noticed(self, noticing: _Noticing) -> None:
        """Replace the function that waited for a graph's second call by the graph's own."""
        with self._order:
            self._noticing.pop(noticing.call, None)
            if noticing in self.calls:
                self.calls = (noticing.call, *(c for c in self.calls if c is not noticing))

    def in_a_row(self, place: Any) -> int:
        """The number of latest graphs that were made for differences in `place` and served a single call each."""
        count = 0
        for record in reversed(self._history):
            if record.place != place or record.served_again:
                break
            count += 1
        return count

    def remove(self, specialization: Specialization) -> None:
        call = specialization.call
        with self._order:
            if specialization in self.specializations:
                self.specializations.remove(specialization)
            noticing = self._noticing.pop(call, None)
            self.calls = tuple(c for c in self.calls if c is not call and c is not noticing)

    def drop_dead(self) -> None:
        """Drop graphs of objects that are gone, and let go of parameters that were replaced."""
        for specialization in list(self.specializations):
            if specialization.watch.dead:
                self.remove(specialization)
            specialization.watch.forget()

    def try_none(self) -> None:
        """Let calls try no graph."""
        with self._order:
            self.calls = ()

    def try_undecided(self) -> None:
        """Let calls try only the graphs that branch on no values."""
        with self._order:
            self.calls = tuple(s.call for s in self.specializations if not s.decides)


_GIVEN_UP_AFTER = 8


class Paths:
    """The paths of a function that branches on values, and the limit on their number."""

    def __init__(self, name: str, config: Config, once: Once) -> None:
        self.name, self.once = name, once
        self.config = config
        self.lost = 0  # calls past the limit that no graph was right for
        self.diverged = 0  # fresh graphs whose decisions differed from their capture

    def at_limit(self, specializations: Sequence[Specialization]) -> bool:
        """Whether no graph is to be made for a further path."""
        if self.diverged >= _GIVEN_UP_AFTER:
            return True
        return _says_values(specializations) or len(_ways(specializations)) >= self.config.path_limit

    def past_limit(self, specializations: Sequence[Specialization]) -> bool:
        """Warn, or raise if the settings say so; True if the graphs are to be given up."""
        if self.config.error_on_recompile_limit or not self.once.has_warned:
            message = self._message(specializations)
            if self.config.error_on_recompile_limit:
                raise UnsupportedDataDependentError(message)
            self.once.warn(message + " Such calls run eagerly from now on.")
        self.lost += 1
        return self.lost >= _GIVEN_UP_AFTER

    def _message(self, specializations: Sequence[Specialization]) -> str:
        values: dict[str, set[str]] = {}
        for specialization in specializations:
            for decision in specialization.product.captured.joint.signature.decisions:
                values.setdefault(decision.where, set()).add(repr(decision.value))
        where, different = max(values.items(), key=lambda item: len(item[1]), default=("an unknown line", set()))
        if _says_values(specializations):
            return (
                f"`{self.name}` prints, logs or warns, and makes text of a value that it reads at {where}, or branches "
                "on it: each value is a graph of its own. Print the number (`print(loss.item())`), or return it."
            )
        return (
            f"`{self.name}` was compiled {len(_ways(specializations))} times for values that it reads from its inputs, "
            f"which is the limit. Most of them, {len(different)}, were read at {where}. Keep the value a tensor "
            "(torch.where, masking), compute it outside and pass it, or raise foregrad.config.path_limit."
        )


def _ways(specializations: Sequence[Specialization]) -> set[tuple[str, ...]]:
    """The distinct decisions of the graphs that decide anything: graphs for other shapes may share a path."""
    signatures = [s.product.captured.joint.signature for s in specializations if s.decides]
    return {tuple(f"{d.where} {d.value!r}" for d in signature.decisions) for signature in signatures}


def _says_values(specializations: Sequence[Specialization]) -> bool:
    """Whether two graphs print, log or warn and are for different values, as those are whose text has a number."""
    signatures = ((s, s.product.captured.joint.signature) for s in specializations)
    saying = [s for s, signature in signatures if any(write.target is CONSOLE for write in signature.python_writes)]
    return len(_ways(saying)) > 1


@dataclasses.dataclass(eq=False, repr=False)
class Specialization:
    """One compiled graph with its guards: `call(args, kwargs)` returns the result, or `MISS`."""

    call: Callable[..., Any]
    node: NodeSource | None
    product: Product
    watch: Watch
    guards: GuardList

    @property
    def decides(self) -> bool:
        return bool(self.product.captured.joint.signature.decisions)

    def difference(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Difference:
        """The reason why the graph is not right for a call with these arguments, made now."""
        return self.guards.first_difference(args, kwargs) or decided(self.product.captured.joint.signature.decisions)

    def makes_the_same_of_it(self, other: Specialization) -> bool:
        """Whether another capture has an equal graph, and equal outputs that are no tensors."""
        one, two = self.product.captured.joint, other.product.captured.joint
        numbers = [
            [(output.path, repr(getattr(output, "value", None))) for output in joint.signature.outputs]
            for joint in (one, two)
        ]
        return numbers[0] == numbers[1] and str(one) == str(two)

    def leave_unrepeated(self, name: str) -> None:
        """Stop watching state that the function changes on every run, if two runs gave equal graphs; warns once."""
        changed = self.watch.drop_changed()
        if changed:
            warn_user(
                f"`{name}` changes {'; '.join(changed)}. The change was made while it was captured; compiled calls do "
                "not repeat it, and do not check it. Move it out of the compiled function."
            )

    def source(self) -> str:
        """The rendered Python: guards, runtime, and the autograd node."""
        text = source_of(self.call)
        return text if self.node is None else f"{self.node.source}\n\n{text}"
