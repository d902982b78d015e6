"""The Python state round one run of a capture: its former contents, the run's writes as effects, the way back."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from types import CodeType
from typing import Any, NoReturn

import torch

from .._torch.symbols import is_symbolic
from ..errors import EscapedTensorError, UnsupportedSideEffectError
from ..frontend.arrays import is_array
from ..frontend.call import FlatCall, may_have_a_form
from ..frontend.openings import Unwrap
from ..frontend.source import ABSENT, table_of
from ..frontend.tree import LEAF, Tree, is_as_opened, open_container
from ..graph.attempts import attempts
from ..identity import ById, IdSet
from ..tracing.tape.again import AdditionsFound, ArgumentsFound, BackwardChangesError
from ..tracing.tape.collection import Newborns
from ..tracing.tape.tape import Learned
from . import holders as kinds
from .draw_patches import stand_in_for
from .drawn_arrays import overlaps
from .effects import RESULT, OfArgument, PythonWrite, SetPlace, StatePlace
from .holders import Holder, kind_of, left_in_cache
from .journals import Identity, Journals, Notes, UntouchedIterator, grows, replaced
from .lifted import containers_asked, lifted_places, stand_in_at, times_lifted
from .observed import Observed
from .opaque import is_generator_of_numpy, results_of
from .own_writes import OwnWrites, forget_written, is_made, now_in
from .program_state import ProgramState
from .reads import Reads
from .writes import GrowingError, MadeValues, PythonWrites

_Named = tuple[list[Any], list[str]]  # values, and the words that people call them by


class PythonState:
    """The state in the function's reach, from before the run. `writes` and `spec` are known after the run: the writes,
    and the structure of the written values.
    """

    def __init__(
        self,
        call: FlatCall,
        name: str,
        before: ProgramState,
        reads: Reads,
        real_of: Callable[[Any], Any],
        learned: Learned,
        given: RunArguments,
        observed: Observed,
    ) -> None:
        self.call = call
        self.own = OwnWrites(before, call.function, observed, learned.disturbed)
        self.name, self.reads, self.real_of = name, reads, real_of
        self.given, self.before = given, before
        self.made = MadeValues(name, self.before, given.of_argument, real_of, Newborns())
        self.containers = learned.containers  # see `Learned`: more become known
        self.journals = Journals(self.before, self._only_written(), given.unread.values())
        may_ask = call.unread is not None and may_have_a_form(call.function)
        self.journals.answer(lambda place: stand_in_at(call.function, place, ABSENT), may_ask=may_ask)
        self.journals.tell(reads)
        reads.lifted = {place.identity for place in lifted_places(call.function)}
        reads.unread.update((id(value), False) for value, _ in call.containers if given.is_own(value, before))
        self.writes: tuple[PythonWrite, ...] = ()
        self.spec: Tree = LEAF
        self.changed: list[Holder] = []  # by the run
        self._standing_in: list[tuple[Holder, Any, Any, Any]] = []  # (holder, key, the object before, its stand-in)
        self._failed: UnsupportedSideEffectError | None = None
        self._strays: ById[torch.nn.Module, list[Holder]] = ById()
        self.given_back: ById[Any, Holder | None] = ById()  # objects that the run made and returns or leaves
        self._taken_over: list[tuple[Holder, Any, str]] = []

    def put_stand_ins(self, where: Callable[[], str]) -> None:
        """Put in stand-ins that note their use: for functions of random generators under the user's own names, for
        iterators, and for containers that the run only adds to. `where` gives the running line.
        """
        self._where = where
        try:
            self.journals.install()
            self._put_stand_ins(self.before.drawing, self.before.iterators)
        except BaseException:
            self.take_stand_ins()
            raise

    def begins(self, code: CodeType) -> None:
        """Put stand-ins for the draws and iterators found through code about to run, until the function returns."""
        found = self.before.enter(code)
        if self.journals.are_installed:
            self._put_stand_ins(*found)

    def _put_stand_ins(self, drawing: list[Any], iterators: list[Any]) -> None:
        for holder, key, value in drawing:
            key = "cell_contents" if holder is not None and holder.kind is kinds.CELL else key
            if holder is None or holder.kind is kinds.PASSAGE or dict(holder.items()).get(key) is not value:
                if not is_generator_of_numpy(value):  # the generator's state shows these draws
                    self._refuse_drawing(value.__name__)
                continue
            stand_in: Any = stand_in_for(value)
            self._stand_in(holder, key, value, staticmethod(stand_in) if holder.kind is kinds.CLASS else stand_in)
        for iterator, step in iterators:
            places = [] if self._is_argument(iterator) else self.before.references_to(iterator)
            if not places:
                self._refuse_taking(str(step))
            refuse = functools.partial(self._refuse_taking, places[0][0].path(places[0][1]), self._where)
            for holder, key in places:
                self._stand_in(holder, key, iterator, UntouchedIterator(iterator, refuse))

    def _stand_in(self, holder: Holder, key: Any, value: Any, stand_in: Any) -> None:
        self._standing_in.append((holder, key, value, stand_in))
        self.reads.stand_ins[id(stand_in)] = value
        holder.put(key, stand_in)

    def _is_argument(self, value: Any) -> bool:
        return any(leaf is value for leaf in self.call.leaves)

    def take_stand_ins(self) -> None:
        """The run is over: replace the remaining stand-ins by the originals."""
        self.journals.remove()
        for holder, key, value, stand_in in self._standing_in:
            if holder.now(key) is stand_in:
                holder.put(key, value)

    def _refuse_drawing(self, what: str) -> NoReturn:
        self._failed = UnsupportedSideEffectError(
            f"`{self.name}` can reach {what}, whose result differs each time, through an object that hides its calls "
            "(a default, a tuple, a partial application). Call it before the call, or by the name of its module."
        )
        raise self._failed

    def _refuse_taking(self, iterator: str, where: Callable[[], str] | None = None) -> NoReturn:
        what = iterator if where is None else f"`{iterator}` at {where()}"
        self._failed = UnsupportedSideEffectError(
            f"`{self.name}` takes from {what}, a source of values that differ each time; a compiled call would repeat "
            "one value. Draw before the call and pass the result (for random numbers, torch's own functions work)."
        )
        raise self._failed

    def raise_failed(self) -> None:
        """The run took from an iterator, whoever has caught that meanwhile."""
        if self._failed is not None:
            raise self._failed

    def changed_since(self) -> Callable[[], str | None]:
        """A function that names a change that the run makes from now on."""
        before = {holder: holder.kind.read(holder.target) for holder in self.before.changed()}
        calls = sum(1 for _ in self.journals.calls())

        def changed() -> str | None:
            for holder in self.before.changed():
                if not holder.kind.same(holder.target, before.get(holder, holder.before)):
                    return holder.name() or "an object"
            return None if sum(1 for _ in self.journals.calls()) == calls else "a container"

        return changed

    def knows(self, value: Any) -> bool:
        """Whether an object is older than the call, and one for all calls."""
        return self.before.knows(value) and value not in self.made.arguments

    def varies(self, value: Any) -> bool:
        """Whether an object is a tensor, container or object among the arguments: a different object in each call."""
        own = self.real_of(value) if isinstance(value, torch.Tensor) else None
        is_leaf = own is not None and any(leaf is own for leaf in self.call.leaves)
        return is_leaf or value in self.made.arguments

    def enter(self, module: torch.nn.Module) -> None:
        """The code of a module runs. No tensor of the capture is to stay in a module that no walk has reached."""
        if not self.before.knows(module) and id(module) not in self.reads.made_here and module not in self._strays:
            own = object.__getattribute__(module, "__dict__")
            tables, name = (own, own.get("_buffers", {})), type(module).__name__
            holders = [Holder(kinds.DICT, t, None, name, "attr", kinds.DICT.read(t)) for t in tables]
            self._strays[module] = holders

    def _leave_strays(self) -> Iterator[str]:
        """Take the tensors of the capture out of the modules; returns the places' names for people."""
        for module, holders in self._strays.items():
            for holder in holders:
                for key, value in kinds.DICT.read(holder.target).items():
                    if value is not holder.before.get(key) and is_made(value):
                        holder.put_back()
                        if self.made.newborns.has(module) is False:
                            yield holder.path(key)

    def needs_another_run(self) -> bool:
        """The function has run. Whether to run again with changed journals: fewer, of containers that it reads, or
        more, of containers that grew.
        """
        if self.journals.are_read:
            self.forget_journals()
            return True
        if asked := [*self.journals.asked.values()]:
            raise ArgumentsFound(self.name, asked[0].path, tuple(asked))
        if self.before.is_late():
            return True
        if stray := next(self._leave_strays(), None):
            raise EscapedTensorError(
                f"`{self.name}` leaves a tensor that it made in {stray}, where nobody looks. Keep it in a module "
                "that the function reaches, or return it."
            )
        self.given.check_closed(self.name)  # its files are made anew for each run
        self.changed = _written(self.own.changed(), self.before, self.call.function)
        has_changed = bool(self.changed) or any(True for _ in self.journals.calls())
        _check_caches(self.name, self.before, self.call, has_changed=has_changed)
        found: set[Identity] = set()
        for holder in self.changed:
            if self.made.is_argument(holder):
                self.given.may_not_read(holder)
                continue
            places = self.before.references_to(holder.target) if grows(holder) else []
            found.update((id(parent.target), key) for parent, key in places)
            found.update((id(holder.target), key) for key in replaced(holder))
        new = found - self.containers.keys() - self.call.only_written
        self.containers.update(dict.fromkeys(new, 0))
        return bool(new) or self.own.needs_another_run(self.name)

    def _only_written(self) -> set[Identity]:
        tried = {place for place, is_read in self.containers.items() if not is_read}
        known = self.call.only_written | containers_asked(self.call.function)
        return tried | (known - self.containers.keys())

    def stumbled(self, *, is_foreign: bool) -> bool:
        """A run raised. Whether the error may be due to its journals: then it is to run again without."""
        if not self.journals.are_read and not (is_foreign and self.journals):
            return False
        self.forget_journals()
        return True

    def forget_journals(self) -> None:
        """The containers behind the journals that were read matter to the function; where none was, all may."""
        read = [(notes, places) for notes, places in self.journals.made if notes.is_read]
        self.given.reads([notes for notes, _ in read])
        found = {(id(holder.target), key): notes.wanted for notes, places in read for holder, key in places}
        self.containers.update(found or dict.fromkeys(self._only_written(), 1))

    def outputs(self, result: Any, unwrap: Unwrap, more: _Named) -> tuple[list[Any], list[str], Tree]:
        """The leaves of the result, of the written values, and of `more` outputs; the leaves' names for people; the
        structure of the result.
        """
        self.own.after = {holder: now_in(holder) for holder in self.changed}
        result = self.journals.take(RESULT, result)
        try:
            found = PythonWrites(
                self.name,
                self.call.function,
                self.before,
                self.changed,
                self.real_of,
                self.made,
                fills_caches=self.call.fills_caches,
            )
        except GrowingError as error:
            places = self.before.references_to(error.container) if error.container is not None else []
            error.wanted = max((self.containers.get((id(h.target), key), 1) for h, key in places), default=1)
            raise
        found.call_methods(self.journals.calls())
        self.writes = tuple(map(self.made.in_arguments, found.entries))
        opened = self.made.all(result, found.values + more[0], unwrap, objects=self.call.objects)
        tree, self.spec = opened.tree.children
        self.given_back = ById((made, _holder_of(made)) for made in opened.containers)
        named = zip(found.paths + more[1], self.spec.children, strict=True)
        return opened.leaves, [*tree.paths("out"), *(p for name, child in named for p in child.paths(name))], tree

    def reached(self) -> dict[type, frozenset[int]]:
        """By class, the ids of objects that no argument may be, see `RunArguments`."""
        return self.given.reached(self.name, self.before, self.writes)

    def settle(self) -> None:
        """The run is over, its backward too: everything as it was before."""
        written, seen = self.own.changed(), self.own.after or {}
        for holder in (*written, *filter(None, self.given_back.values())) if self.own.observed.has_run else ():
            if not self._is_still(holder, seen.get(holder, holder.before)):
                raise BackwardChangesError(
                    f"the backward of `{self.name}` changes {holder.name() or 'an object'}; a compiled backward "
                    "would not repeat the change. Do it outside of the hook or Function."
                )
        for holder in self.before.caches:  # as eager leaves them, too
            holder.before = left_in_cache(holder.target, holder.before)
            holder.put_back(None)
        for holder in written:
            self.own.undo(holder)
        forget_written(self.reads, self.before, self.own.read)  # places with the value from before have no change
        for holder in written:
            if holder.kind is kinds.CLASS:  # who reads its attributes by way of `type(self)` is not seen
                place = self.reads.place(holder.place, "dict", holder.target.__name__, "attr")
                for write in self.writes:
                    if isinstance(write, SetPlace) and write.target is holder.target:
                        self.reads.add(place, write.key, holder.before.get(write.key, ABSENT))

    def _is_still(self, holder: Holder, expected: Any) -> bool:
        """Whether a holder has its former contents, or stand-ins: `self.total += 1` sets a buffer to itself."""
        if holder.kind.same(holder.target, expected):
            return True
        now = holder.kind.read(holder.target)
        if isinstance(now, dict) and isinstance(expected, dict) and list(now) == list(expected):
            return all(map(self._is_same, now.values(), expected.values()))
        if isinstance(now, list) and isinstance(expected, list) and len(now) == len(expected):
            return all(map(self._is_same, now, expected))
        return False

    def _is_same(self, now: Any, expected: Any) -> bool:
        if now is expected:
            return True
        return isinstance(now, torch.Tensor) and self._real(now) is self._real(expected)

    def _real(self, value: Any) -> Any:
        real = self.real_of(value)
        return value if real is None else real

    @contextlib.contextmanager
    def as_it_is(self, region: str, who: str) -> Iterator[None]:
        """Context: an eager region runs, and sees the state itself. `who` names the region with its line.

        Raises UnsupportedSideEffectError if the function has changed an object that the region may read.
        """
        self.before.enter_all()
        self.take_stand_ins()
        try:
            written = next(self.journals.calls(), None)
            changed = self.own.changed()
            if written is not None or changed:
                what = changed[0].name() if written is None else written[1]
                raise UnsupportedSideEffectError(
                    f"`{self.name}` changes {what or 'an object'} before {who}, whose code runs outside the graph "
                    f"and may read the change: a compiled call writes to Python's state after the graph. Move the "
                    f"change behind `{region}`."
                )
            yield
            self.take_over(region)
        finally:
            self.journals.install()
            for holder, key, value, stand_in in self._standing_in:
                if holder.now(key) is value:
                    holder.put(key, stand_in)

    def take_over(self, region: str) -> None:
        """An eager region's changes count as older than the run: each call makes them anew."""
        for holder in self.before.changed():
            before, holder.before = holder.before, holder.kind.read(holder.target)
            self._taken_over.append((holder, before, region))
            attempts().undo_then(functools.partial(holder.kind.put_back, holder.target, before, holder.before))

    def check_taken_over(self, name: str) -> None:
        """Raise where the function looks at a region's changes: it would see the capture's."""
        for holder, before, region in self._taken_over:
            place, old = self.reads.places.get(id(holder.place)), before if isinstance(before, dict) else {}
            lifted = [key for key in old if (id(holder.place), key) in self.reads.lifted]
            changed = [key for key in lifted if old[key] is not holder.now(key)]
            if is_read := place is not None and place.kind != "asked":
                changed += [key for key in place.items if old.get(key, ABSENT) is not place.look(key)]
            if changed or (is_read and not isinstance(before, dict)):
                what = holder.path(changed[0]) if changed else holder.name() or "an object"
                raise UnsupportedSideEffectError(
                    f"`{name}` reads {what}, and the eager region `{region}` changes it. Let the region return the "
                    "value."
                )

    def give_up(self, *, is_interrupted: bool) -> None:
        """Undo the run's writes. An interrupted run's writes stay, and the calls that it noted are made now."""
        list(self._leave_strays())
        for holder in self.before.caches:
            holder.put_back(None)
        if is_interrupted:
            self.journals.play()
        for holder in self.own.changed():
            (self.own.leave if is_interrupted else self.own.undo)(holder)


