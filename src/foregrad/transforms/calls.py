"""Calls of a compiled function under torch.func transforms or with dual numbers.

The function is captured once without the levels, for the tensors that it reads and its side effects; the guards in
front are an ordinary call's. All tensors that it reads, closed-over tensors too, then go as values to a `Layered`
function that takes the levels off. Functions that write to tensors or to Python's state, or would have to draw random
numbers again, run uncompiled: a level may run the function more than once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._torch import levels
from .._torch.engine import TorchFunctionMode, forward_ad
from .._torch.graphs import is_random
from .._torch.levels import Level
from .._torch.patches import swapping
from .._torch.wrappers import is_wrapper
from ..config import Config
from ..dispatch.fallbacks import Transformed
from ..dispatch.guard_list import MISS
from ..dispatch.guards import CallGuards
from ..errors import EscapedTensorError, ForegradWarning, UnsupportedSideEffectError
from ..frontend.call import FlatCall, flatten_call
from ..frontend.tree import Tree, flatten
from ..graph.signature import InputInfo, Signature
from ..graph.source import Names, compile_source
from ..identity import ById, IdSet
from ..interrupts import held
from ..locks import Turn
from . import _torch as transforms

if TYPE_CHECKING:
    from ..tracing.capture import Captured


class LayeredCalls(Transformed):
    """`call(args, kwargs)` of `function` under transforms."""

    def __init__(
        self, function: Callable[..., Any], compile_flat: Callable[..., Any], config: Config, name: str
    ) -> None:
        super().__init__(function, compile_flat, config, name)
        self.layered: list[Layered] = []  # the compiled functions, for people
        self._calls: tuple[Callable[..., Any], ...] = ()
        self._failures = 0
        self._writes = 0  # captures in a row that wrote to Python's state
        self._turn = Turn()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if "other" in levels.kinds() or levels.legacy_vmap_active():
            return self.function(*args, **kwargs)
        for call in self._calls:
            result = call(args, kwargs)
            if result is not MISS:
                return result
        if self.refusals and (eager := self.refusals.covers(args, kwargs)):
            return eager.call(self.function, args, kwargs)
        if len(self._calls) + self._failures < self.config.recompile_limit:
            with held, self._turn.taken() as has_turn:
                new_call = self._make(args, kwargs) if has_turn else None
            if not has_turn:
                return self.function(*args, **kwargs)
            if new_call is not None:
                result = new_call(args, kwargs)
                if result is not MISS:
                    self._calls = (new_call, *self._calls)
                    return result
            self._failures += 1
        return self.function(*args, **kwargs)

    def _make(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any] | None:
        """A guarded call for arguments like these; None if the function can't be captured. Then either a refusal was
        reported, or the eager call raises the error.
        """
        from ..tracing.capture import capture_call  # late, as in the pipeline
        from ..tracing.parts import Options

        try:
            call = flatten_call(self.function, args, kwargs)
            if any(is_wrapper(levels.bottom_of(x)) for x in call.leaves if isinstance(x, torch.Tensor)):
                return None
            call = dataclasses.replace(call, fills_caches=self._writes < _MOST_WRITES)
            with levels.levels_off():
                options = Options(self.name, higher_order=False, takes_output=True, runs_regions=False)
                captured = capture_call(call, options)
            self._check_writes(captured.joint.signature)
        except UnsupportedSideEffectError as error:
            if isinstance(error, EscapedTensorError):
                self._writes += 1
            else:
                self._refuse(args, kwargs, error)
            return None
        except Exception:  # the user's or ours: eager raises it
            return None
        if captured.joint.signature.effects.python_writes or captured.joint.signature.gradients_left:
            return None
        self._writes = 0
        inputs = captured.joint.signature.inputs
        roots = [info for info in inputs if info.argument is None and not getattr(info.source, "steps", ())]
        if captured.joint.signature.has_wrappers or not inputs or roots:  # tensors that can't be read again
            return None
        names = Names(["args", "kwargs", "MISS", "call", "error", "difference", "differs"])
        guards = CallGuards(call, captured, names, transformed=True)
        run = self._run(call, captured)
        through = names.fresh("through")
        lines = [*guards.lines(), f"return {through}(args, kwargs, [{', '.join(guards.inputs)}])"]
        source = "def call(args, kwargs):\n" + "".join(f"    {line}\n" for line in lines)
        return compile_source(source, "call", {**guards.list.globals, through: run}, label=f"transforms of {self.name}")

    def _check_writes(self, signature: Signature) -> None:
        """Raise for writes to Python's state; the first capture alone may write without an error."""
        written = [*dict.fromkeys(write.path for write in signature.effects.python_writes)]
        written += [f"`.grad` of {signature.inputs[i].slot}" for i in sorted(signature.gradients_left)]
        self._writes += bool(written)
        if written and self._writes > _MOST_WRITES:
            raise UnsupportedSideEffectError(
                f"`{self.name}` writes {', '.join(written)}, and is called under a torch.func transform or with dual "
                "numbers: there a compiled function may run more than once. Return the new values."
            )

    def _run(self, call: FlatCall, captured: Captured) -> Callable[..., Any]:
        function, signature = self.function, captured.joint.signature
        if signature.updates or signature.reshaped or signature.swapped or signature.counted:
            return lambda args, kwargs, values: function(*args, **kwargs)
        layered = Layered(_OfValues(call, signature.inputs), self.compile_flat, self.name)
        self.layered.append(layered)
        if not any(map(is_random, captured.joint.graph.nodes)):
            return lambda args, kwargs, values: layered(*values)

        def run(args: Any, kwargs: Any, values: list[torch.Tensor]) -> Any:
            return function(*args, **kwargs) if "grad" in levels.kinds() else layered(*values)

        return run


