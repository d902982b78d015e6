"""Dispatch modes, the autograd engine's state, and the guards around compiled graphs. Checked on torch 2.13.0."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

from ..locks import InPlace

__all__ = ["TorchFunctionMode"]  # handed on

count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
# Context: torch functions reach no mode and no subclass. Not looked up in a capture, where users find another there.
without_torch_functions: Callable[[], Any] = torch._C.DisableTorchFunction


def is_function_mode_on(mode: TorchFunctionMode | None) -> bool:
    """Whether `mode` sees torch functions called now; in its own handler it does not."""
    c = torch._C
    return any(c._get_function_stack_at(i) is mode for i in range(c._len_torch_function_stack()))


def is_inside_operator(mode: TorchDispatchMode) -> bool:
    """Whether a kernel, a subclass's handler or the handler of `mode` runs, where the mode is off."""
    c = torch._C
    is_on = any(c._get_dispatch_stack_at(i) is mode for i in range(c._len_torch_dispatch_stack()))
    return not is_on or c._dispatch_tls_is_dispatch_key_excluded(c.DispatchKey.AutogradFunctionality)


class ThreadDispatchMode(TorchDispatchMode):
    """A dispatch mode that leaves PyTorch's flag that some mode is on alone: the flag is one for all threads.

    Dynamo compiles nothing while the flag is set, and interleaved exits on two threads would leave it set.
    """

    def __enter__(self) -> Any:
        _push_mode(self)
        return self

    def __exit__(self, *_: object) -> None:
        _pop_mode()


@contextlib.contextmanager
def without_modes(function_mode: TorchFunctionMode | None, dispatch_mode: TorchDispatchMode) -> Iterator[None]:
    """Context: these two modes see nothing; other modes do. `function_mode` may be off, or None."""
    is_on = is_function_mode_on(function_mode)
    above: list[Any] = []
    while (mode := _pop_mode()) is not dispatch_mode:
        above.append(mode)
    functions: list[Any] = []
    while is_on and (above_function_mode := _pop_function_mode()) is not function_mode:
        functions.append(above_function_mode)
    _push_all(_push_mode, above)
    _push_all(_push_function_mode, functions)
    try:
        yield
    finally:
        for _ in functions:
            _pop_function_mode()
        for _ in above:
            _pop_mode()
        if is_on:
            _push_function_mode(function_mode)
        _push_mode(dispatch_mode)
        _push_all(_push_mode, above)
        _push_all(_push_function_mode, functions)


def _push_all(push: Callable[[Any], None], modes: list[Any]) -> None:
    for mode in reversed(modes):
        push(mode)


def current_autograd_node() -> Any:
    """The autograd node whose backward is running on this thread, or None."""
    return torch._C._current_autograd_node()


def current_dispatch_mode() -> Any:
    """The innermost dispatch mode on this thread, or None."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode

    return _get_current_dispatch_mode()


def next_sequence_nr() -> int:
    """The number that the next autograd node made on this thread gets."""
    return torch._C._autograd._get_sequence_nr()


def sequence_nr_of(node: Any) -> int:
    return node._sequence_nr()  # type: ignore[no-any-return]


_C: Any = torch._C
_replays_views, _set_view_replay = _C._is_view_replay_enabled, _C._set_view_replay_enabled


@contextlib.contextmanager
def force_view_tracking(on: bool = True) -> Iterator[None]:
    """Context: autograd remembers how each view was made, so that in-place writes replay views, not strides."""
    # A torch-function mode (`with torch.device(...)`) would call the replacements of these names during a capture.
    with torch._C.DisableTorchFunction():
        before = _replays_views()
        _set_view_replay(on)
    try:
        yield
    finally:
        with torch._C.DisableTorchFunction():
            _set_view_replay(before)


def symbolic_composites(on: bool) -> Any:
    """Context: composite operators keep symbolic sizes.

    Before 2.13 the C++ of some (matmul) reads sizes as plain numbers; their Python versions do not.
    """
    if not on or torch.__version__ >= (2, 13):  # type: ignore[operator]
        return contextlib.nullcontext()
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def disable_autocast() -> Any:
    return torch._C._DisableAutocast()


def is_tracing_functorch() -> bool:
    """Whether a torch.func transform is active on this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_anomaly: list[bool] = []


def _stop_watching() -> None:
    _anomaly[:] = [torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()]
    if _anomaly[0]:
        torch.set_anomaly_enabled(False)


def _watch_again() -> None:
    if _anomaly[0]:
        torch.set_anomaly_enabled(*_anomaly)


# Context: autograd's anomaly detection is off. The switch is one for all threads.
without_anomaly_mode = InPlace(_stop_watching, _watch_again)


def clear_autocast_cache() -> None:
    torch.clear_autocast_cache()


def single_threaded_backward() -> Any:
    """Context: a backward runs wholly on the calling thread, whatever the device."""
    return torch.autograd.set_multithreading_enabled(False)


@contextlib.contextmanager
def no_saved_tensors_hooks() -> Iterator[None]:
    """Context: hooks for saved tensors are off, except hooks that are set inside."""
    c = torch._C._autograd
    stack = []
    while (hooks := c._top_saved_tensors_default_hooks(True)) is not None:
        stack.append(hooks)
        c._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(stack):
            c._push_saved_tensors_default_hooks(*hooks)


@contextlib.contextmanager
def plain_execution() -> Iterator[None]:
    """Context: operators on real tensors just run: no modes, no history, no autocast."""
    with (
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunction(),
        torch._C._DisableAutocast(),
        torch.no_grad(),
    ):
        yield


_PYTHON = (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot)


def dispatching_again() -> Any:
    """Context: modes and fakes see operators called from C++ that would hide them."""
    c = torch._C
    excluded = c._dispatch_tls_local_exclude_set()
    if not any(map(excluded.has, _PYTHON)):
        return contextlib.nullcontext()
    for key in _PYTHON:
        excluded = excluded.remove(key)
    return c._ForceDispatchKeyGuard(c._dispatch_tls_local_include_set(), excluded)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operators on `device` draw from by default."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    index: int | None = device.index
    generator: torch.Generator = module.default_generators[module.current_device() if index is None else index]
    return generator


def kernel_switches() -> tuple[Any, ...]:
    """Settings of the process that the layout of an operator's result may depend on, besides its arguments."""
    c = torch._C
    return (
        torch.get_default_dtype(),
        c._get_default_device(),
        torch.is_inference_mode_enabled(),
        c._get_mkldnn_enabled(),
        c._get_nnpack_enabled(),
        c._get_cudnn_enabled(),
        c._get_cudnn_deterministic(),
        c._get_cudnn_benchmark(),
        c._get_deterministic_algorithms(),
        c._get_deterministic_algorithms_warn_only(),
        c._get_deterministic_fill_uninitialized_memory(),
    )
