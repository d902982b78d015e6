from __future__ import annotations

import inspect
import operator

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from foregrad.partitioners import default_partition, min_cut_rematerialization_partition
from tests.unit.test_partition_split import symbolic_joint
from tests.unit.test_partition_support import (
    Joint,
    assert_valid,
    names,
    ops,
    placeholders,
    saved_names,
    small_joint,
)

aten = torch.ops.aten
RECOMPUTE = {"recompute": CheckpointPolicy.MUST_RECOMPUTE}
SAVE = {"recompute": CheckpointPolicy.MUST_SAVE}


def partition(joint, keywords):
    """(forward, backward, saved names), the halves checked"""
    forward, backward = default_partition(joint, (), **keywords)
    assert_valid(joint, forward, backward, keywords["num_fwd_outputs"])
    return forward, backward, saved_names(forward, keywords["num_fwd_outputs"])


def test_signatures_are_pytorchs():
    """PyTorch calls its partitioners with these words; either may stand in for the other."""
    default = inspect.signature(default_partition)
    assert [(p.name, p.kind.name, p.default) for p in default.parameters.values()] == [
        ("joint_module", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("_joint_inputs", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("num_fwd_outputs", "KEYWORD_ONLY", inspect.Parameter.empty),
        ("static_lifetime_input_indices", "KEYWORD_ONLY", None),
        ("static_lifetime_input_nodes", "KEYWORD_ONLY", None),
    ]
    min_cut = inspect.signature(min_cut_rematerialization_partition)
    assert [(p.name, p.kind.name, p.default) for p in min_cut.parameters.values()] == [
        ("joint_module", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("_joint_inputs", "POSITIONAL_OR_KEYWORD", inspect.Parameter.empty),
        ("compiler", "POSITIONAL_OR_KEYWORD", "inductor"),
        ("num_fwd_outputs", "KEYWORD_ONLY", inspect.Parameter.empty),
        ("static_lifetime_input_indices", "KEYWORD_ONLY", None),
    ]


def test_the_forward_runs_the_forward_and_the_backward_the_rest():
    forward, backward, saved = partition(*small_joint())
    assert ops(forward) == ["mm", "sin"]
    assert ops(backward) == ["cos", "mul", "t", "mm_1", "t_1", "mm_2"]
    assert saved == ["primals_1", "primals_2", "mm"]


def test_what_the_function_computed_for_its_backward_is_computed_in_the_forward():
    """A custom function may keep something that no output depends on; eager computes it in the forward."""
    j = Joint()
    x, t = j.primal(3), j.tangent(3)
    kept = j(aten.exp.default, x, meta={"partitioner_tag": "is_forward"})
    joint, keywords = j.done([j(aten.sin.default, x)], [j(aten.mul.Tensor, t, kept)])
    forward, _, saved = partition(joint, keywords)
    assert ops(forward) == ["exp", "sin"]
    assert saved == ["exp"]


def test_a_view_of_an_input_is_taken_again():
    j = Joint()
    w, t = j.primal(4, 5), j.tangent(2, 5)
    wt = j(aten.t.default, w)
    y = j(aten.mm.default, t, wt)
    joint, keywords = j.done([j(aten.sin.default, wt)], [y])
    _, backward, saved = partition(joint, keywords)
    assert saved == ["primals_1"]
    assert ops(backward) == ["t", "mm"]


def test_several_views_are_saved_as_their_base():
    j = Joint()
    x, t = j.primal(4, 6), j.tangent(4, 3)
    h = j(aten.exp.default, x)
    halves = j(aten.split.Tensor, h, 3, 1)
    a, b = j(operator.getitem, halves, 0), j(operator.getitem, halves, 1)
    joint, keywords = j.done(
        [j(aten.mul.Tensor, a, b)], [j(aten.cat.default, [j(aten.mul.Tensor, t, b), j(aten.mul.Tensor, t, a)], 1)]
    )
    _, backward, saved = partition(joint, keywords)
    assert saved == ["exp"]
    assert ops(backward)[:3] == ["split", "getitem", "getitem_1"], "items are taken together"


def test_a_single_view_is_saved_itself():
    """The same memory, and the backward need not take the view again."""
    j = Joint()
    x, t = j.primal(4, 6), j.tangent(24)
    h = j(aten.exp.default, x)
    flat = j(aten.view.default, h, [24])
    joint, keywords = j.done([flat], [j(aten.view.default, j(aten.mul.Tensor, t, flat), [4, 6])])
    _, backward, saved = partition(joint, keywords)
    assert saved == ["view"]
    assert ops(backward) == ["mul", "view_1"]


def test_a_single_view_larger_than_its_base_is_not():
    j = Joint()
    x, t = j.primal(4, 1), j.tangent(4, 6)
    h = j(aten.exp.default, x)
    wide = j(aten.expand.default, h, [4, 6])
    y = j(aten.sin.default, wide)
    joint, keywords = j.done([y], [j(aten.mul.Tensor, t, j(aten.cos.default, wide))])
    assert partition(joint, keywords)[2] == ["exp"]


def test_a_base_that_is_read_as_well_is_saved_once():
    j = Joint()
    x, t = j.primal(4, 6), j.tangent(24)
    h = j(aten.exp.default, x)
    flat = j(aten.view.default, h, [24])
    g = j(aten.view.default, j(aten.mul.Tensor, t, flat), [4, 6])
    joint, keywords = j.done([flat], [j(aten.mul.Tensor, g, h)])
    assert partition(joint, keywords)[2] == ["exp"]


def test_items_are_saved_and_not_tuples():
    j = Joint()
    x, t = j.primal(3, 4), j.tangent(3, 4)
    pair = j(aten.native_dropout.default, x, 0.5, True)
    y, mask = j(operator.getitem, pair, 0), j(operator.getitem, pair, 1)
    joint, keywords = j.done([y], [j(aten.native_dropout_backward.default, t, mask, 2.0)])
    _, backward, saved = partition(joint, keywords)
    assert saved == ["getitem_1"]
    assert ops(backward) == ["native_dropout_backward"]


def test_constants_are_made_again():
    j = Joint()
    x, t = j.primal(3), j.tangent(3)
    ramp = j(aten.arange.default, 3)
    ones = j(aten.full.default, [3], 1.0)
    joint, keywords = j.done([j(aten.mul.Tensor, x, ramp)], [j(aten.add.Tensor, j(aten.mul.Tensor, t, ramp), ones)])
    forward, backward, saved = partition(joint, keywords)
    assert saved == []
    assert ops(forward) == ["arange", "mul"]
    assert ops(backward) == ["arange", "mul_1", "full", "add"]


def test_sizes_are_saved_rather_than_the_tensor_they_are_of():
    j, _, x, t = symbolic_joint()
    h = j(aten.exp.default, x)
    rows = j(aten.sym_size.int, h, 0)
    y = j(aten.sum.default, h)
    joint, keywords = j.done([y], [None, j(aten.expand.default, j(aten.sum.default, t), [rows, 4])])
    _, backward, saved = partition(joint, keywords)
    assert saved[-1] == "sym_size"
    assert "exp" not in saved
    assert names(placeholders(backward))[-2:] == ["sym_size", "tangents_1"]


def test_sizes_of_what_is_saved_anyway_are_not():
    j, _, x, t = symbolic_joint()
    h = j(aten.exp.default, x)
    rows = j(aten.sym_size.int, h, 0)
    g = j(aten.expand.default, j(aten.sum.default, t), [rows, 4])
    joint, keywords = j.done([h], [None, j(aten.mul.Tensor, g, h)])
    _, backward, saved = partition(joint, keywords)
    assert "sym_size" not in saved
    assert "sym_size" in ops(backward)


# ---------------------------------------------------------------------------------------------------------------- tags


def checkpointed(first=RECOMPUTE, second=RECOMPUTE, region=(1, 1), middle=aten.sin.default):
    """y = tanh(exp(middle(x @ w))), with its gradient for x; the two inside operators tagged."""
    j = Joint()
    x, w, t = j.primal(4, 4), j.primal(4, 4), j.tangent(4, 4)
    mm = j(aten.mm.default, x, w, meta=first | {"ac_graph_id": region[0]})
    a = j(middle, mm, meta=first | {"ac_graph_id": region[0]})
    b = j(aten.exp.default, a, meta=second | {"ac_graph_id": region[1]})
    y = j(aten.tanh.default, b)
    g = j(aten.tanh_backward.default, t, y)
    g = j(aten.mul.Tensor, g, b)
    g = j(aten.mul.Tensor, g, a)
    g = j(aten.mul.Tensor, g, mm)
    return j.done([y], [j(aten.mm.default, g, j(aten.t.default, w)), None])


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_a_tagged_region_is_computed_again(policy):
    _, backward, saved = partition(*checkpointed({"recompute": policy}, {"recompute": policy}))
    assert saved == ["primals_1", "primals_2", "tanh"]
    assert [n for n in ops(backward) if n in {"mm", "sin", "exp"}] == ["mm", "sin", "exp"]


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE])
def test_what_a_policy_saves_is_saved(policy):
    _, backward, saved = partition(*checkpointed(second={"recompute": policy}))
    assert saved == ["primals_1", "primals_2", "exp", "tanh"]
    assert "exp" not in ops(backward)


def test_between_two_regions_the_value_is_saved():
    _, backward, saved = partition(*checkpointed(region=(1, 2)))
    assert saved == ["primals_1", "primals_2", "sin", "tanh"]
    assert "sin" not in ops(backward)


def test_a_view_between_two_regions_saves_its_memory_once():
    j = Joint()
    x, t = j.primal(4, 4), j.tangent(16)
    a = j(aten.sin.default, x, meta=RECOMPUTE | {"ac_graph_id": 1})
    flat = j(aten.view.default, a, [16], meta=RECOMPUTE | {"ac_graph_id": 1})
    b = j(aten.exp.default, flat, meta=RECOMPUTE | {"ac_graph_id": 2})
    g = j(aten.mul.Tensor, t, b)
    joint, keywords = j.done([b], [j(aten.mul.Tensor, j(aten.view.default, g, [4, 4]), j(aten.cos.default, x))])
    _, backward, saved = partition(joint, keywords)
    assert saved == ["primals_1", "view"]
    assert "sin" not in ops(backward)


def test_random_values_in_a_region_are_saved():
    """They must not be drawn again; the rest of the region is computed again from them."""
    _, backward, saved = partition(*checkpointed(middle=aten.rand_like.default))
    assert saved == ["primals_1", "primals_2", "rand_like", "tanh"]
    assert [n for n in ops(backward) if n in {"mm", "rand_like", "exp"}] == ["exp", "mm"]


def test_items_of_a_random_operator_in_a_region_are_saved():
    j = Joint()
    x, t = j.primal(4, 4), j.tangent(4, 4)
    pair = j(aten.native_dropout.default, x, 0.5, True, meta=RECOMPUTE)
    y, mask = (j(operator.getitem, pair, i, meta=RECOMPUTE) for i in (0, 1))
    z = j(aten.exp.default, y, meta=RECOMPUTE)
    g = j(aten.mul.Tensor, t, z)
    joint, keywords = j.done([z], [j(aten.native_dropout_backward.default, g, mask, 2.0)])
    assert partition(joint, keywords)[2] == ["getitem", "getitem_1"]


def test_tuple_and_items_may_be_tagged_differently():
    """Captures tag the operator, and may forget its items."""
    j = Joint()
    x, t = j.primal(3, 4), j.tangent(3)
    pair = j(aten.var_mean.correction, x, [1], meta=RECOMPUTE)
    var, mean = j(operator.getitem, pair, 0), j(operator.getitem, pair, 1, meta=SAVE)
    g = j(aten.mul.Tensor, j(aten.mul.Tensor, t, var), mean)
    joint, keywords = j.done([j(aten.mul.Tensor, var, mean)], [g])
    _, backward, saved = partition(joint, keywords)
    assert saved == ["primals_1", "getitem_1"]
    assert ops(backward)[:2] == ["var_mean", "getitem"]


def test_a_region_that_reads_what_the_call_overwrites_is_saved():
    """The input holds other values by the time of the backward."""
    j = Joint()
    count, w, t = j.primal(3), j.primal(3), j.tangent(3)
    a = j(aten.exp.default, count, meta=RECOMPUTE)
    y = j(aten.mul.Tensor, a, w)
    after = j(aten.add.Tensor, count, 1)
    g = j(aten.mul.Tensor, t, a)
    j.graph.create_node("call_function", aten.copy_.default, (count, after), {}, "copy_")
    forward, backward = default_partition(*j.done([y], [None, g])[:1], (), num_fwd_outputs=1)
    assert saved_names(forward, 1) == ["exp"]
    assert ops(backward) == ["mul_1"]


def test_a_regions_result_with_a_backward_hook_is_saved():
    joint, keywords = checkpointed()
    exp = next(n for n in joint.graph.nodes if n.name == "exp")
    exp.meta["has_backward_hook"] = True
    assert "exp" in partition(joint, keywords)[2]
