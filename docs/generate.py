"""Makes the parts of the documentation that code can say better: run as `make docs`.

`errors.md` is written whole, from the docstrings of foregrad.errors and the remedies below, and so is
`closed_world.md`, from the table of calls that are known to be pure. In the other pages, each block of Python is run,
in order and in one namespace; where an `output` comment and another block follow, what it prints replaces that block's
content. `--check` changes nothing and fails when a page is out of date.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import io
import linecache
import os
import re
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from foregrad import config, errors
from foregrad.backends import registry
from foregrad.python import known_calls

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))  # a page may import from examples/
PAGES = (
    "architecture.md",
    "index.md",
    "tutorial.md",
    "coming_from.md",
    "verify.md",
    "logging.md",
    "pipeline.md",
    "dynamic.md",
    "higher_order.md",
    "backends.md",
    "guards.md",
    "explain.md",
    "extending.md",
    "cache.md",
    "memory.md",
    "planning.md",
    "regions.md",
    "training_step.md",
    "subclasses.md",
    "toy.md",
    "howto/accelerate.md",
    "howto/checkpoints.md",
    "howto/choose.md",
    "howto/inference.md",
    "howto/lightning.md",
    "howto/mixed_precision.md",
    "howto/profiling.md",
    "howto/trainer.md",
    "howto/troubleshooting.md",
    "write_a_compiler.md",
    "joint_graph.md",
    "higher_order_operators.md",
)
# The library that a page's examples import: without it the page stays as it is.
NEEDS = {
    "howto/accelerate.md": "accelerate",
    "howto/inference.md": "transformers",
    "howto/lightning.md": "lightning",
    "howto/trainer.md": "accelerate",
}

REMEDIES = {
    "ForegradError": "Catch it to tell foregrad's errors from your own. Only its subclasses are raised.",
    "ForegradWarning": "Filter it like any warning.",
    "UnsupportedError": "Call the part that its message names outside the compiled function, in eager mode.",
    "UnsupportedOpError": "Use a different operator, or make the call that the message names outside the compiled "
    "function.",
    "UnsupportedDataDependentError": "Choose with `torch.where` or a mask instead of `if`; make the size a constant, "
    "or a property of an input's shape; or compute the deciding value before the call and pass it as a Python "
    "number.",
    "UnsupportedLayoutError": "Convert the tensor with `.to_dense()` before the call, or compute in a function "
    "that [`foregrad.eager_region`](regions.md) marks: the rest is compiled.",
    "UnsupportedTensorError": "See [Tensor subclasses](subclasses.md). Pass the plain tensors inside it, "
    "and rebuild it in the function.",
    "UnsupportedMutationError": "Return the new value and assign it outside, or mutate a clone.",
    "UnsupportedAliasError": "Pass a clone of a tensor, or return a clone.",
    "UnsupportedSideEffectError": "Move the effect out of the compiled function: return the values that it needs.",
    "ProgramOutputError": "Print or log outside the compiled function; return the values to print.",
    "EscapedTensorError": "Warm the cache up by calling the function once in eager mode, or keep the part that fills "
    "it outside the compiled function.",
    "AttributeAssignedError": "Register the tensors as buffers (`register_buffer`) and write to the buffers, or "
    "return the new values.",
    "ArtifactError": "The message names the fault and its place. Save the artifact again, with the versions of "
    "PyTorch and foregrad that will load it. If a function can't be stored, leave out the value or operator that the "
    "message names.",
    "ArtifactCallError": "The message names the argument or the setting that differs: change it, or export for the new "
    "kind of call with `artifact.specialize(...)` or `dynamic_shapes=`.",
    "TensorTextError": "Print, log or save tensors after the call. Inside, `x.shape` and text of a number are fine: "
    "see [Text of values](dynamic.md#text-of-values).",
    "UnknownLeafError": "The message has the argument's path. Pass its tensors and numbers, or register its "
    "class as a container with `torch.utils._pytree.register_pytree_node`.",
    "GraphError": "If you edited the graph, the message shows the nodes around the fault. Otherwise the "
    "fault is foregrad's: [please report it](howto/troubleshooting.md#report-a-fault).",
    "PartitionError": "The message names the fault. With a partitioner of your own, return a forward with the "
    "function's outputs first and the saved values after them, and a backward that takes the saved values first.",
    "BudgetError": "Ask for at least the bytes that the message names, or for a fraction from 0.0 (the least "
    "feasible peak) to 1.0 (the peak of saving everything).",
    "PlanError": "The message names the argument and its possible values. An optimizer that needs values can be left "
    "out (`optimizer=None`), and its state added by hand.",
    "BackendError": 'The message names the backend and the half. `backend="eager"` runs the graphs with '
    "PyTorch's own kernels: if they are right, the fault is the backend's.",
    "AnomalyError": "The message names the operator, and your line whose gradient is nan. Eager raises a plain "
    "`RuntimeError`.",
    "InternalError": "It is never your mistake. [Please report it](howto/troubleshooting.md#report-a-fault), with the "
    "printed graph and your program.",
}

HEAD = """# Errors

