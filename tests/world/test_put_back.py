"""What a run of a capture wrote is put back before the function runs again, captured or eagerly."""

import types

import pytest
import torch

import foregrad

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
