"""From one call to its specialization: capture, partition, compile, render; with symbolic sizes if that works."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .._torch.symbols import ClosedSizesError
from ..config import Config
from ..errors import EscapedTensorError
from ..frontend.call import FlatCall
from ..graph.source import Names, compile_source
from ..phases import compiling, phase
from ..runtime.render import render_run
from ..tracing.tape.tape import NumberVaries
from ..tracing.values.draws import DrawsDiffer
from .graphs import Specialization
from .guards import CallGuards
from .naming import log_guards
from .numbers import ConstantNumbers, fixed_numbers
from .pipeline import Pipeline, Product, is_of_capture
from .refusals import Once
from .shapes import SizesSeen, check_marked
from .stateful import check_draws


class Specializer:
    """Makes the specializations of one function. `sizes` are the sizes of its calls so far."""

    def __init__(
        self, function: Callable[..., Any], pipeline: Pipeline, config: Config, name: str, sizes: SizesSeen
    ) -> None:
        self.function, self.pipeline, self.config, self.name, self.sizes = function, pipeline, config, name, sizes
        self._errors: set[tuple[type, str]] = set()  # that backwards raise without symbols too
        self._of_compiler = ""  # the error of a compiler where sizes or numbers were symbolic, in this capture
        self._once = Once()

    def specialize(self, call: FlatCall, specializations: Sequence[Specialization]) -> Specialization:
        """Capture, partition, compile and render for this call. `specializations`: the graphs so far."""
        self._of_compiler = ""
        with compiling(self.name):
            call = self.sizes.observe(call, specializations)
            while True:
                try:
                    call, product = self._build(call)
                    self._tell()
                    break
                except NumberVaries as found:
                    self.sizes.varied |= {found.where}
                    call = dataclasses.replace(call, varied=self.sizes.varied)
            with phase("guards"):
                return self._rendered(call, product)

    def _rendered(self, call: FlatCall, product: Product) -> Specialization:
        """The specialization: graphs with the code around them, which tests whether they are right for a call."""
        check_draws(self.name, call, self.sizes.constants)
        captured = product.captured
        if call.dynamic:
            check_marked(call, captured.joint, self.name)
        while True:
            names = Names(["args", "kwargs", "MISS", "call", "error", "eagerly", "difference", "differs"])
            guards = CallGuards(call, captured, names, native=self.config.native)
            lines = guards.lines()
            num_guards = captured.joint.num_guards()
            eagerly = "return eagerly(*args, **kwargs)"
            variables = guards.symbols, eagerly, guards.wrappers, guards.containers
            run = render_run(product.compiled, guards.inputs, names, "return MISS", *variables)
            if captured.joint.num_guards() == num_guards:  # rendering added no condition on symbolic sizes
                break
        body = "\n".join("    " + line for line in (*lines, *run.lines))
        source = f"def call(args, kwargs):\n{body}\n"
        globals_ = {**guards.list.globals, **run.globals}
        if captured.joint.signature.checks:
            globals_["eagerly"] = self.function
        function = compile_source(source, "call", globals_, label=f"runtime of {self.name}")
        log_guards(self.name, source)
        return Specialization(function, run.node, product.without_tensors(), guards.watch, guards.list)

    def _build(self, call: FlatCall) -> tuple[FlatCall, Product]:
        """The pipeline's product for a call: with symbolic sizes and numbers if that works, else without."""
        while call.numbers:
            try:
                product = self.pipeline.build(call, self.name, self.config)
                constants = fixed_numbers(product.captured.joint)
                self.sizes.make_constant(call.paths[i] for i in constants)
                if not self._is_of_symbols(product, call):
                    return call, product
                constants = call.numbers
            except ConstantNumbers as error:
                constants = error.leaves
            except (DrawsDiffer, EscapedTensorError):
                raise
            except Exception as error:  # whatever is wrong apart from symbols, the next try raises
                self._note(error)
                constants = call.numbers
            self.sizes.make_constant(call.paths[i] for i in constants)
            call = dataclasses.replace(call, numbers=call.numbers - constants)
        closed = dataclasses.replace(call, sizes=None)
        static = dataclasses.replace(closed, dynamic={}, varied=None if call.varied else call.varied)
        # Each try, and what to note as hopeless if only a later try works.
        tries: list[tuple[FlatCall, Callable[[], None]]] = []
        if call.may_open_sizes:
            tries.append((call, self.sizes.close))
        if call.dynamic or call.varied:
            tries.append((closed, self.sizes.give_up))  # some operator takes plain numbers only
        for tried, _ in tries:
            attempt = self._try_symbols(tried)
            if attempt is not None:
                product = attempt
                break
        else:
            tried, product = static, self.pipeline.build(static, self.name, self.config)
        if product.captured.joint.error is None:
            for failed, give_up in tries:
                if failed is tried:
                    break
                give_up()
        return tried, product

    def _try_symbols(self, call: FlatCall) -> Product | None:
        """The pipeline's product for a call with symbolic sizes, or None if that does not work."""
        try:
            product = self.pipeline.build(call, self.name, self.config)
        except Exception as error:  # whatever is wrong apart from symbols, the next try raises
            self._note(error)
            return None
        return None if self._is_of_symbols(product, call) else product

    def _note(self, error: Exception) -> None:
        if not is_of_capture(error) and not ClosedSizesError.is_behind(error):
            self._of_compiler = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"

    def _tell(self) -> None:
        """Say once that a compiler failed with symbolic sizes, which works without."""
        if self._of_compiler:
            self._once.warn(
                f"a compiler failed on a graph of `{self.name}` with symbolic sizes or numbers: {self._of_compiler}. "
                "Each size or number gets a graph of its own instead, up to the limit of graphs. "
                "(foregrad.compile(..., dynamic=False) asks for that from the start.)"
            )

    def _is_of_symbols(self, product: Product, call: FlatCall) -> bool:
        """Whether a backward raises because of symbolic sizes and numbers, not because eager's does."""
        error = product.captured.joint.error
        if error is None or (type(error), str(error)) in self._errors:
            return False
        static = dataclasses.replace(call, sizes=None, dynamic={}, varied=None, numbers=frozenset())
        try:
            plain = self.pipeline.build(static, self.name, self.config).captured.joint.error
        except Exception:
            return True
        if plain is not None:
            self._errors.add((type(plain), str(plain)))
        return (type(error), str(error)) not in self._errors