def _check_caches(name: str, before: ProgramState, call: FlatCall, *, has_changed: bool) -> None:
    """Raise where the run has filled the cache of a function with tensors, or has written as well: that the function
    may have done, and a call that finds the cache filled does not.
    """
    filled = [holder for holder in before.caches if holder.is_written()]
    for holder in filled:
        new = left_in_cache(holder.target, holder.before)[1]
        table, results = results_of(holder.target)
        made = [results.get(key) for key in table if id(key) not in new and not before.knows(results.get(key))]
        if any(is_made(x) or kind_of(x) or (type(table_of(x)) is dict and not is_symbolic(x)) for x in made):
            raise EscapedTensorError(
                f"`{name}` leaves a tensor, container or object that it made in the cache of "
                f"`{_name(holder.target)}`; a compiled call would not repeat this. Fill the cache before the first "
                "call."
            )
    if filled and has_changed:
        error, remedy = UnsupportedSideEffectError, "Call it with equal arguments in each call, or outside."
        if call.fills_caches:
            error, remedy = EscapedTensorError, "Call this once before: with the result kept, later calls are compiled."
        raise error(
            f"`{name}` fills the cache of `{_name(filled[0].target)}`{_defined(filled[0].target)} and changes Python's "
            f"state: a compiled call can't tell whether the function with the cache is to do so. {remedy}"
        )


