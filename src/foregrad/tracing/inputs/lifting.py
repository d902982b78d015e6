"""Tensors the function reaches by itself, replaced by stand-ins the moment a torch function is given one.

A torch-function mode sees each call before autograd does, so a parameter or closed-over tensor can be swapped for
its fake without touching the module it lives in: the user's code sees its own objects throughout.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ..._torch.engine import TorchFunctionMode, dispatching_again, is_function_mode_on, single_threaded_backward
from ..._torch.hooks import unless_cut
from ..._torch.levels import bottom_of
from ..._torch.ops import Args, Kwargs
from ..._torch.patches import applied_function, is_capturing
from ..._torch.stand_ins import is_stand_in
from ..._torch.tensors import is_inside_transform
from ..._torch.wrappers import is_of_capture
from ...errors import UnsupportedError, UnsupportedLayoutError, UnsupportedOpError
from ...house import is_program_module
from ...interrupts import deliver, held
from ..heap.recording import Host
from ..kernels.checks import VALUE_CHECKS
from ..kernels.plans import DETERMINANTS, VALUES_ONLY, eigenvalues_only, watch_determinant
from ..recorder.recorder import Recorder
from ..values.numbers import warn_of_scalar

_TENSOR: Any = torch.Tensor
_KEEP_REAL = {_TENSOR.__hash__}
_GRAD = _TENSOR.grad.__get__


class Overriding(Protocol):
    """The first to see torch functions, once the program has tensors of classes that override torch functions."""

    def torch_function(
        self, mode: object, run: Callable[..., object], func: object, types: object, args: Args, kwargs: Kwargs
    ) -> Any:
        """The result of a torch function; `run(func, args, kwargs)` would compute it."""

    def handed(self, tensor: torch.Tensor) -> None:
        """A part of PyTorch is handed a tensor: raise for one that only its class knows how to handle."""


class Lifting(TorchFunctionMode):
    """Swaps real tensors for stand-ins in the arguments of every torch function."""

    def __init__(self, host: Host, recorder: Recorder) -> None:
        super().__init__()
        self.host, self.recorder = host, recorder
        self.rows = host.aspects.rows
        self.where = host.where
        self.overriding: Overriding | None = None
        self.heard: Callable[..., Any] | None = None  # calls a torch function, and hears its warnings
        self.accumulated_at = ""  # where the last `backward()` is
        self.has_hooks = False  # the function has registered some on its own tensors

    def __torch_function__(self, func: object, types: object, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if held.pending:
            deliver()
        run = self._run if self.heard is None else functools.partial(self.heard, self._run)
        if self.overriding is not None:
            return self.overriding.torch_function(self, run, func, types, args, kwargs or {})
        return run(func, args, kwargs or {})

    def _run(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        if func in _KEEP_REAL:
            return func(*args, **(kwargs or {}))
        answer = self.host.ask(func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        if func is _GRAD:
            return func(*args)
        args, kwargs = self.swap(args, kwargs or {})
        row = self.rows.get(func)
        if row is not None:
            return row(func, args, kwargs)
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        return func(*args, **kwargs)

    def settle(self, *, has_hooks: bool) -> None:
        """The function has run: whether hooks are left on its own tensors."""
        self.has_hooks = has_hooks

    def in_engine(self, roots: Sequence[object] | None) -> contextlib.AbstractContextManager[None]:
        """Context for autograd's engine, wholly on this thread: torch functions in the backward of a custom Function,
        and in hooks, get stand-ins too. `roots`: see `Hooks.engine`.
        """
        if roots is None:
            return self._engine(contextlib.nullcontext())
        self.accumulated_at = self.where()
        return self._engine(self.host.accumulating(roots))

    @contextlib.contextmanager
    def _engine(self, around: contextlib.AbstractContextManager[None]) -> Iterator[None]:
        with around, single_threaded_backward(), contextlib.nullcontext() if is_function_mode_on(self) else self:
            yield

    def swap(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Args, Kwargs]:
        """The arguments, with a stand-in for each real tensor."""
        for arg in args:
            if not is_stand_in(arg) and isinstance(arg, (torch.Tensor, list, tuple, dict)):
                args = tuple([arg if is_stand_in(arg) else self._swapped(arg) for arg in args])
                break
        if kwargs:
            kwargs = {key: self._swapped(value) for key, value in kwargs.items()}
        return args, kwargs

    def _swapped(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # A fake, and a transform's wrapper around a fake, is the capture's own.
            if self.overriding is not None:
                self.overriding.handed(value)
            is_ours = is_of_capture(bottom_of(value) if is_inside_transform(value) else value)
            return value if is_ours else self.host.adopt(value)
        cls = type(value)
        if cls is list or cls is tuple:
            items = list(map(self._swapped, value))
            return value if all(map(operator.is_, items, value)) else cls(items)
        if cls is dict:
            items = list(map(self._swapped, value.values()))
            return value if all(map(operator.is_, items, value.values())) else dict(zip(value, items, strict=True))
        return value

    def _sparse(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        raise UnsupportedLayoutError(
            f"`torch.{func.__name__}` makes a tensor that is not strided, at {self.where()}. Only strided tensors "
            "can be compiled: make it, and do its computation, in a function that `foregrad.eager_region` marks."
        )

    def _quantized(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        raise UnsupportedLayoutError(
            f"`torch.{func.__name__}` at {self.where()} makes a quantized tensor; its kernels can't be run without "
            "values. Keep this part outside, or mark it with `foregrad.eager_region`."
        )

    def _numpy(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        custom = applied_function()
        if custom is not None:
            self.host.on_numpy(custom)
        raise UnsupportedOpError(
            f"`.{func.__name__}` at {self.where()} hands a tensor to NumPy or another library, and no graph can hold "
            "its work. Use PyTorch's own functions, `.tolist()` or `.item()` for numbers, or put the part into a "
            "function that `foregrad.eager_region` marks."
        )

    def _address(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        raise UnsupportedError(f"the address of a tensor is read at {self.where()}: it differs in each call.")

    def _hook(self, func: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        hook = args[1] if len(args) > 1 else kwargs["hook"]
        handle = func(args[0], unless_cut(self.host.hook_instead(hook)))
        self.has_hooks = True
        self.host.on_hook(args[0], hook, handle)
        return handle

    def _names(self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        return [name for name in func(*args, **kwargs) if name != "__getattr__"]  # see patches.py

    def _item(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        number = func(*args, **kwargs)
        is_symbol = isinstance(number, (torch.SymFloat, torch.SymInt))
        return self.recorder.decisions.numbers.ours(number) if is_symbol else number

    def _size(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """To the program, symbolic sizes are integers."""
        sizes = func(*args, **kwargs)
        is_told = self.recorder.is_symbolic and is_capturing() and _asked_by_program()
        return self.recorder.decisions.numbers.sizes(sizes) if is_told else sizes

    def _number(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """As a number of Python's: constructors such as `torch.FloatTensor` may ask for one. A branch on a number is on
        its truth, not on its value.
        """
        with dispatching_again():
            return (
                func(*args, **kwargs) if func is not _TENSOR.__bool__ else bool(self._item(_TENSOR.item, args, kwargs))
            )

    def _warn(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        self.host.pause()  # how warnings are shown is not the function's
        try:
            func()
        finally:
            self.host.go_on()

    def _values_only(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        with eigenvalues_only():
            return func(*args, **kwargs)

    def _checked(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        given, named = tuple(map(_below_transforms, args)), {k: _below_transforms(v) for k, v in kwargs.items()}
        self.recorder.checks.note(VALUE_CHECKS[func], given, named)
        return func(*args, **kwargs)

    def _determinant(self, func: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        result = func(*args, **kwargs)
        watch_determinant(result, args[0] if args else next(iter(kwargs.values())))
        return result

    def _take_data(self, func: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        result = func(*args, **kwargs)
        self.recorder.taken_as_data(result)
        return result

    def _assign_data(self, func: Callable[..., object], args: Args, kwargs: Kwargs) -> object:
        result = func(*args, **kwargs)
        self.recorder.replaced_by(args[0], args[1])
        return result


def _below_transforms(value: object) -> object:
    return bottom_of(value) if isinstance(value, torch.Tensor) and is_inside_transform(value) else value


_SPARSE = [torch.sparse_coo_tensor, torch.sparse_csr_tensor, torch.sparse_csc_tensor, torch.sparse_bsr_tensor]
_SPARSE += [torch.sparse_bsc_tensor, torch.sparse_compressed_tensor]
_QUANTIZED = [
    getattr(torch, name)
    for name in ("quantize_per_tensor", "quantize_per_tensor_dynamic", "quantize_per_channel")
    if hasattr(torch, name)
]
_ADDRESSES = [getattr(torch.Tensor, name) for name in ("const_data_ptr",) if hasattr(torch.Tensor, name)]
_NUMBERS = [_TENSOR.__float__, _TENSOR.__int__, _TENSOR.__index__, _TENSOR.__bool__, _TENSOR.__complex__]


def _asked_by_program() -> bool:
    """Whether the code that calls a torch function is the program's."""
    return is_program_module(sys._getframe(_ASKER).f_globals.get("__name__"))


