"""Where the graph of a call raises, eager has done what comes before the operator that raises, and nothing behind it."""

from __future__ import annotations

import contextlib
import io
import random
import signal
import threading
import weakref

import pytest
import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.nn import functional

import foregrad
from foregrad.errors import ForegradWarning
from tests.covering import each

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


@pytest.mark.parametrize(
    ("name", "grad", "around"),
    each(OPERATORS, [False, True], [contextlib.nullcontext, torch.no_grad, torch.inference_mode], times=3),
)
def test_counters_lists_prints_writes_and_numbers_are_as_eager_leaves_them(name, grad, around):
    one, two = World(), World()
    with around():
        expected = outcomes(reporting(OPERATORS[name], one), one, grad=grad)
        assert [type(result) is tuple for result, *_ in expected] == [False] * 3 + [True] * 2 + [False]
        compiled = foregrad.compile(reporting(OPERATORS[name], two), backend="eager")
        assert outcomes(compiled, two, grad=grad) == expected


@pytest.mark.parametrize("outside", ["compiled", "plain"])
def test_a_compiled_function_in_another_leaves_what_eager_leaves(outside):
    left = []
    for compiles in (False, True):
        world = World()
        inner = reporting(OPERATORS["index"], world)
        inner = foregrad.compile(inner, backend="eager") if compiles else inner

        def f(x, i, inner=inner, world=world):
            world.log.append("outside")
            return inner(x * 2, i) + 1

        call = foregrad.compile(f, backend="eager") if compiles and outside == "compiled" else f
        left.append(outcomes(call, world, grad=False))
    assert left[0] == left[1]


def test_the_frames_of_the_graph_are_gone_before_eager_runs():
    """They hold what it computed, which may be most of the memory."""
    made = []

    def compiler(module, inputs):
        def run(*args):
            if args[0].shape == (1,) and made:
                value = torch.ones(3)
                made.append(weakref.ref(value))
                raise IndexError("too far")
            return module(*args)

        return run

    counted = {"n": 0}

    def f(x):
        counted["n"] += 1
        if len(made) > 1:
            assert made[1]() is None
            raise IndexError("too far")
        return x * 2

    compiled = foregrad.compile(f, backend=compiler, dynamic=False)
    for _ in range(3):
        compiled(torch.ones(1))
    made.append(None)
    with pytest.raises(IndexError, match="too far"):
        compiled(torch.ones(1))
    assert len(made) == 2
    assert counted["n"] == 4


def test_an_error_that_the_function_catches_is_caught_by_name():
    counted = {"n": 0}

    def f(x, i):
        counted["n"] += 1
        try:
            return x[i]
        except IndexError:
            return x[0] * 0 - 1

    compiled = foregrad.compile(f, backend="eager", on_unsupported="eager")
    x = torch.arange(3.0)
    assert [compiled(x, torch.tensor([2])).item() for _ in range(3)] == [2.0] * 3
    with pytest.warns(ForegradWarning, match="raised an error that eager does not, or catches.*IndexError"):
        assert compiled(x, torch.tensor([9])).item() == -1
    assert counted == {"n": 4}
    assert foregrad.explain_recompiles(compiled).eager_calls == 1


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
        with pytest.warns(ForegradWarning, match="raised an error that eager does not.*no kernels by now"):
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


def a_write_read_on_the_way():
    counted, total, x = {"n": 0}, torch.zeros(3), torch.arange(3.0)

    def f(i):
        counted["n"] += 1
        total.add_(1)
        return (x * total)[i]

    return f, lambda call, i: call(i), lambda: (counted["n"], total.tolist())


_LIBRARY = torch.library.Library("foregrad_faults", "FRAGMENT")
_LIBRARY.define("noted(Tensor x) -> Tensor")
_NOTED = []


@torch.library.impl(_LIBRARY, "noted", "CPU")
def _noted(x):
    _NOTED.append(x.shape)
    return x.clone()


torch.library.register_fake("foregrad_faults::noted", torch.empty_like, lib=_LIBRARY)
_register_effectful_op(torch.ops.foregrad_faults.noted.default, _EffectType.ORDERED)


def a_check_and_a_collective():
    f, step, state = a_collective()

    def checked(i):
        torch._assert_async((i >= 0).all(), "negative")
        return f(i)

    return checked, step, state


def an_operator_with_effects():
    counted, x = {"n": 0}, torch.arange(3.0)

    def f(i):
        counted["n"] += 1
        return torch.ops.foregrad_faults.noted(x)[i]

    return f, lambda call, i: call(i), lambda: counted["n"]


def a_collective():
    counted, x = {"n": 0}, torch.arange(3.0)

    def f(i):
        counted["n"] += 1
        y = x * 2
        torch.distributed.all_reduce(y)
        return y[i]

    return f, lambda call, i: call(i), lambda: counted["n"]


@pytest.fixture
def alone(tmp_path):
    """This process is a group."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("gloo is not there")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def test_collectives_and_operators_with_effects_run_once_in_a_call_that_raises(alone):
    """Another process waits for each collective once."""
    for make, count in (
        (a_collective, alone._get_sequence_number_for_group),
        (a_check_and_a_collective, alone._get_sequence_number_for_group),
        (an_operator_with_effects, lambda: len(_NOTED)),
    ):
        f, _, _ = make()
        call = foregrad.compile(f, backend="eager")
        call(torch.tensor([1]))
        before = count()
        call(torch.tensor([1]))
        for _ in range(2):
            with pytest.raises(IndexError):
                call(torch.tensor([9]))
        assert count() - before == 3


_LIMITS = [
    a_large_write,
    a_write_read_on_the_way,
    a_backward,
    gradients_set_to_none,
    an_operator_with_effects,
    a_collective,
]


@pytest.mark.parametrize("make", _LIMITS)
def test_what_the_page_of_limits_says_of_faults_is_still_so(make, alone):
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


@pytest.mark.parametrize("counts", [False, True])
def test_a_handler_in_the_function_sees_the_error_if_the_call_writes(counts):
    state = {"calls": 0}

    def function(x, i):
        if counts:
            state["calls"] += 1
        try:
            return x[i] * 2
        except IndexError:
            return x * 0

    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    x = torch.ones(3)
    for i in (0, 1):
        assert torch.equal(compiled(x, torch.tensor([i])), torch.full((1,), 2.0))
    if not counts:  # a row of docs/limits.md
        with pytest.raises(IndexError, match="out of bounds"):
            compiled(x, torch.tensor([7]))
        return
    with pytest.warns(foregrad.errors.ForegradWarning, match="or catches"):
        assert torch.equal(compiled(x, torch.tensor([7])), torch.zeros(3))
    assert state["calls"] == 3
