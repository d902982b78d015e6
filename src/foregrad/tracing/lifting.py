"""Tensors the function reaches by itself, replaced by stand-ins the moment a torch function is given one.

A torch-function mode sees each call before autograd does, so a parameter or closed-over tensor can be swapped for
its fake without touching the module it lives in: the user's code sees its own objects throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._torch.dispatch import TorchFunctionMode
from .._torch.fakes import FakeTensor
from .._torch.tensors import is_inside_transform
from .._torch.transforms import bottom_of
from ..errors import UnsupportedSideEffectError
from .formulas import VALUES_ONLY, eigenvalues_only
from .functions import READERS

__all__ = ["Lifting"]

_TENSOR: Any = torch.Tensor
_KEEP_REAL = {_TENSOR.grad.__get__, _TENSOR.__hash__, _TENSOR.__repr__}


class Lifting(TorchFunctionMode):
    """Swaps real tensors for stand-ins in the arguments of every torch function.

    `adopt(tensor)` returns the stand-in. `on_detach(tensor)` is told before
    `tensor.detach_()`, `on_data(result)` after `tensor.data`, `on_data_assignment(tensor, source)` after
    `tensor.data = source`.
    """

    def __init__(
        self,
        adopt: Callable[[torch.Tensor], torch.Tensor],
        on_detach: Callable[[torch.Tensor], None],
        on_data: Callable[[torch.Tensor], None],
        on_data_assignment: Callable[[torch.Tensor, torch.Tensor], None],
        where: Callable[[], str],
        known_number: Callable[[Any], Any],
    ) -> None:
        super().__init__()
        self.adopt = adopt
        self.on_detach = on_detach
        self.on_data = on_data
        self.on_data_assignment = on_data_assignment
        self.where = where
        self.known_number = known_number

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KEEP_REAL:
            return func(*args, **(kwargs or {}))
        args, kwargs = self.swap(args, kwargs or {})
        special = _SPECIAL.get(func)
        if special is not None:
            return special(self, func, args, kwargs)
        reader = READERS.get(func)
        if reader is not None:
            return reader(func, args, kwargs)
        return func(*args, **kwargs)

    def swap(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with a stand-in for each real tensor."""
        for arg in args:
            if type(arg) is not FakeTensor and isinstance(arg, (torch.Tensor, list, tuple, dict)):
                args = tuple(map(self._swapped, args))
                break
        if kwargs:
            kwargs = {key: self._swapped(value) for key, value in kwargs.items()}
        return args, kwargs

    def _swapped(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # A fake, and what a transform inside the function wraps around one, is the capture's own.
            is_ours = isinstance(bottom_of(value) if is_inside_transform(value) else value, FakeTensor)
            return value if is_ours else self.adopt(value)
        cls = type(value)
        if cls is list or cls is tuple:
            if not any(isinstance(item, (torch.Tensor, list, tuple, dict)) for item in value):
                return value
            return cls(self._swapped(item) for item in value)
        if cls is dict:
            return {key: self._swapped(item) for key, item in value.items()}
        return value

    def _backward(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise UnsupportedSideEffectError(
            f"`.backward()` at {self.where()} inside a compiled function writes gradients into tensors, which a "
            "compiled call can't repeat. Use torch.autograd.grad, or call backward outside."
        )

    def _item(self, func: Any, args: Any, kwargs: Any) -> Any:
        number = func(*args, **kwargs)
        return self.known_number(number) if isinstance(number, torch.SymFloat) else number

    def _values_only(self, func: Any, args: Any, kwargs: Any) -> Any:
        with eigenvalues_only():
            return func(*args, **kwargs)

    def _detach_in_place(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.on_detach(args[0])
        return func(*args, **kwargs)

    def _take_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self.on_data(result)
        return result

    def _assign_data(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        self.on_data_assignment(args[0], args[1])
        return result


_SPECIAL: dict[Any, Callable[[Lifting, Any, Any, Any], Any]] = {
    **dict.fromkeys(VALUES_ONLY, Lifting._values_only),
    torch.Tensor.backward: Lifting._backward,
    torch.Tensor.item: Lifting._item,
    torch.Tensor.detach_: Lifting._detach_in_place,
    torch.Tensor.data.__get__: Lifting._take_data,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: Lifting._assign_data,  # type: ignore[attr-defined]
}
