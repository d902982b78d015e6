"""What extensions and tools stand on: a read-only view of a compiled function, and watchers of the stages.

`view(compiled)` gives the graphs of a compiled function with all that foregrad knows of each: the joint graph, the
halves, inputs, effects, guards, source. A `Watcher` hears of each stage of a compilation as it ends, and may wrap the
callables that compilers return. `register` says that a module from outside the package extends foregrad, so that a
capture does not take the module's code for the program's.

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
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .graph.joint import JointGraph, Partitioned
from .graph.meta import TensorSpec
from .graph.role import GraphRole
from .house import add_to_house as register
from .locks import make_lock

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "CompileStage",
    "EffectView",
    "FunctionView",
    "GraphView",
    "GuardView",
    "TensorView",
    "Watcher",
    "register",
    "view",
    "watching",
]

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

    `kind`: "tensor" for a change of an input or result, "python" for a write to an object of the program, "call" for
    what happens to no single tensor (a setting that stays changed); then `name` is empty.
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

    `compilations` says why each graph was made, `eager` which calls ran eagerly and why, one text each.
    """

    name: str
    graphs: tuple[GraphView, ...]
    compilations: tuple[str, ...]
    eager: tuple[str, ...]


def view(compiled: Any) -> FunctionView:
    """The view of a function or module that `foregrad.compile` or an `aot_` function returned.

    Raises:
        TypeError: `compiled` is not compiled by foregrad.
    """
    make = getattr(getattr(compiled, "foregrad", None), "view", None)
    if make is None:
        raise TypeError(f"foregrad.extend.view takes a function or module compiled by foregrad, not {compiled!r}")
    found: FunctionView = make()
    return found


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

    `joint` is the graph that the stage belongs to. "capture" and "halves" have `tensors`, the real tensors behind
    the inputs, None where an input is a whole memory; "compile" stages have `role` and `compiler`.
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


class Watcher:
    """Hears of the stages of compilations. All methods are optional."""

    def stage(self, stage: CompileStage) -> None:
        """A stage ended."""

    def compiled(self, stage: CompileStage) -> Callable[..., Any]:
        """A "compile" stage ended; the result is used in place of `stage.after`, a callable of one list of values."""
        after: Callable[..., Any] = stage.after
        return after


_watchers: tuple[Watcher, ...] = ()
_lock = make_lock()


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Context: `watcher` hears of the compilations of all threads."""
    global _watchers
    with _lock:
        _watchers += (watcher,)
    try:
        yield
    finally:
        with _lock:
            _watchers = tuple(w for w in _watchers if w is not watcher)


def tell(own: tuple[Watcher, ...], stage: CompileStage) -> None:
    """Tell a pipeline's own watchers, and those of the process, that a stage ended."""
    for watcher in own + _watchers:
        watcher.stage(stage)


def wrapped(own: tuple[Watcher, ...], stage: CompileStage) -> Callable[..., Any]:
    """The callable of a "compile" stage, as the watchers want it used."""
    for watcher in own + _watchers:
        watcher.stage(stage)
        stage = dataclasses.replace(stage, after=watcher.compiled(stage))
    run: Callable[..., Any] = stage.after
    return run