<!-- Made by docs/generate.py from the docstrings in foregrad.errors: change the docstrings, then run `make docs`. -->

Each error of foregrad is a class in `foregrad.errors`. It is a `ForegradError` and also the nearest built-in error, so
code that catches `TypeError` or `RuntimeError` continues to work. The message names your line, the reason and the
remedy.

An error of your function, or of PyTorch, reaches you as in eager. Its traceback shows a single frame of foregrad;
`foregrad.config.full_tracebacks = True` (`FOREGRAD_FULL_TRACEBACKS=1`) shows all frames.

By default, `foregrad.compile` raises no `UnsupportedError`: the call runs eagerly, with one warning.
`on_unsupported="raise"` raises the error, and so do `capture`, `aot_function` and `export`.
"""


# A fenced block of Python and, where a comment asks for it, the fenced block for what it prints.
EXAMPLE = re.compile(
    r"```python\n(?P<code>(?:(?!```).*\n)+)```"
    r"(?:(?P<between>\n+<!-- output -->\n)```(?P<language>\w*)\n(?:(?!```).*\n)*```)?"
)


def errors_page() -> str:
    """The whole of errors.md."""
    sections = [HEAD]
    for name in errors_by_kind():
        cls = getattr(errors, name)
        bases = " and ".join(f"`{base.__name__}`" for base in cls.__bases__)
        text = inspect.cleandoc(cls.__doc__)
        sections.append(f"## `{name}`\n\nA kind of {bases}.\n\n**When.** {text}\n\n**Remedy.** {REMEDIES[name]}\n")
    return "\n".join(sections)


def errors_by_kind() -> list[str]:
    """The names of all classes, each after the one it is a kind of, kinds together, otherwise as they are written."""

    def below(parent: type) -> list[str]:
        children = [cls for cls in all_classes if parent in cls.__bases__]
        return [name for cls in children for name in (cls.__name__, *below(cls))]

    defined = [value for value in vars(errors).values() if isinstance(value, type)]
    all_classes = [cls for cls in defined if cls.__module__ == errors.__name__]
    roots = [cls for cls in all_classes if not any(base in all_classes for base in cls.__bases__)]
    return [name for root in roots for name in (root.__name__, *below(root))]


def closed_world_page() -> str:
    """The whole of closed_world.md, from the table of calls."""
    calls = known_calls

    def listed(names: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in sorted(names))

    def rows(table: dict[str, str]) -> str:
        return "\n".join(
            f"| `{module}` | {'all' if names == calls.EVERYTHING else listed(names.split())} |"
            for module, names in sorted(table.items())
            if names
        )

    packages, classes = listed(calls.KNOWN_PACKAGES), listed(calls.PURE_CLASSES)
    trusted, opaque = listed(calls.TRUSTED_MODULES), listed(calls.OPAQUE_MODULES)
    named = [f"{package}.{name}" for package, names in calls.REFUSED_NAMES.items() for name in names.split()]
    named += [f"{function.__module__}.{function.__qualname__}" for function in calls._REFUSED_FUNCTIONS]
    refused = listed(named)

    return f"""# The closed world

Most programs need nothing from this page. While foregrad captures a function, it records operators on tensors, tracks
reads and writes of Python state, and allows calls of *pure* functions, which read only their arguments and write only
their result. For any other call into C, foregrad runs the whole function eagerly, with one warning that names the call,
your line and the remedy.

## You do this, foregrad does that

