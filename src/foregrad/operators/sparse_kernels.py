"""Sparse gradients in a capture: of embeddings with `sparse=True`, and as changed by autograd and hooks.

A sparse tensor has no memory of its own and no layout that is known, so it has no `Value`: only its entry is kept. Its
fake has the right class, sizes and dtype: autograd looks at nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from .._torch.engine import current_autograd_node, sequence_nr_of
from .._torch.ops import Args, Kwargs
from ..errors import UnsupportedLayoutError
from ..graph.meta import UNDESCRIBED, TensorSpec, contiguous_strides
from ..tracing.aspect import Aspect, Row, aspect
from ..tracing.heap.alias import Value
from ..tracing.heap.recording import Host, Recording
from ..tracing.tape.tape import Entry
from .sparse import BAG_BACKWARD, EMBEDDING_BACKWARD, MAKE, can_take, gives_sparse

aten = torch.ops.aten

_IN_PLACE = {aten.add_.Tensor: aten.add.Tensor}
_SAME = {aten.detach.default, aten.alias.default}


@aspect
class SparseGradients(Aspect):
    """The sparse tensors of one tape. `entries`: the entry that gives each, by its fake."""

    def __init__(self, host: Host, recorder: Recording) -> None:
        self.recorder = recorder
        self.entries = recorder.opaque
        # By autograd node, the indices and the gradient of an embedding that leaves padding out.
        self.without_padding: dict[int, list[torch.Tensor]] = {}

    def resumed(self) -> Aspect:
        return self

    def refused(self) -> UnsupportedLayoutError:
        return UnsupportedLayoutError(
            f"a tensor of layout torch.sparse_coo is used at {self.recorder.where()}. Only strided tensors and "
            "sparse gradients of embeddings can be compiled: call .to_dense() first, or put the computation into a "
            "function that `foregrad.eager_region` marks."
        )

    def run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        """An operator's result for a sparse tensor among its arguments; `NotImplemented` without one."""
        entries, rec = self.entries, self.recorder
        if not any(a in entries for a in args):
            return NotImplemented
        first = args[0]
        if func in _SAME:
            return self._like(first, entries[first])
        target = _IN_PLACE.get(func, func)
        if not (can_take(target, args, kwargs, self._is_sparse) and self._is_plain(args)):
            raise self.refused()
        operands = tuple(entries[a] if self._is_sparse(a) else rec.to_entries(a) for a in args)
        entry = rec.entry(target, operands, kwargs, False)
        if gives_sparse(target, args, self._is_sparse):
            if target is func:
                return self._like(first if self._is_sparse(first) else args[1], entry)
            entry.spec = UNDESCRIBED
            entries[first] = entry
            return first
        shape = tuple(first.shape)
        out = self._bound(entry, shape, first)
        if target is func:
            return out
        with self.recorder:
            return aten.copy_.default(first, out)

    def _is_sparse(self, value: Any) -> bool:
        return value in self.entries

    def _is_plain(self, args: Any) -> bool:
        """Whether all tensors are of one dtype and size, but for single numbers."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        one = next(filter(self._is_sparse, tensors))
        is_alike = all(t.dtype is one.dtype and (t.dim() == 0 or t.shape == one.shape) for t in tensors)
        return is_alike and not any(isinstance(a, complex) for a in args)

    # ---------------------------------------------------------------- fakes

    def _like(self, fake: torch.Tensor, entry: Entry) -> torch.Tensor:
        return self.made(entry, tuple(fake.shape), fake.sparse_dim(), fake)

    def made(self, entry: Entry, size: tuple[Any, ...], dims: int, values: torch.Tensor) -> torch.Tensor:
        """A sparse fake of `size`, of the dtype and device of `values`, for the result of `entry`."""
        rec, device, dtype = self.recorder, values.device, values.dtype
        count = 2  # no one asks how many elements there are: any number will do
        shape = (count, *size[dims:])
        indices = rec.fake_of(TensorSpec((dims, count), (count, 1), torch.int64, device))
        elements = rec.fake_of(TensorSpec(shape, contiguous_strides(shape), dtype, device))
        options = {"dtype": dtype, "layout": torch.sparse_coo, "device": device, "pin_memory": False}
        arguments = (dims, len(size) - dims, list(size), indices, elements)
        fake: torch.Tensor = rec.run_fake(MAKE, arguments, options)
        entry.spec = UNDESCRIBED
        self.entries[fake] = entry
        rec.opaque_owner = self
        return fake

    def _bound(self, entry: Entry, shape: tuple[Any, ...], like: torch.Tensor) -> torch.Tensor:
        """A dense fake of `shape` for the result of `entry`."""
        entry.spec = spec = TensorSpec(shape, contiguous_strides(shape), like.dtype, like.device)
        fake = self.recorder.fake_of(spec)
        self.recorder.values[fake] = Value(fake, entry, spec)
        return fake

    def rows(self, node: Any, tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """A stand-in for the rows of `tensor` besides padding: their number is known in the call alone, and one
        operator does all of the node's work.
        """
        self.without_padding.setdefault(sequence_nr_of(node), []).append(tensor)
        return self._bound(Entry(None), (mask.numel(), *tensor.shape[mask.dim() :]), tensor)

    # ---------------------------------------------------------------- operators that give one

    def make(self, plan: Any, args: Args, kwargs: Kwargs) -> Any:
        rec = self.recorder
        dims, _, size, indices, values, *_ = args
        node = current_autograd_node()
        given = None
        if _is_embedding(node):
            given = self.without_padding.pop(sequence_nr_of(node), None) or _taken_from(rec, indices, values)
        if given is None:
            entry = rec.entry(MAKE, rec.to_entries(args), kwargs, False)
        else:  # the values are then laid out as the gradient is that comes in
            rows, gradient = map(rec.to_entries, given)
            entry = rec.entry(EMBEDDING_BACKWARD, (gradient, rows, size[0], _padding(node), False), {}, False)
        return self.made(entry, tuple(size), dims, values)

    def bag(self, plan: Any, args: Args, kwargs: Kwargs) -> Any:
        rec = self.recorder
        if not gives_sparse(BAG_BACKWARD, args, lambda value: False):
            return rec.pure(plan, args, kwargs)
        entry = rec.entry(BAG_BACKWARD, rec.to_entries(args), rec.to_entries(kwargs), False)
        return self.made(entry, (args[6], args[0].shape[-1]), 1, args[0])

    def index(self, plan: Any, args: Args, kwargs: Kwargs) -> Any:
        rec = self.recorder
        node = current_autograd_node()
        if not _is_embedding(node) or _padding(node) < 0:
            return rec.pure(plan, args, kwargs)
        return self.rows(node, args[0], args[1][0])

    operators: ClassVar[Mapping[Any, Row]] = {MAKE: make, BAG_BACKWARD: bag, aten.index.Tensor: index}


def _is_embedding(node: Any) -> bool:
    return node is not None and node.name() == "EmbeddingBackward0" and node._saved_sparse


def _padding(node: Any) -> int:
    """The index of rows without a gradient, or -1; the node keeps it as an unsigned number."""
    index: int = node._saved_padding_idx
    return index if index < 2**63 else -1


def _taken_from(rec: Any, indices: torch.Tensor, values: torch.Tensor) -> list[torch.Tensor] | None:
    """The indices and the gradient that these are reshaped from."""
    rows, gradient = rec.value_of(indices).parent, rec.value_of(values).parent
    if rows is None or gradient is None or rows.fake is None or gradient.fake is None:
        return None
    if values.shape[0] == 0 or tuple(gradient.fake.shape[:-1]) != tuple(rows.fake.shape):
        return None
    return [rows.fake, gradient.fake]
