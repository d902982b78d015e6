"""Backends by name, foregrad's own included: compilers for halves of a joint graph, with decompositions.

A name is a registered one, one of an installed package's entry points in the group `foregrad.backends`, or a family's
name with an argument, as `torch:openxla` (any backend of torch.compile's) and `crash-on:aten.mm`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..annexes import given
from ..errors import BackendError, did_you_mean
from ..graph.joint import Partitioned
from ..locks import make_lock
from .boxed import nop
from .eager import eager_compiler

Compiler = Callable[..., Any]
Decompositions = Mapping[Any, Callable[..., Any]] | Callable[[], Mapping[Any, Callable[..., Any]]]
GROUP = "foregrad.backends"


@dataclasses.dataclass(frozen=True, slots=True)
class Backend:
    """A compiler for each kind of graph: `(graph module, example inputs) -> callable`.

    * `decompositions`: functions that replace operators during capture, by operator; or a function that returns this
      table, if the table is slow to import. None: the graph as captured.
    * `partition`: the name of the partition, unless the user names one.
    * `prepare_joint`: returns a changed copy of a joint graph before the split; `prepare_halves`: of both halves after.
    * `with_settings`: returns the backend with other settings of its compiler; `budget_settings`: the settings under a
      memory budget, unless the user sets others.
    * `cache_key`: returns, as JSON, the versions and settings behind results. None, or no key: nothing is kept.
    * `keeps_order`: operators run one by one in the graph's order, so a budget may run random operators again.
    * `first`: the backend whose graphs serve calls while this backend compiles elsewhere.
    * `why_not`: of devices, the reason why the backend can't compile for them here; None if it can.
    """

    name: str
    fw_compiler: Compiler
    bw_compiler: Compiler
    inference_compiler: Compiler
    decompositions: Decompositions | None = None
    description: str = ""
    partition: str | None = None
    prepare_joint: Callable[[fx.GraphModule], fx.GraphModule] | None = None
    with_settings: Callable[[Mapping[str, Any]], Backend] | None = None
    prepare_halves: Callable[[Partitioned], Partitioned] | None = None
    cache_key: Callable[[], object] | None = None
    keeps_order: bool = False
    budget_settings: Mapping[str, object] = dataclasses.field(default_factory=dict)
    first: Backend | None = None
    why_not: Callable[[Sequence[torch.device]], str | None] | None = None

    def decomposition_table(self) -> dict[object, Callable[..., object]]:
        """The decompositions as a new dict, loaded if they are late."""
        table = self.decompositions
        if table is None:
            return {}
        return dict(table if isinstance(table, Mapping) else table())


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """Backends made on demand: `make(argument)`. `argument`, its name in lists, is None for a family without one, as
    `auto`. Annexes give families: `BACKENDS`, by name.
    """

    make: Callable[..., Backend]
    argument: str | None
    description: str


_backends: dict[str, Backend] = {}
_lock = make_lock()


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
    cache_key: Callable[[], object] | None = None,
    keeps_order: bool = False,
    replace: bool = False,
) -> Backend:
    """Register a backend under `name`. Compilers left out default to `fw_compiler`; for the rest see `Backend`.

    Raises `BackendError` if the name is taken, unless `replace`, and for a compiler that can't be called.

    Examples:
        >>> import torch, foregrad
        >>> backend = foregrad.register_backend("as-it-is", foregrad.nop, description="the graph", replace=True)
        >>> foregrad.compile(lambda x: x * 2, backend="as-it-is")(torch.ones(2))
        tensor([2., 2.])
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
        cache_key=cache_key,
        keeps_order=keeps_order,
    )
    for what in ("fw_compiler", "bw_compiler", "inference_compiler"):
        if not callable(getattr(backend, what)):
            raise BackendError(f"backend `{name}`: {what} is {getattr(backend, what)!r}: it can't be called")
    with _lock:
        if not replace and (name in _backends or name in _families()):
            raise BackendError(f"there is a backend called `{name}` already; pass replace=True to replace it")
        _backends[name] = backend
    return backend


