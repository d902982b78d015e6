"""Tensors of classes with `__torch_function__` alone, in a capture. Checked on torch 2.13.0.

During a capture the program holds a handle for the tensor: an object of its class, with the attributes and without
data. The mode that sees each torch function passes the handle to the class as eager does. Functions that the class then
calls run on the stand-ins of the handles.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer

from ..._torch.ops import Args, Kwargs
from ..._torch.stand_ins import become_parameter
from ...errors import UnsupportedTensorError
from ...identity import ById, IdSet
from ...locks import Bind

_C: Any = torch._C
_TENSOR: Any = torch.Tensor
_as_subclass, _make_subclass = _TENSOR.as_subclass, _TENSOR._make_subclass
_NOT_THESE = (torch.nn.Parameter, UninitializedBuffer)
# Functions that read or change the tensor object itself, not its values.
_OF_THE_OBJECT: frozenset[Any] = frozenset(
    [getattr(_TENSOR, name).__get__ for name in ("grad", "_base", "_backward_hooks", "retains_grad")]
    + [getattr(_TENSOR, name).__set__ for name in ("grad", "data", "requires_grad")]
    + [_TENSOR.grad.__delete__, _TENSOR._is_view, _TENSOR.requires_grad_, _TENSOR.detach_, _TENSOR.retain_grad]
    + [_TENSOR.register_hook, _TENSOR.register_post_accumulate_grad_hook, _TENSOR.set_]
    + [getattr(_TENSOR, f"{name}_") for name in ("resize", "resize_as", "t", "transpose", "swapaxes", "swapdims")]
    + [getattr(_TENSOR, f"{name}_") for name in ("squeeze", "unsqueeze", "as_strided")]
)
_WITH_GRADIENTS: frozenset[Any] = frozenset(
    [_TENSOR.is_leaf.__get__, _TENSOR.grad_fn.__get__, _TENSOR.output_nr.__get__]
)


def is_function_class(cls: type) -> bool:
    """Whether tensors of a class are plain data, and the class only overrides torch functions."""
    is_one = _is_class_of_functions.get(cls)
    if is_one is None:
        is_one = _is_class_of_functions[cls] = _is_function_class(cls)
    return is_one


_is_class_of_functions: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def only_overrides(cls: type) -> bool:
    """Whether tensors or parameters of a class are plain, and the class only overrides torch functions."""
    return is_function_class(cls) or (issubclass(cls, torch.nn.Parameter) and _overrides_functions(cls))


def _is_function_class(cls: type) -> bool:
    if cls is torch.Tensor or not issubclass(cls, torch.Tensor) or issubclass(cls, _NOT_THESE):
        return False
    return _overrides_functions(cls)


def _overrides_functions(cls: Any) -> bool:
    own = cls.__torch_dispatch__ is _TENSOR.__torch_dispatch__
    return own and not hasattr(cls, "__tensor_flatten__") and cls.__module__.partition(".")[0] != "torch"


def plain_alias(tensor: torch.Tensor) -> torch.Tensor | None:
    """A plain tensor with the data and the history of a tensor of a class; None if no alias is equivalent."""
    with _C.DisableTorchFunctionSubclass(), torch.enable_grad():
        alias = _as_subclass(tensor, torch.Tensor)
        return alias if alias.requires_grad is tensor.requires_grad else None


def as_class(tensor: torch.Tensor, cls: type, attributes: dict[str, Any]) -> Any:
    """A new plain tensor turned into one of a class."""
    tensor.__class__ = cls
    tensor.__dict__.update(attributes)
    return tensor


def _empty() -> torch.Tensor:
    with _C._DisableTorchDispatch(), _C.DisableTorchFunction():
        return torch.empty(0, device="meta")


class FunctionClasses:
    """The handles of one capture. `where()` is the user's line."""

    def __init__(self, where: Callable[[], str]) -> None:
        self.where = where
        self._stand_ins: ById[Any, torch.Tensor] = ById()  # by handle
        self._handles: ById[torch.Tensor, Any] = ById()  # by stand-in
        self._given: IdSet[Any] = IdSet()  # the handles of arguments

    def __bool__(self) -> bool:
        return bool(self._stand_ins)

    def begin(self) -> None:
        """The first handle is about to be made."""

    def given(self, cls: type, stand_in: torch.Tensor, attributes: dict[str, Any]) -> Any:
        """The handle of an argument, with the argument's own table of attributes."""
        handle = self._handles.get(stand_in)
        if handle is None:
            handle = self._handle(cls, stand_in)
            handle.__dict__ = attributes
            self._given.add(handle)
        return handle

    def _handle(self, cls: type, stand_in: torch.Tensor) -> Any:
        if not self._stand_ins:
            self.begin()
        with _C._DisableTorchDispatch(), _C.DisableTorchFunction():
            handle = _make_subclass(cls, _empty())
        self._stand_ins[handle] = stand_in
        self._handles[stand_in] = handle
        return handle

    def is_given(self, handle: Any) -> bool:
        """Whether a handle is that of an argument."""
        return handle in self._given

    def stand_in(self, handle: Any) -> torch.Tensor | None:
        """The stand-in of a handle; None for any other object."""
        return self._stand_ins.get(handle)

    # ---------------------------------------------------------------- torch functions

    def by_class(self, mode: Any, func: Any, types: Any, args: Args, kwargs: Kwargs) -> Any:
        """The result of a torch function by the classes of its arguments; `NotImplemented` if none overrides it."""
        if not types or not _C._is_torch_function_enabled() or not any(map(is_function_class, types)):
            return NotImplemented
        keywords = () if kwargs is None else (kwargs,)
        with mode:
            for value in _overloaded(types, args, kwargs or {}):
                result = value.__torch_function__(func, types, args, *keywords)
                if result is not NotImplemented:
                    return result
        raise TypeError(
            f"no implementation found for '{func}' on types that implement __torch_function__: {list(types)}"
        )

    def run(self, call: Callable[..., Any], func: Any, args: Args, kwargs: Kwargs) -> Any:
        """A torch function on the stand-ins of its arguments; a stand-in among the results becomes its handle."""
        used: ById[torch.Tensor, Any] = ById()  # the handles by stand-in
        args = tuple(self._plain(arg, used) for arg in args)
        kwargs = {key: self._plain(value, used) for key, value in (kwargs or {}).items()}
        of_arguments = [stand_in for stand_in, handle in used.items() if handle in self._given]
        if of_arguments and (func in _OF_THE_OBJECT or (func in _WITH_GRADIENTS and _requires_grad(of_arguments[0]))):
            self.refuse(next(iter(used.values())), f"`{getattr(func, '__name__', func)}` of")
        result = call(func, args, kwargs)
        return self._back(result, used) if used else result

    def refuse(self, handle: Any, what: str) -> None:
        raise UnsupportedTensorError(
            f"{what} a {type(handle).__qualname__} at {self.where()}: tensors of a class with `__torch_function__` "
            "alone can be compiled only in PyTorch's functions. Use a plain tensor there "
            "(`.as_subclass(torch.Tensor)`)."
        )

    def _plain(self, value: Any, used: ById[torch.Tensor, Any]) -> Any:
        if isinstance(value, torch.Tensor):
            stand_in = self._stand_ins.get(value)
            if stand_in is None:
                return value
            used[stand_in] = value
            return stand_in
        if type(value) in (list, tuple):
            return type(value)(self._plain(item, used) for item in value)
        if type(value) is dict:
            return {key: self._plain(item, used) for key, item in value.items()}
        return value

    def _back(self, result: Any, used: ById[torch.Tensor, Any]) -> Any:
        if isinstance(result, torch.Tensor):
            return used.get(result, result)
        if type(result) in (list, tuple) and any(item in used for item in result):
            return type(result)(self._back(item, used) for item in result)
        return result

    # ---------------------------------------------------------------- other classes

    def as_subclass(self, tensor: Any, cls: type, adopt: Callable[[Any], Any]) -> Any:
        """`tensor.as_subclass(cls)`, unseen by modes."""
        alias = torch.ops.aten.alias.default(self._own(tensor, adopt))
        return alias if cls is torch.Tensor else self._handle(cls, alias)

    def make_subclass(self, cls: type, tensor: Any, requires_grad: bool, adopt: Callable[[Any], Any]) -> Any:
        """`torch.Tensor._make_subclass(cls, tensor, requires_grad)`."""
        alias = self._own(tensor, adopt).detach()
        alias.requires_grad_(requires_grad)
        if cls is torch.nn.Parameter:
            become_parameter(alias)
        return alias if cls in (torch.Tensor, torch.nn.Parameter) else self._handle(cls, alias)

    def _own(self, tensor: Any, adopt: Callable[[Any], Any]) -> Any:
        own = self.stand_in(tensor)
        return adopt(tensor) if own is None else own


