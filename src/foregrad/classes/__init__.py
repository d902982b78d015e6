"""Tensor subclasses, taken apart into plain tensors. These names answer the spine: see `frontend/openings.py`."""

from ..classes.conversion import Samples, converted, taken_apart, unexpected, unwrapping, wrap
from ..classes.function_classes import refusal
from ..classes.spec import bare_spec, rebuilt, with_sizes_of

__all__ = [
    "Samples",
    "bare_spec",
    "converted",
    "rebuilt",
    "refusal",
    "taken_apart",
    "unexpected",
    "unwrapping",
    "with_sizes_of",
    "wrap",
]
