"""What a backward may overwrite: tensors that the forward made for it alone, in memory that nobody else has."""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad._torch import memory
from foregrad._torch.native import native
from foregrad.passes.mutations import donated_inputs


def donated(function, *inputs):
    call = foregrad.compile(function, backend="eager", partition="default")
    outs = call(*inputs)
    sum(out.sum() for out in (outs if isinstance(outs, tuple) else (outs,))).backward()
    (specialization,) = call.foregrad.specializations
    partitioned = specialization.product.compiled.partitioned
    placeholders = [node.name for node in partitioned.backward.graph.nodes if node.op == "placeholder"]
    return [placeholders[i] for i in donated_inputs(partitioned)]


def test_a_value_in_between_is_donated():
    assert donated(lambda x: x.exp().sin(), torch.ones(3, requires_grad=True)) == ["exp"]


def test_inputs_and_outputs_are_not():
    assert donated(lambda x: x.exp(), torch.ones(3, requires_grad=True)) == []
    assert donated(lambda x: x.sin(), torch.ones(3, requires_grad=True)) == []


def test_views_of_inputs_and_of_outputs_are_not():
    assert donated(lambda x: x.t().sin(), torch.ones(3, 2, requires_grad=True)) == []

    def shown(x):
        hidden = x.exp()
        return hidden.t().sin(), hidden

    assert donated(shown, torch.ones(3, 2, requires_grad=True)) == []


def test_two_views_of_one_memory_are_not():
    def halves(x):
        first, last = x.exp().split(2)
        return first.sin() * last.cos()

    names = donated(halves, torch.ones(4, requires_grad=True))
    assert not any("getitem" in name or "split" in name for name in names)


def test_elements_in_one_place_are_not():
    names = donated(lambda x: x.exp().expand(4, 3).sin(), torch.ones(3, requires_grad=True))
    assert "expand" not in names


def look_in_cpp():
    if native() is None:
        pytest.skip("the C++ part was not built")
    return native().owned


@pytest.mark.parametrize("find", [look_in_cpp, lambda: memory.owned_in_python], ids=["native", "python"])
def test_whose_a_tensor_is(find):
    owned = find()
    values = [torch.ones(4) * 2, 3]
    assert owned(values, (0,))
    assert owned(values, ())
    assert not owned(values, (0, 1))
    mine = values[0]
    assert not owned(values, (0,))
    view = mine[1:]
    del mine
    assert not owned(values, (0,))
    del view
    assert owned(values, (0,))
    assert not owned([torch.from_numpy(torch.ones(4).numpy().copy())], (0,))
    assert not owned([torch.ones(2).to_sparse()], (0,))
    node = (values[0].requires_grad_() ** 2).grad_fn
    assert not owned(values, (0,))
    del node
    assert owned(values, (0,))
    storage = values[0].untyped_storage()
    assert not owned(values, (0,))
    assert storage.nbytes() == 16
