"""The memory budgets of a function, from the least feasible peak to the peak of saving everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .._torch.fakes import without_fake_mode
from ..api import capture
from ..errors import PartitionError
from ..graph.source import check_function
from ..partitioners.index import JointIndex, merge_equal
from .within import Frontier, Pareto, can_replay, pareto_of


def pareto(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Pareto:
    """The memory budgets of `fn` for the given arguments, and the cost of each: a table, or `data()` to plot.

    No step runs. Raises as `capture` does, and `PartitionError` for a function without gradients.

    Examples:
        >>> import torch, foregrad
        >>> curve = foregrad.pareto(lambda x: x.sin().exp().sum(), torch.ones(256, requires_grad=True))
        >>> sorted(curve.data())[:2]
        ['budget', 'cost']
    """
    check_function(fn, "pareto")
    joint = capture(fn, *args, **kwargs)
    if joint.signature.is_inference or joint.backward_error is not None:
        raise PartitionError(f"{joint.name} has no backward, so nothing is saved for one: there is no budget to choose")
    with without_fake_mode():
        index = JointIndex(joint.module, joint.signature.num_forward_outputs)
        merge_equal(index)
        index.replays = can_replay(index)
        return pareto_of(Frontier(index), joint.name)
