"""The questions that stages put to Python's state, as protocols: `of_python` gives an object that answers them. Type
checkers alone import this file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from types import CodeType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from .openings import Unwrap
from .source import Source
from .tree import Tree

if TYPE_CHECKING:
    import torch

    from ..graph.call_effects import ObjectWrite
    from ..graph.source import Bind, Names
    from .call import FlatCall, LeadingPlace, StatefulFunction

Ran = Mapping[CodeType, Mapping[str, object]]
"""Code that ran, with its globals."""
T = TypeVar("T")
Named = tuple[list[Any], list[str]]
"""Values, and their names for people."""


class FoundTensors(Protocol):
    """The tensors that a walk found."""

    tensors: Any

    def source_of(self, tensor: torch.Tensor) -> Source | None: ...
    def is_reached(self, tensor: torch.Tensor) -> bool: ...


class WalkedState(Protocol):
    """The state in the function's reach."""

    places: FoundTensors
    is_partial: bool
    untold: set[Any]

    def names(self, name: str) -> bool: ...
    def walk(self, roots: Iterable[tuple[object, str]]) -> None: ...
    def knows(self, value: object) -> bool: ...
    def met(self) -> Iterable[object]: ...
    def with_attributes(self) -> Iterable[torch.Tensor]: ...
    def result_of(self, value: object) -> Any: ...
    def has_met(self, value: object) -> bool: ...
    def names_of(self, kinds: tuple[type, ...]) -> set[Any]: ...
    def meet(self, code: CodeType, namespace: dict[str, Any]) -> None: ...


class PlacesRead(Protocol):
    """The places that the function looked at."""

    given: frozenset[int] | set[int]
    places: Mapping[object, Any]
    compares_identity: bool
    class_attributes: Any

    def give(self, given: Iterable[torch.Tensor]) -> None: ...
    def contents(self, value: object, name: str) -> None: ...
    def is_news(self, module: torch.nn.Module, name: str) -> bool: ...
    def note(self, module: torch.nn.Module, name: str) -> None: ...
    def ask(self, value: object, name: str, ask: Callable[[Any], object]) -> None: ...
    def release(self) -> None: ...


class GivenArguments(Protocol):
    """The arguments of a run."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    named: Sequence[tuple[object, str]]


class WritesOfRun(Protocol):
    """The writes of a run."""

    observed: Observation

    def begin(self) -> None: ...
    def of_handler(self) -> AbstractContextManager[None]: ...
    def guard_what_was_read(self, reads: PlacesRead) -> None: ...


class YoungObjects(Protocol):
    """The objects that are younger than the run."""

    def has(self, value: object) -> bool | None: ...


class MadeObjects(Protocol):
    """The objects that a run made."""

    newborns: YoungObjects


class StateOfRun(Protocol):
    """The state around one run of the function: made for each run.

    `before` is the state as the call met it; `own` and `journals` note the run's writes, `writes` are each call's, of
    the values in `spec`; `made` is what the run made, `given_back` the objects outside that hold some of it.
    """

    own: WritesOfRun
    journals: Any
    reads: PlacesRead
    made: MadeObjects
    before: WalkedState
    writes: tuple[ObjectWrite, ...]
    spec: Tree
    given_back: Container[object]

    def put_stand_ins(self, where: Callable[[], str]) -> None: ...
    def take_stand_ins(self) -> None: ...
    def raise_failed(self) -> None: ...
    def stumbled(self, *, is_foreign: bool) -> bool: ...
    def give_up(self, *, is_interrupted: bool) -> None: ...
    def needs_another_run(self) -> bool: ...
    def changed_since(self) -> Callable[[], str | None]: ...
    def knows(self, value: object) -> bool: ...
    def varies(self, value: object) -> bool: ...
    def enter(self, module: torch.nn.Module) -> None: ...
    def outputs(self, result: object, unwrap: Unwrap, more: Named) -> tuple[list[Any], list[str], Tree]: ...
    def reached(self) -> Mapping[type, frozenset[int]]: ...
    def settle(self) -> None: ...
    def begins(self, code: CodeType) -> None: ...
    def check_taken_over(self, name: str) -> None: ...
    def as_it_is(self, region: str, who: str) -> AbstractContextManager[None]: ...


class DrawsOfRun(Protocol):
    """The random numbers that a run takes from Python."""

    taken: Collection[object]

    def arrays_of(self, leaves: Sequence[object]) -> Callable[[torch.Tensor], object]: ...
    def check(self) -> None: ...


class NamesRebound(Protocol):
    """Names that mean a replacement while the function runs."""

    def __enter__(self) -> object: ...
    def __exit__(self, *error: object) -> None: ...
    def unbind(self) -> None: ...
    def runs(self, code: CodeType, namespace: dict[str, object]) -> None: ...


class NamesInCode(Protocol):
    """The names in code. `makes_up_names`: the code makes names while it runs."""

    names: AbstractSet[str]
    makes_up_names: bool


class CodeOfRun(Protocol):
    """The code that ran."""

    rebound: NamesRebound
    modules: Iterable[torch.nn.Module]

    def check(self, state: WalkedState) -> None: ...
    def enter(self, module: torch.nn.Module) -> None: ...
    def scan(
        self, ran: Ran, entered: Iterable[object], called: Iterable[object], of_tensors: Iterable[object]
    ) -> NamesInCode: ...


class Observation(Protocol):
    """The actions of a run besides computing."""

    ran: Ran
    entered: Collection[object]
    called: Collection[object]

    def of(self, function: Callable[..., T]) -> Callable[..., T]: ...
    def unobserved(self, function: Callable[..., T]) -> Callable[..., T]: ...
    def pause(self) -> None: ...
    def go_on(self) -> None: ...
    def raise_failed(self) -> None: ...
    def fail(self, error: Exception) -> NoReturn: ...
    def check(self, newborns: YoungObjects) -> None: ...
    def give_up(self) -> None: ...


class WatchedPlaces(Protocol):
    """The guards on places outside of the arguments."""

    dead: bool
    places: Sequence[object]

    def forget(self) -> None: ...
    def difference(self) -> tuple[str, str, str] | None: ...
    def drop_changed(self) -> Sequence[str]: ...


class GuardsOnReads(Protocol):
    """Adds the guards on reads to a call's guards."""

    watch: WatchedPlaces

    def in_tables(self) -> dict[int, Any]: ...
    def watched(self, inputs: list[str], static: Mapping[int, object]) -> str: ...


