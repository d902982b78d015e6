"""Scripts that call compiled functions in ways that show one rule each: repeated calls, memory, threads."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from .cases import Case, Compile, expect
from .programs import numbers

SCRIPTS: list[Case] = []


def _script(name: str) -> Callable[[Callable[[Compile], None]], Callable[[Compile], None]]:
    def add(script: Callable[[Compile], None]) -> Callable[[Compile], None]:
        SCRIPTS.append(Case(name, script=script))
        return script

    return add


def _layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, w).tanh() * x.sum()


def _inputs() -> list[torch.Tensor]:
    return [numbers(3, 4), numbers(4, 4)]


def _gradients(out: torch.Tensor, inputs: list[torch.Tensor], **settings: Any) -> list[torch.Tensor]:
    return list(torch.autograd.grad(out, inputs, torch.ones_like(out), **settings))


def _near(actual: Any, expected: Any, text: str) -> None:
    pairs = zip(actual, expected, strict=True) if isinstance(actual, (list, tuple)) else [(actual, expected)]
    expect(all(torch.allclose(a, e, rtol=1e-4, atol=1e-5, equal_nan=True) for a, e in pairs), text)


# -------------------------------------------------------------------- calls


@_script("calls/two calls with other values")
def _other_values(compile: Compile) -> None:
    call = compile(_layer)
    for number in range(3):
        inputs = _inputs()
        out, expected = call(*inputs), _layer(*inputs)
        _near(out, expected, f"call {number + 1}, with other values, gives a result that differs from eager")
        _near(
            _gradients(out, inputs), _gradients(expected, inputs), f"call {number + 1} has other gradients than eager"
        )


@_script("calls/two calls at once")
def _interleaved(compile: Compile) -> None:
    call = compile(_layer)
    first, second = _inputs(), _inputs()
    outs = call(*first), call(*second)
    for inputs, out, which in ((first, outs[0], "first"), (second, outs[1], "second")):
        text = f"of two forwards before their backwards, the {which} has wrong "
        _near(out, _layer(*inputs), text + "results")
        _near(_gradients(out, inputs), _gradients(_layer(*inputs), inputs), text + "gradients")


@_script("calls/results stay as they are")
def _results_stay(compile: Compile) -> None:
    call = compile(_layer)
    kept = []
    for _ in range(3):
        inputs = _inputs()
        out = call(*inputs)
        made = [out, *_gradients(out, inputs)]
        kept.append((made, [value.detach().clone() for value in made]))
    for made, copies in kept:
        for what, value, copy in zip(("result", "gradient", "gradient"), made, copies, strict=True):
            expect(
                torch.equal(value, copy), f"a later call changes a {what} of an earlier call: its memory is used again"
            )


@_script("calls/backward twice")
def _backward_twice(compile: Compile) -> None:
    inputs = _inputs()
    out = compile(_layer)(*inputs)
    first = _gradients(out, inputs, retain_graph=True)
    copies = [value.clone() for value in first]
    second = _gradients(out, inputs)
    _near(second, copies, "a second backward of a call gives different gradients: saved values were written to")
    _near(first, copies, "a second backward of a call changes the gradients of the first")


@_script("calls/some gradients only")
def _some_gradients(compile: Compile) -> None:
    inputs = _inputs()
    expected = _gradients(_layer(*inputs), inputs)
    call = compile(_layer)
    for number in range(2):
        out = call(*inputs)
        _near(
            _gradients(out, [inputs[number]]), [expected[number]], f"the gradient of argument {number} alone is wrong"
        )


@_script("calls/some tangents only")
def _some_tangents(compile: Compile) -> None:
    def two(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = functional.linear(x, w)
        return y.sin(), y.exp()

    inputs = _inputs()
    call = compile(two)
    for number in range(2):
        actual, expected = (_gradients(f(*inputs)[number], inputs) for f in (call, two))
        _near(actual, expected, f"the backward from result {number} alone is wrong")


@_script("calls/tangents in other strides")
def _strided_tangents(compile: Compile) -> None:
    inputs = _inputs()
    out, tangent = compile(_layer)(*inputs), torch.randn(4, 3).t()
    actual = torch.autograd.grad(out, inputs, tangent)
    _near(
        list(actual),
        list(torch.autograd.grad(_layer(*inputs), inputs, tangent)),
        "gradients of a transposed tangent are wrong",
    )


@_script("calls/sizes that change")
def _other_sizes(compile: Compile) -> None:
    call = compile(_layer, dynamic=True)
    for rows in (3, 5, 2, 7):
        inputs = [numbers(rows, 4), numbers(4, 4)]
        out, expected = call(*inputs), _layer(*inputs)
        _near(out, expected, f"a graph with symbolic sizes is wrong for {rows} rows")
        _near(_gradients(out, inputs), _gradients(expected, inputs), f"its gradients are wrong for {rows} rows")


@_script("calls/without gradients, and with")
def _with_and_without(compile: Compile) -> None:
    call, inputs = compile(_layer), _inputs()
    with torch.no_grad():
        _near(call(*inputs), _layer(*inputs), "a call without gradients is wrong")
    _near(call(*inputs), _layer(*inputs), "a call with gradients is wrong")


# -------------------------------------------------------------------- memory


@_script("arguments/are let go")
def _let_go(compile: Compile) -> None:
    call = compile(_layer)
    for _ in range(2):
        inputs = _inputs()
        watched = [weakref.ref(value) for value in inputs]
        out = call(*inputs)
        gradients = _gradients(out, inputs)
        del inputs, out, gradients
    gc.collect()
    count = sum(tensor() is not None for tensor in watched)
    expect(not count, f"the compiled function keeps {count} of the 2 arguments of a call that is over")


@_script("arguments/stay as they are")
def _not_written(compile: Compile) -> None:
    inputs = _inputs()
    copies = [value.detach().clone() for value in inputs]
    out = compile(_layer)(*inputs)
    _gradients(out, inputs)
    expect(all(map(torch.equal, inputs, copies)), "the compiled function writes to its arguments")


@_script("arguments/tangents stay as they are")
def _tangents_stay(compile: Compile) -> None:
    inputs = _inputs()
    out = compile(_layer)(*inputs)
    tangent = torch.ones_like(out)
    torch.autograd.grad(out, inputs, tangent)
    expect(bool((tangent == 1).all()), "the compiled backward writes to a tangent that the caller keeps")


# -------------------------------------------------------------------- random numbers


def _dropped(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(x, 0.5, training=True) * 3


@_script("random/the backward has the forward's mask")
def _same_mask(compile: Compile) -> None:
    x = torch.ones(64).requires_grad_()
    out = compile(_dropped)(x)
    (gradient,) = _gradients(out, [x])
    expect(torch.equal(out != 0, gradient != 0), "the backward drops other elements than the forward")
    expect(bool(((out == 0) | (out == 6)).all()), "dropout gives other values than 0 and the scaled input")
    expect(8 < int((out != 0).sum()) < 56, "dropout with a rate of one half does not drop about half")


@_script("random/a seed gives the same numbers")
def _seeds(compile: Compile) -> None:
    call = compile(_dropped)
    x = torch.ones(256)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(call(x))
    expect(torch.equal(outs[0], outs[1]), "one seed gives two results")
    expect(not torch.equal(outs[0], outs[2]), "two seeds give one result: the numbers were drawn when it was compiled")
    expect(not torch.equal(call(x), call(x)), "two calls draw equal numbers")


# -------------------------------------------------------------------- threads


@_script("threads/four at once")
def _four_threads(compile: Compile) -> None:
    call = compile(_layer)
    inputs = [_inputs() for _ in range(4)]
    _gradients(call(*inputs[0]), inputs[0])  # compiled, before it is called from several
    faults: list[BaseException] = []
    begun = threading.Barrier(4)

    def work(own: list[torch.Tensor]) -> None:
        try:
            expected = _layer(*own)
            gradients = _gradients(expected, own)
            begun.wait()
            for _ in range(8):
                out = call(*own)
                _near(out, expected, "results of calls from several threads are mixed up")
                _near(_gradients(out, own), gradients, "gradients of calls from several threads are mixed up")
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(own,)) for own in inputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]


@_script("threads/another one's backward")
def _backward_elsewhere(compile: Compile) -> None:
    inputs = _inputs()
    out = compile(_layer)(*inputs)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(_gradients(out, inputs)))
    thread.start()
    thread.join()
    expect(len(found) == 2, "a backward in a second thread raises an error")
    _near(found, _gradients(_layer(*inputs), inputs), "a backward in a second thread has wrong gradients")
