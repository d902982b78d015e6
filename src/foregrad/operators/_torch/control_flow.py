"""`torch.cond`, `switch`, `torch.while_loop` and other operators that take functions, as equivalent Python.

While a function is captured, a branch is a Python `if` on a value and a loop is a Python `while`: the branch taken is
recorded, and its condition becomes one of the graph's decisions. As in eager, two things differ from a plain `if`. An
operand that the branch taken does not use gets a gradient of zeros, as does a tensor that only an unused branch closes
over; and all results have a history if an operand has. (A module's parameters that only an unused branch closes over
are no operands here: they have no gradient.) `flex_attention` stays one operator, and so do `cond`, `while_loop`,
`scan` and `map` in captures that keep them.

Checked on torch 2.11.0, 2.13.0, 2.15.0.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import fx
from torch._higher_order_ops.associative_scan import generic_associative_scan
from torch._higher_order_ops.out_dtype import out_dtype_dense
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..._torch.fakes import FakeTensorMode, NewFakeMode
from ...errors import UnsupportedOpError
from ...locks import Bind

_original_asked = torch.compiler.is_dynamo_compiling
# The functions that users call: each has Dynamo compile it, unless Dynamo does so already.
_FRONTS = {
    ("torch._higher_order_ops.cond", "cond"),
    ("torch._higher_order_ops.while_loop", "while_loop"),
    ("torch._higher_order_ops.strict_mode", "strict_mode"),
    ("torch._higher_order_ops.map", "map"),
    ("torch.nn.attention.flex_attention", "flex_attention"),
    ("torch._higher_order_ops.utils", "_maybe_compile_and_run_fn"),
}


def run_cond(pred: Any, true_fn: Any, false_fn: Any, operands: Any = ()) -> Any:
    return _branch(0 if pred else 1, (true_fn, false_fn), operands)


def _switch(index: Any, branches: Any, operands: Any = ()) -> Any:
    return _branch(int(index), branches, operands)


def _branch(taken: int, branches: Sequence[Any], operands: Any) -> Any:
    result = connected(branches[taken], tuple(operands))
    operand_ids = {id(tensor) for tensor in (*operands, *_closed_over(branches[taken]))}
    others = {id(tensor): tensor for branch in branches for tensor in _closed_over(branch) if tensor.requires_grad}
    return with_unused(result, [tensor for key, tensor in others.items() if key not in operand_ids])


def _closed_over(branch: Any) -> list[torch.Tensor]:
    """The tensors among the closure and global variables that a branch names."""
    branch = getattr(branch, "keywords", {}).get("branch_fn", branch)  # `switch` gives its branches flat operands
    code = getattr(branch, "__code__", None)
    if code is None:
        return []
    variables = [branch.__globals__.get(name) for name in code.co_names]
    for cell in branch.__closure__ or ():
        with contextlib.suppress(ValueError):  # not bound yet
            variables.append(cell.cell_contents)
    return [value for value in variables if isinstance(value, torch.Tensor)]


def run_while_loop(
    cond_fn: Any, body_fn: Any, carried_inputs: Any, additional_inputs: Any = (), mutated_arg_indices: str = ""
) -> Any:
    count = len(carried_inputs)

    def loop(*values: Any) -> tuple[Any, ...]:
        return run_while(cond_fn, body_fn, values[:count], values[count:])

    return connected(loop, (*carried_inputs, *additional_inputs))


def _subgraph(subgraph: Any, identifier: str | None, *operands: Any) -> Any:
    return subgraph(*operands)


def print_formatted(format_str: str, *args: Any, **kwargs: Any) -> None:
    """The effect of the operator `print`, on tensors of the call."""
    print(format_str.format(*args, **kwargs))


# -------------------------------------------------------------------- loops
# PyTorch's operators that loop, as equivalent Python, and operators that only mark the function they call.
#
# Each step is recorded by itself, so a graph is right for one number of steps: a size of an argument, which is
# guarded, or a number decided by values, which is checked. Checked on torch 2.11.0, 2.13.0.
#
# Known weaknesses: a loop of a thousand steps is a graph of a thousand copies of its body. A tensor that the function
# closes over gets its gradients one after the other, where PyTorch adds up those of `map` at once: the sums differ in
# their last bits.


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


def run_map(f: Any, xs: Sequence[torch.Tensor], pos_args: Sequence[Any] = ()) -> Any:
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


def run_scan(
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
    "map_impl": run_map,
    "scan": run_scan,
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


# -------------------------------------------------------------------- gradients of operands
# Gradients of operators that take functions, where the gradients differ from the equivalent Python's.
#
# All operands of PyTorch's operators are inputs: an operand that the functions do not use gets a gradient of zeros, and
# all results have a history as soon as one operand has a history. Checked on torch 2.11.0, 2.13.0.


class _Operands(torch.autograd.Function):
    """The operands unchanged; a missing gradient is zeros."""

    @staticmethod
    def forward(ctx: Any, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(operand.view_as(operand) for operand in operands)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


class _Unused(torch.autograd.Function):
    """A result, with zeros as gradients of tensors that it does not depend on."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*unused)
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return gradient, *(torch.zeros_like(tensor) for tensor in ctx.saved_tensors)


