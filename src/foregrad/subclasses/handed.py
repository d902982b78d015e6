"""Gradients that go from one autograd node to another whole, beside the edges between them.

Edges of the compiled function's node carry plain tensors of the captured sizes. A gradient of another kind (another
class, other metadata, a plain tensor for a wrapper) is left with the node, for the backward that runs now.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .._torch.engine import current_backward, is_node_with

__all__ = ["TAKES_HANDED", "hand_over", "hand_to", "take_handed"]

TAKES_HANDED = "takes_handed"  # an attribute of Functions whose backward looks for such gradients
_HANDED = "foregrad: gradients of other kinds"  # in a node's metadata


def hand_over(edges: Sequence[tuple[Any, int]], gradient: Any) -> bool:
    """Leave a gradient with the compiled function that all these edges lead to. False if there is no single one."""
    connected = [edge for edge in edges if edge[0] is not None]
    nodes = {node for node, _ in connected}
    if len(nodes) != 1 or not is_node_with(connected[0][0], TAKES_HANDED):
        return False
    hand_to(connected[0][0], gradient, tuple(number for _, number in connected))
    return True


def hand_to(node: Any, gradient: Any, places: tuple[int, ...] = ()) -> None:
    """Leave a gradient with a node, which runs later in this backward."""
    node.metadata.setdefault(_HANDED, []).append((current_backward(), places, gradient))


def take_handed(node: Any) -> list[tuple[tuple[int, ...], Any]]:
    """The gradients left with a node in this backward, each with the outputs that it is for."""
    handed = node.metadata.pop(_HANDED, ())
    return [(places, gradient) for backward, places, gradient in handed if backward == current_backward()]
