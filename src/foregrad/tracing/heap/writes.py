"""Operators that write to their arguments, recorded as operators that don't.

Each written argument gets a new entry (see `Value.write`); the fake itself is mutated as eager would, as autograd,
version counters and error checks above expect.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from typing import Any

import torch

from ..._torch.engine import plain_execution
from ..._torch.nested import tensors_in
from ..._torch.ops import Args, Kwargs, OpOverload
from ...graph.meta import TensorSpec
from ...identity import ById, IdSet
from ..tape.opinfo import CallOnCopies, OpInfo
from ..tape.origin import user_line
from ..tape.tape import Entry
from .alias import At, RunOnStorageCopies, Storage, StorageExtent, Value, chain_of, extent_of, memory_root
from .metadata_changes import MetadataChanges
from .overlaps import check_cast, check_lists, check_write
from .recording import Recording
from .refusals import past_the_edges
from .views import moved, without_bits

aten = torch.ops.aten


class Writes:
    """Writes to the elements of tensors. `changes`: further changes of tensors in place."""

    def __init__(self, recorder: Recording, changes: MetadataChanges) -> None:
        self.recorder = recorder
        self.changes = changes
        self.copied: dict[Value, list[Entry]] = {}  # by root: values that `copy_` gave it as they are
        self.listed: IdSet[torch.Tensor] = IdSet()  # tensors that some `_foreach_` operator got and that overlap

    # ---------------------------------------------------------------- elements

    def elements(self, info: OpInfo, args: Args, kwargs: Kwargs) -> Any:
        """An operator that writes to the elements of some arguments, in place or through `out=`."""
        rec, func = self.recorder, info.op
        given = by_position(info, args, kwargs)
        targets = [t for i in info.writes for t in tensors_in(given.get(i))]
        before = rec.to_entries([given.get(i) for i in range(len(info.argument_names))])
        check_write(func, args, kwargs, targets)
        out = rec.run_fake(func, args, kwargs)
        if func._schema.name.startswith("aten::_foreach_"):  # their kernels count the write, no layer above them does
            torch.autograd.graph.increment_version([t for t in targets if not t.is_inference()])
        if info.is_out:
            self._resized_outputs(targets)
        values = {at: rec.value_of(tensor) for at, tensor in tensors_at(given).items()}
        beside = rounds_in_memory(func, targets) and len({value.root for value in values.values()}) < len(values)
        if func not in _FILLS and (beside or where_order_matters(info, values)):
            is_listed = func._schema.name.startswith("aten::_foreach_")
            if is_listed and info.functional is not None:  # fakes of lists are not asked whether the results fit
                for target, result in zip(targets, rec.run_fake(info.functional, args, kwargs), strict=True):
                    check_cast(result.dtype, target.dtype)
            if is_listed and torch.is_grad_enabled():
                swaps = [(e.value, e.after) for e in self.changes.log.events if e.after is not None]
                exchanged = {value.storage for pair in swaps for value in pair}
                # Elsewhere autograd differentiates the fakes as it does the tensors.
                check_lists([t for t in targets if rec.value_of(t).storage in exchanged], rec.origins)
                self.listed.update(targets)
                here = rec.origins.here()
                self.changes.changed_at.update(ById((target, here) for target in targets))
            self._in_memory(info, before, values, targets, out)
            return out
        if func is aten.copy_.default:
            new = [self._copied(targets[0], rec.tensor_entry(before[1]))]
        elif func in _FILLS:
            fill = args[1] if _FILLS[func] is None else _FILLS[func]
            new = [rec.emit(aten.full_like.default, before[0], fill)]
        elif info.functional is not None and not (
            # drawn in the order of memory; the functional form's result is contiguous
            (func in (aten.bernoulli_.float, aten.bernoulli_.Tensor) and not targets[0].is_contiguous())
            or rounds_in_memory(func, targets)
        ):
            new = self._functional(info, args, kwargs, before, out)
        else:
            new = self._on_copies(info, given, before, info.writes, out)
        for tensor, entry in zip(targets, new, strict=True):
            self._write(tensor, entry, checked=func is not aten.copy_.default)
        return out

    def assign(self, tensor: torch.Tensor, new: Entry) -> None:
        """`tensor` takes the value of `new`: `copy_` below autograd, without a version count."""
        self._write(tensor, self._copied(tensor, new))

    def _functional(self, info: OpInfo, args: Args, kwargs: Kwargs, before: list[Any], out: object) -> list[Entry]:
        """Record the functional form; bind its other results; return the entries for the written tensors."""
        rec, functional = self.recorder, info.functional
        assert functional is not None
        keep = [i for i in range(len(info.argument_names)) if not (info.is_out and i in info.writes)]
        given = by_position(info, args, kwargs)
        positional: list[Any] = []
        fake_positional: list[Any] = []
        keywords: dict[str, Any] = {}
        fake_keywords: dict[str, Any] = {}
        for at, (argument, i) in enumerate(zip(functional._schema.arguments, keep, strict=True)):
            if i not in given:
                default = info.op._schema.arguments[i].default_value
                if argument.has_default_value() or default is None:
                    continue
                given[i] = before[i] = default
            if argument.kwarg_only or at != len(positional):
                keywords[argument.name], fake_keywords[argument.name] = before[i], given[i]
            else:
                positional.append(before[i])
                fake_positional.append(given[i])
        entry = rec.entry(functional, tuple(positional), keywords, info.is_random)
        result = rec.run_fake(functional, tuple(fake_positional), fake_keywords)
        entry.spec = rec.specs_of(result)
        results = as_entries(rec, entry, result)
        own = [o for o, w in zip(as_tuple(out), info.returns_written, strict=False) if w is None]
        for tensor, part in zip(own, results, strict=False):
            if isinstance(tensor, torch.Tensor):
                bind(rec, tensor, part)
        return flat_entries(results[len(own) :])

    def _on_copies(
        self, info: OpInfo, given: dict[int, Any], before: list[Any], writes: tuple[int, ...], out: object
    ) -> list[Entry]:
        rec = self.recorder
        call = CallOnCopies(info.op, writes)
        upto = max(given) + 1
        defaults = [a.default_value for a in info.op._schema.arguments]
        args = tuple(before[i] if i in given else defaults[i] for i in range(upto))
        entry = rec.entry(call, args, {}, info.is_random)
        targets = [given[i] for i in writes if given.get(i) is not None]
        returned = as_tuple(out)
        entry.spec = (*(rec.specs_of(o) for o in returned), *(_at_start(rec.specs_of(t)) for t in targets))
        parts = [rec.emit(operator.getitem, entry, i, spec=entry.spec[i]) for i in range(len(entry.spec))]
        written = IdSet(tensors_in(targets))
        for tensor, part in zip(returned, parts, strict=False):
            if isinstance(tensor, torch.Tensor) and tensor not in written:
                bind(rec, tensor, part)
        return flat_entries([split(rec, p) for p in parts[len(returned) :]])

    def _in_memory(
        self, info: OpInfo, before: list[Any], values: dict[At, Value], targets: list[torch.Tensor], out: object
    ) -> None:
        """Run the operator itself on copies of the memories that it writes to."""
        rec = self.recorder
        roots: dict[Value, None] = {}
        for tensor in targets:
            value = rec.value_of(tensor)
            root, spec = value.root, value.root.spec
            if any(link.is_past_the_edges for link in chain_of(value)):
                raise past_the_edges(user_line(rec.origins.here()))
            if value.storage.is_input and (spec.overlaps_itself or spec.conj or spec.neg):
                self.recorder.host.past_the_edges(root)
            roots[root] = None
        number = {key: i for i, key in enumerate(roots)}
        places: dict[At, StorageExtent] = {}
        arguments = [
            argument.default_value if value is None else value
            for argument, value in zip(info.op._schema.arguments, before, strict=True)
        ]
        for (position, index), value in values.items():
            if value.root not in roots:
                continue
            place = extent_of(value, number[value.root])
            if place is None:
                raise past_the_edges(user_line(rec.origins.here()))
            places[position, index] = place
            given: Any = arguments[position]
            arguments[position] = None if index is None else [None if i == index else x for i, x in enumerate(given)]
        call = RunOnStorageCopies(info.op, tuple(root.spec for root in roots), places)
        entry = rec.entry(call, (*(root.read(rec.emit) for root in roots), *arguments), {}, info.is_random)
        written = IdSet(targets)
        made = [tensor for tensor in as_tuple(out) if isinstance(tensor, torch.Tensor) and tensor not in written]
        entry.spec = (*(rec.spec_of(tensor) for tensor in made), *(_at_start(root.spec) for root in roots))
        parts = [rec.emit(operator.getitem, entry, i, spec=entry.spec[i]) for i in range(len(entry.spec))]
        for tensor, part in zip(made, parts, strict=False):
            bind(rec, tensor, part)
        for tensor in targets:
            rec.value_of(tensor).mark_written()
        for root, part in zip(roots, parts[len(made) :], strict=True):
            root.write(rec.emit, part)
        for tensor in targets:
            rec.value_of(tensor).storage.note_write(tensor)

    def _copied(self, target: torch.Tensor, source_entry: Entry) -> Entry:
        rec = self.recorder
        value = rec.value_of(target)
        spec, from_spec = value.spec, source_entry.spec
        assert isinstance(from_spec, TensorSpec)
        one, other = ((s.shape, s.dtype, s.device, s.conj, s.neg) for s in (spec, from_spec))
        same = one == other
        if same and memory_root(source_entry).target is None and spec.numel == value.root.spec.numel:
            # The input may change before the backward, for which autograd saves the copy.
            return rec.emit(aten.copy.default, source_entry, source_entry, spec=from_spec)
        if same and (value.parent is not None or spec.stride == from_spec.stride):
            self.copied.setdefault(value.root, []).append(source_entry)
            return source_entry
        return rec.emit(aten.copy.default, value.read(rec.emit), source_entry, spec=_plain(spec, value))

    def _write(self, tensor: torch.Tensor, new: Entry, *, checked: bool = False) -> None:
        rec = self.recorder
        value = rec.value_of(tensor)
        spec = new.spec
        assert isinstance(spec, TensorSpec)
        if value.storage.is_input and value.storage.root.spec.overlaps_itself:
            self.recorder.host.past_the_edges(value.storage.root)
        if spec.dtype is not value.spec.dtype:
            if checked:
                check_cast(spec.dtype, value.spec.dtype)
            new = rec.emit(aten._to_copy.default, new, kwargs={"dtype": value.spec.dtype})
            spec = new.spec
            assert isinstance(spec, TensorSpec)
        if spec.shape != value.spec.shape:
            new = rec.emit(aten.expand.default, new, list(value.spec.shape))
        value.write(rec.emit, new)
        value.storage.note_write(tensor)

    def check_edges(self, view: Value) -> None:
        """A view by strides may see more of the memory than its base."""
        if view.is_past_the_edges:
            self.changes.differs_by_place(view.storage, past_the_edges(user_line(self.recorder.origins.here())))
            if view.storage.is_input and not view.root.spec.holds(view.spec):
                self.recorder.host.past_the_edges(view.root)

    def where_lists(self) -> str:
        """The line of the last operator on lists that got overlapping tensors."""
        changed = self.changes.changed_at
        return user_line(next((changed[key] for key in reversed(changed) if key in self.listed), None))

    def _resized_outputs(self, targets: list[torch.Tensor]) -> None:
        """`out=` resizes its tensor: then the tensor counts as new."""
        rec = self.recorder
        for tensor in targets:
            value = rec.value_of(tensor)
            if tuple(tensor.shape) != value.spec.shape:
                self.changes.resizes(tensor, value)
                self.changes.require_unshared(value, "resized by out=")
                spec = rec.spec_of(tensor)
                entry = rec.emit(
                    aten.empty_strided.default,
                    list(spec.shape),
                    list(spec.stride),
                    kwargs={"dtype": spec.dtype, "device": spec.device},
                    spec=spec,
                )
                rec.values[tensor] = Value(tensor, entry, spec)

    # ---------------------------------------------------------------- hidden

    def happen_in_hiding(self, info: OpInfo, args: tuple[object, ...]) -> bool:
        """Batch norm updates its running statistics when it has them and is training."""
        return args[5] is True and all(args[i] is not None for i in info.hidden_writes)

    def hidden(self, info: OpInfo, args: Args, kwargs: Kwargs) -> Any:
        """Operators with a schema that keeps quiet about a write."""
        rec = self.recorder
        given = by_position(info, args, kwargs)
        before = rec.to_entries([given.get(i) for i in range(len(info.argument_names))])
        out = rec.run_fake(info.op, args, kwargs)
        targets = [given[i] for i in info.hidden_writes]
        if info.op is aten.native_batch_norm.default:
            entry = rec.entry(aten._native_batch_norm_legit_functional.default, before, {}, False)
            entry.spec = (*rec.specs_of(out), *(_at_start(rec.value_of(t).spec) for t in targets))
            parts = [rec.emit(operator.getitem, entry, i, spec=entry.spec[i]) for i in range(5)]
            for tensor, part in zip(out, parts[:3], strict=True):
                bind(rec, tensor, part)
            new = parts[3:]
        else:
            new = self._on_copies(info, given, before, info.hidden_writes, out)
        for tensor, part in zip(targets, new, strict=True):
            self._write(tensor, part)
        return out


_FILLS: dict[object, object] = {aten.zero_.default: 0, aten.fill_.Scalar: None}


def _at_start(spec: Any) -> Any:
    """A copy's spec, in a memory of its own."""
    if isinstance(spec, TensorSpec):
        return moved(spec, 0)
    return None if spec is None else tuple(map(_at_start, spec))


