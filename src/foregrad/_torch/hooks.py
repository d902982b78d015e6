"""Hooks on the outputs of compiled functions. Checked on torch 2.13.0.

A node of several outputs runs if a gradient arrives for any output, and autograd calls the hooks of all outputs. In
eager each output has operators of its own, and no hook is called without a gradient; nor are hooks of a leaf without an
arriving gradient.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ..locks import bound


class _OnlyDefined(collections.OrderedDict[Any, Any]):
    """The hooks of a tensor, never called with None."""

    def __setitem__(self, key: object, hook: Any) -> None:
        super().__setitem__(key, _spared(hook))


class _HookAround(functools.partial[Any]):
    """A hook around a hook."""

    def __new__(cls, hook: Any) -> Any:
        # A partial of a partial takes over the inner function, from Python 3.13 on past a `__call__` of its own.
        is_derived = isinstance(hook, functools.partial) and type(hook).__call__ is not functools.partial.__call__
        return super().__new__(cls, hook.__call__ if is_derived else hook)


class _UnlessNone(_HookAround):
    """A hook that is not called with None."""

    def __call__(self, gradient: object) -> Any:
        return None if gradient is None else super().__call__(gradient)


def _spared(hook: object) -> object:
    # Hooks of several tensors count their calls, and expect one for each tensor whose node runs.
    counts = getattr(hook, "__module__", "") == torch.autograd.graph.__name__
    return hook if counts or isinstance(hook, _UnlessNone) else _UnlessNone(hook)


_thread = threading.local()


class _UnlessCut(_HookAround):
    """A hook that is not called with None if gradients were cut off on their way to its tensor."""

    def __call__(self, gradient: object) -> Any:
        return None if gradient is None and getattr(_thread, "is_cut", False) else super().__call__(gradient)


def unless_cut(hook: object) -> object:
    """The hook for a traced tensor: see `gradients_cut`."""
    counts = getattr(hook, "__module__", "") == torch.autograd.graph.__name__  # as in `_spared`
    return hook if counts else _UnlessCut(hook)


def gradients_cut() -> contextlib.AbstractContextManager[None]:
    """Context: gradients are cut off on their way. In eager they go on, or their hooks are not called."""
    return bound(_thread, "is_cut", True)


def spare_leaves(node: Any, gradients: Sequence[object]) -> None:
    """Keep hooks of leaves from calls with None, before `node` returns these gradients."""
    for (following, _), gradient in zip(node.next_functions, gradients, strict=True):
        leaf = None if gradient is not None else getattr(following, "variable", None)
        hooks: Any = getattr(leaf, "_backward_hooks", None) or {}
        for key, hook in hooks.items():
            hooks[key] = _spared(hook)
        hooks = getattr(leaf, "_post_accumulate_grad_hooks", None) or {}
        for key, hook in hooks.items():
            hooks[key] = hook if isinstance(hook, _UnlessSame) else _UnlessSame(hook)
            hooks[key].before = _state_of_gradient(leaf)


class _UnlessSame(_HookAround):
    """A hook after accumulation that is not called where `.grad` is still in the state `before`."""

    before: Any = None

    def __call__(self, leaf: object) -> Any:
        before, self.before, now = self.before, None, _state_of_gradient(leaf)
        is_same = before is not None and before[0] is now[0] and before[1] == now[1]
        return None if is_same else super().__call__(leaf)


def _state_of_gradient(leaf: Any) -> tuple[object, object]:
    """The gradient, by each tensor's one weak reference, and the number of writes to the gradient."""
    gradient = own_gradient(leaf)
    return (None, None) if gradient is None else (weakref.ref(gradient), gradient._version)


def only_defined(tensor: torch.Tensor) -> None:
    """Keep hooks of a result from calls with None, before the first is registered."""
    tensor._backward_hooks = _OnlyDefined()


def defined_hooks_only(function: type[torch.autograd.Function]) -> None:
    """Make hooks on the outputs of a Function be called with gradients only."""
    cls: Any = function._backward_cls
    register = cls._register_hook_dict

    def register_defined(self: Any, tensor: torch.Tensor) -> None:
        only_defined(tensor)
        self.hooks_of = {**getattr(self, "hooks_of", {}), tensor.output_nr: tensor._backward_hooks}
        register(self, tensor)

    cls._register_hook_dict = register_defined


