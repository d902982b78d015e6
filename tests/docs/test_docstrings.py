"""Each public name says what it does and shows it: its docstring has an example, and the example runs."""

from __future__ import annotations

import doctest
import inspect

import pytest

import foregrad

# Values of a documented class, a module, and a table: their class's, or their own page's, documentation speaks for them.
VALUES = {
    "config",
    "default_decompositions",
    "dots_saveable",
    "dots_with_no_batch_dims_saveable",
    "errors",
    "everything_saveable",
    "nothing_saveable",
}
DOCUMENTED = sorted(set(foregrad.__all__) - VALUES)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_the_example_of_a_public_name_runs(name):
    value = getattr(foregrad, name)
    examples = doctest.DocTestFinder(recurse=False).find(value, name, module=False, globs={})
    (example,) = examples
    assert example.examples, f"foregrad.{name} shows no example"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE, verbose=False)
    runner.run(example, out=said.append)
    assert runner.failures == 0, "".join(said)


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_docstring_begins_with_a_sentence(name):
    first = inspect.getdoc(getattr(foregrad, name)).partition("\n\n")[0]
    assert first.rstrip().endswith((".", ":"))
    assert first.split()[0] not in ("Those", "What")
