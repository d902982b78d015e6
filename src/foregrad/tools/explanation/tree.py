"""`Findings`: the results of `foregrad.explain`, as one tree of frozen values.

Sizes are in bytes and times in seconds; None was not measured. `to_json()` has equal names.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """A tensor at the edge of the graph: an input, an output, a parameter. `note`: a remark for people."""

    name: str
    kind: str
    type: str
    nbytes: int
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Fact:
    """Something that a call does besides computing results: `what` happens to `name`."""

    name: str
    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class FoundGuard:
    """A condition on a call, for the graph to be used: `name` is `expected`. `kind` says where it is looked at."""

    kind: str
    name: str
    expected: str


@dataclasses.dataclass(frozen=True, slots=True)
class CapturedProgram:
    """A captured program.

    `mutated`: tensors and Python objects that a call writes to; `aliased`: results that share memory with inputs or
    results; `outside`: tensors that the function reaches by itself; `unused`: parameters without a gradient.
    """

    inputs: tuple[Place, ...]
    outputs: tuple[Place, ...]
    outside: tuple[Place, ...]
    mutated: tuple[Fact, ...]
    aliased: tuple[Fact, ...]
    unused: tuple[str, ...]
    guards: tuple[FoundGuard, ...]
    has_backward: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Operator:
    """A node of the forward or the backward graph, in the order they run.

    `key`: its name, after "f:" or "b:". `role`: "input", "tangent", "view", "operator", "saved" (kept for the backward)
    or "again" (of the forward, run once more in the backward). `module`: the number of the module that ran it, `line`
    the user's line's, `sequence` the autograd node's. `nbytes` is the size of its result, `moved` the bytes read and
    written, `alive` the memory in use while it runs. `reads`: keys of its operands; `view_of`: the key of the operand
    that its result is a view of, or "".
    """

    key: str
    op: str
    half: str
    role: str
    module: int
    line: int
    type: str
    nbytes: int
    moved: int
    flops: int
    alive: int
    sequence: int
    view_of: str
    reads: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class SavedTensor:
    """A value that the forward keeps for the backward.

    `variable`: its name in the user's line. `kind`: "saved", "output" (the caller has it), "input" (there before),
    "offloaded" or "number"; `nbytes` counts shared memory once. `readers`: the backward's operators that read it;
    `why`: these in words. `born` and `dies`: its first and last step in `Memory.alive`. `label`: the value for people,
    by its variable and module: `layers.0.mlp output (addmm)`.
    """

    name: str
    variable: str
    op: str
    type: str
    nbytes: int
    kind: str
    module: str
    line: str
    why: str
    readers: tuple[str, ...]
    born: int
    dies: int
    label: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Again:
    """An operator of the forward that the backward runs once more; `cost` is a share of the step's work."""

    name: str
    op: str
    module: str
    line: str
    flops: int
    cost: float


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Bytes beyond those alive before the call.

    `alive`: while each operator runs, the forward's first, of which there are `forward_steps`. `predicted_*` come from
    the graphs, `measured_*` from the allocator and from autograd's memory between forward and backward; `eager_*` are
    measured without foregrad.
    """

    predicted_peak: int
    peak_at: str
    predicted_saved: int
    saved: tuple[SavedTensor, ...]
    again: tuple[Again, ...]
    alive: tuple[int, ...]
    forward_steps: int
    measured_peak: int | None = None
    measured_saved: int | None = None
    eager_peak: int | None = None
    eager_saved: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations and bytes moved by one call, if each operator reads and writes memory.

    `known_flops`: of the operators that `torch.utils.flop_counter` knows: its count in eager mode. `again_flops` are of
    operators that run twice.
    """

    forward_flops: int
    backward_flops: int
    known_flops: int
    again_flops: int
    forward_moved: int
    backward_moved: int
    forward_operators: int
    backward_operators: int

    @property
    def flops(self) -> int:
        return self.forward_flops + self.backward_flops

    @property
    def moved(self) -> int:
        return self.forward_moved + self.backward_moved


@dataclasses.dataclass(frozen=True, slots=True)
class Time:
    """Seconds of a step, forward and backward: the least of `rounds` that ran in turns; `compile_s`: until the first
    call's result.
    """

    eager_s: float
    compiled_s: float
    compile_s: float
    rounds: int


@dataclasses.dataclass(frozen=True, slots=True)
class EagerPart:
    """Something that runs eagerly: a module or function, or a graph break of Dynamo's.

    `reason`: why it can't be compiled; `change`: the one change that would compile it. `seconds`: the time of a call.
    """

    name: str
    reason: str
    change: str = ""
    line: str = ""
    calls: int = 1
    seconds: float | None = None
    kind: str = "eager"


@dataclasses.dataclass(frozen=True, slots=True)
class Advice:
    """A change that was tried, and its outcome. `change`: as Python, where it is an argument."""

    text: str
    change: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class PrintedGraph:
    """A printed graph; `keys`: the operator that each line computes, or ""."""

    title: str
    lines: tuple[str, ...]
    keys: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Findings:
    """All findings. `not_measured`: why nothing was run, or "". `modules`: the (path, class) of each module that ran,
    by the numbers in `operators`; `lines`: the user's lines. `module_seconds`: by path, the time of each module's
    forward in eager mode, inner modules included. `operator_seconds`: the operators of an eager step, the longest
    first: name, calls, seconds.
    """

    name: str
    backend: str
    partition: str
    program: CapturedProgram | None = None
    memory: Memory | None = None
    work: Work | None = None
    time: Time | None = None
    compilations: tuple[str, ...] = ()
    eager: tuple[EagerPart, ...] = ()
    advice: tuple[Advice, ...] = ()
    not_measured: str = ""
    modules: tuple[tuple[str, str], ...] = ()
    lines: tuple[str, ...] = ()
    operators: tuple[Operator, ...] = ()
    sources: tuple[PrintedGraph, ...] = ()
    versions: str = ""
    module_seconds: tuple[tuple[str, float], ...] = ()
    operator_seconds: tuple[tuple[str, int, float], ...] = ()
