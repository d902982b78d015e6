"""The operator by which a graph calls Python.

`foregrad::call` has the key of a `PythonCall`: code that runs on real tensors and describes its results on fakes.
`after` are tensors that must be computed before: values that the program branched on, or the status of another call.
`sizes` are the symbolic sizes of results. No pass drops a call, doubles it or merges equal ones.
"""

from __future__ import annotations

import abc
import itertools
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch

from ..locks import cached_property

Tensors = Sequence[torch.Tensor]


class PythonCall(abc.ABC):
    """One place in graphs that runs Python. Graphs hold its key only: the owner of a graph keeps it alive.

    `is_shared`: other processes take part, so each run counts; the call looks at no state of Python's.
    """

    is_shared: ClassVar[bool] = False

    @property
    def acts(self) -> str:
        """The name of the user's function that it calls and that may do more than compute; "" if there is none."""
        return ""

    @cached_property
    def key(self) -> int:
        number = next(_keys)
        _calls[number] = self
        return number

    @abc.abstractmethod
    def run(self, inputs: Tensors, after: Tensors, sizes: Sequence[int]) -> list[torch.Tensor]:
        """The results, in memory of their own."""

    @abc.abstractmethod
    def fake(self, inputs: Tensors, sizes: Sequence[object]) -> list[torch.Tensor]:
        """Tensors like the results of `run`, with any contents."""

    def given_again(self, ran: Sequence[tuple[object, Tensors]]) -> AbstractContextManager[object]:
        """Context of an eager run: (shared call, results) of earlier runs, in order, stand for new runs."""
        return nullcontext()

    def without(self, absent: Sequence[bool]) -> PythonCall | None:
        """The call for the case that these of its inputs are absent gradients; None if it takes zeros for them."""
        return None


def status() -> torch.Tensor:
    """A result that shows that a call has run."""
    return torch.zeros((), dtype=torch.int64, device="cpu")


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
CALL = torch.ops.foregrad.call.default
torch.fx.node.has_side_effect(CALL)


def call_of(target: Any, args: Sequence[Any]) -> PythonCall | None:
    """The `PythonCall` of an operator and its arguments; None if it calls no Python."""
    return _calls[args[0]] if target is CALL else None
