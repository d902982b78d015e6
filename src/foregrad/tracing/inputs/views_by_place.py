"""Views by their place in memory, as eager takes them up again once what they are of was written.

Of stand-ins autograd remembers the operators that made a view. Where that tells another view, or other gradients, from
what the place in memory does, the tensor is made a view by strides:

* each view at once, while sizes change in place (`ViewTracking`, `reshape_view`);
* a view whose gradients go to other elements by its operators than by its place, once the version counter moves
  (`OverlappingViews`): an argument, which is no view of its base at first, or `as_strided` past the edges of a view.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from ..._torch.stand_ins import is_stand_in
from ..._torch.tensors import (
    allows_writes,
    base_of,
    exchange,
    history_of,
    is_marked,
    is_usable,
    is_view,
    kind_of,
    leads_to_base,
    storage_key,
    version_of,
    view_again,
)
from ...graph.effect_log import InplaceView
from ...graph.meta import TensorSpec
from ...identity import ById
from ..aspect import Aspect
from ..heap.alias import Value, chain_of
from ..heap.recording import Recording
from ..heap.records import InputRecord, is_of_another_kind, is_written_with_history
from ..heap.refusals import past_the_edges, resized_view
from ..recorder.recorder import Recorder
from ..tape.origin import user_line

aten = torch.ops.aten
_TENSOR: Any = torch.Tensor
RESHAPERS = {_TENSOR.t_, _TENSOR.transpose_, _TENSOR.swapaxes_, _TENSOR.swapdims_, _TENSOR.unsqueeze_, _TENSOR.squeeze_}


def reshape_view(
    recorder: Recording,
    by_stand_in: ById[torch.Tensor, InputRecord],
    stale: list[tuple[torch.Tensor, str]],
    func: Any,
    tensor: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: Any,
) -> Any:
    """`func(tensor, *args)`; NotImplemented where autograd does not watch, or `tensor` is no view.

    To `stale` come views, and where, that autograd would take again with other sizes than they have.
    """
    if not is_view(tensor):
        record = by_stand_in.get(tensor)
        is_base, before = record is None or not is_view(record.real), version_of(tensor)
        result = _take_views_again(recorder, stale, func, tensor, args, kwargs, is_base=is_base)
        if record is not None and is_of_another_kind(record):
            _note(recorder, tensor, before)
        return result
    base = base_of(tensor)
    if base is None or kwargs or not (tensor.requires_grad and torch.is_grad_enabled() and allows_writes(tensor)):
        return NotImplemented
    if storage_key(base) != storage_key(tensor):
        raise resized_view(user_line(recorder.origins.here()))
    if base.is_complex() and tensor.dtype is base.dtype.to_real():
        base = torch.view_as_real(base)
    before = version_of(tensor)
    if base.dtype is not tensor.dtype:
        func(tensor, *args)
        _note(recorder, tensor, before)
        return tensor
    if base.is_leaf:
        return NotImplemented  # which raises
    if tensor.is_conj() or tensor.is_neg() or base.is_conj() or base.is_neg():
        raise resized_view(user_line(recorder.origins.here()))
    record = by_stand_in.get(base)
    outer = base_of(record.real) if record is not None and is_view(record.real) else None
    if outer is not None and outer.requires_grad and outer.is_leaf and leads_to_base(record.real):  # type: ignore[union-attr]
        raise RuntimeError("a view of a leaf Variable that requires grad is being used in an in-place operation.")
    other_dtype = base_of(tensor).dtype is not tensor.dtype  # type: ignore[union-attr]
    events = recorder.changes.log.events
    moved = tensor.detach()
    func(moved, *args)
    event = events.pop()
    again = base.as_strided(moved.shape, moved.stride(), moved.storage_offset())
    _become(recorder, tensor, again, resized_view(user_line(recorder.origins.here())))
    assert isinstance(event.effect, InplaceView)
    effect = dataclasses.replace(event.effect, grad_enabled=True)
    events.append(event._replace(effect=effect, tensor=tensor, required_grad=True))
    if other_dtype:
        _note(recorder, tensor, before)
    return tensor


def _note(recorder: Recording, tensor: torch.Tensor, before: int) -> None:
    """The sizes of a view that can't be written to any more were changed; it was of the version `before` until then."""
    others = [known for known in recorder.reshaped if known[0] is not tensor or known[1] != before]
    recorder.reshaped = [*others, (tensor, version_of(tensor), user_line(recorder.origins.here()))]


