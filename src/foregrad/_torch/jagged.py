"""Jagged nested tensors: the class, and the sizes that stand for ragged dimensions. Checked on torch 2.13.0.

The size of a ragged dimension is an integer without a value: one for each tensor of offsets (of lengths, where there
are some), equal to itself only. A real tensor's is kept by PyTorch in a registry, a fake one's by the fake.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch.nested._internal import nested_tensor
from torch.nested._internal.nested_int import NestedIntNode

__all__ = [
    "CARRYING",
    "coefficient",
    "dispatch_argument_of_capture",
    "is_dispatch_argument",
    "is_jagged",
    "is_ragged",
    "new_ragged_size",
    "ragged_size",
    "ragged_source",
]

CARRYING = "_values"  # the one of its tensors that gradients are of
_ids = itertools.count(1 << 40)  # far from PyTorch's own


def is_jagged(cls: type) -> bool:
    """Whether this is the class of jagged nested tensors."""
    return cls is nested_tensor.NestedTensor


def is_ragged(size: Any) -> bool:
    """Whether a size is one without a value, or a multiple of one."""
    return isinstance(size, torch.SymInt) and bool(size.node.is_nested_int())


def coefficient(size: Any) -> int:
    """Of a ragged size: what multiple it is."""
    return int(size.node.nested_int_coeff())


def is_dispatch_argument(tensor: Any) -> bool:
    """Whether this is the tensor without a meaning that PyTorch hands to operators to have them come to the class."""
    return is_jagged(type(tensor)) and tensor is nested_tensor._dummy_instance


@contextlib.contextmanager
def dispatch_argument_of_capture() -> Iterator[None]:
    """Context: where that tensor is made inside, of fakes, it is forgotten afterwards."""
    known = nested_tensor._dummy_instance
    try:
        yield
    finally:
        if known is None:
            nested_tensor._dummy_instance = None


def ragged_source(names: tuple[str, ...]) -> str:
    """Which of the tensors in a jagged one its ragged size belongs to."""
    return "_lengths" if "_lengths" in names else "_offsets"


def ragged_size(source: torch.Tensor, times: int = 1) -> Any:
    """A multiple of the size that belongs to a tensor of offsets or lengths."""
    from torch._subclasses.fake_tensor import FakeTensor

    if isinstance(source, FakeTensor) and source.nested_int_memo is None:
        source.nested_int_memo = new_ragged_size()
    size = nested_tensor.get_tensor_symint(source)
    return size if times == 1 else size * times


def new_ragged_size() -> torch.SymInt:
    """A ragged size that is no other's."""
    return torch.SymInt(NestedIntNode(next(_ids), 1))
