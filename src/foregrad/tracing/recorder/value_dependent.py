"""Operators whose results fakes can't tell: of values that depend on the inputs, or that no fake kernel computes."""

from __future__ import annotations

from typing import Any

import torch

from ..._torch.ops import OpOverload
from ...errors import UnsupportedDataDependentError
from ..tape.opinfo import returns_tensors
from .trace import Trace

__all__ = ["decided", "run_for_real"]

aten = torch.ops.aten


def decided(trace: Trace, func: OpOverload, args: Any, kwargs: Any, error: Exception) -> Any:
    """An operator whose result's size, or number, depends on values of the inputs: what it is in this call."""
    where = trace.where()
    entry_args, entry_kwargs = trace.to_entries(args), trace.to_entries(kwargs)
    try:
        if func is aten._local_scalar_dense.default:
            storage = trace.values[id(args[0])].storage
            if storage.is_input and storage.generation and args[0].dtype is not torch.bool:
                trace.decisions.read_of_written(where)
            return trace.decisions.item(entry_args[0], where, trace.emit_number)
        entry = trace.entry(func, entry_args, entry_kwargs, is_random=False)
        if not returns_tensors(func):
            return trace.decisions.number(entry, where)
        out = trace.fakes_like(trace.decisions.sized(entry, where, trace.emit))
    except UnsupportedDataDependentError as unsupported:
        raise unsupported from error
    return trace.bind_results(entry, out)


def run_for_real(trace: Trace, func: OpOverload, args: Any, kwargs: Any, error: Exception) -> Any:
    """An operator that fakes can't run: what it gives for the real arguments, unless that is an error too."""
    entry = trace.entry(func, trace.to_entries(args), trace.to_entries(kwargs), is_random=False)
    try:
        if not returns_tensors(func):
            return trace.decisions.number(entry, trace.where())
        specs = trace.decisions.sized(entry, trace.where(), trace.emit)
    except UnsupportedDataDependentError:
        raise error from None
    return trace.bind_results(entry, trace.fakes_like(specs))