class _OfValues:
    """The function with a value for each tensor that it reads, in the order of the signature."""

    def __init__(self, call: FlatCall, inputs: tuple[InputInfo, ...]) -> None:
        self.function, self.tree, self.first_of = call.function, call.tree, call.first_of
        self.constants = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in call.leaves]
        self.inputs = [(info.argument, info.source) for info in inputs]

    def __call__(self, *values: torch.Tensor) -> Any:
        leaves = list(self.constants)
        instead: dict[int, torch.Tensor] = {}
        for (argument, source), value in zip(self.inputs, values, strict=True):
            if argument is not None:
                leaves[argument] = value
            else:
                instead[id(source.get())] = value
        leaves = [leaves[first] for first in self.first_of]
        args, kwargs = self.tree.unflatten(leaves)
        if not instead:
            return self.function(*args, **kwargs)
        mode = _Substituted(instead)
        with mode, swapping(mode.swapped):
            return self.function(*args, **kwargs)


class _Substituted(TorchFunctionMode):
    """Torch functions get substitutes for the tensors by their ids."""

    def __init__(self, instead: dict[int, torch.Tensor]) -> None:
        super().__init__()
        self.instead = instead

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*self.swapped(args), **self.swapped(kwargs or {}))

    def swapped(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.instead.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(self.swapped, value))
        if type(value) is dict:
            return {key: self.swapped(item) for key, item in value.items()}
        return value


_MOST_WRITES = 1  # captures in a row that may write without an error: a flag is set, a cache filled


# -------------------------------------------------------------------- layers
# A function of tensors under torch.func transforms and forward mode: each level a compiled function of its own.
#
# A level is taken off by calling another function with the values inside its wrappers: the vmapped function at a vmap,
# the function with its tangents in forward mode, the function and its pullback at a level that records for reverse
# mode. Each compiled function runs the user's function under its one transform during the capture, so that `no_grad`,
# `detach` and custom Functions hold at every level. The function is called one level down, where the next level is
# taken off, until no level is left and the ordinary dispatcher compiles it.
#
# Known weakness: a pullback recomputes the forward, as checkpointing does, where it could have saved residuals.

Function = Callable[..., Any]


class Layered:
    """`function`, of tensors only, compiled for calls with tensors under any levels.

    `compile_flat(function, name)` gives the dispatcher of a function that is called under no level: `bottom`.
    """

    def __init__(self, function: Function, compile_flat: Callable[[Function, str], Any], name: str) -> None:
        self.function = function
        self.compile_flat = compile_flat
        self.name = name
        self.children: dict[Any, Layered] = {}
        self.bottom: Any = None

    def __call__(self, *values: torch.Tensor) -> Any:
        level = levels.top()
        if level is not None:
            return _RULES[level.kind](self, level, values)
        if forward_ad._current_level >= 0:
            result = _forward_mode(self, values, None)
            if result is not None:
                return result[0]
        if self.bottom is None:
            self.bottom = self.compile_flat(self.function, self.name)
        return self.bottom.entry(*values)

    def child(self, what: str, key: tuple[Any, ...], make: Callable[..., Function]) -> Layered:
        """`make(function, *key)`, compiled once."""
        layered = self.children.get((what, key))
        if layered is None:
            function = make(self.function, *key)
            layered = self.children[what, key] = Layered(function, self.compile_flat, f"{what} of {self.name}")
        return layered


# -------------------------------------------------------------------- vmap


def _at_vmap(layered: Layered, level: Level, values: Sequence[torch.Tensor]) -> Any:
    pairs = [levels.of_batch(value, level.number) for value in values]
    child = layered.child("vmap", (tuple(dim for _, dim in pairs), *level.batch), _vmapped)
    lower = [value for value, _ in pairs]
    with level.below():
        out, dims = child(*lower)

    def lift(leaf: torch.Tensor, dim: int | None) -> torch.Tensor:
        return leaf if dim is None else levels.add_batch(leaf, dim, level.number)

    return _lifted(out, lower, values, lift, dims)


