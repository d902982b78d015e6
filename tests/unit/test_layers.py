"""What import-linter can't see: which private parts of PyTorch are reached, and from where; and how long files are.

import-linter keeps the order of the layers (pyproject.toml). It knows an installed package only as a whole, so it
can't tell `torch` from `torch._C`; these tests read the sources instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.house.measure import nodes_of, parsed

PACKAGE = Path(__file__).parents[2] / "src" / "foregrad"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LONGEST_FILE, LONGEST_CLASS_OF_TRACING = 600, 300
MOST_PARAMETERS = 8
# Doors that have the parameters of PyTorch's, or a setting each.
DOORS = {
    "compile",
    "aot_export_joint_with_descriptors",
    "aot_function",
    "aot_module_simplified",
    "budget_partition",
    "check_compiler",
    "check_partitioner",
    "minifier",
    "plan",
    "register_backend",
    "verify",
}

# foregrad stands in for these; it may not lean on them.
REPLACED = (
    "functorch",
    "torch._dynamo.backends.common",
    "torch._functorch._aot_autograd",
    "torch._functorch.aot_autograd",
    "torch._functorch.compilers",
    "torch._functorch.partitioners",
)
# Names and fields of PyTorch's descriptors are data, by which clients tell what an input is; they are handed out as such.
DATA = {"torch._functorch._aot_autograd.descriptors"}


def names_of_torch(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) for everything under `torch` (or functorch) that a module imports or reaches by attributes.

    `torch.ops.aten.x` stops at `torch.ops`: what follows names an operator, and operators may be underscored.
    """
    bound: dict[str, str] = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
                bound[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield node.lineno, name
                bound[alias.asname or alias.name] = name
        elif isinstance(node, ast.Call) and isinstance(node.args[0] if node.args else None, ast.Constant):
            # importlib.import_module("torch._C") and the like
            text = node.args[0].value
            if isinstance(text, str) and re.fullmatch(r"(torch|functorch)(\.\w+)*", text):
                yield node.lineno, text
    for node in nodes_of(tree):
        if isinstance(node, ast.Attribute):
            dotted = dotted_name(node)
            head, _, rest = dotted.partition(".")
            if head in bound:
                yield node.lineno, f"{bound[head]}.{rest}"
        elif isinstance(node, ast.Call) and called(node) == "getattr" and len(node.args) > 1:
            head, _, rest = dotted_name(node.args[0]).partition(".")
            attribute = node.args[1]
            if head in bound and isinstance(attribute, ast.Constant):
                yield node.lineno, ".".join(part for part in (bound[head], rest, str(attribute.value)) if part)


def called(node: ast.Call) -> str:
    """The dotted name of what a call calls, or ''."""
    return dotted_name(node.func)


def dotted_name(node: ast.expr) -> str:
    """`a.b.c` as text; '' where the chain starts at anything but a name."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def is_private(name: str) -> bool:
    """Whether a dotted name under torch has a part that PyTorch marks as its own."""
    head, *parts = name.split(".")
    if head != "torch" or parts[:1] == ["ops"]:
        return False
    return any(part.startswith("_") and not (part.startswith("__") and part.endswith("__")) for part in parts)


def is_replaced(name: str) -> bool:
    """Whether a dotted name is, or lies in, one of the modules that foregrad replaces."""
    return name not in DATA and any(name == module or name.startswith(f"{module}.") for module in REPLACED)


def faults(source: str, *, may_be_private: bool) -> list[str]:
    """The forbidden names in a module's source, each with its line; empty for a module that keeps the rules."""
    found = {
        f"line {line}: {name}"
        for line, name in names_of_torch(parsed(source))
        if is_replaced(name) or (is_private(name) and not may_be_private)
    }
    return sorted(found)


def in_private_package(path: Path) -> bool:
    """Whether a file is a door to private PyTorch: the core's, or an annex's own."""
    parts = path.relative_to(PACKAGE).parts
    return not {"_torch", "_torch.py"}.isdisjoint(parts[:2])


def test_private_torch_is_reached_through_the_doors_only():
    """Only the doors, `_torch`, use underscored names of torch, and nothing uses the modules that foregrad replaces."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    found = {path: faults(text, may_be_private=in_private_package(path)) for path, text in texts.items()}
    said = [
        f"{path.relative_to(PACKAGE)}, {fault}" for path, faults_of_file in found.items() for fault in faults_of_file
    ]
    assert not said, "\n".join(["move these behind the room's `_torch`, or do without:", *said])


def test_files_are_short():
    """A file holds one idea: at most 600 lines of it; in `tracing` 300 of a class."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    assert [path for path, text in texts.items() if len(text.splitlines()) > LONGEST_FILE] == []
    of_tracing = [text for path, text in texts.items() if path.is_relative_to(PACKAGE / "tracing")]
    classes = [node for text in of_tracing for node in nodes_of(parsed(text)) if isinstance(node, ast.ClassDef)]
    assert [c.name for c in classes if c.end_lineno - c.lineno >= LONGEST_CLASS_OF_TRACING] == []


def test_functions_have_few_parameters():
    trees = ((path, parsed(path.read_text(encoding="utf-8"))) for path in SOURCES)
    functions = ((path, node) for path, tree in trees for node in nodes_of(tree) if isinstance(node, ast.FunctionDef))
    many = {f.name: path for path, f in functions if len(parameters_of(f)) > MOST_PARAMETERS}
    assert many.keys() == DOORS


def parameters_of(function: ast.FunctionDef) -> list[str]:
    """The parameters of a function, but for the object or class that a method is of."""
    rest = [argument for argument in (function.args.vararg, function.args.kwarg) if argument is not None]
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs, *rest)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


