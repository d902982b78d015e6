"""Jagged nested tensors: the class, and the sizes that stand for ragged dimensions. Checked on torch 2.13.0.

The size of a ragged dimension is an integer without a value: one for each tensor of offsets (of lengths, where there
are some), equal to itself only. A real tensor's is kept by PyTorch in a registry, a fake one's by the fake.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.nested._internal import nested_tensor

from ..._torch.symbols import new_ragged_size

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
