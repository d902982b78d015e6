"""The mark of an eager region: a function that compiled functions call as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .._torch.dynamo_off import dynamo_off, is_disabled_by_torch
from .._torch.patches import MARK, region_runner
from .region import mark

F = TypeVar("F", bound=Callable[..., Any])


def eager_region(fn: F) -> F:
    """Mark a function, a method or a module as an eager region; usable as a decorator.

    A compiled function calls it on real tensors, each time, as one node of its graph: it may use NumPy and other
    libraries, print, log and keep a state of its own. Its gradients are those of its own autograd graph, and reach its
    arguments and the parameters that it uses. What is around it stays compiled. Elsewhere it is called as ever, and
    `torch.compile` leaves it alone. `torch.compiler.disable` marks regions too.

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


def is_eager_region(function: Any) -> bool:
    """Whether a function is marked, by `torch.compiler.disable` or here; what PyTorch itself disables is not meant."""
    if not getattr(function, "_torchdynamo_disable", False):
        return False
    inner = getattr(function, "_torchdynamo_orig_callable", None)
    return inner is None or not is_disabled_by_torch(inner)
