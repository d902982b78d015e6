"""A write to a part of an input is made in the input, at eager's peak, where nobody sees the difference."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad._torch.memory import _peak

COUNT = 4 << 20
WEIGHT = torch.linspace(0.1, 1.0, 12, requires_grad=True)


def added(x):
    x[:10] += 1
    return x[:3] * 2


def one_after_the_other(x):
    x[:10] += 1
    x[20] = 5.0
    x[5:30].mul_(2)
    return x[4:24] + 1


def of_what_was_there(x):
    old = x[5:9] * 2
    x[:10].mul_(2)
    return old, x[:3] * 2


def from_itself(x):
    x[1:11] = x[0:10].clone()
    return x[:2] + 1


def beside_a_gradient(x):
    x[:12] = (WEIGHT * 2).detach()
    return (WEIGHT * 3).sum()


def through_a_view(x):
    part = x[:4]
    x[:10] += 1
    return part * 1


def row(x):
    x.view(-1, 8)[3] = 1.0
    return x[:2] * 2


IN_PLACE = [added, one_after_the_other, of_what_was_there, from_itself, beside_a_gradient, through_a_view]


def old_is_returned(x):
    old = x.clone()
    x[:10] += 1
    return old


def old_is_saved(x):
    out = (x[:12] * WEIGHT).sum()
    x[:10] += 1
    return out


def new_is_saved(x):
    x[:10] += 1
    return (x[:12] * WEIGHT).sum()


def by_a_value(x):
    x[:10] += 1
    return x[:2] * 2 if x[0] > 0 else x[:2]


COPIED = [old_is_returned, old_is_saved, new_is_saved, by_a_value, row]


def results_of(call, x):
    out = call(x)
    out = out if isinstance(out, tuple) else (out,)
    gradients = [torch.autograd.grad(o, WEIGHT)[0] for o in out if o.requires_grad]
    return [*out, *gradients]


@pytest.mark.parametrize("function", [*IN_PLACE, *COPIED])
def test_as_in_eager(function):
    compiled = foregrad.compile(function, backend="eager")
    ours, theirs = (torch.arange(COUNT, dtype=torch.float32) for _ in range(2))
    for _ in range(3):
        version = ours._version
        if function is old_is_saved:  # eager raises: the tensor that it saved was written to
            a = compiled(ours).detach()
            with torch.no_grad():
                b = function(theirs)
            assert torch.equal(a, b)
        else:
            assert all(map(torch.equal, results_of(compiled, ours), results_of(function, theirs)))
        assert torch.equal(ours, theirs)
        assert ours._version > version


@pytest.mark.parametrize("function", IN_PLACE)
def test_at_the_peak_of_eager(function):
    compiled = foregrad.compile(function, backend="eager")
    x = torch.zeros(COUNT)
    compiled(x)
    assert _peak(lambda: compiled(x)) < _peak(lambda: function(x)) + (1 << 16)


@pytest.mark.parametrize("backend", ["count", "nop", "interpreter"])
def test_by_other_backends_of_ours(backend):
    compiled = foregrad.compile(one_after_the_other, backend=backend)
    ours, theirs = torch.arange(40.0), torch.arange(40.0)
    for _ in range(2):
        assert torch.equal(compiled(ours), one_after_the_other(theirs))
        assert torch.equal(ours, theirs)


def test_an_input_that_shares_memory_with_another():
    compiled = foregrad.compile(lambda x, y: (x[:10].add_(1), y * 2)[1], backend="eager")
    ours, theirs = torch.arange(40.0), torch.arange(40.0)
    for _ in range(2):
        expected = (theirs[:10].add_(1), theirs[5:15] * 2)[1]
        assert torch.equal(compiled(ours, ours[5:15]), expected)
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("again", [False, True])
def test_an_input_behind_the_beginning_of_its_memory_is_no_place_for_values_read_by_strides(offset, again):
    def scaled(x):
        x.mul_(2)
        if again:
            x.add_(1)
        x[:, :, 0:1].unfold(0, 2, 1).mul_(3)

    def look(x):
        x.mul_(2)
        return x[1:].as_strided((2,), (1,), offset + 1) + 1

    for function in (scaled, look):
        eager, compiled = (torch.arange(1.0, 9.0).reshape(4, 1, 2)[offset : offset + 2] for _ in range(2))
        expected = function(eager)
        result = foregrad.compile(function, backend="eager", on_unsupported="raise")(compiled)
        assert torch.equal(compiled, eager)
        assert result is expected is None or torch.equal(result, expected)
