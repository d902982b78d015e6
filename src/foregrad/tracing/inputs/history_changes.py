"""`requires_grad_()` and `detach_()`: where a stand-in must be a view for them, as the tensor that it stands for is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..._torch.tensors import allows_writes, base_of, is_marked, is_usable, is_view, leads_to_base
from ...graph.effect_log import Detach, MarkRequiresGrad
from ...identity import IdSet
from ...subclasses.spec import is_wrapper
from ..heap.alias import now
from ..heap.records import InputRecord, is_moved, is_no_grad_view
from ..heap.refusals import detached_and_written
from ..recorder.recorder import Recorder
from ..tape.origin import user_line
from .inputs import Inputs


class HistoryChanges:
    """Stand-ins are views only where gradients need it: each of these starts capture over where one must be."""

    def __init__(self, inputs: Inputs, recorder: Recorder) -> None:
        self.inputs, self.recorder = inputs, recorder
        self._used: list[tuple[InputRecord, str]] = []  # views used since a write, when their base was detached

    def on_mark(self, tensor: torch.Tensor, requires_grad: bool) -> bool:
        """`requires_grad_(requires_grad)` is about to be called; whether that is done with."""
        if is_wrapper(tensor):
            return self.inputs.wrappers.requires_grad(tensor, requires_grad, user_line(self.recorder.origins.here()))
        value = self.recorder.values.get(tensor)
        if value is not None:  # no transform's own
            effect = MarkRequiresGrad(-1) if requires_grad else Detach(-1, in_place=False)
            self.recorder.changes.log.note(effect, tensor, value)
        self._check_mark(tensor)
        return False

    def on_detach(self, tensor: torch.Tensor, run: Callable[[], Any]) -> None:
        """`detach_` is called, which `run` does."""
        if is_wrapper(tensor):
            self.inputs.wrappers.detach(tensor, run)
            return
        self._check_detach(tensor)
        self.recorder.detached.note(tensor)
        run()

    def _check_mark(self, stand_in: torch.Tensor) -> None:
        """A view that is made to require grad: so are views of it then, as views of its base are not."""
        marked = self.inputs.by_stand_in.get(stand_in)
        if marked is None:
            self.inputs.note_marked(stand_in)
        if marked is not None and marked.real.requires_grad:
            self.inputs.see_as_views([marked] if is_no_grad_view(marked) else [])
            marked.is_marked = is_view(marked.real)
            for value in self.recorder.values.values() if marked.is_marked and is_marked(marked.real) else ():
                value.of_differentiable &= value.storage is not marked.initial.storage  # gradients went nowhere so far
        if marked is None or marked.real.requires_grad:
            return
        for record in self.inputs.records:
            is_concerned = record is marked or base_of(record.real) is marked.real
            if is_concerned and is_view(record.real) and not record.real.requires_grad:
                self.inputs.see_as_views([record])

    def _check_detach(self, stand_in: torch.Tensor) -> None:
        """Raise what `detach_` raises for a view; stand-ins are views only where gradients need it."""
        record = self.inputs.by_stand_in.get(stand_in)
        if record is not None and is_view(record.real):
            raise RuntimeError("Can't detach views in-place. Use detach() instead.")
        if record is None:
            return
        if record.detached_at is None:  # writes that its version does not count leave views of it what they are
            changes = self.recorder.value_of(stand_in).storage.changes_of(stand_in)
            record.detached_at = changes[0].at if changes and is_moved(record) else now()
        for other in self.inputs.records:  # views taken under no_grad require grad as long as their base does
            real = other.real
            if base_of(real) is not record.real:
                continue
            if is_moved(record) and is_usable(real) and leads_to_base(real) and is_view(other.stand_in):
                self._used += [(other, user_line(self.recorder.origins.here()))] if self._is_used(other) else []
            if is_view(other.stand_in):
                continue
            if is_marked(real) or self._has_marked_views(other.stand_in):
                self.inputs.see_as_views([other])

    def look_again(self) -> None:
        """Capture again where the run failed and views are of what was detached: they may be used otherwise by then."""
        detached = IdSet(r.real for r in self.inputs.records if r.detached_at is not None)
        self.inputs.see_as_views([r for r in self.inputs.records if base_of(r.real) in detached])

    def check_views(self) -> None:
        """Capture again where views that autograd bars writes to, made under no_grad or several at once, are written by
        themselves: it bars most uses of them then. And where an operator on lists wrote to a view twice: its history is
        not that of what it is a view of.
        """
        for record, where in self._used:
            detached = self.recorder.changes.log.events
            if any(e.is_detach and e.at == record.initial.storage.changed_at for e in detached):
                raise detached_and_written(str(record.slot), where)  # nothing has changed since
        listed = self.recorder.writes.listed
        barred = [r for r in self.inputs.records if r.real.requires_grad and not allows_writes(r.real) and is_moved(r)]
        twice = [r for r in self.inputs.records if r.stand_in in listed and r.stand_in.requires_grad]
        self.inputs.see_as_views([*barred, *(record for record in twice if is_view(record.real))])

    def _is_used(self, record: InputRecord) -> bool:
        """Whether it was read, or views taken of it, since its memory was written: autograd has that history then."""
        value = self.recorder.values[record.stand_in]
        if value.generation == value.storage.generation:
            return True
        return any(v.parent is value and v.born > value.storage.changed_at for v in self.recorder.values.values())

    def _has_marked_views(self, base: torch.Tensor) -> bool:
        """Whether the function took views of it under no_grad."""
        fakes = [v.fake for v in list(self.recorder.values.values()) if v.fake is not None]
        views = [fake for fake in fakes if is_view(fake) and base_of(fake) is base and fake.requires_grad]
        return any(not is_usable(view) or view.is_leaf for view in views)
