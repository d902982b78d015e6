"""Tensor subclasses, taken apart into plain tensors. The spine asks for these names: see `frontend/openings.py`."""

from ._torch.function_classes import only_overrides, plain_alias
from .conversion import Samples, taken_apart, unwrapping, wrap
from .function_classes import refusal
from .spec import bare_spec, rebuilt, with_sizes_of
from .tangents import OtherKinds

__all__ = [
    "OtherKinds", "Samples", "bare_spec", "only_overrides", "plain_alias", "rebuilt", "refusal", "taken_apart",
    "unwrapping", "with_sizes_of", "wrap",
]  # fmt: skip