def _holder_of(made: Any) -> Holder | None:
    kind = kind_of(made)
    target, kind = (table_of(made), kinds.DICT) if kind is None else (made, kind)
    name = f"a {type(made).__name__} that it gives back"
    return None if target is None else Holder(kind, target, None, name, "", kind.read(target))


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", "a function")


def _defined(function: Any) -> str:
    """Where a function with a cache is defined."""
    code = getattr(getattr(function, "__wrapped__", None), "__code__", None)
    return "" if code is None else f" at {code.co_filename}:{code.co_firstlineno} in {code.co_name}"


def _written(changed: list[Holder], state: ProgramState, function: Any) -> list[Holder]:
    """Changed holders, and holders with a lifted argument overwritten by the old value: the next call does
    so by a new number.
    """
    lifted: ById[Any, list[StatePlace]] = ById()
    for place in lifted_places(function):
        lifted.setdefault(place.target, []).append(place)
    for holder in state.holders if lifted else ():
        for place in lifted.get(holder.target, ()):
            stand_in = stand_in_at(function, place.identity)
            is_written = stand_in is not None and holder.now(place.key) is not stand_in
            if is_written and not any(holder is known for known in changed):
                changed.append(holder)
    return changed


# -------------------------------------------------------------------- what a run is given
# What a run is given: its arguments, made anew with stand-ins in them, so that the user's own stay as they are.


