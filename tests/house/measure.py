"""The size of the house: `make sizes`.

Prints the lines of the core by room, of each annex, and the arrows: imports from the core into an annex and from one
annex into another, at any depth of the code and by strings that name a module; `Any` in the core by room, in lines of code
proper (no blank lines, comments, docstrings); and the names of others that a capture rebinds (`rebound.py`). CI lets the figures only fall: `RECORDED`
(figures.json) is their last state, and `ALLOWED_ARROWS` (arrows.txt) lists each arrow that is still there. After a change
that lowers them, `make sizes ARGS=--write` records the new state. It refuses to record a rise: a commit that must raise a
figure edits figures.json by hand and says why in its message.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib.metadata
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.house.subjects import ALLOWED, ANNEXES, DOORS, NAMED_BY, PACKAGE, module_of, room_of, subject_of

HERE = Path(__file__).parent
RECORDED, ALLOWED_ARROWS = HERE / "figures.json", HERE / "arrows.txt"
# Words that stand for a noun, counted in docstrings: see the rules for language in CONTRIBUTING.md.
PRONOUNS = re.compile(
    r"\b(which|what|whatever|those|whose|whom|others|another|one's|the same|such|"
    r"(?:of|by|to|in|with|from) (?:it|them|that|this|these|one|ones|him))\b",
    re.IGNORECASE,
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Arrow = tuple[str, str]  # a module and one that it imports


parsed = functools.cache(ast.parse)


@functools.cache
def sources() -> dict[Path, ast.Module]:
    return {path: parsed(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def nodes_of(tree: ast.AST) -> list[ast.AST]:
    """All nodes of a tree: to walk it takes as long as to parse it."""
    return list(ast.walk(tree))


def imports(path: Path, tree: ast.Module, modules: dict[str, Path]) -> Iterator[Path]:
    """The files that a file imports anywhere in its code, or names in a string: "foregrad.a.b", or ".a.b" as an argument
    of `import_module`.
    """
    package = module_of(path).split(".") if path.name == "__init__.py" else module_of(path).split(".")[:-1]
    names: list[str] = []
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            full = ".".join([*base, *([node.module] if node.module else [])])
            names += [f"{full}.{alias.name}" if f"{full}.{alias.name}" in modules else full for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("foregrad."):
            names.append(node.value)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            names += [
                f"foregrad{a.value}" for a in node.args if isinstance(a, ast.Constant) and str(a.value)[:1] == "."
            ]
    for name in dict.fromkeys(names):
        if name in modules and name != "foregrad":
            yield modules[name]


def arrows() -> dict[Arrow, Arrow]:
    """By (importing, imported) module, their subjects: each import into an annex from outside, but for `ALLOWED`."""
    modules = {module_of(path): path for path in sources()}
    found = {}
    for path, tree in sources().items():
        ours = subject_of(path)
        if path.relative_to(PACKAGE).as_posix() in DOORS:
            continue
        for target in imports(path, tree, modules):
            theirs = subject_of(target)
            if theirs not in ("core", ours) and (ours, theirs) not in ALLOWED:
                found[module_of(path), module_of(target)] = ours, theirs
    return found


def lines_by_subject() -> dict[str, Counter[str]]:
    """By subject, the lines of each room."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sources():
        counts[subject_of(path)][room_of(path)] += len(path.read_text().splitlines())
    return counts


_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def lines_of_code(path: Path, tree: ast.Module) -> int:
    """A file's lines without blank lines, comments and docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in nodes_of(tree):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            lines -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def untyped() -> dict[str, tuple[int, int]]:
    """By room of the core: the uses of `Any`, or of a name for it, in quoted annotations too; and the lines of code."""
    core = {path: tree for path, tree in sources().items() if subject_of(path) == "core"}
    names = {"Any"}
    for tree in core.values():
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and getattr(node.value, "id", "") == "Any":
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {target.id for target in targets if isinstance(target, ast.Name)}
    found: dict[str, tuple[int, int]] = {}
    for path, tree in core.items():
        nodes = [*nodes_of(tree)]
        for node in tuple(nodes):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "Any" in node.value:
                with contextlib.suppress(SyntaxError):
                    nodes += ast.walk(ast.parse(node.value, mode="eval"))
        count = sum(
            (isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load))
            or (isinstance(node, ast.Attribute) and node.attr == "Any")
            for node in nodes
        )
        before = found.get(room_of(path), (0, 0))
        found[room_of(path)] = before[0] + count, before[1] + lines_of_code(path, tree)
    return found


@functools.cache
def rebound_names() -> int | None:
    """The names of others that are rebound during a capture; None where PyTorch is not the constraints' version."""
    constraints = (PACKAGE.parents[1] / "constraints.txt").read_text()
    if f"torch=={importlib.metadata.version('torch').partition('+')[0]}" not in constraints.splitlines():
        return None
    command, root = [sys.executable, "-m", "tests.house.rebound"], PACKAGE.parents[1]
    run = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