_ASKER = 4  # frames from `_asked_by_program` to that code
_SIZES = [_TENSOR.shape.__get__, _TENSOR.size, _TENSOR.stride, _TENSOR.numel, _TENSOR.nelement, _TENSOR.storage_offset]

_SPECIAL: dict[object, Callable[[Lifting, Any, Any, Any], object]] = {
    **dict.fromkeys(VALUES_ONLY, Lifting._values_only),
    **dict.fromkeys(VALUE_CHECKS, Lifting._checked),
    **dict.fromkeys(DETERMINANTS, Lifting._determinant),
    **dict.fromkeys(_SPARSE, Lifting._sparse),
    **dict.fromkeys(_QUANTIZED, Lifting._quantized),
    **dict.fromkeys((torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__dlpack__), Lifting._numpy),
    **dict.fromkeys(_ADDRESSES, Lifting._address),
    _TENSOR.to_mkldnn: Lifting._sparse,
    torch.Tensor.item: Lifting._item,
    **dict.fromkeys(_NUMBERS, Lifting._number),
    warn_of_scalar: Lifting._warn,
    **dict.fromkeys(_SIZES, Lifting._size),
    torch.Tensor.register_hook: Lifting._hook,
    torch.Tensor.__dir__: Lifting._names,
    _TENSOR.data.__get__: Lifting._take_data,
    _TENSOR.data.__set__: Lifting._assign_data,
}
