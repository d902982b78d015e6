"""Anomaly mode: the place in the user's program where a gradient becomes nan.

To autograd a compiled function is one node, made at the line of the call. So if anomaly mode is on, the node checks its
gradients itself; if one is nan, its backward graph runs once more, operator by operator, to find the first operator
that gives nan. Otherwise none of the code here runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx

from .._torch import engine
from .._torch.engine import without_anomaly_mode
from ..errors import AnomalyError
from ..graph.meta import TensorSpec, as_captured, spec_of
from .compiled import Compiled
from .release import saved_in_part


def watched(backward: Callable[..., object], compiled: Compiled) -> Callable[..., object]:
    """`backward(ctx, *tangents)` with a check of its gradients; called by `backward` while `is_anomaly_enabled`."""
    running = weakref.ref(backward)  # it holds this function among its globals

    def watched_backward(ctx: object, *tangents: object) -> object:
        backward = running()
        assert isinstance(backward, FunctionType)
        plain = FunctionType(backward.__code__, {**backward.__globals__, "is_anomaly_enabled": lambda: False})
        if not torch.is_anomaly_check_nan_enabled():
            return plain(ctx, *tangents)
        values = [*getattr(ctx, "sizes", ()), *saved_in_part(ctx, [False] * len(compiled.partitioned.saved_tensors))]
        live = [tensor.clone() for tensor in getattr(ctx, "live", ())]
        gradients = plain(ctx, *tangents)
        for number, gradient in enumerate(gradients[1:]):
            if _is_nan(gradient):
                _raise(compiled, number, values, tangents, live)
        return gradients

    return watched_backward


def _is_nan(value: object) -> bool:
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return bool(value.isnan().any().item())


def _raise(
    compiled: Compiled, number: int, saved: Sequence[object], tangents: Sequence[object], live: Sequence[object]
) -> None:
    joint = compiled.partitioned.joint
    node = _first_nan(compiled, saved, tangents, live)
    message = f"Function 'CompiledFunctionBackward' returned nan values in its {number}th output: the gradient of "
    message += f"{_slot(compiled, number)} in the backward of `{joint.name}`."
    if node is not None:
        message += f" The first operator that gives nan there is `{node.target}`"
        trace = node.meta.get("stack_trace")
        message += f": it differentiates this line:\n{trace}" if trace else "."
    raise AnomalyError(message)


def _slot(compiled: Compiled, number: int) -> str:
    joint = compiled.partitioned.joint
    return str(joint.signature.inputs[joint.inputs_taken()[number]].slot)


def _first_nan(
    compiled: Compiled, saved: Sequence[object], tangents: Sequence[Any], live: Sequence[object]
) -> fx.Node | None:
    """The first node on the tangents' paths that gives nan; None if it can't be found."""
    partitioned = compiled.partitioned
    if any(value is None for value in saved):
        return None  # a backward of a different part freed it
    inputs = []
    for tangent, spec in zip(tangents, partitioned.joint.signature.gradients.tangent_specs, strict=True):
        if tangent is not None:
            inputs.append(as_captured(tangent.detach(), spec))
        elif all(isinstance(size, int) for size in spec.shape):
            inputs.append(torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device))
        else:
            return None
    search = _NanSearch(partitioned.backward)
    with torch.no_grad(), engine.disable_autocast(), without_anomaly_mode:
        search.run(*(v.detach() if isinstance(v, torch.Tensor) else v for v in saved), *inputs, *live)
    return search.found


class _NanSearch(fx.Interpreter):
    """`found`: the first node with a nan value computed from a tangent."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: fx.Node | None = None
        self.flows = {n for n in module.graph.nodes if n.op == "placeholder" and n.name.startswith("tangents_")}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and not self.flows.isdisjoint(n.all_input_nodes):
            self.flows.add(n)
            if self.found is None and isinstance(spec_of(n), TensorSpec) and _is_nan(value):
                self.found = n
        return value
