"""Functions of C that captures are told of stay what they are to everybody else: found in tables, called in any way."""

import functools
import math
import operator
import warnings

import pytest
import torch

import foregrad

FUNCTIONS = [id, hash, min, max, math.sqrt, math.log, math.atan2, math.hypot, math.ldexp, math.isclose, warnings.warn]
CLASSES = [int, float]
TABLE = {function: function.__name__ for function in FUNCTIONS}


def root(number):
    return math.sqrt(number)


def larger(number):
    return max(number, 2.0)


@pytest.fixture(autouse=True)
def captured():
    """Calls that the interpreter has made a shortcut for before, and a capture after them."""
    for number in range(100):
        root(number), larger(number), hash(number), id(number)
    compiled = foregrad.compile(lambda x, number: x * math.sqrt(number) + max(float(number), 0.5), backend="eager")
    for number in (2.0, 3.0, 4.0, 5.0):
        assert torch.equal(compiled(torch.ones(2), number), torch.ones(2) * math.sqrt(number) + number)
    assert len(compiled.foregrad.compilations) == 2


def test_tables_find_them():
    assert [TABLE[function] for function in FUNCTIONS] == [function.__name__ for function in FUNCTIONS]
    assert math.sqrt in {math.sqrt, max} and operator.eq(math.sqrt, math.sqrt)


def test_every_way_to_call_them():
    assert root(9.0) == 3.0 and larger(1.0) == 2.0
    assert math.sqrt.__call__(4.0) == 2.0 and [*map(math.sqrt, [1.0, 4.0])] == [1.0, 2.0]
    assert min([3, 1, 2]) == 1 and min(3, 1) == 1 and max((), default=7) == 7 and max("a", "bcd", key=len) == "bcd"
    assert min.__call__(*[5, 4]) == 4 and functools.partial(max, key=lambda v: -v)(3, 2) == 2
    assert math.log(9.0, 3.0) == 2.0 and math.atan2(0.0, 1.0) == 0.0 and math.isclose(1.0, 1.5, rel_tol=0.5)
    assert math.isclose(a=1.0, b=1.5, abs_tol=1.0) and math.hypot(3.0, 4.0) == 5.0
    assert id(FUNCTIONS) == id(FUNCTIONS) and hash("a") == "a".__hash__()
    with pytest.warns(DeprecationWarning, match="said"):
        warnings.warn("said", category=DeprecationWarning, stacklevel=1)


@pytest.mark.parametrize(
    "wrong", [lambda: math.sqrt(), lambda: math.sqrt(1.0, 2.0), lambda: min(), lambda: id(value=1)]
)
def test_errors_are_their_own(wrong):
    with pytest.raises(TypeError):
        wrong()


def test_classes_are_called_in_every_way():
    class Level(int):
        pass

    class Rate(float):
        def __new__(cls, value):
            return float.__new__(cls, value) + 0

    assert [*map(int, ["3", 2.5, True])] == [3, 2, 1] and [*map(float, ["3", 2])] == [3.0, 2.0]
    assert (CLASSES[0](), CLASSES[1]()) == (0, 0.0) and (int("ff", 16), int("11", base=2)) == (255, 3)
    assert float.__call__("1e3") == 1e3 and type.__call__(int, "4") == 4
    assert functools.partial(int, base=8)("17") == 15 and int(*["5"], *[10]) == 5
    assert type(Level("3")) is Level and Level("3") == 3 and Rate(2) == 2.0
    assert isinstance(float(Rate(2)), float) and CLASSES[0] in {int: 1}
    assert float(torch.tensor(2.5)) == 2.5 and int(torch.tensor(2.5)) == 2
    for kind, wrong in ((int, "x"), (float, "x"), (int, None), (float, [])):
        with pytest.raises((TypeError, ValueError)):
            kind(wrong)
    with pytest.raises(TypeError, match="keyword"):
        float(x=1)


def test_dynamo_knows_them():
    @torch.compile(backend="eager", dynamic=True, fullgraph=True)
    def function(x):
        return x / math.sqrt(x.size(-1))

    assert torch.equal(function(torch.ones(2, 4)), torch.ones(2, 4) / 2)