class ExpectedValue(Protocol):
    """The value of a place."""

    def holds(self, now: object) -> bool: ...


class Answers(Protocol):
    """All that stages ask: the classes of a run's parts, and functions."""

    def ProgramState(self, roots: Iterable[tuple[object, str]], *, is_whole: bool = True) -> WalkedState: ...  # noqa: N802
    def PythonState(self, *parts: object) -> StateOfRun: ...  # noqa: N802
    def Reads(self, given: Iterable[torch.Tensor] = ()) -> PlacesRead: ...  # noqa: N802
    def Draws(self, name: str, call: FlatCall, known: Callable[[object], bool]) -> DrawsOfRun: ...  # noqa: N802
    def SeenCode(self, *parts: object) -> CodeOfRun: ...  # noqa: N802
    def ReboundNames(self) -> NamesRebound: ...  # noqa: N802
    def Observed(self, run: object, begins: Callable[[CodeType, dict[str, object]], None]) -> Observation: ...  # noqa: N802
    def RunArguments(self, call: FlatCall, leaves: list[Any], arguments: Callable[..., object]) -> GivenArguments: ...  # noqa: N802
    def ReadGuards(self, guards: object) -> GuardsOnReads: ...  # noqa: N802
    def Lifted(self, function: Callable[..., object], places: Sequence[LeadingPlace]) -> StatefulFunction: ...  # noqa: N802
    def Expected(self, value: object) -> ExpectedValue: ...  # noqa: N802
    def is_of_library(self, cls: type) -> bool: ...
    def refuse_change(self, name: str, what: str) -> NoReturn: ...
    def attribute_set_error(self, name: str, attribute: str) -> Exception: ...
    def note_settings(self, function: object, graph: torch.fx.Graph) -> None: ...
    def called_by_autograd(self, functions: Iterable[object]) -> Iterable[object]: ...
    def lifted_paths(self, function: object) -> tuple[str, ...]: ...
    def state_that_varies(self, *known: object) -> tuple[LeadingPlace, ...]: ...
    def only_written_by(self, specialization: object) -> Collection[tuple[int, object]]: ...
    def render_stateful(self, name: str, lifted: StatefulFunction) -> Callable[..., Any]: ...
    def object_lines(
        self, name: str, tree: Tree, children: list[str], names: Names, bind: Bind
    ) -> Iterator[tuple[str, str]]: ...
    def capturing(self) -> AbstractContextManager[None]: ...
    def drawing(self, draws: DrawsOfRun) -> AbstractContextManager[None]: ...
    def not_drawing(self) -> AbstractContextManager[None]: ...
