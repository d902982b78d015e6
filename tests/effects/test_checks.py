"""Checks without results are effects: they raise as in eager, before anything else that the call does can be seen."""

import pytest
import torch
from torch._higher_order_ops import effects
from torch.utils._pytree import tree_leaves

import foregrad
from tests.covering import each
from tests.effects.failing import PROGRAMS

CHOLESKY = "linalg.cholesky: The factorization could not be completed"
good, bad = torch.eye(3) + 0.1, -torch.eye(3)


def directly(function):
    return foregrad.compile(function, backend="eager")


def through_torch_compile(function):
    return torch.compile(function, backend="foregrad", options={"backend": "eager"})


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def outcome(function, value, grad=False):
    torch.manual_seed(0)
    value = value.clone().requires_grad_(grad)
    try:
        results = [r for r in tree_leaves(function(value)) if isinstance(r, torch.Tensor)]
        if grad:
            sum(r.abs().sum() for r in results if r.requires_grad).backward()
        said = [r.detach().nan_to_num() for r in (*results, *([value.grad] if grad else []))]
    except Exception as error:
        said = [type(error), str(error).partition("\n")[0]]
    return [*said, torch.get_rng_state()]


def same(one, two):
    return len(one) == len(two) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(one, two, strict=True)
    )


@pytest.mark.parametrize(("name", "bad_first"), each(PROGRAMS, [False, True]))
def test_raises_as_eager_does(name, bad_first):
    function, *values = PROGRAMS[name]
    compiled = directly(function)
    for value in [*(reversed(values) if bad_first else values), *values]:
        for grad in (False, True) if value.is_floating_point() else (False,):
            assert same(outcome(function, value, grad), outcome(compiled, value, grad))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["cholesky_0", "solve", "one_hot_0", "assert_async_said", "quantile", "mvn"])
def test_raises_under_torch_compile(name):
    function, *values = PROGRAMS[name]
    for compiled in (through_torch_compile(function),):
        for value in (*values, *values):
            assert same(outcome(function, value), outcome(compiled, value))


@pytest.mark.filterwarnings("ignore")
def test_a_plain_assert_under_torch_compile():
    """Which Dynamo makes an operator of, that raises RuntimeError with its own backend, too, up to 2.13."""

    def function(x):
        assert (x > 0).all(), "negative"
        return x * 2

    compiled = through_torch_compile(function)
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
    with pytest.raises((RuntimeError, AssertionError), match="negative"):
        compiled(-torch.ones(3))


def test_nothing_of_the_call_is_seen_but_what_eager_did_before():
    def function(x, before, after):
        before.add_(1)
        noise = torch.rand(3)
        chol = torch.linalg.cholesky(x)
        after.add_(1)
        return chol + noise * torch.rand(3)

    compiled = directly(function)
    found = []
    for call in (function, compiled):
        before, after = torch.zeros(3), torch.zeros(3)
        torch.manual_seed(0)
        call(good, before, after)
        with pytest.raises(torch.linalg.LinAlgError, match=CHOLESKY):
            call(bad, before, after)
        found.append([before, after, torch.get_rng_state()])
    assert same(*found)


def test_who_catches_the_error_inside_catches_it():
    def function(x):
        try:
            return torch.linalg.cholesky(x)
        except torch.linalg.LinAlgError:
            return torch.linalg.cholesky(x + 3 * torch.eye(3))

    compiled = directly(function)
    for value in (good, bad, good, bad):
        assert torch.equal(function(value), compiled(value))


def test_a_check_behind_a_decision_belongs_to_its_branch():
    def function(x, flag):
        torch._assert_async((x.abs() < 9).all(), "large")
        if flag > 0:
            torch._assert_async((x > 0).all(), "negative")
            return x * 2
        torch._assert_async((x < 0).all(), "positive")
        return x * 3

    compiled = directly(function)
    up, down = torch.tensor(1), torch.tensor(-1)
    calls = [(torch.ones(3), up), (-torch.ones(3), down), (-torch.ones(3), up), (torch.ones(3), down)]
    for x, flag in [*calls, (torch.ones(3) * 10, up), (torch.ones(3) * 10, down), *calls]:
        expected, actual = ((outcome(lambda x, c=c, flag=flag: c(x, flag), x)) for c in (function, compiled))
        assert same(expected, actual)


