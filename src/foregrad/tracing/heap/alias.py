"""Functionalization: the entry with the current value of each tensor, through views and mutations.

Every fake tensor the user's function touches has a `Value`. Values over one memory share a `Storage`; all but its root
are views, each remembering its view operator and base value. A write to any value is written back, view by view, into
the root (`views.write_back`) and moves the storage's generation; a value from an older generation replays its view from
the root when it is next read. So the tape stays free of mutation, and a view nobody reads again costs nothing.

The entry of a root always has eager's own strides (a functional result laid out otherwise is copied into
them), so that replayed views are valid wherever eager's were.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import torch

from ..._torch.tensors import history_of, share_counters
from ...graph.meta import TensorSpec
from ..tape.opinfo import op_info
from ..tape.origin import Origin, user_line
from ..tape.tape import Entry
from .refusals import past_the_edges
from .views import Emit, View, is_bijection, moved, replayed, with_bits, without_bits, write_back

aten = torch.ops.aten

now = itertools.count(1).__next__
"""The one clock of a capture: the next sequence number, of a view that is taken or of what happens in place."""


class Change(NamedTuple):
    """A memory was changed through `tensor`, and its version counter moves: elements are written, perhaps none, or
    (`is_write` is False) sizes change, or a history ends.
    """

    at: int
    tensor: torch.Tensor
    is_write: bool = False


@dataclasses.dataclass(slots=True, eq=False, repr=False)
class Storage:
    """The memory that some values share. `generation` counts the writes; `root` is the value it was made as.

    `changes`: the changes that autograd tells apart. `written_at`: the time of the last write, of an empty write too.
    """

    root: Value
    generation: int = 0
    written_at: int = 0
    changes: list[Change] = dataclasses.field(default_factory=list)
    is_input: bool = False
    is_touched: bool = False  # written through a tensor that has no elements: only autograd noticed
    last_scatter: tuple[Entry, Value, Any, Entry] | None = None

    @property
    def is_written(self) -> bool:
        return self.generation > 0 or self.is_touched

    @property
    def changed_at(self) -> int:
        """When it last changed; 0 where it never did."""
        return self.changes[-1].at if self.changes else 0

    def changes_of(self, tensor: torch.Tensor) -> list[Change]:
        """The changes that count for `tensor`: a write through `.data` moves a counter of its own."""
        return [c for c in self.changes if c.tensor is tensor or share_counters(c.tensor, tensor)]

    def note_write(self, tensor: torch.Tensor) -> None:
        """Elements were written through `tensor`, or none."""
        self.written_at = now()
        self.changes.append(Change(self.written_at, tensor, is_write=True))


class Value:
    """One fake tensor's value. `entry` is right while `generation` is the storage's.

    `became`: the tensor's value since its sizes changed in place.
    """

    __slots__ = (
        "_storage", "became", "born", "entry", "fake", "generation", "is_absent", "is_written_through", "original",
        "parent", "spec", "view",
    )  # fmt: skip

    def __init__(
        self,
        fake: torch.Tensor | None,
        entry: Entry | None,
        spec: TensorSpec,
        parent: Value | None = None,
        view: View | None = None,
    ) -> None:
        self.fake = fake
        self.entry = entry
        self.spec = spec
        self.parent = parent
        self.view = view
        self.original = entry
        self.is_written_through = False  # this value or a view was written to
        self._storage: Storage | None = None if parent is None else parent.storage
        self.generation = 0 if self._storage is None else self._storage.generation
        self.born = 0 if parent is None else now()
        self.became: Value | None = None
        self.is_absent = False  # the zeros in place of a tangent that is not there

    @property
    def storage(self) -> Storage:
        """The memory this value lives in; most values never share theirs, so it is made on first use."""
        if self._storage is None:
            self._storage = Storage(self)
        return self._storage

    @property
    def is_apart(self) -> bool:
        """Whether no other value ever shared the value's memory."""
        return self._storage is None and self.became is None

    def forget_memory(self) -> None:
        """End the circle of references between a memory and its values, once nothing is read any more."""
        self._storage = None

    @property
    def root(self) -> Value:
        return self if self.parent is None else self.storage.root

    @property
    def taken_at(self) -> Origin | None:
        """Where the user's program took the view that this is."""
        return None if self.view is None or self.view.made is None else self.view.made[0]

    @property
    def is_by_layout(self) -> bool:
        """Whether the value is a view by strides: it may go past its base's edges."""
        return self.view is not None and self.view.op is aten.as_strided.default and not self.view.is_member

    @property
    def is_past_the_edges(self) -> bool:
        """Whether the value is a view by strides of elements outside its base."""
        return self.is_by_layout and self.parent is not None and not self.parent.spec.holds(self.spec)

    def read(self, emit: Emit) -> Entry:
        """The entry that holds the current value, replaying views where the memory was written to since."""
        storage = self._storage
        if self.entry is not None and (storage is None or self.generation == storage.generation):
            return self.entry
        assert storage is not None
        assert self.parent is not None, "the root of a storage is always current"
        source = self._seen()
        assert self.view is not None
        self.entry = entry = replayed(emit, self.view, source.read(emit), source.spec, self.spec)
        self.generation = storage.generation
        made = self.view.made
        if made is not None and entry is not source.entry:
            entry.origin, entry.original = made[0], made[2]
            if made[0] is None or not entry.is_backward:
                entry.sequence_nr = made[1]
        return entry

    def separate(self, emit: Emit) -> None:
        """A copy in place of a value shared with a second tensor: the root's own memory."""
        entry = self.entry
        assert entry is not None
        starts_late = isinstance(entry.spec, TensorSpec) and entry.spec.offset != 0 and self.spec.is_dense
        again = (
            (entry,) if starts_late else (entry, entry)
        )  # unlike clone, `copy` keeps the strides, and the offset too
        spec = moved(self.spec, 0) if starts_late else self.spec
        self.entry = emit(aten.clone.default if starts_late else aten.copy.default, *again, spec=spec)
        self.storage.generation += 1
        self.generation = self.storage.generation
        self.storage.last_scatter = None

    def _seen(self) -> Value:
        """The value's base; for a view by strides, the nearest base with all of its elements."""
        assert self.parent is not None
        own = parent = self.parent
        if self.is_by_layout and self.spec.is_static:
            while not parent.spec.holds(self.spec):
                above = parent.parent
                if above is None or above.spec.dtype is not parent.spec.dtype:
                    break
                parent = above
        return parent if parent is own or parent.parent is None or parent.spec.holds(self.spec) else own

    def write(self, emit: Emit, new: Entry) -> None:
        """The value becomes `new`, as does everything that shares its memory."""
        storage = self.storage
        self.is_written_through = True
        if self.spec.numel == 0:
            storage.is_touched = True
            self.mark_written()
            if storage.is_input and storage.generation == 0 and storage.root.entry is not None:
                storage.root.separate(emit)  # the value from before may be saved, and counts no write
            return
        if self.parent is None:
            new = self._laid_out(emit, new)
        else:
            self._write_parent(emit, new)
        if self.parent is None:
            storage.generation += 1
            storage.last_scatter = None
        assert isinstance(new.spec, TensorSpec)
        if self.parent is not None and self.spec.overlaps_itself:
            self.generation = -1  # further elements may have changed with the written ones
        elif self.parent is None or _is_like(new.spec, self.spec):
            self.entry = new
            self.generation = storage.generation

    def mark_written(self) -> None:
        """Note a write to the value that is not written back view by view."""
        at: Value | None = self
        while at is not None:
            at.is_written_through = True
            at = at.parent

    def _write_parent(self, emit: Emit, new: Entry) -> None:
        parent, view, storage = self.parent, self.view, self.storage
        assert parent is not None
        assert view is not None
        if self.is_past_the_edges or (parent.spec.overlaps_itself and not is_bijection(view.op)):
            raise past_the_edges(user_line(self.taken_at))
        base = parent.read(emit)
        last = storage.last_scatter
        if last is not None and last[0] is base and last[1] is parent and view.is_same(last[2]):
            base = last[3]  # the last write to this view is overwritten whole
        scattered = write_back(emit, view, base, parent.spec, self.spec, new)
        parent.write(emit, scattered)
        if parent.entry is scattered and scattered.args and scattered.args[0] is base:
            storage.last_scatter = (scattered, parent, view, base)

    def _laid_out(self, emit: Emit, new: Entry) -> Entry:
        spec = new.spec
        assert isinstance(spec, TensorSpec)
        if spec.same_layout(self.spec) and (spec.conj, spec.neg) == (self.spec.conj, self.spec.neg):
            return new
        assert self.original is not None
        plain = without_bits(self.spec)  # a copy is such an operator
        return with_bits(
            emit,
            emit(aten.copy.default, self.original, with_bits(emit, new, self.spec, plain), spec=plain),
            self.spec,
            plain,
        )


