"""Which tensors share a version counter: compared by the C++ part, tried without it, and never moved by asking."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from foregrad._torch import tensors
from foregrad._torch.native import native


def no_grad_view(x):
    with torch.no_grad():
        return x[:1]


def given_data(x):
    y = x.view(-1)
    y.data = torch.zeros(3)
    return y


def set_to(x):
    return torch.empty(0).set_(x)


def swapped(x):
    y = torch.zeros(2, 2)
    x.data = y
    return y


WAYS = {
    "itself": (lambda x: x, True),
    "a view": (lambda x: x[1:], True),
    "a view under no_grad": (no_grad_view, True),
    "a view of another dtype": (lambda x: x.view(torch.int32), True),
    "detached": (lambda x: x.detach(), True),
    "a view that was given other memory": (given_data, True),
    "`.data`": (lambda x: x.data, False),
    "given its memory by set_": (set_to, False),
    "what `.data = ` gave it": (swapped, False),
    "a copy": (lambda x: x.clone(), False),
    "a conjugate": (lambda x: torch.view_as_complex(x).conj(), True),
}


def check(x, way, shared):
    other = way(x)
    versions = x._version, other._version
    assert tensors.share_counters(x, other) is tensors.share_counters(other, x) is shared
    assert (x._version, other._version) == versions
    with torch.no_grad():
        other.zero_()
    assert (x._version != versions[0]) is shared, "what a write does"


@pytest.mark.skipif(native() is None, reason="the C++ part was not built")
@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize("name", WAYS)
def test_the_cpp_part_compares_them_and_moves_none(name, fake, monkeypatch):
    monkeypatch.setattr(torch._C._autograd, "_unsafe_set_version_counter", None)
    monkeypatch.setattr(torch.autograd.graph, "increment_version", None)
    if fake:
        with FakeTensorMode():
            check(torch.zeros(2, 2), *WAYS[name])
    else:
        check(torch.zeros(2, 2), *WAYS[name])


@pytest.mark.parametrize("name", WAYS)
def test_without_it_they_are_put_back(name, monkeypatch):
    monkeypatch.setattr(tensors, "native", lambda: None)
    check(torch.zeros(2, 2), *WAYS[name])


@pytest.mark.skipif(native() is None, reason="the C++ part was not built")
def test_inference_tensors_count_nothing():
    with torch.inference_mode():
        x = torch.zeros(2)
        assert native().share_counters(x, x[:1]) is False


@pytest.mark.skipif(native() is None, reason="the C++ part was not built")
@pytest.mark.parametrize("given", [(), (1, 2), (None, None)])
def test_what_are_no_tensors_is_an_error(given):
    with pytest.raises(TypeError, match="two tensors"):
        native().share_counters(*given)
