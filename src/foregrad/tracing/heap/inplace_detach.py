"""Tensors that the function calls `detach_` on: views that were taken of them before keep the history they had."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..._torch.tensors import base_of, history_of, is_usable, is_view
from ...errors import UnsupportedAliasError
from ...graph.effect_log import Detach
from .recording import Recording
from .refusals import detached_and_written

if TYPE_CHECKING:
    from .records import InputRecord

__all__ = ["Detached", "keeps_history", "views_with_history"]

aten = torch.ops.aten


class Detached:
    """`twins`: by the id of the tensor, one with the history that it had until then."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self.twins: dict[int, torch.Tensor] = {}

    def note(self, tensor: torch.Tensor) -> None:
        """`detach_` is about to be called."""
        value = self.recorder.value_of(tensor)
        log = self.recorder.changes.log
        value.storage.changes.append(log.note(Detach(-1), tensor, value))
        self.recorder.changes.changed_at[id(tensor)] = self.recorder.origins.here()
        if tensor.grad_fn is not None and not is_view(tensor):
            self.recorder.kept.append(tensor)
            with torch.enable_grad():
                self.twins[id(tensor)] = aten._unsafe_view.default(tensor, tensor.shape)

    def twin_of(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The twin of a tensor that is still detached."""
        return None if tensor is None or tensor.requires_grad else self.twins.get(id(tensor))

    def check_stale(self, views: Iterable[tuple[torch.Tensor, str]], inputs: Container[int]) -> None:
        """Raise for a view of what the function made and detached, whose history autograd can't take up again: it may
        not require grad any more, once asked.
        """
        for view, path in views if self.twins else ():
            base = id(base_of(view)) if is_view(view) and view.requires_grad else None
            if base in self.twins and base not in inputs and not (is_usable(view) and view.requires_grad):
                raise self.stale(view, path)

    def stale(self, view: torch.Tensor, path: str) -> UnsupportedAliasError:
        return detached_and_written(f"the output {path}", self.recorder.changes.where(base_of(view)))

    def check(self, records: Iterable[InputRecord], views: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Raise where a view goes on with a history that the function gave to an input, and took from it again."""
        if not self.twins:
            return
        by_stand_in = {id(record.stand_in): record for record in records}
        for view, path in views:
            if not (view.requires_grad and is_view(view) and is_usable(view)):
                continue
            base = base_of(view)
            record, twin = by_stand_in.get(id(base)), self.twin_of(base)
            if record is None or twin is None:
                continue
            history: Any = twin.grad_fn
            if history.next_functions[0][0]._sequence_nr() != record.start_sequence_nr:
                raise detached_and_written(path, self.recorder.changes.where(base))


def views_with_history(views: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Views that still require grad though their base was detached."""
    return [view for view in views if view.requires_grad and is_usable(view)]


def keeps_history(view: torch.Tensor) -> bool:
    """Whether gradients of a view, of a tensor that was detached since, go anywhere."""
    node = history_of(view)
    return node is not None and any(following is not None for following, _ in node.next_functions)
