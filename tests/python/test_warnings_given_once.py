"""A warning that PyTorch gives once in a process, which the program or the code around the call catches or records."""

from __future__ import annotations

import pytest

from tests import forked


def output(*words):
    done = forked.run("tests.python.warned_once", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("action", ["always", "error"])
@pytest.mark.parametrize("name", ["caught", "caught_twice", "recorded", "ignored", "told", "seeds"])
def test_once(action, name):
    kind = "transposed" if name in ("caught", "told") else "meshgrid"
    expected = output(kind, name, action, "eager")
    assert output(kind, name, action, "compiled") == expected
    assert ("raised" in expected) == (action == "error" and name in ("told", "seeds"))


@pytest.mark.parametrize("action", ["always", "error"])
@pytest.mark.parametrize("name", ["caught", "recorded", "ignored", "told"])
def test_a_float_of_a_tensor_that_requires_grad(action, name):
    assert output("scalar", name, action, "compiled") == output("scalar", name, action, "eager")


def test_with_symbolic_sizes():
    assert output("meshgrid", "caught", "always", "dynamic") == output("meshgrid", "caught", "always", "eager")
