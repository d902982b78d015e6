"""The mark of a repeated region: a function or module that is compiled once, however often a graph calls it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .._torch.patches import REGION, call_marked

F = TypeVar("F", bound=Callable[..., Any])


def region(fn: F) -> F:
    """Mark a function, a method or a module that is called several times; usable as a decorator.

    Two or more calls that compute the same thing in a compiled function are compiled once, forward and backward. The
    calls may be anywhere in the graph, and `regions` may be False. Calls are compiled apart if they differ in an
    operator, a constant, a shape, or in which operands are the same. Of marks inside one another the innermost counts.
    Outside of a compiled function the mark has no effect, nor has it behind `torch.compile`, where Dynamo takes calls
    apart.

    Backends that take regions heed the mark: Inductor, and compilers with a true attribute `takes_regions`. With
    `regions="auto"`, Inductor leaves convolutions out of regions.

    Returns:
        The marked function; of a module, that module.

    Examples:
        >>> import torch, foregrad
        >>> @foregrad.region
        ... def layer(x, w):
        ...     return torch.relu(x @ w) + x
        >>> f = foregrad.compile(lambda x, w, v: layer(layer(x, w).sin(), v), backend="eager")
        >>> f(torch.ones(1, 2), torch.eye(2), torch.eye(2))
        tensor([[1.8186, 1.8186]])
    """
    if mark(fn, REGION, "region"):
        return fn

    @functools.wraps(fn)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return fn(*args, **kwargs)
        return call_marked(fn, args, kwargs)

    return marked  # type: ignore[return-value]


def mark(fn: Any, attribute: str, door: str) -> bool:
    """Mark a module by an attribute; False for a function. Raises `TypeError` for what `foregrad.<door>` can't mark."""
    if isinstance(fn, torch.nn.Module):
        fn.__dict__[attribute] = True
        return True
    if isinstance(fn, type) or not callable(fn):
        raise TypeError(
            f"foregrad.{door} marks a function, a method or a module, not {fn!r}. Mark a class's `forward`, or an "
            "object made of it."
        )
    return False
