"""Makes the parts of the documentation that code can say better: run as `make docs`.

`errors.md` is written whole, from the docstrings of foregrad.errors and the remedies below, and so is
`closed_world.md`, from the table of calls that are known to be pure. In the other pages, each block of Python is run,
in order and in one namespace; where an `output` comment and another block follow, what it prints replaces that block's
content. `--check` changes nothing and fails when a page is out of date.
"""

from __future__ import annotations

import argparse
import contextlib
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
from foregrad.frontend import known_calls

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
    "memory.md",
    "regions.md",
    "training_step.md",
    "subclasses.md",
    "toy.md",
    "write_a_compiler.md",
)

REMEDIES = {
    "ForegradError": "Catch it to tell foregrad's errors from those of your own code. Only its subclasses are raised.",
    "ForegradWarning": "Filter it as any other warning. Nothing foregrad warns of makes a result wrong.",
    "UnsupportedError": "Call the part that its message names outside the compiled function, in eager mode. Only its "
    "subclasses are raised.",
    "UnsupportedOpError": "Use another operator, or make the call that the message names outside the compiled "
    "function.",
    "UnsupportedDataDependentError": "Choose with `torch.where` or a mask instead of `if`; make the size a constant, "
    "or a property of an input's shape; or compute the deciding value before the call and hand it over as a Python "
    "number.",
    "UnsupportedLayoutError": "Convert the tensor with `.to_dense()` before the call, or compute with it in a function "
    "that [`foregrad.eager_region`](regions.md) marks: the rest is compiled.",
    "UnsupportedTensorError": "See [Tensor subclasses](subclasses.md). Hand over the plain tensors that it is made "
    "of, and rebuild it inside the function.",
    "UnsupportedMutationError": "Return the new value and assign it outside, or mutate a clone.",
    "UnsupportedAliasError": "Give the compiled function a clone of one of the tensors, or return a clone.",
    "UnsupportedSideEffectError": "Move the effect out of the compiled function: return what it needs.",
    "ProgramOutputError": "Print or log outside the compiled function; return what it says.",
    "EscapedTensorError": "Warm the cache up by calling the function once in eager mode, or keep the part that fills "
    "it outside the compiled function.",
    "AttributeAssignedError": "Register the tensors as buffers (`register_buffer`) and write to those, or return the "
    "new values.",
    "ArtifactError": "Save the artifact again, with the versions that its reader has; the message says what is wrong "
    "where. Of a function that can't be stored it names the value or operator: leave that out of what is exported.",
    "ArtifactCallError": "Call it as it was exported (the message has the argument, or the setting, that differs), or "
    "export once more for such calls: `artifact.specialize(...)`, `dynamic_shapes=`.",
    "TensorTextError": "Print, log or save tensors after the call, or leave their values out: `x.shape` is known. With "
    "`foregrad.compile` the call runs eagerly, with a warning.",
    "UnknownLeafError": "The message has the argument's path. Hand over the tensors and numbers in it, or register its "
    "class as a container with `torch.utils._pytree.register_pytree_node`.",
    "GraphError": "If you edited the graph, the message shows the nodes around the fault. If you did not, it is a "
    "fault in foregrad: please report it.",
    "PartitionError": "The message says what does not fit. With a partitioner of your own, return a forward with the "
    "function's outputs first and the saved values after them, and a backward that takes the saved values first.",
    "BudgetError": "Ask for at least the bytes that the message names, or for a fraction from 0.0 to 1.0 of the way "
    "from the least feasible peak to that of saving everything.",
    "BackendError": 'The message names the backend and the half. `backend="eager"` runs the same graphs with '
    "PyTorch's own kernels, and tells whether the fault is the backend's.",
    "AnomalyError": "The message has the operator and your line that it differentiates. Eager raises a plain "
    "RuntimeError there.",
    "InternalError": "Please report it, with the printed graph and the program that led to it. It is never your "
    "mistake.",
}

HEAD = """# Errors

<!-- Made by docs/generate.py from the docstrings in foregrad.errors: change those, then run `make docs`. -->

Every error of foregrad's own is a class in `foregrad.errors` and a `ForegradError`, and also the built-in error that
it is most like, so that code which catches, say, `TypeError` goes on working. Its message says what happened, where
in your code, why, and what to do.

Where eager PyTorch itself raises an error, foregrad raises one of the same class where it can: that is no error of
foregrad's, and not listed here.
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
        sections.append(f"## `{name}`\n\nA kind of {bases}.\n\n**When.** {text}\n\n**What to do.** {REMEDIES[name]}\n")
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

While a function is captured, each thing that it does is

1. an operator on tensors, which is recorded, or
2. a read or a write of a *holder* that is tracked (a dict, list, set, deque, cell, attribute, buffer, ...): reads
   become guards or inputs, writes become effects that each compiled call repeats, or
3. a call of something that this page says to be pure.

Anything else makes the call eager, with one warning that names it, your line and the remedy; `on_unsupported="raise"`,
`capture` and `aot_function` raise `UnsupportedSideEffectError`. The call into C is refused before it is made, and what
the capture wrote until then is put back: it leaves nothing behind. Of calls into C the interpreter tells (a profile
function on the capturing thread, while the function runs). Code of packages and of the standard library is looked at
like your own.

What to do about a refusal: call it outside the compiled function, or put it into a function that
`foregrad.eager_region` marks, which every call runs as it is.

A method that writes to its object is fine where the capture made the object, and where the object is tracked. Of any
other object a copy is kept from before the write; when the write is still there at the end, it is taken back and the
call is eager. Context variables: a capture runs in a context of its own.

What the function prints, logs and warns of is written by each call, once: numbers, and text that it makes. (A text of a
tensor's values, and a `print` to another file than `sys.stdout` or `sys.stderr`, make the call eager.) `id` and `hash`
are pure, but of a tensor, container or object among the arguments, which is another in each call. `sys._getframe` is
pure where it finds a frame of the function's own. These, and `warnings.warn`, need the C++ part; without it they make
the call eager. Code that names `f_back` makes it eager too.

Not seen: what C calls by itself (a method handed to `map`), objects of C that are called (`ctypes`, functions of Cython
and NumPy's ufuncs), what C does to its other arguments (`heapq.heappush`), and other processes.

## Functions of C that are pure

| module | functions |
|---|---|
{rows(calls.PURE_FUNCTIONS)}

Functions of C of these packages are operators, or have a way of their own: {packages}; but for

| module | functions |
|---|---|
{rows(calls.NOT_OF_PACKAGES)}

## Methods that write to their object

| class | methods |
|---|---|
{rows(calls.WRITING_METHODS)}

All other methods of these classes are pure, and all methods of {classes}, of exceptions, of `itertools`
and of hashes, but for `update` of the last and

| class | methods |
|---|---|
{rows(calls.REFUSED_METHODS)}

## Python of the standard library

Modules whose Python is known to call nothing of C that matters: {trusted}.

Modules that are not looked at, with all that they call: {opaque}.

Functions of Python that are refused: {refused}.
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
    pages |= {name: fill((DOCS / name).read_text(encoding="utf-8")) for name in PAGES}
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
