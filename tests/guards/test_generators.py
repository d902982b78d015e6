"""Functions that seed a random generator, and captures beside threads that draw from one."""

from __future__ import annotations

import threading

import pytest
import torch

import foregrad
from foregrad.errors import UnsupportedSideEffectError

own = torch.Generator()
seed_default = torch.default_generator.manual_seed  # bound before any capture


class Holder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x):
        self.generator.manual_seed(3)
        return x + torch.rand(3, generator=self.generator)


def forked(x):
    with torch.random.fork_rng(devices=()):
        return x + torch.rand(3)


def chunked(x):
    draws = torch.func.vmap(lambda row: row + torch.rand(()), randomness="same", chunk_size=2)
    return draws(torch.zeros(4)).sum() + x


SEEDING = {
    "manual_seed": lambda x: torch.manual_seed(0) and x + torch.rand(3),
    "random.manual_seed": lambda x: torch.random.manual_seed(0) and x,
    "seed": lambda x: torch.seed() and x + torch.rand(3),
    "initial_seed": lambda x: x + torch.initial_seed(),
    "set_rng_state": lambda x: torch.set_rng_state(torch.get_rng_state()) or x,
    "fork_rng": forked,
    "default generator": lambda x: torch.default_generator.manual_seed(0) and x + torch.rand(3),
    "state of the default generator": lambda x: x + torch.default_generator.get_state()[:3],
    "seed of the default generator": lambda x: x + torch.default_generator.initial_seed(),
    "own generator": lambda x: x + torch.rand(3, generator=own.manual_seed(0)),
    "own generator's state": lambda x: own.set_state(own.get_state()) and x + torch.rand(3, generator=own),
    "clone": lambda x: x + torch.rand(3, generator=own.clone_state()),
    "attribute": Holder(),
    "unpickled state": lambda x: own.__setstate__(own.__reduce__()[2]) or x,
    "bound method": lambda x: seed_default(0) and x,
    "vmap by chunks": chunked,
}


@pytest.mark.parametrize("name", SEEDING)
def test_what_seeds_or_asks_for_a_state_is_refused(name):
    before = torch.get_rng_state(), own.get_state()
    with pytest.raises(UnsupportedSideEffectError):
        foregrad.compile(SEEDING[name], backend="eager")(torch.zeros(3))
    if name != "bound method":  # which no capture can keep from running
        assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], own.get_state())


def test_generators_are_as_they_were_after_a_capture():
    methods = {name: getattr(torch.Generator, name) for name in ("manual_seed", "get_state", "seed", "__setstate__")}
    foregrad.compile(torch.sin, backend="eager")(torch.ones(2))
    assert all(getattr(torch.Generator, name) is method for name, method in methods.items())
    assert all(type(method).__name__ == "method_descriptor" for method in methods.values())
    assert torch.Generator().manual_seed(3).initial_seed() == 3


@pytest.mark.usefixtures("captures_may_wait")
def test_other_threads_seed_and_draw_while_a_function_is_captured():
    inside, done = threading.Event(), threading.Event()
    found = []

    def other():
        inside.wait(60)
        torch.manual_seed(5)
        found.append((torch.rand(3), torch.initial_seed()))
        done.set()

    def function(x):
        inside.set()
        assert done.wait(60)
        return torch.nn.functional.dropout(x, 0.5, True)

    thread = threading.Thread(target=other)
    thread.start()
    compiled = foregrad.compile(function, backend="eager")
    compiled(torch.ones(8))
    thread.join(60)
    assert found[0][1] == 5
    assert torch.equal(found[0][0], torch.rand(3, generator=torch.Generator().manual_seed(5)))


DECIDING = {
    "rand": lambda x: x.sin() if torch.rand(()) > 0.5 else x.cos(),
    "rand_like": lambda x: x.sin() if torch.rand_like(x).sum() > 1.5 else x.cos(),
    "randint": lambda x: x.sin() if torch.randint(0, 10, (3,)).sum() > 12 else x.cos(),
    "randperm": lambda x: x.sin() if torch.randperm(5)[0] > 2 else x.cos(),
    "dropout": lambda x: x.sin() if torch.nn.functional.dropout(x, 0.5, True).sum() > 0.5 else x.cos(),
    "bernoulli": lambda x: x.sin() if torch.bernoulli(torch.full((3,), 0.5)).sum() > 1.5 else x.cos(),
    "exponential": lambda x: x.sin() if torch.empty(3).exponential_().sum() > 3 else x.cos(),
    "poisson": lambda x: x.sin() if torch.poisson(torch.full((3,), 2.0)).sum() > 6 else x.cos(),
    "gamma": lambda x: x.sin() if torch.distributions.Gamma(2.0, 3.0).sample() > 0.5 else x.cos(),
    "two": lambda x: x.sin() * torch.rand(3) if torch.rand(3).sum() + torch.randn(()) > 1.5 else torch.randn(3),
}


@pytest.mark.parametrize("name", DECIDING)
def test_a_branch_on_a_random_number_takes_what_eager_draws(name):
    function = DECIDING[name]
    compiled = foregrad.compile(function, backend="eager")
    x = torch.tensor([0.1, 0.5, 0.9])
    torch.manual_seed(7)
    expected = [function(x) for _ in range(10)]
    state = torch.get_rng_state()
    torch.manual_seed(7)
    for value in expected:
        assert torch.equal(compiled(x), value)
    assert torch.equal(torch.get_rng_state(), state)


def test_asking_kernels_draws_nothing_that_others_see():
    """Strides that only a kernel knows are asked of it on zeros: random ones with a generator of their own."""
    from foregrad.tracing.heap.overlaps import ask_kernel

    before = torch.get_rng_state()
    fake = torch.ones(3, 1).T
    assert ask_kernel(torch.ops.aten.bernoulli.p, (fake, 0.5), {}).shape == (1, 3)
    assert ask_kernel(torch.ops.aten.rand_like.default, (fake,), {}).shape == (1, 3)
    assert ask_kernel(torch.ops.aten.dropout.default, (fake, 0.5, True), {}) is NotImplemented
    assert torch.equal(before, torch.get_rng_state())
