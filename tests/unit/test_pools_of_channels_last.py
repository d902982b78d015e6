"""A tensor that changes its strides or sizes in place while nothing else is in its memory: views of it, and of all else,
are told to autograd as they are in eager, so that gradients are laid out, and added up, as eager's.

Adaptive pools of images whose channels are last do so; whole networks lost their last bits by it.
"""

import pytest
import torch
import torch.nn.functional as F

import foregrad
import foregrad.tracing.capture as capturing


def images(channels=168):
    return torch.randn(2, channels, 2, 2).contiguous(memory_format=torch.channels_last)


def pooled(x, scale):
    y = x.permute(0, 2, 3, 1) * scale
    return F.adaptive_avg_pool2d(y.permute(0, 3, 1, 2) + x, 1).flatten(1)


def squeezed(x, scale):
    y = (x.permute(0, 2, 3, 1) * scale).permute(0, 3, 1, 2) + x
    return y.mean((2, 3), keepdim=True).squeeze_(-1).squeeze_(-1)


def transposed(x, scale):
    y = (x.permute(0, 2, 3, 1) * scale).permute(0, 3, 1, 2) + x
    return y.mean(-1).transpose_(0, 1) * 2


def unsqueezed(x, scale):
    y = (x.permute(0, 2, 3, 1) * scale).permute(0, 3, 1, 2) + x
    return y.mean((2, 3)).unsqueeze_(0).sin()[0, 1:]


@pytest.mark.parametrize("function", [pooled, squeezed, transposed, unsqueezed], ids=lambda f: f.__name__)
def test_as_in_eager_and_the_pool_bit_for_bit_after_one_run(function, monkeypatch):
    runs = []
    monkeypatch.setattr(
        capturing.CaptureRun, "run", lambda *args, run=capturing.CaptureRun.run: runs.append(1) or run(*args)
    )
    torch.manual_seed(0)
    x, scale = images(), torch.randn(168, requires_grad=True)
    compiled = foregrad.compile(function, backend="eager")
    results = []
    for f in (function, compiled):
        y = f(x, scale)
        weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(0))
        results.append((y.detach(), *torch.autograd.grad(y, scale, torch.empty_like(y).copy_(weights))))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    assert len(runs) == 1


def written_after(x, scale):
    y = (x * scale[:, None, None]).mean(-1)
    y.transpose_(0, 1)
    y.unsqueeze_(0)
    y[0, 0].mul_(2)
    return y[0, 1], y


def test_views_taken_and_writes_after():
    x, scale = images(3).double(), torch.randn(3, requires_grad=True, dtype=torch.float64)
    results = []
    for f in (written_after, foregrad.compile(written_after, backend="eager")):
        outputs = f(x, scale)
        results.append([*(o.detach() for o in outputs), *torch.autograd.grad(sum(o.sum() for o in outputs), scale)])
    torch.testing.assert_close(*results)