def _is_like(spec: TensorSpec, other: TensorSpec) -> bool:
    """Whether both have equal views."""
    bits = (spec.conj, spec.neg) == (other.conj, other.neg)
    return bits and spec.stride == other.stride and spec.shape == other.shape


# -------------------------------------------------------------------- chains of views
# From a value back to its base, and from an entry back to the operator that made its memory.


def chain_of(value: Value) -> list[Value]:
    """The value, its base, and so on."""
    chain = [value]
    while chain[-1].parent is not None:
        chain.append(chain[-1].parent)
    return chain


def is_from_custom_function(value: Value, tensor: torch.Tensor) -> bool:
    """Whether a custom Function returned one of the views that led to the value: its history is the Function's."""
    chain, node = chain_of(value), history_of(tensor)
    inputs = [link.fake for link in chain if link.fake is not None and (link.view is None or link.view.made is None)]
    ends = list(map(history_of, inputs))  # the stand-in of a tensor that is no leaf is a Function's result itself
    for link in chain:  # each has a node, but for nodes inside the Function, and views by their place
        if link.view is None or link.view.made is None or node is None or node in ends:
            return False
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        node = node.next_functions[0][0] if node.next_functions else None
    return False


def memory_root(entry: Entry) -> Entry:
    """The owner of an entry's memory when the graph runs: through views back to the entry that made the memory."""
    while True:
        target = entry.target
        if target is None or not entry.args:
            return entry
        source = entry.args[0]
        if not isinstance(source, Entry):
            return entry
        if not hasattr(target, "_schema"):  # getitem of a multi-output operator
            if hasattr(source.target, "_schema") and op_info(source.target).is_view:
                entry = source.args[0]
                continue
            return entry
        if not op_info(target).is_view:
            return entry
        entry = source


