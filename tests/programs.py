"""Tables of programs by name, and the comparison of a compiled program with eager by a function that tells all effects."""

from __future__ import annotations

import warnings

import foregrad
from foregrad.errors import ForegradWarning


class Table(dict):
    """Decorator of functions, which become known by their names."""

    def __call__(self, function):
        self[function.__name__] = function
        return function


def compiled_alike(function, told, *, on_unsupported="raise", **options):
    """The compiled function, after `told` has found the same of it and of `function`: results, effects, state."""
    compiled = foregrad.compile(function, backend="eager", on_unsupported=on_unsupported, **options)
    with warnings.catch_warnings():
        if on_unsupported == "eager":
            warnings.simplefilter("ignore", ForegradWarning)
        found = told(compiled)
    assert found == told(function)
    return compiled
