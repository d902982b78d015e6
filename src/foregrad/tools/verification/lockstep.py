"""A graph run node by node, by itself or in step with float64.

Beside each value two more are kept on demand: the computation's in float64, and its value in float64 with a relative
error of the narrow type's size after each operator. Random values, and values that are no floating-point numbers, are
the narrow run's in all three, so that all take equal ways.

Known weakness: an operator that has no float64 kernel is run in the narrow type; its own rounding is then not seen.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from foregrad.graph.meta import TensorSpec, spec_of
from foregrad.partitioners import op_info
from foregrad.tools._torch.tools import OpOverload, is_random, mapped

from .compare import Exact

_WIDE: dict[torch.dtype, torch.dtype] = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
_WIDENED = (torch.Tensor, torch.dtype)
_NARROW = frozenset({*_WIDE, torch.float64, torch.complex128})


@dataclasses.dataclass(slots=True)
class Step:
    """A node that has run: its arguments, its value; `exact` mirrors the structure of `value`."""

    node: fx.Node
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    value: Any
    wide: Any = None
    shaken: Any = None

    def exact(self) -> Any:
        """`Exact` for a tensor, a list for several; None where there was no run in float64."""
        return _paired(self.wide, self.shaken)


def _paired(wide: Any, shaken: Any) -> Any:
    if isinstance(wide, torch.Tensor):
        return Exact(wide, shaken)
    if isinstance(wide, (list, tuple)):
        return [_paired(w, s) for w, s in zip(wide, shaken, strict=True)]
    return None


@torch.no_grad()
def steps(
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    exactly: bool = False,
    keep: bool = False,
    before: Callable[[fx.Node], None] | None = None,
) -> Iterator[Step]:
    """Run a graph on `inputs` without changing them; yields each node that has run, inputs and the output node too.

    `exactly`: in step with float64. `keep`: no value is dropped after its last use. `before(node)` precedes each.
    """
    streams: list[dict[fx.Node, Any]] = [{}, {}, {}] if exactly else [{}]
    own: dict[fx.Node, tuple[Any, Any]] = {}  # whole numbers as computed in float64
    interpreter = fx.Interpreter(module)
    last = {} if keep else interpreter.user_to_last_uses
    remaining = iter(inputs)
    noise = _Noise()
    for node in module.graph.nodes:
        if before is not None:
            before(node)
        args = [_filled(node.args, stream) for stream in streams]
        kwargs = [_filled(node.kwargs, stream) for stream in streams]
        step = Step(node, args[0], kwargs[0], None)
        if node.op == "placeholder":
            step.value = next(remaining)
        elif node.op == "output":
            step.value = args[0][0]
        else:
            step.value = _called(interpreter, node, args[0], kwargs[0])
        if exactly:
            if node.op == "output":
                step.wide, step.shaken = (
                    _filled(node.args[0], {**stream, **{n: pair[i] for n, pair in own.items()}})
                    for i, stream in enumerate(streams[1:])
                )
            elif node.op in ("placeholder", "get_attr") or is_random(node):
                step.wide, step.shaken = widened(step.value), noise.on(widened(step.value), step.value)
            else:
                step.wide, step.shaken = _exactly(
                    functools.partial(_called, interpreter, node), args[1:], kwargs[1:], step, noise
                )
        values = (step.value, step.wide, step.shaken)
        if exactly and isinstance(step.value, torch.Tensor) and step.value.dtype not in _NARROW:
            own[node] = step.wide, step.shaken
            values = (step.value,) * 3
        for stream, value in zip(streams, values, strict=False):
            stream[node] = value
        yield step
        for dead in last.get(node, ()):
            for stream in streams:
                stream.pop(dead, None)


def evaluate(module: fx.GraphModule, inputs: Sequence[Any]) -> list[Any]:
    """The results of a graph on eager's kernels, one by one."""
    results: Any = []
    for step in steps(module, inputs):
        results = step.value
    return list(results) if isinstance(results, (list, tuple)) else [results]


