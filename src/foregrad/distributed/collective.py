"""In-place collectives as functions of tensors, for collectives without a functional form and for eager regions.

The first result of a collective in a graph is a status that the next collective takes, so they keep their order. Known
weakness: collectives that graphs call are never freed; equal ones have one key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch

from .._torch.engine import ThreadDispatchMode
from .._torch.nested import mapped, tensors_in
from ..graph.calls import PythonCall, status
from ._torch.distributed import finished_work, run_collective

# Arguments that an operator writes to; it also reads the first, and only overwrites the rest.
_WRITTEN = ("tensors", "output", "outputs", "output_tensor", "output_tensors", "output_lists")
_READ_ONLY = ("c10d::barrier", "c10d::monitored_barrier_", "c10d::send")


def arguments_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operator of `c10d`, in order."""
    return {
        argument.name: args[i] if i < len(args) else kwargs.get(argument.name, argument.default_value)
        for i, argument in enumerate(op._schema.arguments)
    }


def written_to(op: Any, arguments: dict[str, Any], *, only_outputs: bool = False) -> list[torch.Tensor]:
    """The tensors among an operator's arguments that it writes to. `only_outputs`: without tensors that it reads."""
    if op._schema.name in _READ_ONLY:
        return []
    return [t for name in _WRITTEN[only_outputs:] for t in tensors_in(arguments.get(name))]


def returned(op: Any, arguments: dict[str, Any], work: Any) -> Any:
    """The operator's result."""
    count = len(op._schema.returns)
    if count > 1:
        return [next(arguments[name] for name in _WRITTEN if name in arguments), work]
    return work if count else None


class Collective(PythonCall):
    """One operator of `c10d`, its group, and its arguments with placeholders for tensors.

    `written`: the positions of written tensors among all. The call works on copies and returns the copies.
    """

    is_shared: ClassVar[bool] = True

    def __init__(self, op: Any, args: Sequence[Any], group: str, reduction: str, written: Sequence[int]) -> None:
        self.op, self.args, self.group, self.written = op, list(args), group, tuple(written)
        without_objects = [value for value in self.args if not isinstance(value, torch.ScriptObject)]
        shape = mapped(without_objects, torch.Tensor, lambda _: "tensor")
        self.identity = op, group, reduction, self.written, str(shape)
        self.args = mapped(self.args, torch.Tensor, lambda tensor: _Place(tensor.device))
        self.__name__ = str(op._schema.name).partition("::")[2]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Collective) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        own = [tensor.clone() for tensor in tensors]
        rest = iter(own)
        # A barrier's tensor only tells its device.
        args = mapped(self.args, _Place, lambda place: next(rest) if own else torch.zeros(1, device=place.device))
        run_collective(self.op, args, self.group)
        return [own[i] for i in self.written]

    def run(self, inputs: Sequence[torch.Tensor], after: Any, sizes: Any) -> list[torch.Tensor]:
        return [status(), *self(*inputs)]

    def fake(self, inputs: Sequence[torch.Tensor], sizes: Any) -> list[torch.Tensor]:
        return [status(), *(inputs[i].clone() for i in self.written)]

    def given_again(self, ran: Sequence[tuple[Any, Sequence[torch.Tensor]]]) -> AbstractContextManager[Any]:
        return _GivenAgain([*ran])

    def interned(self) -> Collective:
        """The one among equal collectives that graphs call."""
        return _interned.setdefault(self, self)


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """Placeholder for a tensor on this device."""

    device: torch.device


_interned: dict[Collective, Collective] = {}


class _GivenAgain(ThreadDispatchMode):
    """Mode of a call that runs eagerly after a graph was tried: collectives that ran return their earlier results."""

    def __init__(self, ran: list[tuple[Collective, Sequence[torch.Tensor]]]) -> None:
        super().__init__()
        self.ran = ran

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.ran or func.namespace != "c10d" or func is not self.ran[0][0].op:
            return func(*args, **kwargs)
        _, values = self.ran.pop(0)
        arguments = arguments_of(func, args, kwargs)
        for tensor, value in zip(written_to(func, arguments), values, strict=True):
            tensor.copy_(value)
        return returned(func, arguments, finished_work())