class _Refusing(collections.OrderedDict[Any, Any]):
    """The hooks of a tensor that refuses further hooks; its own hook does not count."""

    refuse: Callable[[], None]

    def __setitem__(self, key: object, hook: object) -> None:
        self.refuse()

    def __bool__(self) -> bool:
        return False


def refuse_hooks(tensor: Any, hook: Callable[[object], None], refuse: Callable[[], None]) -> None:
    """Make `register_hook` on a tensor without hooks call `refuse` from now on.

    `hook` runs with the tensor's gradient, or None, when one is asked for or arrives.
    """
    hooks = _Refusing()
    collections.OrderedDict.__setitem__(hooks, 0, hook)
    hooks.refuse = refuse
    tensor._backward_hooks = hooks
    node = tensor.grad_fn
    if isinstance(node, torch._C._FunctionBase):
        torch._C._FunctionBase._register_hook_dict(node, tensor)
    else:
        node._register_hook_dict(tensor)


_ENGINE = torch.autograd.graph._engine_run_backward.__code__


def asked_by(tensor: torch.Tensor) -> Sequence[object]:
    """In a hook: the outputs that are differentiated with respect to `tensor`; empty if it is not among the inputs."""
    own = _engine_of(sys._getframe(1))
    # On the engine's thread for a second device, the waiting thread is a different thread.
    frames = [own] if own is not None else list(filter(None, map(_engine_of, sys._current_frames().values())))
    for frame in frames:
        values = frame.f_locals
        inputs = values["args"][3] if len(values["args"]) > 3 else ()
        if any(t is tensor for t in inputs):
            return tuple(values["t_outputs"])
    return ()


def _engine_of(frame: Any) -> Any:
    while frame is not None and frame.f_code is not _ENGINE:
        frame = frame.f_back
    return frame


def leads_to(roots: Sequence[Any], node: Any, positions: Sequence[int]) -> bool:
    """Whether gradients of `roots` arrive at an output in `positions` of `node`."""
    edges = [(t.grad_fn, t.output_nr) if isinstance(t, torch.Tensor) else (t.node, t.output_nr) for t in roots]
    seen = set()
    while edges:
        edge = edges.pop()
        if edge[0] is node:
            if edge[1] in positions:
                return True
        elif edge[0] is not None and edge[0] not in seen:
            seen.add(edge[0])
            edges.extend(edge[0].next_functions)
    return False


_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")
UNHOOKED = f"not ({{0}}.{_TABLES[0]} or {{0}}.{_TABLES[1]})"  # Python that asks a tensor


def gradient_hooks(tensor: torch.Tensor) -> dict[str, object]:
    """The hooks that run when a gradient arrives at a leaf, by Python that asks the leaf `{}` for each; {} for none."""
    with torch._C.DisableTorchFunction():
        tables: dict[str, Any] = {table: getattr(tensor, table) for table in _TABLES}
    found: dict[str, Any] = {}
    for table, hooks in tables.items():
        if hooks:
            found[f"len({{}}.{table})"] = len(hooks)
            found |= {f"[*{{}}.{table}.values()][{at}]": hook for at, hook in enumerate(hooks.values())}
    return found


@contextlib.contextmanager
def hooked_as(stand_ins: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Context: in each pair of leaves, the first has the second's hooks. A hook that gets a tensor gets the second."""
    handles = []
    with torch._C.DisableTorchFunction():
        for leaf, real in stand_ins:
            gradients, tensors = ((getattr(real, table) or {}).values() for table in _TABLES)
            handles += [leaf.register_hook(hook) for hook in gradients]
            calls = [functools.partial(lambda hook, real, _: hook(real), hook, real) for hook in tensors]
            handles += [leaf.register_post_accumulate_grad_hook(call) for call in calls]
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            for handle in handles:
                handle.remove()


def own_gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """`.grad`, under any torch-function mode."""
    with torch._C.DisableTorchFunction():
        return tensor.grad


def set_gradient(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set `.grad`, under any torch-function mode."""
    with torch._C.DisableTorchFunction():
        tensor.grad = gradient