def not_own(entries: list[Entry]) -> frozenset[int]:
    """Outputs in memory that an input or an earlier output is in: autograd is not to see them as views."""
    taken: set[Entry] = set()
    shared = set()
    for index, entry in enumerate(entries):
        root = memory_root(entry)
        if root is not entry or root.target is None or root in taken:
            shared.add(index)
        taken.add(root)
    return frozenset(shared)


# -------------------------------------------------------------------- kernels on copies of memory
# Writes with a result that depends on the kernel's order: the kernel itself does them, on a copy of the memory.
#
# A tensor may have several elements in one place (as `unfold` gives), or overlap a second operand. The result of such a
# write depends on the element that the kernel wrote last: no functional operator says so. It becomes one node, a
# `RunOnStorageCopies`, that copies the memory, lays the tensors on the copy as they lay on the original, and runs the
# operator there.


At = tuple[int, int | None]  # an argument by position, and for a list of tensors by index


@dataclasses.dataclass(frozen=True, slots=True)
class StorageExtent:
    """A tensor's place: the memory's number, the layout, and the bytes from the memory's start."""

    memory: int
    spec: TensorSpec
    start: int

    def on(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor there; `memory` is flat."""
        spec = self.spec
        itemsize = spec.dtype.itemsize
        if spec.dtype is not memory.dtype:
            unit = max(itemsize, memory.itemsize)
            whole = memory.numel() * memory.itemsize // unit * unit
            memory = memory[: whole // memory.itemsize].view(spec.dtype)
        return _with_bits(memory.as_strided(spec.shape, spec.stride, self.start // itemsize), spec)


def extent_of(value: Value, memory: int) -> StorageExtent | None:
    """The place of `value` in its root's span; None where it goes past the span, or where sizes vary."""
    spec, root = value.spec, value.root.spec
    if not (spec.is_static and root.is_static):
        return None
    start = int(spec.offset * spec.dtype.itemsize - root.offset * root.dtype.itemsize)
    if start < 0 or start + spec.nbytes > root.nbytes or start % spec.dtype.itemsize:
        return None
    return StorageExtent(memory, spec, start)


class RunOnStorageCopies:
    """`op` run on copies of memories: `call(*memories, *arguments)` -> (results that `op` made, the memories after it).

    `memories`: the layouts of the first arguments; they come back in these layouts. `places`: the arguments of `op` in
    the memories, by position in its schema and index in a list; None is passed in their place.
    """

    def __init__(self, op: Any, memories: tuple[TensorSpec, ...], places: dict[At, StorageExtent]) -> None:
        self.op = op
        self.memories = memories
        self.places = places
        self.tags = op.tags
        self.__name__ = "call_in_memory_" + op.__name__.replace(".", "_")
        self.__qualname__ = self.__name__
        self.__module__ = __name__

    def __call__(self, *args: Any) -> tuple[object, ...]:
        count = len(self.memories)
        copies = [_copied(tensor, spec) for tensor, spec in zip(args[:count], self.memories, strict=True)]
        flat = [_flat(copy, spec) for copy, spec in zip(copies, self.memories, strict=True)]
        given = [list(value) if isinstance(value, (list, tuple)) else value for value in args[count:]]
        laid = []
        for (position, index), place in self.places.items():
            tensor = place.on(flat[place.memory])
            laid.append(tensor)
            if index is None:
                given[position] = tensor
            else:
                given[position][index] = tensor
        arguments = self.op._schema.arguments
        plain = [value for value, argument in zip(given, arguments, strict=False) if not argument.kwarg_only]
        keywords = {a.name: value for value, a in zip(given, arguments, strict=False) if a.kwarg_only}
        result = self.op(*plain, **keywords)
        results = () if result is None else result if isinstance(result, (tuple, list)) else (result,)
        made = [value for value in results if not any(value is tensor for tensor in laid)]
        return (*made, *(_with_bits(copy, spec) for copy, spec in zip(copies, self.memories, strict=True)))

    def __repr__(self) -> str:
        places = ", ".join(
            f"{position if index is None else (position, index)}: {place.spec} strides {place.spec.stride} of memory "
            f"{place.memory} from byte {place.start}"
            for (position, index), place in self.places.items()
        )
        return f"call_in_memory({self.op}, {places})"


def _copied(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A copy of a tensor and of the gaps between its elements, without its bits."""
    tensor = _with_bits(tensor, spec)
    copy = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    if tensor.stride() == spec.stride:
        _flat(copy, spec).copy_(_flat(tensor, spec))
    else:
        copy.copy_(tensor)
    return copy


def _flat(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The memory that a tensor spans."""
    return tensor.as_strided((spec.nbytes // spec.dtype.itemsize,), (1,))


def _with_bits(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """With the conjugate and negative bits of `spec`; applied again, without them."""
    if spec.conj:
        tensor = aten._conj.default(tensor)
    if spec.neg:
        tensor = aten._neg_view.default(tensor)
    return tensor.detach() if spec.conj or spec.neg else tensor
