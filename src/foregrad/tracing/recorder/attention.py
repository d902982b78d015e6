"""`flex_attention` in a capture: one operator of the graph, and one of its backward, with the graphs of `score_mod` and
`mask_mod` as arguments, so that compilers find what they have kernels for.

Known weaknesses: it is not differentiated twice, which PyTorch can't either; under a transform of torch.func, and for
tensor subclasses, it is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..._torch.flex import ATTENTION, BACKWARD, strides_like
from ..._torch.stand_ins import is_stand_in
from ..._torch.tensors import is_inside_transform
from ...errors import UnsupportedOpError
from ...graph.meta import TensorSpec, contiguous_strides
from ...subclasses.spec import is_wrapper
from ..tape.tape import Entry
from .recorder import Recorder
from .scalar_graphs import ScalarGraphs

__all__ = ["Attention"]

_QUERY_INDICES = 7  # of what a block mask holds


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """Arguments that both operators have behind their tensors and graphs, under PyTorch's names."""

    block_mask: tuple[Any, ...]
    scale: float
    kernel_options: dict[str, Any]
    score_mod_other_buffers: Sequence[Any] = ()
    mask_mod_other_buffers: Sequence[Any] = ()


class Attention:
    """Records calls of the operators. `lifting` swaps what functions reach by themselves."""

    def __init__(self, recorder: Recorder, lifting: Any) -> None:
        self.recorder, self.graphs = recorder, ScalarGraphs(recorder, lifting)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, score_mod: Any, *rest: Any, **named: Any
    ) -> Any:
        """What `torch.ops.higher_order.flex_attention` gives. `rest` and `named`: see `_Given`."""
        query, key, value = map(self._stand_in, (query, key, value))
        given = _Given(*rest, **named)
        buffers = tuple(map(self._stand_in, given.score_mod_other_buffers))
        differentiated = _requires_grad((query, key, value, *buffers))
        scores = self.graphs.score(score_mod, query, buffers, differentiated=differentiated)
        if not differentiated and _requires_grad(scores[2]):  # that the function reaches by itself
            scores = self.graphs.score(score_mod, query, buffers, differentiated=True)
        if scores[1] is not None and given.block_mask[_QUERY_INDICES] is None:
            raise RuntimeError(
                "BlockMask q_indices is None. Backward pass requires q_indices to be computed. "
                "Please create the BlockMask with compute_q_blocks=True"
            )
        return _Attention.apply(self._call(query, scores, given), query, key, value, *scores[2])

    def backward(self, *args: Any) -> Any:
        """What `torch.ops.higher_order.flex_attention_backward` gives, of seven tensors, the graph of the scores and
        that of their derivative, and what `_Given` has.
        """
        tensors, given = [self._stand_in(t) for t in args[:7]], _Given(*args[9:])
        buffers = tuple(map(self._stand_in, given.score_mod_other_buffers))
        with torch.enable_grad():
            scores = self.graphs.score(args[7], tensors[0], buffers, differentiated=True)
        call = self._call(tensors[0], scores, given)
        with torch.no_grad():
            gradients = call.gradients(tensors)
        return *gradients[:3], tuple(gradients[3 : 3 + len(buffers)])

    def _call(self, query: torch.Tensor, scores: Any, given: _Given) -> _Call:
        """`scores`: their graph, that of their derivative, and what these reach by themselves."""
        score, joint, others = scores
        masked = tuple(map(self._stand_in, given.mask_mod_other_buffers))
        mask, mask_others = self.graphs.mask(given.block_mask[-1], query, masked)
        blocks = (*map(self._stand_in, given.block_mask[:-1]), mask)
        return _Call(self, score, joint, blocks, given.scale, dict(given.kernel_options), others, mask_others)

    def _stand_in(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if is_inside_transform(value) or is_wrapper(value):
            where = "under a transform of torch.func" if is_inside_transform(value) else f"on a {type(value).__name__}"
            raise UnsupportedOpError(
                f"`flex_attention` is called at {self.recorder.where()} {where}, which can't be compiled. Keep that "
                "part outside the compiled function, or use `scaled_dot_product_attention`."
            )
        return value if is_stand_in(value) else self.recorder.adopt(value)


def _requires_grad(values: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(v, torch.Tensor) and v.requires_grad for v in values)


@dataclasses.dataclass(eq=False, slots=True)
class _Call:
    """One call. `joint` is None where nothing is differentiated."""

    attention: Attention
    score: fx.GraphModule
    joint: fx.GraphModule | None
    blocks: tuple[Any, ...]
    scale: float
    options: dict[str, Any]
    others: tuple[torch.Tensor, ...]
    mask_others: tuple[torch.Tensor, ...]

    def results(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sequence[torch.Tensor]:
        """(output, logarithms of sums, largest scores)"""
        recorder = self.attention.recorder
        args = (query, key, value, self.score, self.blocks, self.scale, self.options, self.others, self.mask_others)
        entry = recorder.entry(ATTENTION, recorder.to_entries(args), {}, is_random=False)
        rows = tuple(query.shape[:-1])
        shape = (*rows, value.shape[-1])
        kind = torch.float64 if query.dtype is torch.float64 else torch.float32
        row = TensorSpec(rows, contiguous_strides(rows), kind, query.device)
        entry.spec = (TensorSpec(shape, strides_like(shape, query.stride()), query.dtype, query.device), row, row)
        return self._bound(entry)

    def gradients(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Gradients of query, key and value, and of each other tensor that requires one."""
        recorder, (query, key, value) = self.attention.recorder, tensors[:3]
        rest = (self.score, self.joint, self.blocks, self.scale, self.options, self.others, self.mask_others)
        entry = recorder.entry(BACKWARD, recorder.to_entries((*tensors, *rest)), {}, is_random=False)
        specs = []
        for tensor in (query, key, value):
            shape = (query.shape[0], *tensor.shape[1:])
            like = TensorSpec(shape, strides_like(shape, tensor.stride()), tensor.dtype, tensor.device)
            if tensor.shape[0] != query.shape[0]:  # one for all of the batch: the sum of theirs
                total = recorder.run_fake(torch.ops.aten.sum.dim_IntList, (recorder.fake_of(like), [0], True), {})
                like = recorder.spec_of(total)
            specs.append(like)
        shapes = [tuple(t.shape) if t.requires_grad else None for t in self.others]
        buffers = tuple(
            None if shape is None else TensorSpec(shape, contiguous_strides(shape), t.dtype, t.device)
            for t, shape in zip(self.others, shapes, strict=True)
        )
        entry.spec = (*specs, buffers)
        *found, others = self._bound(entry)
        return *found, *others

    def _bound(self, entry: Entry) -> Sequence[Any]:
        recorder = self.attention.recorder
        found: Sequence[Any] = recorder.bind_results(entry, recorder.fakes_like(entry.spec))
        return found


class _Attention(torch.autograd.Function):
    """Links the results to what they are computed from."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = call
        results = call.results(*tensors[:3])
        ctx.mark_non_differentiable(results[2])
        ctx.save_for_backward(*tensors, *results[:2])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        *tensors, out, sums = ctx.saved_tensors
        found = _Gradient.apply(ctx.call, (*tensors[:3], out, sums, *gradients[:2]), *tensors, *gradients[:2])
        return None, *found


class _Gradient(torch.autograd.Function):
    """The gradients, which depend on `tensors`."""

    @staticmethod
    def forward(ctx: Any, call: _Call, given: Sequence[Any], *tensors: Any) -> Any:
        return tuple(call.gradients(given))

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError("Autograd not implemented for flex_attention_backward")
