"""What a program draws from a generator of its own is eager's, also with Inductor: its kernels have numbers of theirs."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad.inductor._torch import inductor as door

pytestmark = [
    pytest.mark.skipif(not door.cpp_compiler_found(), reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

G, H = torch.Generator(), torch.Generator()


def uniform(x):
    return torch.rand(3, generator=G) * x


def two_generators(x):
    noise = torch.bernoulli(torch.full((3,), 0.5), generator=G)
    return (x * noise).sin() * torch.rand(3, generator=H) + torch.randn(3, generator=G)


def in_place(x):
    return x.clone().uniform_(generator=G) * x


def initialised(x):
    return torch.nn.init.kaiming_uniform_(torch.empty(3, 3), generator=G) @ x


def beside_the_default(x):
    return torch.randint(5, (3,), generator=H) * x + torch.randperm(3, generator=G)


@pytest.mark.parametrize("program", [uniform, two_generators, in_place, initialised, beside_the_default])
@pytest.mark.parametrize("backend", ["inductor", "interpreter"])
def test_draws_from_a_generator_are_eagers(program, backend):
    compiled = foregrad.compile(program, backend=backend)
    for seed in (0, 1):
        results = []
        for function in (program, compiled):
            G.manual_seed(seed)
            H.manual_seed(seed + 5)
            x = torch.tensor([0.1, 0.2, 0.3], requires_grad=True)
            outs = [function(x), function(x)]
            sum(out.sum() for out in outs).backward()
            results.append((*(out.detach() for out in outs), x.grad, G.get_state(), H.get_state()))
        torch.testing.assert_close(results[0], results[1])
