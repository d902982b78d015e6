"""Containers that a run only adds to: the additions are noted, and compiled calls add to the present contents.

A list that grows by an item in each call differs in each: guards on its items would fail every time. A run that changes
a container's number of items is repeated with a stand-in for the container, see `Notes`. Methods that give nothing
(`append`, `update`, ...) and items that are set are noted, in order. The container's length, and its items by index,
become arguments of the function, see `Answer`. For any further question to the stand-in, from Python or an extension,
the run is repeated once more without.

A run that replaces a user's object is treated likewise: without questions to the old object, any object of its class
may be there.
"""

from __future__ import annotations

import collections
import functools
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from types import FrameType
from typing import Any, NoReturn

import torch

from .._torch.nested import refuse_flattening
from .._torch.symbols import concrete, is_symbolic, map_symbolic
from ..errors import UnsupportedSideEffectError
from ..frontend.source import ABSENT
from ..frontend.values import is_plain
from ..house import is_house_module
from ..identity import IdSet, class_property
from ._torch.asked import tell_length, tell_type
from .effects import NOTES, StatePlace, Text
from .holders import CELL, DEQUE, DICT, NAMESPACE, Holder
from .libraries import is_outside
from .lifted import Answer, window_of
from .objects import is_plain_object
from .own_writes import is_made
from .program_state import ATOMS, ProgramState
from .reads import TABLES, Reads

Identity = tuple[int, Any]
Place = tuple[Holder, Any]

_LISTS, _DICTS, _SETS = (list, collections.deque), (dict, collections.OrderedDict, collections.defaultdict), (set,)
KINDS = (*_LISTS, *_DICTS, collections.Counter, *_SETS)
_WRITERS = {
    "append": _LISTS,
    "extend": _LISTS,
    "insert": _LISTS,
    "appendleft": (collections.deque,),
    "extendleft": (collections.deque,),
    "add": _SETS,
    "update": (*_DICTS, collections.Counter, *_SETS),
    "subtract": (collections.Counter,),
    "clear": KINDS,
    "__setitem__": (*_DICTS, collections.Counter),
}
_READERS = (
    "__len__ __iter__ __bool__ __contains__ __getitem__ __delitem__ __reversed__ __eq__ __ne__ __lt__ __le__ __gt__ "
    "__ge__ __add__ __radd__ __mul__ __rmul__ __imul__ __or__ __ror__ __ior__ __and__ __rand__ __iand__ __sub__ "
    "__rsub__ __isub__ __xor__ __rxor__ __ixor__ __hash__ __repr__ __str__ __format__ __reduce__ __reduce_ex__ "
    "__copy__ __deepcopy__ __dir__ __sizeof__ __getstate__ __index__ __int__ __float__ __call__ __enter__"
).split()
_KEPT = set(
    "__new__ __init__ __class__ __getattribute__ __setattr__ __delattr__ __init_subclass__ __subclasshook__ __doc__ "
    "__class_getitem__".split()
)