class RunArguments:
    """`args` and `kwargs` made of the `leaves`. `of_argument`: the containers among the arguments and the tables of
    their attributes, as each call knows its own; `named`: the containers with their names for people.
    `arguments(leaves, made)` makes them.
    """

    def __init__(self, call: FlatCall, leaves: list[Any], arguments: Callable[..., Any]) -> None:
        self.call = call
        self.leaves = leaves
        paths = [path for _, path in call.containers]
        unread = [node.number for _, node in call.tree.walk("") if node.kind == "unread"]
        self.unread = {number: Notes(*call.containers[number]) for number in unread}
        made: dict[int, Any] = {number: notes.stand_in for number, notes in self.unread.items()}
        self.args, self.kwargs = arguments(leaves, made)
        arrays = {node.number for _, node in call.tree.walk("") if node.kind == "array"}  # nothing writes to these
        self.named = [(value, paths[number]) for number, value in made.items() if number not in arrays]
        self.of_argument: ById[Any, OfArgument] = ById()
        for number, value in made.items():
            self.of_argument[value] = OfArgument(
                number, type(call.containers[number][0] if number in unread else value)
            )
            if type(table := table_of(value)) is dict:
                self.of_argument[table] = OfArgument(number, type(value), attributes=True)
        states = call.tree.children[0].children[: times_lifted(call.function)]
        numbers = {node.number for tree in states for _, node in tree.walk("")}
        self._of_state = IdSet(call.containers[number][0] for number in numbers if number >= 0)
        # Writes to registered pytrees and dataclasses are refused, not replayed.
        closed = [node.number for _, node in call.tree.walk("") if node.kind in ("registered", "dataclass")]
        self._closed = [(made[n], open_container(made[n]), paths[n]) for n in closed if n in made]

    def may_not_read(self, holder: Holder) -> None:
        """A container was added to. Capture again where it is not known whether the call reads it."""
        container, path = self.call.containers[self.of_argument[holder.target].number]
        known, place = self.call.unread, (path, type(container))
        if known is not None and place not in known and container not in self._of_state and grows(holder):
            raise AdditionsFound({place: False})

    def reads(self, notes: list[Notes]) -> None:
        """A run has read containers that it was only to add to: some of the `notes`, or any without notes."""
        own = [one for one in self.unread.values() if one in notes or not notes]
        if own:
            raise AdditionsFound({(one.path, type(one.real)): True for one in own})

    def check_closed(self, name: str) -> None:
        """Containers that are no lists, dicts or plain objects are as they were."""
        for value, opened, path in self._closed:
            if not is_as_opened(value, opened):
                refuse_change(name, path)

    def reached(self, name: str, state: ProgramState, writes: Iterable[PythonWrite]) -> dict[type, frozenset[int]]:
        """By class, the ids of objects and arrays that the function reaches by itself: none may be an argument. So with
        lists and dicts where the call writes to its arguments.
        """
        classes = {node.type for _, node in self.call.tree.walk("") if node.kind in ("object", "array")}
        if any(type(write.target) is OfArgument for write in writes):
            classes.update(type(container) for container, _ in self.call.containers)
        found: dict[type, IdSet[Any]] = {}
        for value in state.met() if classes else ():
            if type(value) in classes and value not in self.of_argument:
                found.setdefault(type(value), IdSet()).add(value)
        for container, path in self.call.containers:
            others = found.get(type(container), IdSet[Any]())
            if self.is_lifted(container, state):
                others.discard(container)
            if container in others or overlaps(container, others):
                raise UnsupportedSideEffectError(
                    f"`{name}` is given {path}, a {type(container).__name__} that it also reaches by itself: pass it, "
                    "or use it, not both."
                )
        return {cls: frozenset(map(id, values)) for cls, values in found.items()}

    def is_own(self, container: Any, state: ProgramState) -> bool:
        """Whether the items of a container differ in each call: only the guards of arguments ask for them."""
        return is_array(container) or self.is_lifted(container, state)

    def is_lifted(self, container: Any, state: ProgramState, inside: IdSet[Any] | None = None) -> bool:
        """Whether the function reaches a container or array only at places that are arguments, see `Lifted`, or below.
        `inside`: containers on the way.
        """
        inside = inside or IdSet()
        if container not in self._of_state or container in inside:
            return False
        lifted = {place.identity for place in lifted_places(self.call.function)}
        places = state.references_to(container)
        return bool(places) and all(
            not lifted.isdisjoint({(id(holder.target), key), (id(holder.place), key)})
            or self.is_lifted(holder.target if holder.owner is None else holder.owner, state, inside | [container])
            for holder, key in places
        )


def refuse_change(name: str, what: str) -> NoReturn:
    """Refuse a write to an argument that no call would repeat."""
    raise UnsupportedSideEffectError(
        f"`{name}` changed {what} (added, removed or replaced an item); a compiled call would not repeat this. "
        "Return the new values instead."
    )
