"""The core without annexes: it runs, and refuses by name what an annex would own."""

from __future__ import annotations

import pytest

import foregrad
from foregrad import annexes
from foregrad.errors import UnsupportedError
from tests import forked
from tests.house.subjects import ANNEXES

PROGRAM = """
import copy, torch, foregrad
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return nn.functional.gelu(self.linear(x)).sum()

net = Net()
twin = copy.deepcopy(net)
compiled, x = foregrad.compile(twin, on_unsupported="raise"), torch.randn(2, 3)
for _ in range(3):
    wanted, found = net(x), compiled(x)
    wanted.backward()
    found.backward()
    assert torch.equal(wanted, found)
assert torch.equal(net.linear.weight.grad, twin.linear.weight.grad) and torch.equal(net.calls, twin.calls)

def refusal(run):
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

def of(function):
    return foregrad.compile(function, backend="eager", on_unsupported="raise")

y, w = torch.randn(3, requires_grad=True), torch.randn(5, 2, requires_grad=True)
print(refusal(lambda: foregrad.compile(net, memory_budget=0.5)))
print(refusal(lambda: foregrad.compile(net, backend="inductor")))
print(refusal(lambda: torch.func.grad(of(lambda x: x.sin().sum()))(y)))
embed = of(lambda w: nn.functional.embedding(torch.tensor([1, 2]), w, sparse=True).sum())
print(refusal(lambda: embed(w).backward()))
print(refusal(lambda: of(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))(y)))
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2
print(refusal(lambda: of(lambda x: Twice.apply(x))(y)))
def hooked(x):
    x = x * 2
    x.register_hook(print)
    return x
print(refusal(lambda: of(hooked)(y)))
class Mine(torch.Tensor):
    pass
print(refusal(lambda: of(lambda x: x * 2)(y.as_subclass(Mine))))
print(refusal(lambda: foregrad.export))
"""
REFUSALS = [
    "UnsupportedError: this installation of foregrad has no part for memory budgets",
    "BackendError: there is no backend called `inductor`",
    "UnsupportedError: `<lambda>` is called under a torch.func transform",
    "UnsupportedLayoutError: a tensor of layout torch.sparse_coo",
    "UnsupportedOpError: the higher-order operator `cond`",
    "UnsupportedError: this installation of foregrad has no part for Python that graphs call",
    "UnsupportedError: this installation of foregrad has no part for Python that graphs call",
    "UnsupportedError: this installation of foregrad has no part for tensor subclasses",
    "ModuleNotFoundError: No module named 'foregrad.store'",
]

OF_ARGUMENTS = """
import torch, foregrad

def f(x, scale, options):
    x.mul_(scale)
    y = (x.sin() * options["k"]).sum()
    return {"y": y, "view": x[0]}

compiled = foregrad.compile(f, backend="eager", on_unsupported="raise")
w = torch.randn(3, requires_grad=True)
for k in (3, 3, 4, 5.0):
    a, b = w.clone(), w.clone()
    wanted, found = f(a, torch.tensor(0.5), {"k": k}), compiled(b, torch.tensor(0.5), {"k": k})
    assert torch.equal(a, b) and torch.equal(wanted["y"], found["y"]) and found["view"]._base is b
    assert torch.equal(*(torch.autograd.grad(given["y"], w)[0] for given in (wanted, found)))
times = foregrad.compile(lambda x, n: x * n, backend="eager", on_unsupported="raise")
assert [times(torch.ones(1), n).item() for n in (1, 2, 3)] == [1, 2, 3]

class Pair:
    def __init__(self):
        self.left = w

def tagged(x):
    x.tag = 3
    return x * 2

def refusal(function, argument):
    try:
        foregrad.compile(function, backend="eager", on_unsupported="raise")(argument)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"

reached = torch.randn(3)
print(refusal(lambda x: x * reached, w))
print(refusal(torch.nn.Linear(3, 3), w))
print(refusal(tagged, w))
print(refusal(lambda pair: pair.left * 2, Pair()))
print(refusal(lambda given: given.append(given[0] * 2), [w]))
"""
REFUSALS_OF_STATE = [
    "UnsupportedError: this installation of foregrad has no part for Python's state",
    "UnsupportedError: this installation of foregrad has no part for Python's state",
    "UnsupportedError: this installation of foregrad has no part for Python's state",
    "UnknownLeafError: argument `args[0]` is of the class program.Pair",
    "UnsupportedError: this installation of foregrad has no part for Python's state",
]


def test_the_core_runs_without_its_annexes_and_refuses_their_subjects_by_name():
    said, _ = run_without([annex for annex in ANNEXES if annex != "python"], PROGRAM)
    assert [line[: len(wanted)] for line, wanted in zip(said, REFUSALS, strict=True)] == REFUSALS


@pytest.mark.parametrize("hidden", [["python"], [*ANNEXES]], ids=["without Python's state", "without any annex"])
def test_without_pythons_state_functions_are_compiled_as_functions_of_their_arguments(hidden):
    said, warned = run_without(hidden, OF_ARGUMENTS)
    assert [line[: len(wanted)] for line, wanted in zip(said, REFUSALS_OF_STATE, strict=True)] == REFUSALS_OF_STATE
    assert warned.count("has no part for Python's state: functions are compiled as functions of their arguments") == 1


def run_without(hidden, program):
    """The lines that a program prints with these annexes hidden, and its warnings."""
    ran = forked.run("tests.house.hidden", ",".join(hidden), program, bare=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines(), ran.stderr


def test_each_place_of_the_table_has_its_object():
    for seam, places in foregrad.ANNEXES.items():
        assert len(annexes.given(seam)) == len(places)


def test_a_seam_without_an_annex_is_refused_by_name(monkeypatch):
    monkeypatch.setitem(foregrad.ANNEXES, "memory budgets", ["foregrad.no_such_annex:partition"])
    annexes.given.cache_clear()
    with pytest.raises(UnsupportedError, match="no part for memory budgets"):
        foregrad.compile(lambda x: x, backend="eager", memory_budget=0.5)
    annexes.given.cache_clear()