def _plain(spec: TensorSpec, value: Value) -> TensorSpec:
    """The result of `aten.copy`: a tensor without bits."""
    entry = value.entry
    offset = entry.spec.offset if entry is not None and isinstance(entry.spec, TensorSpec) else spec.offset
    return moved(without_bits(spec), offset)


# -------------------------------------------------------------------- writes that are taken apart
# Arguments and results of an operator, taken apart: tensors in lists, entries of several values.


def by_position(info: OpInfo, args: Args, kwargs: Kwargs) -> dict[int, Any]:
    given = dict(enumerate(args))
    for i, name in enumerate(info.argument_names):
        if name in kwargs:
            given[i] = kwargs[name]
    return given


def as_tuple(out: object) -> tuple[Any, ...]:
    if out is None:
        return ()
    return tuple(out) if isinstance(out, (list, tuple)) else (out,)


def as_entries(rec: Recording, entry: Entry, result: object) -> list[Any]:
    if isinstance(result, torch.Tensor):
        return [entry]
    parts: list[object] = split(rec, entry)
    return parts


def split(rec: Recording, entry: Entry) -> Any:
    """An entry of several values as one entry each, nested as they are."""
    if not isinstance(entry.spec, tuple):
        return entry
    return [
        split(rec, rec.emit(operator.getitem, entry, i, spec=spec)) if spec is not None else None
        for i, spec in enumerate(entry.spec)
    ]


