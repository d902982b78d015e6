"""Value numbers: what holds the same value has the same one, transposes included."""

import torch
from torch import fx

from foregrad.graph.meta import TensorSpec
from foregrad.tracing.tape.tape import Entry, Numbering, Tape

aten = torch.ops.aten


def spec(*shape):
    return TensorSpec(shape, tuple(torch.empty(shape).stride()), torch.float32, torch.device("cpu"))


def taped(*entries):
    tape = Tape()
    for entry in entries:
        tape.append(entry)
    numbering = Numbering(tape)
    numbering.extend()
    return numbering


def test_transposes_of_transposes_are_one():
    x = Entry(None, spec=spec(2, 3, 4))
    swapped = Entry(aten.transpose.int, (x, 0, 2), spec=spec(4, 3, 2))
    back = Entry(aten.permute.default, (swapped, [2, 1, 0]), spec=spec(2, 3, 4))
    turned = Entry(aten.permute.default, (swapped, [1, 0, 2]), spec=spec(3, 4, 2))
    directly = Entry(aten.permute.default, (x, [1, 2, 0]), spec=spec(3, 4, 2))
    other = Entry(aten.permute.default, (x, [1, 0, 2]), spec=spec(3, 2, 4))
    numbering = taped(x, swapped, back, turned, directly, other)
    numbers = [numbering.of(entry) for entry in (x, swapped, back, turned, directly, other)]
    assert numbers == [0, 1, 0, 2, 2, 3]
    assert [numbering.first[n] for n in numbers[:2]] == [x, swapped]
    assert numbering.position(numbers[-1]) == 5


def test_t_of_vectors_and_matrices():
    vector, matrix = Entry(None, spec=spec(3)), Entry(None, spec=spec(3, 4))
    same = Entry(aten.t.default, (vector,), spec=spec(3))
    turned = Entry(aten.t.default, (matrix,), spec=spec(4, 3))
    swapped = Entry(aten.transpose.int, (matrix, -1, -2), spec=spec(4, 3))
    numbering = taped(vector, matrix, same, turned, swapped)
    assert numbering.of(same) == numbering.of(vector)
    assert numbering.of(swapped) == numbering.of(turned) != numbering.of(matrix)


def test_a_graph_in_which_transposes_were_undone():
    """As Inductor's passes leave one: a product with `t(t(w))` has become one with `w`."""
    x, w = Entry(None, spec=spec(2, 3)), Entry(None, spec=spec(4, 3))
    once = Entry(aten.t.default, (w,), spec=spec(3, 4))
    twice = Entry(aten.t.default, (once,), spec=spec(4, 3))
    forth = Entry(aten.mm.default, (x, once), spec=spec(2, 4))
    back = Entry(aten.mm.default, (forth, twice), spec=spec(2, 3))
    numbering = taped(x, w, once, twice, forth, back)

    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    a.meta, b.meta = {"spec": x.spec}, {"spec": w.spec}
    turned = graph.call_function(aten.permute.default, (b, [1, 0]))
    first = graph.call_function(aten.mm.default, (a, turned))
    second = graph.call_function(aten.mm.default, (first, b))
    graph.output((second,))
    numbers = numbering.of_nodes(fx.GraphModule({}, graph), [x, w], {})
    assert numbers[turned] == numbering.of(once)
    assert numbers[first] == numbering.of(forth)
    assert numbers[second] == numbering.of(back)
