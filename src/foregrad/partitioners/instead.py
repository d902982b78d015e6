"""Substitutes for a saved value: its copy in host memory, or the state of the generator that it is drawn from.

* The forward sends a value to the host, the backward fetches it before its first use.
* Random operators that the backward runs once more: the forward notes the state of the generator right before the
  operator; the backward goes back to it, runs the operator, and returns to the generator's place. So the numbers are
  equal bit for bit, and the user's generator moves as in eager. On the CPU a state is 5 KB, a dropout's mask as large
  as its operand. The backend has to run operators in the graph's order: nothing else ties an operator to the state.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .._torch.fakes import new_fake
from .._torch.graphs import GraphCopier
from .._torch.instead import NOTE, OFFLOAD, RELOAD, RESUME, REWIND, state_bytes
from ..graph.meta import NodeMeta, TensorSpec, value_of
from .classify import Kind
from .index import JointIndex

_CPU = torch.device("cpu")
_NOT_MOVED = (Kind.INPUT, Kind.CONSTANT, Kind.NUMBER, Kind.VIEW)


def can_offload(index: JointIndex, candidates: Iterable[int]) -> set[int]:
    """The nodes among `candidates` that are tensors in memory and are not kept by the caller as outputs."""
    kept = {index.root[i] for i in index.output_numbers}
    return {
        i
        for i in candidates
        if index.kinds[i] not in _NOT_MOVED
        and index.root[i] not in kept
        and isinstance(value_of(index.nodes[i]), (TensorSpec, torch.Tensor))
    }


@functools.cache
def state_size(device: torch.device) -> int:
    """Bytes of the state of a device's generator, all in memory of the host."""
    return state_bytes(device)


def device_of(index: JointIndex, i: int) -> torch.device | None:
    """The device that a node's result is on."""
    value = value_of(index.nodes[i])
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return getattr(first, "device", None)


class _Instead(abc.ABC):
    """Substitutes for the nodes `numbers`, while one half is built. `nodes`: the half's nodes for it, by number."""

    suffix: str
    kept: tuple[str, ...] = ("stack_trace",)  # of the node's metadata

    def __init__(self, index: JointIndex, numbers: Iterable[int]) -> None:
        self.index, self.numbers = index, set(numbers)
        self.nodes: dict[int, fx.Node] = {}
        self.names = {node.name for node in index.nodes} if self.numbers else set()

    def placeholder(self, copier: GraphCopier, i: int) -> None:
        """Add the backward's placeholder for the substitute of node i."""
        name = self._name(i, self.suffix)
        self.nodes[i] = copier.writer.add(name, "placeholder", name, (), {}, self._meta(i))

    def _save(self, copier: GraphCopier, i: int, target: object, argument: object) -> None:
        """Add the forward's node for it."""
        name = self._name(i, self.suffix)
        node = copier.writer.add(name, "call_function", target, (argument,), {}, self._meta(i))
        self.nodes[i] = copier.copies[node] = node

    def _name(self, i: int, what: str) -> str:
        name = f"{self.index.nodes[i].name}_{what}"
        while name in self.names:
            name += "_"
        return name

    @abc.abstractmethod
    def _spec(self, i: int) -> TensorSpec:
        """The layout of the substitute of node i."""

    def _meta(self, i: int) -> NodeMeta:
        spec, own = self._spec(i), self.index.nodes[i].meta

        def fake() -> torch.Tensor:
            values = own["val"]
            first = values[0] if isinstance(values, (tuple, list)) else values
            return new_fake(first.fake_mode, spec.shape, spec.stride, spec.dtype, spec.device)

        meta = NodeMeta({"spec": spec}, late={"val": fake})
        for key in self.kept:
            if key in own:
                meta[key] = own[key]
        return meta


class Hosts(_Instead):
    """The copies in host memory of nodes that are away."""

    suffix, kept = "host", ("stack_trace", "checkpoint_names")

    def send(self, copier: GraphCopier, i: int) -> fx.Node | None:
        """Copy node i, and send it off if it is away; None if it is not."""
        if i not in self.numbers:
            return None
        copy = copier.copy(self.index.nodes[i])
        self._save(copier, i, OFFLOAD, copy)
        return copy

    def fetch(self, copier: GraphCopier, i: int) -> fx.Node | None:
        """Node i brought back, if it is away; None if it is not."""
        if i not in self.numbers:
            return None
        node = self.index.nodes[i]
        device = value_of(node).device
        copy = copier.writer.add(node.name, "call_function", RELOAD, (self.nodes[i], device), {}, node.meta.copy())
        copier.copies[node] = copy
        return copy

    def _spec(self, i: int) -> TensorSpec:
        value: Any = value_of(self.index.nodes[i])
        spec = value if isinstance(value, TensorSpec) else TensorSpec.of(value)
        return TensorSpec(spec.shape, spec.stride, spec.dtype, _CPU)


class Replays(_Instead):
    """The states of the generators of random operators that both halves run."""

    suffix = "state"

    def note(self, copier: GraphCopier, i: int) -> None:
        """Before node i is copied into the forward: note the state of its generator."""
        if i in self.numbers:
            self._save(copier, i, NOTE, device_of(self.index, i))

    def replay(self, copier: GraphCopier, i: int) -> fx.Node | None:
        """Node i as the backward runs it, if it runs again; None if it does not."""
        if i not in self.numbers:
            return None
        device = device_of(self.index, i)
        before = copier.writer.add(
            self._name(i, "before"), "call_function", REWIND, (self.nodes[i], device), {}, self._meta(i)
        )
        copy = copier.copy(self.index.nodes[i])
        meta = NodeMeta({"stack_trace": self.index.nodes[i].meta.get("stack_trace")})
        copier.writer.add(self._name(i, "after"), "call_function", RESUME, (before, device), {}, meta)
        return copy

    def _spec(self, i: int) -> TensorSpec:
        device = device_of(self.index, i)
        assert device is not None
        return TensorSpec((state_size(device),), (1,), torch.uint8, _CPU)
