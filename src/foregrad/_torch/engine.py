"""The autograd engine and the state of the thread, for rendered code. Checked on torch 2.13.0."""

from __future__ import annotations

import _thread
import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

__all__ = ["forward_ad"]  # handed on

disable_autocast: Any = torch._C._DisableAutocast
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
keeps_versions: Any = torch.autograd.grad_mode._unsafe_preserve_version_counter
current_backward: Callable[[], int] = torch._C._current_graph_task_id  # its number; -1 where none is running
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The C++ apply of a Function, without Python's around it, which looks for functorch transforms up to 2.14."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def single_level(name: str, methods: dict[str, Any]) -> Callable[..., Any]:
    """The apply of a Function that deals with the wrappers of functorch's top level itself."""
    kind: Any = torch.autograd.function._SingleLevelFunction
    return type(name, (kind,), methods).apply  # type: ignore[attr-defined, no-any-return]


def beside_threads(apply: Callable[..., Any]) -> Callable[..., Any]:
    """An apply from `direct_apply` that doesn't deadlock with other threads that use the same leaves.

    `Function.apply` locks each leaf to find its accumulator while it holds the GIL. An operator in another thread may
    wait for the GIL under that lock, if only Python holds the accumulator, as after a read of `next_functions`. An
    alias, which is made without the GIL, holds the accumulators too.
    """

    def call(others: Any, *taken: torch.Tensor) -> Any:
        if _thread._count() and torch.is_grad_enabled():
            _held = [x.view_as(x) for x in taken if x.requires_grad and (x.is_leaf or x._is_view())]
        return apply(others, *taken)

    return call


_FEW = 16  # gradients that may be asked for one by one


def wanted_gradients(node: Any, *, exact: bool = False) -> tuple[bool, ...] | None:
    """A mask of the gradients of a running node that are needed: those for `inputs=` or on the way there. None: all.

    Unless `exact`, the mask may have more gradients.
    """
    if hasattr(node, "wanted_gradients"):  # foregrad's own node in C++
        mask: tuple[bool, ...] | None = node.wanted_gradients()
        return mask
    following = [following for following, _ in node.next_functions]
    needs_input_grad = [True] * len(following)
    if exact or len(following) <= _FEW:
        for position, node_after in enumerate(following):
            with contextlib.suppress(RuntimeError):  # see below
                needs_input_grad[position] = node_after is None or bool(_will_run(node_after))
        return None if all(needs_input_grad) else tuple(needs_input_grad)
    # For a leaf in autograd.grad's `inputs=` the query raises, which takes as long as a hundred answers. So only the
    # first and the last such leaf are queried: all gradients between them count as needed.
    for positions in (range(len(following)), range(len(following) - 1, -1, -1)):
        for position in positions:
            if following[position] is None:
                continue  # not needed, but the backward compiled for all gradients will do
            try:
                needs_input_grad[position] = bool(_will_run(following[position]))
            except RuntimeError:
                break
        else:
            break
    return None if all(needs_input_grad) else tuple(needs_input_grad)


_will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node


def is_node_with(node: Any, attribute: str) -> bool:
    """Whether a node is foregrad's: in C++, or of a Function with this attribute."""
    return hasattr(node, "wanted_gradients") or hasattr(getattr(node, "_forward_cls", None), attribute)


def default_device_is_the_mode() -> bool:
    """Whether the one torch-function mode that is on is `torch.set_default_device`'s."""
    from torch.utils._device import DeviceContext

    return isinstance(torch._C._get_function_stack_at(0), DeviceContext)


is_tracing: Callable[[], bool] = torch._C._is_tracing  # by `torch.jit.trace`


def is_foreign_mode_on() -> bool:
    """Whether a torch-function mode is on that is not `torch.set_default_device`'s alone."""
    count = count_function_modes()
    return count > 0 and not (count == 1 and default_device_is_the_mode())
