"""What the parts of a capture may ask of the recorder that they belong to.

The recorder hands itself to its parts, which live in rooms below its own: this is all that they know of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ..._torch.fakes import FakeTensorMode
from ...graph.meta import TensorSpec
from ..tape.origin import Made, Origins
from ..tape.tape import Entry, Tape
from .alias import Value

__all__ = ["Host", "Recording"]


def _nothing(*_: Any) -> None:
    """Nobody is to be told."""


@dataclasses.dataclass(frozen=True, slots=True)
class Host:
    """What a recorder asks of the capture, or the derivative, that it records for.

    `adopt`: the fake for a real tensor that the function brought in by itself. `name`: the function's. `written`: ids
    of inputs that its backward is known to write. `past_the_edges(root)`: a write leaves the input that `root` is.
    `on_resize()`: sizes or memory of a tensor are about to change in place. `on_missing(root, where)`: a backward
    writes to what it was not known to write. `learned`: what earlier runs of the capture found out.
    """

    adopt: Callable[[torch.Tensor], torch.Tensor]
    name: str
    written: set[int] = dataclasses.field(default_factory=set)
    past_the_edges: Callable[[Value], None] = _nothing
    on_resize: Callable[[], None] = _nothing
    learned: Any = None
    on_missing: Callable[[Value, str], None] = _nothing


class Recording(Protocol):
    """See `Recorder`, which is the only one."""

    host: Host
    fake_mode: FakeTensorMode
    origins: Origins
    tape: Tape
    values: dict[int, Value]
    kept: list[torch.Tensor]
    phases: dict[int, torch.Tensor]
    reshaped: list[tuple[torch.Tensor, int, str]]
    in_backward: bool
    is_symbolic: bool
    recompute: Any
    # Other parts of the same recorder.
    changes: Any
    writes: Any
    detached: Any
    checks: Any
    collectives: Any
    decisions: Any
    late: Any
    sparse: Any

    def in_region(self, tag: Any) -> contextlib.AbstractContextManager[None]: ...

    def entry(self, target: Any, args: Any, kwargs: Any, is_random: bool) -> Entry: ...

    def emit(self, target: Any, *args: Any, kwargs: Any = None, spec: Any = None) -> Entry: ...

    def made(self) -> Made: ...

    def where(self) -> str: ...

    def to_entries(self, value: Any) -> Any: ...

    def tensor_entry(self, value: Any) -> Entry: ...

    def value_of(self, tensor: torch.Tensor) -> Value: ...

    def contents(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec: ...

    def specs_of(self, out: Any) -> Any: ...

    def fake_of(self, spec: TensorSpec) -> torch.Tensor: ...

    def pure(self, plan: Any, args: Any, kwargs: Any) -> Any: ...

    def kernels(self, func: Any, args: Any, kwargs: Any) -> Any: ...

    def run_fake(self, func: Any, args: Any, kwargs: Any) -> Any: ...