def _requires_grad(fake: torch.Tensor) -> bool:
    with _C.DisableTorchFunction():
        return fake.requires_grad


def _overloaded(types: Any, args: Args, kwargs: Kwargs) -> list[Any]:
    """The arguments of the `types`, one of each, in PyTorch's order: subclasses first."""
    overriding: list[Any] = []
    todo = [*args, *kwargs.values()]
    for value in todo:
        if type(value) in types:
            if all(type(value) is not type(other) for other in overriding):
                at = (i for i, other in enumerate(overriding) if issubclass(type(value), type(other)))
                overriding.insert(next(at, len(overriding)), value)
        elif type(value) in (list, tuple):
            todo += value
    return overriding


def install(bind: Bind, handles: Callable[[], FunctionClasses | None], adopt: Callable[[Any], Any]) -> None:
    """Replace the two functions that make tensors of classes and call no torch-function mode."""

    def of_class(self: torch.Tensor, cls: Any) -> Any:
        classes = handles()
        if classes is None or not (cls is torch.Tensor or is_function_class(cls)):
            return _as_subclass(self, cls)
        return classes.as_subclass(self, cls, adopt)

    def made_of_class(cls: Any, data: torch.Tensor, require_grad: bool = False, **kwargs: Any) -> Any:
        classes = handles()
        if classes is None or kwargs or not (cls in (torch.Tensor, torch.nn.Parameter) or is_function_class(cls)):
            return _make_subclass(cls, data, require_grad, **kwargs)
        return classes.make_subclass(cls, data, require_grad, adopt)

    bind(torch.Tensor, "as_subclass", of_class)
    bind(torch.Tensor, "_make_subclass", staticmethod(made_of_class))
