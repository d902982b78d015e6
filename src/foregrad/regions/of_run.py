"""Python that a run's graph calls: the parts of the subject, as a capture asks them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..tracing.effects.results import Returned
from ..tracing.parts import CalledPython, CaptureParts
from .captured import EagerRegions
from .python_in_backwards import CustomFunctions, EagerHooks, OwnHooks


class PythonOfRun(CalledPython):
    """Eager regions, custom Functions and hooks of a run."""

    def __init__(self, run: CaptureParts) -> None:
        self.run, learned, recorder = run, run.learned, run.recorder
        may_run = run.options.runs_regions
        self.functions: CustomFunctions = CustomFunctions(run, recorder, learned.regions, run.reads, may_run=may_run)
        self.regions = EagerRegions(run, recorder, run.inputs.records)
        self.made = self.regions.made
        self.eager_hooks = EagerHooks(run, recorder, learned.hooks, self.made, may_run=may_run)
        self.hooks = OwnHooks(run.where)
        self.inside = self.hooks.inside
        self.aspects = self.regions, self.functions, self.eager_hooks, self.hooks
        self.call = self.regions.call if may_run else self.regions.refuse
        self.on_hook, self.instead, self.on_numpy = self.hooks.note, self.eager_hooks.instead, self.functions.on_numpy

    def is_region(self, cls: Any) -> bool:
        return self.functions.is_region(cls)

    def applied(self, cls: Any, node: Any) -> None:
        self.functions.applied(cls, node)

    def on_node(self, hook: Callable[[Any], Any], register: Callable[[Any], Any]) -> Any:
        return self.hooks.on_node(self.eager_hooks.traced(hook), register)

    def settle(self, results: Sequence[Any], returned: Returned) -> bool:
        run = self.run
        self.hooks.settle(run.name, run.call.function, results, returned, run.inputs, live=run.options.live_hooks)
        return bool(self.hooks)

    def after_backward(self) -> None:
        self.hooks.check_nodes(self.run.name)

    def check_absent(self, tangents: int) -> None:
        self.functions.check_absent(self.run.name, tangents)
