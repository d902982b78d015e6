"""The operator with which a graph calls Python: eager regions and their backwards, hooks on gradients, collectives.

`foregrad::call` has the key of a `PythonCall`, which runs on real tensors and describes its results on fakes. `after`
are tensors that must be computed before: values that the program branched on, or the status of another call. `sizes`
are the symbolic sizes of results. No pass drops a call, repeats it or merges equal ones.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..locks import cached_property

Tensors = Sequence[torch.Tensor]


class PythonCall(abc.ABC):
    """One place in graphs that runs Python. Graphs hold its key only: the owner of a graph keeps it alive."""

    @cached_property
    def key(self) -> int:
        number = next(_keys)
        _calls[number] = self
        return number

    @abc.abstractmethod
    def run(self, inputs: Tensors, after: Tensors, sizes: Sequence[int]) -> list[torch.Tensor]:
        """The results, in memory of their own."""

    @abc.abstractmethod
    def fake(self, inputs: Tensors, sizes: Sequence[Any]) -> list[torch.Tensor]:
        """Tensors like the results of `run`, with any contents."""


_keys = itertools.count(1)
_calls: weakref.WeakValueDictionary[int, PythonCall] = weakref.WeakValueDictionary()

_library = torch.library.Library("foregrad", "FRAGMENT")
_library.define(
    "call(int key, Tensor[] inputs, Tensor[] after, SymInt[] sizes) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
)
_library.impl("call", lambda key, *args: _calls[key].run(*args), "CompositeExplicitAutograd")
torch.library.register_fake(
    "foregrad::call", lambda key, inputs, after, sizes: _calls[key].fake(inputs, sizes), lib=_library
)
CALL: Any = torch.ops.foregrad.call.default
torch.fx.node.has_side_effect(CALL)


def call_of(target: Any, args: Sequence[Any]) -> PythonCall | None:
    """The `PythonCall` of an operator with these arguments; None if it calls no Python."""
    return _calls[args[0]] if target is CALL else None


def status() -> torch.Tensor:
    """A result that shows that a call has run."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


@dataclasses.dataclass(eq=False)
class GradientHook(PythonCall):
    """A hook on a gradient that no graph can hold, `name`d for messages; `where`: the user's line that registers it.

    The hook gets a copy of the gradient, and a copy of its result is the call's: a tensor that the hook keeps is in
    memory that no compiler reuses.
    """

    hook: Callable[[torch.Tensor], Any]
    name: str
    where: str

    def run(self, inputs: Tensors, after: Tensors, sizes: Sequence[int]) -> list[torch.Tensor]:
        gradient = inputs[0].clone()
        result = self.hook(gradient)
        if result is None:
            result = gradient
        elif not isinstance(result, torch.Tensor):
            raise TypeError(f"the hook `{self.name}` returned a {type(result).__name__}, where a gradient is expected")
        metadata = [(t.shape, t.dtype, t.device, t.layout) for t in (result, gradient)]
        if metadata[0] != metadata[1]:
            raise RuntimeError(
                f"the hook `{self.name}` has changed the size or type of the gradient: it got {metadata[1]} and "
                f"returned {metadata[0]}"
            )
        return [torch.empty_like(gradient).copy_(result)]

    def fake(self, inputs: Tensors, sizes: Sequence[Any]) -> list[torch.Tensor]:
        return [torch.empty_like(inputs[0].clone())]
