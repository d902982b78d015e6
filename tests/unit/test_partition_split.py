from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from foregrad.errors import PartitionError
from foregrad.graph.meta import NodeMeta, TensorSpec
from foregrad.partitioners import JointIndex, check_split, split
from tests.unit.test_partition_support import (
    Joint,
    assert_valid,
    names,
    ops,
    outputs_of,
    placeholders,
    saved_names,
    small_joint,
)

aten = torch.ops.aten


def index_of(joint, keywords):
    return JointIndex(joint, keywords["num_fwd_outputs"])


def node(joint, name):
    return next(n for n in joint.graph.nodes if n.name == name)


def cut_at(joint, keywords, *residuals):
    halves = split(index_of(joint, keywords), [node(joint, name) for name in residuals])
    assert_valid(joint, halves.forward, halves.backward, keywords["num_fwd_outputs"])
    return halves


# ------------------------------------------------------------------------------------------------------ what is chosen


@pytest.mark.parametrize("residuals", [[], ["mm"], ["cos"], ["mm", "cos"], ["sin", "mm"], ["primals_1", "cos"]])
def test_any_choice_gives_the_same_results(residuals):
    """Whatever is saved, the halves compute what the joint graph does, to the last bit."""
    cut_at(*small_joint(), *residuals)


def test_inputs_are_saved_without_being_asked_for():
    joint, keywords = small_joint()
    halves = cut_at(joint, keywords, "cos")
    assert saved_names(halves.forward, 1) == ["primals_1", "primals_2", "cos"]
    assert names(halves.tensors) == ["primals_1", "primals_2", "cos"]


def test_what_the_backward_does_not_use_is_not_saved():
    halves = cut_at(*small_joint(), "cos", "mm", "sin")
    assert "mm" not in saved_names(halves.forward, 1)
    assert "sin" not in saved_names(halves.forward, 1)


def test_what_is_not_saved_is_computed_again():
    halves = cut_at(*small_joint())
    assert ops(halves.backward)[:2] == ["mm", "cos"]


def test_an_output_that_the_backward_needs_is_saved_as_well():
    j = Joint()
    x, t = j.primal(3), j.tangent(3)
    y = j(aten.tanh.default, x)
    joint, keywords = j.done([y], [j(aten.tanh_backward.default, t, y)])
    halves = cut_at(joint, keywords, "tanh")
    assert names(outputs_of(halves.forward)) == ["tanh", "tanh"]


def test_unused_inputs_and_tangents_stay():
    j = Joint()
    j.primal(2)
    x = j.primal(3)
    j.tangent(4)
    t = j.tangent(3)
    joint, keywords = j.done([j(aten.sin.default, x)], [None, j(aten.neg.default, t)])
    halves = cut_at(joint, keywords)
    assert names(placeholders(halves.forward)) == ["primals_1", "primals_2"]
    assert names(placeholders(halves.backward)) == ["tangents_1", "tangents_2"]
    assert names(outputs_of(halves.backward)) == [None, "neg"]


def test_the_joint_graph_is_left_as_it_was():
    joint, keywords = small_joint()
    before = str(joint.graph)
    cut_at(joint, keywords, "mm")
    assert str(joint.graph) == before


def test_dead_operators_go():
    j = Joint()
    x, t = j.primal(3), j.tangent(3)
    j(aten.exp.default, x)
    j(aten.exp.default, t)
    joint, keywords = j.done([j(aten.sin.default, x)], [j(aten.neg.default, t)])
    halves = cut_at(joint, keywords)
    assert ops(halves.forward) + ops(halves.backward) == ["sin", "neg"]


def test_constants_are_in_both_halves():
    j = Joint()
    x, t = j.primal(3), j.tangent(3)
    c = j.constant(torch.arange(3.0))
    joint, keywords = j.done([j(aten.mul.Tensor, x, c)], [j(aten.mul.Tensor, t, c)])
    halves = cut_at(joint, keywords, c.name)
    assert saved_names(halves.forward, 1) == []
    for half in (halves.forward, halves.backward):
        assert half._constant0.data_ptr() == joint._constant0.data_ptr()


def test_gradients_that_need_no_tangent():
    j = Joint()
    x, t = j.primal(3), j.tangent(3)
    ones = j(aten.ones.default, [3])
    joint, keywords = j.done([j(aten.sin.default, x)], [ones, j(aten.neg.default, x), x, t])
    halves = cut_at(joint, keywords)
    assert saved_names(halves.forward, 1) == ["primals_1"]
    assert ops(halves.forward) == ["sin"]


