"""What a backward writes to buffers, inputs, parameters and saved tensors is written, once for each that runs."""

import pytest
import torch

import foregrad
import foregrad.extend
from foregrad.errors import UnsupportedMutationError
from tests.covering import each
from tests.effects.writing import PROGRAMS

REFUSED = {"ctx_output", "shared_args"}  # writes to what the caller has by then; to memory that two arguments share
NOT_ALL = {"inner_leaf", "ctx_tensor", "spectral_like", "once_diff"}  # see below
WAYS = ["plain", "twice", "two calls", "steps", "first input", "last input", "first output", "create", "views"]


@pytest.fixture(autouse=True)
def quiet(recwarn):
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def directly(function):
    return foregrad.compile(function, backend="eager")


def total(results):
    return sum(t.sum() for t in (results if isinstance(results, tuple) else (results,)))


def run(way, function, arguments):
    """What the way of calling and differentiating gives."""
    inputs = [a for a in arguments if a.requires_grad]
    found = []
    if way == "plain":
        found.append(total(function(*arguments)))
        found[0].backward()
    elif way == "twice":
        loss = total(function(*arguments))
        loss.backward(retain_graph=True)
        loss.backward()
    elif way == "two calls":
        one, two = (total(function(*arguments)) for _ in range(2))
        (one + 2 * two).backward()
    elif way == "steps":
        for _ in range(3):
            total(function(*arguments)).backward()
    elif way in ("first input", "last input"):
        wanted = inputs[:1] if way == "first input" else inputs[-1:]
        found += torch.autograd.grad(total(function(*arguments)), wanted, allow_unused=True)
    elif way == "first output":
        results = function(*arguments)
        first = results[0] if isinstance(results, tuple) else results
        found.append(torch.full_like(first, 2.0))
        first.backward(found[0])
    elif way == "create":
        firsts = torch.autograd.grad(total(function(*arguments)), inputs, create_graph=True, allow_unused=True)
        squares = [g.square().sum() for g in firsts if g is not None and g.requires_grad]
        found += firsts
        if squares:
            found += torch.autograd.grad(sum(squares), inputs, allow_unused=True)
    else:
        total(function(*(a * 1 if a.requires_grad else a for a in arguments))).backward()
    return [*found, *(a.grad for a in inputs)]


def outcome(make, way, compiled):
    function, arguments, written = make()
    torch.manual_seed(7)
    versions = [tensor._version for tensor in written]
    error = None
    try:
        found = run(way, compiled(function), arguments)
    except Exception as raised:
        error, found = raised, []
    moved = [tensor._version > version for tensor, version in zip(written, versions, strict=True)]
    values = [None if t is None else t.detach().clone() for t in (*found, *written, *arguments)]
    return error, values, moved, torch.get_rng_state()


def same(one, two, *, exact):
    for a, b in zip(one, two, strict=True):
        if (a is None) != (b is None) or (a is not None and not exact and not torch.allclose(a, b)):
            return False
        if exact and a is not None and not torch.equal(a, b):
            return False
    return True


def check(make, way, compiled):
    error, values, moved, state = outcome(make, way, lambda f: f)
    raised, found, counted, drawn = outcome(make, way, compiled)
    if error is not None:
        assert isinstance(raised, type(error)), raised
        return
    if isinstance(raised, UnsupportedMutationError):
        assert way == "create", raised  # what is written would have a history: named, and nothing is written
        assert "with gradients on" in str(raised)
        return
    assert raised is None, raised
    # Sums over two calls are eager's but for their order.
    assert same(values, found, exact=way != "two calls")
    assert moved == counted
    assert torch.equal(state, drawn)


@pytest.mark.parametrize(
    ("name", "way"), each([name for name in PROGRAMS if name not in REFUSED | NOT_ALL], WAYS, times=4)
)
def test_as_in_eager(name, way):
    check(PROGRAMS[name], way, directly)


# Since 2.15 Dynamo ends a graph where these put hooks that write on two tensors. They are results of one node then: of one
# that follows from the other that is refused by name, and both hooks are called where one gradient is wanted, as with
# PyTorch's own compilers.
HOOKS_BETWEEN_GRAPHS = {"two_hooks_order", "two_inputs"} if torch.__version__ >= (2, 15) else set()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "way"),  # the first of two backwards is the plain one
    each([name for name in PROGRAMS if name not in REFUSED | NOT_ALL | HOOKS_BETWEEN_GRAPHS], ["twice", "first input"]),
)
def test_under_torch_compile(name, way):
    check(PROGRAMS[name], way, lambda f: torch.compile(f, backend="foregrad", options={"backend": "eager"}))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["ema", "module_buffers", "fwd_and_bwd"])
def test_with_inductor_and_the_least_saved(name):
    for compiled in (
        lambda f: foregrad.compile(f, backend="inductor"),
        lambda f: foregrad.compile(f, backend="eager", partition="min_cut"),
    ):
        for way in ("plain", "twice", "two calls"):
            values, found = (outcome(PROGRAMS[name], way, c)[1] for c in (lambda f: f, compiled))
            for a, b in zip(values, found, strict=True):
                torch.testing.assert_close(a, b)


