"""Operators inside of eager regions and their backwards: modes, casts, hooks of tensors. Checked on torch 2.13.0."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_AUTOCAST = (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA)
CAST_INSIDE = frozenset((torch.ops.aten._trilinear.default, torch.ops.aten.linalg_pinv.atol_rtol_tensor))
"""Operators whose kernels call operators that autocast casts."""


def casting_as_entered() -> Any:
    """Context, in a mode's handler: kernels cast the operators they call, though the mode has autocast off."""
    c: Any = torch._C
    with c._RestorePythonTLSSnapshot():
        casting = [key for key in _AUTOCAST if not c._dispatch_tls_is_dispatch_key_excluded(key)]
    excluded = c._dispatch_tls_local_exclude_set()
    for key in casting:
        excluded = excluded.remove(key)
    return c._ForceDispatchKeyGuard(c._dispatch_tls_local_include_set(), excluded)


def is_inside_operator(mode: TorchDispatchMode) -> bool:
    """Whether a kernel, a subclass's handler or the handler of `mode` runs, where the mode is off."""
    c = torch._C
    is_on = any(c._get_dispatch_stack_at(i) is mode for i in range(c._len_torch_dispatch_stack()))
    return not is_on or c._dispatch_tls_is_dispatch_key_excluded(c.DispatchKey.AutogradFunctionality)


@contextlib.contextmanager
def without_tensor_hooks(tensors: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Context: the tensors' hooks do not run."""
    hooked = [(tensor, tensor._backward_hooks) for tensor in tensors if tensor is not None and tensor._backward_hooks]
    for tensor, _ in hooked:
        tensor._backward_hooks = None
    try:
        yield
    finally:
        for tensor, hooks in hooked:
            tensor._backward_hooks = hooks
