"""The work of each operator: where it is, the operations and bytes that it takes, and its time by a roofline.

An operator takes as long as its products at the device's assumed operations a second, or as its operands and results at
the assumed bandwidth, whichever is longer; each operator is a kernel of its own. Launches, and waits for the host,
are not in it.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from .._torch.nested import mapped, tensors_in
from ..graph.joint import JointGraph
from ..graph.meta import TensorSpec, value_of
from ..graph.printing import user_line
from ..partitioners import Kind, flops, kind_of, value_bytes
from .devices import Device
from .links import InGraph, collective_of

_FREE = (Kind.INPUT, Kind.CONSTANT, Kind.NUMBER, Kind.ITEM, Kind.VIEW)
Stack = tuple[tuple[str, str], ...]  # of modules: path and class, the outermost first


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorCost:
    """An operator: its line and modules, operations and bytes moved, and its seconds on the device."""

    name: str
    op: str
    stack: Stack
    line: str
    flops: int
    moved: int
    seconds: float
    collective: InGraph | None = None

    @property
    def module(self) -> str:
        """The path of the innermost module; "" outside of modules."""
        return self.stack[-1][0] if self.stack else ""


def work_of(joint: JointGraph, device: Device, host: int = 8) -> dict[str, OperatorCost]:
    """Each operator of a graph by its name, which copies in the halves share. `host`: ranks that a host has."""
    counted: dict[Any, int] = {}
    found = {}
    for node in joint.module.graph.nodes:
        if node.op == "output":
            continue
        operations = moved = 0
        if kind_of(node) not in _FREE:
            value = value_of(node)
            moved = value_bytes(value) + sum(value_bytes(value_of(operand)) for operand in node.all_input_nodes)
            key = node.target, _shapes(node.args), _shapes(value)
            operations = counted[key] if key in counted else counted.setdefault(key, flops(node))
        bandwidth = device.bandwidth * device.shares.bandwidth
        seconds = max(operations / device.peak(_dtype(node)) if operations else 0.0, moved / bandwidth)
        collective = collective_of(node, host)
        if collective is not None:
            seconds = max(seconds, collective.seconds(device))
        line, stack = user_line(node) or "", _stack(node)
        found[node.name] = OperatorCost(
            node.name, str(node.target), stack, line, operations, moved, seconds, collective
        )
    return found


def cost_of(func: Any, args: Any, kwargs: Any, result: Any, device: Device) -> tuple[int, float]:
    """Operations and seconds of an operator that ran."""
    from torch.utils.flop_counter import flop_registry  # late: it is needed for a program that runs parts again

    formula, operations = flop_registry.get(func.overloadpacket), 0
    if formula is not None:
        shapes = mapped((tuple(args), dict(kwargs), [result]), torch.Tensor, lambda tensor: tensor.shape)
        operations = int(formula(*shapes[0], **shapes[1], out_val=shapes[2][0]))
    tensors = tensors_in((args, kwargs, result))
    moved = sum(one.numel() * one.dtype.itemsize for one in tensors)
    kinds = [one.dtype for one in tensors if one.dtype.is_floating_point]
    dtype = min(kinds, key=lambda kind: kind.itemsize, default=torch.float32)
    took = operations / device.peak(dtype) if operations else 0.0
    return operations, max(took, moved / (device.bandwidth * device.shares.bandwidth))


def _shapes(value: Any) -> Any:
    if isinstance(value, fx.Node):
        value = value_of(value)
    if isinstance(value, (tuple, list)):
        return tuple(map(_shapes, value))
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else (tuple(map(str, shape)), str(getattr(value, "dtype", "")))


def _dtype(node: fx.Node) -> torch.dtype:
    """The dtype that a product computes with: the smallest of its operands'."""
    values = [value_of(operand) for operand in node.all_input_nodes]
    kinds = [value.dtype for value in values if isinstance(value, (TensorSpec, torch.Tensor))]
    floats = [kind for kind in kinds if kind.is_floating_point]
    return min(floats, key=lambda kind: kind.itemsize, default=torch.float32)


def _stack(node: fx.Node) -> Stack:
    stack: Any = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    return tuple((own_path(path), cls if isinstance(cls, str) else cls.__name__) for path, cls in stack.values())


def own_path(path: Any) -> str:
    """As the module's own names have it: the step holds it as `plain`, a method as `self`."""
    return re.sub(r"^(self|plain)(\.|$)|@\d+$", "", str(path))


# -------------------------------------------------------------------- layers
# A layer: one of at least two modules of a class in one container, each with modules of its own.


@dataclasses.dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model, in the order in which they run first."""

    paths: tuple[str, ...]

    def of(self, path: str) -> str:
        """The layer that a module, parameter or buffer belongs to; "" for what is outside of layers."""
        parts = path.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        known = set(self.paths)
        return next((prefix for prefix in prefixes if prefix in known), "")


def layers_of(work: Iterable[OperatorCost]) -> Layers:
    """The outermost repeated modules of a model."""
    classes: dict[str, str] = {}
    inner: set[str] = set()
    for operator in work:
        for at, (path, kind) in enumerate(operator.stack):
            if re.search(r"(^|\.)\d+$", path):
                classes.setdefault(path, kind)
                if at + 1 < len(operator.stack):
                    inner.add(path)
    groups: dict[tuple[str, str], list[str]] = {}
    for path, kind in classes.items():
        if path in inner:
            groups.setdefault((path.rpartition(".")[0], kind), []).append(path)
    repeated = {path for paths in groups.values() if len(paths) > 1 for path in paths}
    outer = [p for p in classes if p in repeated and not any(p.startswith(f"{o}.") for o in repeated)]
    return Layers(tuple(outer))


def pattern(path: str) -> str:
    """A path with its numbers left out: `layers.*.mlp`."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)


def by_module(work: Iterable[OperatorCost]) -> Mapping[str, tuple[int, int, float]]:
    """Operations, bytes and seconds by module, numbers in paths left out, the dearest first."""
    sums: dict[str, list[float]] = {}
    for operator in work:
        entry = sums.setdefault(pattern(operator.module), [0, 0, 0.0])
        entry[0] += operator.flops
        entry[1] += operator.moved
        entry[2] += operator.seconds
    ordered = sorted(sums.items(), key=lambda item: -item[1][2])
    return {path: (int(entry[0]), int(entry[1]), entry[2]) for path, entry in ordered}