def test_a_check_before_an_operator_that_fails_by_itself_comes_first():
    def function(x, index):
        assert_all(index < 3)
        return x[index]

    def assert_all(flags):
        torch._assert_async(flags.all(), "no such row")

    compiled = directly(function)
    compiled(torch.ones(3), torch.tensor([1]))
    with pytest.raises(RuntimeError, match="no such row"):
        compiled(torch.ones(3), torch.tensor([7]))


def test_the_first_of_several_raises():
    def function(x):
        torch._assert_async((x < 5).all(), "first")
        torch._assert_async((x < 3).all(), "second")
        return x + 1

    compiled = directly(function)
    for value in (1.0, 4.0, 6.0):
        assert same(*(outcome(c, torch.full((2,), value)) for c in (function, compiled)))


def test_symbolic_sizes_inference_and_transforms():
    def function(x):
        torch._assert_async((x > 0).all(), "negative")
        return x.sin() * x.shape[0]

    compiled = foregrad.compile(function, backend="eager", dynamic=True)
    for size in (2, 3, 4):
        assert torch.equal(compiled(torch.ones(size)), function(torch.ones(size)))
        with pytest.raises(RuntimeError, match="negative"):
            compiled(-torch.ones(size))
    with torch.inference_mode(), pytest.raises(RuntimeError, match="negative"):
        compiled(-torch.ones(3))
    inside = directly(lambda x: torch.func.vmap(torch.linalg.cholesky)(x))
    inside(torch.stack([good, good]))
    with pytest.raises(torch.linalg.LinAlgError):
        inside(torch.stack([good, bad]))
    gradient = directly(torch.func.grad(lambda x: torch.linalg.cholesky(x).sum()))
    assert torch.equal(gradient(good), torch.func.grad(lambda x: torch.linalg.cholesky(x).sum())(good))
    with pytest.raises(torch.linalg.LinAlgError):
        gradient(bad)


def test_value_and_grad_and_hessian_vector_product():
    def loss(x):
        return torch.linalg.cholesky(x).square().sum()

    gradient = foregrad.value_and_grad(loss, backend="eager")
    product = foregrad.hessian_vector_product(loss, backend="eager")
    gradient(good)
    product(good, good)
    with pytest.raises(torch.linalg.LinAlgError, match=CHOLESKY):
        gradient(bad)
    with pytest.raises(torch.linalg.LinAlgError, match=CHOLESKY):
        product(bad, good)


class CheckedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        torch._assert_async((gradient < 100).all(), "large gradient")
        return 2 * x * gradient


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("partial", [False, True])
def test_a_check_in_the_backward(create_graph, partial):
    def function(x, w):
        return CheckedBackward.apply(x) * 1, w * 2

    compiled = directly(function)
    x, w = (torch.ones(3, requires_grad=True) for _ in range(2))
    for scale, fails in ((1.0, False), (1e3, True), (1.0, False)):
        results = compiled(x, w)
        loss = scale * results[0].sum() + (0 if partial else results[1].sum())
        wanted = [x] if partial else [x, w]
        if fails:
            with pytest.raises(RuntimeError, match="large gradient"):
                torch.autograd.grad(loss, wanted, create_graph=create_graph)
        else:
            gradient = torch.autograd.grad(loss, wanted, create_graph=create_graph)[0]
            assert torch.equal(gradient, torch.full((3,), 2.0))
            if create_graph:
                assert torch.equal(torch.autograd.grad(gradient.sum(), x)[0], torch.full((3,), 2.0))


@pytest.fixture(scope="module")
def library():
    """`effects::note(Tensor, int) -> ()`, without a kernel for fakes, and what it was called with."""
    calls = []

    def note(x, limit):
        calls.append(float(x.sum()))
        if x.sum() > limit:
            raise ValueError("noted too much")

    with torch.library._scoped_library("effects", "FRAGMENT") as fragment:
        fragment.define("note(Tensor x, int limit) -> ()")
        fragment.impl("note", note, "CompositeExplicitAutograd")
        yield calls


