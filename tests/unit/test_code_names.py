"""Instructions read straight from the bytes of a code object are those that `dis` tells of."""

from __future__ import annotations

import argparse
import dis
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from foregrad.python.code import instructions_of, names_of


def functions_of(*modules: types.ModuleType) -> Iterator[types.CodeType]:
    for module in modules:
        for value in list(vars(module).values()):
            for held in list(vars(value).values()) if isinstance(value, type) else [value]:
                if isinstance(held, types.FunctionType):
                    yield from codes_in(held.__code__)


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


@pytest.mark.parametrize("module", [argparse, dis, types, torch.nn.functional, torch.overrides, torch._tensor])
def test_instructions_are_those_of_dis(module: types.ModuleType) -> None:
    for code in functions_of(module):
        told = [i for i in dis.get_instructions(code) if i.opname not in ("CACHE", "EXTENDED_ARG")]
        found = instructions_of(code)
        assert [i.name for i in found] == [i.opname for i in told]
        # Python 3.10 leaves any byte behind an instruction without an argument.
        assert [i.argument for i, t in zip(found, told, strict=True) if t.arg is not None] == [
            t.arg for t in told if t.arg is not None
        ]
        for ours, theirs in zip(found, told, strict=True):
            if theirs.opname in NAMED:
                assert ours.value == theirs.argval
                assert type(ours.value) is type(theirs.argval)


NAMED = {
    name
    for name, number in dis.opmap.items()
    if number in {*dis.hasname, *dis.hasfree, *dis.hasconst} and name != "KW_NAMES"  # of which `dis` does not know
}


def test_more_names_than_an_argument_can_number() -> None:
    lines = "\n".join(f"    a.n{i}; g{i}" for i in range(300))
    namespace: dict[str, Any] = {}
    exec(f"def function(a):\n{lines}\n", namespace)
    found = names_of(namespace["function"].__code__)
    assert found.loaded == {f"g{i}" for i in range(300)}
    assert {f"n{i}" for i in range(300)} <= found.others


def test_cells_that_are_arguments() -> None:
    def outer(first: Any, second: Any) -> Any:
        third = [second]
        return lambda: (first(third), outer)

    inner = next(c for c in outer.__code__.co_consts if isinstance(c, types.CodeType))
    assert names_of(inner).handed_on == {"first", "third", "outer"}
