"""Calls of a compiled function under torch.func transforms or with dual numbers.

The function is captured once without the levels, for the tensors that it reads and its side effects; the guards in
front are those of an ordinary call. All tensors that it reads, closed-over ones too, then go as values to a `Layered`
function, which takes the levels off. Functions that write to tensors or to Python's state, or would have to draw random
numbers again, run uncompiled: a level may run the function more than once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from .._torch import transforms
from .._torch.dispatch import TorchFunctionMode
from .._torch.patches import swapping
from ..config import Config
from ..errors import EscapedTensorError, UnsupportedError, UnsupportedSideEffectError
from ..frontend.call import FlatCall, flatten_call
from ..frontend.sources import Source
from ..graph.signature import InputInfo, Signature
from ..graph.source import Names, compile_source
from ..interrupts import held
from ..locks import Turn
from ..passes.regions import is_random
from ..subclasses.spec import is_wrapper
from .guard_list import MISS
from .guards import CallGuards
from .layers import Layered
from .refusals import Refusals

if TYPE_CHECKING:
    from ..tracing.capture import Captured


class Transformed:
    """`call(args, kwargs)` of `function` under transforms."""

    def __init__(
        self, function: Callable[..., Any], compile_flat: Callable[..., Any], config: Config, name: str
    ) -> None:
        self.function = function
        self.compile_flat = compile_flat
        self.config = config
        self.name = name
        self.layered: list[Layered] = []  # the compiled functions, for people
        self._calls: tuple[Callable[..., Any], ...] = ()
        self.refusals = Refusals(function, name, config.on_unsupported)
        self._failures = 0
        self._writes = 0  # captures in a row that wrote to Python's state
        self._turn = Turn()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if "other" in transforms.kinds() or transforms.legacy_vmap_active():
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
        from ..tracing.options import Options

        try:
            call = flatten_call(self.function, args, kwargs)
            if any(is_wrapper(transforms.bottom_of(x)) for x in call.leaves if isinstance(x, torch.Tensor)):
                return None
            call = dataclasses.replace(call, fills_caches=self._writes < _MOST_WRITES)
            with transforms.levels_off():
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
        if captured.joint.signature.python_writes or captured.joint.signature.gradients_left:
            return None
        self._writes = 0
        inputs = captured.joint.signature.inputs
        if captured.joint.signature.has_wrappers or not inputs or not all(_can_be_read_again(info) for info in inputs):
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
        written = [*dict.fromkeys(write.path for write in signature.python_writes)]
        written += [f"`.grad` of {signature.inputs[i].slot}" for i in sorted(signature.gradients_left)]
        self._writes += bool(written)
        if written and self._writes > _MOST_WRITES:
            raise UnsupportedSideEffectError(
                f"`{self.name}` writes {', '.join(written)}, and is called under a torch.func transform or with dual "
                "numbers, where a compiled function may run more than once. Return what it writes."
            )

    def _refuse(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], error: UnsupportedError) -> None:
        if self.config.on_unsupported == "raise":
            raise error
        self.refusals.tell(self.refusals.note(args, kwargs, error))

    def _run(self, call: FlatCall, captured: Captured) -> Callable[..., Any]:
        function, signature = self.function, captured.joint.signature
        if signature.updates or signature.reshaped or signature.swapped or signature.counted:
            return lambda args, kwargs, values: function(*args, **kwargs)
        layered = Layered(_OfValues(call, signature.inputs), self.compile_flat, self.name)
        self.layered.append(layered)
        if not any(map(is_random, captured.joint.graph.nodes)):
            return lambda args, kwargs, values: layered(*values)

        def run(args: Any, kwargs: Any, values: list[torch.Tensor]) -> Any:
            return function(*args, **kwargs) if "grad" in transforms.kinds() else layered(*values)

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
        mode = _Instead(instead)
        with mode, swapping(mode.swapped):
            return self.function(*args, **kwargs)


class _Instead(TorchFunctionMode):
    """Torch functions get substitutes for the tensors with these ids."""

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


def _can_be_read_again(info: InputInfo) -> bool:
    return info.argument is not None or (isinstance(info.source, Source) and bool(info.source.steps))
