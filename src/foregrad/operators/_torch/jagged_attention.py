"""Attention of jagged nested tensors: the tensors taken apart, and the kernels. Checked on torch 2.13.0."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.nested._internal.nested_tensor import NestedTensor, nested_view_from_values_offsets


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
    bounds = {"min_seqlen": least, "max_seqlen": most}
    return nested_view_from_values_offsets(values, offsets, ragged_idx=ragged, **bounds)


def attends_by_math(
    query: Any,
    key: Any,
    value: Any,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> bool:
    """Whether plain operators compute attention of these tensors: they are jagged, without lengths."""
    if (
        not all(type(tensor) is NestedTensor for tensor in (query, key, value))
        or any(tensor.lengths() is not None for tensor in (query, key, value))
        or query.dim() != 4
        or query._ragged_idx == 1
    ):
        return False
    from torch.nested._internal.sdpa import _select_sdp_backend
    from torch.nn.attention import SDPBackend

    return _select_sdp_backend(query, key, value, None, dropout_p, is_causal, enable_gqa) is SDPBackend.MATH
