"""Tables by the types of tensors, such as libraries keep of their backends, that got the class of stand-ins for a key.

Code that calls `type` is told that of a tensor where it is known to ask (see `SeenCode`). A library's function that is
come by in another way shows by the table that it fills: the run is repeated with its module told, too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from ..._torch.fakes import FakeTensor
from ...frontend.holders import CLASS, DICT, NAMESPACE, Holder

__all__ = ["modules_asking"]


def modules_asking(changed: list[Holder]) -> Iterator[dict[str, Any]]:
    """The globals of modules in whose tables or attributes the run left the class of stand-ins."""
    for holder in changed:
        if holder.kind not in (DICT, NAMESPACE, CLASS):
            continue
        now = holder.kind.read(holder.target)
        if FakeTensor in now or any(value is FakeTensor for value in now.values()):
            root = holder
            while root.kind is not NAMESPACE and root.parent is not None:
                root = root.parent
            if root.kind is NAMESPACE:
                yield root.target
            elif root.kind is CLASS and root.target.__module__ in sys.modules:
                yield vars(sys.modules[root.target.__module__])
