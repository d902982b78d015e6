"""Where a tensor that a function reaches by itself is kept, so that it is read again on every call.

`find_sources(roots)` walks what the function can see (closure cells, globals it names, defaults, bound objects,
modules with their parameters and buffers, containers, plain attributes) and gives, for each tensor, a `Source`:
a chain of steps from an object that stays the same. Rebinding anything on the way is noticed, because the chain
is walked again at each call.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from .._torch.torchscript import attributes_of
from ..graph.slots import Buffer, Closure, Param, Slot
from ..graph.spelling import attribute, item, key_text
from .expected import stored

__all__ = ["Source", "find_sources"]

_MAX_OBJECTS = 200_000
_MAX_DEPTH = 24


class Source:
    """How to reach an object: from `root`, by `steps` of ("attr", name) or ("item", key).

    A root that is a module is not kept alive.
    """

    __slots__ = ("_root", "slot", "steps")

    def __init__(self, slot: Slot, root: Any, steps: tuple[tuple[str, Any], ...]) -> None:
        self.slot = slot
        self.steps = steps
        self._root = weakref.ref(root) if isinstance(root, torch.nn.Module) else root

    @property
    def root(self) -> Any:
        """Where to start; None when the module is no more."""
        return self._root() if isinstance(self._root, weakref.ref) else self._root

    def __repr__(self) -> str:
        return f"Source({self.slot}, {self.steps})"

    def get(self) -> Any:
        """The object now."""
        value = self.root
        for kind, key in self.steps:
            value = getattr(value, key) if kind == "attr" else value[key]
        return value

    def expression(self, root: str, bind: Callable[[str, Any], str]) -> str:
        """Python source that reads it, given the name of a variable holding the root; `bind` gives globals names."""
        for kind, key in self.steps:
            root = attribute(root, key, bind) if kind == "attr" else item(root, key, bind)
        return root


@dataclasses.dataclass(slots=True)
class _Visit:
    value: Any
    root: Any
    steps: tuple[tuple[str, Any], ...]
    name: str  # for people


def find_sources(function: Any, extra_roots: tuple[tuple[str, Any], ...] = ()) -> dict[int, Source]:
    """For the id of every tensor the function can reach, its source. First found, shortest way first."""
    found: dict[int, Source] = {}
    seen: set[int] = set()
    queue: deque[_Visit] = deque(_roots(function, _function_name(function)))
    queue.extend(_Visit(value, value, (), name) for name, value in extra_roots)
    while queue and len(seen) < _MAX_OBJECTS:
        visit = queue.popleft()
        value = visit.value
        if isinstance(value, torch.Tensor):
            if id(value) not in found:
                found[id(value)] = Source(_slot(visit), visit.root, visit.steps)
            continue
        if id(value) in seen or len(visit.steps) > _MAX_DEPTH:
            continue
        seen.add(id(value))
        queue.extend(_children(visit))
    return found


def _slot(visit: _Visit) -> Slot:
    table = visit.steps[-2] if len(visit.steps) >= 2 else None
    if table == ("attr", "_parameters"):
        return Param(visit.name)
    if table == ("attr", "_buffers"):
        return Buffer(visit.name)
    return Closure(visit.name)


def _function_name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _roots(function: Any, name: str) -> list[_Visit]:
    """What a callable sees, each from a root that can't be rebound without the callable changing."""
    if isinstance(function, functools.partial):
        visits = [
            _Visit(a, function, (("attr", "args"), ("item", i)), f"{name}.args[{i}]")
            for i, a in enumerate(function.args)
        ]
        visits += [
            _Visit(a, function, (("attr", "keywords"), ("item", k)), f"{name}.{k}")
            for k, a in function.keywords.items()
        ]
        return visits + _roots(function.func, _function_name(function.func))
    if isinstance(function, types.MethodType):
        owner = function.__self__
        return [
            _Visit(owner, owner, (), "" if isinstance(owner, torch.nn.Module) else "self"),
            *_roots(function.__func__, name),
        ]
    if isinstance(function, types.FunctionType):
        return _function_roots(function)
    return [_Visit(function, function, (), "" if isinstance(function, torch.nn.Module) else name)]