| inside the function you | foregrad | do this |
|---|---|---|
| call operators and methods of tensors | records them | |
| read globals, attributes, closures, containers, the environment | makes guards or inputs | |
| write to older containers, attributes, globals, buffers | repeats the writes in each call | |
| call `math`, `itertools`, `json`, `re`, `copy`, `len`, `sorted`, ... | runs them during the capture only | |
| print, log or warn | writes the text in each call, with [exceptions](dynamic.md#text-of-values) | |
| read `time.time()` or draw from `random` | does so in each call, with [exceptions](guards.md#what-is-checked) | |
| ask a different clock, a unique name, or system randomness | runs the call eagerly | ask before, pass the result |
| call `open`, `os.listdir`, `subprocess.run`, a socket | runs the call eagerly | read before, pass the result |
| call an unknown C extension | runs the call eagerly | put the part into an [eager region](regions.md) |
| name a function of `ctypes` or Cython | runs the call eagerly | put the part into an [eager region](regions.md) |
| read the caller's frame (`f_back`) | runs the call eagerly | pass the information as an argument |

With `on_unsupported="raise"`, and from `capture` and `aot_function`, the call raises an `UnsupportedSideEffectError`.

<details markdown="1">
<summary>How a call is refused, and which calls are not seen</summary>

Python's profiling hook reports each call into C, before the call is made. If foregrad refuses the call, it undoes the
writes of the capture, and the eager call begins from the same state. A capture runs in its own context of context
variables.

| during the capture | foregrad |
|---|---|
| a method writes to an object that the capture made | allows it |
| a method writes to a tracked object (dict, list, set, deque, attribute, buffer) | repeats the write in each call |
| C code writes to a bytearray, a NumPy array, or the list of `heapq.heappush` | undoes it, and runs the call eagerly |
| `id` or `hash` of a tensor, container or object among the arguments | runs the call eagerly: each call has new ones |
| `id` or `hash` of a different object, `sys._getframe()` for the function's own frame | allows it |

Without the C++ part, `warnings.warn` and `sys._getframe` make the call eager. The hook does not report calls from C
into C (a method passed to `map`) and calls of C objects (functions of `ctypes` and Cython, NumPy's ufuncs). foregrad
finds their writes to Python objects by comparison, but not their effects inside C. So code of the program that has the
name of such an object, NumPy's apart, makes the call eager before the code begins.

</details>

## Say what is pure in a package's own C

A package lists its pure C functions and classes as entry points in the group `foregrad.pure`. The names on the left are
free. foregrad reads the list without importing the package.

```toml
[project.entry-points."foregrad.pure"]
all-of-a-module = "quick._core"
a-function = "quick._io:parse"
a-class = "quick._tables:Table"
a-method = "quick._cache:Cache.get"
```

A function that counts its calls or reads a clock is not pure: a compiled call does not call it again. foregrad can't
check an entry. Entries for the standard library have no effect.

## Pure functions in C

<details markdown="1">
<summary>By module</summary>

| module | functions |
|---|---|
{rows(calls.PURE_FUNCTIONS)}

C functions of these packages are operators, or have rules of their own: {packages}. Refused in these packages:

| module | functions |
|---|---|
{rows(calls.NOT_OF_PACKAGES)}

</details>

## Methods that write to their object

<details markdown="1">
<summary>By class</summary>

| class | methods |
|---|---|
{rows(calls.WRITING_METHODS)}

All other methods of these classes are pure. So are all methods of exceptions, of `itertools`, of hashes (except
`update`), and of these classes: {classes}.

Exceptions, which are refused:

| class | methods |
|---|---|
{rows(calls.REFUSED_METHODS)}

</details>

## Python code of the standard library

<details markdown="1">
<summary>By module</summary>

Modules whose calls into C are all pure: {trusted}.

Modules that foregrad trusts with everything that they call: {opaque}.

Python functions that are refused: {refused}.

</details>
"""


def fill(page: str) -> str:
    """A page with each example run and each output put in anew.

    The examples are the lines of one program, `example.py`, so that what is printed can quote them.
    """
    namespace: dict[str, object] = {"__name__": "example"}
    program: list[str] = []

    def run(match: re.Match[str]) -> str:
        above = "\n" * len(program)
        program.extend(match["code"].splitlines(keepends=True))
        linecache.cache["example.py"] = (len("".join(program)), None, program, "example.py")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(above + match["code"], "example.py", "exec"), namespace)
        if match["between"] is None:
            return match[0]
        return f"```python\n{match['code']}```{match['between']}```{match['language']}\n{clean(printed.getvalue())}```"

    backends = dict(registry._backends)
    try:
        # As for a reader; and pages are the same where the C++ part is not built.
        with config.override(native=False, on_unsupported="eager"):
            return EXAMPLE.sub(run, page)
    finally:
        registry._backends.clear()
        registry._backends.update(backends)  # what a page registers is on no other


def clean(printed: str) -> str:
    """Output without what differs from one run or machine to another: folders, addresses, trailing blanks."""
    printed = re.sub(r"(?:/[\w.@+-]+)+/([\w-]+\.py)", r"\1", printed)
    printed = re.sub(r"0x[0-9a-f]{6,}", "0x...", printed)
    lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the pages, or with --check say which are out of date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 when a page is out of date")
    options = parser.parse_args()
    os.chdir(tempfile.mkdtemp())  # where a page's examples write
    pages = {"errors.md": errors_page(), "closed_world.md": closed_world_page()}
    missing = {name: library for name, library in NEEDS.items() if importlib.util.find_spec(library) is None}
    for name, library in missing.items():
        print(f"docs/{name} is not run: {library} is not installed", file=sys.stderr)
    pages |= {name: fill((DOCS / name).read_text(encoding="utf-8")) for name in PAGES if name not in missing}
    stale = [name for name, text in pages.items() if read(name) != text]
    for name in stale:
        if options.check:
            print(f"docs/{name} is out of date: run `make docs`", file=sys.stderr)
        else:
            (DOCS / name).write_text(pages[name], encoding="utf-8")
            print(f"wrote docs/{name}")
    return 1 if stale and options.check else 0


def read(name: str) -> str:
    path = DOCS / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


if __name__ == "__main__":
    sys.exit(main())
