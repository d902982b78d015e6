"""Where histories lead: a walk over autograd's nodes. Checked on torch 2.13.0 (`_sequence_nr`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["have_hooks", "lead_to"]


def lead_to(others: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
    """Whether the history of one of `others` leads to one of `targets` (a tensor may be among both)."""
    roots = [t.grad_fn for t in others if t.grad_fn is not None]
    if not roots:
        return False
    leaves = {id(t) for t in targets if t.grad_fn is None}
    inner = {(t.grad_fn, t.output_nr) for t in targets if t.grad_fn is not None}
    # What made a tensor has a lower number than what was made of it; leaves have none.
    lowest = 0 if leaves else min(node._sequence_nr() for node, _ in inner)
    seen = set(roots)
    while roots:
        node = roots.pop()
        for edge in node.next_functions:
            following = edge[0]
            if following is None:
                continue
            if edge in inner or id(getattr(following, "variable", None)) in leaves:
                return True
            if following not in seen and following._sequence_nr() >= lowest:
                seen.add(following)
                roots.append(following)
    return False


def have_hooks(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether there is a hook on one of the tensors, which would see, and may change, any gradient taken by it."""
    return any(t._backward_hooks for t in tensors)