def _function_roots(function: types.FunctionType) -> list[_Visit]:
    visits = []
    code = function.__code__
    for cell_name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            content = cell.cell_contents
        except ValueError:
            continue  # not bound yet
        visits.append(_Visit(content, cell, (("attr", "cell_contents"),), cell_name))
    namespace = function.__globals__
    for name in _global_names(code):
        if name in namespace:
            value = namespace[name]
            visits.append(_Visit(value, namespace, (("item", name),), name))
    for index, value in enumerate(function.__defaults__ or ()):
        visits.append(_Visit(value, function, (("attr", "__defaults__"), ("item", index)), f"default {index}"))
    for key, value in (function.__kwdefaults__ or {}).items():
        visits.append(_Visit(value, function, (("attr", "__kwdefaults__"), ("item", key)), key))
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        visits.append(_Visit(wrapped, function, (("attr", "__wrapped__"),), function.__name__))
    return visits


def _global_names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _global_names(constant)
    return names


def _children(visit: _Visit) -> list[_Visit]:
    value = visit.value
    if isinstance(value, torch.nn.Module):
        return _module_children(visit)
    if isinstance(value, dict):
        return [
            _step(visit, "item", key, item, f"[{key_text(key)}]")
            for key, item in dict.items(value)
            if _interesting(item)
        ]
    if isinstance(value, (list, tuple)):
        return [_step(visit, "item", i, item, f"[{i}]") for i, item in enumerate(stored(value)) if _interesting(item)]
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        if str(getattr(value, "__module__", "")).partition(".")[0] == "torch":
            return []
        return _roots(value, _function_name(value))
    if isinstance(value, types.ModuleType) or not _has_attributes(type(value).__module__):
        return []
    attributes = getattr(value, "__dict__", None)
    if not isinstance(attributes, dict):
        return []
    return [_attribute_step(visit, name, item) for name, item in attributes.items() if _interesting(item)]


def _has_attributes(module: Any) -> bool:
    """Whether the attributes of objects of a module's classes are looked at: of PyTorch's, those of distributions."""
    name = str(module)  # of classes of Cython, before Python 3.11, it is no text
    return name.partition(".")[0] not in ("torch", "builtins") or name.startswith("torch.distributions.")


def _module_children(visit: _Visit) -> list[_Visit]:
    module = visit.value
    children = []
    for table in ("_parameters", "_buffers", "_modules"):
        for name, part in getattr(module, table).items():
            if part is not None:
                steps = (*visit.steps, ("attr", table), ("item", name))
                children.append(_Visit(part, visit.root, steps, f"{visit.name}.{name}".lstrip(".")))
    for name, value in module.__dict__.items():
        if not (type(name) is str and name.startswith("_")) and _interesting(value):
            children.append(_attribute_step(visit, name, value))
    if isinstance(module, torch.jit.ScriptModule):
        for name in attributes_of(module):
            if _interesting(value := getattr(module, name)):
                children.append(_attribute_step(visit, name, value))
    return children


def _attribute_step(visit: _Visit, name: Any, value: Any) -> _Visit:
    if type(name) is str:
        return _step(visit, "attr", name, value, f".{name}")
    table = dataclasses.replace(visit, steps=(*visit.steps, ("attr", "__dict__")))
    return _step(table, "item", name, value, f".__dict__[{key_text(name)}]")


def _step(visit: _Visit, kind: str, key: Any, value: Any, text: str) -> _Visit:
    return _Visit(value, visit.root, (*visit.steps, (kind, key)), (visit.name + text).lstrip("."))


_PLAIN = (
    int,
    float,
    str,
    bool,
    bytes,
    complex,
    type(None),
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    torch.dtype,
    torch.device,
)


def _interesting(value: Any) -> bool:
    return not isinstance(value, _PLAIN)
