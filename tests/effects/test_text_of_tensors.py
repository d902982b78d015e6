"""The text of a tensor, and its pickle, hold its values: such calls run eagerly, with a warning."""

from __future__ import annotations

import io
import logging
import pickle

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning, TensorTextError
from tests.programs import Table

program = PROGRAMS = Table()


@program
def text(x):
    return x * 2, str(x)


@program
def text_of_a_result(x):
    return x * len(repr(x.sin()))


@program
def formatted(x):
    return x * 2, f"{x.sum():.3f} {x} {x.sum()!r}"


@program
def old_formats(x):
    return x * 2, "{}".format(x.detach()), "%s" % x.detach()  # noqa: UP031, UP032


@program
def inside_a_container(x):
    return x * 2, repr([x.detach(), {"a": x}])


@program
def printed(x):
    out = io.StringIO()
    print("x is", x.detach(), file=out)
    return x * 2, out.getvalue()


LOGGER = logging.getLogger("foregrad.tests.text")
LOGGER.addHandler(logging.StreamHandler(io.StringIO()))
LOGGER.propagate = False


@program
def logged(x):
    """What a handler raises, logging catches."""
    LOGGER.warning("x is %s", x.detach())
    return x * 2


@program
def of_an_error(x):
    try:
        raise ValueError(x.detach())
    except ValueError as error:
        return x * 2, str(error)


@program
def caught(x):
    try:
        return x * len(str(x))
    except Exception:
        return x * 1000


@program
def pickled(x):
    return x * len(pickle.dumps(x.detach()))


@program
def saved(x):
    out = io.BytesIO()
    torch.save({"x": x.detach()}, out)
    return x * len(out.getvalue())


@pytest.mark.parametrize("name", PROGRAMS)
def test_such_calls_are_eagers(name):
    function = PROGRAMS[name]
    compiled = foregrad.compile(function, backend="eager")
    with pytest.warns(ForegradWarning, match=r"text|pickle"):
        for scale in (1.0, 2.5, -7.0):
            x = torch.full((3,), scale, requires_grad=True)
            for a, b in zip(*map(torch.utils._pytree.tree_leaves, (compiled(x), function(x))), strict=True):
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_capture_is_refused(name):
    with pytest.raises(TensorTextError, match=r"\.py:\d+ in"):
        foregrad.capture(PROGRAMS[name], torch.ones(3))


def test_the_text_of_a_parameter_changes_too():
    weight = torch.nn.Parameter(torch.ones(2))
    compiled = foregrad.compile(lambda x: (x * 2, str(weight)), backend="eager")
    with pytest.warns(ForegradWarning):
        before = compiled(torch.ones(2))[1]
    with torch.no_grad():
        weight.add_(1)
    assert compiled(torch.ones(2))[1] == str(weight) != before


def test_other_calls_of_the_function_are_compiled():
    def function(x, tell=False):
        return (x * 2, str(x)) if tell else x * 2

    compiled = foregrad.compile(function, backend="eager")
    compiled(torch.ones(2))
    with pytest.warns(ForegradWarning, match="run eagerly"):
        compiled(torch.ones(2), tell=True)
    compiled(torch.ones(2))
    assert len(compiled.foregrad.specializations) == 1


def test_an_error_with_a_tensor_in_its_text_is_eagers():
    def function(x):
        raise ValueError(f"bad: {x}")

    with pytest.warns(ForegradWarning), pytest.raises(ValueError, match=r"tensor\(\[1\., 1\.\]\)"):
        foregrad.compile(function, backend="eager")(torch.ones(2))


def test_an_overload_that_does_not_fit_needs_no_text():
    """PyTorch writes the arguments' text, and then finds the overload that fits."""

    def filled(x):
        return torch.ops.aten.fill(x, x.sum()), torch.ops.aten.fill_(x.clone(), x[0])

    x = torch.randn(3)
    compiled = foregrad.compile(filled, backend="eager", on_unsupported="raise")
    torch.testing.assert_close(compiled(x), filled(x), rtol=0, atol=0)


def test_an_operator_without_an_overload_that_fits_fails_as_in_eager():
    def wrong(x):
        return torch.ops.aten.fill(x, "five")

    x = torch.randn(3)
    for call in (wrong, foregrad.compile(wrong, backend="eager")):
        with pytest.raises((RuntimeError, TypeError), match="fill"):
            call(x)
