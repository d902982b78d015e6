"""From a value back to what it is a view of, and from an entry back to what made its memory."""

from __future__ import annotations

from typing import Any

import torch

from ..._torch.tensors import history_of
from ..tape.opinfo import op_info
from ..tape.tape import Entry
from .alias import Value

__all__ = ["chain_of", "is_from_custom_function", "memory_root", "not_own"]


def chain_of(value: Value) -> list[Value]:
    """The value, what it is a view of, and so on."""
    chain = [value]
    while chain[-1].parent is not None:
        chain.append(chain[-1].parent)
    return chain


def is_from_custom_function(value: Value, tensor: torch.Tensor) -> bool:
    """Whether one of the views that led to it is what a custom Function returned: its history is the Function's."""
    views = [link.view for link in chain_of(value)]
    node: Any = history_of(tensor)
    for view in views:  # each has a node, save those taken inside the Function
        if view is None or view.made is None or node is None:
            return False
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        node = node.next_functions[0][0] if node.next_functions else None
    return False


def memory_root(entry: Entry) -> Entry:
    """The entry whose memory this one is in when the graph runs: through views back to what made it."""
    while True:
        target = entry.target
        if target is None or not entry.args:
            return entry
        source = entry.args[0]
        if not isinstance(source, Entry):
            return entry
        if not hasattr(target, "_schema"):  # getitem of a multi-output operator
            if hasattr(source.target, "_schema") and op_info(source.target).is_view:
                entry = source.args[0]
                continue
            return entry
        if not op_info(target).is_view:
            return entry
        entry = source


def not_own(entries: list[Entry]) -> frozenset[int]:
    """Outputs in memory that an input or an earlier output is in: autograd is not to see them as views."""
    taken: set[int] = set()
    shared = set()
    for index, entry in enumerate(entries):
        root = memory_root(entry)
        if root is not entry or root.target is None or id(root) in taken:
            shared.add(index)
        taken.add(id(root))
    return frozenset(shared)
