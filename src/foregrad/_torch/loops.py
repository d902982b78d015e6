"""PyTorch's operators that loop, as equivalent Python, and operators that only mark the function that they call.

Each step is recorded by itself, so a graph is right for one number of steps: a size of an argument, which is guarded,
or a number decided by values, which is checked. Checked on torch 2.11.0, 2.13.0.

Known weaknesses: a loop of a thousand steps is a graph of a thousand copies of its body. A tensor that the function
closes over gets its gradients one after the other, where PyTorch adds up those of `map` at once: the sums differ in
their last bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.associative_scan import generic_associative_scan
from torch._higher_order_ops.out_dtype import out_dtype_dense
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from .operand_gradients import connected, without_derivative

__all__ = ["MEANINGS", "run_while"]


def run_while(condition: Any, body: Any, carried: Sequence[Any], others: Sequence[Any]) -> tuple[Any, ...]:
    """The final carried values of `while_loop`, in the containers that its body returns."""
    steps, tree = _carried(condition, body, carried, others)
    last: tuple[Any, ...] = steps[-1] if tree is None else tree_unflatten(steps[-1], tree)
    return last


def _carried(condition: Any, body: Any, carried: Sequence[Any], others: Sequence[Any]) -> tuple[list[Any], Any]:
    """(the flat results of each step, their containers); without any step, copies of the initial values."""
    steps: list[tuple[Any, ...]] = []
    now, tree = tuple(carried), None
    while condition(*now, *others):
        leaves, tree = tree_flatten(tuple(body(*now, *others)))
        now = tuple(leaves)
        steps.append(now)
    start = tree_map(lambda value: value.clone() if isinstance(value, torch.Tensor) else value, now)
    return steps or [start], tree


def _map(f: Any, xs: Sequence[torch.Tensor], pos_args: Sequence[Any] = ()) -> Any:
    count = len(xs)

    def run(*values: Any) -> Any:
        length = values[0].shape[0]
        # One copy for each step: PyTorch adds up their gradients as one tensor.
        repeated = [
            v.expand(length, *v.shape).unbind(0) if isinstance(v, torch.Tensor) else (v,) * length
            for v in values[count:]
        ]
        steps = [f(*step) for step in zip(*(x.unbind(0) for x in values[:count]), *repeated, strict=True)]
        _, tree = tree_flatten(steps[0])
        return tree_unflatten([_stacked(parts) for parts in zip(*map(tree_leaves, steps), strict=True)], tree)

    return connected(run, (*xs, *pos_args))


def _scan(
    combine_fn: Any, init: Sequence[Any], xs: Sequence[torch.Tensor], additional_inputs: Sequence[Any] = ()
) -> Any:
    carries, count = len(init), len(init) + len(xs)

    def run(*values: Any) -> tuple[Any, ...]:
        carried, outputs, tree = values[:carries], [], None
        for slices in zip(*(x.unbind(0) for x in values[carries:count]), strict=True):
            parts, tree = tree_flatten(combine_fn(*carried, *slices, *values[count:]))
            carried = tuple(parts[:carries])
            outputs.append(parts[carries:])
        results = (*carried, *(_stacked(parts) for parts in zip(*outputs, strict=True)))
        # `torch.scan` called by the user, not in a graph of Dynamo's, gets its containers back.
        return tree_unflatten(results, tree) if isinstance(combine_fn, functools.partial) else results  # type: ignore[arg-type]

    return connected(run, (*init, *xs, *additional_inputs))


def _associative_scan(combine_fn: Any, xs: Sequence[torch.Tensor], additional_inputs: Sequence[Any] = ()) -> Any:
    count = len(xs)

    def run(*values: Any) -> Any:
        return generic_associative_scan(combine_fn, list(values[:count]), additional_inputs=values[count:])

    return connected(run, (*xs, *additional_inputs))


def _stacked_loop(condition: Any, body: Any, carried: Sequence[Any], others: Sequence[Any] = ()) -> Any:
    count = len(carried)

    def run(*values: Any) -> tuple[Any, ...]:
        steps, _ = _carried(condition, body, values[:count], values[count:])
        return tuple(_stacked(parts) for parts in zip(*steps, strict=True))

    return without_derivative("while_loop_stack_output", run, (*carried, *others))


def _stacked(parts: Sequence[Any]) -> Any:
    return torch.stack(list(parts)) if isinstance(parts[0], torch.Tensor) else parts[0]


def _called(function: Any, *operands: Any, **settings: Any) -> Any:
    """The function's result, for operators that only mark a function for a compiler."""
    return connected(function, operands)


def _strict(callable: Any, operands: Sequence[Any]) -> Any:
    return without_derivative("strict_mode", callable, tuple(operands))


def _hinted(body_fn: Any, args: Sequence[Any], kwargs: dict[str, Any], hints: dict[str, Any]) -> Any:
    return without_derivative("hints_wrapper", lambda *values: body_fn(*values, **kwargs), tuple(args))


def _in_dtype(op: Any, output_dtype: torch.dtype, *args: Any) -> Any:
    return without_derivative("out_dtype", lambda *values: out_dtype_dense(op, output_dtype, *values), args)


MEANINGS: dict[str, Callable[..., Any]] = {
    "map_impl": _map,
    "scan": _scan,
    "associative_scan": _associative_scan,
    "while_loop_stack_output": _stacked_loop,
    "invoke_quant": _called,
    "invoke_quant_packed": _called,
    "foreach_map": _called,
    "strict_mode": _strict,
    "hints_wrapper": _hinted,
    "out_dtype": _in_dtype,
}
"""By the name of the operator."""
