"""The operators of a GPU in a capture without one: attention as its fused kernel, dropout with a mask of booleans.

On `meta`, and on a CPU, PyTorch composes both of smaller operators, which save other values. This mode is under the
user's function while it is captured for an accelerator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_WIDEST = 256  # of a head in flash attention


class AcceleratorKernels(TorchFunctionMode):
    """Functions with a kernel of their own on GPUs call its operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = _KERNELS.get(func)
        return func(*args, **(kwargs or {})) if kernel is None else kernel(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if query.dim() != 4 or query.shape[-1] > _WIDEST:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is None and query.dtype in _HALVES and query.shape[-1] == value.shape[-1]:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if enable_gqa and key.shape[1] != query.shape[1]:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    with_gradient = query.requires_grad or key.requires_grad or value.requires_grad
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, with_gradient, dropout_p, is_causal, scale=scale
    )[0]


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    if inplace or not training or not 0 < p < 1:
        return functional.dropout(input, p, training, inplace)
    return aten.native_dropout(input, p, True)[0]


_KERNELS: dict[Any, Any] = {functional.scaled_dot_product_attention: _attention, functional.dropout: _dropout}
