"""What is in nested lists, tuples and dicts, as arguments and results of operators are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch


def leaves(value: Any) -> Iterator[Any]:
    """What is in a value's lists, tuples and dicts, in order; of any other value it alone."""
    if isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from leaves(item)
    else:
        yield value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among the `leaves` of a value."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def mapped(value: Any, kind: Any, fn: Callable[[Any], Any]) -> Any:
    """A value with `fn` applied to each object of a kind (or of several) in it. All tuples become plain ones."""
    if isinstance(value, kind):
        return fn(value)
    if isinstance(value, (list, tuple)):
        items = [mapped(item, kind, fn) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return {key: mapped(item, kind, fn) for key, item in value.items()} if isinstance(value, dict) else value