def _take_views_again(
    recorder: Recording,
    stale: list[tuple[torch.Tensor, str]],
    func: Any,
    tensor: torch.Tensor,
    args: Any,
    kwargs: Any,
    *,
    is_base: bool,
) -> Any:
    """`func(tensor, *args)`; views that were taken of `tensor` before stay views of the places that they had.

    Not so those of another dtype, or conjugated, where it is no view itself: eager takes them again by their operator.
    """
    spec = recorder.value_of(tensor).spec
    values = [value for value in list(recorder.values.values()) if _is_view_of(value, tensor)]
    fakes = [value.fake for value in values if value.fake is not None]
    views = [fake for fake in fakes if not is_base or kind_of(fake) == kind_of(tensor)]
    where = user_line(recorder.origins.here())
    stale += [(fake, where) for fake in fakes if all(fake is not view for view in views)]
    result = func(tensor, *args, **kwargs)
    if views:
        with torch.enable_grad():
            before = tensor.as_strided(spec.shape, spec.stride, spec.offset)
            for view in views:
                _see_as(recorder, view, view_again(view, before), resized_view(where))
    return result


def _is_view_of(value: Value, tensor: torch.Tensor) -> bool:
    """Whether the value's is a view that autograd knows of, by the operator that made it."""
    fake = value.fake
    if fake is None or value.view is None or value.view.op is aten.as_strided.default or not fake.requires_grad:
        return False
    if not is_view(fake) or base_of(fake) is not tensor or storage_key(fake) != storage_key(tensor):
        return False
    return allows_writes(fake) and leads_to_base(fake)


def _see_as(recorder: Recording, view: torch.Tensor, again: torch.Tensor, refused: Exception) -> None:
    """To autograd `view` is `again` from here on; in memory it stays what it was."""
    value = recorder.value_of(view)
    _become(recorder, view, again, refused)
    recorder.values[view], value.fake = value, view


def _become(recorder: Recording, tensor: torch.Tensor, new: torch.Tensor, refused: Exception) -> None:
    """The object `tensor` is to be the view `new` from here on. Raises `refused` where autograd has saved it."""
    value, old = recorder.value_of(new), recorder.value_of(tensor)
    try:
        exchange(tensor, new)
    except RuntimeError:
        raise refused from None
    if old.fake is tensor:
        old.fake = None
    value.fake = tensor
    recorder.values[tensor] = value


def check_reshaped(recorder: Recording) -> None:
    """Raise for views of another dtype that are written to once their sizes were changed, or their base is."""
    for tensor, version, where in recorder.reshaped:
        if tensor.requires_grad and version_of(tensor) != version:
            raise resized_view(where)


# -------------------------------------------------------------------- once they are written


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


class OverlappingViews(Aspect):
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

    def ran(self) -> None:
        """Raises for a view of another dtype than what it is of, whose sizes changed."""
        self.look()
        for base, where in self._of_another_kind:
            if base is not None and self.recorder.changes.log.of(base, InplaceView):
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
            _see_as(self.recorder, entry.view, view_like(record.real, base), past_the_edges(where))
        for view in [*views, *([entry.view] if record is None else [])]:
            if kind_of(view) == kind_of(base):
                again = base.as_strided(view.shape, view.stride(), view.storage_offset())
                _see_as(self.recorder, view, again, past_the_edges(where))

    def _is_view_of(self, tensor: Any, source: torch.Tensor) -> bool:
        """Whether gradients of it go to `source`, of which it is a view."""
        if not is_stand_in(tensor) or not is_view(tensor) or not tensor.requires_grad:
            return False
        if tensor is source or not allows_writes(tensor) or storage_key(tensor) != storage_key(source):
            return False
        if not is_view(source):
            return base_of(tensor) is source
        value, above = self.recorder.values.get(tensor), self.recorder.values.get(source)
        return value is not None and above is not None and above in chain_of(value)


