"""Python floats among the arguments behind Dynamo: as many frames as for PyTorch's own backends, or fewer."""

import pytest
import torch

VALUES = [0.1 * i + 0.05 for i in range(12)] + [1.0, 0.0, -2.5]
PROGRAMS = {
    "mul": lambda x, s: (x * s).sin() * (s + 1),
    "alpha": lambda x, s: torch.add(x, x.sin(), alpha=s) / (s + 3),
    "branch": lambda x, s: x * s if s > 0.5 else x - s,
    "full": lambda x, s: x + torch.full((3,), s),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_eager_with_few_frames(name):
    torch._dynamo.reset()
    counter, fn = torch._dynamo.utils.counters, PROGRAMS[name]
    before = counter["stats"]["unique_graphs"]
    compiled = torch.compile(fn, backend="foregrad", options={"backend": "eager"})
    for value in VALUES:
        results = []
        for run in (fn, compiled):
            torch.manual_seed(0)
            x = torch.randn(2, 3, requires_grad=True)
            y = run(x, value)
            y.sin().sum().backward()
            results.append((y.detach(), x.grad))
        assert all(map(torch.equal, *results))
    assert counter["stats"]["unique_graphs"] - before <= 3
