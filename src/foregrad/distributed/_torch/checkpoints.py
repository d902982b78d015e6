"""`torch.utils.checkpoint` while a function is captured: a region is recorded once and tagged, not recorded twice.

Checked on torch 2.11.0, 2.13.0. Selective checkpoint runs the forward under a dispatch mode that asks the user's policy
about each operator; the policy's answers are recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as checkpoint_module

from ..._torch.versions import is_at_least
from ...locks import Bind


class RegionsOfCapture(Protocol):
    """The capture's record of regions. `depth`: the number of nested regions that are open. `chosen(depth, run)` calls
    `run` for (result of an operator, its policy), and returns the result. `named(tensor, name)`: notes a name.
    """

    depth: int

    def region(self) -> Any: ...

    def chosen(self, depth: int, run: Callable[[], tuple[Any, Any]]) -> Any: ...

    def named(self, tensor: torch.Tensor, name: str) -> None: ...


_checkpoint: Any = checkpoint_module
_Selective: Any = _checkpoint._CachingTorchDispatchMode
_Region = type(torch.ops.higher_order.tag_activation_checkpoint)
_original_hook = _checkpoint._checkpoint_hook
_original_reentrant = _checkpoint.CheckpointFunction
_original_region = _Region.__call__
_original_enter = _Selective.__enter__
_original_dispatch = _Selective.__torch_dispatch__
_regions: Callable[[], RegionsOfCapture | None] = lambda: None  # noqa: E731


class _TaggingHook:
    """Replacement for checkpoint's saved-tensor hooks: operators recorded inside are tagged, not dropped."""

    def __new__(cls, frame: Any) -> Any:
        regions = _regions()
        return _original_hook(frame) if regions is None else regions.region()


class _TaggingFunction:
    """Replacement for the reentrant checkpoint's Function."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        regions = _regions()
        if regions is None:
            return _original_reentrant.apply(function, preserve_rng_state, *args)
        _checkpoint.check_backward_validity(args)  # it warns
        # To autograd it is one Function of the arguments: gradients of closed-over tensors come from its backward.
        needs = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
        with regions.region(), contextlib.nullcontext() if needs else torch.no_grad():
            return function(*args)


def _tagged_region(self: Any, gmod: Any, *args: Any, **kwargs: Any) -> Any:
    """A checkpointed region in a graph of Dynamo's. Without a policy, before 2.13, it runs unchanged, except for tags
    on its nodes; otherwise it calls `checkpoint`.
    """
    regions = _regions()
    calls_checkpoint = is_at_least(2, 13) or "_checkpoint_context_fn" in gmod.meta
    with contextlib.nullcontext() if regions is None or calls_checkpoint else regions.region():
        return _original_region(self, gmod, *args, **kwargs)


def _enter(self: Any) -> Any:
    regions = _regions()
    self._foregrad_depth = 0 if regions is None else regions.depth
    return _original_enter(self)


def _dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    regions = _regions()
    if regions is None:
        return _original_dispatch(self, func, types, args, kwargs)
    ask, answers = self.policy_fn, []

    def asked(*args: Any, **kwargs: Any) -> Any:
        answers.append(ask(*args, **kwargs))
        return answers[-1]

    def run() -> tuple[Any, Any]:
        self.policy_fn = asked
        try:
            return _original_dispatch(self, func, types, args, kwargs), answers[-1] if answers else None
        finally:
            self.policy_fn = ask

    return regions.chosen(self._foregrad_depth, run)


def note_name(tensor: torch.Tensor, name: str) -> None:
    """Note the user's `name` for `tensor` in the capture on this thread, if there is one.

    For a tensor of a transform (`vmap`, `grad`) or a wrapper subclass, the tensors inside get the name.
    """
    regions = _regions()
    if regions is None:
        return
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    parts = getattr(tensor, "__tensor_flatten__", None)
    if parts is None:
        regions.named(tensor, name)
        return
    for part in parts()[0]:
        note_name(getattr(tensor, part), name)


def install(bind: Bind, regions: Callable[[], RegionsOfCapture | None]) -> None:
    """Install the patches; `regions()` gives the record of the thread's capture, or None."""
    global _regions
    _regions = regions
    bind(_checkpoint, "_checkpoint_hook", _TaggingHook)
    bind(_checkpoint, "CheckpointFunction", _TaggingFunction)
    bind(_Region, "__call__", _tagged_region)
    bind(_Selective, "__enter__", _enter)
    bind(_Selective, "__torch_dispatch__", _dispatch)