class Notes:
    """A run's changes of a container: `calls` are the methods called so far, `is_read` whether it was asked anything
    else. `stand_in` takes its place during the run: an instance of a subclass of the container's type, holding a
    sentinel that makes C extensions fail. Other threads get at the container itself.
    """

    def __init__(self, real: Any, path: str) -> None:
        self.real, self.path, window = real, path, window_of(real)
        self.limit = None if window == -1 else window  # the most items of a window
        self.take: Callable[[FrameType, Any], Any] = lambda frame, value: value
        self.ask: Callable[[Notes, int | None], Any] = Notes.refuse  # the length (None), or a former item
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        # The former items that calls took from the front (None: calls changed others), and the items added since.
        self.taken: int | None = 0
        self.added: list[Any] = []
        self.is_cleared = False  # no former item is left
        self.is_read, self.wanted = False, 1  # the number of items that the program asks for
        self.thread = threading.get_ident()
        base = next(base for base in _CLASSES if isinstance(real, base))
        self.stand_in: Any = base.__new__(_CLASSES[base])
        object.__setattr__(self.stand_in, NOTES, self)
        if base in _FILLS:
            _FILLS[base](self.stand_in)

    def is_anothers(self) -> bool:
        return threading.get_ident() != self.thread

    def refuse(self, _: object = None) -> NoReturn:
        self.is_read = True
        raise UnsupportedSideEffectError("a container that grows is read")  # nobody sees it: the run is repeated

    def item(self, key: Any) -> Any:
        """The item at a key that the last calls have set, or at an index."""
        if isinstance(self.real, _LISTS):
            return self._items(key) if type(key) is slice else self._item(key)
        for name, args in reversed(self.calls if is_plain(key) else ()):
            if name != "__setitem__" or not is_plain(args[0]):
                break  # may have put an item at this place, too
            if args[0] == key:
                return self._known(args[-1])
        return self.refuse()

    def _known(self, item: Any) -> Any:
        return self.refuse() if type(item) is Text else item

    def _answer(self, index: int | None) -> Any:
        return 0 if self.is_cleared and index is None else self.ask(self, index)

    def length(self) -> Any:
        """The number of items. It is an argument of the function, or becomes one."""
        is_known = isinstance(self.real, _LISTS) or (isinstance(self.real, KINDS) and not self.calls)
        if self.taken is None or not is_known:
            return self.refuse()
        total, limit = self._answer(None) - self.taken + len(self.added), self.limit
        return total if limit is None or total <= limit else limit

    def _item(self, index: Any) -> Any:
        limit, count = self.limit, len(self.added)
        if type(index) is not int or (limit is not None and not -limit <= index < 0):
            return self.refuse()
        if -count <= index < 0:
            return self._known(self.added[index])
        return self.refuse() if self.taken is None else self._former(index + (count if index < 0 else self.taken))

    def _former(self, index: int) -> Any:
        """An item that was there before the call, by its index."""
        assert self.taken is not None
        count = self._answer(None)
        if not (count >= self.taken - index if index < 0 else count > index):
            if index >= 0 and self.added:
                at = int(index - count)
                return self._known(self.added[at]) if at < len(self.added) else self.refuse()
            raise IndexError(f"{type(self.real).__name__} index out of range")
        found = self._answer(index)
        return found if is_plain(found) or is_symbolic(found) or type(found) is torch.Tensor else self.refuse()

    def _items(self, key: slice) -> Any:
        """The last few items."""
        is_end = key.step is None and key.stop is None and type(key.start) is int
        return self._last(-key.start) if is_end and isinstance(self.real, list) else self.refuse()

    def _last(self, count: int) -> list[Any]:
        if not 0 < count <= _MOST:
            return self.refuse()
        if self.length() < count:  # so far
            self.wanted = count
            return self.refuse()
        return [self._item(index) for index in range(-count, 0)]

    def all(self) -> Any:
        """The items of a window that is full."""
        return iter(self._last(self.limit or 0))

    def remove_first(self, index: Any = None, *, name: str) -> Any:
        """`pop(0)` of a list, `popleft()` of a deque: the first item is gone, and given back."""
        is_list = isinstance(self.real, list)
        is_first = type(index) is int and index == 0 if is_list else index is None and name == "popleft"
        if not is_first or self.taken is None or self.limit is not None or not self._answer(None) > self.taken:
            return self.refuse()
        found = self._former(self.taken)
        self.taken += 1
        self.calls.append((name, (0,) if is_list else ()))
        return found

    def write(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs or not isinstance(self.real, _WRITERS[name]) or len(args) != _COUNTS.get(name, 1):
            self.refuse()
        if name in ("extend", "extendleft", "update", "subtract"):
            args = (self._snapshot(args[0]),)
        if isinstance(self.real, (dict, set)) and name in ("add", "__setitem__"):
            self._check_key(args[0])
        self.calls.append((name, args))
        if name in ("append", "extend"):
            self.added += args if name == "append" else args[0]
        else:
            self.is_cleared = name == "clear"
            self.taken, self.added = 0 if self.is_cleared else None, []

    def _snapshot(self, values: Any) -> Any:
        """An iterable's present items, for `extend` and `update`."""
        if isinstance(self.real, dict) and hasattr(values, "keys"):
            return {key: values[key] for key in values.keys()}  # noqa: SIM118 - as `update` does
        return list(values)

    def _check_key(self, key: Any) -> None:
        if is_symbolic(key) or type(key) is Text:
            return  # its number can be a key
        try:
            hash(key)
        except TypeError:
            self.refuse()


_COUNTS = {"insert": 2, "__setitem__": 2, "clear": 0}
_MOST = 64  # items of a slice


def _writer(name: str) -> Callable[..., None]:
    def write(self: Any, *args: Any, **kwargs: Any) -> None:
        notes = self._foregrad_notes
        if notes.is_anothers():
            getattr(notes.real, name)(*args, **kwargs)
        else:
            frame = sys._getframe(1)
            notes.write(name, tuple(notes.take(frame, arg) for arg in args), kwargs)

    return write


def _reader(name: str) -> Callable[..., Any]:
    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        notes = self._foregrad_notes
        if notes.is_anothers():
            return bool(notes.real) if name == "__bool__" else getattr(notes.real, name)(*args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__")
        # A library's loop goes through all items: each length has its own graph.
        answer = None if is_outside(caller) and not is_house_module(caller) else _ANSWERED.get(name)
        return notes.refuse() if answer is None or kwargs or len(args) > 1 else answer(notes, *args)

    return read


_ANSWERED: dict[str, Callable[..., Any]] = {
    "pop": functools.partial(Notes.remove_first, name="pop"),
    "popleft": functools.partial(Notes.remove_first, name="popleft"),
    "__getitem__": Notes.item,
    "__iter__": Notes.all,
    "__len__": lambda notes: int(notes.length()),  # `len` in the program's code asks `length_of`
    "__bool__": lambda notes: bool(notes.length() > 0),
}


def length_of(stand_in: Any) -> Any:
    """The length of a stand-in for a container: a number that may be symbolic."""
    notes = stand_in._foregrad_notes
    return len(notes.real) if notes.is_anothers() else notes.length()


def _window(stand_in: Any) -> Any:
    """The most items of a window. That the container has as many is a guard, as of its length."""
    notes = stand_in._foregrad_notes
    if not notes.is_anothers():
        notes.length()
    return notes.real.maxlen


def _get(self: Any, name: str) -> Any:
    notes = self._foregrad_notes
    return getattr(notes.real, name) if notes.is_anothers() else notes.refuse()


def _extend(self: Any, values: Any) -> Any:
    self.extend(values)
    return self


def _type(self: Any) -> type:
    return type(self._foregrad_notes.real)


def _class_of_stand_ins(base: type) -> type:
    names = {*_READERS, *dir(base)} - _KEPT
    members: dict[str, Any] = {name: _reader(name) for name in names} | {name: _writer(name) for name in _WRITERS}
    members |= {"__getattr__": _get, "__iadd__": _extend, "__class__": property(_type), "__slots__": (NOTES,)}
    if base is collections.deque:
        members["maxlen"] = property(_window)
    cls = type("Journal", (base,), members)
    refuse_flattening(cls, lambda value, *_: value._foregrad_notes.refuse())
    tell_type(cls, _type)
    tell_length(cls, length_of)
    return cls


_CLASSES = {base: _class_of_stand_ins(base) for base in (list, collections.deque, dict, set, object)}
ATOMS.update(_CLASSES.values())  # a walk asks them nothing


class _Foreign:
    """A stand-in's contents, found by PyTorch's functions."""

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        for arg in (*args, *(kwargs or {}).values()):
            if hasattr(type(arg), NOTES):
                arg._foregrad_notes.refuse()
        return NotImplemented


_FOREIGN = _Foreign()
_FILLS: dict[Any, Callable[[Any], None]] = {
    list: lambda items: list.append(items, _FOREIGN),
    collections.deque: lambda items: collections.deque.append(items, _FOREIGN),
    dict: lambda table: dict.__setitem__(table, _FOREIGN, _FOREIGN),
    set: lambda items: set.add(items, _FOREIGN),
}


def grows(holder: Holder) -> bool:
    """Whether a run changed the length of a user's container, or the items of a container that keeps the last few."""
    if holder.step in TABLES or type(holder.target) not in KINDS or holder.style == "attr":
        return False
    return len(holder.target) != len(holder.before) or holder.kind is DEQUE


def replaced(holder: Holder) -> Iterator[Any]:
    """The keys of objects that a run replaced by new objects of equal class; each call is to make them anew."""
    if holder.kind in (DICT, NAMESPACE):
        now = holder.kind.read(holder.target)
        for key, before in holder.before.items():
            value = now.get(key)
            if value is before or type(value) is not type(before) or isinstance(value, torch.Tensor):
                continue
            if not is_plain(value) and is_plain_object(value):
                yield key


class Journals:
    """The journals of one run, and its `said` messages, see `python/effects.py`. `wanted`: the places of
    containers that earlier runs found to grow; `arguments`: journals of the call's arguments.
    """

    def __init__(self, state: ProgramState, wanted: Collection[Identity], arguments: Iterable[Notes]) -> None:
        self.made: list[tuple[Notes, list[Place]]] = [(notes, []) for notes in arguments]
        self.said: list[tuple[Any, str, str, tuple[Any, ...]]] = []
        self.are_installed = False
        self.take: Callable[[Any, Any], Any] = lambda place, value: value
        known: IdSet[Any] = IdSet()
        for holder in state.holders if wanted else ():
            for key, value in holder.items():
                if (id(holder.target), key) in wanted and value not in known:
                    known.add(value)
                    places = state.references_to(value)
                    if places:
                        self.made.append((Notes(value, holder.path(key)), places))
        self.asked: dict[Identity, Answer] = {}  # questions without an answer so far

    def answer(self, known: Callable[[Identity], Any], *, may_ask: bool) -> None:
        """Let containers from outside answer: `known` gives an argument by its place, `ABSENT` for any other place.
        `may_ask`: there may be further arguments.
        """
        self._known, self._may_ask = known, may_ask

    def _ask(self, places: list[Place], notes: Notes, index: int | None) -> Any:
        question = Answer(_place_of(places) or notes.real, index, notes.path, window_of(notes.real))
        if (found := self._known(question.identity)) is not ABSENT:
            return found
        if not self._may_ask:
            return notes.refuse()
        self.asked[question.identity] = question
        return question.of(notes.real)

    def __bool__(self) -> bool:
        return bool(self.made)

    def tell(self, reads: Reads) -> None:
        """The containers' contents do not matter; for a container with a single place, nor does its identity."""
        for notes, places in self.made:
            reads.stand_ins[id(notes.stand_in)] = notes.real
            reads.unread[id(notes.real)] = _place_of(places) is not None

    def takes(self, take: Callable[[Any, Any], Any]) -> None:
        """`take(frame, value)` gives the value to note for a call by a frame: each call may make its text; `take(place,
        value)` the value that a place keeps.
        """
        self.take = take
        for notes, _ in self.made:
            notes.take = take

    def install(self) -> None:
        self.are_installed = True
        for notes, places in self.made:
            notes.ask = functools.partial(self._ask, places) if places else Notes.refuse
            for holder, key in places:
                holder.put(key, notes.stand_in)

    def remove(self) -> None:
        """The run is over: the containers are back, where the run left the journals in their places."""
        self.are_installed = False
        for notes, places in self.made:
            notes.ask = Notes.refuse
            for holder, key in places:
                if holder.now(key) is notes.stand_in:
                    holder.put(key, notes.real)

    @property
    def are_read(self) -> bool:
        return any(notes.is_read for notes, _ in self.made)

    def calls(self) -> Iterator[tuple[StatePlace | Any, str, str, tuple[Any, ...]]]:
        """Each call that was noted: the container or its place, its name for people, method, arguments."""
        for notes, places in self.made:
            for name, args in notes.calls:
                yield _place_of(places) or (notes.real if places else notes.stand_in), notes.path, name, args
        yield from self.said

    def play(self) -> None:
        """Make the noted calls, but for calls that take stand-ins of tensors."""
        for place, _, name, args in self.calls():
            if not is_made(args):
                target = place.get() if isinstance(place, StatePlace) else getattr(place, NOTES, place)
                getattr(target.real if isinstance(target, Notes) else target, name)(*map_symbolic(args, concrete))


def _place_of(places: list[Place]) -> StatePlace | None:
    """The place of a container with a single place that code can write out."""
    if len(places) != 1:
        return None
    holder, key = places[0]
    if holder.kind not in (DICT, NAMESPACE, CELL):
        return None
    return StatePlace("attribute" if holder.kind is CELL else "item", holder.target, key, holder.path(key))


# -------------------------------------------------------------------- iterators
# Iterators older than the call. An item taken from an iterator is gone. So a run finds a stand-in in the iterator's
# place, and the stand-in refuses to give items.


class UntouchedIterator:
    """Stands for an iterator. `refuse` raises: it is called where an item is to be taken, or a question asked."""

    __slots__ = ("_of", "_refuse")

    def __init__(self, of: Any, refuse: Callable[[], NoReturn]) -> None:
        self._of = of
        self._refuse = refuse

    @class_property
    def __class__(self) -> type:
        return type(self._of)

    def __iter__(self) -> UntouchedIterator:
        return self

    def __next__(self) -> Any:
        self._refuse()

    def __length_hint__(self) -> int:
        self._refuse()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse()

    def __getattr__(self, name: str) -> Any:
        self._refuse()


tell_type(UntouchedIterator, lambda iterator: type(iterator._of))
