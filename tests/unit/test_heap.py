"""The heap by hand: values over one memory, views of them and writes through these, against real tensors."""

from __future__ import annotations

import pytest
import torch

from foregrad.graph.meta import TensorSpec
from foregrad.tracing.heap.alias import Value
from foregrad.tracing.heap.views import View
from foregrad.tracing.tape.tape import Entry

aten = torch.ops.aten


def entry_of(tensor, target=None, args=()):
    entry = Entry(target, args, spec=TensorSpec.of(tensor))
    entry.value = tensor
    return entry


def emit(target, *args, kwargs=None, spec=None):
    """The operator, run at once on what its entries hold."""
    values = [arg.value if isinstance(arg, Entry) else arg for arg in args]
    result = target(*values, **(kwargs or {}))
    return entry_of(result, target, args)


def root_of(tensor):
    return Value(None, entry_of(tensor), TensorSpec.of(tensor))


def view_of(value, op, *args):
    taken = op(value.read(emit).value, *args)
    view = View(op, args, {}, None, object(), True)
    made = Value(None, None, TensorSpec.of(taken), value, view)
    made.generation = -1
    return made


def is_held(value, tensor):
    return torch.equal(value.read(emit).value, tensor)


VIEWS = [
    (aten.select.int, (0, 1)),
    (aten.slice.Tensor, (1, 1, 3)),
    (aten.t.default, ()),
    (aten.diagonal.default, ()),
    (aten.unsqueeze.default, (0,)),
    (aten.view.default, ([6],)),
]


@pytest.mark.parametrize(("op", "args"), VIEWS)
def test_a_write_to_a_view_is_seen_in_what_it_is_a_view_of(op, args):
    real = torch.arange(6.0).view(2, 3)
    root = root_of(real.clone())
    view = view_of(root, op, *args)
    op(real, *args).mul_(10)
    view.write(emit, emit(aten.mul.Tensor, view.read(emit), 10))
    assert is_held(root, real)
    assert is_held(view, op(real, *args))


@pytest.mark.parametrize(("op", "args"), VIEWS)
def test_a_view_is_taken_again_once_its_memory_was_written(op, args):
    real = torch.arange(6.0).view(2, 3)
    root = root_of(real)
    view, before = view_of(root, op, *args), real.clone()
    first = view.read(emit)
    root.write(emit, emit(aten.neg.default, root.read(emit)))
    assert view.read(emit) is not first
    assert is_held(view, op(-before, *args))


def test_a_view_that_nothing_happened_to_is_read_once():
    view = view_of(root_of(torch.arange(6.0).view(2, 3)), aten.t.default)
    assert view.read(emit) is view.read(emit)


def test_views_of_one_memory_see_the_writes_of_each_other():
    real = torch.arange(6.0)
    root = root_of(real.clone())
    left, right = view_of(root, aten.slice.Tensor, 0, 0, 4), view_of(root, aten.slice.Tensor, 0, 2, 6)
    real[0:4].add_(1)
    left.write(emit, emit(aten.add.Tensor, left.read(emit), 1))
    assert is_held(right, real[2:6])
    real[2:6].mul_(3)
    right.write(emit, emit(aten.mul.Tensor, right.read(emit), 3))
    assert is_held(left, real[0:4])
    assert is_held(root, real)


def test_the_generation_counts_the_writes():
    root = root_of(torch.zeros(3))
    view = view_of(root, aten.slice.Tensor, 0, 0, 2)
    for count in (1, 2):
        view.write(emit, emit(aten.add.Tensor, view.read(emit), 1))
        assert root.storage.generation == count
    assert view.storage is root.storage


def test_a_write_through_data_is_no_change_that_the_tensor_tells_of():
    tensor = torch.zeros(3)
    storage = root_of(tensor).storage
    storage.note_write(tensor[1:])
    counted_at = storage.changed_at
    storage.note_write(tensor.data)
    assert [change.at for change in storage.changes_of(tensor)] == [counted_at]
    assert storage.changed_at == storage.written_at > counted_at > 0


def test_a_write_of_no_elements_is_a_change_that_only_autograd_sees():
    root = root_of(torch.zeros(3))
    view = view_of(root, aten.slice.Tensor, 0, 0, 0)
    view.write(emit, emit(aten.add.Tensor, view.read(emit), 1))
    assert root.storage.is_touched
    assert root.storage.generation == 0
    assert root.storage.is_written


def test_what_overwrites_a_whole_view_stands_on_what_was_before_the_last_write():
    root = root_of(torch.zeros(3))
    view = view_of(root, aten.slice.Tensor, 0, 0, 2)
    base = root.read(emit)
    for number in (1, 2):
        view.write(emit, emit(aten.add.Tensor, view.read(emit), number))
    assert root.read(emit).args[0] is base
    assert is_held(root, torch.tensor([3.0, 3.0, 0.0]))
