"""Jagged nested tensors: the class, and the sizes that stand for ragged dimensions. Checked on torch 2.13.0.

The size of a ragged dimension is an integer without a value: one for each tensor of offsets (of lengths, where there
are some), equal to itself only. A real tensor's is kept by PyTorch in a registry, a fake one's by the fake.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.nested._internal import nested_tensor

from .symbols import new_ragged_size

CARRYING = "_values"  # the inner tensor that has gradients


def is_jagged(cls: type) -> bool:
    """Whether this is the class of jagged nested tensors."""
    return cls is nested_tensor.NestedTensor


def is_dispatch_argument(tensor: Any) -> bool:
    """Whether this is the dummy tensor that PyTorch passes to operators so that they dispatch to the class."""
    return is_jagged(type(tensor)) and tensor is nested_tensor._dummy_instance


@contextlib.contextmanager
def dispatch_argument_of_capture() -> Iterator[None]:
    """Context: a dummy tensor that is made inside, of fakes, is dropped afterwards."""
    before = nested_tensor._dummy_instance
    try:
        yield
    finally:
        if before is None:
            nested_tensor._dummy_instance = None


def ragged_source(names: tuple[str, ...]) -> str:
    """The inner tensor of a jagged one that its ragged size belongs to."""
    return "_lengths" if "_lengths" in names else "_offsets"


def ragged_size(source: torch.Tensor, times: int = 1) -> Any:
    """A multiple of the size that belongs to a tensor of offsets or lengths."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(source, FakeTensor) and source.nested_int_memo is None:
        source.nested_int_memo = new_ragged_size()
    size = nested_tensor.get_tensor_symint(source)
    return size if times == 1 else size * times


@dataclasses.dataclass(frozen=True)
class JaggedParts:
    """A jagged tensor without lengths, taken apart: `ragged` is the dimension, `least` and `most` bound its lengths."""

    values: torch.Tensor
    offsets: torch.Tensor
    ragged: int
    least: int | None
    most: int | None


def parts_of_jagged(tensor: Any) -> JaggedParts:
    """The parts of a jagged tensor; its values are a view."""
    return JaggedParts(
        tensor.values(), tensor.offsets(), tensor._ragged_idx, tensor._maybe_min_seqlen, tensor._maybe_max_seqlen
    )


def jagged_of(values: Any, offsets: Any, ragged: int, least: int | None = None, most: int | None = None) -> Any:
    """The jagged tensor that views `values`."""
    make = nested_tensor.nested_view_from_values_offsets
    return make(values, offsets, ragged_idx=ragged, min_seqlen=least, max_seqlen=most)


def attends_by_math(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Whether plain operators compute attention of the jagged tensors, without lengths."""
    if (
        any(tensor.lengths() is not None for tensor in (query, key, value))
        or query.dim() != 4
        or query._ragged_idx == 1
    ):
        return False
    from torch.nested._internal.sdpa import _select_sdp_backend
    from torch.nn.attention import SDPBackend

    return _select_sdp_backend(query, key, value, None, dropout_p, is_causal, enable_gqa) is SDPBackend.MATH
