"""NumPy arrays that a function closes over: any difference of bits is seen, whatever the array is like."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import foregrad
from foregrad.python.opaque import asked_of


def arrays():
    """Of every kind of number and layout."""
    for kind in "?bhilqBHILQefdgFD":
        yield kind, np.ones((3, 4), dtype=kind)
    grid = np.arange(24.0).reshape(4, 6)
    yield "transposed", grid.copy().T
    yield "every second", grid.copy()[::2, 1::2]
    yield "backwards", np.arange(5.0)[::-1]
    yield "odd bytes", np.arange(5, dtype=np.int8)
    yield "not aligned", np.frombuffer(bytearray(41), dtype=np.uint8)[1:]
    yield "several pieces", np.zeros(300_001)
    yield "other byte order", np.arange(4.0).astype(">f8")
    yield "text", np.array(["ab", "c"])
    yield "bytes", np.array([b"ab", b"c"])
    yield "dates", np.array(["2020-01-01", "NaT"], dtype="M8[D]")
    yield "records", np.zeros(3, dtype=[("a", "i4"), ("b", "f4")])
    yield "masked", np.ma.array([1.0, 2.0], mask=[False, True])
    yield "nan and zeros", np.array([np.nan, -0.0, 0.0])


ARRAYS = dict(arrays())


@pytest.mark.parametrize("kind", ARRAYS)
def test_a_changed_byte_is_seen_and_an_unchanged_array_is_the_same(kind):
    array = ARRAYS[kind]
    ask = asked_of(array)
    before = ask(array)
    assert ask(array) == before
    cell = np.asarray(array)[tuple(slice(size - 1, size) for size in array.shape)]
    value = bytearray(cell.tobytes())
    value[0] ^= 1
    cell[...] = np.frombuffer(bytes(value), dtype=cell.dtype).reshape(cell.shape)
    if kind != "masked":  # its last number is not to be seen
        assert ask(array) != before


@pytest.mark.parametrize(("before", "after"), [(0.0, -0.0), (1.0, float("nan")), (1.0, 1.0 + 2**-52)])
def test_bits_are_compared_and_not_values(before, after):
    array = np.array([before])
    ask = asked_of(array)
    found = ask(array)
    array[0] = after
    assert ask(array) != found


def test_a_mask_that_changes_is_seen():
    array = np.ma.array([1.0, 2.0], mask=[False, False])
    ask = asked_of(array)
    found = ask(array)
    array[0] = np.ma.masked
    assert ask(array) != found


def test_rows_that_overlap():
    array = np.broadcast_to(np.arange(3.0), (4, 3))
    ask = asked_of(array)
    assert ask(array) == ask(array)


@pytest.mark.parametrize("make", [torch.as_tensor, torch.tensor], ids=["as_tensor", "tensor"])
def test_a_compiled_function_reads_what_is_in_the_array_now(make):
    array = np.arange(4, dtype=np.float32)

    def f(x):
        return x * make(array) + float(array.sum())

    compiled = foregrad.compile(f, backend="eager")
    x = torch.ones(4)
    for _ in range(3):
        assert torch.equal(compiled(x), f(x))
        assert torch.equal(compiled(x), f(x))
        array[1] += 1
    assert len(compiled.foregrad.specializations) == 3
