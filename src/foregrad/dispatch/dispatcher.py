"""From a call to the compiled function that is right for it: try the guards, compile when none fits."""

from __future__ import annotations

import dataclasses
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from .._torch import engine
from ..config import Config
from ..errors import ForegradWarning, UnsupportedError
from ..frontend.call import FlatCall, flatten_call
from ..graph.source import Names, compile_source, source_of
from ..runtime.node import NodeSource
from ..runtime.render import render_run
from .guards import MISS, render_guards
from .paths import Paths
from .pipeline import Pipeline, Product
from .shapes import SizesSeen, check_marked

__all__ = ["Dispatcher", "Specialization"]

_capturing = threading.RLock()  # one capture at a time: the patches are per thread, warm caches are not


class Specialization:
    """One compiled graph with its guards: `call(args, kwargs)` returns the result, or `MISS`."""

    def __init__(self, call: Callable[..., Any], node: NodeSource | None, product: Product) -> None:
        self.call = call
        self.node = node
        self.product = product
        self.decides = bool(product.captured.joint.signature.decisions)

    def source(self) -> str:
        """The rendered Python: guards, runtime, and the autograd node."""
        text = source_of(self.call)
        return text if self.node is None else f"{self.node.source}\n\n{text}"


class Dispatcher:
    """The compiled form of `function`: callable with its arguments."""

    def __init__(
        self,
        function: Callable[..., Any],
        pipeline: Pipeline,
        config: Config,
        name: str | None = None,
        *,
        dynamic: bool | None = False,
    ) -> None:
        self.function = function
        self.pipeline = pipeline
        self.config = config
        self.name = name or str(getattr(function, "__name__", type(function).__name__))
        self.specializations: list[Specialization] = []
        self._calls: tuple[Callable[..., Any], ...] = ()
        self._warned = False
        self._sizes = SizesSeen(dynamic)
        self._paths = Paths(self.name, config)
        self.entry = self._entry()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.entry(*args, **kwargs)

    def _entry(self) -> Callable[..., Any]:
        """What users call: one frame between them and the graph, with everything that it reads at hand."""
        function, compile_and_call = self.function, self._compile_and_call
        dispatch_modes, function_modes = engine.count_dispatch_modes, engine.count_function_modes
        transforms_active = engine.transforms_active

        def entry(*args: Any, **kwargs: Any) -> Any:
            if dispatch_modes() or transforms_active() or (function_modes() and _foreign_function_modes()):
                return function(*args, **kwargs)  # inside a capture or a transform: that sees our operators
            tried = self._calls
            for call in tried:
                result = call(args, kwargs)
                if result is not MISS:
                    return result
            return compile_and_call(args, kwargs, tried)

        return entry

    def source(self) -> str:
        """The rendered Python of every specialization."""
        return "\n\n".join(s.source() for s in self.specializations)

    def _compile_and_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], tried: tuple[Callable[..., Any], ...]
    ) -> Any:
        with _capturing:
            for call in self._calls:  # another thread may have made it meanwhile
                result = call(args, kwargs) if call not in tried else MISS
                if result is not MISS:
                    return result
            if self._paths.at_limit(self.specializations):
                if self._paths.past_limit(self.specializations):
                    self._calls = tuple(s.call for s in self.specializations if not s.decides)
                return self.function(*args, **kwargs)
            if len(self.specializations) >= self.config.recompile_limit:
                return self._past_the_limit(args, kwargs)
            specialization = self.specialize(flatten_call(self.function, args, kwargs))
            self.specializations.append(specialization)
            self._calls = tuple(s.call for s in self.specializations)
        result = specialization.call(args, kwargs)
        if result is MISS:
            self._remove(specialization)
            if specialization.decides:  # a backend that rounds otherwise, or an error that eager raises too
                self._paths.diverged += 1
                return self.function(*args, **kwargs)
            return self._unguardable()
        return result

    def specialize(self, call: FlatCall) -> Specialization:
        """Capture, partition, compile and render for this call."""
        call = self._sizes.observe(call, self.specializations)
        call, product = self._build(call)
        captured = product.captured
        if call.dynamic:
            check_marked(call, captured.joint, self.name)
        while True:
            names = Names(["args", "kwargs", "MISS"])
            guards = render_guards(call, captured.joint, captured.modules, names, captured.tensors)
            known = captured.joint.num_guards()
            run = render_run(product.compiled, guards.inputs, names, symbols=guards.symbols)
            if captured.joint.num_guards() == known:  # nothing more was found out about symbolic sizes
                break
        body = "\n".join("    " + line for line in (*guards.lines, *run.lines))
        source = f"def call(args, kwargs):\n{body}\n"
        function = compile_source(source, "call", {**guards.globals, **run.globals}, label=f"runtime of {self.name}")
        return Specialization(function, run.node, product.without_tensors())

    def _build(self, call: FlatCall) -> tuple[FlatCall, Product]:
        """What the pipeline makes of a call: with symbolic sizes and numbers where that works, else without."""
        if call.dynamic or call.varied:
            try:
                product = self.pipeline.build(call, self.name, self.config)
                if product.captured.joint.backward_error is None:
                    return call, product
            except Exception:  # noqa: S110 - whatever is wrong apart from symbols, the next try raises
                pass
            call = dataclasses.replace(call, dynamic={}, varied=frozenset())
            product = self.pipeline.build(call, self.name, self.config)
            if product.captured.joint.backward_error is None:
                self._sizes.give_up()  # some operator takes plain numbers only
            return call, product
        return call, self.pipeline.build(call, self.name, self.config)

    def _past_the_limit(self, args: Any, kwargs: Any) -> Any:
        message = (
            f"`{self.name}` was compiled {len(self.specializations)} times, which is the limit; this call fits none of "
            "them. Raise foregrad.config.recompile_limit, or pass what changes from call to call as a tensor."
        )
        if self.config.error_on_recompile_limit:
            raise UnsupportedError(message)
        if not self._warned:
            self._warned = True
            warnings.warn(message + " It runs eagerly from now on.", ForegradWarning, stacklevel=4)
        return self.function(*args, **kwargs)

    def _remove(self, specialization: Specialization) -> None:
        with _capturing:
            self.specializations.remove(specialization)
            self._calls = tuple(s.call for s in self.specializations)

    def _unguardable(self) -> Any:
        raise UnsupportedError(
            f"the guards of `{self.name}` reject the very call they were made from: capturing it changed something "
            "they look at (a global, an attribute, a module's mode). Move that change out of the compiled function."
        )


def _foreign_function_modes() -> bool:
    count = engine.count_function_modes()
    return count > 0 and not (count == 1 and engine.default_device_is_the_mode())