def flat_entries(values: Any) -> list[Entry]:
    flat: list[Entry] = []
    for value in values:
        if isinstance(value, Entry):
            flat.append(value)
        elif isinstance(value, list):
            flat.extend(flat_entries(value))
    return flat


def bind(rec: Recording, tensor: torch.Tensor, entry: Entry) -> None:
    rec.values[tensor] = Value(tensor, entry, rec.spec_of(tensor))


# -------------------------------------------------------------------- writes whose order matters
# Whether the values that a write leaves depend on the order in which its kernel visits elements: see
# `RunOnStorageCopies`.


_EXACT_UP_TO_BYTES = 1 << 22
# These operators compute each element of the result from the elements at its place alone, though PyTorch does not tag
# them so.
_POINTWISE = {aten.copy_.default, aten.masked_fill_.Scalar, aten.masked_fill_.Tensor}


def tensors_at(given: dict[int, object]) -> dict[At, torch.Tensor]:
    """The tensors among arguments and in lists of tensors, by place."""
    found: dict[At, torch.Tensor] = {}
    for position, value in given.items():
        if isinstance(value, torch.Tensor):
            found[position, None] = value
        elif isinstance(value, (list, tuple)):
            found.update({(position, i): item for i, item in enumerate(value) if isinstance(item, torch.Tensor)})
    return found


