"""Submodules that code reaches for as attributes and nobody has imported: `python -m tests.front_door.missing_imports`.

`torch.a.b` works only once something has imported `torch.a.b`, and in a fresh process nothing may have. Looked at without
running it: foregrad's own sources after `import torch` alone, and the parts of PyTorch that a compilation runs after
what foregrad itself imports for one. Prints each as `submodule: file:line`.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PATH = re.compile(r"\btorch(?:\.\w+)+")  # as code writes it, on one line
COMPILES = ("torch._inductor", "torch._decomp", "torch._refs", "torch._prims", "torch._subclasses", "torch.fx")
# In code that does not run before something else has imported them.
IMPORTED_BEFORE = {
    "torch._inductor.cudagraph_trees": "by the forward, whose CUDA graph is made first",
}


def in_foregrad() -> list[str]:
    """Of the files of foregrad, each as if it were the first that is imported."""
    files = sorted((ROOT / "src" / "foregrad").rglob("*.py"))
    return [found for file in files for found in missing(file, {"torch": torch})]


def in_torch() -> list[str]:
    """Of the modules of PyTorch that are imported by now."""
    found = []
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and file.endswith(".py") and any(f"{name}.".startswith(f"{part}.") for part in COMPILES):
            found += missing(Path(file), vars(module))
    return found


def missing(file: Path, names: dict[str, object]) -> Iterator[str]:
    text = file.read_text(encoding="utf-8")
    if names.get("torch") is not torch or not any(first_missing(found.split(".")) for found in set(PATH.findall(text))):
        return  # most files, before they are parsed: seconds
    tree = ast.parse(text)
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    for node in ast.walk(tree):
        path = path_of(node)
        if path[:1] == ["torch"]:
            submodule = first_missing(path)
            if submodule and submodule not in IMPORTED_BEFORE and not is_imported_for(node, submodule, parents):
                yield f"{submodule}: {file}:{node.lineno}"


def path_of(node: ast.AST) -> list[str]:
    """`torch.a.b` as its names, for the longest such expression."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if names and isinstance(node, ast.Name) else []


def first_missing(path: list[str]) -> str:
    """The first of the names that is a submodule which is not imported; "" when there is none."""
    value: object = torch
    for at, name in enumerate(path[1:], 2):
        if not isinstance(value, types.ModuleType):
            return ""
        if name not in vars(value):
            submodule = ".".join(path[:at])
            is_lazy = value is torch and name in ("_dynamo", "_inductor", "_export", "onnx")  # imported when asked
            return submodule if not is_lazy and is_submodule(submodule) else ""
        value = vars(value)[name]
    return ""


def is_submodule(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, TypeError, ValueError):  # `torch.classes` says of each name that it is there
        return False


def is_imported_for(node: ast.AST, submodule: str, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a function around an expression, or the file, imports a submodule itself."""
    while node in parents:
        node = parents[node]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            inside = node.body if isinstance(node, ast.Module) else ast.walk(node)
            if any(f"{name}.".startswith(f"{submodule}.") for statement in inside for name in imports_of(statement)):
                return True
    return False


def imports_of(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def main() -> int:
    found = in_foregrad()
    from foregrad.inductor._torch import inductor

    inductor.decompositions()
    found = sorted({*found, *in_torch()})
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
