"""One specialization of an artifact: graphs, signature, derivatives and guards, as data and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..._torch.fakes import FakeTensorMode
from ..._torch.guards import current_device, is_inference
from ..._torch.hooks import UNHOOKED, gradient_hooks
from ..._torch.symbols import SymbolTable
from ...dispatch.guard_list import Sharing
from ...errors import ArtifactError
from ...frontend.tree import Tree
from ...graph.joint import JointGraph, Partitioned
from ...graph.signature import Signature
from ...tracing.derivatives.resumable_trace import ValueRef
from .._torch import restored_table, table_to
from ..serialize.graphs import graph_from, graph_to
from ..serialize.values import Reader, Writer, checked
from .records import record_from, record_to, tree_from, tree_to
from .validate import check_derivative, check_partitioned

_DEEPEST = 8  # orders of derivatives
_OPTIONAL = {"backward_error", "failing", "raising", "derived"}  # of a program, left out if empty
_ERRORS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        RuntimeError,
        ValueError,
        TypeError,
        IndexError,
        KeyError,
        NotImplementedError,
        AssertionError,
        ArithmeticError,
    )
}


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of a call's arguments: a tensor, an earlier leaf once more (`same_as`), or a plain `value`."""

    path: str
    is_tensor: bool = False
    same_as: int | None = None
    value: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class CallSpec:
    """The arguments of a specialization: the structure of (args, kwargs), and a description of each leaf."""

    tree: Tree
    leaves: tuple[Leaf, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class DerivedProgram:
    """The backward as a function of its own, for one pattern of tangents: see `resumable_trace.Derivative`."""

    pattern: tuple[int, ...]
    feeds: tuple[ValueRef, ...]
    gradients: tuple[ValueRef | None, ...]
    program: Program


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A function's graphs: joint, forward and backward, and the graphs of its derivatives."""

    partitioned: Partitioned
    derived: tuple[DerivedProgram, ...] = ()

    @property
    def joint(self) -> JointGraph:
        return self.partitioned.joint

    def order(self) -> int:
        """The number of times that the program can be differentiated."""
        if self.joint.signature.is_inference:
            return 0
        return 1 + max((derived.program.order() for derived in self.derived), default=0)


@dataclasses.dataclass(frozen=True, slots=True)
class StoredSpecialization:
    """A program with the conditions on its calls.

    `context`: settings of the thread and the library, by name. `training`: the module's mode, None for a function.
    `facts`: (input, question, attribute, answer), see `tracing.effects.attribute_guards`.
    """

    name: str
    program: Program
    call: CallSpec
    context: Mapping[str, Any]
    training: bool | None
    facts: tuple[tuple[int, str, str | None, Any], ...] = ()
    sharing: Sharing | None = None

    @property
    def joint(self) -> JointGraph:
        """Forward and backward in one graph."""
        return self.program.joint

    @property
    def forward(self) -> torch.fx.GraphModule:
        """The forward half."""
        return self.program.partitioned.forward

    @property
    def backward(self) -> torch.fx.GraphModule:
        """The backward half."""
        return self.program.partitioned.backward

    @property
    def signature(self) -> Signature:
        return self.joint.signature

    def written(self) -> list[int]:
        """The inputs that a call or its backward writes to."""
        s = self.signature
        written = {update.input for update in s.updates} | s.reshaped | s.swapped | {*s.backward.live}
        return sorted(written)

    def __str__(self) -> str:
        return str(self.joint)


# ------------------------------------------------------------------------------------------------------ writing


def specialization_to(specialization: StoredSpecialization, constant: Callable[[Any], str]) -> dict[str, Any]:
    """The specialization as data; `constant` names a constant tensor of its graphs. Raises `ArtifactError`."""
    writer, joint = Writer(), specialization.joint
    try:
        table = table_to(joint.symbols) if joint.symbols is not None else None
    except ValueError as error:
        raise ArtifactError(f"an artifact can't hold `{joint.name}`: {error}") from None
    leaves = [
        {"path": leaf.path}
        | ({"tensor": True} if leaf.is_tensor else {"value": writer.value(leaf.value)} if leaf.same_as is None else {})
        | ({} if leaf.same_as is None else {"same_as": leaf.same_as})
        for leaf in specialization.call.leaves
    ]
    data: dict[str, Any] = {
        "name": specialization.name,
        "symbols": table,
        "call": {"tree": tree_to(specialization.call.tree, writer, "its arguments"), "leaves": leaves},
        "context": {name: writer.value(value) for name, value in sorted(specialization.context.items())},
        "training": specialization.training,
        "facts": [[i, question, name, writer.value(value)] for i, question, name, value in specialization.facts],
        "program": _program_to(specialization.program, writer, constant),
    }
    if specialization.sharing is not None:
        data["sharing"] = dataclasses.asdict(specialization.sharing)
    return data | {"tables": writer.tables()}


def _program_to(program: Program, writer: Writer, constant: Callable[[Any], str]) -> dict[str, Any]:
    joint, partitioned = program.joint, program.partitioned
    data = {
        "name": joint.name,
        "signature": record_to(joint.signature, writer),
        "joint": graph_to(joint.module, writer, constant),
        "forward": graph_to(partitioned.forward, writer, constant),
        "backward": graph_to(partitioned.backward, writer, constant),
        "backward_error": _error_to(joint.backward_error),
        "failing": [[position, _error_to(error)] for position, error in sorted(joint.failing.items())],
        "raising": [[number, _error_to(error)] for number, error in sorted(joint.raising.items())],
        "derived": [
            {
                "pattern": list(derived.pattern),
                "feeds": [record_to(place, writer) for place in derived.feeds],
                "gradients": [record_to(place, writer) for place in derived.gradients],
                "program": _program_to(derived.program, writer, constant),
            }
            for derived in program.derived
        ],
    }
    return {key: value for key, value in data.items() if key not in _OPTIONAL or value}


def _error_to(error: Exception | None) -> Any:
    if error is None:
        return None
    name = next(cls.__name__ for cls in type(error).__mro__ if cls.__name__ in _ERRORS or cls is Exception)
    return {"class": name if name in _ERRORS else "RuntimeError", "text": str(error)}


# ------------------------------------------------------------------------------------------------------ reading


def specialization_from(data: Any, constants: Mapping[str, torch.Tensor]) -> StoredSpecialization:
    """The specialization from the data of `specialization_to`. Raises `ArtifactError` for any other data."""
    table: SymbolTable | None = None
    symbols: Mapping[str, Any] = {}
    if data["symbols"] is not None:
        table, symbols = restored_table(data["symbols"])
    mode = FakeTensorMode(shape_env=None if table is None else table.env)
    mode.cache_enabled = False
    reader = Reader(data["tables"], table, symbols)
    call = CallSpec(
        tree_from(data["call"]["tree"], reader), tuple(_leaf(item, reader) for item in data["call"]["leaves"])
    )
    program = _program_from(data["program"], reader, constants, mode, 0)
    training = data["training"]
    if training is not None:
        checked(training, bool)
    facts = tuple(
        (checked(i, int), checked(question, str), None if name is None else checked(name, str), reader.value(value))
        for i, question, name, value in data["facts"]
    )
    context = {checked(name, str): reader.value(value) for name, value in data["context"].items()}
    sharing = _sharing(data.get("sharing"), len(program.joint.signature.inputs), reader)
    specialization = StoredSpecialization(checked(data["name"], str), program, call, context, training, facts, sharing)
    _check_call(call.tree, call.leaves, facts, program.joint)
    return specialization


def _sharing(data: Any, count: int, reader: Reader) -> Sharing | None:
    """The relations of memory between `count` inputs."""
    if data is None:
        return None
    sharing: Sharing = record_from(data | {"is": "Sharing"}, Sharing, reader)
    if len(sharing.memories) != count or not all(0 <= n < count for n in sharing.memories if n is not None):
        raise ArtifactError("memories for another number of inputs")
    if not all(0 <= i < count for i in (*sharing.roots, *(i for pair in sharing.counters for i in pair[:2]))):
        raise ArtifactError("relations of inputs that do not exist")
    return sharing


def _leaf(data: Any, reader: Reader) -> Leaf:
    same = data.get("same_as")
    return Leaf(
        checked(data["path"], str),
        checked(data.get("tensor", False), bool),
        None if same is None else checked(same, int),
        reader.value(data.get("value")),
    )


def _program_from(
    data: Any, reader: Reader, constants: Mapping[str, torch.Tensor], mode: FakeTensorMode, depth: int
) -> Program:
    if depth > _DEEPEST:
        raise ArtifactError("derivatives of too high an order")
    signature = record_from(data["signature"], Signature, reader)
    modules = {
        part: graph_from(data[part], reader, constants, mode, name)
        for part, name in (("joint", "JointGraph"), ("forward", "Forward"), ("backward", "Backward"))
    }
    joint = JointGraph(
        checked(data["name"], str),
        modules["joint"],
        signature,
        mode,
        _error_from(data.get("backward_error")),
        reader.table,
        {checked(position, int): _error_from(error) for position, error in data.get("failing", ())},  # type: ignore[misc]
        {checked(number, int): _error_from(error) for number, error in data.get("raising", ())},  # type: ignore[misc]
    )
    partitioned = Partitioned(joint, modules["forward"], modules["backward"])
    check_partitioned(partitioned)
    derived = []
    for entry in checked(data.get("derived", []), list):
        inner = _program_from(entry["program"], reader, constants, mode, depth + 1)
        pattern = tuple(checked(kind, int) for kind in checked(entry["pattern"], list))
        feeds = tuple(record_from(place, ValueRef, reader) for place in entry["feeds"])
        gradients = tuple(
            None if place is None else record_from(place, ValueRef, reader) for place in entry["gradients"]
        )
        program = DerivedProgram(pattern, feeds, gradients, inner)
        check_derivative(partitioned, pattern, feeds, gradients, inner.joint)
        derived.append(program)
    return Program(partitioned, tuple(derived))


def _error_from(data: Any) -> Exception | None:
    if data is None:
        return None
    return _ERRORS[data["class"]](checked(data["text"], str))


def _check_call(tree: Any, leaves: Sequence[Leaf], facts: Sequence[Any], joint: JointGraph) -> None:
    """Raise `ArtifactError` unless the leaves of a call match the inputs of the signature."""
    if tree.kind != "tuple" or len(tree.children) != 2 or tree.size != len(leaves):
        raise ArtifactError("a call whose arguments are not told apart")
    positional, keyword = tree.children
    if positional.kind != "tuple" or keyword.kind != "dict" or not all(type(k) is str for k in keyword.context):
        raise ArtifactError("a call whose arguments are not told apart")
    inputs = joint.signature.inputs
    for position, leaf in enumerate(leaves):
        if leaf.same_as is not None and not 0 <= leaf.same_as < position:
            raise ArtifactError("an argument that is the same as a later one")
    for info in inputs:
        argument = info.argument
        if argument is not None and (not 0 <= argument < len(leaves) or not leaves[argument].is_tensor):
            raise ArtifactError("an input without an argument")
    for number, question, _, value in facts:
        if type(number) is not int or not 0 <= number < len(inputs):
            raise ArtifactError("a question about an input that does not exist")
        if question not in QUESTIONS or type(value) not in (bool, int):
            raise ArtifactError(f"an unknown question about an argument: {question[:40]!r}")


# -------------------------------------------------------------------- questions
# Questions about arguments, besides their values, that a program asked and that an artifact asks at each call.


QUESTIONS: dict[str, Callable[[torch.Tensor], Any]] = {
    "{}.is_leaf": lambda x: x.is_leaf,
    "{}._version": lambda x: x._version,
    "{}._base is None": lambda x: x._base is None,
    "{}.storage_offset()": lambda x: x.storage_offset(),
    "{}.untyped_storage().nbytes()": lambda x: x.untyped_storage().nbytes(),
    "{}._backward_hooks is None": lambda x: x._backward_hooks is None,
    "{}.retains_grad": lambda x: x.retains_grad,
    "{}.is_shared()": lambda x: x.is_shared(),
    "{}.is_pinned()": lambda x: x.is_pinned(),
    "{}.grad is None": lambda x: x.grad is None,
    "{0}.is_leaf and {0}.grad is None": lambda x: x.is_leaf and x.grad is None,
    UNHOOKED: lambda x: not gradient_hooks(x),
}


# -------------------------------------------------------------------- context
# Settings of the thread and of the library: a captured graph depends on them and holds under these settings alone.


_DEVICES = ("cpu", "cuda", "mps", "xpu")


def context_now() -> dict[str, Any]:
    """The settings in force, by name."""
    settings: dict[str, Any] = {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": is_inference(),
        "default dtype": torch.get_default_dtype(),
        "default device": current_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
    for device in _DEVICES:
        on = torch.is_autocast_enabled(device)
        settings[f"autocast of {device}"] = torch.get_autocast_dtype(device) if on else False
    return settings
