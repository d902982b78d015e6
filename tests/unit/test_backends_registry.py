"""Backends by name."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from foregrad.backends import registry
from foregrad.backends.boxed import as_boxed, nop
from foregrad.backends.registry import Backend, get_backend, list_backends, register_backend
from foregrad.errors import BackendError


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))


def one(gm, inputs):
    return gm


def two(gm, inputs):
    return gm


def three(gm, inputs):
    return gm


@pytest.mark.parametrize("name", ["eager", "interpreter", "nop"])
def test_each_built_in_backend_compiles_a_graph(name):
    x = torch.randn(3)
    gm = make_fx(lambda x: (x.sin(), x.cos().sum()))(x)
    backend = get_backend(name)
    assert backend.name == name
    assert backend.description
    assert backend.decomposition_table() == {}
    for compiler in (backend.fw_compiler, backend.bw_compiler, backend.inference_compiler):
        args = [x]
        sine, total = as_boxed(compiler(gm, [x]), backend=name)(args)
        assert args == []
        assert torch.equal(sine, x.sin())
        assert torch.equal(total, x.cos().sum())


def test_nop_is_the_seeds_nop():
    assert get_backend("nop").fw_compiler is nop


def test_a_registered_backend_is_found_by_name():
    made = register_backend("mine", one, two, three, decompositions={1: one}, description="d")
    assert get_backend("mine") is made
    assert made == Backend("mine", one, two, three, {1: one}, "d")
    assert "mine" in list_backends()
    assert list_backends() == sorted(list_backends())
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.name = "other"


def test_compilers_that_are_not_given_are_the_forward_one():
    made = register_backend("mine", one)
    assert (made.bw_compiler, made.inference_compiler) == (one, one)


def test_late_decompositions_load_when_asked():
    calls = []

    def load():
        calls.append(1)
        return {"op": one}

    made = register_backend("mine", one, decompositions=load)
    assert calls == []
    assert made.decomposition_table() == {"op": one}
    assert calls == [1]


def test_a_taken_name_needs_replace():
    register_backend("mine", one)
    with pytest.raises(BackendError, match="`mine` already"):
        register_backend("mine", two)
    assert get_backend("mine").fw_compiler is one
    register_backend("mine", two, replace=True)
    assert get_backend("mine").fw_compiler is two


def test_a_compiler_must_be_callable():
    with pytest.raises(BackendError, match="bw_compiler is 3"):
        register_backend("mine", one, 3)
    assert "mine" not in list_backends()


def test_pairs_triples_and_single_compilers():
    assert get_backend((one, two)) == Backend("one+two", one, two, one)
    assert get_backend([one, two, three]) == Backend("one+two", one, two, three)
    assert get_backend(one) == Backend("one", one, one, one)
    backend = Backend("b", one, two, three)
    assert get_backend(backend) is backend


def test_an_unknown_name_lists_the_known_ones_and_the_closest():
    with pytest.raises(BackendError) as caught:
        get_backend("eagre")
    message = str(caught.value)
    assert "`eagre`" in message
    assert "Did you mean `eager`?" in message
    assert all(name in message for name in ("eager", "interpreter", "nop"))
    with pytest.raises(BackendError) as caught:
        get_backend("zzzzzz")
    assert "Did you mean" not in str(caught.value)


@pytest.mark.parametrize("spec", [3, None, (one,), (one, 3), (one, two, three, one)])
def test_what_is_no_backend_is_refused(spec):
    with pytest.raises(BackendError, match="no backend"):
        get_backend(spec)
