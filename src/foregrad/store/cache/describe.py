"""Descriptions of values for keys: equal in every process for equal values, different for different ones.

A function of the user's is described by its source: bytecode, constants, defaults, closure and the globals it names,
functions among these likewise. Equal descriptions must mean equal behaviour. A value without a description, as an
object of the user's, makes the key and its entry impossible: `UndescribedError`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import struct
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch

from ..._torch.ops import OpOverload
from ..._torch.symbols import is_symbolic, symbol_made
from ...frontend.source import Source
from ...graph.effect_log import ViewStep
from ...graph.meta import TensorSpec
from ...python.code import codes_in

_BY_NAME = (torch.dtype, torch.layout, torch.memory_format, torch.device)
_PACKAGES = {"torch", "foregrad", "builtins", "functorch", *sys.stdlib_module_names}  # the key has their versions


class UndescribedError(Exception):
    """A value without a description; the message names it."""


def digest(*parts: Any) -> str:
    """The SHA-256 of JSON values, as 64 hexadecimal digits."""
    text = json.dumps(parts, separators=(",", ":"), sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def describe(value: Any, *, lenient: bool = False) -> Any:
    """A value as JSON. Raises `UndescribedError`, or, if `lenient`, describes an unknown object by its class."""
    return _Describer(lenient).value(value)


class _Describer:
    def __init__(self, lenient: bool) -> None:
        self.lenient = lenient
        self.calls: dict[int, int] = {}
        self.functions: dict[int, int] = {}  # numbers of functions that were described, or are now, by id

    def value(self, value: Any) -> Any:
        cls = type(value)
        if value is None or cls in (bool, int, str):
            return value
        if cls in _RULES:
            return _RULES[cls](self, value)
        if cls is tuple or cls is list or cls is torch.Size:
            return [cls.__name__, *(self.value(item) for item in value)]
        if isinstance(value, _BY_NAME):
            return [cls.__name__, str(value)]
        if is_symbolic(value):
            return ["number", str(symbol_made(value))]
        if cls.__module__.startswith(("sympy.", "torch.utils._sympy.")):
            return ["expression", str(value)]
        if isinstance(value, enum.Enum):
            return [_name(cls), value.name]
        if isinstance(value, OpOverload):
            return ["operator", value.name()]
        if cls.__module__.startswith("torch.") and isinstance(getattr(value, "name", None), str):
            return [_name(cls), value.name]  # an enumeration of PyTorch's C++
        if isinstance(value, type):
            return self._class(value)
        if isinstance(value, torch.Tensor):
            return self._other(value)
        if dataclasses.is_dataclass(value):
            self._check_known(cls)
            fields = dataclasses.fields(value)
            described = {f.name: self.value(getattr(value, f.name)) for f in fields}
            if isinstance(value, ViewStep):  # `call` is an address, only compared with the addresses of other steps
                described["call"] = self.calls.setdefault(value.call, len(self.calls))
            return [_name(cls), described]
        return self._called(value)

    # ---------------------------------------------------------------- what is called

    def _called(self, value: Any) -> Any:
        if isinstance(value, functools.partial):
            parts = (value.func, value.args, value.keywords)
            return ["partial", *(self.value(part) for part in parts)]
        if isinstance(value, types.MethodType):
            return ["method", self.value(value.__func__), self.value(value.__self__)]
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] in _PACKAGES:
                return ["module", value.__name__]
            return self._other(value)
        name, module = getattr(value, "__name__", None), getattr(value, "__module__", None)
        is_known = isinstance(module, str) and module.partition(".")[0] in _PACKAGES
        if is_known and isinstance(name, str) and callable(value):  # built in, or wrapped by a library
            return ["called", module, getattr(value, "__qualname__", name)]
        return self._other(value)

    def _function(self, function: types.FunctionType) -> Any:
        if function.__module__.partition(".")[0] in _PACKAGES and "<locals>" not in function.__qualname__:
            return ["called", function.__module__, function.__qualname__]
        number = self.functions.get(id(function))
        if number is not None:
            return ["function", number]
        self.functions[id(function)] = len(self.functions)
        code = function.__code__
        cells = {}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                cells[name] = self.value(cell.cell_contents)
            except ValueError:
                cells[name] = ["empty"]
        named = {}
        for name in sorted({name for inner in codes_in(code) for name in inner.co_names}):
            if name in function.__globals__:
                named[name] = self.value(function.__globals__[name])
        defaults = [self.value(function.__defaults__), self.value(function.__kwdefaults__)]
        return ["function", self._code(code), defaults, cells, named]

    def _code(self, code: types.CodeType) -> Any:
        constants = [
            self._code(item) if isinstance(item, types.CodeType) else self.value(item) for item in code.co_consts
        ]
        names = [list(code.co_names), list(code.co_varnames), list(code.co_freevars), list(code.co_cellvars)]
        table = getattr(code, "co_exceptiontable", b"")
        counts = [code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags]
        return ["code", code.co_code.hex(), bytes(table).hex(), constants, names, counts]

    # ---------------------------------------------------------------- what is described by its name, or not at all

    def _class(self, cls: type) -> Any:
        self._check_known(cls)
        return ["class", _name(cls)]

    def _check_known(self, cls: type) -> None:
        if not self.lenient and cls.__module__.partition(".")[0] not in _PACKAGES:
            raise UndescribedError(f"the class {_name(cls)}")

    def _other(self, value: Any) -> Any:
        if self.lenient:
            return ["a", _name(type(value))]
        raise UndescribedError(f"a {_name(type(value))}")


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _items(describer: _Describer, value: Mapping[Any, Any]) -> Any:
    return ["dict", *([describer.value(key), describer.value(item)] for key, item in value.items())]


def _set(describer: _Describer, value: Any) -> Any:
    return ["set", *sorted((describer.value(item) for item in value), key=json.dumps)]


def _spec(describer: _Describer, spec: TensorSpec) -> Any:
    parts = (spec.shape, spec.stride, spec.offset, spec.dtype, spec.device, spec.conj, spec.neg)
    return ["tensor", *(describer.value(part) for part in parts)]


_RULES: dict[type, Any] = {
    float: lambda d, v: ["float", struct.pack(">d", v).hex()],  # `hex` of a float does not tell the sign of nan
    complex: lambda d, v: ["complex", struct.pack(">dd", v.real, v.imag).hex()],
    bytes: lambda d, v: ["bytes", v.hex()],
    dict: _items,
    types.MappingProxyType: _items,
    set: _set,
    frozenset: _set,
    slice: lambda d, v: ["slice", *(d.value(part) for part in (v.start, v.stop, v.step))],
    range: lambda d, v: ["range", v.start, v.stop, v.step],
    type(...): lambda d, v: ["..."],
    TensorSpec: _spec,
    Source: lambda d, v: ["source", d.value(v.slot), d.value(v.steps)],
}
