"""Random operators that the backward runs once more: the state of their generator is saved in place of their results.

The forward notes the state right before the operator; the backward goes back to it, runs the operator, and returns to
where the generator was. So the numbers are the same bit for bit, and the user's generator moves as in eager. On the CPU
a state is 5 KB, where the mask of a dropout is as large as what it is for.

It takes a backend that runs operators one by one in the graph's order: nothing else ties an operator to the state.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from .._torch.fakes import new_fake
from .._torch.graphs import GraphCopier, is_operator
from .._torch.replay import NOTE, RESUME, REWIND, state_bytes
from ..graph.meta import NodeMeta, TensorSpec, value_of
from .classify import Kind
from .index import JointIndex

_DEVICES = ("cpu", "cuda")
_WORTH = 4  # times the bytes of a state, which a result has to be larger than


def can_replay(index: JointIndex) -> frozenset[int]:
    """The random operators of the forward that may run again: those that draw from their device's own generator."""
    return frozenset(
        i
        for i in index.once
        if index.kinds[i] is Kind.RANDOM
        and index.in_forward[i]
        and is_operator(index.nodes[i].target)
        and index.nodes[i].kwargs.get("generator") is None
        and not any(isinstance(argument, torch.Generator) for argument in index.nodes[i].args)
        and (device := device_of(index, i)) is not None
        and device.type in _DEVICES
        and index.bytes_of(i) > _WORTH * state_size(device)
    )


@functools.cache
def state_size(device: torch.device) -> int:
    """Bytes of the state of a device's generator, all of which are in memory of the host."""
    return state_bytes(device)


def device_of(index: JointIndex, i: int) -> torch.device | None:
    """The device that a node's result is on."""
    value = value_of(index.nodes[i])
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return getattr(first, "device", None)


class Replays:
    """The random operators `again` that both halves run, while one half is built. `states`: nodes of their states."""

    def __init__(self, index: JointIndex, again: list[int]) -> None:
        self.index, self.again = index, set(again)
        self.states: dict[int, fx.Node] = {}
        self.names = {node.name for node in index.nodes} if again else set()

    def note(self, copier: GraphCopier, i: int) -> None:
        """Before node i is copied into the forward: note the state of its generator."""
        if i in self.again:
            name = self._name(i, "state")
            self.states[i] = copier.writer.add(
                name, "call_function", NOTE, (device_of(self.index, i),), {}, self._meta(i)
            )
            copier.copies[self.states[i]] = self.states[i]

    def placeholder(self, copier: GraphCopier, i: int) -> None:
        """Add the backward's placeholder for the generator state of node i."""
        name = self._name(i, "state")
        self.states[i] = copier.writer.add(name, "placeholder", name, (), {}, self._meta(i))

    def replay(self, copier: GraphCopier, i: int) -> fx.Node | None:
        """Node i as the backward runs it, if it runs again; None if it does not."""
        if i not in self.again:
            return None
        device = device_of(self.index, i)
        before = copier.writer.add(
            self._name(i, "before"), "call_function", REWIND, (self.states[i], device), {}, self._meta(i)
        )
        copy = copier.copy(self.index.nodes[i])
        meta = NodeMeta({"stack_trace": self.index.nodes[i].meta.get("stack_trace")})
        copier.writer.add(self._name(i, "after"), "call_function", RESUME, (before, device), {}, meta)
        return copy

    def _name(self, i: int, what: str) -> str:
        name = f"{self.index.nodes[i].name}_{what}"
        while name in self.names:
            name += "_"
        return name

    def _meta(self, i: int) -> NodeMeta:
        device = device_of(self.index, i)
        assert device is not None
        size = state_size(device)
        spec = TensorSpec((size,), (1,), torch.uint8, torch.device("cpu"))
        node = self.index.nodes[i]
        value = node.meta

        def fake() -> torch.Tensor:
            values = value["val"]
            first = values[0] if isinstance(values, (tuple, list)) else values
            return new_fake(first.fake_mode, spec.shape, spec.stride, spec.dtype, spec.device)

        meta = NodeMeta({"spec": spec}, late={"val": fake})
        if "stack_trace" in node.meta:
            meta["stack_trace"] = node.meta["stack_trace"]
        return meta
