"""Tensors that the function calls `detach_` on: views that were taken of them before keep the history they had."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

import torch

from ..._torch.tensors import base_of, history_of, is_usable, is_view
from ...errors import UnsupportedAliasError
from ..tape.opinfo import set_to
from ..tape.origin import line_of, user_line
from .event_log import Happened
from .recording import Recording
from .refusals import detached_and_written, of_exchanged_memory, resized_view
from .view_replay import View

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
        value.storage.changes.append(log.note(Happened.DETACHED, tensor, value, None, (tensor.requires_grad,)))
        self.recorder.changes.changed_at[id(tensor)] = self.recorder.origins.here()
        self._unbar(tensor)
        if tensor.grad_fn is not None and not is_view(tensor):
            self.recorder.kept.append(tensor)
            with torch.enable_grad():
                self.twins[id(tensor)] = aten._unsafe_view.default(tensor, tensor.shape)

    def _unbar(self, tensor: torch.Tensor) -> None:
        """Views taken from here on no longer have the history that `set_` gave it."""
        value = self.recorder.value_of(tensor)
        if value.view is not None and value.view.op is set_to and value.view.args[0] and value.parent is not None:
            value.fake = None
            view = View(set_to, (False,), {}, None, object(), False)
            value.became = self.recorder.changes.become_view(tensor, value.parent, view)

    def twin_of(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """The twin of a tensor that is still detached."""
        return None if tensor is None or tensor.requires_grad else self.twins.get(id(tensor))

    def explain(self, error: Exception) -> None:
        """Raise what to do about a view that autograd can't take again, as its base has no history by now."""
        if "new_fn INTERNAL ASSERT" in str(error):
            raise detached_and_written(f"a view used at {line_of(error)}") from error

        if self.recorder.changes.resized and self._has_unfit():
            raise resized_view(
                f"some line before {line_of(error)}, which raises {str(error).splitlines()[0]}"
            ) from error

    def _has_unfit(self) -> bool:
        """Whether some view can't be taken again of what its base is by now."""
        for value in list(self.recorder.values.values()):
            fake = value.fake
            try:
                _ = fake.grad_fn if fake is not None and is_view(fake) else None
            except Exception as error:
                if "no_grad mode" not in str(error) and "multiple views" not in str(error):
                    return True
        return False

    def check_stale(self, views: Iterable[tuple[torch.Tensor, str]], inputs: Container[int]) -> None:
        """Raise for an output whose history autograd tries to take up again, and can't: it must be asked but once."""
        views = list(views)
        for view, path in views if self.recorder.changes.replaced else ():
            try:
                is_usable(view)
            except Exception as error:  # not autograd's own: that of the operator which made the view
                changes = self.recorder.changes
                where = user_line(changes.changed_at.get(next(reversed(changes.replaced))))
                raise of_exchanged_memory(f"the output {path}", where) from error
        known = [(view, path, id(base_of(view))) for view, path in views if self.twins and is_view(view)]
        known = [(view, path, base) for view, path, base in known if base in self.twins and view.requires_grad]
        for view, path, base in known:
            usable = is_usable(view)
            if not view.requires_grad or (not usable and base not in inputs):  # it may be no more, once asked
                raise self.stale(view, path)

    def stale(self, view: torch.Tensor, path: str) -> UnsupportedAliasError:
        return detached_and_written(f"the output {path}", self.recorder.changes.where(base_of(view)))

    def check(self, records: Iterable[InputRecord], views: Iterable[tuple[torch.Tensor, str]]) -> None:
        """Raise where a view goes on with a history that the function gave to an input, and took from it again."""
        if not self.twins:
            return
        by_stand_in = {id(record.stand_in): record for record in records}
        for view, path in views:
            if not (view.requires_grad and is_view(view)):
                continue
            base = base_of(view)
            record, twin = by_stand_in.get(id(base)), self.twin_of(base)
            if record is None or twin is None:
                continue
            history: Any = twin.grad_fn
            if history.next_functions[0][0]._sequence_nr() != record.start_sequence_nr:
                raise detached_and_written(path, self.recorder.changes.where(base))


def views_with_history(views: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that require grad still, though what they are views of was detached."""
    return [view for view in views if view.requires_grad and is_usable(view)]


def keeps_history(view: torch.Tensor) -> bool:
    """Whether gradients of a view, of a tensor that was detached since, go anywhere."""
    node = history_of(view)
    return node is not None and any(following is not None for following, _ in node.next_functions)
