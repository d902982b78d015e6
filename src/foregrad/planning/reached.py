"""The modules that a function reaches: in its cells and globals, its object's attributes, and containers of these."""

from __future__ import annotations

import functools
import types
from typing import Any

from torch import nn

from .._torch.nested import leaves


def modules_in(function: Any) -> list[nn.Module]:
    """The modules that a function or module reaches, each once, without modules inside of others."""
    found: dict[int, nn.Module] = {}
    seen, left = set[int](), [function]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found[id(value)] = value
        elif isinstance(value, types.FunctionType):
            named = [value.__globals__.get(name) for name in names_of(value.__code__)]
            left += [one for one in leaves(named) if isinstance(one, nn.Module)]
            left += leaves([cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()])
        elif isinstance(value, types.MethodType):
            left += [value.__func__, value.__self__]
        elif isinstance(value, functools.partial):
            left += leaves([value.func, value.args, value.keywords])
        elif not isinstance(value, (type, types.ModuleType)):
            left += [one for one in leaves(getattr(value, "__dict__", {})) if isinstance(one, nn.Module)]
    inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
    return [module for key, module in found.items() if key not in inner]


def names_of(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in a function's code, and in functions inside of it."""
    inner = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return set(code.co_names).union(*map(names_of, inner))
