"""`checkpoint_name`: a name for a value, for policies to know it by. Apart, as this file imports Dynamo."""

from __future__ import annotations

from typing import TypeVar

import torch

from ._torch.checkpoints import note_name

T = TypeVar("T", bound=torch.Tensor)


def checkpoint_name(x: T, name: str) -> T:
    """Return the tensor `x`, and name its value for the policies of functions that foregrad compiles.

    Graphs show the name beside the operator that made the value (for a view: that made the viewed memory). The name
    costs nothing: no operator runs. Raises `TypeError` if `x` is no tensor.

    Examples:
        >>> import torch, foregrad
        >>> def attend(x):
        ...     scores = foregrad.checkpoint_name(x @ x.T, "scores")
        ...     return scores.sin().sum()
        >>> joint = foregrad.capture(attend, torch.ones(2, 2, requires_grad=True))
        >>> parts = foregrad.partition(joint, foregrad.save_only_these_names("scores"))
        >>> "mm" in [node.name for node in parts.saved_nodes]
        True
    """
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"checkpoint_name names tensors, and its first argument is of type {type(x).__name__}")
    if not isinstance(name, str):
        raise TypeError(f"the name of a tensor is text, not {name!r}")
    note_name(x, name)
    return x


# Dynamo writes the call into its graph as it is; a capture of Dynamo's graph sees the call.
torch.compiler.allow_in_graph(checkpoint_name)
