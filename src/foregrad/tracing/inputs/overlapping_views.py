"""Views whose gradients go to other elements by their operators than by their places in memory.

Eager takes a view by its operators until its memory is written, and by its place from then on. Of fakes autograd knows
the operators only. So such an argument is no view of its base at first, and becomes one by its place once the version
counter moves, and with it the views that were taken of it. So does `as_strided` of a view, past its edges.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from ..._torch.stand_ins import is_stand_in
from ..._torch.tensors import allows_writes, base_of, history_of, is_view, kind_of, storage_key, version_of, view_again
from ...graph.meta import TensorSpec
from ..heap.event_log import Happened
from ..heap.records import InputRecord, is_written_with_history
from ..heap.refusals import past_the_edges
from ..heap.view_chain import chain_of
from ..recorder.recorder import Recorder
from ..tape.origin import user_line
from .inplace_views import RESHAPERS, become

__all__ = ["OverlappingViews", "Watched", "spreads_otherwise", "view_like"]


_WRITING = {"__setitem__"} | {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")}
_WRITING |= {f"__i{name}__" for name in ("and", "or", "xor", "lshift", "rshift")}
# These write no elements.
_MARKING = {"requires_grad_", "detach_", *(reshaper.__name__ for reshaper in RESHAPERS)}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """A tensor, what it is a view of (itself where it has several elements in one place), and the version of that.

    `record`: the input that it stands for; None for a view that the function has taken.
    """

    view: torch.Tensor
    base: torch.Tensor
    version: int
    record: InputRecord | None


class OverlappingViews:
    """`look` before each torch function, and once after all of them. `watched`: the views that are concerned."""

    def __init__(self, recorder: Recorder, watched: list[Watched]) -> None:
        self.recorder, self.watched = recorder, watched
        self._of_another_kind: list[tuple[torch.Tensor | None, str]] = []  # what they are views of, and where taken

    def watch(self, view: torch.Tensor) -> None:
        """A view that the function takes past the edges of another one."""
        base = base_of(view)
        if base is not None and kind_of(base) == kind_of(view):
            self.watched.append(Watched(view, base, version_of(base), None))
        else:  # eager takes it again by its operator
            self._of_another_kind.append((base, user_line(self.recorder.origins.here())))

    def finish(self) -> None:
        """The function has run. Raises for a view of another dtype than what it is of, whose sizes changed."""
        self.look()
        for base, where in self._of_another_kind:
            if base is not None and self.recorder.changes.log.of(base, Happened.RESHAPED):
                raise past_the_edges(where)

    def is_watched(self, tensor: Any) -> bool:
        """Whether it is such a view, or one of it."""
        made = [entry.view for entry in self.watched if entry.record is None]
        return any(tensor is view or self._is_view_of(tensor, view) for view in made)

    def look(self, func: Any = None, args: tuple[Any, ...] = ()) -> None:
        """Take the views by strides whose memory was written to, or that `func(*args)` is to write to."""
        target = args[0] if args and _writes(func) and is_stand_in(args[0]) else None
        for entry in list(self.watched):
            view = entry.view
            is_target = target is not None and (target is view or self._is_view_of(target, view))
            if version_of(entry.base) == entry.version and not is_target:
                continue
            self.watched.remove(entry)
            with torch.enable_grad():
                self._take_again(entry)

    def _take_again(self, entry: Watched) -> None:
        base, record = entry.base, entry.record
        where = user_line(self.recorder.value_of(entry.view).root.read(self.recorder.emit).origin)
        if record is not None and entry.view is not base and is_written_with_history(record):
            raise past_the_edges(where)
        fakes = [value.fake for value in list(self.recorder.values.values())]
        views = [fake for fake in fakes if fake is not None and self._is_view_of(fake, entry.view)]
        if record is not None and entry.view is not base:
            self._become(entry.view, view_like(record.real, base), where)
        for view in [*views, *([entry.view] if record is None else [])]:
            if kind_of(view) == kind_of(base):
                self._become(view, base.as_strided(view.shape, view.stride(), view.storage_offset()), where)

    def _become(self, view: torch.Tensor, again: torch.Tensor, where: str) -> None:
        value = self.recorder.value_of(view)
        become(self.recorder, view, again, past_the_edges(where))
        self.recorder.values[id(view)], value.fake = value, view  # what it is in memory it was before

    def _is_view_of(self, tensor: Any, source: torch.Tensor) -> bool:
        """Whether gradients of it go to `source`, of which it is a view."""
        if not is_stand_in(tensor) or not is_view(tensor) or not tensor.requires_grad:
            return False
        if tensor is source or not allows_writes(tensor) or storage_key(tensor) != storage_key(source):
            return False
        if not is_view(source):
            return base_of(tensor) is source
        value, above = self.recorder.values.get(id(tensor)), self.recorder.values.get(id(source))
        return value is not None and above is not None and above in chain_of(value)


def _writes(func: Any) -> bool:
    """Whether a torch function writes to its first argument, by its name."""
    name = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__") and name not in _MARKING)


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
