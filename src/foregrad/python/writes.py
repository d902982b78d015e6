"""The writes that a run made to the Python state of the user's program, found by comparing, as effects of the call.

`MadeValues` knows the values that can be written. Anything else is refused by the name of its place.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import torch

from .._torch.stand_ins import is_stand_in
from .._torch.symbols import is_symbolic
from ..errors import EscapedTensorError, UnsupportedSideEffectError
from ..frontend.openings import Unwrap
from ..frontend.source import ABSENT
from ..frontend.tree import Opened, Tree, check_leaves, flatten, is_leaf, list_of, open_arguments, open_objects
from ..frontend.values import is_plain
from ..identity import ById, IdSet
from ..tracing.tape.collection import Newborns
from . import holders as kinds
from .effects import CallMethod, ChangeSet, Kept, OfArgument, PythonWrite, SetItems, SetPlace, StatePlace, Text
from .holders import Holder, is_import
from .lifted import stand_in_at
from .objects import is_plain_object, look_into
from .program_state import ProgramState


class GrowingError(UnsupportedSideEffectError):
    """A run changed how many items a `container` has that it reads. A window does so until it is full, or has the items
    that are `wanted`; None: it is not worth another capture then.
    """

    wanted = 1

    def __init__(self, message: str, container: Any) -> None:
        super().__init__(message)
        self.container = container


class PythonWrites:
    """The writes of one run: `entries`, and their `values`.

    `fills_caches`: a place that was empty and holds a tensor now is refused (`EscapedTensorError`): the call runs
    eagerly, and the next one finds it filled. `real_of(fake)` is the tensor from outside that a stand-in stands for.
    """

    def __init__(
        self,
        name: str,
        function: Any,
        state: ProgramState,
        changed: list[Holder],
        real_of: Callable[[Any], Any],
        made: MadeValues,
        *,
        fills_caches: bool,
    ) -> None:
        self.name = name
        self.function = function
        self.state = state
        self.real_of = real_of
        self.fills_caches = fills_caches
        self.entries: list[PythonWrite] = []
        self.values: list[Any] = []
        self.paths: list[str] = []
        self.made = made
        self._holders = ById((holder.target, holder) for holder in changed)
        for holder in changed:
            find = _FINDERS.get(holder.kind)
            if find is None:
                what = "takes from" if holder.kind in (kinds.RANDOM, kinds.NUMPY_RANDOM) else "changes in place"
                of = f"a {type(holder.target).__name__}"
                if holder.kind is kinds.OUTSIDE:
                    what, of = "sets", "of a library"
                raise UnsupportedSideEffectError(
                    f"`{name}` {what} {holder.name() or 'an object'} ({of}); a compiled call would not repeat this. "
                    "Do it before the call and pass the result."
                )
            find(self, holder)

    # ---------------------------------------------------------------- kinds of holders

    def table(self, holder: Holder) -> None:
        now, before = holder.kind.read(holder.target), holder.before
        kept = [key for key in before if key in now]
        in_place = [*kept, *(key for key in now if key not in before)]
        # Items that were taken out and put in again are last: all items behind the first such item are written anew.
        same = next((i for i, (a, b) in enumerate(zip(in_place, now, strict=True)) if a is not b), len(now))
        moved = set(list(now)[same:])
        gone = [key for key in before if key not in now or key in moved]
        written = [key for key in now if key in moved or self._is_written(holder, key, now[key])]
        is_argument = self._is_of_call(holder, len(now))
        if len(now) != len(before) and holder.style == "item" and not is_argument:
            self._check_growth(holder, [now[key] for key in written])
        for key in gone:
            self._put(holder, key, ABSENT, before[key])
        for key in written:
            self.made.check_key(key, holder.name())
            self._put(holder, key, now[key], before.get(key, ABSENT), is_argument=is_argument)

    def _put(self, holder: Holder, key: Any, value: Any, was: Any, *, is_argument: bool = False) -> None:
        path, kind, at = holder.path(key), "item" if holder.kind in _OF_ITEMS else "attribute", None
        if value is not ABSENT:
            at = self._value(value, path) if is_argument else self._add(value, path, was)
        counts = not is_argument and self._varies(was, value)
        self.entries.append(SetPlace(holder.target, path, kind, key, at, counts=counts))

    def attributes(self, holder: Holder) -> None:
        now, before = holder.kind.read(holder.target), holder.before
        name = next(key for key in [*now, *before] if now.get(key, ABSENT) is not before.get(key, ABSENT))
        raise attribute_set_error(self.name, holder.path(name))

    def _is_written(self, holder: Holder, key: Any, value: Any) -> bool:
        before, stand_in = holder.before.get(key, ABSENT), self._stand_in(holder, key)
        if value is (before if stand_in is None else stand_in) or self._stands_for(value, before):
            return False
        # A namespace that gets a module, a class or a function: an import, or something of ours.
        return not (holder.kind is kinds.NAMESPACE and before is ABSENT and is_import(value))

    def _stand_in(self, holder: Holder, key: Any) -> Any:
        """The stand-in for a former value (a symbolic number or a container of tensors), or None."""
        return stand_in_at(self.function, (id(holder.place), key))

    def _stands_for(self, value: Any, before: Any) -> bool:
        return is_stand_in(value) and before is not None and self.real_of(value) is before

    def cell(self, holder: Holder) -> None:
        now, stand_in = holder.kind.read(holder.target), self._stand_in(holder, "cell_contents")
        if now is (holder.before if stand_in is None else stand_in) or self._stands_for(now, holder.before):
            return
        self._put(holder, "cell_contents", now, holder.before)

    def sequence(self, holder: Holder) -> None:
        now, before = list(holder.kind.read(holder.target)), holder.before
        for i, (item, was) in enumerate(zip(now, before, strict=False)):
            is_number = item is not None and item is self._stand_in(holder, i)
            if is_number or self._stands_for(item, was):
                now[i] = was
        changed = [i for i, (item, was) in enumerate(zip(now, before, strict=False)) if item is not was]
        start = changed[0] if changed else min(len(now), len(before))
        if start == len(now) == len(before):
            return
        is_argument = self._is_of_call(holder, len(now))
        if len(now) != len(before) and not is_argument:
            self._check_growth(holder, now[start:])
        former = ById((item, -1 - i) for i, item in reversed(list(enumerate(before))))
        moves = any(now[i] in former for i in changed if not is_plain(now[i]))
        if holder.kind is kinds.LIST and len(now) == len(before) and not moves:
            for i in changed:
                self._put(holder, i, now[i], before[i], is_argument=is_argument)
            return
        start = 0 if holder.kind is kinds.DEQUE else start
        items = []
        for i, item in enumerate(now[start:], start):
            known = former.get(item) if not is_plain(item) else None
            if known is None:
                path = f"{holder.name()}[{i}]"
                known = self._value(item, path) if is_argument else self._add(item, path, ABSENT)
            items.append(known)
        self.entries.append(SetItems(holder.target, holder.name(), start, tuple(items)))

    def set_(self, holder: Holder) -> None:
        now, before = holder.kind.read(holder.target), holder.before
        known, left = IdSet(before), IdSet(now)
        removed = [item for item in before if item not in left]
        added = [item for item in now if item not in known]
        is_argument = self._is_of_call(holder, len(now))
        if not is_argument:
            self._check_growth(holder, added)
        for method, items in (("discard", removed), ("add", added)):
            for item in items:
                at = self._value(item, holder.name()) if is_argument else self._add(item, holder.name(), ABSENT)
                self.entries.append(ChangeSet(holder.target, holder.name(), method, at))

    def call_methods(self, calls: Iterable[tuple[Any, str, str, tuple[Any, ...]]]) -> None:
        """Methods that were called on containers that are only written to, see `Journals.calls`. They come before other
        writes, since these may replace the container.
        """
        first: list[PythonWrite] = []
        for place, path, name, args in calls:
            try:
                values = tuple(self._value(arg, path) for arg in args)
            except UnsupportedSideEffectError:
                if self.fills_caches:
                    self._refuse_fill(path)
                raise
            if isinstance(place, StatePlace):
                first.append(CallMethod(place.target, path, place.kind, place.key, name, values))
            else:
                first.append(CallMethod(place, path, "self", None, name, values))
        self.entries[:0] = first

    # ---------------------------------------------------------------- values

    def _is_of_call(self, holder: Holder, length: int) -> bool:
        """Whether a holder differs in each call: an argument, or a container that changes its length and is then
        replaced, in all its places, by an equal of its former state.
        """
        if self.made.is_argument(holder) or length == len(holder.before):
            return self.made.is_argument(holder)
        places = self.state.references_to(holder.target)
        return bool(places) and all(self._varies(holder.target, parent.now(key)) for parent, key in places)

    def _varies(self, before: Any, now: Any) -> bool:
        """Whether a value replaces a value of its kind: a number, or a container of the same structure."""
        if _is_number(before):
            return _is_number(now)
        if before is now or type(before) is not type(now) or is_plain(before) or isinstance(before, torch.Tensor):
            return False
        if (holder := self._holders.get(before)) is not None:  # the run wrote to it
            before, now = holder.before, holder.kind.read(now)
        opened, other = (open_arguments((value,), {}, lambda _: None) for value in (before, now))
        is_opened = opened.tree.children[0].children[0].kind != "leaf"
        return is_opened and opened.tree == other.tree and all(map(is_leaf, opened.leaves))

    def _check_growth(self, holder: Holder, written: list[Any]) -> None:
        """A container with a new length after each call differs for each: no graph is right twice. An emptied container
        stays empty, or is filled again outside.
        """
        if not holder.kind.read(holder.target):
            return
        window = holder.target.maxlen if holder.kind is kinds.DEQUE else None  # it is full after so many calls
        is_fill = window or not holder.before or holder.kind is kinds.DICT or any(map(_has_tensors, written))
        if (window and window <= _SHORT) or (self.fills_caches and is_fill):
            self._refuse_fill(holder.name())
        remedy = remedy_at(holder.name(), own := "Return the added items, or add them outside.")
        raise GrowingError(
            f"`{self.name}` changes the number of items in {holder.name() or 'a container'} in this call; a compiled "
            f"call would not repeat this. {remedy}",
            holder.target if remedy is own else None,  # PyTorch's own is as long to capture once it is full
        )

    def _refuse_fill(self, path: str) -> None:
        raise EscapedTensorError(
            f"`{self.name}` fills {path}, and has read it before. A compiled call would not repeat this. Fill caches "
            "before the first call, keep state in a buffer that is written in place, or return the tensor."
        )

    def _add(self, value: Any, path: str, old: Any) -> int:
        is_number = is_plain(value) or is_symbolic(value) or type(value) is Text
        if self.fills_caches and (old is ABSENT or old is None) and not is_number:
            self._refuse_fill(path)
        return self._value(value, path)

    def _value(self, value: Any, path: str) -> int:
        self.made.check(value, path)
        self.values.append(value)
        self.paths.append(path)
        return len(self.values) - 1


_OF_ITEMS = (kinds.DICT, kinds.NAMESPACE, kinds.LIST)
_SHORT = 8  # items of a window that fills without a warning
_FINDERS = {
    kinds.ATTRIBUTES: PythonWrites.attributes,
    **dict.fromkeys((kinds.DICT, kinds.NAMESPACE, kinds.SLOTS, kinds.CLASS), PythonWrites.table),
    kinds.CELL: PythonWrites.cell,
    kinds.LIST: PythonWrites.sequence,
    kinds.DEQUE: PythonWrites.sequence,
    kinds.SET: PythonWrites.set_,
}


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) or is_symbolic(value)


def _has_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in flatten(value)[0])


def attribute_set_error(name: str, attribute: str) -> UnsupportedSideEffectError:
    """The error for a function that sets or deletes an attribute of a tensor."""
    return UnsupportedSideEffectError(
        f"`{name}` sets {attribute}, an attribute of a tensor; a compiled call would not repeat this. Return the "
        "value instead."
    )


# -------------------------------------------------------------------- made values
# Values that a call returns or leaves behind, in a form that each call can make anew.
#
# These are tensors, numbers, constants, and fresh containers and plain objects of these, as often as they are met. An
# object from before the call stays the very object; an argument is each call's own argument.


_REMEDIES = {  # for classes of PyTorch's, by a part of the place's name: their code is not the user's
    "._per_optimizer_states": "Call `scaler.update()` in the step, too.",
    "['old_dirs']": "Compile the closure (`model.zero_grad()` and `loss.backward()` in it), and call "
    "the `step(closure)` of LBFGS outside.",
}


def remedy_at(path: str, otherwise: str) -> str:
    """The remedy for a write that can't be repeated."""
    return next((remedy for part, remedy in _REMEDIES.items() if part in path), otherwise)