class _Undifferentiable(torch.autograd.Function):
    """Results with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, name: str, results: list[torch.Tensor], *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.operator = name
        return tuple(result.view_as(result) for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise RuntimeError(f"Autograd not implemented for {ctx.operator}")


def is_differentiable(value: Any) -> bool:
    """Whether a value is a tensor that may have a history."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def connected(run: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """`run(*operands)` with the gradients that the operator as a whole has."""
    at = _tracked(operands)
    if not at:
        return run(*operands)
    tracked = _Operands.apply(*(operands[i] for i in at))
    arguments = list(operands)
    for i, operand in zip(at, tracked, strict=True):
        arguments[i] = operand

    def linked(result: Any) -> Any:
        if not is_differentiable(result) or result.requires_grad:
            return result
        return _Unused.apply(result, *tracked)

    return tree_map(linked, run(*arguments))


def with_unused(results: Any, unused: Sequence[torch.Tensor]) -> Any:
    """Results that give zeros as gradients to tensors that they do not depend on."""
    if not unused or not torch.is_grad_enabled():
        return results
    return tree_map(lambda value: _Unused.apply(value, *unused) if is_differentiable(value) else value, results)


def without_derivative(name: str, run: Callable[..., Any], operands: tuple[Any, ...]) -> Any:
    """`run(*operands)` for an operator without a derivative: its backward raises PyTorch's error."""
    at = _tracked(operands)
    if not at:
        return run(*operands)
    with torch.no_grad():
        results = run(*operands)
    tensors: list[torch.Tensor] = []
    tree_map(lambda value: tensors.append(value) if is_differentiable(value) else None, results)
    refusing = iter(_Undifferentiable.apply(name, tensors, *(operands[i] for i in at)) if tensors else ())
    return tree_map(lambda value: next(refusing) if is_differentiable(value) else value, results)


def _tracked(operands: tuple[Any, ...]) -> list[int]:
    """The positions of the operands that gradients flow to."""
    if not torch.is_grad_enabled():
        return []
    return [i for i, operand in enumerate(operands) if is_differentiable(operand) and operand.requires_grad]


# -------------------------------------------------------------------- flex_attention
# `flex_attention` and its backward, as graphs call them. The operators take functions of single scores (`score_mod`,
# `mask_mod`) as graphs of their own.

COND = torch.ops.higher_order.cond
WHILE_LOOP = torch.ops.higher_order.while_loop
SCAN, MAP = torch.ops.higher_order.scan, torch.ops.higher_order.map_impl
PRINT = getattr(torch.ops.higher_order, "print", None)
ATTENTION = torch.ops.higher_order.flex_attention
BACKWARD = torch.ops.higher_order.flex_attention_backward

# Compilers run operators under a fake mode, and its rules are looked up by the mode's class.
for _operator in (ATTENTION, BACKWARD, COND, WHILE_LOOP, SCAN, MAP):
    _operator.python_key_table.setdefault(NewFakeMode, _operator.python_key_table[FakeTensorMode])

# Positions among the backward's arguments.
_JOINT, _BUFFERS = 8, 12
_SCALARS = 5  # gradients that the joint graph returns before the gradients of the buffers


