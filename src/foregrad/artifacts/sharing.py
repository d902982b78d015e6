"""Relations of memory between the inputs of a specialization, as data."""

from __future__ import annotations

from typing import Any

from ..dispatch.sharing import Sharing
from ..errors import ArtifactError
from ..graph.signature import Signature
from ..serialize.values import checked

__all__ = ["sharing_from", "sharing_to"]


def sharing_to(sharing: Sharing | None) -> Any:
    """The relations as data."""
    if sharing is None:
        return None
    return {
        "memories": list(sharing.memories),
        "counters": [list(pair) for pair in sharing.counters],
        "roots": list(sharing.roots),
    }


def sharing_from(data: Any, signature: Signature) -> Sharing | None:
    """The relations from the data of `sharing_to`, checked against the signature."""
    count = len(signature.inputs)
    if data is None:
        return None
    memories = tuple(None if n is None else checked(n, int) for n in checked(data["memories"], list))
    counters = tuple((checked(i, int), checked(j, int), checked(same, bool)) for i, j, same in data["counters"])
    roots = tuple(checked(i, int) for i in checked(data["roots"], list))
    if len(memories) != count or not all(0 <= n < count for n in memories if n is not None):
        raise ArtifactError("memories for another number of inputs")
    if not all(0 <= i < count for i in (*roots, *(i for pair in counters for i in pair[:2]))):
        raise ArtifactError("relations of inputs that do not exist")
    return Sharing(memories, counters, roots)
