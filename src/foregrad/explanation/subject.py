"""The function to explain and its arguments, copied: what is run to measure is nobody's.

A module is copied with its parameters and buffers; a function with the variables of enclosing functions and the global
modules and tensors that it names, so that a call writes to copies. Whatever a copy can't be made of is explained as it
is and not run. `is_own` tells copies from what the user has: nothing runs that would write to the latter.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch

from .._torch.dynamo import compiled_by_dynamo
from ..dispatch.dispatcher import Dispatcher
from ..dispatch.module import behind
from ..frontend.code import codes_in
from ..frontend.tree import flatten


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function to explain with its arguments. All are copies, unless `why_not_copied` says that there are none.

    `compiled`: the user's dispatcher, where foregrad compiled the function before. `is_dynamo`: `torch.compile` did.
    """

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    compiled: Dispatcher | None
    is_dynamo: bool
    why_not_copied: str | None
    copies: Mapping[int, Any]

    @property
    def module(self) -> torch.nn.Module | None:
        """The module, where one is explained."""
        return self.function if isinstance(self.function, torch.nn.Module) else None

    def is_own(self, value: Any) -> bool:
        """Whether an object is one of the copies."""
        return id(value) in self.copies

    def renewed(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments copied once more, for a call that writes to them."""
        memo: dict[int, Any] = {}
        _copy_results(flatten((self.args, dict(self.kwargs)))[0], memo)
        return copy.deepcopy((self.args, dict(self.kwargs)), memo)

    def leaves(self) -> list[torch.Tensor]:
        """The copied tensors that gradients are accumulated in."""
        tensors = [value for value in self.copies.values() if isinstance(value, torch.Tensor)]
        return [tensor for tensor in tensors if tensor.is_leaf and tensor.requires_grad]

    def forget_gradients(self) -> None:
        for leaf in self.leaves():
            leaf.grad = None


def subject_of(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Subject:
    """Copies of a function or module and of the arguments of its call."""
    compiled = getattr(fn, "foregrad", None)
    compiled = compiled if isinstance(compiled, Dispatcher) else None
    plain = compiled_by_dynamo(fn)
    is_dynamo = plain is not None
    plain = fn if plain is None else plain
    if compiled is not None:
        plain = behind(plain) or compiled.function
    name = str(getattr(plain, "__name__", type(plain).__name__))
    memo: dict[int, Any] = {}
    try:
        _copy_results(flatten((args, dict(kwargs)))[0], memo)
        function = _copied(plain, memo)
        args, kwargs, why = copy.deepcopy(args, memo), copy.deepcopy(dict(kwargs), memo), None
    except Exception as error:
        memo, function, why = {}, plain, f"it can't be copied: {type(error).__name__}: {error}"
    copies = {id(value): value for key, value in memo.items() if key != id(memo) and id(value) != key}
    return Subject(name, function, args, kwargs, compiled, is_dynamo, why, copies | _tables(copies))


def _tables(copies: Mapping[int, Any]) -> dict[int, Any]:
    """The dicts and cells that hold attributes and variables of copies: writes go to these."""
    tables = [getattr(value, "__dict__", None) for value in copies.values()]
    for value in copies.values():
        if isinstance(value, types.FunctionType):
            tables += [value.__globals__, *(value.__closure__ or ())]
    return {id(table): table for table in tables if table is not None}


def _copy_results(leaves: list[Any], memo: dict[int, Any]) -> None:
    """Copies of tensors that autograd computed, which can't be copied with their history: results of a `clone`."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
            memo[id(leaf)] = leaf.detach().clone().requires_grad_().clone()


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A callable over copies of what it reaches."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _copied(value.__self__, memo))
    if isinstance(value, functools.partial):
        keywords = copy.deepcopy(value.keywords, memo)
        return functools.partial(_copied(value.func, memo), *copy.deepcopy(value.args, memo), **keywords)
    if isinstance(value, types.FunctionType) and not _is_of_library(value):
        return _copied_function(value, memo)
    return copy.deepcopy(value, memo)


def _copied_function(function: types.FunctionType, memo: dict[int, Any]) -> Any:
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    variables = dict(function.__globals__)
    copied = types.FunctionType(function.__code__, variables, function.__name__, function.__defaults__, cells or None)
    memo[id(function)] = copied  # before what it reaches, which may be itself
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # of a variable that is not bound yet
            cell.cell_contents = _copied(old.cell_contents, memo)
    for name in {name for code in codes_in(function.__code__) for name in code.co_names}:
        value = variables.get(name)
        if isinstance(value, (torch.nn.Module, torch.Tensor, types.FunctionType, types.MethodType)):
            variables[name] = _copied(value, memo)
    copied.__kwdefaults__, copied.__dict__ = function.__kwdefaults__, dict(function.__dict__)
    copied.__module__, copied.__qualname__ = function.__module__, function.__qualname__
    return copied


def _is_of_library(function: types.FunctionType) -> bool:
    package = str(function.__module__).partition(".")[0]
    return package in {"torch", "foregrad"} or package in sys.stdlib_module_names - {"__main__"}
