"""Attention of jagged tensors where PyTorch has no fused kernel: it goes by lengths that only real tensors have.

`scaled_dot_product_attention` then makes nested tensors of another kind, which nothing can capture. It is an eager
region here, over the plain tensors inside; what is around it stays in the graph.
"""

from __future__ import annotations

from typing import Any

import torch

from ..._torch.jagged import attends_by_math, is_jagged, jagged_of, parts_of_jagged
from ...frontend.eager_region import eager_region

__all__ = ["attention", "is_by_math"]


def is_by_math(query: Any, key: Any, value: Any, attn_mask: Any = None, *rest: Any, **options: Any) -> bool:
    """Whether these are arguments of `scaled_dot_product_attention` that it has no fused kernel for."""
    if not all(is_jagged(type(tensor)) for tensor in (query, key, value)) or attn_mask is not None:
        return False
    return attends_by_math(query, key, value, *rest, **options)


def attention(query: Any, key: Any, value: Any, attn_mask: None = None, *rest: Any, **options: Any) -> Any:
    """`scaled_dot_product_attention` of stand-ins."""
    tensors: list[torch.Tensor] = []
    places = []
    for jagged in (query, key, value):
        found = parts_of_jagged(jagged)
        places.append((_place(tensors, found.values), _place(tensors, found.offsets), found.ragged))
    of_query = parts_of_jagged(query)
    rows = _region(tensors, tuple(places), rest, tuple(options.items()))
    return jagged_of(rows, of_query.offsets, 1, of_query.least, of_query.most).transpose(1, 2)


def _place(tensors: list[torch.Tensor], tensor: torch.Tensor) -> int:
    """Where a tensor is in a list, which has each once: offsets that are equal are one tensor."""
    for index, other in enumerate(tensors):
        if other is tensor:
            return index
    tensors.append(tensor)
    return len(tensors) - 1


@eager_region
def _region(tensors: Any, places: Any, rest: Any, options: Any) -> torch.Tensor:
    given = [jagged_of(tensors[values], tensors[offsets], ragged) for values, offsets, ragged in places]
    attend: Any = torch.nn.functional.scaled_dot_product_attention
    result = attend(*given, None, *rest, **dict(options))
    rows: torch.Tensor = result.transpose(1, 2).values()
    return rows
