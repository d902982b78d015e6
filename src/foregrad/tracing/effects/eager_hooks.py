"""Hooks on a function's own tensors that no graph can hold: each backward calls them, on real gradients.

They write to Python's state, read the value of a gradient, print it or hand it to NumPy. Tracing one shows that; from
the next run of the capture on, it is an operator of the backward.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..._torch.dispatch import without_torch_functions
from ...errors import UnsupportedError, UnsupportedMutationError, UnsupportedOpError, UnsupportedSideEffectError
from ...graph.eager_regions import differentiated_twice
from ...graph.python_calls import CALL, GradientHook
from ..recorder.recorder import Recorder
from ..tape.again import CaptureAgain
from .backward_reads import reads_state
from .custom_functions import BackwardChangesError, codes_on_the_way
from .eager_regions import Once
from .result_hooks import needs_nothing, outside_of

__all__ = ["EagerHooks"]


class EagerHooks:
    """The eager hooks of one run. `learned`: their functions, by what tells a hook (see `_key`); `made`:
    what the graph's operators refer to. `knows(object)`: it is older than the call.
    """

    def __init__(
        self,
        learned: dict[Any, Any],
        made: list[Any],
        recorder: Recorder,
        function: Any,
        knows: Callable[[Any], bool],
        *,
        may_run: bool,
    ) -> None:
        self.learned, self.made, self.recorder, self.knows, self.may_run = learned, made, recorder, knows, may_run
        self.outside = outside_of(function)
        self._met: dict[Any, Any] = {}

    def instead(self, hook: Any) -> Any:
        """What is to be registered in the place of a hook."""
        key = _key(hook)
        if key is None or not self.may_run or self.recorder.in_backward:
            return hook
        reads = reads_state(hook, self.knows)
        if key in differentiated_twice or not needs_nothing(hook, self.outside, self.knows):
            if reads:
                raise UnsupportedSideEffectError(
                    f"a hook that is put on a tensor at {self.recorder.where()} looks at Python's state, which may be "
                    "another by the time of the backward, and at what the call computes: no graph holds both. Let the "
                    "hook look at one of them."
                )
            return hook
        self._met[key] = hook
        if reads and key not in self.learned:
            self.learned[key] = _function(hook)
            raise CaptureAgain  # what it looks at is not looked at before
        if key not in self.learned:
            return hook
        called = GradientHook(hook, str(getattr(hook, "__name__", type(hook).__name__)), self.recorder.where())
        self.made.append(called)
        return _Call(self.recorder, called, key)

    def isolate(self, error: BaseException) -> bool:
        """Whether hooks are refused for `error`, and are eager from now on: another run is to be made."""
        if not isinstance(error, UnsupportedError) or isinstance(error, UnsupportedMutationError):
            return False
        refused = [*codes_on_the_way(error)]
        is_any = isinstance(error, BackwardChangesError)  # of which it is not known
        found = {key: hook for key, hook in self._met.items() if key not in self.learned and (is_any or key in refused)}
        self.learned |= {key: _function(hook) for key, hook in found.items()}
        return bool(found)


def _key(hook: Any) -> Any:
    """What tells a hook in another run: its code. A method of a list has none, and the call itself reads that list."""
    return getattr(_function(hook), "__code__", None)


def _function(hook: Any) -> Any:
    while isinstance(hook, (functools.partial, types.MethodType)):
        hook = hook.func if isinstance(hook, functools.partial) else hook.__func__
    return hook


class _Call:
    """In the place of a hook, while the backward is recorded."""

    def __init__(self, recorder: Recorder, called: GradientHook, key: Any) -> None:
        self.recorder, self.called, self.key = recorder, called, key

    def __call__(self, gradient: torch.Tensor) -> Any:
        return Once.apply(lambda: self.result(gradient), self.refuse, gradient)

    def result(self, gradient: torch.Tensor) -> torch.Tensor:
        """The stand-in of what the hook makes of a gradient."""
        recorder = self.recorder
        if gradient.layout is not torch.strided:
            raise recorder.sparse.refused()
        with without_torch_functions():
            spec = recorder.spec_of(recorder.run_fake(torch.ops.aten.clone.default, (gradient,), {}))
            inputs: list[Any] = [recorder.to_entries(gradient)]
            entry = recorder.entry(CALL, (self.called.key, inputs, [], []), {}, is_random=False)
            results: list[torch.Tensor] = recorder.bind_results(entry, [recorder.fake_of(spec)], [spec])
        return results[0]

    def refuse(self) -> NoReturn:
        """What the hook gives is differentiated."""
        differentiated_twice.add(self.key)
        raise UnsupportedOpError(
            f"the hook `{self.called.name}` registered at {self.called.where} is differentiated, and it does what no "
            "graph holds. Compile the function again: its calls run eagerly then."
        )