def get_backend(spec: str | Backend | Compiler | tuple[Compiler, ...]) -> Backend:
    """The backend for a name, for a `(forward, backward[, inference])` tuple of compilers, or for one compiler.

    Examples:
        >>> import foregrad
        >>> foregrad.get_backend("eager").name
        'eager'
    """
    if isinstance(spec, Backend):
        return spec
    if isinstance(spec, str):
        return _by_name(spec)
    if isinstance(spec, (tuple, list)) and len(spec) in (2, 3) and all(map(callable, spec)):
        forward, backward, inference = (*spec, spec[0])[:3]
        return Backend(f"{_name_of(forward)}+{_name_of(backward)}", forward, backward, inference)
    if callable(spec):
        return Backend(_name_of(spec), spec, spec, spec)
    raise BackendError(
        f"`{spec!r}` is no backend. Give a name ({', '.join(list_backends())}), a compiler, "
        "or a pair of compilers (forward, backward)."
    )


def _by_name(name: str) -> Backend:
    registered = _backends.get(name)
    if registered is not None:
        return registered
    head, colon, argument = name.partition(":")
    family = _families().get(head)
    if family is not None and (family.argument is None) == (not colon) and (argument or not colon):
        return family.make(argument) if colon else family.make()
    if name in _entry_points():
        return _loaded(name)
    raise BackendError(_unknown(name))


def list_backends() -> list[str]:
    """The names of all backends, sorted: registered ones, entry points, and families as `torch:<name>`.

    Examples:
        >>> import foregrad
        >>> {"auto", "eager", "inductor"} <= set(foregrad.list_backends())
        True
    """
    families = {name if f.argument is None else f"{name}:<{f.argument}>" for name, f in _families().items()}
    return sorted({*_backends, *families, *_entry_points()})


def backend_help() -> dict[str, str]:
    """A line of description for each of `list_backends()`."""
    described = {name: backend.description for name, backend in _backends.items()}
    for name, family in _families().items():
        described[name if family.argument is None else f"{name}:<{family.argument}>"] = family.description
    for name, entry in _entry_points().items():
        described.setdefault(name, f"from {entry.value}")
    return dict(sorted(described.items()))


@functools.cache
def _families() -> dict[str, Family]:
    """The families, each of its annex; without one that compiles, "auto" is eager."""
    found = {"auto": Family(lambda: get_backend("eager"), None, "the eager backend")}
    for families in given("backends"):
        found |= families
    return found


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    return {entry.name: entry for entry in importlib.metadata.entry_points(group=GROUP)}


def _loaded(name: str) -> Backend:
    """Load an entry point: a `Backend`, or an argument of `get_backend` other than a name."""
    entry = _entry_points()[name]
    try:
        value = entry.load()
    except Exception as error:
        raise BackendError(f"the backend `{name}` ({entry.value}) can't be loaded: {error}") from error
    if isinstance(value, str):
        raise BackendError(f"the backend `{name}` ({entry.value}) is a string; a Backend or compilers were expected")
    backend = dataclasses.replace(get_backend(value), name=name)
    with _lock:
        return _backends.setdefault(name, backend)


def _unknown(name: str) -> str:
    names = list_backends()
    head, colon, _ = name.partition(":")
    hint = did_you_mean(name, names) or did_you_mean(head, _families())
    if head in _families() and not colon:
        hint = f" It takes a name: `{head}:<{_families()[head].argument}>`."
    return f"there is no backend called `{name}`.{hint} Known: {', '.join(names)}."


def _name_of(compiler: Compiler) -> str:
    return str(getattr(compiler, "__name__", None) or type(compiler).__name__)


# ------------------------------------------------------------------------------------ backends without an annex

register_backend(
    "eager",
    eager_compiler,
    description="straight-line Python over eager's kernels; bitwise as eager",
    cache_key=dict,  # nothing but the graph
    keeps_order=True,
    replace=True,  # asks for no families
)
register_backend("nop", nop, description="the graph module as it is", keeps_order=True, replace=True)