def test_nothing_to_differentiate():
    j = Joint()
    x = j.primal(3)
    joint, keywords = j.done([j(aten.sin.default, x), x, None, 7], [])
    halves = cut_at(joint, keywords)
    assert outputs_of(halves.backward) == []
    assert names(outputs_of(halves.forward)) == ["sin", "primals_1", None, 7]


# ------------------------------------------------------------------------------------------------------------ metadata


def test_metadata_goes_along_and_is_not_shared():
    joint, keywords = small_joint()
    node(joint, "mm").meta["mine"] = 1
    halves = cut_at(joint, keywords, "mm")
    copies = [next(n for n in half.graph.nodes if n.name == "mm") for half in (halves.forward, halves.backward)]
    for copy in copies:
        assert copy.meta["mine"] == 1
        copy.meta["mine"] = 2
    assert node(joint, "mm").meta["mine"] == 1


def test_late_metadata_stays_late():
    made = []
    joint, keywords = small_joint()
    for n in joint.graph.nodes:
        if n.op == "output":
            continue
        fake = n.meta["val"]
        n.meta = NodeMeta({"spec": TensorSpec.of(fake)}, late={"val": lambda fake=fake: made.append(1) or fake})
    halves = split(index_of(joint, keywords), [node(joint, "mm")])
    assert not made, "a fake tensor was made that nobody asked for"
    assert all("val" in n.meta for n in halves.backward.graph.nodes if n.op != "output")
    assert_valid(joint, halves.forward, halves.backward, 1)


def test_descriptions_of_the_outputs_follow_them():
    joint, keywords = small_joint()
    joint.graph.output_node().meta["desc"] = ["y", "dx", "dw"]
    halves = cut_at(joint, keywords, "mm")
    assert halves.forward.graph.output_node().meta["desc"] == ["y", None, None, None]
    assert halves.backward.graph.output_node().meta["desc"] == ["dx", "dw"]
    assert joint.graph.output_node().meta["desc"] == ["y", "dx", "dw"]


def test_modules_run_as_modules():
    joint, keywords = small_joint()
    halves = cut_at(joint, keywords, "mm")
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    y, *saved = halves.forward(x, w)
    torch.testing.assert_close(y, torch.sin(x @ w))
    dx, _ = halves.backward(*saved, torch.ones(3, 5))
    torch.testing.assert_close(dx, torch.cos(x @ w) @ w.t())
    assert "sin" in halves.forward.code


def test_kinds_of_saved_values_come_in_pytorchs_order():
    """Tensors, those that autograd is not to check for later writes, what is neither tensor nor number, numbers."""
    j = Joint()
    w, x, y = (j.primal(3) for _ in range(3))
    t = j.tangent(3)
    w.meta["val"] = object()
    x.meta["saved_tensor_with_no_vc_check"] = True
    g = j.graph.call_function(aten.mul.Tensor, (t, w))
    g.meta["val"] = t.meta["val"]
    for value in (x, y):
        g = j(aten.mul.Tensor, g, value)
    joint, keywords = j.done([j(aten.sin.default, x)], [g])
    halves = split(index_of(joint, keywords), [])
    assert saved_names(halves.forward, 1) == ["primals_3", "primals_2", "primals_1"]
    assert names(placeholders(halves.backward)) == ["primals_3", "primals_2", "primals_1", "tangents_1"]


# --------------------------------------------------------------------------------------------------------------- order


def test_the_backward_computes_again_right_before_use():
    """Two blocks: the second's values come before the first's, each where the backward first reads them."""
    j = Joint()
    x, t = j.primal(4, 4), j.tangent(4, 4)
    a = j(aten.sin.default, x)
    b = j(aten.exp.default, a)
    g1 = j(aten.mul.Tensor, t, b)
    g2 = j(aten.neg.default, g1)
    joint, keywords = j.done([b], [j(aten.mul.Tensor, g2, j(aten.cos.default, x))])
    halves = cut_at(joint, keywords)
    assert ops(halves.backward) == ["sin", "exp", "mul", "neg", "cos", "mul_1"]


def test_the_forward_computes_for_the_backward_as_soon_as_it_can():
    """The mask comes right after what it is the mask of, so that this can die before the forward goes on."""
    j = Joint()
    x, t = j.primal(4), j.tangent(4)
    a = j(aten.sin.default, x)
    b = j(aten.exp.default, a)
    c = j(aten.tanh.default, b)
    mask = j(aten.le.Scalar, a, 0)
    joint, keywords = j.done([c], [j(aten.where.self, mask, t, t)])
    halves = cut_at(joint, keywords, mask.name)
    assert ops(halves.forward) == ["sin", "le", "exp", "tanh"]


