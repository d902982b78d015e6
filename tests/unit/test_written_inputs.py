"""An input that gets its history by a write: gradients go on through it to what was written."""

import pytest
import torch

import foregrad


def added(x, y):
    x.add_(y)
    return x.tanh() * 2


def copied_twice(x, y):
    x.copy_(y)
    x.mul_(y)
    return (x + 1).square()


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("partition", ["default", "min_cut"])
@pytest.mark.parametrize("function", [added, copied_twice])
@pytest.mark.parametrize("used", ["result", "input", "both"])
def test_gradients_arrive_whichever_of_the_two_is_used(function, partition, native, used):
    found = []
    for call in (function, foregrad.compile(function, backend="eager", partition=partition)):
        with foregrad.config.override(native=native):
            x = torch.arange(3.0)
            y = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
            out = call(x, y)
            roots = {"result": [out], "input": [x], "both": [out, x]}[used]
            sum(root.sum() for root in roots).backward()
            found.append(y.grad)
    torch.testing.assert_close(found[1], found[0])
