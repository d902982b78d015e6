"""Backends by name: what compiles each half of a joint graph, and which decompositions it wants first."""

from __future__ import annotations

import dataclasses
import difflib
import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from ..errors import BackendError
from . import inductor
from .boxed import nop
from .eager import eager_compiler
from .interpreter import interpreter_compiler

__all__ = ["Backend", "Compiler", "get_backend", "list_backends", "register_backend"]

Compiler = Callable[..., Any]
Decompositions = Mapping[Any, Callable[..., Any]] | Callable[[], Mapping[Any, Callable[..., Any]]]


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """A compiler for each kind of graph: `(graph module, example inputs) -> callable`.

    `decompositions` maps operators to functions that replace them, or is a function that returns such a mapping, for
    those that are slow to import; None asks for the graph as it was captured. `partition` is the policy to split by
    when the user names none. `prepare_joint` gives a changed copy of a joint graph before it is split: for passes
    that see forward and backward at once.
    """

    name: str
    fw_compiler: Compiler
    bw_compiler: Compiler
    inference_compiler: Compiler
    decompositions: Decompositions | None = None
    description: str = ""
    partition: str | None = None
    prepare_joint: Callable[[fx.GraphModule], fx.GraphModule] | None = None

    def decomposition_table(self) -> dict[Any, Callable[..., Any]]:
        """The decompositions as a new dict, loaded if they are late."""
        table = self.decompositions
        if table is None:
            return {}
        return dict(table if isinstance(table, Mapping) else table())


_backends: dict[str, Backend] = {}
_lock = threading.Lock()


def register_backend(
    name: str,
    fw_compiler: Compiler,
    bw_compiler: Compiler | None = None,
    inference_compiler: Compiler | None = None,
    *,
    decompositions: Decompositions | None = None,
    description: str = "",
    partition: str | None = None,
    prepare_joint: Callable[[fx.GraphModule], fx.GraphModule] | None = None,
    replace: bool = False,
) -> Backend:
    """Make a backend known by `name`. A compiler that is not given is `fw_compiler`.

    Raises `BackendError` when the name is taken, unless `replace`.
    """
    backend = Backend(
        name,
        fw_compiler,
        bw_compiler or fw_compiler,
        inference_compiler or fw_compiler,
        decompositions,
        description,
        partition,
        prepare_joint,
    )
    for what in ("fw_compiler", "bw_compiler", "inference_compiler"):
        if not callable(getattr(backend, what)):
            raise BackendError(f"backend `{name}`: {what} is {getattr(backend, what)!r}, which can't be called")
    with _lock:
        if name in _backends and not replace:
            raise BackendError(f"there is a backend called `{name}` already; pass replace=True to take its place")
        _backends[name] = backend
    return backend


def get_backend(spec: str | Backend | Compiler | tuple[Compiler, ...]) -> Backend:
    """The backend meant by a name, by a `(forward, backward[, inference])` tuple of compilers, or by one compiler."""
    if isinstance(spec, Backend):
        return spec
    if isinstance(spec, str):
        found = _backends.get(spec)
        if found is None:
            raise BackendError(_unknown(spec))
        return found
    if isinstance(spec, (tuple, list)) and len(spec) in (2, 3) and all(map(callable, spec)):
        forward, backward, inference = (*spec, spec[0])[:3]
        return Backend(f"{_name_of(forward)}+{_name_of(backward)}", forward, backward, inference)
    if callable(spec):
        return Backend(_name_of(spec), spec, spec, spec)
    raise BackendError(
        f"`{spec!r}` is no backend. Give a name ({', '.join(list_backends())}), a compiler, "
        "or a pair of compilers (forward, backward)."
    )


def list_backends() -> list[str]:
    """The names of all registered backends, sorted."""
    return sorted(_backends)


def _unknown(name: str) -> str:
    close = difflib.get_close_matches(name, _backends, n=1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    return f"there is no backend called `{name}`.{hint} Known: {', '.join(list_backends())}."


def _name_of(compiler: Compiler) -> str:
    return str(getattr(compiler, "__name__", None) or type(compiler).__name__)


register_backend("eager", eager_compiler, description="straight-line Python over eager's kernels; bitwise as eager")
register_backend("interpreter", interpreter_compiler, description="node by node, each checked against its meta; slow")
register_backend(
    "inductor",
    inductor.InductorCompiler(),
    decompositions=inductor.decompositions,
    description="PyTorch's kernel compiler: C++ on a CPU, Triton on a GPU",
    partition="min_cut",
    prepare_joint=inductor.prepare_joint,
)
register_backend("auto", eager_compiler, description="the best compiler there is; for now that is `eager`")
register_backend("nop", nop, description="the graph module as it is")
