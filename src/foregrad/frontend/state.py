"""Python's state around a call: the seam, and a run without the annex.

Without the annex a function counts as a function of its arguments: a first capture says so. A tensor or module that it
reaches by itself is refused by the seam's name.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ..annexes import given, the_one
from ..errors import ForegradWarning
from .call import FlatCall
from .openings import Unwrap
from .tree import Tree, check_leaves, flatten

if TYPE_CHECKING:
    from .answers import Answers

SEAM = "Python's state"


def of_python() -> Answers:
    """The module that answers for Python's state, or `ArgumentsAlone`."""
    answers: Answers = (given(SEAM) or _ALONE)[0]
    return answers


def _refuse(*_: object) -> NoReturn:
    the_one(SEAM)
    raise AssertionError


class _Unseen:
    """All parts of Python's state in a run: nothing is there, and nothing happens."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    spec: Tree
    modules = writes = called = given_back = named = ()
    given: frozenset[int] = frozenset()
    ran: Mapping[Any, Any] = types.MappingProxyType({})
    compares_identity, is_partial, taken, newborns = False, False, 0, None

    def __init__(self, *known: object, **_: object) -> None:
        self.known, self.entered = known, self.ran
        self.before = self.own = self.made = self.rebound = self.places = self

    # Of nothing there are no facts.

    def _no(self, *_: object, **__: object) -> bool:
        return False

    def _none(self, *_: object, **__: object) -> None:
        return None

    def _empty(self, *_: object, **__: object) -> Sequence[object]:
        return ()

    names = is_reached = knows = varies = stumbled = needs_another_run = _no
    source_of = walk = check = begin = unbind = runs = release = settle = give_up = raise_failed = _none
    pause = go_on = put_stand_ins = take_stand_ins = give = contents = guard_what_was_read = _none
    with_attributes = met = tensors = _empty
    result_of = note = enter = staticmethod(_refuse)

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

    def of_handler(self) -> _Unseen:
        return self

    def reached(self) -> Mapping[type, frozenset[int]]:
        return {}

    def changed_since(self) -> Callable[[], None]:
        return self._none

    def arrays_of(self, leaves: Sequence[object]) -> Callable[[Any], object]:
        return _refuse

    def unobserved(self, function: object) -> Any:
        return function

    of = unobserved

    def scan(self, *_: object) -> types.SimpleNamespace:
        """The names in the code that ran: code may name any."""
        return types.SimpleNamespace(names=frozenset(), makes_up_names=True)

    def outputs(self, result: object, unwrap: Unwrap, more: tuple[list[object], list[str]]) -> Any:
        """The leaves of the result and of further outputs, the leaves' names, the structure of the result."""
        next(one for one in self.known if isinstance(one, _ArgumentsOfRun)).check_unchanged()
        leaves, tree = flatten([result, [*more[0]]], unwrap)
        first, self.spec = tree.children
        paths = first.paths("out")
        check_leaves(leaves[: first.size], paths, "output")
        named = zip(more[1], self.spec.children, strict=True)
        return leaves, [*paths, *(path for name, child in named for path in child.paths(name))], first


class _ArgumentsOfRun(_Unseen):
    """The arguments of a run."""

    def __init__(self, call: FlatCall, leaves: Sequence[object], arguments: Callable[..., Any]) -> None:
        super().__init__()
        self.leaves = leaves
        self.args, self.kwargs = arguments(leaves, {})
        self.as_given = flatten((self.args, self.kwargs))

    def check_unchanged(self) -> None:
        """Raise where the function wrote to a container among its arguments."""
        leaves, tree = flatten((self.args, self.kwargs))
        before, structure = self.as_given
        if tree != structure or any(map(operator.is_not, leaves, before)):
            _refuse()


class _NoGuards:
    """The guards on reads, and their watch: there are none."""

    dead, places = False, ()

    def __init__(self, guards: Any) -> None:
        self.guards, self.watch = guards, self

    def in_tables(self) -> dict[int, object]:
        return {}

    def watched(self, inputs: list[str], static: Mapping[int, object]) -> str:
        guards = self.guards
        self.guards = None
        guards.arguments_reached_too(inputs)
        name: str = guards.bind("watch", self)
        return name

    def difference(self) -> None: ...
    def forget(self) -> None: ...
    def drop_changed(self) -> Sequence[str]:
        return ()


@functools.cache
def _say() -> None:
    warnings.warn(
        f"this installation of foregrad has no part for {SEAM}: functions are compiled as functions of their "
        "arguments. What they read besides is constant, and what they print, draw, set or write happens once.",
        ForegradWarning,
        stacklevel=2,
    )


def _begun(*_: object, **__: object) -> _Unseen:
    _say()
    return _Unseen()


@contextlib.contextmanager
def _nothing(*_: object) -> Iterator[None]:
    yield


class ArgumentsAlone:
    """The answers of an installation without the annex."""

    ProgramState = staticmethod(_begun)
    PythonState = SeenCode = ReboundNames = Observed = Draws = Reads = _Unseen
    RunArguments, ReadGuards = _ArgumentsOfRun, _NoGuards
    Lifted = Expected = object_lines = render_stateful = staticmethod(_refuse)
    refuse_change = attribute_set_error = note_settings = staticmethod(_refuse)
    capturing = drawing = not_drawing = staticmethod(_nothing)

    @staticmethod
    def _none(*_: object) -> tuple[object, ...]:
        return ()

    called_by_autograd = lifted_paths = state_that_varies = only_written_by = _none

    @staticmethod
    def is_of_library(_: type) -> bool:
        return True


_ALONE: tuple[Any] = (ArgumentsAlone,)
