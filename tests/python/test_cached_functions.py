"""Functions under `functools.cache` and `lru_cache` that give tensors."""

from __future__ import annotations

import functools
import importlib
import logging
import warnings

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning
from foregrad.python.holders import CACHE, left_in_cache
from foregrad.python.opaque import results_of


def ramp(n):
    return torch.arange(float(n))


class Module(torch.nn.Module):
    """A table by size, of a limited number, beside one that is worked out once."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    @functools.lru_cache(maxsize=2)  # noqa: B019 - as people write it
    def mask(self, n):
        return torch.tril(torch.ones(n, n))

    @functools.cached_property
    def scale(self):
        return torch.linspace(0.5, 1.5, 4)

    def forward(self, x):
        return self.mask(x.shape[0]) @ self.linear(x) * self.scale


class Static:
    @staticmethod
    @functools.cache
    def ramp(n):
        return torch.arange(float(n))

    def __call__(self, x):
        return x * self.ramp(x.shape[0])


def refused(x):
    str(x)  # its text can't be known
    return x


def of_pairs(n):
    return ramp(n).cos(), ramp(n).sin()


def make(kind):
    limited, unlimited, pairs = functools.lru_cache(maxsize=2)(ramp), functools.cache(ramp), functools.cache(of_pairs)
    static = Static()
    return {
        "limited": lambda x: x * limited(x.shape[0]),
        "unlimited": lambda x: x * unlimited(x.shape[0]),
        "pairs": lambda x: x * pairs(x.shape[0])[0] + pairs(x.shape[0])[1],
        "static": static,
        "refused": lambda x: refused(x * limited(x.shape[0])),
        "refused static": lambda x: refused(static(x)),
    }[kind]


@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
@pytest.mark.parametrize("kind", ["limited", "unlimited", "pairs", "static", "refused", "refused static"])
def test_caches_are_left_with_real_tensors(kind):
    Static.ramp.cache_clear()
    function = make(kind)
    compiled = foregrad.compile(function, backend="eager")
    for n in (3, 4, 3, 5, 4, 3):
        x = torch.randn(n, requires_grad=True)
        result, expected = compiled(x), function(x)
        assert type(result) is torch.Tensor
        assert torch.equal(result, expected)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (result, expected)))


@pytest.mark.parametrize("kind", ["limited", "unlimited", "pairs", "static"])
def test_sizes_that_take_turns_are_compiled_without_a_warning(kind):
    Static.ramp.cache_clear()
    compiled = foregrad.compile(make(kind), backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("error", ForegradWarning)
        for n in (3, 4, 3, 4):
            compiled(torch.ones(n))
    assert foregrad.explain_recompiles(compiled).entries


def test_a_cache_that_is_filled_beside_an_attribute():
    module = Module()
    compiled = foregrad.compile(module, backend="eager")
    for n in (3, 4, 3, 4):
        x = torch.randn(n, 4)
        assert torch.equal(compiled(x), module(x))


def test_a_cache_that_is_cleared_is_looked_at_again():
    scales = [2.0]
    scaled = functools.cache(lambda n: torch.full((n,), scales[0]))
    compiled = foregrad.compile(lambda x: x * scaled(x.shape[0]), backend="eager")
    for scale in (2.0, 2.0, 3.0, 3.0):
        if scale != scales[0]:
            scales[0] = scale
            scaled.cache_clear()
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), scale))


@pytest.mark.parametrize("maxsize", [None, 2, 3, 128])
def test_results_taken_out_are_made_again_and_others_kept(maxsize):
    made = []

    @functools.lru_cache(maxsize=maxsize)
    def function(n, *, k=0):
        made.append(n)
        return [n + k]

    for _ in range(2):  # the second time there are links that are in use no more
        function(1)
        before = CACHE.read(function)
        kept = function.cache_info().currsize
        function(2, k=4)
        assert not CACHE.same(function, before)
        CACHE.put_back(function, before)
        assert function.cache_info().currsize == kept
        made.clear()
        assert function(2, k=4) == [6]
        assert made == [2]
        assert function(1) == [1]
        CACHE.put_back(function, before)


def test_a_capture_leaves_the_plain_results_of_plain_arguments():
    @functools.cache
    def function(n):
        return n if n < 3 else [n]

    before = CACHE.read(function)
    function(1), function(4)
    CACHE.put_back(function, left_in_cache(function, before))
    assert list(results_of(function)[1].values()) == [1]


LOGGER = logging.getLogger("tests.python.cached_functions")


@pytest.mark.parametrize("maxsize", [None, 8])
def test_a_method_that_a_library_gave_to_loggers_warns_once(tmp_path, monkeypatch, caplog, maxsize):
    """As `warning_once` of transformers: only a class of the standard library leads to the function with the cache."""
    (tmp_path / "gives_loggers_a_method.py").write_text(
        f"import functools\n@functools.lru_cache({maxsize})\ndef warn_once(self, text):\n    self.warning(text)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        logging.Logger, "warn_once", importlib.import_module("gives_loggers_a_method").warn_once, raising=False
    )

    def warns(x):
        LOGGER.warn_once("unusual sizes")
        return x * 2

    for door in (
        foregrad.compile(warns, backend="eager"),
        torch.compile(warns, backend="foregrad", options={"backend": "eager"}),
    ):
        logging.Logger.warn_once.cache_clear()
        caplog.clear()
        for _ in range(3):
            assert torch.equal(door(torch.ones(2)), torch.ones(2) * 2)
        assert caplog.messages == ["unusual sizes"]
