"""TorchScript inside of captured functions.

A scripted function runs by a plan that no recorder sees: nodes that differentiate by themselves, fused kernels. In a
capture the Python that it was made of runs instead. Checked on torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from ..errors import UnsupportedOpError
from ..house import is_house_module
from ..locks import Bind
from .ops import Args, Kwargs


def install(bind: Bind, is_capturing: Callable[[], bool]) -> None:
    """In a capture, functions that `torch.jit.script` made run as Python; calls of other TorchScript are refused."""
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        bind(kind, "__call__", _as_python(kind.__call__, is_capturing))


def _as_python(original: Any, is_capturing: Callable[[], bool]) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_capturing() or _is_of_cpp(self):
            return original(self, *args, **kwargs)
        function: Any = getattr(self, "_torchdynamo_inline", None)  # the function or module that was scripted or traced
        scripted = None if function is None else torch.jit._state._try_get_jit_cached_function(function)
        is_traced = scripted is None or scripted.qualified_name != self.qualified_name
        if is_traced or "is_scripting" in function.__code__.co_names:
            raise _refusal(self.name)
        try:
            return function(**_arguments(self.schema.arguments, args, kwargs))
        except Exception as error:
            if is_house_module(type(error).__module__):
                raise
            raise _refusal(self.name) from error  # TorchScript raises an error of its own

    return call


def _is_of_cpp(function: Any) -> bool:
    """Whether a method belongs to a class in C++, without a graph."""
    try:
        return isinstance(function, torch._C.ScriptMethod) and function.graph is None
    except RuntimeError:
        return True


def _refusal(name: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"the function calls `{name}` of TorchScript; a capture can't look inside. Use the Python source, or call it "
        "in a function that `foregrad.eager_region` marks."
    )


_PLAIN = {int: "int", float: "float", bool: "bool", str: "str"}


def _arguments(parameters: Sequence[Any], args: Args, kwargs: Kwargs) -> dict[str, Any]:
    """All arguments by name, as TorchScript has them: floats, copies of containers. Raises where they do not fit."""
    given = {parameter.name: value for parameter, value in zip(parameters, args, strict=False)}
    found = {p.name: p.default_value for p in parameters if p.has_default_value()} | given | kwargs
    fit = len(args) <= len(parameters) and given.keys().isdisjoint(kwargs) and len(found) == len(parameters)
    for name, kind in ((p.name, str(p.type)) for p in parameters):
        value = found[name] = torch.sym_float(found[name]) if kind == "float" else found[name]
        fit = fit and (kind not in ("Tensor", *_PLAIN.values()) or _PLAIN.get(type(value), kind) == kind)
    if not fit:
        raise TypeError
    copied: dict[str, Any] = tree_map(lambda leaf: leaf, found)
    return copied
