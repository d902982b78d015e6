"""The fakes that stand for inputs while the function is captured, with the leaves that their gradients are taken at."""

from __future__ import annotations

from typing import Any

import torch

from ..._torch.stand_ins import new_stand_in, new_stand_in_over
from ...graph.meta import TensorSpec
from ..heap.alias import Value
from ..heap.records import InputRecord
from ..recorder.recorder import Recorder

__all__ = ["NonLeaf", "StandIns"]

aten = torch.ops.aten


class NonLeaf(torch.autograd.Function):
    """A non-leaf twin of a leaf: what a non-leaf argument looks like, with its gradient taken at the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, twin: list[torch.Tensor]) -> torch.Tensor:
        return twin[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class StandIns:
    """Makes them, one at a time."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def alone(self, record: InputRecord) -> None:
        """A stand-in that shares its memory with no other."""
        spec = record.spec
        with torch.inference_mode(mode=record.real.is_inference()):
            fake = new_stand_in(spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)
        self.stand_for(record, self.with_bits(fake, spec))
        record.initial = Value(record.stand_in, record.entry, spec)
        record.initial.storage.is_input = True

    def with_bits(self, fake: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        """Conjugate and negative tensors keep their bit (their strides are those of the tensor as it is)."""
        if spec.conj:
            fake = self.recorder.run_fake(aten._conj.default, (fake,), {})
        if spec.neg:
            fake = self.recorder.run_fake(aten._neg_view.default, (fake,), {})
        return fake

    def stand_for(self, record: InputRecord, fake: torch.Tensor, *, counted: bool = False) -> None:
        """`counted`: a write to the stand-in is to move the version counter of `fake`."""
        real = record.real
        record.leaf = record.stand_in = fake
        if real.requires_grad:
            with torch.inference_mode(mode=fake.is_inference()):
                fake.requires_grad_()
                if not real.is_leaf:
                    twin = fake.detach() if counted else self._twin(fake, record.spec)
                    with torch.enable_grad():
                        record.stand_in = NonLeaf.apply(fake, [twin])

    def _twin(self, fake: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
        twin = new_stand_in_over(fake, spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)
        return self.with_bits(twin, spec)

    def over(self, whole: torch.Tensor, record: InputRecord) -> torch.Tensor:
        """A stand-in for a record over the memory that it shares with others."""
        spec = record.spec
        with torch.inference_mode(mode=record.real.is_inference()):
            return new_stand_in_over(whole, spec.shape, spec.stride, spec.dtype, spec.device, spec.offset)
