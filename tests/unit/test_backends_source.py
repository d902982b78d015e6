"""`graph.source`: generated text that compiles, shows in tracebacks, and goes away."""

from __future__ import annotations

import gc
import inspect
import linecache
import math
import operator
import traceback
import typing
import weakref

import pytest
import torch

from foregrad.errors import InternalError
from foregrad.graph.source import Names, Renderer, compile_source, infix, source_of

SOURCE = "def half(x):\n    y = x / scale\n    return y\n"


def entries() -> set[str]:
    return {name for name in linecache.cache if name.startswith("<foregrad")}


def test_a_compiled_function_uses_the_given_globals():
    assert compile_source(SOURCE, "half", {"scale": 2})(3) == 1.5


def test_globals_may_be_filled_in_later():
    namespace: dict = {}
    half = compile_source(SOURCE, "half", namespace)
    namespace["scale"] = 4
    assert half(2) == 0.5


def test_other_definitions_stay_in_the_globals():
    namespace: dict = {}
    compile_source("def a():\n    return 1\ndef b():\n    return a()\n", "b", namespace)
    assert namespace["a"]() == 1
    assert "b" not in namespace


def test_the_text_shows_in_tracebacks_and_inspect():
    half = compile_source(SOURCE, "half", {"scale": 0})
    with pytest.raises(ZeroDivisionError) as caught:
        half(1)
    assert "y = x / scale" in "".join(traceback.format_exception(caught.value))
    assert inspect.getsource(half) == SOURCE
    assert source_of(half) == SOURCE


def test_checkcache_keeps_the_text():
    half = compile_source(SOURCE, "half", {})
    linecache.checkcache()
    assert source_of(half) == SOURCE


def test_every_unit_has_its_own_text():
    first = compile_source(SOURCE, "half", {})
    second = compile_source(SOURCE.replace("y", "z"), "half", {})
    assert first.__code__.co_filename != second.__code__.co_filename
    assert "z = x / scale" in source_of(second)
    assert "y = x / scale" in source_of(first)


def test_text_and_globals_die_with_the_function_without_the_collector():
    before = entries()
    tensor = torch.ones(2)
    died: list[bool] = []
    weakref.finalize(tensor, died.append, True)
    half = compile_source(SOURCE, "half", {"scale": tensor})
    gc.disable()
    try:
        assert entries() - before
        del half, tensor
        assert entries() == before
        assert died == [True]
    finally:
        gc.enable()


def test_text_outlives_the_function_while_a_traceback_needs_it():
    half = compile_source(SOURCE, "half", {"scale": 0})
    with pytest.raises(ZeroDivisionError) as caught:
        half(1)
    del half
    assert "y = x / scale" in "".join(traceback.format_exception(caught.value))


def test_a_thousand_compiles_leave_nothing():
    before = entries()
    for _ in range(1000):
        compile_source(SOURCE, "half", {})
    assert entries() == before


def test_text_that_is_no_python_is_our_fault():
    before = entries()
    with pytest.raises(InternalError, match="def half") as caught:
        compile_source("def half(:\n", "half", {})
    assert isinstance(caught.value.__cause__, SyntaxError)
    with pytest.raises(KeyError):
        compile_source("pass\n", "half", {})
    assert entries() == before


def test_names_are_handed_out_once_and_are_identifiers():
    names = Names(["taken"])
    handed = [
        names.fresh(text) for text in ("x", "x", "x", "taken", "x_1", "for", "list", "a.b-c", "0", "", "aten::mm", "ü")
    ]
    assert handed[:5] == ["x", "x_1", "x_2", "taken_1", "x_1_1"]
    assert len(set(handed)) == len(handed)
    assert all(name.isidentifier() for name in handed)
    assert not {"for", "list"} & set(handed)


class Pair(typing.NamedTuple):
    left: object
    right: object


def test_values_read_back_as_themselves():
    bound: dict[str, object] = {}

    def bind(value):
        name = f"c{len(bound)}"
        bound[name] = value
        return name

    render = Renderer({}, bind)
    opaque = object()
    values = [
        1, -2**70, True, None, "a'\n", b"\x00", ..., 0.1, -0.0, math.inf, -math.inf, 1e-320, 3 + 4j, complex(-0.0, math.inf),
        [], [1, [2]], (), (1,), (1, (2, [3])), {}, {"a": [1], 2: None}, slice(1, None, 2), torch.float32, torch.device("cpu"),
        Pair(1, [2]), range(3), opaque, torch.strided, torch.contiguous_format, frozenset({1}),
    ]  # fmt: skip
    for value in values:
        back = eval(render(value), dict(bound))
        assert (type(back), repr(back)) == (type(value), repr(value))
    assert eval(render(torch.Size([1, 2]))) == (1, 2)
    assert math.isnan(eval(render(math.nan), dict(bound)))
    immutable = torch.fx.immutable_collections.immutable_list([1, 2])
    assert render(immutable) == "[1, 2]"


def test_arguments_that_are_no_identifiers_still_pass():
    render = Renderer({}, repr)
    assert eval(f"dict({render.arguments((), {'for': 1, 'a': 2})})") == {"for": 1, "a": 2}
    assert render.arguments((1, "x"), {"k": 2}) == "1, 'x', k=2"


def test_operators_keep_their_meaning():
    render = Renderer({}, lambda value: value.__name__)
    cases = [
        (operator.pow, (-1, 2)), (operator.neg, (-3,)), (operator.sub, (1, -1)), (operator.getitem, ([1, 2], 1)),
        (operator.getitem, ((1, 2, 3), slice(0, 2))), (operator.not_, ((),)), (operator.floordiv, (-7, 2)), (operator.mod, (-7, 2)),
        (operator.getitem, ({(1, 2): 3}, (1, 2))), (operator.truediv, (1, 4)), (operator.is_, (None, None)),
    ]  # fmt: skip
    for target, args in cases:
        text = infix(target, args, {}, render)
        assert text is not None
        assert eval(text) == target(*args)
    assert infix(math.floor, (1.5,), {}, render) is None
    assert infix(operator.add, (1,), {}, render) is None
