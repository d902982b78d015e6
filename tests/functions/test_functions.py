"""Programs with custom autograd Functions, compiled directly and under torch.compile, against eager."""

import pytest
import torch

import foregrad
from foregrad.errors import UnsupportedSideEffectError
from tests.dynamo.installed import make_known
from tests.functions import programs_identity, programs_marked, programs_once, programs_saved, programs_solvers
from tests.functions.table import difference, outcome

PARTS = (programs_saved, programs_solvers, programs_marked, programs_identity, programs_once)
PROGRAMS = {name: make for part in PARTS for name, make in part.program.items()}
REFUSED = {"reentrant_checkpoint_accumulates", "gradient_by_closed_over_accumulates"}
# The caller may leave a result out, and the backward is told so: such calls run eagerly, see tests/world/test_held_out.py.
TOLD_OF_RESULTS = {"no_materialize_both"}
# What Dynamo's graph does not say: its own "eager" backend gives the same.
NOT_IN_THE_GRAPH = {"no_materialize", "identity_under_no_grad"}
if torch.__version__ >= (2, 14):  # of a Function under `torch.vmap` it takes the forward alone, whatever the backend
    NOT_IN_THE_GRAPH |= {"setup_generate_vmap"}
# A second backward through a call answers where eager's raises: see the limits of a backward in parts.
ANSWERS = {"mark_dirty_argument_no_grad"}


def directly(function):
    return foregrad.compile(function, backend="eager")


def through_torch_compile(function):
    return torch.compile(function, backend="foregrad", options={"backend": "eager"})


@pytest.fixture(autouse=True)
def fresh_dynamo():
    make_known()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in REFUSED | TOLD_OF_RESULTS])
def test_directly(name):
    make = PROGRAMS[name]
    assert difference(outcome(make, lambda f: f), outcome(make, directly)) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in NOT_IN_THE_GRAPH | ANSWERS])
def test_through_torch_compile(name):
    make = PROGRAMS[name]
    assert difference(outcome(make, lambda f: f), outcome(make, through_torch_compile)) is None


# Dynamo takes the gradient within `torch.func.vjp` as one that is not to be differentiated.
FIRST_ONLY = {"func_vjp_inside"}


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in REFUSED | TOLD_OF_RESULTS | ANSWERS])
def test_second_derivatives_directly(name):
    make = PROGRAMS[name]
    assert difference(outcome(make, lambda f: f, order=2), outcome(make, directly, order=2)) is None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name for name in PROGRAMS if name not in REFUSED | NOT_IN_THE_GRAPH | ANSWERS | FIRST_ONLY]
)
def test_second_derivatives_through_torch_compile(name):
    make = PROGRAMS[name]
    assert difference(outcome(make, lambda f: f, order=2), outcome(make, through_torch_compile, order=2)) is None


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
