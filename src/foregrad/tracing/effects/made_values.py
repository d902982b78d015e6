"""What a call gives back and leaves behind, as values that each call can make anew.

These are tensors, numbers, constants, and fresh containers and plain objects of these, as often as they are met. What
was there before the call stays that very object; what the call is given is that of each call.
"""

from __future__ import annotations

import dataclasses
import enum
import types
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from ..._torch.stand_ins import is_stand_in
from ..._torch.symbols import is_symbolic
from ...errors import UnsupportedSideEffectError
from ...frontend.expected import is_plain
from ...frontend.holders import Holder
from ...frontend.objects import is_plain_object, look_into
from ...frontend.program_state import ProgramState
from ...frontend.tree import Opened, Tree, Unwrap, check_leaves, flatten, is_leaf, list_of, open_objects
from ...graph.python_effects import Kept, OfArgument, PythonWrite
from ...identity import ById, IdSet
from ..tape.collection import Newborns

_REMEDIES = {  # for classes of PyTorch's, by a part of the place's name: their code is not the user's
    "._per_optimizer_states": "Call `scaler.update()` in the step, too.",
    "['old_dirs']": "Compile the closure (`model.zero_grad()` and `loss.backward()` in it), and call "
    "the `step(closure)` of LBFGS outside.",
}


def remedy_at(path: str, otherwise: str) -> str:
    """What to do about a write that can't be repeated."""
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
        """Whether it is among the arguments: what it holds is guarded, so that it may grow."""
        return holder.target in self.arguments

    def in_arguments(self, write: PythonWrite) -> PythonWrite:
        """A write to a container of the run as one to the argument that each call is given."""
        target = self.arguments.get(write.target)
        return write if target is None else dataclasses.replace(write, target=target)

    def all(self, result: Any, written: list[Any], unwrap: Unwrap, *, objects: bool) -> Opened:
        """The result and written values, with what is in several of them once: first of two, then of a list.

        `objects`: the result may be or have objects. `UnknownLeafError` for what can't be made.
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
        """Raise for a key of a dict that no call could set: one that is of this call."""
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
                f"`{self.name}` gives or leaves a {type(value).__qualname__}, and there is no telling whether it makes "
                "it. Make it outside, or don't collect garbage inside."
            )
        return Kept(value)

    def _refuse(self, value: Any, path: str, what: str) -> NoReturn:
        kind = "tensor" if is_stand_in(value) else type(value).__qualname__
        raise UnsupportedSideEffectError(
            f"`{self.name}` leaves a {kind} {what} in {path}; a compiled call can't make "
            "another one. "
            + remedy_at(
                path,
                "Keep tensors, numbers, and lists, tuples, dicts and plain objects of these there, or make it outside.",
            )
        )


def _is_leaf(leaf: Any) -> bool:
    return is_leaf(leaf) or type(leaf) in (Kept, OfArgument)


def _left(_: Any) -> None:
    """Wrapper subclasses are left as they are."""