def test_items_are_taken_at_once():
    """A recomputed tuple is unpacked where it is made: it would keep every item alive."""
    j = Joint()
    x, t = j.primal(3, 4), j.tangent(3)
    pair = j(aten.var_mean.correction, x, [1])
    var, mean = j(operator.getitem, pair, 0), j(operator.getitem, pair, 1)
    g = j(aten.mul.Tensor, t, var)
    g = j(aten.neg.default, g)
    joint, keywords = j.done([mean], [j(aten.mul.Tensor, g, mean)])
    halves = cut_at(joint, keywords)
    assert ops(halves.backward) == ["var_mean", "getitem", "getitem_1", "mul", "neg", "mul_1"]


# ----------------------------------------------------------------------------------------------- random, effects, tags


def random_joint():
    j = Joint()
    x, t = j.primal(5), j.tangent(5)
    j(aten.rand.default, [2])
    noise = j(aten.rand_like.default, x)
    y = j(aten.mul.Tensor, x, noise)
    j(aten.bernoulli.p, noise, 0.5)
    late = j(aten.rand_like.default, t)
    j(aten.rand_like.default, t)
    return j.done([y], [j(aten.mul.Tensor, j(aten.mul.Tensor, t, noise), late)])


def test_random_operators_run_once_in_order_even_unused():
    joint, keywords = random_joint()
    halves = cut_at(joint, keywords, "rand_like")
    assert ops(halves.forward) == ["rand", "rand_like", "mul", "bernoulli"]
    assert ops(halves.backward)[:3] == ["rand_like_1", "rand_like_2", "mul_1"]


def test_a_random_value_that_is_not_saved_is_an_error():
    joint, keywords = random_joint()
    with pytest.raises(PartitionError, match=r"rand_like .* would run a second time .* draws random numbers"):
        check_split(index_of(joint, keywords), [])


def test_random_operators_of_a_backward_formula_stay_there():
    j = Joint()
    x, t = j.primal(5), j.tangent(5)
    late = j(aten.rand.default, [5], meta={"partitioner_tag": "is_backward"})
    double = j(aten.mul.Tensor, late, 2)
    joint, keywords = j.done([j(aten.sin.default, x)], [j(aten.mul.Tensor, t, double)])
    halves = cut_at(joint, keywords)
    assert ops(halves.forward) == ["sin"]
    with pytest.raises(PartitionError, match="needs the tangents"):
        check_split(index_of(joint, keywords), [double])


def write(j, into, value, tag):
    """`into.copy_(value)`, as captures put it at the end of the graph."""
    node = j.graph.create_node("call_function", aten.copy_.default, (into, value), {}, "copy_")
    node.meta |= {"val": into.meta["val"], "partitioner_tag": tag}
    return node


def test_writes_to_inputs_stay_where_they_must_be():
    j = Joint()
    x, count, t = j.primal(3), j.primal(3), j.tangent(3)
    y = j(aten.sin.default, x)
    after = j(aten.add.Tensor, count, 1)
    g = j(aten.neg.default, t)
    again = j(aten.add.Tensor, count, 2)
    write(j, count, after, "must_be_in_forward")
    write(j, count, again, "must_be_in_backward")
    joint, keywords = j.done([y], [g, None])
    halves = split(index_of(joint, keywords), [])
    assert ops(halves.forward) == ["sin", "add", "copy_"]
    assert ops(halves.backward) == ["neg", "add_1", "copy__1"]


def test_tags_that_force_a_side():
    j = Joint()
    x, t = j.primal(3), j.tangent(3)
    y = j(aten.sin.default, x)
    forced = j(aten.exp.default, x, meta={"partitioner_tag": "must_be_in_backward"})
    joint, keywords = j.done([y], [j(aten.mul.Tensor, t, forced)])
    with pytest.raises(PartitionError, match=r"exp .* can't be saved: it needs the tangents"):
        check_split(index_of(joint, keywords), [forced])


# -------------------------------------------------------------------------------------------------------------- errors


def test_a_value_of_the_backward_can_not_be_saved():
    joint, keywords = small_joint()
    with pytest.raises(PartitionError, match=r"mul \(aten.mul.Tensor\) can't be saved: it needs the tangents"):
        check_split(index_of(joint, keywords), [node(joint, "mul")])


