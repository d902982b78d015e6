"""Where the graph of a call raises, eager has done what comes before the operator that raises, and nothing behind it."""

from __future__ import annotations

import contextlib
import io
import random
import signal
import threading

import pytest
import torch
from torch.nn import functional

import foregrad
from foregrad.errors import ForegradWarning

OPERATORS = {
    "index": lambda x, i: x[i].sum(),
    "embedding": lambda x, i: functional.embedding(i, x[:, None]).sum(),
    "gather": lambda x, i: x.gather(0, i).sum(),
    "cross_entropy": lambda x, i: functional.cross_entropy(x[None], i),
    "multinomial": lambda x, i: torch.multinomial(2.0 - i, 1).sum() * x.sum(),
}


class World:
    def __init__(self):
        self.count, self.log, self.total = 0, [], torch.zeros(3)


def reporting(operator, world):
    def f(x, i):
        world.count += 1
        world.log.append(world.count)
        print("before", world.count)
        world.total.add_(1)
        factor, noise = random.random(), torch.rand(3)
        y = operator(x * factor + noise, i)
        world.count += 10
        world.log.append("behind")
        print("behind")
        world.total.mul_(3)
        return y + torch.rand(3) * random.random()

    return f


def outcomes(call, world, *, grad):
    """What six calls give and leave, the fourth and fifth of which raise."""
    random.seed(1)
    torch.manual_seed(1)
    found = []
    for index in (1, 1, 1, 9, 9, 1):
        x, printed = torch.arange(3.0).requires_grad_(grad), io.StringIO()
        with contextlib.redirect_stdout(printed):
            try:
                result = call(x, torch.tensor([index])).tolist()
            except (IndexError, RuntimeError) as error:
                result = type(error), str(error), error.__context__
        numbers = random.getstate(), torch.get_rng_state().tolist()
        found.append((result, world.count, [*world.log], world.total.tolist(), printed.getvalue(), numbers))
    return found


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", OPERATORS)
def test_counters_lists_prints_writes_and_numbers_are_as_eager_leaves_them(name, grad):
    one, two = World(), World()
    expected = outcomes(reporting(OPERATORS[name], one), one, grad=grad)
    assert [type(result) is tuple for result, *_ in expected] == [False] * 3 + [True] * 2 + [False]
    compiled = foregrad.compile(reporting(OPERATORS[name], two), backend="eager")
    assert outcomes(compiled, two, grad=grad) == expected


def test_an_interrupt_while_a_graph_runs_is_not_followed_by_another_run():
    """The handler raises an ordinary exception, as those of timeouts do."""
    if threading.current_thread() is not threading.main_thread():
        pytest.skip("Python runs handlers on the main thread")
    counted, armed = {"n": 0}, []

    def compiler(module, inputs):
        def run(*args):
            if armed:
                signal.raise_signal(signal.SIGALRM)
            return module(*args)

        return run

    def stop(*_):
        raise TimeoutError("too late")

    def f(x):
        counted["n"] += 1
        return x * 2

    compiled = foregrad.compile(f, backend=compiler)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for _ in range(3):
            compiled(torch.ones(2))
        armed.append(None)
        with pytest.raises(TimeoutError, match="too late"):
            compiled(torch.ones(2))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert counted == {"n": 3}


@pytest.mark.parametrize("mode", ["eager", "raise"])
def test_a_graph_that_raises_where_eager_does_not_is_told_or_an_error(mode):
    total, broken = torch.zeros(2), []

    def compiler(module, inputs):
        def run(*args):
            if broken:
                raise ValueError("no kernels by now")
            return module(*args)

        run.output_strides = [None, None]  # nothing stands by for the first call
        return run

    def f(x):
        total.add_(1)
        return x * 2

    compiled = foregrad.compile(f, backend=compiler, on_unsupported=mode)
    for _ in range(6):
        compiled(torch.ones(2))
    broken.append(None)
    if mode == "raise":
        with pytest.raises(ValueError, match="no kernels by now"):
            compiled(torch.ones(2))
    else:
        with pytest.warns(ForegradWarning, match="raised an error that eager mode does not raise.*no kernels by now"):
            assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    assert total.tolist() == [7.0] * 2


def a_large_write():
    counted, total, x = {"n": 0}, torch.zeros(20_000), torch.arange(3.0)

    def f(i):
        counted["n"] += 1
        total.add_(1)
        return x[i] * 2

    return f, lambda call, i: call(i), lambda: (counted["n"], total[0].item())


class Looking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, i):
        ctx.save_for_backward(i)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return torch.arange(3.0)[ctx.saved_tensors[0]] * gradient, None


def a_backward():
    one, two = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)

    def f(i):
        return (Looking.apply(one, i) * two.sin()).sum()

    return f, lambda call, i: call(i).backward(), lambda: (one.grad.tolist(), two.grad.tolist())


def gradients_set_to_none():
    weight = torch.ones(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], 0.1)

    def f(i):
        loss = (weight[i] * 2).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return f, lambda call, i: call(i), lambda: (weight.grad is None, weight.tolist())


@pytest.mark.parametrize("make", [a_large_write, a_backward, gradients_set_to_none])
def test_what_the_page_of_limits_says_of_faults_is_still_so(make):
    """It fails where one begins to be as in eager: then its row goes."""
    left = []
    for compiles in (False, True):
        f, step, state = make()
        call = foregrad.compile(f, backend="eager") if compiles else f
        for _ in range(4):
            step(call, torch.tensor([1]))
        left.append([state()])
        with pytest.raises(IndexError):
            step(call, torch.tensor([9]))
        left[-1].append(state())
    assert left[0][0] == left[1][0]
    assert left[0][1] != left[1][1]


@pytest.mark.parametrize(
    "door",
    [
        lambda f: foregrad.aot_function(f, lambda module, _: module),
        lambda f: torch.compile(f, backend="foregrad", options={"backend": "eager"}),
    ],
    ids=["aot_function", "torch.compile"],
)
def test_writes_and_numbers_are_as_eager_leaves_them_by_other_doors(door):
    torch._dynamo.reset()
    left = []
    for compiles in (False, True):
        total = torch.zeros(3)

        def f(x, i, total=total):
            total.add_(1)
            y = (x + torch.rand(3))[i]
            total.mul_(2)
            return y + torch.rand(1)

        call = door(f) if compiles else f
        torch.manual_seed(0)
        for index in (1, 1, 9):
            with contextlib.suppress(IndexError):
                call(torch.arange(3.0), torch.tensor([index]))
        left.append((total.tolist(), torch.rand(1).item()))
    assert left[0] == left[1]