def where_order_matters(info: OpInfo, values: dict[At, Value]) -> bool:
    """Whether the operator writes an element twice, or reads it for a different element."""
    by_storage: dict[Storage, list[At]] = {}
    for at, value in values.items():
        if at[0] in info.writes:
            if value.spec.overlaps_itself:
                return True
            by_storage[value.storage] = []
    if len(values) == 1:
        return False
    for at, value in values.items():
        group = by_storage.get(value.storage) if value.parent is not None or value._storage is not None else None
        if group is not None:
            group.append(at)
    return any(len(group) > 1 and _order_matters_among(info, values, group) for group in by_storage.values())


def _order_matters_among(info: OpInfo, values: dict[At, Value], group: list[At]) -> bool:
    if _are_apart([values[at].spec for at in group]):
        return False
    for at in group:
        if at[0] not in info.writes:
            continue
        for other in group:
            if other == at or (other[0] in info.writes and other < at):
                continue
            one, two = values[at].spec, values[other].spec
            if one == two and at[1] == other[1] and other[0] not in info.writes and _is_pointwise(info):
                continue
            if _overlap(one, two):
                return True
    return False


def _is_pointwise(info: OpInfo) -> bool:
    op = info.op
    return op in _POINTWISE or torch.Tag.pointwise in op.tags or op._schema.name.startswith("aten::_foreach_")


