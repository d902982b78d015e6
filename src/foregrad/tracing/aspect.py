"""The seam between a capture and its subjects.

A subject of a capture (settings, checkpointed regions, collectives, ...) is one class, an `Aspect`. The capture makes
one instance for each tape and asks all instances at equal moments; it names none. A class is registered by the
decorator `aspect`; `foregrad.ANNEXES` lists the package's modules that hold registered classes. A class of any other
module joins by the same decorator, from `foregrad.extend`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from .._torch.ops import Args, Kwargs
from .._torch.patches import Subjects
from ..annexes import given
from ..graph.call_effects import CallEffect
from ..graph.joint import JointGraph
from ..house import add_to_house
from ..identity import ById
from ..locks import Bind
from .heap.recording import Host, Recording
from .heap.records import InputRecord
from .tape.tape import Entry

Context = contextlib.AbstractContextManager[Any]
Row = Callable[[Any, Any, Args, Kwargs], Any]
A = TypeVar("A", bound="Aspect")


@dataclasses.dataclass(frozen=True, slots=True)
class Settled:
    """A run with numbered inputs and results.

    `results`: the leaves of the function's results and writes, named by `paths`. `records`: the inputs' records by
    their stand-ins; `number`: the inputs' numbers by their records. `interior(result)`: why nobody outside the function
    sees the result's whole gradient; empty where somebody does. `may_stop`: a call may end before its graph has run to
    the end, and run eagerly.
    """

    name: str
    results: Sequence[Any]
    paths: Sequence[str]
    records: ById[Any, Any]
    number: Mapping[Any, int]
    interior: Callable[[int], str]
    may_stop: bool = False

    def input(self, tensor: object) -> int | None:
        """The number of the input that a tensor of the run stands for; None for any other tensor."""
        return self.number.get(self.records[tensor]) if tensor in self.records else None


@dataclasses.dataclass(frozen=True, slots=True)
class CallGuard:
    """A condition on each call: `read`, called with the inputs of these numbers, returns the plain value `expected`.
    Any other answer makes a new graph; `name` names the value in the reason.
    """

    name: str
    read: Callable[..., Any]
    expected: Any
    inputs: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """A run with its graph built. `records`: the graph's inputs; `names`: the names in the code that ran."""

    joint: JointGraph
    records: Sequence[InputRecord]
    names: Container[str]


class Aspect:
    """Base of the subjects of a capture. Each method is a moment of a capture, and does nothing here. Parts of the
    capture itself are aspects too, though not registered.

    `functions`: torch functions that the aspect owns; `method(self, function, args, kwargs)` runs in place of each.
    `operators`: likewise for operators and namespaces of operators, with an operator's `Treatment`. An aspect holds no
    real tensor after `finished`, and reaches the capture only by `recorder.host`; that reference goes.
    """

    functions: ClassVar[Mapping[Any, Row]] = {}
    operators: ClassVar[Mapping[object, Row]] = {}

    def __init__(self, host: Host, recorder: Recording) -> None:
        """A tape begins. `host` may be half made: ask it nothing yet."""

    @staticmethod
    def install(bind: Bind, current: Callable[[], object]) -> Callable[[], None] | None:
        """Replace names of PyTorch while any thread captures. `current()`: the aspect of the thread's capture, None
        where no capture runs. Returns a function for the end, where more than names is to be restored.
        """
        return None

    def prepare(self) -> None:
        """A run is about to begin: inputs have no stand-ins yet."""

    def around_run(self) -> Context:
        """A context for a run of the function with its backward."""
        return contextlib.nullcontext()

    def around_function(self) -> Context:
        """A context for the function alone, outside of the recording modes: it sees the function's exceptions."""
        return contextlib.nullcontext()

    def ran(self) -> None:
        """The function has run, or a backward; calls made here are still recorded."""

    def raise_caught(self) -> None:
        """Raise again the error of this subject that the program has caught; the function has ended, or a backward."""

    def failed(self, error: BaseException) -> bool:
        """The run raised `error`: whether a further run is to be made, since the subject behaves otherwise there."""
        return False

    def mark(self) -> Any:
        """A mark of all entries so far: later entries may be dropped."""

    def drop(self, mark: Any) -> None:
        """Forget a trial's entries since `mark`."""

    def ahead(self, entry: Entry) -> None:
        """The function asks for the value of an entry with an effect that no call has run yet."""

    def returned(self, results: Sequence[object], paths: Sequence[str]) -> None:
        """The leaves of the function's results and writes are known."""

    def before_graph(self, outputs: Sequence[Entry | None]) -> None:
        """The graph is about to be made of the entries that its `outputs` need."""

    def effects(self, run: Settled) -> Iterable[CallEffect]:
        """The subject's effects in each call."""
        return ()

    def guards(self, run: Settled) -> Iterable[CallGuard]:
        """Conditions under which a call may use the graph, besides the capture's own conditions."""
        return ()

    def finished(self, run: Finished) -> None:
        """The graph is built: the last moment to refuse."""

    def resumed(self) -> Aspect | None:
        """The aspect that answers while a derivative goes on with the tape, or None."""
        return None


_classes: list[type[Aspect]] = []


def aspect(cls: type[A]) -> type[A]:
    """Register a class: each later capture makes an instance. A capture counts the class's code as foregrad's."""
    if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:
        aspect_classes()  # the package's own come first
    add_to_house(cls)
    for other in _classes:
        if both := cls.functions.keys() & other.functions.keys() | cls.operators.keys() & other.operators.keys():
            raise TypeError(f"{cls.__qualname__} and {other.__qualname__} both own {next(iter(both))}")
    _classes.append(cls)
    return cls


def aspect_classes() -> Sequence[type[Aspect]]:
    """The registered classes, in their order."""
    given("subjects of a capture")  # a module registers as it is imported
    return _classes


class Aspects(Subjects):
    """The aspects of one tape, by their classes."""

    def __init__(self, found: Iterable[tuple[type[Aspect], Aspect]]) -> None:
        self.by_class: dict[type[Aspect], Aspect] = {}
        self.rows: dict[Any, Callable[..., Any]] = {}
        self.operators: dict[object, Callable[..., Any]] = {}
        self.join(found)

    def join(self, found: Iterable[tuple[type[Aspect], Aspect]]) -> None:
        """Add further aspects, parts of the capture itself too."""
        for cls, one in found:
            self.by_class[cls] = one
            self.rows |= {function: functools.partial(row, one) for function, row in one.functions.items()}
            self.operators |= {name: functools.partial(row, one) for name, row in one.operators.items()}

    def installers(self) -> Mapping[type, Any]:
        return {cls: cls.install for cls in self.by_class}

    def __iter__(self) -> Iterator[Aspect]:
        return iter(self.by_class.values())

    def marks(self) -> list[Any]:
        return [one.mark() for one in self]

    def drop(self, marks: list[object]) -> None:
        for one, mark in zip(self, marks, strict=True):
            one.drop(mark)

    def resumed(self) -> Aspects:
        """The aspects that answer while a derivative goes on with the tape."""
        gone_on = ((cls, one.resumed()) for cls, one in self.by_class.items())
        return Aspects((cls, one) for cls, one in gone_on if one is not None)

    @contextlib.contextmanager
    def around(self, contexts: Callable[[Aspect], Context]) -> Iterator[None]:
        """Context: the contexts of all aspects, the first outermost."""
        with contextlib.ExitStack() as stack:
            for one in self:
                stack.enter_context(contexts(one))
            yield
