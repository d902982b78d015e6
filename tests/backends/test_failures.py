"""A backend that fails or returns nonsense: its graph runs on eager's kernels and a warning names it, or it is an error."""

from __future__ import annotations

import pathlib
import re
import tempfile
import warnings

import pytest
import torch

import foregrad
from foregrad.errors import BackendError, ForegradWarning, UnsupportedError
from foregrad.graph.role import role_of


@pytest.fixture(autouse=True)
def own_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def failing(phase, how):
    """A backend that fails on graphs of one phase."""

    def unlucky(gm, example_inputs):
        if role_of(gm).phase != phase:
            return gm
        if how == "compiling":
            raise ValueError("no kernels today")

        def run(*inputs):
            outs = list(gm(*inputs))
            if how == "running":
                raise ValueError("no kernels at all")
            if how == "writing":
                next(value for value in inputs if isinstance(value, torch.Tensor)).add_(1)
            if how == "another dtype":
                return [out.double() if isinstance(out, torch.Tensor) else out for out in outs]
            return outs[:-1] if how == "too few" else outs

        return 3 if how == "no function" else run

    return unlucky


def drops(x, w):
    return torch.nn.functional.dropout((x @ w).relu(), 0.5)


def steps(call, *, grad):
    """Results, gradients and random numbers of three calls."""
    torch.manual_seed(3)
    found, w = [], torch.randn(3, 3, requires_grad=True)
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            out = call(torch.randn(2, 3), w)
        if grad:
            found += torch.autograd.grad(out.sum(), w)
        found += [out.detach(), torch.rand(2)]
    return found


PHASES, WAYS = ("forward", "backward", "inference"), ("compiling", "no function", "running", "too few", "another dtype")


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("phase", PHASES)
def test_goes_on_with_eagers_kernels(phase, how):
    compiled = foregrad.compile(drops, backend=failing(phase, how), on_unsupported="eager")
    with pytest.warns(ForegradWarning, match=f"backend `unlucky` failed on the {phase} graph of `drops`") as said:
        found = steps(compiled, grad=phase != "inference")
    assert len([w for w in said if issubclass(w.category, ForegradWarning)]) == 1
    assert all(map(torch.equal, found, steps(drops, grad=phase != "inference")))


def test_keeps_a_program_that_shows_it():
    with pytest.warns(ForegradWarning) as said:
        foregrad.compile(drops, backend=failing("forward", "compiling"), on_unsupported="eager")(
            torch.ones(2, 3), torch.ones(3, 3, requires_grad=True)
        )
    path = re.search(r"(\S+\.py) is a program that shows it", str(said[0].message))[1]
    text = pathlib.Path(path).read_text()
    assert "ValueError: no kernels today" in text
    world = {}
    exec(text.replace("compiler = ...", "compiler = lambda gm, inputs: gm"), world)
    assert [result.shape for result in world["results"]] == [(2, 3), (2, 3), (2, 3), (2, 3)]


@pytest.mark.parametrize("how", ["compiling", "no function", "too few"])
@pytest.mark.parametrize("phase", PHASES)
def test_is_an_error_where_asked(phase, how):
    compiled = foregrad.compile(drops, backend=failing(phase, how), on_unsupported="raise")
    with pytest.raises(BackendError, match=f"unlucky|the compiler of the {phase} graph") as caught:
        steps(compiled, grad=phase != "inference")
    assert how != "compiling" or isinstance(caught.value.__cause__, ValueError)


def test_is_the_callers_behind_aot_function():
    with pytest.raises(ValueError, match="no kernels today"):
        steps(foregrad.aot_function(drops, failing("forward", "compiling")), grad=True)


def fails_on_symbols(gm, example_inputs):
    for value in example_inputs:
        numbers = value.shape if isinstance(value, torch.Tensor) else [value]
        if any(isinstance(number, (torch.SymInt, torch.SymFloat)) for number in numbers):
            raise ValueError("no kernels for any number")
    return gm


@pytest.mark.parametrize("on_unsupported", ["eager", "raise"])
@pytest.mark.parametrize("of", [lambda n: (torch.ones(2), n), lambda n: (torch.ones(n), 2)], ids=["numbers", "sizes"])
def test_a_failure_with_symbols_is_told_once_and_each_value_gets_a_graph(of, on_unsupported):
    compiled = foregrad.compile(lambda x, n: x * n, backend=fails_on_symbols, on_unsupported=on_unsupported)
    with pytest.warns(
        ForegradWarning, match="symbolic sizes or numbers: ValueError: no kernels for any number"
    ) as said:
        for number in (2, 3, 4, 5):
            x, factor = of(number)
            assert torch.equal(compiled(x, factor), x * factor)
    assert len(said) == 1
    assert len(compiled.foregrad.specializations) == 4


def test_a_failure_with_symbols_is_told_behind_dynamo_too():
    call = torch.compile(lambda x: x * 2, backend=foregrad.aot_autograd(fw_compiler=fails_on_symbols))
    with pytest.warns(
        ForegradWarning, match="symbolic sizes or numbers: ValueError: no kernels for any number"
    ) as said:
        for size in (1, 3, 4, 5):
            assert torch.equal(call(torch.ones(size)), torch.ones(size) * 2)
    assert len(said) == 1


def test_a_backend_that_writes_to_its_inputs_is_an_error():
    """The call can't be made again."""
    compiled = foregrad.compile(drops, backend=failing("forward", "writing"), on_unsupported="eager")
    with pytest.raises(BackendError, match="wrote to its input"):
        steps(compiled, grad=True)


def test_the_programs_own_error_is_no_failure():
    compiled = foregrad.compile(lambda x, i: x[i], backend=failing("", ""), on_unsupported="eager")
    x = torch.ones(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(IndexError):
            compiled(x, torch.tensor([5]))
        assert torch.equal(compiled(x, torch.tensor([1])), x[1:2])


class Foreign:
    """What it does can be captured by nobody, and is fine in eager."""

    def __call__(self, x):
        if type(x.untyped_storage()._cdata) is int and x.data_ptr() == 0:
            raise KeyError("no memory")
        return x + 1


def test_an_error_of_the_capture_alone_is_foregrads():
    function = Foreign()
    compiled = foregrad.compile(function.__call__, backend="eager", on_unsupported="raise")
    with pytest.raises(UnsupportedError) as caught:
        compiled(torch.ones(2))
    assert __file__ in str(caught.value)


def test_an_error_that_eager_raises_is_eagers():
    calls = []

    def picky(x):
        calls.append(1)
        return x.view(7)

    compiled = foregrad.compile(picky, backend="eager", on_unsupported="raise")
    with pytest.raises(RuntimeError, match="shape '\\[7\\]' is invalid") as caught:
        compiled(torch.ones(2))
    assert not isinstance(caught.value, UnsupportedError)
    assert calls == [1]
