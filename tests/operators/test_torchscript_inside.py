"""Calls of scripted functions in a compiled one run eagerly by name, before and after they have a plan of their own."""

import warnings

import pytest
import torch

import foregrad
from foregrad.errors import UnsupportedOpError


def simple(x, y):
    return (x * y).sin() + x


def branch(x, y):
    if x.sum() > 0:
        return x * 2
    return y * 3


def loop(x, y):
    for _ in range(3):
        x = x.sin() * y
    return x


def in_place(x, y):
    z = x * 1
    z.add_(y)
    z[0] = x[1]
    return z


def constant(x, y):
    return x + torch.tensor([1.0, 2.0, 3.0]) * y


def shape(x, y):
    return x.view(x.size(0), -1).relu() / x.numel() + y


def without_gradients(x, y):
    with torch.no_grad():
        z = x * 2
    return z * y


def random(x, y):
    return x * torch.rand_like(y) + y


def gelu(x, y):
    return 0.5 * x * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x))) * y


FUNCTIONS = [simple, branch, loop, in_place, constant, shape, without_gradients, random, gelu]


def of_a_list(x, n: int):
    return x + torch.tensor([1.0 * n, 2.0, float(n)])


def results(function, seed):
    torch.manual_seed(seed)
    x, y = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    out = function(x, y)
    return [out, *torch.autograd.grad(out.square().sum(), [x, y], allow_unused=True), torch.get_rng_state()]


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_a_scripted_function_runs_eagerly_by_name(function, is_whole):
    scripted = torch.jit.script(function)
    call = scripted if is_whole else lambda x, y: scripted(x, y=y) * 2
    with pytest.warns(foregrad.errors.ForegradWarning, match="TorchScript"):
        results(compiled := foregrad.compile(call, backend="eager", on_unsupported="eager"), 0)
    for _ in range(3):  # then it has a plan of its own
        results(scripted, 0)
    for seed in range(3):
        for ours, eager in zip(results(compiled, seed), results(call, seed), strict=True):
            assert (ours is eager is None) or torch.equal(ours, eager)


@torch.jit.script
def of_floats(x, k: float = 2):
    return x * k


@torch.jit.script
def of_integers(x, n: int):
    return x * n


@torch.jit.script
def of_lists(x, held: list[torch.Tensor]):
    held.append(x)
    return held[0] * len(held)


@torch.jit.script
def fails(x):
    if x.size(0) == 3:
        raise ValueError("three")
    return x * 2


@torch.jit.script
def asks(x):
    if torch.jit.is_scripting():
        return x * 2
    return x * 3


@torch.jit.script
def calls(x):
    return of_floats(x, 3.0) + of_floats(x)


WHOLE, HELD = torch.tensor([1, 2, 3]), [torch.ones(3)]
CALLS = {
    "floats of integers": lambda x: of_floats(WHOLE, 3) * x,
    "a default": lambda x: of_floats(WHOLE) * x,
    "copies of lists": lambda x: of_lists(x, HELD) * len(HELD),
    "another scripted function": lambda x: calls(x),
    "a tensor of a list": (lambda scripted: lambda x: x * scripted(x, 2))(torch.jit.script(of_a_list)),
    "an error": lambda x: fails(x),
    "too few arguments": lambda x: of_lists(x),
    "an argument twice": lambda x: of_floats(x, 2.0, k=3.0),
    "a number for a tensor": lambda x: of_floats(2.0) + x,
    "a number of another kind": lambda x: of_integers(x, 2.5),
    "what runs asks whether it is scripted": lambda x: asks(x),
    "traced": lambda x: TRACED(x),
}
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    TRACED = torch.jit.trace(lambda x: x * x.shape[0], (torch.ones(2),))


def outcome(function):
    try:
        return function(torch.ones(3)).tolist()
    except (RuntimeError, torch.jit.Error) as error:
        return type(error).__name__


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_any_arguments_runs_eagerly_by_name(name):
    function = CALLS[name]
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager")
    with pytest.raises(UnsupportedOpError, match="TorchScript; a capture can't look inside"):
        foregrad.capture(function, torch.ones(3))
    with pytest.warns(foregrad.errors.ForegradWarning, match=r"(?s)look inside.*test_torchscript_inside.py"):
        assert outcome(compiled) == outcome(function)


def test_closed_over_tensors_get_their_gradients():
    scripted = torch.jit.script(simple)
    weight = torch.randn(3, requires_grad=True)
    for _ in range(4):
        scripted(torch.randn(2, 3), weight).sum().backward()
    x = torch.randn(2, 3)
    compiled = foregrad.compile(lambda x: scripted(x, weight), backend="eager", on_unsupported="eager")
    with pytest.warns(foregrad.errors.ForegradWarning, match="TorchScript"):
        (found,) = torch.autograd.grad(compiled(x).sum(), weight)
    assert torch.equal(found, torch.autograd.grad(scripted(x, weight).sum(), weight)[0])