def exact_call(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> Any:
    """The value of `Step.exact`, for one call with the result `value` in the narrow type."""
    noise = _Noise()
    wide = mapped((args, kwargs), _WIDENED, widened)
    shaken = mapped((args, kwargs), _WIDENED, lambda item: noise.on(widened(item), item))
    step = Step(None, args, kwargs, value)  # type: ignore[arg-type]
    step.wide, step.shaken = _exactly(
        lambda a, k: call(*a, **k), [wide[0], shaken[0]], [wide[1], shaken[1]], step, noise
    )
    return step.exact()


def gives_nothing(op: Any) -> bool:
    """Whether an operator gives memory that nobody has written: any value of it is right."""
    return str(op).partition(".")[2].startswith(("empty", "new_empty"))


def widened(value: Any) -> Any:
    """A tensor or dtype in float64 or complex128, where it is narrower; anything else unchanged."""
    if isinstance(value, torch.Tensor):
        wide = _WIDE.get(value.dtype)
        return value if wide is None else value.detach().to(wide)
    return _WIDE.get(value, value) if isinstance(value, torch.dtype) else value


class _Noise:
    """Relative errors of the size of a type's rounding, equal in every run; cut out of one sequence of numbers."""

    def __init__(self) -> None:
        self.drawn: dict[torch.device, torch.Tensor] = {}
        self.offset = 0

    def on(self, wide: Any, narrow: Any) -> Any:
        if not isinstance(wide, torch.Tensor) or not isinstance(narrow, torch.Tensor):
            return wide
        if narrow.dtype not in _NARROW:
            return wide
        count = wide.numel()
        drawn_numbers = self.drawn.get(wide.device)
        if drawn_numbers is None or len(drawn_numbers) < 2 * count:
            generator = torch.Generator(wide.device).manual_seed(0)
            size = max(2 * count, 4096)
            drawn = torch.rand(size, generator=generator, device=wide.device, dtype=torch.float64)
            drawn_numbers = self.drawn[wide.device] = drawn - 0.5
        self.offset = (self.offset + 257) % (len(drawn_numbers) - count)
        noise = drawn_numbers[self.offset : self.offset + count].view(wide.shape)
        return torch.addcmul(wide, wide, noise.to(wide.dtype), value=torch.finfo(narrow.dtype).eps)


def _exactly(
    call: Callable[[Any, Any], Any], args: Sequence[Any], kwargs: Sequence[Any], step: Step, noise: _Noise
) -> tuple[Any, Any]:
    """One operator in float64, without and with a rounding error."""
    values = []
    for a, k in zip(args, kwargs, strict=True):
        try:
            value = call(*mapped((a, k), _WIDENED, widened))
            value = _merged(value, step.value)
        except Exception:  # there is no kernel
            value = _merged(call(*_map2(_narrowed, (a, k), (step.args, step.kwargs))), step.value)
        values.append(value)
    if _rounds_nothing(getattr(step.node, "target", None)):
        return values[0], values[1]
    return values[0], _map2(noise.on, values[1], step.value)


def _rounds_nothing(target: Any) -> bool:
    """Whether an operator only looks at memory otherwise, or takes a result out of several."""
    return target is operator.getitem or (isinstance(target, OpOverload) and op_info(target).is_view)


def _narrowed(wide: Any, like: Any) -> Any:
    return wide.to(like.dtype) if isinstance(wide, torch.Tensor) and isinstance(like, torch.Tensor) else like


def _merged(wide: Any, narrow: Any) -> Any:
    """The results in float64; the narrow run's where these are something else."""
    if isinstance(narrow, torch.Tensor):
        dtype = _WIDE.get(narrow.dtype, narrow.dtype)
        is_like = isinstance(wide, torch.Tensor) and wide.shape == narrow.shape
        return wide.to(dtype) if is_like else widened(narrow)
    if isinstance(narrow, (list, tuple)):
        parts = wide if isinstance(wide, (list, tuple)) and len(wide) == len(narrow) else narrow
        return type(narrow)(_merged(w, n) for w, n in zip(parts, narrow, strict=True))
    return narrow


def _map2(function: Callable[[Any, Any], Any], left: Any, right: Any) -> Any:
    """Lists, tuples and dicts of the results of `function` for pairs of items."""
    if isinstance(left, (list, tuple)):
        items = [_map2(function, a, b) for a, b in zip(left, right, strict=True)]
        return tuple(items) if isinstance(left, tuple) else items
    if isinstance(left, dict):
        return {key: _map2(function, item, right[key]) for key, item in left.items()}
    return function(left, right)


def _called(interpreter: fx.Interpreter, node: fx.Node, args: Any, kwargs: Any) -> Any:
    value = getattr(interpreter, node.op)(node.target, args, kwargs)
    return _laid_out(value, node) if node.op == "call_function" else value


def _laid_out(value: Any, node: fx.Node) -> Any:
    """A value with the strides that the graph says: a backend's passes may differ from the kernel."""
    spec = spec_of(node)
    if not isinstance(value, torch.Tensor) or not isinstance(spec, TensorSpec) or not spec.is_static:
        return value
    strides = tuple(map(int, spec.stride))
    if value.layout is not torch.strided or value.shape != spec.shape or value.stride() == strides or not spec.is_dense:
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def _filled(argument: Any, values: dict[fx.Node, Any]) -> Any:
    return fx.map_arg(argument, values.__getitem__)
