"""Failures of a backend, or wrong results: the graph runs on eager's kernels instead, with one warning.

A failure is kept as a program of its own: the graph, inputs of the same layouts, the call of the compiler.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from .._torch.dispatch import default_generator
from ..errors import BackendError
from ..graph.meta import TensorSpec, spec_of
from ..graph.printing import print_graph
from ..passes.regions import is_random

log = logging.getLogger("foregrad.backends")


class Failures:
    """The failures of one backend, for one function. `tell(message)` warns the user; None: a failure is an error."""

    def __init__(self, tell: Callable[[str], None] | None) -> None:
        self.tell = tell
        self._said = False

    def note(self, message: str, error: Exception) -> None:
        """Note a failure: the first one is a warning, later ones are logged. Without `tell` it is a `BackendError`."""
        if self.tell is None:
            raise BackendError(message) from error
        if self._said:
            log.warning("%s", message)
            return
        self._said = True
        self.tell(
            f"{message} The graph runs on eager's kernels instead. "
            '(foregrad.compile(..., on_unsupported="raise") makes this an error.)'
        )


def described(compiler: Any, name: str, graph: str, module: fx.GraphModule, error: BaseException) -> str:
    """The message for a failure, with the path of a program that shows it."""
    first = next(iter(str(error).strip().splitlines()), "")
    message = f"backend `{name}` failed on {graph}: {type(error).__name__}: {first}"
    message += "" if message.endswith((".", "!", "?")) else "."
    path = _kept(compiler, name, graph, module, message)
    return message if path is None else f"{message} {path} is a program that shows it."


def _kept(compiler: Any, name: str, graph: str, module: fx.GraphModule, message: str) -> str | None:
    """The path of a file with a program that shows the failure; None if it can't be written."""
    try:
        text = _program(compiler, module, message)
        handle, path = tempfile.mkstemp(prefix="foregrad_failure_", suffix=".py", text=True)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
    except Exception as why:
        log.debug("no program is kept of the failure on %s with %s: %s", graph, name, why)
        return None
    return path


def _program(compiler: Any, module: fx.GraphModule, message: str) -> str:
    graph = print_graph(module, header=message, name="graph")
    inputs = [_input(spec_of(node)) for node in module.graph.nodes if node.op == "placeholder"]
    home, qualified = getattr(compiler, "__module__", None), getattr(compiler, "__qualname__", None)
    if home is None or qualified is None or "<" in qualified or home == "__main__":
        compiler_line = "compiler = ...  # the backend's compiler: (graph module, example inputs) -> callable"
    else:
        root, _, rest = qualified.partition(".")
        compiler_line = f"from {home} import {root} as compiler" + (f"\ncompiler = compiler.{rest}" if rest else "")
    return (
        f"{graph}\n\n{compiler_line}\nfrom foregrad.backends.boxed import call_boxed\n\n"
        f"inputs = [\n{''.join(f'    {line},{chr(10)}' for line in inputs)}]\n"
        "module = torch.fx.symbolic_trace(graph)\n"
        "results = call_boxed(compiler(module, inputs), list(inputs))\n"
        "print([getattr(result, 'shape', result) for result in results])\n"
    )


def _input(spec: Any) -> str:
    if not isinstance(spec, TensorSpec) or not spec.is_static:
        return "...  # a number, or a tensor of symbolic sizes"
    shape, stride, last = tuple(map(int, spec.shape)), tuple(map(int, spec.stride)), f"device='{spec.device}'"
    return f"torch.empty_strided({shape}, {stride}, dtype={spec.dtype}, {last}).zero_()"


def random_states_of(module: fx.GraphModule, values: Sequence[Any]) -> Callable[[], None]:
    """A function that restores the random generators that a graph may draw from."""
    draws = any(map(is_random, module.graph.nodes))
    devices = {value.device for value in values if isinstance(value, torch.Tensor)} | {torch.device("cpu")}
    generators = [default_generator(device) for device in devices if device.type != "meta"] if draws else []
    states = [(generator, generator.get_state()) for generator in generators]

    def put_back() -> None:
        for generator, state in states:
            generator.set_state(state)

    return put_back