def test_custom_operators_without_results_run_in_each_call(library):
    def function(x):
        y = x * 2
        torch.ops.effects.note(y, 10)
        z = y + 1
        torch.ops.effects.note(z, 20)
        return z.sin()

    compiled = directly(function)
    for call in (function, compiled):
        library.clear()
        call(torch.ones(3))
        call(torch.full((3,), 1.5))
        assert library == [6.0, 9.0, 9.0, 12.0]
        with pytest.raises(ValueError, match="noted too much"):
            call(torch.full((3,), 2.0))


def test_the_doors_of_aotautograd():
    def function(x):
        return [torch.linalg.cholesky(x) * 2]

    class Module(torch.nn.Module):
        def forward(self, x):
            return function(x)

    aot = foregrad.aot_function(function, fw_compiler=foregrad.nop, keep_inference_input_mutations=True)
    simplified = foregrad.aot_module_simplified(Module(), (good,), fw_compiler=foregrad.nop)
    for call in (aot, simplified):
        assert torch.equal(call(good)[0], function(good)[0])
        with pytest.raises(torch.linalg.LinAlgError, match=CHOLESKY):
            call(bad)
    assert "checked at" in str(foregrad.capture(lambda x: torch.linalg.cholesky(x), good))


def test_an_update_that_the_graph_itself_would_write_waits_for_the_check():
    def function(x, state):
        torch._assert_async((x > 0).all(), "negative")
        state.add_(x)
        return x * 2

    aot = foregrad.aot_function(function, fw_compiler=foregrad.nop, keep_inference_input_mutations=True)
    state = torch.zeros(3)
    aot(torch.ones(3), state)
    with pytest.raises(RuntimeError, match="negative"):
        aot(-torch.ones(3), state)
    assert torch.equal(state, torch.ones(3))


def test_a_function_without_checks_says_nothing_of_them():
    compiled = directly(lambda x: x.sin())
    compiled(torch.ones(3))
    assert "eagerly" not in compiled.foregrad.source()


@pytest.mark.filterwarnings("ignore")
def test_with_inductor():
    def function(x):
        return torch.linalg.cholesky(x).sin() * 2

    compiled = foregrad.compile(function, backend="inductor")
    x = good.clone().requires_grad_()
    torch.testing.assert_close(compiled(x), function(x))
    with pytest.raises(torch.linalg.LinAlgError, match=CHOLESKY):
        compiled(bad.clone().requires_grad_())


_ORDER = []


@torch.library.custom_op("foregrad_order::told", mutates_args=())
def _told(x: torch.Tensor, text: str) -> None:
    _ORDER.append(text)


@torch.library.custom_op("foregrad_order::counted", mutates_args=())
def _counted(x: torch.Tensor, text: str) -> torch.Tensor:
    _ORDER.append(text)
    return x.clone()


_told.register_fake(lambda x, text: None)
_counted.register_fake(lambda x, text: torch.empty_like(x))
for _op in (torch.ops.foregrad_order.told.default, torch.ops.foregrad_order.counted.default):
    effects._register_effectful_op(_op, effects._EffectType.ORDERED)


def dead_between(x):
    _told(x, "first")
    _counted(x, "second")
    _told(x, "third")
    return x * 2


def needed_first(x):
    y = _counted(x, "first")
    _told(y, "second")
    _counted(x, "third")
    return y * 2


def needed_after(x):
    _told(x, "first")
    y = _counted(x, "second")
    return y * 2


@pytest.mark.parametrize("f", [dead_between, needed_first])
def test_effects_of_operators_come_in_eagers_order(f):
    _ORDER.clear()
    f(torch.ones(2))
    expected = [*_ORDER]
    compiled = directly(f)
    compiled(torch.ones(2))
    _ORDER.clear()
    compiled(torch.ones(2))
    assert expected == _ORDER


def test_an_effect_in_the_graph_after_one_without_a_result_is_refused_by_name():
    with pytest.raises(foregrad.errors.UnsupportedSideEffectError, match=r"counted.* comes after an effect without"):
        directly(needed_after)(torch.ones(2))
