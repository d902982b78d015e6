"""What a function sees of the code that calls it: the exception that is being handled there, and its frames."""

from __future__ import annotations

import inspect
import sys
import traceback

import pytest
import torch

import foregrad
from foregrad._torch.native import native
from foregrad.errors import ForegradWarning, UnsupportedSideEffectError


def compiled(function):
    return foregrad.compile(function, backend="eager", on_unsupported="eager")


def steps(function, *, within):
    """Values and gradients of calls, those of `within` while an exception is being handled."""
    found = []
    for is_within in within:
        x = torch.tensor([0.5, 2.0], requires_grad=True)
        if is_within:
            try:
                raise ValueError("outside")
            except ValueError:
                y = function(x)
        else:
            y = function(x)
        y.sum().backward()
        found += [y.tolist(), x.grad.tolist()]
    return found


# -------------------------------------------------------------------- exceptions


def of_exc_info(x):
    return x * (2 if sys.exc_info()[0] is None else 9)


def imported_by_name(x):
    from sys import exc_info

    return x * (2 if exc_info()[1] is None else 9)


def of_context(x):
    try:
        raise KeyError
    except KeyError as error:
        return x * (2 if error.__context__ is None else 9)


def of_chain(x):
    try:
        try:
            raise KeyError
        except KeyError:
            raise IndexError from None
    except IndexError as error:
        return x * (2 if error.__context__.__context__ is None else 9)


def of_text(x):
    try:
        raise KeyError
    except KeyError:
        return x * (9 if "outside" in traceback.format_exc() else 2)


def of_formatted(x):
    try:
        raise KeyError
    except KeyError as error:
        return x * (9 if "outside" in "".join(traceback.format_exception(error)) else 2)


class Keeps:
    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.factor = 2 if error.__context__ is None else 9
        return True


def of_a_context_manager(x):
    kept = Keeps()
    with kept:
        raise KeyError
    return x * kept.factor


HANDLED = [of_exc_info, imported_by_name, of_context, of_chain, of_text, of_formatted, of_a_context_manager]
if sys.version_info >= (3, 11):

    def of_exception(x):
        return x * (2 if sys.exception() is None else 9)

    HANDLED.append(of_exception)


@pytest.mark.parametrize("within", [(False, True, False), (True, False, True)])
@pytest.mark.parametrize("function", HANDLED)
def test_a_call_in_an_except_block_of_a_function_that_looks_at_it_is_eager_by_name(function, within):
    with pytest.warns(ForegradWarning, match="called while an exception is being handled"):
        found = steps(compiled(function), within=within)
    assert found == steps(function, within=within)


@pytest.mark.parametrize("function", HANDLED)
def test_outside_of_an_except_block_it_has_a_graph(function):
    strict = foregrad.compile(function, backend="eager", on_unsupported="raise")
    assert steps(strict, within=(False, False)) == steps(function, within=(False, False))


def caught_inside(x):
    try:
        raise KeyError
    except KeyError:
        return x * 2


def test_a_function_that_does_not_look_at_it_has_a_graph_in_an_except_block():
    strict = foregrad.compile(caught_inside, backend="eager", on_unsupported="raise")
    assert steps(strict, within=(True, False, True)) == steps(caught_inside, within=(True, False, True))


def test_what_a_compiled_function_raises_has_the_context_that_it_has_in_eager():
    def fails(x):
        try:
            raise KeyError(1)
        except KeyError:
            raise IndexError(2) from None

    def chain(function):
        try:
            raise ValueError("outside")
        except ValueError:
            with pytest.raises(IndexError) as caught:
                function(torch.ones(1))
        error, found = caught.value, [caught.value.__suppress_context__, caught.value.__cause__]
        while error is not None:
            found.append(type(error))
            error = error.__context__
        return found

    assert chain(compiled(fails)) == chain(fails)


# -------------------------------------------------------------------- frames


def program_frame(frame):
    """The first frame of the program, as foregrad and PyTorch have frames between."""
    while "foregrad" in str(frame.f_globals["__name__"]) or "torch" in str(frame.f_globals["__name__"]):
        frame = frame.f_back
    return frame


def is_first(frame):
    return program_frame(frame).f_code.co_name == "first_caller"


def of_getframe(x):
    return x * (2 if is_first(sys._getframe(1)) else 9)


def of_back(x):
    return x * (2 if is_first(sys._getframe().f_back) else 9)


def of_currentframe(x):
    return x * (2 if is_first(inspect.currentframe().f_back) else 9)


def of_variables(x):
    return x * program_frame(sys._getframe(1)).f_locals["secret"]


def of_stack(x):
    return x * (2 if any(info.function == "first_caller" for info in inspect.stack(0)) else 9)


def of_extracted(x):
    return x * (2 if any(line.name == "first_caller" for line in traceback.extract_stack()) else 9)


def of_lines(x):
    return x * (2 if any("in first_caller" in line for line in traceback.format_stack()) else 9)


def of_a_traceback(x):
    try:
        raise KeyError
    except KeyError as error:
        return x * (2 if is_first(error.__traceback__.tb_frame.f_back) else 9)


LOOKS = "reads its caller's frames|calls `sys._getframe`"  # without the C++ part it is not told how far
FRAMES = [of_getframe, of_back, of_currentframe, of_variables, of_stack, of_extracted, of_lines, of_a_traceback]


def first_caller(function, x):
    secret = 3.0
    return function(x) + 0 * secret


def second_caller(function, x):
    secret = 5.0
    return function(x) + 0 * secret


def by_both(function):
    return [caller(function, torch.ones(2)).tolist() for caller in (first_caller, second_caller, first_caller)]


@pytest.mark.parametrize("function", FRAMES)
def test_a_function_that_looks_at_its_caller_is_eager_by_name(function):
    with pytest.warns(ForegradWarning, match=LOOKS):
        found = by_both(compiled(function))
    assert found == by_both(function)


@pytest.mark.parametrize("function", FRAMES)
def test_captures_refuse_to_look_at_the_caller(function):
    with pytest.raises(UnsupportedSideEffectError, match=LOOKS):
        foregrad.capture(function, torch.ones(2))


def of_its_own(x):
    return x * len(sys._getframe().f_code.co_name)


def of_a_caller_inside(x):
    def name():
        return sys._getframe(1).f_code.co_name

    return x * len(name())


@pytest.mark.skipif(native() is None, reason="the C++ part tells how far a call of `sys._getframe` looks")
@pytest.mark.parametrize("function", [of_its_own, of_a_caller_inside])
def test_a_function_may_look_at_frames_of_its_own(function):
    strict = foregrad.compile(function, backend="eager", on_unsupported="raise")
    assert by_both(strict) == by_both(function)