def _are_apart(specs: Iterable[TensorSpec]) -> bool:
    """Whether each tensor ends where the next one starts, or before."""
    ranges = [(spec.offset * spec.dtype.itemsize, spec.nbytes) for spec in specs]
    if len(ranges) == 2:  # sizes that vary are compared as seldom as can be
        (a, m), (b, n) = ranges
        return bool(a + m <= b) or bool(b + n <= a)
    ranges.sort()
    return all(start + size <= after for (start, size), (after, _) in itertools.pairwise(ranges))


def _overlap(a: TensorSpec, b: TensorSpec) -> bool:
    """Whether two tensors in one memory have some byte in common; True where the answer would take long."""
    if a.numel == 0 or b.numel == 0 or _are_apart([a, b]):
        return False
    if not (a.is_static and b.is_static):
        return True
    starts = [int(spec.offset) * spec.dtype.itemsize for spec in (a, b)]
    first = min(starts)
    size = max(start + spec.nbytes for start, spec in zip(starts, (a, b), strict=True)) - first
    if size > _EXACT_UP_TO_BYTES:
        return True
    with plain_execution():
        taken = torch.zeros(size, dtype=torch.bool)
        _bytes_of(a, taken, starts[0] - first).fill_(True)
        return bool(_bytes_of(b, taken, starts[1] - first).any())


def _bytes_of(spec: TensorSpec, memory: torch.Tensor, start: int) -> torch.Tensor:
    itemsize = spec.dtype.itemsize
    return memory.as_strided((*spec.shape, itemsize), (*(s * itemsize for s in spec.stride), 1), start)


# Complex products are compiled twice, for operands in separate memories and for operands in shared memory, and round
# differently.
_PRODUCTS = {"mul_", "div_", "addcmul_", "addcdiv_", "addr_", "lerp_", "pow_", "square_", "reciprocal_"}


def rounds_in_memory(func: OpOverload, targets: list[torch.Tensor]) -> bool:
    """Whether the functional form would round differently."""
    return targets[0].is_complex() and func._schema.name.removeprefix("aten::") in _PRODUCTS
