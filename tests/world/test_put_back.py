"""What a run of a capture wrote is put back before the function runs again, captured or eagerly."""

import types

import pytest
import torch

import foregrad
from foregrad.python.program_state import ProgramState

_MODULE = """
class S:
    n = 1.0

def hooked(x):
    S.n += 1.0
    y = x * S.n
    y.register_hook(hook)
    return y

def hook(g):
    return g * S.n
"""


def _steps(make, wrap):
    call, count = make()
    call, seen = wrap(call), []
    for _ in range(5):
        x = torch.ones(2, requires_grad=True)
        y = call(x)
        y.sum().backward()
        number = count()
        seen.append((y.tolist(), x.grad.tolist(), number, type(number)))
    return seen


def _by_name():
    class S:
        n = 1.0

    def call(x):
        S.n += 1.0
        y = x * S.n
        y.register_hook(lambda g: g * S.n)
        return y

    return call, lambda: S.n


def _out_of_sight():
    module = types.ModuleType("out_of_sight")
    exec(_MODULE, vars(module))
    return lambda x: getattr(module, "hooked"[:3] + "ked")(x), lambda: module.S.n


@pytest.mark.parametrize("make", [_by_name, _out_of_sight])
def test_a_run_that_ends_at_a_hook_which_reads_state_counts_nothing(make):
    compiled = _steps(make, lambda f: foregrad.compile(f, backend="eager"))
    assert compiled == _steps(make, lambda f: f)


def test_what_was_warned_of_is_no_state_of_a_module():
    """C++ warns, in a backward too: the interpreter then makes `__warningregistry__` in the globals of what runs."""
    module = types.ModuleType("a_module_that_is_warned_of")
    exec("def f(x):\n    return x.sin()\n", vars(module))
    state = ProgramState([(module.f, "f")])
    vars(module)["__warningregistry__"] = {"version": 1}
    assert state.changed() == []
    module.other = {}
    assert len(state.changed()) == 1
