"""The state of the thread: the autograd engine, dispatch and function modes, autocast. Checked on torch 2.13.0."""

from __future__ import annotations

import _thread
import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode, _push_mode

from ..locks import ProcessPatch
from .versions import is_at_least

__all__ = ["TorchFunctionMode", "forward_ad"]  # handed on

disable_autocast = torch._C._DisableAutocast
is_any_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
keeps_versions = torch.autograd.grad_mode._unsafe_preserve_version_counter
current_backward: Callable[[], int] = torch._C._current_graph_task_id  # its number; -1 where none is running
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
transforms_active: Callable[[], bool] = torch._C._are_functorch_transforms_active
count_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
count_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
heard_by_modes: Callable[..., Any] = torch.overrides.handle_torch_function  # calls a function as one of torch


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """The C++ apply of a Function, without its wrapper in Python: that looks for functorch transforms up to 2.14."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc, no-any-return]


def beside_threads(apply: Callable[..., object]) -> Callable[..., Any]:
    """An apply from `direct_apply` that doesn't deadlock with threads that share leaves.

    `Function.apply` locks each leaf to find its accumulator while it holds the GIL. An operator in a second thread may
    wait for the GIL under the lock, if only Python holds the accumulator, as after a read of `next_functions`. An
    alias, made without the GIL, holds the accumulators too.
    """

    def call(others: object, *taken: torch.Tensor) -> Any:
        if _thread._count() and torch.is_grad_enabled():
            _held = [x.view_as(x) for x in taken if x.requires_grad and (x.is_leaf or x._is_view())]
        return apply(others, *taken)

    return call


_FEW = 16  # gradients that may be asked for singly


def wanted_gradients(node: Any, *, exact: bool = False) -> tuple[bool, ...] | None:
    """A mask of a running node's needed gradients: for `inputs=` or on the way there. None: all.

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
    # For a leaf in autograd.grad's `inputs=` the query raises, and an error takes as long as a hundred answers. So only
    # the first and the last such leaf are queried: all gradients between them count as needed.
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


def is_node_with(node: object, attribute: str) -> bool:
    """Whether a node is foregrad's: in C++, or of a Function with the attribute."""
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


# --------------------------------------------------------------------------------------------------------------- modes


# Context: torch functions reach no mode and no subclass. Kept from import on: during a capture the name leads to a
# replacement.
without_torch_functions: Callable[[], Any] = torch._C.DisableTorchFunction


def is_function_mode_on(mode: TorchFunctionMode | None) -> bool:
    """Whether `mode` sees torch functions called now; in its own handler it does not."""
    c = torch._C
    return any(c._get_function_stack_at(i) is mode for i in range(c._len_torch_function_stack()))


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
    """Context: both modes see nothing; other modes see all. `function_mode` may be off, or None."""
    is_on = is_function_mode_on(function_mode)
    above: list[object] = []
    while (mode := _pop_mode()) is not dispatch_mode:
        above.append(mode)
    functions: list[object] = []
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


def _push_all(push: Callable[[Any], None], modes: list[object]) -> None:
    for mode in reversed(modes):
        push(mode)


# On this thread: the autograd node whose backward is running, or None; the innermost dispatch mode, or None; the number
# that the next autograd node gets.
current_autograd_node: Callable[[], Any] = torch._C._current_autograd_node
current_dispatch_mode: Callable[[], Any] = _get_current_dispatch_mode
next_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr


def sequence_nr_of(node: Any) -> int:
    number: int = node._sequence_nr()
    return number


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
    if not on or is_at_least(2, 13):
        return contextlib.nullcontext()
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


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
without_anomaly_mode = ProcessPatch(_stop_watching, _watch_again)


def single_threaded_backward() -> Any:
    """Context: a backward runs wholly on the calling thread, on any device."""
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


def default_generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """The generators of the devices, but for devices that draw nothing: `meta`, and accelerators that are not there."""
    return [default_generator(device) for device in devices if device.type == "cpu" or _is_there(device)]


def _is_there(device: torch.device) -> bool:
    module = None if device.type == "meta" else torch.get_device_module(device)
    return module is not None and bool(getattr(module, "is_initialized", module.is_available)())


def kernel_switches() -> tuple[object, ...]:
    """Settings of the process that the layout of an operator's result may depend on, besides its arguments."""
    c = torch._C
    return (
        torch.get_default_dtype(), c._get_default_device(), torch.is_inference_mode_enabled(),
        c._get_mkldnn_enabled(), c._get_nnpack_enabled(), c._get_cudnn_enabled(), c._get_cudnn_deterministic(),
        c._get_cudnn_benchmark(), c._get_deterministic_algorithms(), c._get_deterministic_algorithms_warn_only(),
        c._get_deterministic_fill_uninitialized_memory(),
    )  # fmt: skip


# -------------------------------------------------------------------- gradients that are handed on
# Gradients that go from one autograd node to another whole, beside the edges between them.
#
# Edges of the compiled function's node carry plain tensors of the captured sizes. A gradient that differs in kind
# (class, metadata, a plain tensor for a wrapper) is left with the node, for the backward that runs now.


TAKES_HANDED = "takes_handed"  # an attribute of Functions whose backward looks for such gradients
_HANDED = "foregrad: gradients of other kinds"  # in a node's metadata


def hand_over(edges: Sequence[tuple[object, int]], gradient: object) -> bool:
    """Leave a gradient with the compiled function that all these edges lead to. False if there is no single one."""
    connected = [edge for edge in edges if edge[0] is not None]
    nodes = {node for node, _ in connected}
    if len(nodes) != 1 or not is_node_with(connected[0][0], TAKES_HANDED):
        return False
    hand_to(connected[0][0], gradient, tuple(number for _, number in connected))
    return True


def hand_to(node: Any, gradient: object, places: tuple[int, ...] = ()) -> None:
    """Leave a gradient with a node that runs later in the backward."""
    node.metadata.setdefault(_HANDED, []).append((current_backward(), places, gradient))


def take_handed(node: Any) -> list[tuple[tuple[int, ...], object]]:
    """The gradients left with a node in the backward, each with its outputs."""
    handed = node.metadata.pop(_HANDED, ())
    return [(places, gradient) for backward, places, gradient in handed if backward == current_backward()]


@contextlib.contextmanager
def all_modes_off() -> Iterator[None]:
    """Context: no dispatch modes, so that tensors made here are real ones."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        yield