def test_a_node_of_another_graph_can_not_be_saved():
    joint, keywords = small_joint()
    with pytest.raises(PartitionError, match="mm can't be saved: it is not a node of this joint graph"):
        check_split(index_of(joint, keywords), [node(small_joint()[0], "mm")])


def test_a_tuple_can_not_be_saved():
    j = Joint()
    x, t = j.primal(3, 4), j.tangent(3)
    pair = j(aten.max.dim, x, 1)
    value, at = j(operator.getitem, pair, 0), j(operator.getitem, pair, 1)
    g = j(aten.value_selecting_reduction_backward.default, t, 1, at, [3, 4], False)
    joint, keywords = j.done([value], [g])
    with pytest.raises(PartitionError, match=r"max_1 .* several results.*getitem"):
        check_split(index_of(joint, keywords), [pair])
    cut_at(joint, keywords, "getitem_1")


def test_a_forward_output_that_needs_tangents_is_explained():
    joint, _ = small_joint()
    with pytest.raises(PartitionError, match=r"the forward needs .* the tangents.*\n?.*num_fwd_outputs=2"):
        JointIndex(joint, 2)
    with pytest.raises(PartitionError, match="4 forward outputs asked of a graph with 3"):
        JointIndex(joint, 4)


def test_messages_name_the_users_line():
    joint, keywords = small_joint()
    node(joint, "mul").meta["stack_trace"] = '  File "model.py", line 41, in forward\n    return x * w\n'
    with pytest.raises(PartitionError, match=r'File "model.py", line 41, in forward return x \* w'):
        check_split(index_of(joint, keywords), [node(joint, "mul")])


# --------------------------------------------------------------------------------------------------------------- sizes


def symbolic_joint():
    """x of symbolic size, which the graph gets as an input of its own, as dynamo's captures do."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    j = Joint()
    j.mode = type(j.mode)(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    fake = j.mode.from_tensor(torch.randn(6, 4), symbolic_context=context)
    size, x, t = j.primal(), j.primal(), j.tangent()
    size.meta["val"] = fake.shape[0]
    x.meta["val"] = t.meta["val"] = fake
    return j, size, x, t


def test_sizes_are_saved_last_and_taken_first():
    j, size, x, t = symbolic_joint()
    twice = j(operator.mul, size, 2)
    y = j(aten.sin.default, x)
    g = j(aten.mul.Tensor, t, j(aten.cos.default, x))
    flat = j(aten.expand.default, j(aten.sum.default, t), [twice])
    joint, keywords = j.done([y], [None, j(aten.mul.Tensor, g, j(aten.sum.default, flat))])
    halves = cut_at(joint, keywords, "mul")
    assert saved_names(halves.forward, 1) == ["primals_2", "primals_1", "mul"]
    assert names(placeholders(halves.backward)) == ["primals_1", "mul", "primals_2", "tangents_1"]
    assert names(halves.numbers) == ["primals_1", "mul"]


def test_the_symbols_of_saved_sizes_are_defined():
    """The backward takes a tensor of s0 rows and no number; a compiler must find s0 among its inputs all the same."""
    j, _, x, t = symbolic_joint()
    joint, keywords = j.done([j(aten.sin.default, x)], [None, j(aten.mul.Tensor, t, j(aten.cos.default, x))])
    halves = split(index_of(joint, keywords), [])
    assert names(placeholders(halves.backward)) == ["primals_1", "primals_2", "tangents_1"]


def test_estimating_symbolic_sizes_adds_no_guard():
    j, _, x, t = symbolic_joint()
    joint, keywords = j.done([j(aten.sin.default, x)], [None, j(aten.mul.Tensor, t, j(aten.cos.default, x))])
    index = index_of(joint, keywords)
    assert index.bytes_of(index.number[node(joint, "cos")]) == 6 * 4 * 4
    assert not j.mode.shape_env.guards


def test_names_of_the_backwards_other_inputs():
    """PyTorch's functional random numbers give the backward a seed of its own, after the tangents."""
    graph = fx.Graph()
    x, t = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    graph.placeholder("fwd_seed_1")
    seed = graph.placeholder("bwd_seed_1")
    y = graph.call_function(aten.sin.default, (x,))
    graph.output([y, graph.call_function(aten.mul.Tensor, (t, seed))])
    halves = split(JointIndex(fx.GraphModule({}, graph), 1), [])
    assert names(placeholders(halves.forward)) == ["primals_1", "fwd_seed_1"]
    assert names(placeholders(halves.backward)) == ["tangents_1", "bwd_seed_1"]
