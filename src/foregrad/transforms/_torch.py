"""Transforms of torch.func: levels that begin here, and their tensors' wrappers. Checked on torch 2.13.0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad

from ..locks import Bind

_C: Any = torch._C._functorch

unwrapped_if_dead = _C.unwrap_if_dead
_ENDS = {
    "Vmap": _C._vmap_decrement_nesting,
    "Grad": _C._grad_decrement_nesting,
    "Jvp": _C._jvp_decrement_nesting,
    "Functionalize": _C._func_decrement_nesting,
}


@contextlib.contextmanager
def levels_put_back() -> Iterator[None]:
    """Context: where it is left by an exception, no level stays that began inside. A graph of Dynamo's begins and ends
    them in lines of its own.
    """
    hooks = torch._C._autograd
    depth, allows_inplace = _C.get_dynamic_layer_stack_depth(), _C.get_inplace_requires_grad_allowed()
    refuses_hooks, duals = hooks._saved_tensors_hooks_get_disabled_error_message(), forward_ad._current_level
    try:
        yield
    except BaseException:
        if duals < 0:  # there is one level of dual numbers, and C++ alone may know of the level
            forward_ad._current_level = duals
            with contextlib.suppress(RuntimeError):
                torch._C._exit_dual_level(level=0)
        while _C.get_dynamic_layer_stack_depth() > depth:  # PyTorch 2.11 ends only the levels of grad without an error
            _ENDS[_C.peek_interpreter_stack().key().name]()
        _C.set_inplace_requires_grad_allowed(allows_inplace)
        if refuses_hooks is None:
            hooks._saved_tensors_hooks_enable()
        raise


unwrapped: Callable[[torch.Tensor, int], torch.Tensor] = _C._unwrap_for_grad
"""The tensor inside the wrapper of a "grad" or "jvp" level; the tensor itself without a wrapper."""
wrapped: Callable[[torch.Tensor, int], torch.Tensor] = _C._wrap_for_grad


@contextlib.contextmanager
def vmap_level(size: int, randomness: str) -> Iterator[int]:
    """Context: a new vmap level; gives its number."""
    number = _C._vmap_increment_nesting(size, randomness)
    try:
        yield number
    finally:
        _C._vmap_decrement_nesting()


@contextlib.contextmanager
def jvp_level() -> Iterator[int]:
    """Context: a new forward-mode level; gives its number. `forward_ad.make_dual` makes its dual numbers."""
    from torch._functorch.eager_transforms import jvp_increment_nesting

    with jvp_increment_nesting() as number, forward_ad._set_fwd_grad_enabled(True):
        if forward_ad._current_level >= 0:  # PyTorch has one level of dual numbers, shared by all that nest
            yield number
        else:
            with forward_ad.dual_level():
                yield number


def single_level_functions() -> Any:
    """Context: a `torch.autograd.Function` that handles the wrappers of the top level itself may be applied."""
    from torch._functorch.utils import enable_single_level_autograd_function

    return enable_single_level_autograd_function()


# ------------------------------------------------------------------------------------------------ entries


def install(bind: Bind, swapped: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply `swapped` to a transform's tensors before a level wraps them: no torch-function mode sees the wrapping."""
    from torch._functorch import eager_transforms, vmap

    for module, name in ((eager_transforms, "_wrap_for_grad"), (vmap, "_add_batch_dim")):
        bind(module, name, _swapping(getattr(module, name), swapped))


def _swapping(wrap: Callable[..., torch.Tensor], swapped: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    def wrapper(tensor: torch.Tensor, *rest: Any) -> torch.Tensor:
        return wrap(swapped(tensor), *rest)

    return wrapper


def single_level(name: str, methods: dict[str, object]) -> Callable[..., Any]:
    """The apply of a Function that deals with the wrappers of functorch's top level itself."""
    kind = torch.autograd.function._SingleLevelFunction
    made: Any = type(name, (kind,), methods)
    apply: Callable[..., Any] = made.apply
    return apply
