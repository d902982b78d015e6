"""The attributes that PyTorch itself hangs onto tensors: which sizes may vary, that a wrapper is a parameter, ...

Checked on torch 2.11 to 2.15. They are no state of the user's program: Dynamo sets them as it looks at a tensor, and
jagged nested tensors set them on their parts. The sizes and strides that a wrapper computes are kept on it.
"""

from __future__ import annotations

from typing import Any

__all__ = ["is_mark", "without_marks"]

_PREFIXES = ("_dynamo_", "_has_dynamo_", "_sym_sizes_capsule", "_sym_strides_capsule")
_NAMES = frozenset({"_is_param", "_specialize_on"})


def is_mark(name: Any) -> bool:
    """Whether an attribute of a tensor with this name is PyTorch's."""
    return isinstance(name, str) and (name in _NAMES or name.startswith(_PREFIXES))


def without_marks(table: dict[Any, Any]) -> dict[Any, Any]:
    """The attributes that the user gave a tensor."""
    return {name: value for name, value in [*table.items()] if not is_mark(name)} if table else {}