def _vmapped(function: Function, dims: tuple[int | None, ...], size: int, randomness: str) -> Function:
    """A function of values batched along `dims`, which gives (results, the batch dimension of each leaf)."""

    def vmapped(*values: torch.Tensor) -> Any:
        with transforms.vmap_level(size, randomness) as number:
            batched = [
                value if dim is None else levels.add_batch(value, dim, number)
                for value, dim in zip(values, dims, strict=True)
            ]
            given = ById((item, pair) for item, *pair in zip(batched, values, dims, strict=True))
            pairs, tree = _lowered(function(*batched), given, lambda leaf: levels.of_batch(leaf, number))
        return tree.unflatten([leaf for leaf, _ in pairs]), tuple(dim for _, dim in pairs)

    return vmapped


# -------------------------------------------------------------------- forward mode


def _at_jvp(layered: Layered, level: Level, values: Sequence[torch.Tensor]) -> Any:
    result = _forward_mode(layered, values, level)
    return result[0] if result is not None else _passed(layered, level, values)


def _forward_mode(layered: Layered, values: Sequence[torch.Tensor], level: Level | None) -> tuple[Any] | None:
    """The result, in a tuple, when one of the values has a tangent at this level of dual numbers."""
    pairs = [_dual_parts(value) for value in values]
    if all(tangent is None for _, tangent in pairs):
        return None
    mask = tuple(tangent is not None for _, tangent in pairs)
    child = layered.child("jvp", (mask, level is not None), _pushed)
    flat = [*(p for p, _ in pairs), *(t for _, t in pairs if t is not None)]
    if level is None:
        out, tangents = child(*flat)
    else:
        flat = [transforms.unwrapped(value, level.number) for value in flat]
        with level.below():
            out, tangents = child(*flat)

    def lift(leaf: torch.Tensor) -> torch.Tensor:
        return leaf if level is None else transforms.wrapped(leaf, level.number)

    def lift_dual(leaf: torch.Tensor, tangent: torch.Tensor | None) -> torch.Tensor:
        result = lift(leaf)
        if level is None and result.requires_grad:
            result.register_hook(functools.partial(_warn_of_no_tangent, layered.name))
        return result if tangent is None else forward_ad.make_dual(result, lift(tangent))

    return (_lifted(out, flat[: len(values)], values, lift_dual, tangents),)


def _warn_of_no_tangent(name: str, gradient: torch.Tensor) -> None:
    """Warn of a gradient through a result that had a tangent: while the level is open, eager's gradient has one too."""
    if forward_ad._current_level >= 0:
        warnings.warn(
            f"a gradient is taken, while dual numbers are on, through a result of the compiled `{name}`: that gradient "
            "has no tangent, as it would have without foregrad. Take it inside the compiled function, or use "
            "torch.func.jvp of torch.func.grad.",
            ForegradWarning,
            stacklevel=2,
        )


