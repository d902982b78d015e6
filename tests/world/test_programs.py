"""Ordinary programs with state of Python's: compiled, each gives and leaves what it does in eager."""

import contextlib
import io
import random
import warnings

import numpy as np
import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning
from tests.world import state_programs, training_programs

PROGRAMS = training_programs.PROGRAMS | state_programs.PROGRAMS
EAGER = {  # by name: what no graph holds
    "list_returned_hook_fills": "reads Python state that may change",
    "obj_returned_hook_fills": "reads Python state that may change",
    "leaf_made_and_returned": "makes the leaf",
}


def seen(value):
    """A value as one that can be compared: tensors down to their bits, objects down to their attributes."""
    if isinstance(value, torch.Tensor):
        # As text, so that nan is nan.
        facts = type(value).__name__, value.dtype, tuple(value.shape), value.stride(), value.requires_grad
        return facts, str(value.detach().tolist())
    if isinstance(value, dict):
        return type(value).__name__, [(seen(k), seen(v)) for k, v in value.items()]
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, (list, tuple)) or hasattr(value, "popleft"):
        return type(value).__name__, [seen(item) for item in value]
    if hasattr(value, "__dict__") and not isinstance(value, type):
        return type(value).__name__, seen(vars(value))
    return type(value).__name__, repr(value)


def run(name, wrap):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - what programs use
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = PROGRAMS[name](wrap)
    others = [str(w.message) for w in warned if not issubclass(w.category, ForegradWarning)]
    told = [str(w.message) for w in warned if issubclass(w.category, ForegradWarning)]
    return (seen(result), printed.getvalue(), others), told


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager(name):
    expected, _ = run(name, lambda function: function)
    found, told = run(name, lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"))
    assert found == expected
    if name in EAGER:
        assert EAGER[name] in " ".join(told)
