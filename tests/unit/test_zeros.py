"""A backward by some of the outputs leaves the others' ways out, as eager does: no NaN from zeros on them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import foregrad

ON_THE_WAY = {
    "sort": lambda x: x.sort()[0],
    "cummax": lambda x: x.cummax(0)[0],
    "index_copy": lambda x: x.index_copy(0, torch.tensor([0]), x[:1]),
    "masked_select": lambda x: x.masked_select(torch.tensor([True, False, True, True])),
    "take": lambda x: x.take(torch.tensor([0, 2])),
    "put": lambda x: x.put(torch.tensor([1]), x[:1]),
    "scatter": lambda x: x.scatter(0, torch.tensor([0]), 1.0),
    "index_fill": lambda x: x.index_fill(0, torch.tensor([1]), 2.0),
    "fft": lambda x: torch.fft.fft(x),
    "irfft": lambda x: torch.fft.irfft(x),
    "solve": lambda x: torch.linalg.solve(torch.eye(2), x.view(2, 2)),
    "triangular": lambda x: torch.linalg.solve_triangular(torch.eye(2), x.view(2, 2), upper=True),
    "cholesky": lambda x: torch.linalg.cholesky(x.view(2, 2) @ x.view(2, 2).T + 2 * torch.eye(2)),
    "det": lambda x: torch.linalg.slogdet(x.view(2, 2) + 3 * torch.eye(2))[1],
    "unfold": lambda x: functional.unfold(x.view(1, 1, 2, 2), 1),
    "pixel_shuffle": lambda x: functional.pixel_shuffle(x.view(1, 4, 1, 1), 2),
    "pad": lambda x: functional.pad(x.view(1, 1, 4), (1, 1), mode="reflect"),
    "pool": lambda x: functional.adaptive_avg_pool1d(x.view(1, 1, 4), 2),
    "interpolate": lambda x: functional.interpolate(x.view(1, 1, 4), scale_factor=2.0, mode="linear"),
    "hardswish": functional.hardswish,
    "logsigmoid": functional.logsigmoid,
    "glu": functional.glu,
    "mish": functional.mish,
    "trace": lambda x: x.view(2, 2).trace(),
    "xlogy": lambda x: torch.xlogy(x, torch.full((4,), 2.0)),
    "eigvals": lambda x: torch.linalg.eigvals(x.view(2, 2)),
    "cdist": lambda x: torch.cdist(x.view(2, 2), torch.ones(1, 2)),
}


@pytest.mark.parametrize("name", ON_THE_WAY)
def test_a_way_that_nothing_comes_in_by_is_left_out(name):
    """The derivative of the square root of zero is infinite: a zero that came as far would be no number."""

    def f(x):
        same = (x - x.detach()).sqrt() + x.detach()
        return ON_THE_WAY[name](same), x * 3

    x = torch.tensor([0.3, -1.2, 2.5, 0.7], requires_grad=True)
    outputs = foregrad.compile(f, backend="eager")(x)
    assert outputs[0].requires_grad
    (gradient,) = torch.autograd.grad(outputs[1].sum(), x)
    assert torch.equal(gradient, torch.full((4,), 3.0))