def _writes(func: Any) -> bool:
    """Whether a torch function writes to its first argument, by its name."""
    name = getattr(func, "__name__", "")
    return name in _WRITING or (name.endswith("_") and not name.endswith("__") and name not in _MARKING)


def view_like(real: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """A view of `base` at the place that `real` has in its own base, as eager regenerates it."""
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


# -------------------------------------------------------------------- at once


class ViewTracking:
    """Views by strides. `where()`: the user's line.

    `stale`: views of another dtype whose base changed its sizes, and where.
    """

    def __init__(self, where: Callable[[], str], overlapping: OverlappingViews | None) -> None:
        self.where, self.overlapping = where, overlapping
        self.stale: list[tuple[torch.Tensor, str]] = []

    def as_strided(self, result: Any, args: tuple[Any, ...]) -> Any:
        """A view by strides, by its place in the base's memory; past the edges of a view only once that is written."""
        view = _by_strides(result, args, is_strided=True)
        is_of_view = view is not result and view.requires_grad and args[0] is not base_of(view)
        if self.overlapping is None or not is_of_view or TensorSpec.of(args[0]).holds(TensorSpec.of(view)):
            return view
        self.overlapping.watch(result)
        return result

    def by_strides(self, result: Any, args: tuple[Any, ...]) -> Any:
        """What an operator gave, views by strides."""
        if self.overlapping is not None and self.overlapping.watched and args and self.overlapping.is_watched(args[0]):
            return result
        return _by_strides(result, args)

    def check_stale(self, result: Any, args: tuple[Any, ...]) -> None:
        """Raise for a view of a view whose base has other sizes by now: its gradients do not fit those."""
        if not self.stale:
            return
        first = result[0] if type(result) in (tuple, list) and result else result
        if not is_stand_in(first) or not (is_view(first) and first.requires_grad):
            return
        for view, where in self.stale:
            if any(arg is view for arg in args) and first is not view:
                raise resized_view(f"{where}, and taken again at {self.where()}")


def _by_strides(result: Any, args: tuple[Any, ...], is_strided: bool = False) -> Any:
    """A view as eager takes it up again once its base was written: by its place in the base's memory.

    Of fakes autograd remembers the operator that made the view; should the sizes of the base change in place, that
    would give another view.
    """
    if type(result) is tuple or type(result) is list:
        return type(result)(_by_strides(item, args) for item in result)
    if not is_stand_in(result) or not is_view(result) or any(result is arg for arg in args):
        return result
    base = base_of(result)
    if base is None or not allows_writes(result) or not torch.is_grad_enabled():
        return result
    is_of_leaf = args and is_stand_in(args[0]) and is_view(args[0]) and is_marked(args[0])
    is_of_leaf = is_of_leaf or (result.requires_grad and is_usable(result) and not leads_to_base(result))
    is_of_detached = result.requires_grad and not base.requires_grad
    if is_of_leaf or is_of_detached or storage_key(base) != storage_key(result):
        return result  # of what the base was before `.data = ...`, or `detach_`, or of a leaf that is a view itself
    if result.is_conj() or result.is_neg() or base.is_conj() or base.is_neg():
        return result
    if base.is_complex() and result.dtype is base.dtype.to_real():
        base = torch.view_as_real(base)
        if TensorSpec.of(base) == TensorSpec.of(result):
            return result  # taken again by the operator alone
    overlaps = TensorSpec.of(base).overlaps_itself or (TensorSpec.of(result).overlaps_itself and not is_strided)
    if base.dtype is not result.dtype or overlaps:
        return result  # gradients of elements in one place are others then
    return base.as_strided(result.shape, result.stride(), result.storage_offset())
