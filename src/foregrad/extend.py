"""The ground of extensions and tools: a read-only view of a compiled function, watchers of the stages, aspects of
captures.

`view(compiled)` gives the graphs of a compiled function with foregrad's knowledge of each: the joint graph, the halves,
inputs, effects, guards, source. `as_compiled(compiled)` compiles the function for a call that does not run, and
compiles further functions likewise. A `Watcher` is called at the end of each stage of a compilation, and may
wrap the callables that compilers return. An `Aspect` takes part in captures: its class, registered by the decorator
`aspect`, owns torch functions and operators, and adds effects (`CallEffect`) and guards (`CallGuard`) to each call. A
capture does not treat the class's code as the program's; `register` extends this to a whole module. `compiling` and
`phase` add the time of a tool to `foregrad.compile_times`.

Example:
    >>> import torch, foregrad
    >>> f = foregrad.compile(lambda x: x.sin() * 2, backend="eager")
    >>> _ = f(torch.ones(2, requires_grad=True))
    >>> graph = foregrad.extend.view(f).graphs[0]
    >>> [str(place.name) for place in graph.inputs], graph.joint.num_guards()
    (['args[0]'], 0)
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from .graph.call_effects import CallEffect, CallPlace, EffectTarget, EffectWriter, TensorEffect
from .graph.joint import JointGraph, Partitioned
from .graph.meta import TensorSpec
from .graph.role import GraphRole
from .house import add_to_house as register
from .house import is_house_file, is_house_module
from .locks import make_lock
from .phases import compiling, phase

if TYPE_CHECKING:
    from torch import Tensor, fx, nn

    from .tracing.aspect import Aspect, CallGuard, Finished, Settled, aspect

__all__ = [
    "Aspect",
    "CallEffect",
    "CallGuard",
    "CallPlace",
    "CompileStage",
    "CompiledCallable",
    "CompiledFunction",
    "EffectTarget",
    "EffectView",
    "EffectWriter",
    "Finished",
    "FunctionView",
    "GraphView",
    "GuardView",
    "RefusalView",
    "Settled",
    "TensorEffect",
    "TensorView",
    "Watcher",
    "as_compiled",
    "aspect",
    "compiling",
    "is_house_file",
    "is_house_module",
    "module_behind",
    "phase",
    "register",
    "view",
    "watching",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """The names of the seam, loaded when asked for: they need all of `tracing`."""
        if name in ("Aspect", "CallGuard", "Finished", "Settled", "aspect"):
            from .tracing import aspect as seam

            return getattr(seam, name)
        raise AttributeError(f"module `foregrad.extend` has no attribute `{name}`")


# ------------------------------------------------------------------------------------------------ the view


@dataclasses.dataclass(frozen=True, slots=True)
class TensorView:
    """A tensor or number at the edge of a graph.

    `kind` is "argument", "number", "parameter", "buffer", "closed over", "result", "view", "an input" or "constant".
    `spec` has shape, strides, dtype and device, where the place has a tensor of its own; `note` is for people.
    """

    name: str
    kind: str
    spec: TensorSpec | None = None
    requires_grad: bool = False
    has_gradient: bool = False
    note: str = ""

    @property
    def is_argument(self) -> bool:
        """Whether the caller hands the value over; otherwise the function reaches it by itself."""
        return self.kind in ("argument", "number")


@dataclasses.dataclass(frozen=True, slots=True)
class EffectView:
    """A change that a call leaves besides its results: `what` happens to `name`.

    `kind`: "tensor" for a change of an input or result, "python" for a write to an object of the program, "call" for an
    event on no single tensor (a setting that stays changed); then `name` is empty.
    """

    kind: str
    name: str
    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class GuardView:
    """A condition on a call, for the graph to be used: `name` is `expected`.

    `kind` says where the call looks: "argument", "size", "value", "parameter", "buffer", "closed over", "setting" or
    "read".
    """

    kind: str
    name: str
    expected: str


@dataclasses.dataclass(frozen=True, slots=True)
class GraphView:
    """One compiled graph. The graphs are foregrad's own, not copies: read them, change nothing.

    `aliases` are the results that share memory with an input, and inputs that share memory with each other.
    """

    joint: JointGraph
    halves: Partitioned
    inputs: tuple[TensorView, ...]
    outputs: tuple[TensorView, ...]
    effects: tuple[EffectView, ...]
    aliases: tuple[EffectView, ...]
    guards: tuple[GuardView, ...]
    source: str


@dataclasses.dataclass(frozen=True, slots=True)
class FunctionView:
    """A compiled function: its graphs so far, the oldest first.

    `compilations` has the reason for each graph, `eager` the eager calls with reasons, one text each. `compiler` takes
    the forwards, `partition` splits, `decompositions` is a table, or a function that gives a table.
    """

    name: str
    graphs: tuple[GraphView, ...]
    compilations: tuple[str, ...]
    eager: tuple[str, ...]
    compiler: Callable[..., Any]
    partition: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
    decompositions: Mapping[Any, Callable[..., Any]] | Callable[[], Mapping[Any, Callable[..., Any]]] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class RefusalView:
    """Why a call can't be compiled: the cause, the one `change` that would help ("" if none is known), the line."""

    why: str
    change: str
    line: str


