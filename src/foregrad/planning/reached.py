"""The modules that a function reaches: in its cells and globals, its object's attributes, and containers of these."""

from __future__ import annotations

import contextlib
import functools
import types
from typing import Any

from torch import nn

from .._torch.nested import leaves


def modules_in(function: Any) -> list[nn.Module]:
    """The modules that a function or module reaches, each once, without those inside of another."""
    found: list[nn.Module] = []
    _look(function, found, set())
    inner = {id(part) for module in found for part in module.modules() if part is not module}
    return [module for module in found if id(module) not in inner]


def _look(value: Any, found: list[nn.Module], seen: set[int]) -> None:
    if id(value) in seen:
        return
    seen.add(id(value))
    inside: list[Any] = []
    if isinstance(value, nn.Module):
        found.append(value)
    elif isinstance(value, types.FunctionType):
        inside = [value.__globals__.get(name) for name in names_of(value.__code__)]
        inside = [one for one in leaves(inside) if isinstance(one, nn.Module)]
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # an empty cell
                inside.append(cell.cell_contents)
    elif isinstance(value, types.MethodType):
        inside = [value.__func__, value.__self__]
    elif isinstance(value, functools.partial):
        inside = [value.func, value.args, value.keywords]
    elif not isinstance(value, (type, types.ModuleType)):
        attributes = [*leaves(getattr(value, "__dict__", {}))]
        found += [one for one in attributes if isinstance(one, nn.Module)]
    for one in leaves(inside):
        _look(one, found, seen)


def names_of(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in a function's code, and in functions inside of it."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*map(names_of, inner))