def indexed_by_tensors() -> Any:
    """Context: `tensor[i]` with a tensor `i` of one element is an operator, as in functions of single scores."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def strides_like(shape: Sequence[Any], strides: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a result or gradient of the shape, in the layout of a query, key or value: dense, with the
    dimensions in order, except that the last is innermost.
    """
    order = sorted(range(len(shape)), key=lambda dim: strides[dim])
    result = _dense(shape, order)
    if result[-1] != 1:
        last = len(shape) - 1
        result = _dense(shape, [last, *(dim for dim in order if dim != last)])
    return tuple(result)


def _dense(shape: Sequence[Any], order: Sequence[int]) -> list[Any]:
    strides: list[Any] = [0] * len(shape)
    step: Any = 1
    for dim in order:
        strides[dim] = step
        step = step * shape[dim]
    return strides


def _attention(*args: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return ATTENTION(*args)


def _backward(*args: Any) -> Any:
    """The backward. PyTorch gives gradients to buffers that require grad; here the joint graph decides."""
    joint = args[_JOINT]
    results = next(iter(reversed(joint.graph.nodes))).args[0]
    buffers = tuple(
        value.detach().requires_grad_() if isinstance(gradient, fx.Node) else value
        for value, gradient in zip(args[_BUFFERS], results[_SCALARS:], strict=True)
    )
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        return BACKWARD(*args[:_BUFFERS], buffers, *args[_BUFFERS + 1 :])


IN_GRAPHS: dict[Any, Callable[..., Any]] = {ATTENTION: _attention, BACKWARD: _backward}
"""What runs them on real tensors, as plain operators."""


# -------------------------------------------------------------------- replacements of the operators

_BY_NAME: dict[str, Callable[..., Any]] = {
    "cond": run_cond,
    "switch": _switch,
    "while_loop": run_while_loop,
    "invoke_subgraph": _subgraph,
}
_MEANING: dict[type, Callable[..., Any]] = {
    type(getattr(torch.ops.higher_order, name)): meaning
    for name, meaning in {**_BY_NAME, **MEANINGS}.items()
    if hasattr(torch.ops.higher_order, name)
}
if PRINT is not None:
    _MEANING[type(PRINT)] = print_formatted
_original: dict[type, Any] = {kind: kind.__call__ for kind in (*_MEANING, type(ATTENTION), type(BACKWARD))}


class KeptOperators(Protocol):
    """A capture's implementations: of `flex_attention`, its backward, and by class of the operators that it `keeps`."""

    keeps: Mapping[type, Callable[..., Any]]

    def forward(self, *args: Any, **kwargs: Any) -> Any: ...

    def backward(self, *args: Any, **kwargs: Any) -> Any: ...


def install(
    bind: Bind, is_capturing: Callable[[], bool], runner: Callable[[], Any], kept: Callable[[], KeptOperators | None]
) -> None:
    """Install the Python equivalents, for threads where `is_capturing()` is true; `runner()` gives `run(function, args,
    kwargs)`: it runs a function on real tensors in each call.
    """
    meanings = dict(_MEANING)

    def printing(format_str: str, *args: Any, **kwargs: Any) -> Any:
        return runner()(print_formatted, (format_str, *args), kwargs)

    if PRINT is not None:
        meanings[type(PRINT)] = printing

    def attending(part: str, *args: Any, **kwargs: Any) -> Any:
        here = kept()
        if here is None:
            raise UnsupportedOpError(
                "`flex_attention` is called in the derivative of a backward, and can't be compiled there. Take the "
                "derivative outside the compiled function."
            )
        return getattr(here, part)(*args, **kwargs)

    meanings[type(ATTENTION)] = functools.partial(attending, "forward")
    meanings[type(BACKWARD)] = functools.partial(attending, "backward")

    def replaced(kind: type) -> Callable[..., Any]:
        original, meaning = _original[kind], meanings[kind]

        def call(self: HigherOrderOperator, *args: Any, **kwargs: Any) -> Any:
            if not is_capturing():
                return original(self, *args, **kwargs)
            here = kept()
            return (meaning if here is None else here.keeps.get(kind, meaning))(*args, **kwargs)

        return call

    def asked() -> bool:
        frame = sys._getframe(1)
        if is_capturing() and (frame.f_globals.get("__name__"), frame.f_code.co_name) in _FRONTS:
            return True
        return _original_asked()

    for kind in _original:
        bind(kind, "__call__", replaced(kind))
    bind(torch.compiler, "is_dynamo_compiling", asked)