class CompiledFunction(Protocol):
    """A compiled function, for tools: it compiles further calls and functions with the settings of its own."""

    name: str
    function: Callable[..., Any]  # the original

    def __call__(self, *args: object, **kwargs: object) -> Any: ...

    @property
    def specializations(self) -> Sequence[Any]:
        """The graphs so far, with their guards: `source()` of each is the Python of a call."""

    def view(self) -> FunctionView:
        """See `foregrad.extend.view`."""

    def graph_for(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> GraphView:
        """Compile for a call, without running it; equal calls use the graph. Raises the capture's error: an
        `EscapedTensorError` where the call is to run eagerly first, since it fills a cache.
        """

    def refusal(self, error: BaseException, name: str = "") -> RefusalView:
        """The reason, remedy and line of an error from `graph_for`. `name`: the function's name there."""

    def split(self, joint: JointGraph, partition: Callable[..., object]) -> Partitioned:
        """Split a graph by a further partition, after the backend's own passes."""

    def like(
        self,
        function: object,
        name: str = "",
        *,
        on_unsupported: str,
        watcher: Watcher | None = None,
        cached: bool = True,
    ) -> CompiledFunction:
        """A further function or module, compiled likewise, for its arguments' own sizes. `on_unsupported`: as in
        `compile`. `cached`: the cache on disk may be used.
        """


_P = ParamSpec("_P")
_Q = ParamSpec("_Q")
_R_co = TypeVar("_R_co", covariant=True)


class CompiledCallable(Protocol[_P, _R_co]):
    """The type of a function from `foregrad.compile`: it has the original's parameters and result."""

    foregrad: CompiledFunction

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...

    @overload
    def __get__(self, instance: None, owner: type, /) -> CompiledCallable[_P, _R_co]: ...
    @overload
    def __get__(
        self: CompiledCallable[Concatenate[Any, _Q], _R_co], instance: object, owner: type, /
    ) -> Callable[_Q, _R_co]: ...


def as_compiled(value: object) -> CompiledFunction | None:
    """The `CompiledFunction` behind a function or module that foregrad compiled; None for any other value."""
    found: CompiledFunction | None = getattr(value, "foregrad", None)
    return found if hasattr(found, "graph_for") else None


def view(compiled: object) -> FunctionView:
    """The view of a function or module that `foregrad.compile` or an `aot_` function returned.

    Raises:
        TypeError: `compiled` is not compiled by foregrad.
    """
    found = as_compiled(compiled)
    if found is None:
        raise TypeError(f"foregrad.extend.view takes a function or module compiled by foregrad, not {compiled!r}")
    return found.view()


def module_behind(value: object) -> nn.Module | None:
    """The original module of a compiled module; None for any other value."""
    found: nn.Module | None = getattr(type(value), MODULE_BEHIND, lambda _: None)(value)
    return found


MODULE_BEHIND = "_foregrad_module"


# ------------------------------------------------------------------------------------------------ watchers


@dataclasses.dataclass(frozen=True, slots=True)
class CompileStage:
    """One stage of a compilation that ended.

    | `name` | `before` | `after` |
    |---|---|---|
    | capture | the function's arguments, flat | `JointGraph` |
    | prepare | `fx.GraphModule` | the module after the backend's own passes |
    | partition | `JointGraph` | `Partitioned` |
    | halves | `Partitioned` | the halves as compiled, with what further derivatives read |
    | compile forward, compile backward, compile inference | `fx.GraphModule` | the callable |
    | guards | `JointGraph` | the source of the rendered call |

    `joint` is the graph that the stage belongs to. "capture" and "halves" have `tensors`, the real tensors behind the
    inputs, None where an input is a whole memory. `compiler` made `after`: a compiler, the backend's own passes, a
    partition. "compile" stages have `role`, and `again`, which compiles a part of the graph by itself.
    """

    name: str
    function: str
    before: Any
    after: Any
    seconds: float
    joint: JointGraph
    tensors: Sequence[Tensor | None] = ()
    role: GraphRole | None = None
    compiler: Callable[..., Any] | None = None
    again: Callable[[fx.GraphModule], Callable[[list[Any]], object]] | None = None


class Watcher:
    """foregrad calls its methods when a stage of a compilation ends. All methods are optional."""

    def stage(self, stage: CompileStage) -> None:
        """A stage ended."""

    def compiled(self, stage: CompileStage) -> Callable[..., Any]:
        """A "compile" stage ended; the result is used in place of `stage.after`, a callable of one list of values."""
        after: Callable[..., object] = stage.after
        return after


_watchers: tuple[Watcher, ...] = ()
_lock = make_lock()


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Context: foregrad calls `watcher` for the compilations of all threads."""
    global _watchers
    with _lock:
        _watchers += (watcher,)
    try:
        yield
    finally:
        with _lock:
            _watchers = tuple(w for w in _watchers if w is not watcher)


def tell(own: tuple[Watcher, ...], stage: CompileStage) -> None:
    """Tell the watchers of a pipeline and of the process that a stage ended."""
    for watcher in own + _watchers:
        watcher.stage(stage)


def wrapped(own: tuple[Watcher, ...], stage: CompileStage) -> Callable[..., Any]:
    """The callable of a "compile" stage, as the watchers want it used."""
    for watcher in own + _watchers:
        watcher.stage(stage)
        stage = dataclasses.replace(stage, after=watcher.compiled(stage))
    run: Callable[..., Any] = stage.after
    return run
