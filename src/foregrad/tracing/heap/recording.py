"""The recorder's services for the parts of a capture.

The recorder hands itself to its parts in the rooms below its own; they know no more than the protocol here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from ..._torch.fakes import FakeTensorMode
from ..._torch.ops import Args, Kwargs
from ..._torch.patches import Hooks
from ...graph.meta import TensorSpec
from ...identity import ById, IdSet
from ..tape.origin import Made, Origins
from ..tape.tape import Entry, Learned, Tape
from .alias import Value

if TYPE_CHECKING:
    from ...frontend.answers import PlacesRead, StateOfRun

Context = contextlib.AbstractContextManager[None]
Watch = Callable[[object, Sequence[Entry]], None]


class Host(Hooks):
    """The questions of a recorder, the mode of stand-ins and the patches to their capture or derivative.

    `name`: the function's. `written`: inputs that its backward is known to write. `learned`: the facts from earlier
    runs of the capture.
    """

    name: str
    takes_output = False  # output is an effect, and not written now
    keeps_branches = False  # `torch.cond` is one operator of the graph
    call: Any = None  # the `FlatCall` that is captured
    written: IdSet[torch.Tensor]
    learned: Learned | None = None
    lifting: Any  # the mode of stand-ins
    state: StateOfRun
    reads: PlacesRead
    pause: Callable[[], None] = staticmethod(lambda: None)
    """Code that runs until `go_on` is not the program's, and is not observed."""
    go_on: Callable[[], None] = staticmethod(lambda: None)
    """The end of `pause`."""
    accumulating: Callable[[Sequence[object]], Context] = staticmethod(lambda roots: contextlib.nullcontext())
    """The context for adding gradients of these roots to `.grad`."""
    looks_up: Callable[[], None] = staticmethod(lambda: None)
    """The function looks for a tensor in a set or among keys: one that it reaches, or an argument."""
    past_the_edges: Callable[[Value], None] = staticmethod(lambda root: None)
    """A write leaves the input that a root is."""
    real_of: Callable[[torch.Tensor], torch.Tensor | None] = staticmethod(lambda tensor: None)
    """The input that a tensor stands for; None where it stands for none."""
    on_hook: Callable[[torch.Tensor, object, object], None] = staticmethod(lambda tensor, hook, handle: None)
    """A hook was registered on a tensor: the hook, and its handle."""
    hook_instead: Callable[[object], object] = staticmethod(lambda hook: hook)
    """The substitute that is registered for a hook."""
    on_numpy: Callable[[object], None] = staticmethod(lambda cls: None)
    """A custom Function hands a tensor to NumPy."""
    ask: Callable[[object, Args, Kwargs], Any] = staticmethod(lambda func, args, kwargs: NotImplemented)
    """The answer to a question of the program about a tensor; NotImplemented: PyTorch answers."""

    def knows(self, value: object) -> bool:
        """Whether an object is older than the call, and one object in all calls."""
        raise NotImplementedError

    def met(self, value: object) -> bool:
        """Whether an object is older than the run: also an argument's object, though callers may change it."""
        raise NotImplementedError

    def varies(self, value: object) -> bool:
        """Whether an object is an argument or an argument's item: a different object in each call."""
        raise NotImplementedError

    def gives_back(self, value: object) -> bool:
        """Whether the run made an object and returned it, or left it in an object from outside."""
        raise NotImplementedError

    def changed_since(self) -> Callable[[], str | None]:
        """A function that names the first action from now on that a second run would make again: a write to an input or
        to Python's state, a draw. It gives None without such an action.
        """
        raise NotImplementedError

    def adopt(self, real: torch.Tensor) -> torch.Tensor:
        """The stand-in for a real tensor that the function brought in by itself."""
        raise NotImplementedError

    def where(self) -> str:
        """The user's line."""
        raise NotImplementedError

    def swap(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Args, Kwargs]:
        swapped: tuple[tuple[object, ...], dict[str, object]] = self.lifting.swap(args, kwargs)
        return swapped

    def engine(self, roots: Sequence[object] | None) -> Context:
        context: Context = self.lifting.in_engine(roots)
        return context

    def on_missing(self, root: Value, where: str) -> None:
        """A backward writes to an input that it was not known to write."""


class OpaqueTensors(Protocol):
    """The aspect that owns a recorder's tensors without a known memory."""

    def run(self, func: object, args: Args, kwargs: Kwargs) -> Any:
        """An operator's result for a tensor of the kind among its arguments; `NotImplemented` where there is none."""

    def refused(self) -> Exception:
        """The error for a use of the tensor that no graph holds."""


class Recording(Protocol):
    """See `Recorder`, the only implementation."""

    host: Host
    fake_mode: FakeTensorMode
    origins: Origins
    tape: Tape
    values: ById[torch.Tensor, Value]
    phases: dict[int, torch.Tensor]
    in_backward: bool
    is_symbolic: bool
    has_absent: bool  # some tensor stands for a tangent that is not there
    recompute: Any
    # Further parts of the recorder.
    changes: Any
    writes: Any
    checks: Any
    decisions: Any
    borrowed: list[tuple[torch.Tensor, Value]]
    late: Any
    opaque: ById[torch.Tensor, Entry]
    opaque_owner: OpaqueTensors | None

    def __enter__(self) -> Any: ...

    def __exit__(self, *raised: Any) -> Any: ...

    def watched(self, watch: Watch) -> contextlib.AbstractContextManager[None]: ...

    def in_region(self, tag: object) -> contextlib.AbstractContextManager[None]: ...

    def entry(self, target: object, args: Args, kwargs: Kwargs, is_random: bool) -> Entry: ...

    def emit(self, target: object, *args: object, kwargs: Kwargs | None = None, spec: Any = None) -> Entry: ...

    def made(self) -> Made: ...

    def where(self) -> str: ...

    def to_entries(self, value: object) -> Any: ...

    def tensor_entry(self, value: object) -> Entry: ...

    def value_of(self, tensor: torch.Tensor) -> Value: ...

    def constant(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def contents(self, tensor: torch.Tensor) -> torch.Tensor: ...

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec: ...

    def specs_of(self, out: object) -> Any: ...

    def fake_of(self, spec: TensorSpec) -> torch.Tensor: ...

    def pure(self, plan: Any, args: Args, kwargs: Kwargs) -> Any: ...

    def kernels(self, func: object, args: tuple[object, ...], kwargs: dict[str, object]) -> Any: ...

    def run_fake(self, func: object, args: Args, kwargs: Kwargs) -> Any: ...