def naming() -> dict[str, int]:
    """By annex, the number of core files that name its subject in code or text."""
    core = [path.read_text() for path in sources() if subject_of(path) == "core"]
    return {a: sum(re.search(words, text, re.IGNORECASE) is not None for text in core) for a, words in NAMED_BY.items()}


def figures() -> dict[str, float]:
    """The figures that may only fall."""
    texts = [
        ast.get_docstring(node) or ""
        for tree in sources().values()
        for node in nodes_of(tree)
        if isinstance(node, _DOCUMENTED)
    ]
    classes: dict[str, set[Path]] = defaultdict(set)
    fields = 0
    for path, tree in sources().items():
        for node in nodes_of(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(path)
                if node.name == "Signature":
                    fields = sum(isinstance(part, ast.AnnAssign) for part in node.body)
    code = "\n".join(path.read_text() for path in sources())
    any_by_room, names = untyped(), rebound_names()
    uses, of_code = (sum(column) for column in zip(*any_by_room.values(), strict=True))
    lines, subjects = lines_by_subject(), Counter("core" if a == "core" else "annex" for a, _ in arrows().values())
    return {
        "lines": sum(rooms.total() for rooms in lines.values()),
        "lines of the core": lines["core"].total(),
        "arrows from the core into annexes": subjects["core"],
        "arrows between annexes": subjects["annex"],
        **{f"core files that name {annex}": count for annex, count in naming().items()},
        "fields of Signature": fields,
        "methods replaced by assignment": code.count("# type: ignore[method-assign]"),
        "type: ignore": code.count("# type: ignore"),
        "Any in 100 lines of the core's code": round(100 * uses / of_code, 1),
        **({} if names is None else {"names rebound during a capture": names}),
        "class names in more than one file": sum(len(where) > 1 for where in classes.values()),
        "pronouns in 100 words of docstrings": round(
            100 * sum(len(PRONOUNS.findall(text)) for text in texts) / max(1, sum(len(text.split()) for text in texts)),
            2,
        ),
    }


def listed_arrows() -> set[Arrow]:
    """The arrows that arrows.txt still allows."""
    rows = (line.split("#")[0].split("->") for line in ALLOWED_ARROWS.read_text().splitlines())
    return {(row[0].strip(), row[1].strip()) for row in rows if len(row) == 2}


def risen(recorded: dict[str, float], now: dict[str, float]) -> list[str]:
    """What is higher now than recorded, in words."""
    return [f"{name}: {recorded[name]} recorded, {value} now" for name, value in now.items() if value > recorded[name]]


def write(now: dict[str, float]) -> None:
    """Record the figures and the arrows of now."""
    RECORDED.write_text(json.dumps(now, indent=2) + "\n")
    header = (
        "# Imports into an annex that still stand: the list only gets shorter. `make sizes ARGS=--write` writes it.\n"
    )
    ALLOWED_ARROWS.write_text(header + "".join(f"{a} -> {b}\n" for a, b in sorted(arrows())))


def main() -> int:
    parser = argparse.ArgumentParser(description="Lines and arrows of the core and of each annex.")
    parser.add_argument(
        "--write", action="store_true", help="record the figures, which may not be higher than recorded"
    )
    parser.add_argument("--arrows", action="store_true", help="print each arrow")
    options = parser.parse_args()
    lines, found, now = lines_by_subject(), arrows(), figures()
    any_by_room = untyped()
    for room, count in lines["core"].most_common():
        uses, of_code = any_by_room[room]
        print(f"{count:7} core   {room:12} {uses} `Any` in {of_code} lines of code")
    for annex in sorted(ANNEXES, key=lambda annex: -lines[annex].total()):
        into = Counter(ours for ours, theirs in found.values() if theirs == annex)
        print(
            f"{lines[annex].total():7} annex  {annex:12} arrows into it: {into['core']} from the core, {into.total() - into['core']} from annexes"
        )
    if options.arrows:
        for (module, target), (ours, theirs) in sorted(found.items(), key=lambda item: (item[1], item[0])):
            print(f"  {ours} -> {theirs}: {module} -> {target}")
    recorded = now | json.loads(RECORDED.read_text()) if RECORDED.exists() else now  # an annex may be new
    for name, value in now.items():
        print(f"{name}: {value:g}" + ("" if recorded[name] == value else f" (recorded: {recorded[name]:g})"))
    higher = risen(recorded, now)
    for line in higher:
        print("ROSE", line, file=sys.stderr)
    if options.write and not higher:
        write(now)
    return bool(higher)


if __name__ == "__main__":
    sys.exit(main())
