"""Collectives that work in place, as functions of tensors: those without a functional form, and eager regions.

The first result of one in a graph says that it has run: the next one takes that, so that they keep their order. Known
weakness: those that graphs call are never forgotten; equal ones have one key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .._torch.dispatch import ThreadDispatchMode
from .._torch.distributed import finished_work, run_collective
from .python_calls import PythonCall, status

__all__ = ["Collective", "GivenAgain", "arguments_of", "returned", "tensors_in", "written_to"]

# Arguments that an operator writes to; into the first it adds, of the others it knows only what they hold then.
_WRITTEN = ("tensors", "output", "outputs", "output_tensor", "output_tensors", "output_lists")
_READ_ONLY = ("c10d::barrier", "c10d::monitored_barrier_", "c10d::send")


def arguments_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator of `c10d`, in order."""
    return {
        argument.name: args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(op._schema.arguments)
    }


def written_to(op: Any, given: dict[str, Any], *, only_outputs: bool = False) -> list[torch.Tensor]:
    """The tensors among its arguments that it writes to. `only_outputs`: without those that it reads as well."""
    if op._schema.name in _READ_ONLY:
        return []
    return [t for name in _WRITTEN[only_outputs:] for t in tensors_in(given.get(name))]


def returned(op: Any, given: dict[str, Any], work: Any) -> Any:
    """What it returns."""
    count = len(op._schema.returns)
    return [next(given[name] for name in _WRITTEN if name in given), work] if count > 1 else work if count else None


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in an argument, or in several."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (list, tuple)) else []


class Collective(PythonCall):
    """One operator of `c10d`: its arguments, and what the tensors in them and its group are to be.

    `written`: the positions of the tensors that it writes to, among all of them. It works on copies and returns these.
    """

    def __init__(self, op: Any, args: Sequence[Any], group: str, reduction: str, written: Sequence[int]) -> None:
        self.op, self.args, self.group, self.written = op, list(args), group, tuple(written)
        given = [value for value in self.args if not isinstance(value, torch.ScriptObject)]
        shape = _filled(given, lambda _: "tensor")
        self.known = op, group, reduction, self.written, str(shape)
        self.args = _filled(self.args, lambda tensor: _Place(tensor.device))
        self.__name__ = str(op._schema.name).partition("::")[2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Collective) and self.known == other.known

    def __hash__(self) -> int:
        return hash(self.known)

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        own = [tensor.clone() for tensor in tensors]
        rest = iter(own)
        # A barrier's tensor says where it is, and nothing else.
        args = _filled(self.args, lambda place: next(rest) if own else torch.zeros(1, device=place.device))
        run_collective(self.op, args, self.group)
        return [own[i] for i in self.written]

    def run(self, inputs: Sequence[torch.Tensor], after: Any, sizes: Any) -> list[torch.Tensor]:
        return [status(), *self(*inputs)]

    def fake(self, inputs: Sequence[torch.Tensor], sizes: Any) -> list[torch.Tensor]:
        return [status(), *(inputs[i].clone() for i in self.written)]

    def known_once(self) -> Collective:
        """The one among equal ones that graphs call."""
        return _known.setdefault(self, self)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """In the place of a tensor, which was on this device."""

    device: torch.device


_known: dict[Collective, Collective] = {}


def _filled(value: Any, tensor: Callable[[Any], Any]) -> Any:
    """Arguments with other tensors, in their order."""
    if isinstance(value, (list, tuple)):
        return [_filled(item, tensor) for item in value]
    return tensor(value) if isinstance(value, (_Place, torch.Tensor)) else value


class GivenAgain(ThreadDispatchMode):
    """While a call runs eagerly that was begun otherwise: the collectives that ran then give what they gave."""

    def __init__(self, ran: list[tuple[Collective, list[torch.Tensor]]]) -> None:
        super().__init__()
        self.ran = ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.ran or func.namespace != "c10d" or func is not self.ran[0][0].op:
            return func(*args, **kwargs)
        _, values = self.ran.pop(0)
        given = arguments_of(func, args, kwargs)
        for tensor, value in zip(written_to(func, given), values, strict=True):
            tensor.copy_(value)
        return returned(func, given, finished_work())
