"""A client: a library, its field, and a small training program written as its users write one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["CLIENTS", "Client", "Program", "client", "squares"]


@dataclasses.dataclass(frozen=True)
class Program:
    """A module, what makes a batch, and the loss of a batch; by default the mean square of all that comes out."""

    module: nn.Module
    batch: Callable[[], tuple[Any, ...]]
    loss: Callable[..., torch.Tensor] = lambda module, *batch: squares(module(*batch))


@dataclasses.dataclass(frozen=True)
class Client:
    """`package` is its name in the index. `build` imports it."""

    name: str
    field: str
    package: str
    build: Callable[[], Program]


CLIENTS: dict[str, Client] = {}


def client(field: str, package: str) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
    """The function that it decorates builds a client, which has the function's name."""

    def add(build: Callable[[], Program]) -> Callable[[], Program]:
        CLIENTS[build.__name__] = Client(build.__name__, field, package, build)
        return build

    return add


def squares(out: Any) -> torch.Tensor:
    """The sum of the mean squares of the numbers in an output."""
    return torch.stack([tensor.float().square().mean() for tensor in _tensors(out)]).sum()


def _tensors(out: Any) -> Iterator[torch.Tensor]:
    if isinstance(out, torch.Tensor):
        if out.is_floating_point():
            yield out
    elif isinstance(out, (Mapping, list, tuple)):
        for item in out.values() if isinstance(out, Mapping) else out:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(out):
        for field in dataclasses.fields(out):
            yield from _tensors(getattr(out, field.name))
