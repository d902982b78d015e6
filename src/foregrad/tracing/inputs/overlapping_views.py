"""Views whose gradients go to other elements by their operators than by their places in memory.

Eager takes a view by its operators until its memory is written, and by its place from then on. Of fakes autograd knows
the operators only. So such an argument is no view of its base at first, and becomes one by its place once the version
counter moves, and with it the views that were taken of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ..._torch.fakes import FakeTensor
from ..._torch.tensors import allows_writes, base_of, history_of, is_view, kind_of, storage_key, version_of, view_again
from ...graph.meta import TensorSpec
from ..heap.records import InputRecord, is_written_with_history
from ..heap.refusals import past_the_edges
from ..recorder.recorder import Recorder
from ..tape.origin import user_line
from .inplace_views import become

__all__ = ["OverlappingViews", "Watched", "spreads_otherwise", "view_like"]


_WRITING = {"__setitem__"} | {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
_WRITING |= {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}
_MARKING = {"requires_grad_", "detach_"}  # these write no elements

# An input, what it is a view of (itself where it has several elements in one place), and the version of that.
Watched = tuple[InputRecord, InputRecord, int]


class OverlappingViews:
    """`look` before each torch function, and once after all of them. `watched`: the inputs that are concerned."""

    def __init__(self, recorder: Recorder, watched: list[Watched]) -> None:
        self.recorder, self.watched = recorder, watched

    def look(self, func: Any = None, args: tuple[Any, ...] = ()) -> None:
        """Take the views by strides whose memory was written to, or that `func(*args)` is to write to."""
        target = args[0] if args and _writes(func) and type(args[0]) is FakeTensor else None
        for entry in list(self.watched):
            record, base, version = entry
            is_target = target is not None and (target is record.stand_in or base_of(target) is record.stand_in)
            if version_of(base.stand_in) == version and not is_target:
                continue
            self.watched.remove(entry)
            with torch.enable_grad():
                self._take_again(record, base)

    def _take_again(self, record: InputRecord, base: InputRecord) -> None:
        stand_in = record.stand_in
        where = user_line(record.initial.root.read(self.recorder.emit).origin)
        if record is not base and is_written_with_history(record):
            raise past_the_edges(where)
        fakes = [value.fake for value in list(self.recorder.values.values())]
        views = [fake for fake in fakes if fake is not None and _is_view_of(fake, stand_in)]
        if record is not base:
            self._become(record, stand_in, view_like(record.real, base.stand_in))
        for view in views:
            if kind_of(view) == kind_of(base.stand_in):
                again = base.stand_in.as_strided(view.shape, view.stride(), view.storage_offset())
                self._become(record, view, again)

    def _become(self, record: InputRecord, view: torch.Tensor, again: torch.Tensor) -> None:
        value = self.recorder.value_of(view)
        where = user_line(record.initial.root.read(self.recorder.emit).origin)
        become(self.recorder, view, again, past_the_edges(where))
        self.recorder.values[id(view)], value.fake = value, view  # what it is in memory it was before


def _writes(func: Any) -> bool:
    """Whether a torch function writes to its first argument, by its name."""
    name = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__") and name not in _MARKING)


def _is_view_of(fake: torch.Tensor, base: torch.Tensor) -> bool:
    if not (is_view(fake) and fake.requires_grad) or base_of(fake) is not base or not allows_writes(fake):
        return False
    return storage_key(fake) == storage_key(base)


def view_like(real: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """The same view of `base` that `real` is of its own base, as eager takes it again."""
    if kind_of(real) == kind_of(base):
        return base.as_strided(real.shape, real.stride(), real.storage_offset())
    return view_again(real, base)


def spreads_otherwise(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether a gradient of the view goes to other elements of the base than by the strides of the two."""
    steps: list[Any] = []
    node = history_of(view)
    while node is not None and node is not history_of(base) and not hasattr(node, "variable"):
        steps.append(node)
        node = node.next_functions[0][0] if node.next_functions else None
    by_strides = [step.name().startswith("AsStrided") for step in steps]
    if TensorSpec.of(base).overlaps_itself and by_strides != [True]:
        return True
    inner_ones = [inner for outer, inner in zip(by_strides, steps[1:], strict=False) if outer]
    whole = base.numel() * base.itemsize // view.itemsize  # in elements of the view's dtype
    return any(_overlaps(inner) or _numel(inner) < whole for inner in inner_ones)


def _numel(step: Any) -> int:
    """How many elements the view that this node is of has."""
    return math.prod(step._input_metadata[0].shape)


def _overlaps(step: Any) -> bool:
    """Whether the view that this node is of has several elements in one place."""
    if not step.name().startswith("AsStrided"):
        return bool(step.name().startswith(("Expand", "Unfold")))
    size, stride = step._saved_size, step._saved_stride
    return TensorSpec(tuple(size), tuple(stride), torch.uint8, torch.device("cpu")).overlaps_itself
