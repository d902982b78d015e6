"""Symbolic sizes that remember results: as torch's own, guards included."""

import itertools
import operator

import pytest
import sympy
import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from foregrad._torch.fakes import FakeTensorMode, new_fake
from foregrad._torch.size_arithmetic import Env, Node
from foregrad._torch.symbols import SymbolTable, TracedInt

OPERATORS = [
    operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.eq, operator.ne, operator.lt,
    operator.le, operator.gt, operator.ge, torch.sym_max, torch.sym_min,
]  # fmt: skip


def tables(*sizes):
    """The same sizes in an environment of torch's and in one of ours."""
    theirs = SymbolTable(ShapeEnv(duck_shape=False, allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False))
    made = []
    for table in (theirs, SymbolTable()):
        made.append((table, [table.symbol(size, f"x.size({i})", i) for i, size in enumerate(sizes)]))
    return made


def values(numbers):
    given = [*numbers, numbers[0] * 4, numbers[1] + numbers[2], 2, 12]
    return [
        op(a, b)
        for op, a, b in itertools.product(OPERATORS, given, given)
        if isinstance(a, torch.SymInt) or isinstance(b, torch.SymInt)
    ]


def text(value):
    return str(value.node.expr if isinstance(value, (torch.SymInt, torch.SymBool)) else value)


def test_results_are_the_same_asked_once_or_twice():
    (_, theirs), (_, ours) = tables(4, 6, 7)
    for _ in range(2):
        assert list(map(text, values(ours))) == list(map(text, values(theirs)))


def test_questions_make_the_same_guards():
    found = []
    for table, numbers in tables(4, 6, 7):
        answers = [bool(v) for _ in range(2) for v in values(numbers) if isinstance(v, torch.SymBool)]
        found.append(
            (answers, list(map(str, table.guards())), {str(s): str(r) for s, r in table.env.var_to_range.items()})
        )
    (answers, guards, ranges), (our_answers, our_guards, our_ranges) = found
    assert our_answers == answers and our_ranges == ranges
    assert guards and our_guards == list(dict.fromkeys(guards))


def test_a_result_is_computed_again_once_a_symbol_stands_for_another():
    (_, theirs), (_, ours) = tables(6, 6, 7)
    for a, b, c in (theirs, ours):
        assert text(a * c) != text(b * c)
        assert a == b
        assert text(a * c) == text(b * c)
        assert text(a - b) == "0"
    assert text(theirs[0] * theirs[2]) == text(ours[0] * ours[2])


def test_a_number_known_to_be_one_value_is_that_number():
    for _, (a, _) in tables(6, 7):
        assert a.node.maybe_as_int() is None
        assert a == 6
        assert a.node.maybe_as_int() == 6
        assert text(a + 1) == "7"


def test_questions_under_suppressed_guards_are_asked_again():
    for table, (a, b) in tables(6, 6):
        with table.env.suppress_guards():
            assert a == b
        assert not table.guards()
        assert a == b
        assert [g.func for g in table.guards()] == [sympy.Eq]


def test_numbers_of_ours_stay_such_through_arithmetic():
    (_, _), (table, (a, b)) = tables(6, 7)
    assert type(table.env) is Env
    for number in (a, a + 1, 2 * a, a * b // 3, TracedInt(a.node) + b):
        assert type(number.node) is Node
    assert type((a + b).node) is Node and (a + b).node is (a + b).node


def test_a_tracer_of_sizes_is_asked_each_time(monkeypatch):
    asked = []
    for _, (a, _) in tables(6, 7):
        known = a * 3  # remembered
        given = new_fake(FakeTensorMode(shape_env=a.node.shape_env), (a,), (1,), torch.float32, torch.device("cpu"))
        seen = []
        ask = proxy_tensor.handle_sym_dispatch
        monkeypatch.setattr(proxy_tensor, "handle_sym_dispatch", lambda *args: seen.append(args[0]) or ask(*args))  # noqa: B023
        proxy_tensor.make_fx(lambda x: [x.shape[0] * 3 for _ in range(2)])(given)
        monkeypatch.undo()
        assert known.node.hint == 18
        asked.append(seen.count(operator.mul))
    assert asked[0] == asked[1] == 2


@pytest.mark.parametrize("op", [torch.sym_float, torch.sym_not])
def test_what_is_not_remembered_works_as_before(op):
    (_, theirs), (_, ours) = tables(6, 7)
    results = [op(n[0] if op is torch.sym_float else n[0] == n[1]) for n in (theirs, ours)]
    assert str(results[0].node.expr) == str(results[1].node.expr)
    assert text(ours[0] / 2) == text(theirs[0] / 2)