_CONSTANT = (type, types.ModuleType, types.BuiltinFunctionType, enum.Enum, torch.Generator, torch.Size)


@dataclasses.dataclass(frozen=True)
class MadeValues:
    """Values that one run made. `state`: what the function can reach; `arguments` has the containers that the
    run was given, and the tables of their attributes; `real_of(fake)` is the tensor that a stand-in stands for;
    `newborns` are the objects that the run made.
    """

    name: str
    state: ProgramState
    arguments: ById[Any, OfArgument]
    real_of: Callable[[Any], Any]
    newborns: Newborns

    def is_argument(self, holder: Holder) -> bool:
        """Whether the holder is among the arguments: their contents are guarded, so they may grow."""
        return holder.target in self.arguments

    def in_arguments(self, write: PythonWrite) -> PythonWrite:
        """A write to a container of the run as one to the argument that each call is given."""
        target = self.arguments.get(write.target)
        return write if target is None else dataclasses.replace(write, target=target)

    def all(self, result: Any, written: list[Any], unwrap: Unwrap, *, objects: bool) -> Opened:
        """The result and written values, with shared items once: first of two, then of a list.

        `objects`: the result may be or have objects. `UnknownLeafError` for a value that can't be made.
        """
        others: Sequence[Tree]
        if objects:
            opened = open_objects([result, *written], self._instead, unwrap)
            first, *others = opened.tree.children
        else:
            leaves, first = flatten(result, unwrap)
            opened = open_objects(written, self._instead, unwrap)
            returned = IdSet(open_objects([result], self._instead, _left).containers if written else ())
            for container in opened.containers:
                if container in returned:
                    self._refuse(container, "what it returns, too", "that it made")
            opened, others = dataclasses.replace(opened, leaves=leaves + opened.leaves), opened.tree.children
        leaves = opened.leaves[: first.size]
        if not all(map(_is_leaf, leaves)):
            pairs = [pair for pair in zip(leaves, first.paths("out"), strict=True) if not _is_leaf(pair[0])]
            check_leaves([leaf for leaf, _ in pairs], [path for _, path in pairs], "output")
        return dataclasses.replace(opened, tree=list_of([first, list_of(others)]))

    def check(self, value: Any, path: str) -> None:
        """Raise where no call could leave a value like this one behind."""
        opened = open_objects([value], self._instead, _left)
        for leaf in opened.leaves:
            if not (
                isinstance(leaf, (torch.Tensor, *_CONSTANT))
                or type(leaf) in (Kept, OfArgument)
                or is_plain(leaf)
                or is_symbolic(leaf)
            ):
                self._refuse(leaf, path, "that it made")

    def check_key(self, key: Any, path: str) -> None:
        """Raise for a key of a dict that no later call could set: an object of the call itself."""
        parts = key if type(key) is tuple else (key,)
        for part in parts:
            is_value = is_plain(part) or isinstance(part, _CONSTANT) or is_symbolic(part)
            is_old = self.state.knows(part) or (not is_value and self.newborns.has(part) is False)
            if not (is_value or is_old) or part in self.arguments or is_stand_in(part):
                self._refuse(part, path, "as a key")

    def _instead(self, value: Any) -> Any:
        argument = self.arguments.get(value)
        if argument is not None:
            return argument
        if is_plain(value):
            return None
        if self.state.knows(value):
            return Kept(value)
        is_function = type(value) is types.FunctionType
        if not (is_function or is_plain_object(value)) or self.newborns.has(value):
            return None
        # It is older than the run, found where nobody looks: a library's constant.
        found = (None, []) if is_function else look_into(value)
        if self.newborns.has(value) is None or found is None or any(is_stand_in(v) for v in found[1]):
            raise UnsupportedSideEffectError(
                f"`{self.name}` gives or leaves a {value.__class__.__qualname__}, and there is no telling whether it "
                "makes it. Make it outside, or don't collect garbage inside."
            )
        return Kept(value)

    def _refuse(self, value: Any, path: str, what: str) -> NoReturn:
        kind = "tensor" if is_stand_in(value) else value.__class__.__qualname__
        raise UnsupportedSideEffectError(
            f"`{self.name}` leaves a {kind} {what} in {path}; a compiled call can't make a new one. "
            + remedy_at(
                path,
                (
                    "Keep only tensors, numbers, and lists, tuples, dicts and plain objects of tensors and numbers "
                    "there, or make it outside."
                ),
            )
        )


def _is_leaf(leaf: Any) -> bool:
    return is_leaf(leaf) or type(leaf) in (Kept, OfArgument)


def _left(_: Any) -> None:
    """Wrapper subclasses are left as they are."""
