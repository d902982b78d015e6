"""Marks: of a repeated region, compiled once for all its calls in a graph, and of an eager region."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from .._torch.dynamo_off import dynamo_off
from .._torch.patches import MARK, REGION, call_marked, region_runner

F = TypeVar("F", bound=Callable[..., Any])


def region(fn: F) -> F:
    """Mark a function, a method or a module that is called several times; usable as a decorator.

    Two or more equal calls in a compiled function are compiled once, forward and backward. The
    calls may be anywhere in the graph, and `regions` may be False. Calls are compiled separately if they differ in an
    operator, a constant, a shape, or in shared operands. Of nested marks the innermost counts.
    The mark has no effect outside of a compiled function, nor behind `torch.compile`, where Dynamo inlines calls.

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
    """Mark a module by an attribute; False for a function. Raises `TypeError` for an object that `foregrad.<door>`
    can't mark.
    """
    if isinstance(fn, torch.nn.Module):
        fn.__dict__[attribute] = True
        return True
    if isinstance(fn, type) or not callable(fn):
        raise TypeError(
            f"foregrad.{door} marks a function, a method or a module, not {fn!r}. Mark the `forward` of a class, or "
            "an object of the class."
        )
    return False


# -------------------------------------------------------------------- eager region
# The mark of an eager region: a function that compiled functions call as it is.


def eager_region(fn: F) -> F:
    """Mark a function, a method or a module as an eager region; usable as a decorator.

    A compiled function calls it on real tensors, each time, as one node of its graph: it may use NumPy and other
    libraries, print, log and keep a state of its own. Its gradients come from its own autograd graph, and reach its
    arguments and the parameters that it uses. The code around it stays compiled. Outside of compiled functions the mark
    has no effect; `torch.compile` breaks its graph there. `torch.compiler.disable` marks regions too.

    Returns:
        The marked function; of a module, that module.

    Examples:
        >>> import torch, foregrad
        >>> @foregrad.eager_region
        ... def log(x):
        ...     print("mean", float(x.mean()))
        ...     return x
        >>> f = foregrad.compile(lambda x: log(x * 2) + 1, backend="eager")
        >>> f(torch.ones(2))
        mean 2.0
        tensor([3., 3.])
    """
    if mark(fn, MARK, "eager_region"):
        return fn

    @functools.wraps(fn)
    def region(*args: Any, **kwargs: Any) -> Any:
        run = region_runner()
        if run is not None:
            return run(fn, args, kwargs)
        with dynamo_off():
            return fn(*args, **kwargs)

    region._torchdynamo_disable = True  # type: ignore[attr-defined]
    return region  # type: ignore[return-value]
