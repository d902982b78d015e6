"""A compiled module: a module of the same class over the same state, whose forward goes through a dispatcher.

Both share one `__dict__`: what is set, moved, trained, loaded, hooked or frozen on one is so on the other. A forward
that is put on the instance or the class later is called as it is. What keeps something by module object finds under one
what it has kept under the other (`fully_shard` keeps its state so): they are equal, and hash alike.
"""

from __future__ import annotations

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules.lazy import LazyModuleMixin

from .dispatcher import Dispatcher

__all__ = ["Recipe", "behind", "forward_of", "make_compiled_module", "make_wrapper"]

Recipe = Callable[[torch.nn.Module], torch.nn.Module]
_NONE = object()
_STANDS_FOR = "_foregrad_module"


class _Forward:
    """`forward` of a compiled module. It has a setter, so that Python asks it before the instance's `__dict__`."""

    def __init__(self, module: torch.nn.Module, dispatcher: Dispatcher) -> None:
        self.module = module  # which may come to have another class, or another `__dict__`
        self.on_class = _forward_on_class(module)
        self.compiled = _call_through(dispatcher, module.forward)
        self.on_instance = vars(module).get("forward", _NONE)  # where TorchScript puts it once it was asked for
        self.unbound = _call_through(dispatcher, self.on_class, skip_self=True)

    def __get__(self, instance: torch.nn.Module | None, owner: type) -> Any:
        if instance is None:
            return self.unbound
        own = vars(self.module).get("forward", _NONE)
        if own is not self.on_instance:
            return own if own is not _NONE else types.MethodType(self.on_class, instance)
        if own is _NONE and (on_class := _forward_on_class(self.module)) is not self.on_class:
            return types.MethodType(on_class, self.module)
        return self.compiled

    def __set__(self, instance: torch.nn.Module, value: Any) -> None:
        vars(instance)["forward"] = value

    def __delete__(self, instance: torch.nn.Module) -> None:
        if vars(instance).pop("forward", _NONE) is _NONE:
            raise AttributeError("forward")


def forward_of(module: torch.nn.Module) -> Callable[..., Any]:
    """A bound method, by which the module is found: one of TorchScript's does not say whose it is. What a class defines
    as `__call__`, without a forward, is called in its place.
    """
    if calls_itself(module):
        return types.MethodType(type(module).__call__, module)
    return types.MethodType(_forward, module) if isinstance(module, torch.jit.ScriptModule) else module.forward


def calls_itself(module: torch.nn.Module) -> bool:
    """Whether a module has no forward, but a `__call__` of its own."""
    cls = type(module)
    own = cls.__call__ is not torch.nn.Module.__call__
    return own and getattr(cls, "forward", None) is torch.nn.Module.forward and "forward" not in vars(module)


def _forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _forward_on_class(module: torch.nn.Module) -> Any:
    """The function, or, of a class of TorchScript's, which has one for instances only, what stands there."""
    cls = type(module)
    return inspect.getattr_static(cls, "forward") if isinstance(module, torch.jit.ScriptModule) else cls.forward


def _call_through(dispatcher: Dispatcher, like: Any, *, skip_self: bool = False) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        return dispatcher(*args[skip_self:], **kwargs)

    functools.update_wrapper(forward, like)
    return forward


def make_compiled_module(module: torch.nn.Module, dispatcher: Dispatcher, recipe: Recipe) -> torch.nn.Module:
    """`module` compiled by `dispatcher`. `recipe` compiles another module in the same way: copies are made with it,
    and pickles hold it.
    """
    attributes: dict[str, Any] = {"forward": _Forward(module, dispatcher), "foregrad": dispatcher}
    if calls_itself(module):
        attributes["__call__"] = _call_through(dispatcher, type(module).__call__, skip_self=True)
    return _over_the_state_of(module, attributes, recipe)


def make_wrapper(wrapper: torch.nn.Module, inner: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    """`wrapper`, a module whose forward runs `wrapper.module` and is not to be compiled, over that module compiled."""
    attributes = {"module": property(lambda _self: inner), "foregrad": inner.foregrad}
    return _over_the_state_of(wrapper, attributes, recipe)


def _over_the_state_of(module: torch.nn.Module, attributes: dict[str, Any], recipe: Recipe) -> torch.nn.Module:
    cls = type(module)

    def deep_copy(self: torch.nn.Module, memo: dict[int, Any]) -> torch.nn.Module:
        memo[id(self)] = copied = recipe(copy.deepcopy(module, memo))
        return copied

    body = {
        **attributes,
        "__eq__": lambda self, other: self is other or module is other or behind(other) is module,
        "__hash__": lambda self: hash(module),
        _STANDS_FOR: property(lambda self: module),
        "__copy__": lambda self: recipe(copy.copy(module)),
        "__deepcopy__": deep_copy,
        "__reduce_ex__": lambda self, protocol: (_compile_again, (recipe, module)),
    }
    lazy = {"cls_to_become": property(_Becoming(module, body))} if isinstance(module, LazyModuleMixin) else {}
    compiled: torch.nn.Module = object.__new__(_class_like(cls, body | lazy))
    object.__setattr__(compiled, "__dict__", module.__dict__)
    return compiled


def behind(value: Any) -> torch.nn.Module | None:
    """The module that a compiled one is over; None for any other value."""
    own: Any = getattr(type(value), _STANDS_FOR, None)
    return own.__get__(value) if isinstance(own, property) else None


def _class_like(cls: type, body: dict[str, Any]) -> type:
    told = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls,), told | body)


class _Becoming:
    """What the class of a lazy module that is compiled becomes once it has parameters: that of the module becomes what
    it is to be, that of the compiled one a class like it.
    """

    def __init__(self, module: Any, body: dict[str, Any]) -> None:
        self.module, self.wanted = module, type(module).cls_to_become
        self.made = None if self.wanted is None else _class_like(self.wanted, body)

    def __call__(self, compiled: Any) -> Any:
        if self.made is not None and type(self.module) is not self.wanted:
            if self.module.has_uninitialized_params():
                return self.wanted
            self.module.__class__ = self.wanted
        return self.made


def _compile_again(recipe: Recipe, module: torch.nn.Module) -> torch.nn.Module:
    return recipe(module)
