"""Settings that a function changes for some of its own operators."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad.errors import UnsupportedSideEffectError
from foregrad.python._torch.settings import apply_settings, changes_between_operators, settings

DOORS = {
    "directly": lambda f: foregrad.compile(f, backend="eager"),
    "under torch.compile": lambda f: torch.compile(f, backend="foregrad", options={"backend": "eager"}),
}
TINY = torch.full((3,), 1e-40)
SQUARE = torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
REPEATED = (torch.tensor([0, 0, 1]),)


def flushed(x):
    torch.set_flush_denormal(True)
    y = x * 0.5
    torch.set_flush_denormal(False)
    return y


def flushed_from_here_on(x):
    torch.set_flush_denormal(True)
    return x * 0.5


def filled(x):
    torch.use_deterministic_algorithms(True)
    made = torch.empty(3), torch.empty(2, dtype=torch.int32)
    torch.use_deterministic_algorithms(False)
    return (*made, x + 1)


def filled_when_resized(x):
    torch.use_deterministic_algorithms(True)
    y = x.clone()
    y.resize_(6)
    torch.use_deterministic_algorithms(False)
    return y


def filled_after_a_pointwise_operator(x):
    y = x * 2
    torch.use_deterministic_algorithms(True)
    made = torch.empty(3)
    torch.use_deterministic_algorithms(False)
    return y, made


def accumulated(x):
    torch.use_deterministic_algorithms(True)
    y = torch.zeros(3).index_put_(REPEATED, x, accumulate=True)
    torch.use_deterministic_algorithms(False)
    return y


def in_bfloat16(x):
    y = x.relu()
    torch.set_float32_matmul_precision("medium")
    y = y @ y
    torch.set_float32_matmul_precision("highest")
    return y.relu()


def one_thread(x):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    y = x.sum()
    torch.set_num_threads(before)
    return y


SAME = {
    "denormals": (flushed, TINY),
    "denormals, and stays": (flushed_from_here_on, TINY),
    "filling": (filled, TINY),
    "filling after a pointwise operator": (filled_after_a_pointwise_operator, TINY),
    "filling, resized": (filled_when_resized, TINY),
    "deterministic": (accumulated, torch.ones(3)),
    "precision": (in_bfloat16, SQUARE),
    "threads": (one_thread, SQUARE),
}


def flushed_between(x):
    y = x * 0.5
    torch.set_flush_denormal(True)
    z = x * 0.5
    torch.set_flush_denormal(False)
    return y, z


def put_back_between(x):
    torch.set_flush_denormal(True)
    y = x * 0.5
    torch.set_flush_denormal(False)
    return y, x * 0.5


def two_precisions(x):
    y = x @ x
    torch.set_float32_matmul_precision("medium")
    z = x @ x
    torch.set_float32_matmul_precision("highest")
    return y, z


def filled_once(x):
    y = torch.empty(3).fill_(2)
    torch.use_deterministic_algorithms(True)
    z = torch.empty(3)
    torch.use_deterministic_algorithms(False)
    return x, y, z


BETWEEN = {
    "denormals": (flushed_between, TINY),
    "denormals put back": (put_back_between, TINY),
    "precisions": (two_precisions, SQUARE),
    "filling": (filled_once, TINY),
}


def called(function, x):
    before = settings()
    try:
        results = function(x)
        results = results if isinstance(results, tuple) else (results,)
        # Denormal numbers are zeros to a comparison of numbers while they are flushed.
        bits = [r.clone().view(torch.int32) for r in results]
        return bits, {name: value for name, value in settings().items() if value != before[name]}
    finally:
        apply_settings(before)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Dynamo's, where it leaves a setting to Python
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", SAME)
def test_operators_run_under_what_is_set_before_them(name, door, requires_grad):
    function, x = SAME[name]
    torch._dynamo.reset()
    compiled = DOORS[door](function)
    x = x.clone().requires_grad_(requires_grad and name != "filling, resized")
    for _ in range(3):
        (found, now), (wanted, then) = called(compiled, x), called(function, x)
        assert all(map(torch.equal, found, wanted))
        assert now == then


@pytest.mark.parametrize("name", BETWEEN)
def test_a_change_between_operators_that_it_matters_to_is_refused(name):
    function, x = BETWEEN[name]
    before = settings()
    compiled = foregrad.compile(function, backend="eager", on_unsupported="raise")
    with pytest.raises(UnsupportedSideEffectError, match="set to something else between operators"):
        compiled(x)
    assert settings() == before


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", BETWEEN)
def test_or_runs_eagerly(name, door):
    function, x = BETWEEN[name]
    torch._dynamo.reset()
    with foregrad.config.override(on_unsupported="eager"):
        compiled = DOORS[door](function)
        for _ in range(3):
            assert all(map(torch.equal, called(compiled, x)[0], called(function, x)[0]))


def test_a_method_that_no_operator_is_named_for_is_an_operator_as_any():
    """Dynamo of PyTorch 2.12 calls `__eq__`, which the namespace of operators has as a method of its own."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_method("__eq__", (graph.call_method("sin", (x,)), x)))
    assert changes_between_operators(graph) == frozenset()


def replays_views(x):
    torch._C._set_view_replay_enabled(True)
    return x + 1


def replays_no_views_for_a_while(x):
    with torch.autograd.grad_mode._force_original_view_tracking(False):
        y = x * 2
        y[1:].mul_(3)
    return y


@pytest.fixture
def views_are_not_replayed():
    before = torch._C._is_view_replay_enabled()
    torch._C._set_view_replay_enabled(False)
    yield
    torch._C._set_view_replay_enabled(before)


@pytest.mark.parametrize("function", [replays_views, replays_no_views_for_a_while])
@pytest.mark.usefixtures("views_are_not_replayed")
def test_the_replay_of_views_is_eagers_by_name(function):
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(UnsupportedSideEffectError, match=r"_set_view_replay_enabled|grad_mode.__init__"):
        foregrad.capture(function, x)
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with pytest.warns(foregrad.errors.ForegradWarning, match="test_settings_inside.py"):
        assert torch.equal(compiled(x), function(x))
    assert torch._C._is_view_replay_enabled() is (function is replays_views)


@pytest.mark.usefixtures("views_are_not_replayed")
def test_the_replay_of_views_is_put_back():
    foregrad.compile(lambda x: x[1:] * 2, backend="eager")(torch.ones(3, requires_grad=True))
    assert not torch._C._is_view_replay_enabled()


@pytest.mark.usefixtures("views_are_not_replayed")
def test_the_replay_of_views_is_left_alone_under_a_device_context():
    g = foregrad.compile(lambda x: (x + torch.ones(3))[1:], backend="eager")
    with torch.device("cpu"):
        for _ in range(2):
            g(torch.ones(3))
            assert not torch._C._is_view_replay_enabled()
