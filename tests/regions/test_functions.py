"""Programs with custom autograd Functions, compiled directly and under torch.compile, against eager."""

import warnings
from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch

import foregrad
from foregrad.dispatch.explain import OneWarning
from foregrad.errors import UnsupportedSideEffectError
from tests.covering import shared
from tests.dynamo.installed import make_known
from tests.regions import programs_identity, programs_marked, programs_once, programs_saved, programs_solvers
from tests.regions.outcome import difference, outcome

PARTS = (programs_saved, programs_solvers, programs_marked, programs_identity, programs_once)
PROGRAMS = {name: make for part in PARTS for name, make in part.program.items()}
REFUSED = {"reentrant_checkpoint_accumulates", "gradient_by_closed_over_accumulates"}
# The caller may leave a result out, and the backward is told so: such calls run eagerly, see tests/world/test_held_out.py.
TOLD_OF_RESULTS = {"no_materialize_both"}
# What Dynamo's graph does not say: its own "eager" backend gives the same.
NOT_IN_THE_GRAPH = {"no_materialize", "identity_under_no_grad"}
if torch.__version__ >= (2, 14):  # of a Function under `torch.vmap` it takes the forward alone, whatever the backend
    NOT_IN_THE_GRAPH |= {"setup_generate_vmap"}
# Whose graph has lost a mark: such frames run eagerly.
LOSES_MARK = {name for name in PROGRAMS if name.startswith("mark_dirty")} if torch.__version__ < (2, 13) else set()
# A second backward through a call answers where eager's raises: see the limits of a backward in parts.
ANSWERS = {"mark_dirty_argument_no_grad"}


def directly(function):
    return foregrad.compile(function, backend="eager")


def through_torch_compile(function, **options):
    return torch.compile(function, backend="foregrad", options={"backend": "eager", **options})


def or_eager(function):
    return through_torch_compile(function, on_unsupported="eager")


@pytest.fixture(autouse=True)
def fresh_dynamo():
    make_known()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# By one compiled function, after its first call and again from what it has compiled by then.
BOTH = (1, 2, 1, 2)
# Dynamo takes the gradient within `torch.func.vjp` as one that is not to be differentiated.
FIRST_ONLY = {"func_vjp_inside"}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in REFUSED | TOLD_OF_RESULTS])
def test_first_and_second_derivatives_directly(name):
    make, orders = PROGRAMS[name], (1, 1) if name in ANSWERS else BOTH
    assert difference(outcome(make, lambda f: f, orders=orders), outcome(make, directly, orders=orders)) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", shared((name for name in PROGRAMS if name not in NOT_IN_THE_GRAPH | ANSWERS), 0, 2))
def test_first_and_second_derivatives_through_torch_compile(name):
    make, orders = PROGRAMS[name], (1, 1) if name in REFUSED | FIRST_ONLY else BOTH
    compiled = or_eager if name in LOSES_MARK else through_torch_compile
    assert difference(outcome(make, lambda f: f, orders=orders), outcome(make, compiled, orders=orders)) is None


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_gradients_written_in_a_backward_are_refused_where_they_are_written(name):
    function, inputs, more = PROGRAMS[name]()
    compiled = directly(function)
    with pytest.raises(UnsupportedSideEffectError, match=r"writes to `.grad` of .* at .*torch.autograd.backward"):
        compiled(*inputs)
    assert all(leaf.grad is None for leaf in (*inputs, *more))


def test_a_backward_inside_writes_gradients_where_eagers_does():
    def function(x, w):
        own = x.detach().requires_grad_()
        (own @ w.detach()).sin().sum().backward()
        torch.autograd.backward((own * 2).exp().sum())
        return own.grad * x

    def gradients_of_an_argument(x, w):
        (x @ w).sin().sum().backward()
        return x * 2

    x, w = torch.randn(3, 3, requires_grad=True), torch.randn(3, 3)
    assert torch.equal(directly(function)(x, w), function(x, w))
    assert x.grad is None
    twin = x.detach().clone().requires_grad_()
    assert torch.equal(directly(gradients_of_an_argument)(x, w), gradients_of_an_argument(twin, w))
    assert torch.equal(x.grad, twin.grad)


def test_callers_whose_code_has_no_hash_are_passed_over():
    """As code has that Dynamo makes: `returned`, an argument as it is, is copied after the function has run."""

    def caller(compiled, x):
        return compiled(x)

    code = caller.__code__
    caller.__code__ = code.replace(co_consts=(*code.co_consts, {}))
    returned = directly(lambda x: x.detach().view(-1).as_strided((3,), (1,)).exp().expand(2, 3))
    x = torch.randn(3)
    assert torch.equal(caller(returned, x), x.exp().expand(2, 3))


class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g * 3


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, calls):
        calls.add_(1)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2, None


@pytest.mark.filterwarnings("ignore")
def test_a_frame_whose_graph_lost_a_mark_runs_eagerly_by_name(monkeypatch):
    """Before PyTorch 2.13 Dynamo's graph lacks `mark_dirty`: told once. Writes that need no mark are compiled as ever."""
    monkeypatch.setattr("foregrad.dynamo._once", defaultdict(OneWarning))

    def unmarked(x, calls):
        y = torch.relu_(x * 2)
        return Counting.apply(Same.apply(y), calls).sin().sum()

    def marked(x, calls):
        y = x * 2
        programs_marked.Dirty.apply(y)
        return y.sin().sum() + unmarked(x, calls)

    x, calls = torch.randn(3, requires_grad=True), torch.zeros(())
    for function, is_lost, compiled_by in (
        (unmarked, False, through_torch_compile),
        (marked, bool(LOSES_MARK), or_eager),
    ):
        compiled = compiled_by(function)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            gradients = [torch.autograd.grad(compiled(x, calls), x)[0] for _ in range(2)]
        assert sum("mark_dirty" in str(warning.message) for warning in said) == is_lost
        assert all(torch.equal(gradient, *torch.autograd.grad(function(x, calls), x)) for gradient in gradients)
    assert calls == 8
    torch._dynamo.reset()
    with pytest.raises(Exception, match="mark_dirty") if is_lost else nullcontext():
        through_torch_compile(marked, on_unsupported="raise")(x, calls)
