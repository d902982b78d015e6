"""Saved values in host memory: the forward sends them there, the backward fetches them before their first use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from .._torch.fakes import new_fake
from .._torch.graphs import GraphCopier
from .._torch.offload import OFFLOAD, RELOAD
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


class Hosts:
    """The copies in host memory of the nodes `away`, while one half is built. `nodes`: those of the half, by number."""

    def __init__(self, index: JointIndex, away: set[int]) -> None:
        self.index, self.away = index, away
        self.nodes: dict[int, fx.Node] = {}
        self.names = {node.name for node in index.nodes} if away else set()

    def send(self, copier: GraphCopier, i: int) -> fx.Node | None:
        """Copy node i, and send it off if it is away; None if it is not."""
        if i not in self.away:
            return None
        copy = copier.copy(self.index.nodes[i])
        sent = copier.writer.add(self._name(i), "call_function", OFFLOAD, (copy,), {}, self._meta(i))
        self.nodes[i] = copier.copies[sent] = sent
        return copy

    def placeholder(self, copier: GraphCopier, i: int) -> None:
        """Add the backward's placeholder for the copy of node i in host memory."""
        name = self._name(i)
        self.nodes[i] = copier.writer.add(name, "placeholder", name, (), {}, self._meta(i))

    def fetch(self, copier: GraphCopier, i: int) -> fx.Node | None:
        """Node i brought back, if it is away; None if it is not."""
        if i not in self.away:
            return None
        node = self.index.nodes[i]
        device = value_of(node).device
        copy = copier.writer.add(node.name, "call_function", RELOAD, (self.nodes[i], device), {}, node.meta.copy())
        copier.copies[node] = copy
        return copy

    def _name(self, i: int) -> str:
        name = f"{self.index.nodes[i].name}_host"
        while name in self.names:
            name += "_"
        return name

    def _meta(self, i: int) -> NodeMeta:
        node = self.index.nodes[i]
        value: Any = value_of(node)
        spec = value if isinstance(value, TensorSpec) else TensorSpec.of(value)
        host = TensorSpec(spec.shape, spec.stride, spec.dtype, _CPU)
        meta = NodeMeta(
            {"spec": host},
            late={"val": lambda: new_fake(node.meta["val"].fake_mode, host.shape, host.stride, host.dtype, _CPU)},
        )
        for key in ("stack_trace", "checkpoint_names"):
            if key in node.meta:
                meta[key] = node.meta[key]
        return meta
