"""The reads of Python that a backward runs: state at the time of the backward.

The names in its code are followed, one helper function after the other. Objects, containers and closure cells that are
older than the call may change before the backward; so may numbers that are globals of a script, or that some function
assigns. A number that is a global of a module, and that no function there assigns, is taken for a constant. So are a
plain attribute of a class that no function of the class's module sets, a table of an installed package, and a number in
a variable of an enclosing function that the code itself does not assign: somebody may still set these between a forward
and its backward.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from ..errors import UnsupportedSideEffectError
from ..frontend.source import ABSENT
from ..frontend.values import is_plain
from ..python.code import instructions_of, names_of
from ..python.expected import stored
from ..python.libraries import is_installed, is_of_library, is_outside
from ..python.objects import values_of

_DEEPEST = 4
_CONTAINERS = (dict, list, set, tuple)
_CODE = (types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_NO_STATE = (types.ModuleType, types.BuiltinFunctionType, torch.Tensor)  # of tensors a graph tells by their versions


def reads_state(value: Any, knows: Callable[[Any], bool], depth: int = _DEEPEST) -> bool:
    """Whether code looks at objects besides its arguments that may change before it runs. `knows(object)`: it is older
    than the call.
    """
    value, held = function_of(value, knows)
    named = names_of(value.__code__).others if hasattr(value, "__code__") else frozenset()
    if any(_is_state(item, named, knows, depth) for item in held):
        return True
    if isinstance(value, types.MethodType):
        owner, function = value.__self__, value.__func__
        if isinstance(function, types.FunctionType) and isinstance(owner, torch.nn.Module):
            named = names_of(function.__code__).others
            return _may_differ(owner, named, knows, depth) or reads_state(function, knows, depth)
        return not isinstance(owner, type) or reads_state(function, knows, depth)
    if not isinstance(value, types.FunctionType):
        return False
    if is_outside(value.__globals__.get("__name__", "")):
        return False
    names = names_of(value.__code__)
    for name in names.loaded:
        found = value.__globals__.get(name)
        if is_plain(found):
            if found is not None and _is_assigned(name, value.__globals__):
                return True
        elif isinstance(found, _CONTAINERS) and is_installed(value.__globals__):
            continue
        elif _may_differ(found, names.others, knows, depth):
            return True
    for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
        if name in names.cells and cell != types.CellType():
            found = cell.cell_contents
            if is_plain(found):
                if knows(cell) and _is_stored(name, value.__code__):
                    return True
            elif (knows(cell) and _may_differ(found, names.others, knows, depth)) or _is_state(
                found, names.others, knows, depth
            ):
                return True
    return False


def looks_inside(name: str, more: str) -> UnsupportedSideEffectError:
    """The error for a Function's backward that runs inside of the function, where it can't be a part of a graph."""
    return UnsupportedSideEffectError(
        f"the backward of `{name}` looks at Python's state, and runs in a backward inside of the function {more}. Take "
        "the gradient outside only, or keep the state out of the Function."
    )


def function_of(value: Any, knows: Callable[[Any], bool]) -> tuple[Any, list[Any]]:
    """The function or method behind a callable, and the objects that it holds: defaults, a partial's arguments, the
    attributes of a callable object that the call made.
    """
    held: list[Any] = []
    while isinstance(value, functools.partial):
        held += [*value.args, *value.keywords.values()]
        value = value.func
    if not isinstance(value, (type, *_CODE)) and not is_of_library(type(value)):
        owner, value = value, getattr(value, "forward" if isinstance(value, torch.nn.Module) else "__call__", None)
        if isinstance(value, types.MethodType) and not isinstance(owner, torch.nn.Module) and not knows(owner):
            held += getattr(owner, "__dict__", {}).values()
            value = value.__func__
    if isinstance(value, types.FunctionType):
        held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    return value, held


def _is_state(value: Any, named: frozenset[str], knows: Callable[[Any], bool], depth: int) -> bool:
    """Whether an object that code holds is older than the call and may change; a constant object is searched inside."""
    if isinstance(value, tuple):
        return any(_is_state(item, named, knows, depth) for item in stored(value))
    parameters = getattr(type(value), "__dataclass_params__", None)
    if parameters is not None and parameters.frozen:
        return any(_is_state(getattr(value, f.name, None), named, knows, depth) for f in dataclasses.fields(value))
    return not is_plain(value) and knows(value) and _may_differ(value, named, knows, depth)


def holds_state(held: dict[str, Any], backward: Any, knows: Callable[[Any], bool]) -> bool:
    """Whether a context holds an object that its backward looks at and that may change before."""
    code = getattr(backward, "__code__", None)
    named = frozenset() if code is None else names_of(code).others
    return any(_is_state(value, named, knows, _DEEPEST) for name, value in held.items() if name in named)


def _may_differ(found: Any, named: frozenset[str], knows: Callable[[Any], bool], depth: int) -> bool:
    if isinstance(found, _NO_STATE):
        return False
    if isinstance(found, type):
        bases = [base for base in found.__mro__ if not is_of_library(base)]
        if any(_may_be_set(base, name) for base in bases for name in named & values_of(base)):
            return True
        items = (vars(base)[name] for base in bases for name in named & vars(base).keys())
        methods = (getattr(item, "__func__", item) for item in items)
        return depth > 0 and any(_method_reads(found, method, knows, depth - 1) for method in methods)
    if isinstance(found, (types.FunctionType, types.MethodType, functools.partial)):
        return depth > 0 and reads_state(found, knows, depth - 1)
    if isinstance(found, torch.nn.Module):
        held = [_held(found, name) for name in named]
        return depth == 0 or any(_may_differ(value, named, knows, depth - 1) for value in held if value is not ABSENT)
    return True


def _method_reads(owner: type, method: Any, knows: Callable[[Any], bool], depth: int) -> bool:
    """Whether a method looks at state, that of its class included."""
    if not isinstance(method, types.FunctionType):
        return False
    return _may_differ(owner, names_of(method.__code__).others, knows, depth) or reads_state(method, knows, depth)


def _held(module: torch.nn.Module, name: str) -> Any:
    """An attribute of a module: a parameter, buffer, submodule, or an item of its `__dict__` or its class."""
    table = module.__dict__
    tables = (table.get("_parameters"), table.get("_buffers"), table.get("_modules"), table)
    classes = (vars(base) for base in type(module).__mro__ if not is_of_library(base))
    return next((held[name] for held in (*tables, *classes) if held is not None and name in held), ABSENT)


def _is_stored(name: str, code: types.CodeType) -> bool:
    """Whether a function or an inner function assigns a variable of an enclosing function."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    stores = ("STORE_DEREF", name) in {(i.name, i.value) for i in instructions_of(code)}
    return stores or any(_is_stored(name, other) for other in inner)


def _is_assigned(name: str, namespace: dict[str, Any]) -> bool:
    """Whether a global may be assigned while the program runs: by a script, or by a function of its module."""
    return namespace.get("__name__") == "__main__" or _is_set_by_code(name, namespace, "STORE_GLOBAL")


def _may_be_set(cls: type, name: str) -> bool:
    """Whether a class's attribute is no plain value, or code of the class's module sets an attribute of this name."""
    namespace = vars(sys.modules.get(cls.__module__, sys))
    return not is_plain(cls.__dict__[name]) or _is_set_by_code(name, namespace | vars(cls), "STORE_ATTR")


def _is_set_by_code(name: str, namespace: dict[str, Any], instruction: str) -> bool:
    held: list[Any] = []
    for value in namespace.values():
        held += vars(value).values() if isinstance(value, type) else [value]
    codes = [value.__code__ for value in held if isinstance(value, types.FunctionType)]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        if name in code.co_names and (instruction, name) in {(i.name, i.value) for i in instructions_of(code)}:
            return True
    return False
