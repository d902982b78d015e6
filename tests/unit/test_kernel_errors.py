"""A call that a kernel refuses raises the kernel's own error, where FakeTensor has another."""

from __future__ import annotations

import pytest
import torch

import foregrad

CALLS = {
    "scatter": lambda x: torch.zeros(3).scatter_(0, torch.full((1, 3), 0), x),
    "matmul": lambda x: x @ torch.ones(4, 2),
    "cat": lambda x: torch.cat([x, x[None]]),
    "index": lambda x: x.index_select(2, torch.tensor([0])),
    "reshape": lambda x: x.reshape(2, 5),
    "squeeze": lambda x: x.squeeze(4),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_refused_call_raises_what_eager_raises(name, requires_grad):
    x = torch.randn(3, requires_grad=requires_grad)
    before = torch.get_rng_state()
    with pytest.raises(Exception) as wanted:
        CALLS[name](x)
    with pytest.raises(type(wanted.value)) as found:
        foregrad.compile(CALLS[name], backend="eager")(x)
    assert str(found.value).splitlines()[0] == str(wanted.value).splitlines()[0]
    assert torch.equal(before, torch.get_rng_state())


def _halves(x):
    return x[:2], x[2:]


WRITES = {
    "one place is written twice": lambda x: x[:1].expand(4).add_(1),
    "what is written is read elsewhere": lambda x: x[1:].add_(x[:-1]),
    "the dtype does not fit": lambda x: x.index_put_((torch.tensor([0]),), torch.ones(1, dtype=torch.int32)),
    "no two elements share a place": lambda x: _halves(x)[0].add_(_halves(x)[1]),
    "the kernel refuses zeros": lambda x: _halves(x)[0].remainder_(_halves(x)[1]),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_into_memory_that_overlaps_raises_what_eager_raises_and_nothing_else(name):
    """The kernel is asked, on zeros; what it has against zeros is not against the layout."""
    errors = []
    for f in (WRITES[name], foregrad.compile(WRITES[name], backend="eager")):
        try:
            errors.append(f(torch.arange(1, 5)).tolist())
        except RuntimeError as error:
            errors.append(str(error))
    assert errors[0] == errors[1]
