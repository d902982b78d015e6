"""Autograd histories: paths over autograd's nodes, and nodes that keep tensors.

Checked on torch 2.13.0: `_sequence_nr`, `_saved_*`, `_raw_saved_*`, the names of nodes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .tensors import history_of
from .versions import is_at_least

# PyTorch's nodes that give zeros, as custom Functions do, where most nodes leave a gradient undefined; and nodes whose
# further outputs (statistics) decide by their gradients whether anything is passed on.
_NORM = frozenset({"NativeGroupNormBackward0"})
GIVING_ZEROS = frozenset({"TriangularSolveBackward0"})
CHOOSING: frozenset[str] = frozenset()
if is_at_least(2, 14):
    GIVING_ZEROS |= _NORM
else:
    CHOOSING = _NORM
# The value that `torch.asarray` takes for a missing `requires_grad`; None keeps a tensor's history.
AS_ARRAY_REQUIRES_GRAD = None if is_at_least(2, 12) else False


def lead_to(others: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> bool:
    """Whether the history of any tensor in `others` leads to a tensor in `targets` (the lists may overlap)."""
    roots = [t.grad_fn for t in others if t.grad_fn is not None]
    if not roots:
        return False
    leaves = {id(t) for t in targets if t.grad_fn is None}
    inner = {(t.grad_fn, t.output_nr) for t in targets if t.grad_fn is not None}
    # The node of a tensor has a lower number than the nodes of its results; leaves have none.
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


def nodes_behind(outputs: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The autograd nodes behind outputs, one after the other, for a search that may soon end."""
    waiting = [history_of(output) for output in outputs]
    seen: set[object] = {None}
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def have_hooks(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of the tensors has a hook that would see, and may change, its gradient."""
    return any(t._backward_hooks for t in tensors)


@contextlib.contextmanager
def noting_arrival(leaves: Mapping[Any, torch.Tensor]) -> Iterator[dict[Any, None]]:
    """Context: gives the keys of the leaves, in the order of their gradients' arrival."""
    arrived: dict[Any, None] = {}
    with torch._C.DisableTorchFunction():
        notes = [(t, t.register_hook(functools.partial(_note, arrived, key))) for key, t in leaves.items()]
    try:
        yield arrived
    finally:
        with torch._C.DisableTorchFunction():
            for leaf, note in notes:
                note.remove()
                if not leaf._backward_hooks:
                    leaf._backward_hooks = None


def _note(arrived: dict[object, None], key: Any, gradient: torch.Tensor) -> None:
    arrived.pop(key, None)  # present if the engine ran before and stopped at an error
    arrived[key] = None


def keeps_tensors(node: Any) -> bool:
    """Whether an autograd node saved tensors for its backward, so that without `retain_graph` it runs only once."""
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return was_freed(node) or bool(node._raw_saved_tensors)
    kind: Any = type(node)
    names = _saved_names(kind)
    if not names:
        return False
    if all(following is not None for following, _ in node.next_functions):
        return True
    # A tensor that only gradients of other inputs would need is not kept.
    try:
        return any(getattr(node, name) is not None for name in names)
    except RuntimeError:  # freed, or written to since
        return True


def was_freed(node: object) -> bool:
    """Whether a node in Python has freed its saved tensors."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    try:
        node._raw_saved_tensors  # noqa: B018
    except RuntimeError:
        return True
    return False


@functools.cache
def _saved_names(kind: object) -> tuple[str, ...]:
    return tuple(name.removeprefix("_raw") for name in dir(kind) if name.startswith("_raw_saved_"))
