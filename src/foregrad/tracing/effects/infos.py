"""What the signature says of a tensor input."""

from __future__ import annotations

from typing import Any

from ...graph.signature import BaseOf, InputInfo, MemoryOf
from ..heap.records import InputRecord

__all__ = ["input_info"]


def input_info(record: InputRecord, index: int, number: dict[int, int], shared_of: dict[int, int]) -> InputInfo:
    source: Any = record.source
    if index in shared_of:
        source = MemoryOf(shared_of[index])
    elif isinstance(source, InputRecord):
        source = BaseOf(number[id(source)])
    return InputInfo(
        slot=record.slot,
        spec=record.spec,
        requires_grad=index not in shared_of and record.real.requires_grad,
        is_leaf=record.real.is_leaf,
        argument=None if index in shared_of else record.argument,
        source=source,
    )