PRIVATE = [
    "import torch._C",
    "import torch._subclasses.fake_tensor as fakes",
    "from torch import _C",
    "from torch._C import _dispatch_keys",
    "from torch.fx import _pytree",
    "from torch.utils import _pytree as pytree",
    "from torch.testing._internal import common_utils",
    "import torch\ntorch._C._dispatch_keys(x)",
    "import torch as t\nt._C",
    "import torch.fx\nf = torch.fx._symbolic_trace",
    "from torch import fx\nfx._symbolic_trace.wrap",
    "from torch import Tensor\nTensor._make_subclass(a, b)",
    "def f():\n    import torch\n    return torch.autograd._force_original_view_tracking",
    "import importlib\nimportlib.import_module('torch._dynamo')",
    "__import__('torch._inductor')",
    "import torch\ngetattr(torch, '_C')",
    "import torch\ngetattr(torch.fx, '_pytree', None)",
]

REPLACED_MODULES = [
    "import torch._functorch.aot_autograd",
    "from torch._functorch import aot_autograd",
    "from torch._functorch import partitioners as p",
    "from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta",
    "from torch._dynamo.backends.common import aot_autograd",
    "import torch\ntorch._functorch.aot_autograd.aot_function(f)",
    "from functorch.compile import aot_function",
    "import functorch",
]

PUBLIC = [
    "import torch\ntorch.__version__",
    "import torch\ntorch.ops.aten._to_copy.default(x)",
    "import torch\naten = torch.ops.aten\naten._softmax.default",
    "import torch.nn.functional as F\nF.relu(x)",
    "import torch\nx = torch.zeros(1)\nx._base",
    "from foregrad._torch import fakes\nfakes._cache",
    "from ._torch import dispatch",
    "import torchmetrics._private",
    "print('torch is', 1)",
]


@pytest.mark.parametrize("source", PRIVATE)
def test_the_checker_sees_private_names(source):
    """Every way to reach a private name is found outside `_torch`, and allowed inside."""
    assert faults(source, may_be_private=False)
    assert not faults(source, may_be_private=True)


@pytest.mark.parametrize("source", REPLACED_MODULES)
def test_the_checker_sees_replaced_modules(source):
    """What foregrad replaces is forbidden everywhere, inside `_torch` too."""
    assert faults(source, may_be_private=True)


@pytest.mark.parametrize("source", PUBLIC)
def test_the_checker_leaves_public_names_alone(source):
    """Dunder names, operators, attributes of values and other packages are no private names of torch."""
    assert not faults(source, may_be_private=False)


def imported_at_first(name: str, path: Path, known: set[str]) -> set[str]:
    """The modules of ours that a module imports outside of functions, for types too."""
    found = set()
    pending: list[ast.AST] = [parsed(path.read_text(encoding="utf-8"))]
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        pending += ast.iter_child_nodes(node)
        if isinstance(node, ast.ImportFrom) and node.level:
            package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])
            found |= {f"{base}.{a.name}" if f"{base}.{a.name}" in known else base for a in node.names}
    return found & known - {name}


def test_no_two_files_import_each_other_however_far_round():
    names = {".".join(("foregrad", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in SOURCES}
    names = {name.removesuffix(".__init__"): path for name, path in names.items()}
    imports = {name: imported_at_first(name, path, set(names)) for name, path in names.items()}
    assert sum(map(len, imports.values())) > 1_000

    def reached(name: str) -> set[str]:
        seen: set[str] = set()
        pending = [name]
        while pending:
            new = imports[pending.pop()] - seen
            seen |= new
            pending += new
        return seen

    # An artifact gives modules, and a module tells its artifact.
    assert {name for name in names if name in reached(name)} == {
        "foregrad.store.artifacts.artifact",
        "foregrad.store.artifacts.module",
    }