def _dual_parts(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not (value.is_floating_point() or value.is_complex()):
        return value, None
    primal, tangent = forward_ad.unpack_dual(value)
    return (value, None) if tangent is None else (primal, tangent)


def _pushed(function: Function, mask: tuple[bool, ...], in_transform: bool) -> Function:
    """A function of values and of tangents for the values at `mask`, which gives (results, the tangent of each leaf or
    None).

    `in_transform`: at a level of its own, as `torch.func.jvp` has. Else at the level of dual numbers that is open at
    the call: gradients taken inside then see values without tangents.
    """

    def pushed(*flat: torch.Tensor) -> Any:
        primals, tangents = flat[: len(mask)], iter(flat[len(mask) :])

        def split(leaf: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            primal, tangent = _dual_parts(leaf)
            if number is None:
                return primal, tangent
            primal = transforms.unwrapped(primal, number)
            return primal, None if tangent is None else transforms.unwrapped(tangent, number)

        with transforms.jvp_level() if in_transform else contextlib.nullcontext() as number:
            duals = [
                forward_ad.make_dual(p, next(tangents)) if has else p for p, has in zip(primals, mask, strict=True)
            ]
            given = ById((dual, (primal, None)) for dual, primal in zip(duals, primals, strict=True))
            pairs, tree = _lowered(function(*duals), given, split)
        return tree.unflatten([leaf for leaf, _ in pairs]), tuple(tangent for _, tangent in pairs)

    return pushed


# -------------------------------------------------------------------- reverse mode


def _at_grad(layered: Layered, level: Level, values: Sequence[torch.Tensor]) -> Any:
    if not torch.is_grad_enabled() or not any(level.tracks(value) for value in values):
        return _passed(layered, level, values)
    call = _Recorded(layered, level)
    with transforms.single_level_functions():
        results = iter(_apply(call, *values))
    assert call.tree is not None
    return call.tree.unflatten([next(results) if leaf is call else leaf for leaf in call.leaves])


def _passed(layered: Layered, level: Level, values: Sequence[torch.Tensor]) -> Any:
    """The call one level down, for values that this level does not track."""
    lower = [transforms.unwrapped(value, level.number) for value in values]
    with level.below():
        out = layered(*lower)
    return _lifted(out, lower, values, lambda value: transforms.wrapped(value, level.number))


class _Recorded:
    """One call at a level that records: results of the node's forward besides tensors."""

    def __init__(self, layered: Layered, level: Level) -> None:
        self.layered, self.level = layered, level
        self.tree: Tree | None = None
        self.leaves: list[Any] = []  # this object stands for each tensor that the node returns


def _forward(ctx: Any, call: _Recorded, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    number = call.level.number
    lower = [transforms.unwrapped(value, number) for value in values]
    # A Function's forward runs with gradients off: right for this level alone.
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), call.level.below():
        leaves, call.tree = flatten(call.layered(*lower))
    inputs = ById(zip(lower, values, strict=True))  # as the caller passed them: some results are inputs
    results = []
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            call.leaves.append(leaf)
        elif leaf in inputs:
            call.leaves.append(inputs[leaf])
        else:
            call.leaves.append(call)
            results.append(transforms.wrapped(leaf, number))
    ctx.to_save = values
    ctx.mark_non_differentiable(*(t for t in results if not (t.is_floating_point() or t.is_complex())))
    ctx.set_materialize_grads(False)
    ctx.layered = call.layered
    return tuple(results)


def _backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    needs_input_grad, has_tangent = ctx.needs_input_grad[1:], tuple(t is not None for t in tangents)
    if not any(has_tangent):
        return (None,) * (1 + len(needs_input_grad))
    values = [transforms.unwrapped_if_dead(value) for value in ctx.saved_tensors]
    child = ctx.layered.child("vjp", (tuple(needs_input_grad), has_tangent), _pulled)
    gradients = iter(child(*values, *(transforms.unwrapped_if_dead(t) for t in tangents if t is not None)))
    return None, *(next(gradients) if has else None for has in needs_input_grad)


_apply = transforms.single_level(
    "CompiledFunction", {"forward": staticmethod(_forward), "backward": staticmethod(_backward)}
)


def _pulled(function: Function, needs_input_grad: tuple[bool, ...], has_tangent: tuple[bool, ...]) -> Function:
    """A function of values and of cotangents of the results at `has_tangent`, which gives the gradients of the values
    at `needs_input_grad`.
    """

    def pulled(*flat: torch.Tensor) -> Any:
        values, tangents = flat[: len(needs_input_grad)], flat[len(needs_input_grad) :]

        def results(*variables: torch.Tensor) -> tuple[torch.Tensor, ...]:
            left = iter(variables)
            full = [next(left) if has else value for value, has in zip(values, needs_input_grad, strict=True)]
            inputs, leaves = IdSet(full), flatten(function(*full))[0]
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf not in inputs]
            return tuple(tensor for tensor, has in zip(tensors, has_tangent, strict=True) if has)

        variables = [value for value, has in zip(values, needs_input_grad, strict=True) if has]
        return torch.func.vjp(results, *variables)[1](tangents)

    return pulled


# -------------------------------------------------------------------- all of them


def _lifted(
    out: Any, lower: Sequence[Any], values: Sequence[Any], lift: Callable[..., torch.Tensor], *beside: Sequence[Any]
) -> Any:
    """Results one level up: inputs as the caller passed them, other tensors by `lift(leaf, what is beside it)`."""
    inputs = ById(zip(lower, values, strict=True))
    leaves, tree = flatten(out)
    return tree.unflatten(
        [
            inputs[leaf] if leaf in inputs else lift(leaf, *more) if isinstance(leaf, torch.Tensor) else leaf
            for leaf, *more in zip(leaves, *beside, strict=True)
        ]
    )


def _lowered(out: Any, given: ById[Any, Any], split: Callable[[torch.Tensor], Any]) -> tuple[list[Any], Tree]:
    """(for each leaf of a result what it is one level down, and what the level adds; the structure). `given`: the pairs
    of inputs.
    """
    leaves, tree = flatten(out)
    pairs = [
        given[leaf] if leaf in given else split(leaf) if isinstance(leaf, torch.Tensor) else (leaf, None)
        for leaf in leaves
    ]
    return pairs, tree


_RULES: dict[str, Callable[[Layered, Level, Sequence[torch.Tensor]], Any]] = {
    "vmap": _at_vmap,
    "jvp": _at_jvp,
    "grad": _at_grad,
}
