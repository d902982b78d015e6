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
            raise UnsupportedAliasError(
                f"a view used at {line_of(error)} is of a tensor that was written to and that `detach_` or `set_` was "
                "called on since. Take the view again after that, or detach without changing the tensor (`x = "
                "x.detach()`)."
            ) from error

        if self.recorder.changes.resized and self._has_unfit():
            raise UnsupportedAliasError(
                f"{line_of(error)} raises ({str(error).splitlines()[0]}) after a tensor was given other sizes in place "
                "(`set_`, `resize_`, `squeeze_`) of which there are views with gradients, whose place PyTorch does not "
                "know any more. Change sizes out of place instead."
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
                raise UnsupportedAliasError(
                    f"the output {path} is a view of a tensor that was given other memory (`.data = ...`, `set_`) at "
                    f"{where}, and what is there was written to: return a copy."
                ) from error
        known = [(view, path, id(base_of(view))) for view, path in views if self.twins and is_view(view)]
        known = [(view, path, base) for view, path, base in known if base in self.twins and view.requires_grad]
        for view, path, base in known:
            usable = is_usable(view)
            if not view.requires_grad or (not usable and base not in inputs):  # it may be no more, once asked
                raise UnsupportedAliasError(self.stale(view, path))

    def stale(self, view: torch.Tensor, path: str) -> str:
        return (
            f"the output {path} is a view of a tensor that was written to and that `detach_` was called on at "
            f"{self.recorder.changes.where(base_of(view))}: return a copy, or detach without changing the tensor "
            "(`x = x.detach()`)."
        )

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
                raise UnsupportedAliasError(
                    f"{path} is a view of {record.slot}, which the function wrote to with gradients flowing through "
                    f"and then called `detach_` on at {self.recorder.changes.where(base)}: detach a copy, or leave it "
                    "to the caller to detach it."
                )


def views_with_history(views: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Those that require grad still, though what they are views of was detached."""
    return [view for view in views if view.requires_grad and is_usable(view)]


def keeps_history(view: torch.Tensor) -> bool:
    """Whether gradients of a view, of a tensor that was detached since, go anywhere."""
    node = history_of(view)
    return node is not None and any(following is not None for following, _ in node.next_functions)