def test_each_call_is_compiled_once():
    function, arguments, _ = PROGRAMS["ema"]()
    compiled = directly(function)
    for _ in range(4):
        compiled(*arguments).backward()
    assert len(compiled.foregrad.specializations) == 1


def test_nothing_is_written_without_a_backward():
    for name in set(PROGRAMS) - REFUSED - NOT_ALL - {"fwd_and_bwd", "conv_stat"}:
        function, arguments, written = PROGRAMS[name]()
        before = [(tensor.detach().clone(), tensor._version) for tensor in written]
        directly(function)(*arguments)
        for tensor, (value, version) in zip(written, before, strict=True):
            assert torch.equal(tensor, value)
            assert tensor._version == version


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_given_back_is_refused_by_name(name):
    function, arguments, written = PROGRAMS[name]()
    before = [tensor.clone() for tensor in written]
    with pytest.raises(UnsupportedMutationError, match=r"writes to"):
        directly(function)(*arguments)
    assert same(before, written, exact=True)


def test_hooks_of_leaves_made_inside_run_in_some_backwards_only():
    function, arguments, _ = PROGRAMS["inner_leaf"]()
    with pytest.raises(UnsupportedMutationError, match="a hook on a leaf that the function makes"):
        directly(function)(*arguments)


def test_a_saved_tensor_that_is_written_to_serves_one_backward():
    for way in ("plain", "steps"):
        check(PROGRAMS["ctx_tensor"], way, directly)
    error = outcome(PROGRAMS["ctx_tensor"], "twice", directly)[0]
    assert isinstance(error, UnsupportedMutationError)
    assert "a second backward" in str(error)


def test_a_tensor_made_by_the_forward_is_not_written_twice_differentiated():
    assert isinstance(outcome(PROGRAMS["ctx_tensor"], "create", directly)[0], UnsupportedMutationError)


def test_writes_of_sizes_in_a_backward_are_refused():
    buffer = torch.zeros(1, 3)

    def function(x):
        y = x * x
        y.register_hook(lambda g: buffer.squeeze_(0) if buffer.dim() == 2 else None)
        return y.sum()

    with pytest.raises(UnsupportedMutationError, match="changes its sizes"):
        directly(function)(torch.ones(3, requires_grad=True))


def _own_leaf(x):
    return x.detach().clone().requires_grad_()


def adversarial(x):
    """The sign method of attacks: a leaf of the function's own, with a gradient, gives the result."""
    x = _own_leaf(x)
    (x * x).sum().backward()
    return (x + 0.1 * x.grad.sign()).clamp(-1, 1)


def changed_since(x):
    leaf = _own_leaf(x)
    leaf.grad = x.clone()
    leaf.grad.add_(1)
    return leaf * leaf.grad


@pytest.mark.parametrize("function", [adversarial, changed_since])
def test_a_gradient_that_only_the_function_saw_may_be_added_to_by_nobody(function):
    compiled = directly(function)
    for start in (-1.0, 0.5):
        found, expected = compiled(torch.arange(3.0) + start), function(torch.arange(3.0) + start)
        assert found.requires_grad
        assert torch.equal(found, expected)
        found.sum().backward()
    assert not foregrad.extend.view(compiled).eager


def gives_the_gradient(x):
    leaf = _own_leaf(x)
    (leaf * leaf).sum().backward()
    return leaf * 2, leaf.grad


def gives_a_view(x):
    leaf = _own_leaf(x)
    (leaf * leaf).sum().backward()
    return leaf * 2, leaf.grad[1:]


def adds_to_the_argument(x):
    leaf = _own_leaf(x)
    leaf.grad = x
    return leaf * 2, x


def adds_to_its_view(x):
    leaf = _own_leaf(x)
    leaf.grad = x[:]
    (leaf * leaf).sum().backward()
    return leaf * 2, x


DOORS = [
    lambda f: foregrad.compile(f, backend="eager", on_unsupported="eager"),
    lambda f: torch.compile(f, backend="foregrad", options={"backend": "eager", "on_unsupported": "eager"}),
]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("function", [gives_the_gradient, gives_a_view, adds_to_the_argument, adds_to_its_view])
def test_a_gradient_that_the_caller_sees_is_added_to_by_a_later_backward(function, door):
    seen = []
    for run in (function, door(function)):
        for _ in range(2):
            result, visible = run(torch.arange(3.0))
            result.sum().backward()
        seen.append(visible)
    assert torch.equal(*seen)


def copied_whole(x):
    kept = torch.empty(4)
    kept.copy_(x)
    return kept.abs()


def copied_by_slice(x):
    kept = torch.empty(4)
    kept[:] = x
    return kept * kept


def copied_to_a_view(x):
    kept = torch.empty(2, 2)
    kept.view(4).copy_(x)
    return kept.abs()


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("function", [copied_whole, copied_by_slice, copied_to_a_view])
def test_an_argument_that_was_copied_may_change_before_the_backward(function, door):
    def gradient(of):
        x = torch.tensor([1.0, -2.0, 3.0, -4.0], requires_grad=True)
        result = of(x)
        with torch.no_grad():
            x.mul_(-10)
        result.sum().backward()
        return x.grad

    assert torch.equal(gradient(door(function)), gradient(function))
