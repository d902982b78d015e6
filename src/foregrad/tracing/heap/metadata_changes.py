"""Operators that change sizes, strides or memory of a tensor in place, recorded as the view or tensor it becomes.

The log of changes in place is kept here, `detach_` too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..._torch.ops import Args, Kwargs
from ..._torch.tensors import base_of, history_of, is_marked, is_view
from ...errors import UnsupportedMutationError
from ...graph.effect_log import Detach, Effect, Handle, InplaceView, MarkRequiresGrad, SetData
from ...graph.meta import TensorSpec
from ...identity import ById
from ..tape.opinfo import IDENTITIES, OpInfo
from ..tape.origin import Origin, user_line
from .alias import Change, Storage, Value, now
from .recording import Recording
from .refusals import given_to_a_view, resized_with_gradients, set_in_place
from .views import View

aten = torch.ops.aten


class MetadataChanges:
    """Changes of tensors in place besides writes to their elements. `log`: all changes, in program order."""

    def __init__(self, recorder: Recording) -> None:
        self.recorder = recorder
        self.log = EventLog()
        self.changed_at: ById[torch.Tensor, Origin] = ById()  # where sizes, memory or history last changed in place
        self._unclear: list[tuple[Storage, Exception, int | None]] = []  # see `differs_by_place`

    def run(self, info: OpInfo, args: Args, kwargs: Kwargs) -> Any:
        """t_, squeeze_, as_strided_, resize_: the tensor becomes a different view, or a different tensor."""
        rec, func = self.recorder, info.op
        name = func._schema.name
        if name == "aten::set_":
            raise set_in_place(user_line(rec.origins.here()))
        tensor, rest = args[0], tuple(args[1:])
        old = rec.value_of(tensor)
        self.changed_at[tensor] = rec.origins.here()
        if name in ("aten::resize_", "aten::resize_as_"):
            return self._resize(info, tensor, args, kwargs)
        self.resizes(tensor, old)
        out = rec.run_fake(func, args, kwargs)
        assert info.functional is not None
        view = View(info.functional, rest, kwargs, None, object(), torch.is_grad_enabled())
        self._change_sizes(tensor, old, func, rest, kwargs)
        self.become_view(tensor, old, view)
        return out

    def _change_sizes(self, tensor: torch.Tensor, old: Value, op: Any, args: Args, kwargs: Kwargs) -> None:
        effect = InplaceView(-1, op, args, tuple(kwargs.items()), torch.is_grad_enabled())
        old.storage.changes.append(Change(self.log.note(effect, tensor, old), tensor))

    def resizes(
        self, tensor: torch.Tensor, value: Value, *, is_swap: bool = False, until_written: bool = False
    ) -> None:
        """The sizes or the memory of a tensor with the `value` are about to change in place. `until_written`: views
        keep their values until a write to their memory.

        Autograd takes views again by their operators: of a vanished base, where the tensor is a view or has views.
        """
        fakes = [v.fake for v in self.recorder.values.values() if v.fake is not None and v.fake is not tensor]
        is_alone = not is_view(tensor) and not any(is_view(fake) and base_of(fake) is tensor for fake in fakes)
        if not is_alone or (self.recorder.host.real_of(tensor) is not None and not is_swap):
            refused = resized_with_gradients(user_line(self.recorder.origins.here()))
            self.differs_by_place(value.storage, refused, value.storage.generation if until_written else None)

    def differs_by_place(self, storage: Storage, refused: Exception, unwritten: int | None = None) -> None:
        """The memory has a view at a place that differs from its operators': `refused` is raised once gradients flow,
        and once the memory leaves the generation `unwritten`, if given.
        """
        self._unclear.append((storage, refused, unwritten))
        self.check_places()

    def check_places(self) -> None:
        """Raise where a tensor requires grad in a memory with a view at a place that differs from its operators'."""
        for storage, refused, unwritten in self._unclear:
            if storage.generation == unwritten:
                continue
            fakes = [value.fake for value in self.recorder.values.values() if value._storage is storage]
            if any(fake is not None and fake.requires_grad for fake in fakes):
                raise refused

    def where(self, tensor: torch.Tensor | None) -> str:
        """The user's line that last changed the sizes, the memory or the history of a tensor in place."""
        return user_line(self.changed_at.get(tensor))

    def become_view(self, tensor: torch.Tensor, source: Value, view: View) -> Value:
        self.recorder.values[tensor] = value = Value(tensor, None, self.recorder.spec_of(tensor), source, view)
        value.generation = -1
        if source.fake is tensor:
            source.fake, source.became = None, value  # its sizes differ from `source` by now
        return value

    def replaced_by(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """`tensor` took over the memory of `source`, after an assignment to `.data`."""
        rec, real = self.recorder, self.recorder.host.real_of(tensor)
        self.changed_at[tensor] = rec.origins.here()
        if real is None:
            is_shared = is_view(tensor) or rec.value_of(tensor).storage.is_input
        else:
            is_shared = is_view(real) and (base := base_of(real)) is not None and base.requires_grad
        if is_shared:
            raise given_to_a_view(self.where(tensor))
        view = View(aten.alias.default, (), {}, None, object(), torch.is_grad_enabled())
        was, given = rec.value_of(tensor), rec.value_of(source).spec
        old = next((event.value for event in self.log.of(tensor, SetData)), was)
        if not given.same_layout(was.spec) or given.offset != was.spec.offset:
            self.resizes(tensor, old, is_swap=True, until_written=given.same_layout(was.spec))
        after = self.become_view(tensor, rec.value_of(source), view)
        self.log.note(SetData(-1, SOMETHING), tensor, was, after)

    def detach(self, tensor: torch.Tensor) -> None:
        """`detach_` is about to be called."""
        value = self.recorder.value_of(tensor)
        value.storage.changes.append(Change(self.log.note(Detach(-1), tensor, value), tensor))
        self.changed_at[tensor] = self.recorder.origins.here()

    def _resize(self, info: OpInfo, tensor: torch.Tensor, args: Args, kwargs: Kwargs) -> Any:
        rec = self.recorder
        old = rec.value_of(tensor)
        had = old.root.spec
        out = rec.run_fake(info.op, args, kwargs)
        spec = rec.spec_of(tensor)
        if spec.shape == old.spec.shape and spec.stride == old.spec.stride:
            return out
        self.resizes(tensor, old)
        if spec.nbytes + (spec.offset - had.offset) * spec.dtype.itemsize <= had.nbytes:
            where = (list(spec.shape), list(spec.stride), spec.offset)
            enabled = torch.is_grad_enabled() and (old.view is None or old.view.grad_enabled)
            view = View(aten.as_strided.default, where, {}, None, object(), enabled)
            self._change_sizes(tensor, old, info.op, tuple(args[1:]), kwargs)
            self.become_view(tensor, old, view)
            return out
        self.require_unshared(old, "grown by resize_")
        numel = had.nbytes // had.dtype.itemsize  # fewer than it has elements where some are in one place
        flat = rec.emit(
            aten.empty_strided.default,
            [spec.nbytes // spec.dtype.itemsize],
            [1],
            kwargs={"dtype": spec.dtype, "device": spec.device},
        )
        if numel:
            content = rec.emit(aten.as_strided.default, old.read(rec.emit), [numel], [1])
            flat = rec.emit(aten.slice_scatter.default, flat, content, 0, 0, numel, 1, spec=flat.spec)
        entry = rec.emit(aten.as_strided.default, flat, list(spec.shape), list(spec.stride), 0)
        rec.values[tensor] = after = Value(tensor, entry, spec)
        old.storage.changes.append(Change(self.log.note(SetData(-1, SOMETHING), tensor, old, after), tensor))
        return out

    def require_unshared(self, value: Value, what: str) -> None:
        """Raise for a tensor that gets more memory while a second tensor shares its present memory."""
        rec = self.recorder
        # A new tensor reaches the program through a detach: the tensor before the detach is nobody's.
        chain = [value]
        while chain[-1].view is not None and chain[-1].view.op in IDENTITIES and chain[-1].parent is not None:
            chain.append(chain[-1].parent)
        shared = chain[-1].parent is not None or any(
            v not in chain and v._storage is not None and v._storage is value._storage for v in rec.values.values()
        )
        if shared:
            raise UnsupportedMutationError(
                f"a tensor {what} at {user_line(rec.origins.here())} shares its memory with a second tensor. "
                "Allocate a tensor of the final size instead."
            )


# -------------------------------------------------------------------- the log
# The effect log while it is recorded: changes of tensors in place, by one sequence number.
#
# A call replays the entry itself. Two facts are added once the function has run: the input or result that the entry
# changes, and the tensor that gets the memory.


SOMETHING = Handle("")  # the source of memory that is not known yet


class Event(NamedTuple):  # no dataclass: Dynamo would trace an `__init__` that gets tensors
    """A change of `tensor` at the time `at`; `value` is its value until then.

    `required_grad`: so it did until then. `after`: what it is since it was given other memory.
    """

    at: int
    effect: Effect
    tensor: torch.Tensor
    value: Value
    required_grad: bool
    after: Value | None = None

    @property
    def is_detach(self) -> bool:
        """Whether it was `detach_()`."""
        return isinstance(self.effect, Detach) and self.effect.in_place

    @property
    def is_toggle(self) -> bool:
        """Whether the tensor requires grad since, or does not any more."""
        return isinstance(self.effect, Detach if self.required_grad else MarkRequiresGrad)


class EventLog:
    """`events`: changes of tensors besides writes of their elements, in program order."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._of: ById[torch.Tensor, list[Event]] = ById()

    def note(self, effect: Effect, tensor: torch.Tensor, value: Value, after: Value | None = None) -> int:
        """Note a change of a tensor with the `value`; returns its time."""
        event = Event(now(), effect, tensor, value, self.requires_itself(tensor), after)
        self.events.append(event)
        self._of.setdefault(tensor, []).append(event)
        return event.at

    def of(self, tensor: torch.Tensor, *kinds: type[Effect]) -> list[Event]:
        return [event for event in self._of.get(tensor, ()) if isinstance(event.effect, kinds)]

    def requires_itself(self, tensor: torch.Tensor) -> bool:
        """Whether a mark on the tensor counts: PyTorch sends no gradients to a view from before its base's mark."""
        own = self.of(tensor, MarkRequiresGrad, Detach)
        base = base_of(tensor) if is_view(tensor) and is_marked(tensor) else None
        is_own = base is None or not base.requires_grad or bool(own and isinstance(own[-1].effect, MarkRequiresGrad))
        return tensor.requires_grad and is_own


# -------------------------------------------------------------------- what an input was
# An input's state at a given time, by the log.


def keeps_history(view: torch.Tensor) -> bool:
    """Whether gradients of a view, of a tensor that was detached since, go anywhere."""
    node = history_of(view)
    return node is not None and any(following is not None for following, _ in node.next_functions)


def is_alike(one: TensorSpec, other: TensorSpec) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype
