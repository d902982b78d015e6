"""Private names of PyTorch that foregrad uses, and whether the installed PyTorch has them.

The list is read off the package's sources: each private name under `torch` that they import, reach or spell out, with
the arguments of its calls. (Attributes of PyTorch's objects are not on it.) `FALLS_BACK` adds, by file, the feature
that takes another way without its names. Checked on torch 2.11.0, 2.12.0, 2.13.0, 2.14.1, 2.15.0.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PACKAGE = Path(__file__).parents[2]

_IN_ALL = "nothing: capturing any function needs it"
_SIZES = "nothing: symbolic sizes need it; with `dynamic=False` there are none"
FALLS_BACK = {
    "dynamo": "nothing: `torch.compile(backend='foregrad')` needs it; `foregrad.compile` does not",
    "inductor": "nothing: Inductor can't be used; `backend='eager'` goes without",
    "native": "calls go through Python",
    "python/settings": "the setting is not looked at, where it is one of the table's",
    "size_arithmetic": _SIZES,
    "symbols": _SIZES,
}
"""By file of the core's door, by annex, or by annex and file."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """A private name of PyTorch's, dotted, that files of this package use.

    `optional`: the code tests whether it exists. `calls`: its calls, as (number of positional arguments, names of
    keywords), for calls that pass neither `*args` nor `**kwargs`.
    """

    name: str
    files: tuple[str, ...]
    optional: bool
    calls: frozenset[tuple[int, tuple[str, ...]]]

    @property
    def falls_back(self) -> str:
        """The feature that has a detour without the name."""
        return "; ".join(dict.fromkeys(map(_falls_back, self.files)))

    def fault(self) -> str | None:
        """The fault of the name in the installed PyTorch; None if there is none."""
        try:
            object_ = _look_up(self.name)
        except (ImportError, AttributeError) as error:
            return None if self.optional else f"it is missing ({error})"
        try:
            signature = inspect.signature(object_)
        except (TypeError, ValueError):  # not callable, or written in C
            return None
        for count, names in sorted(self.calls):
            try:
                signature.bind(*[None] * count, **dict.fromkeys(names))
            except TypeError as error:
                return f"its arguments have changed ({error})"
        return None


def _falls_back(file: str) -> str:
    room, _, door = file.partition("/")
    return FALLS_BACK.get(file) or FALLS_BACK.get(room, f"nothing: `foregrad.{room}` needs it" if door else _IN_ALL)


def missing() -> list[tuple[str, str, str]]:
    """(name, fault, fallback) for each private name that this PyTorch lacks or has changed."""
    faults = [(requirement, requirement.fault()) for requirement in requirements()]
    return [(requirement.name, fault, requirement.falls_back) for requirement, fault in faults if fault is not None]


def doors() -> list[Path]:
    """The sources that use private names: the core's door and each annex's own."""
    return sorted({*_PACKAGE.glob("*/_torch.py"), *_PACKAGE.rglob("_torch/*.py")})


@functools.cache
def requirements() -> tuple[Requirement, ...]:
    """All requirements, by name."""
    uses: dict[str, _Uses] = {}
    for path in doors():
        room = path.relative_to(_PACKAGE).parts[0]
        file = path.stem if room == "_torch" else f"{room}/{path.stem}"
        for name, optional, call in _names_in(path.read_text(encoding="utf-8")):
            use = uses.setdefault(name, _Uses())
            use.files[file] = None
            use.optional &= optional
            use.calls.update([] if call is None else [call])
    return tuple(
        Requirement(name, tuple(use.files), use.optional, frozenset(use.calls)) for name, use in sorted(uses.items())
    )


@dataclass(slots=True)
class _Uses:
    files: dict[str, None] = field(default_factory=dict)
    optional: bool = True
    calls: set[tuple[int, tuple[str, ...]]] = field(default_factory=set)


def _look_up(name: str) -> Any:
    """The object of a dotted name; submodules are imported."""
    first, *rest = name.split(".")
    object_, path, in_modules = importlib.import_module(first), first, True
    for part in rest:
        path = f"{path}.{part}"
        # A package's attribute may hide its submodule of equal name.
        in_modules = in_modules and hasattr(object_, "__path__") and _is_module(path)
        object_ = importlib.import_module(path) if in_modules else getattr(object_, part)
    return object_


def _is_module(path: str) -> bool:
    return path in sys.modules or importlib.util.find_spec(path) is not None


# ------------------------------------------------------------------------------------------------------ the sources

_Found = tuple[str, bool, "tuple[int, tuple[str, ...]] | None"]


def _names_in(source: str) -> Iterator[_Found]:
    """(name, whether the code tests for it, its call) for each use of a private name in a source."""
    tree = ast.parse(source)
    bound = _bound_in(tree)
    asked = _asked_in(tree)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        for name in _names_of(node, bound):
            if _is_private(name):
                call = None if id(node) in asked else _shape_of(calls.get(id(node)))
                # Use of a name that was bound before does not show whether it may be missing.
                yield name, id(node) in asked or isinstance(node, ast.Name), call


def _names_of(node: ast.AST, bound: dict[str, str]) -> list[str]:
    """The names that a node imports, or reaches by an attribute."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if _is_of_torch(alias.name)]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{a.name}" for a in node.names] if node.level == 0 and _is_of_torch(node.module) else []
    if isinstance(node, (ast.Attribute, ast.Name)):
        name = _dotted(node, bound)
        return [] if name is None else [name]
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"torch(\.\w+)+", node.value):
        return [node.value]
    if isinstance(node, ast.Call) and _is_getattr(node):
        name = _dotted(node.args[0], bound)
        text = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        return [f"{name}.{text}"] if name is not None and isinstance(text, str) else []
    return []


def _bound_in(tree: ast.Module) -> dict[str, str]:
    """The names of a source that are bound to PyTorch's, with their dotted names."""
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_of_torch(alias.name):
                    bound[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_of_torch(node.module):
            bound.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if len(targets) == 1 and isinstance(targets[0], ast.Name) and isinstance(value, ast.expr):
            name = _dotted(value, bound)
            if name is not None:
                bound[targets[0].id] = name
    return bound


def _asked_in(tree: ast.Module) -> set[int]:
    """The ids of nodes in a `try` that goes on without a missing name, and of `getattr` calls with a default."""
    ids: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Try) and any(_catches_missing(handler) for handler in node.handlers):
            ids.update(id(inner) for statement in node.body for inner in ast.walk(statement))
        elif isinstance(node, ast.Call) and _is_getattr(node) and len(node.args) == 3:
            ids.add(id(node))
    return ids


def _catches_missing(handler: ast.ExceptHandler) -> bool:
    text = "" if handler.type is None else ast.unparse(handler.type)
    return bool(re.search(r"\b(ImportError|AttributeError|TypeError)\b", text))


def _dotted(node: ast.expr, bound: dict[str, str]) -> str | None:
    """A chain of attributes that begins at a name of PyTorch's, as text."""
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, bound)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def _is_getattr(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) > 1


def _is_of_torch(name: str | None) -> bool:
    return name is not None and name.partition(".")[0] == "torch"


def _is_private(name: str) -> bool:
    """Whether a dotted name has a private part; operators, and Python's own names, do not count."""
    parts = name.split(".")
    if parts[1:2] == ["ops"] or re.fullmatch("__.*__", parts[-1]):
        return False
    return any(part.startswith("_") for part in parts)


def _shape_of(call: ast.Call | None) -> tuple[int, tuple[str, ...]] | None:
    if call is None or any(isinstance(arg, ast.Starred) for arg in call.args):
        return None
    names = tuple(keyword.arg for keyword in call.keywords if keyword.arg is not None)
    return (len(call.args), names) if len(names) == len(call.keywords) else None
