"""A compiled module: a module of the original's class over the original's state, with a forward that goes through a
dispatcher.

Both share one `__dict__`: an attribute that is set, moved, trained, loaded, hooked or frozen on one is so on the other.
A forward that is put on the instance or the class later is called as it is. The two are equal and hash alike, so a dict
with modules as keys (`fully_shard` keeps its state so) has one entry for both.
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

from ..extend import MODULE_BEHIND, module_behind
from ..frontend.call import calls_itself
from .dispatcher import Dispatcher

Recipe = Callable[[torch.nn.Module], torch.nn.Module]
_NONE = object()
_STATE = "_foregrad_state"


class _Compiled:
    """The state of one compiled module. The object holds it, not its class: only the collector frees a class."""

    def __init__(self, module: torch.nn.Module, recipe: Recipe) -> None:
        self.module = module  # its class and its `__dict__` may be replaced
        self.recipe = recipe


class _Forward(_Compiled):
    """A module with a forward that goes through a dispatcher."""

    def __init__(self, module: torch.nn.Module, recipe: Recipe, dispatcher: Dispatcher) -> None:
        super().__init__(module, recipe)
        self.foregrad = dispatcher
        self.on_class = _forward_on_class(module)
        self.compiled = _call_through(dispatcher, module.forward)
        self.on_instance = vars(module).get("forward", _NONE)  # where TorchScript puts it once it was asked for

    def forward(self, instance: torch.nn.Module) -> Any:
        own = vars(self.module).get("forward", _NONE)
        if own is not self.on_instance:
            return own if own is not _NONE else types.MethodType(self.on_class, instance)
        if own is _NONE and (on_class := _forward_on_class(self.module)) is not self.on_class:
            return types.MethodType(on_class, self.module)
        return self.compiled


class _Around(_Compiled):
    """A module that runs `inner`, a compiled one, where it would run its own module."""

    def __init__(self, module: torch.nn.Module, recipe: Recipe, inner: torch.nn.Module) -> None:
        super().__init__(module, recipe)
        self.inner, self.foregrad = inner, inner.foregrad


class _ForwardAttribute:
    """`forward` of a compiled module. It has a setter, so that Python asks it before the instance's `__dict__`."""

    def __init__(self, on_class: Any) -> None:
        def forward(self: torch.nn.Module, *args: object, **kwargs: object) -> Any:
            return _state(self).compiled(*args, **kwargs)

        self.unbound = functools.update_wrapper(forward, on_class)

    def __get__(self, instance: torch.nn.Module | None, owner: type) -> Any:
        return self.unbound if instance is None else _state(instance).forward(instance)

    def __set__(self, instance: torch.nn.Module, value: object) -> None:
        vars(instance)["forward"] = value

    def __delete__(self, instance: torch.nn.Module) -> None:
        if vars(instance).pop("forward", _NONE) is _NONE:
            raise AttributeError("forward")


def _forward_on_class(module: torch.nn.Module) -> Any:
    """The class's forward; for a class of TorchScript's, with a forward on instances only, that attribute."""
    cls = type(module)
    return inspect.getattr_static(cls, "forward") if isinstance(module, torch.jit.ScriptModule) else cls.forward


def _call_through(dispatcher: Dispatcher, like: Any) -> Callable[..., object]:
    def forward(*args: object, **kwargs: object) -> Any:
        return dispatcher(*args, **kwargs)

    functools.update_wrapper(forward, like)
    return forward


def make_compiled_module(module: torch.nn.Module, dispatcher: Dispatcher, recipe: Recipe) -> torch.nn.Module:
    """`module` compiled by `dispatcher`. `recipe` compiles any module likewise, for copies and pickles."""
    state = _Forward(module, recipe, dispatcher)
    attributes: dict[str, object] = {"forward": _ForwardAttribute(state.on_class)}
    if calls_itself(module):
        attributes["__call__"] = functools.update_wrapper(
            lambda self, *args, **kwargs: _state(self).foregrad(*args, **kwargs), type(module).__call__
        )
    return _over_the_state_of(state, attributes)


def make_wrapper(wrapper: torch.nn.Module, inner: torch.nn.Module, recipe: Recipe) -> torch.nn.Module:
    """`wrapper` over `wrapper.module` compiled: its own forward, which runs the inner module, is not compiled."""
    return _over_the_state_of(_Around(wrapper, recipe, inner), {"module": property(lambda self: _state(self).inner)})


def _over_the_state_of(state: _Compiled, attributes: dict[str, object]) -> torch.nn.Module:
    module, body = state.module, {**_BODY, **attributes}
    if isinstance(module, LazyModuleMixin):
        body["cls_to_become"] = property(_Becoming(type(module), body))
    compiled: torch.nn.Module = object.__new__(_class_like(type(module), body))
    object.__setattr__(compiled, "__dict__", module.__dict__)
    object.__setattr__(compiled, _STATE, state)
    return compiled


def _state(compiled: object) -> Any:
    return object.__getattribute__(compiled, _STATE)


def _deep_copy(self: torch.nn.Module, memo: dict[int, object]) -> torch.nn.Module:
    state = _state(self)
    copied: torch.nn.Module = state.recipe(copy.deepcopy(state.module, memo))
    memo[id(self)] = copied
    return copied


def _equal(self: torch.nn.Module, other: object) -> bool:
    module = _state(self).module
    return self is other or module is other or module_behind(other) is module


class _CompiledSlot:
    """A class with a slot for the state of a compiled module. A lazy module gets a second class with a slot."""

    __slots__ = (_STATE,)


_BODY: dict[str, object] = {
    "__slots__": (),
    "foregrad": property(lambda self: _state(self).foregrad),
    MODULE_BEHIND: lambda self: _state(self).module,
    "__eq__": _equal,
    "__repr__": lambda self: f"foregrad.compile({_state(self).module!r})",
    "__hash__": lambda self: hash(_state(self).module),
    "__copy__": lambda self: _state(self).recipe(copy.copy(_state(self).module)),
    "__deepcopy__": _deep_copy,
    "__reduce_ex__": lambda self, protocol: (_state(self).recipe, (_state(self).module,)),
}


def _class_like(cls: type, body: dict[str, object]) -> type:
    attributes = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls, _CompiledSlot), attributes | body)


class _Becoming:
    """The class change of a compiled lazy module once it has parameters: the module gets its final class, the compiled
    module a class derived from the final class.
    """

    def __init__(self, cls: Any, body: dict[str, object]) -> None:
        self.final_class = cls.cls_to_become
        self.compiled_class = None if self.final_class is None else _class_like(self.final_class, body)

    def __call__(self, compiled: object) -> Any:
        module = _state(compiled).module
        if self.compiled_class is not None and type(module) is not self.final_class:
            if module.has_uninitialized_params():
                return self.final_class
            module.__class__ = self.final_class
        return self.compiled_class
