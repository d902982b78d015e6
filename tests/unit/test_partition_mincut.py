from __future__ import annotations

import itertools
import operator
import random

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from foregrad.errors import PartitionError
from foregrad.partitioners import JointIndex, fused_partition, min_cut_rematerialization_partition
from foregrad.partitioners.classify import Kind
from foregrad.partitioners.cut import NEVER, cheapest_residuals, required_by_backward
from foregrad.partitioners.index import merge_equal
from foregrad.partitioners.mincut import may_recompute
from tests.unit.test_partition_default import RECOMPUTE, SAVE, checkpointed
from tests.unit.test_partition_split import symbolic_joint, write
from tests.unit.test_partition_support import Joint, assert_valid, ops, saved_names, small_joint

aten = torch.ops.aten


def partition(joint, keywords, **more):
    """(forward, backward, saved names), the halves checked"""
    forward, backward = min_cut_rematerialization_partition(joint, (), **keywords, **more)
    assert_valid(joint, forward, backward, keywords["num_fwd_outputs"])
    return forward, backward, saved_names(forward, keywords["num_fwd_outputs"])


def chain(j, x, *targets):
    for target in targets:
        x = j(target, x)
    return x


def index_of(joint, keywords):
    return JointIndex(joint, keywords["num_fwd_outputs"])


def allowed_names(joint, keywords, wish=None):
    index = index_of(joint, keywords)
    return {index.nodes[i].name for i, bit in enumerate(may_recompute(index, wish)) if bit}


# ------------------------------------------------------------------------------------------------------ what is chosen


@pytest.mark.parametrize("part", [min_cut_rematerialization_partition, fused_partition])
def test_a_fused_forward_saves_what_it_has_in_memory(part):
    """The difference is fewer bytes than the product and the mean, and would be written only to be saved."""
    j = Joint()
    x, t = j.primal(64, 64), j.tangent(64, 64)
    product = j(aten.mm.default, x, x)
    mean = j(aten.mean.dim, product, [0], True)
    y = j(aten.sin.default, j(aten.sub.Tensor, product, mean))
    g = j(aten.mul.Tensor, t, j(aten.cos.default, j(aten.sub.Tensor, product, mean)))
    joint, keywords = j.done([y], [g])
    forward, backward = part(joint, (), **keywords)
    assert_valid(joint, forward, backward, keywords["num_fwd_outputs"])
    saved = saved_names(forward, keywords["num_fwd_outputs"])
    fused = part is fused_partition
    assert saved == ([product.name, mean.name] if fused else ["sub"])
    assert ("sub" in " ".join(ops(backward))) is fused


def test_pointwise_operators_run_again_from_an_input():
    j = Joint()
    x, t = j.primal(8), j.tangent(8)
    a = j(aten.sin.default, x)
    b = j(aten.exp.default, a)
    y = j(aten.sum.default, b)
    g = j(aten.mul.Tensor, j(aten.mul.Tensor, t, b), j(aten.cos.default, x))
    joint, keywords = j.done([y], [g])
    _, backward, saved = partition(joint, keywords)
    assert saved == ["primals_1"]
    assert ops(backward) == ["sin", "exp", "mul", "cos", "mul_1"]


def test_matrix_products_never_run_again():
    _, backward, saved = partition(*small_joint())
    assert saved == ["primals_1", "primals_2", "mm"]
    assert "mm" not in ops(backward)


def test_the_smaller_of_two_is_saved():
    """A mask of bytes is saved instead of the floats that it is computed from."""
    j = Joint()
    x, w, t = j.primal(4, 4), j.primal(4, 4), j.tangent(4, 4)
    mm = j(aten.mm.default, x, w)
    y = j(aten.relu.default, mm)
    mask = j(aten.gt.Scalar, mm, 0)
    z = j(aten.mm.default, y, w)
    joint, keywords = j.done([z], [j(aten.where.self, mask, t, j(aten.zeros_like.default, t)), None])
    forward, _, saved = partition(joint, keywords)
    assert saved == ["gt"]
    assert ops(forward) == ["mm", "gt", "relu", "mm_1"]


def test_a_cut_across_several_branches():
    """Three results of one value: the value is saved, not the three."""
    j = Joint()
    x, w, t = j.primal(4, 4), j.primal(4, 4), j.tangent(4, 4)
    mm = j(aten.mm.default, x, w)
    parts = [j(op.default, mm) for op in (aten.sin, aten.cos, aten.exp)]
    y = j(aten.sum.default, j(aten.add.Tensor, j(aten.add.Tensor, parts[0], parts[1]), parts[2]))
    g = t
    for part in parts:
        g = j(aten.mul.Tensor, g, part)
    joint, keywords = j.done([y], [g, None])
    assert partition(joint, keywords)[2] == ["mm"]


def test_two_small_values_are_saved_for_a_large_one():
    j = Joint()
    x, w, t = j.primal(64, 1), j.primal(1, 64), j.tangent(64, 64)
    a = j(aten.mm.default, x, j(aten.ones.default, [1, 1]))
    b = j(aten.mm.default, j(aten.ones.default, [1, 1]), w)
    both = j(aten.mul.Tensor, a, b)
    y = j(aten.sum.default, j(aten.sin.default, both))
    g = j(aten.mul.Tensor, t, j(aten.cos.default, both))
    joint, keywords = j.done([y], [j(aten.sum.dim_IntList, g, [1], True), None])
    assert partition(joint, keywords)[2] == ["mm", "mm_1"]


def test_of_equal_bytes_the_value_in_memory_is_saved():
    """relu's result would be fused away, and the product is written anyway."""
    j = Joint()
    x, w, t = j.primal(4, 4), j.primal(4, 4), j.tangent(4, 4)
    mm = j(aten.mm.default, x, w)
    a = j(aten.relu.default, mm)
    y = j(aten.sum.default, j(aten.sin.default, a))
    g = j(aten.threshold_backward.default, j(aten.mul.Tensor, t, j(aten.cos.default, a)), a, 0)
    joint, keywords = j.done([y], [g, None])
    assert partition(joint, keywords)[2] == ["mm"]


def test_inputs_have_a_price_when_others_are_said_to_be_static():
    """An input that is no parameter dies with its caller unless it is saved; then the smaller mask is better."""
    j = Joint()
    w, x, t = j.primal(4, 4), j.primal(4, 4), j.tangent(4, 4)
    mask = j(aten.gt.Scalar, x, 0)
    y = j(aten.mm.default, j(aten.mul.Tensor, x, mask), w)
    g = j(aten.mul.Tensor, j(aten.mm.default, t, w), mask)
    joint, keywords = j.done([y], [None, g])
    assert partition(joint, keywords)[2] == ["primals_1", "primals_2"]
    assert partition(joint, keywords, static_lifetime_input_indices=[0])[2] == ["primals_1", "gt"]


def test_more_than_two_to_the_fortieth_bytes():
    j = Joint()
    side = 2**20 + 1
    x, w, t = j.primal(side, side), j.primal(side, side), j.tangent(side, side)
    mm = j(aten.mm.default, x, w)
    a = j(aten.sin.default, mm)
    b = j(aten.exp.default, mm)
    y = j(aten.sum.default, j(aten.mul.Tensor, a, b))
    g = j(aten.mul.Tensor, j(aten.mul.Tensor, t, a), b)
    joint, keywords = j.done([y], [g, None])
    forward, _ = min_cut_rematerialization_partition(joint, (), **keywords)
    assert saved_names(forward, 1) == ["mm"]


def test_called_with_positions_as_pytorch_does():
    joint, keywords = small_joint()
    forward, _ = min_cut_rematerialization_partition(joint, [], "nvfuser", static_lifetime_input_indices=[], **keywords)
    assert saved_names(forward, 1) == ["primals_1", "primals_2", "mm"]


def test_symbolic_floats_are_not_saved():
    """Compilers take no symbolic floats as inputs; the integer that it is computed from is saved."""
    j, _, x, t = symbolic_joint()
    h = j(aten.mm.default, x, j(aten.ones.default, [4, 4]))
    rows = j(aten.sym_size.int, h, 0)
    scale = j(torch.sym_float, rows)
    joint, keywords = j.done([j(aten.mul.Tensor, h, scale)], [None, j(aten.mul.Tensor, t, scale)])
    _, backward, saved = partition(joint, keywords)
    assert saved[-1] == "sym_size"
    assert "sym_float" in ops(backward)


# --------------------------------------------------------------------------------------- which operators may run again


def test_reductions_are_saved():
    j = Joint()
    x, t = j.primal(4, 64), j.tangent(4, 64)
    total = j(aten.sum.dim_IntList, x, [1], True)
    joint, keywords = j.done([j(aten.sin.default, total)], [j(aten.mul.Tensor, t, total)])
    assert partition(joint, keywords)[2] == ["sum_1"]


def test_what_a_heavy_operator_of_the_backward_reads_is_saved():
    """It is written to memory there: computing it again would not be free."""
    j = Joint()
    x, w, t = j.primal(4, 4), j.primal(4, 4), j.tangent(4, 4)
    a = j(aten.sin.default, x)
    y = j(aten.mm.default, a, w)
    joint, keywords = j.done([y], [None, j(aten.mm.default, j(aten.t.default, a), t)])
    assert partition(joint, keywords)[2] == ["sin"]


def test_what_the_caller_gets_is_saved():
    j = Joint()
    x, t = j.primal(4), j.tangent(4)
    y = j(aten.exp.default, x)
    joint, keywords = j.done([y], [j(aten.mul.Tensor, t, y)])
    assert partition(joint, keywords)[2] == ["exp"]


def test_a_row_of_residual_additions_does_not_run_again_from_the_start():
    """x1 = x + f(x), x2 = x1 + f(x1), ...: each sum is saved although it could be computed from all earlier f's."""
    j = Joint()
    x, w, t = j.primal(4, 4), j.primal(4, 4), j.tangent(4, 4)
    sums = []
    for _ in range(4):
        x = j(aten.add.Tensor, x, j(aten.mm.default, j(aten.tanh.default, x), w))
        sums.append(x)
    y = j(aten.sum.default, x)
    g = t
    for value in reversed(sums):
        g = j(aten.mul.Tensor, g, value)
    joint, keywords = j.done([y], [g, None])
    _, backward, saved = partition(joint, keywords)
    assert saved == ["primals_1", "mm", "add_1", "add_2", "add_3"]
    assert [n for n in ops(backward) if n.startswith("add")] == ["add"]


def test_long_rows_are_broken():
    j = Joint()
    x, t = j.primal(4), j.tangent(4)
    values = [x]
    for _ in range(350):
        values.append(j(aten.sin.default, values[-1]))
    y = j(aten.sum.default, values[-1])
    joint, keywords = j.done([y], [j(aten.mul.Tensor, t, values[-1])])
    _, backward, saved = partition(joint, keywords)
    assert len(saved) == 1, "the last break suffices for one use"
    assert 0 < len(ops(backward)) <= 102
    allowed = allowed_names(joint, keywords)
    runs = [len(list(group)) for bit, group in itertools.groupby(v.name in allowed for v in values[1:]) if bit]
    assert max(runs) <= 101
    assert len(runs) >= 3


def test_random_operators_and_what_they_need():
    j = Joint()
    x, t = j.primal(8), j.tangent(8)
    noise = j(aten.rand_like.default, j(aten.exp.default, x))
    y = j(aten.sum.default, j(aten.sin.default, noise))
    joint, keywords = j.done([y], [j(aten.mul.Tensor, t, j(aten.cos.default, noise))])
    _, backward, saved = partition(joint, keywords)
    assert saved == ["rand_like"]
    assert ops(backward) == ["cos", "mul"]


def test_nothing_is_computed_again_from_an_input_that_is_overwritten():
    """Saving the input itself would not help: the backward would find the new values."""
    j = Joint()
    count, w, t = j.primal(8), j.primal(8), j.tangent(8)
    a = j(aten.exp.default, j(aten.view.default, count, [8]))
    y = j(aten.sum.default, j(aten.mul.Tensor, a, w))
    g = j(aten.mul.Tensor, t, a)
    write(j, count, j(aten.add.Tensor, count, 1), "must_be_in_forward")
    joint, keywords = j.done([y], [None, g])
    forward, _ = min_cut_rematerialization_partition(joint, (), **keywords)
    assert saved_names(forward, 1) == ["exp"]


class UpdatedSlot:
    """As in PyTorch's captures: what an output is, when it is the new value of an input."""

    def __init__(self, of):
        self.mutated_input = of


@pytest.mark.parametrize("how", ["description", "mark"])
def test_nor_from_one_that_the_caller_overwrites(how):
    j = Joint()
    count, w, t = j.primal(8), j.primal(8), j.tangent(8)
    a = j(aten.exp.default, count)
    y = j(aten.sum.default, j(aten.mul.Tensor, a, w))
    joint, keywords = j.done([j(aten.add.Tensor, count, 1), y], [None, j(aten.mul.Tensor, t, a)])
    assert partition(joint, keywords)[2] == ["primals_1"]
    if how == "mark":
        count.meta["updated"] = True
    else:
        count.meta["desc"] = "the counter"
        joint.graph.output_node().meta["desc"] = [UpdatedSlot("the counter"), "y", None, "dw"]
    assert partition(joint, keywords)[2] == ["exp"]


# ---------------------------------------------------------------------------------------------------------------- tags


def test_a_tagged_region_is_computed_again():
    _, backward, saved = partition(*checkpointed())
    assert saved == ["primals_1", "primals_2", "tanh"]
    assert [n for n in ops(backward) if n in {"mm", "sin", "exp"}] == ["mm", "sin", "exp"]


@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE])
def test_what_a_policy_saves_is_saved(policy):
    assert "exp" in partition(*checkpointed(second={"recompute": policy}))[2]


def test_between_two_regions_the_value_is_saved():
    assert "sin" in partition(*checkpointed(region=(1, 2)))[2]


def test_random_values_in_a_region_are_saved():
    assert partition(*checkpointed(middle=aten.rand_like.default))[2] == ["primals_1", "primals_2", "rand_like", "tanh"]


def test_a_view_tagged_to_be_saved():
    j = Joint()
    x, t = j.primal(4, 4), j.tangent(16)
    a = j(aten.sin.default, x)
    flat = j(aten.view.default, a, [16], meta=SAVE)
    y = j(aten.sum.default, flat)
    joint, keywords = j.done([y], [j(aten.view.default, j(aten.mul.Tensor, t, flat), [4, 4])])
    assert partition(joint, keywords)[2] == ["view"]


def test_a_region_needs_no_more_than_its_own_backward_does():
    """A tagged operator that no gradient needs makes nothing saved."""
    j = Joint()
    x, w, t = j.primal(4, 4), j.primal(4, 4), j.tangent(4, 4)
    mm = j(aten.mm.default, x, w)
    y = j(aten.neg.default, mm, meta=RECOMPUTE)
    joint, keywords = j.done([y], [j(aten.neg.default, t), None])
    assert partition(joint, keywords)[2] == []


# --------------------------------------------------------------------------------------------------------- equal values


def test_equal_casts_are_saved_once():
    j = Joint()
    x, w, t = j.primal(4, 4), j.primal(4, 4), j.tangent(4, 4)
    h = j(aten.mm.default, x, w)
    casts = [j(aten._to_copy.default, h, dtype=torch.float64) for _ in range(3)]
    v = j(aten.ones.default, [4, 4], dtype=torch.float64)
    products = [j(aten.mm.default, cast, v) for cast in casts]
    y = j(aten.add.Tensor, j(aten.add.Tensor, products[0], products[1]), products[2])
    wide = j(aten._to_copy.default, t, dtype=torch.float64)
    grads = [j(aten.mm.default, cast, wide) for cast in casts]
    joint, keywords = j.done([y], [j(aten.add.Tensor, j(aten.add.Tensor, grads[0], grads[1]), grads[2]), None])
    _, backward, saved = partition(joint, keywords)
    assert saved == ["_to_copy"]
    assert [n for n in ops(backward) if n.startswith("mm")] == ["mm_4"], "equal products of the backward are one, too"


def merged(*pairs):
    """How many of the operators (target, args, kwargs), applied to one input, are found equal."""
    j = Joint()
    x, t = j.primal(2, 2), j.tangent(2, 2)
    for target, args, kwargs in pairs:
        t = j(aten.mul.Tensor, t, j(target, x, *args, **kwargs))
    joint, keywords = j.done([j(aten.sum.default, x)], [t])
    return merge_equal(index_of(joint, keywords))


def test_what_is_equal():
    add = aten.add.Tensor
    assert merged((add, (2,), {}), (add, (2,), {})) == 1
    assert merged((add, (2,), {}), (add, (2.0,), {})) == 0, "these have other dtypes for integers"
    assert merged((add, (1,), {}), (add, (True,), {})) == 0
    assert merged((add, (0.0,), {}), (add, (-0.0,), {})) == 0
    assert merged((add, (2,), {"alpha": 1}), (add, (2,), {"alpha": 2})) == 0
    assert merged((aten.sum.dim_IntList, ([0],), {}), (aten.sum.dim_IntList, ([0],), {})) == 1
    assert merged((aten.sum.dim_IntList, ([0],), {}), (aten.sum.dim_IntList, ([1],), {})) == 0


def test_random_values_are_never_equal():
    assert merged((aten.rand_like.default, (), {}), (aten.rand_like.default, (), {})) == 0
    assert merged((aten.empty_like.default, (), {}), (aten.empty_like.default, (), {})) == 0


def test_equal_outputs_stay_two_tensors():
    j = Joint()
    x, t = j.primal(4), j.tangent(4)
    a, b = j(aten.exp.default, x), j(aten.exp.default, x)
    g, h = j(aten.neg.default, t), j(aten.neg.default, t)
    joint, keywords = j.done([a, b], [g, j(aten.view.default, h, [4])])
    forward, backward, _ = partition(joint, keywords)
    x, t = torch.randn(4), torch.randn(4)
    outputs = [*forward(x), *backward(t)]
    assert len({o.untyped_storage().data_ptr() for o in outputs}) == 4


def test_a_wish_keeps_equal_values_apart():
    j = Joint()
    x, t = j.primal(4), j.tangent(4)
    a, b = j(aten.exp.default, x, meta=SAVE), j(aten.exp.default, x, meta=RECOMPUTE)
    joint, keywords = j.done([j(aten.add.Tensor, a, b)], [j(aten.mul.Tensor, j(aten.mul.Tensor, t, a), b)])
    assert partition(joint, keywords)[2] == ["primals_1", "exp"]


# ---------------------------------------------------------------------------------------------------- prices in general


def random_joint(seed, size=9):
    """Up to `size` operators, each of one or two earlier values; some of the values are read by the backward."""
    rng = random.Random(seed)
    j = Joint()
    values = [j.primal(2), j.primal(2)]
    t = j.tangent(2)
    for _ in range(size):
        a, b = rng.choice(values), rng.choice(values)
        values.append(j(aten.mul.Tensor, a, b) if rng.random() < 0.6 else j(aten.sin.default, a))
    for value in rng.sample(values[2:], 3):
        t = j(aten.mul.Tensor, t, value)
    return j.done([values[-1]], [t]), rng


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_is_cheaper(seed):
    """All choices are tried: what is saved and recomputed for the backward costs at least as much."""
    (joint, keywords), rng = random_joint(seed)
    index = index_of(joint, keywords)
    price = (1, 2, 3, 5, 8, 2**45)
    save = [rng.choice((*price, NEVER)) for _ in index.nodes]
    redo = [rng.choice((0, 0, *price, NEVER)) for _ in index.nodes]
    for i in index.inputs:
        save[i], redo[i] = rng.choice((0, 0, 4)), NEVER
    required = required_by_backward(index)

    def cost(chosen):
        total, seen, stack = sum(save[i] for i in chosen), set(), list(required)
        while stack:
            i = stack.pop()
            if i in chosen or i in seen:
                continue
            seen.add(i)
            if index.kinds[i] is Kind.INPUT:
                total += save[i]
                continue
            total += redo[i]
            stack += index.operands[i]
        return total

    candidates = [i for i in range(len(index)) if not index.needs_tangent[i]]
    choices = itertools.chain.from_iterable(itertools.combinations(candidates, k) for k in range(len(candidates) + 1))
    least = min(cost(set(choice)) for choice in choices)
    if least >= NEVER:
        with pytest.raises(PartitionError, match="no partition exists"):
            cheapest_residuals(index, save, redo, required)
    else:
        chosen = cheapest_residuals(index, save, redo, required)
        assert cost(set(chosen)) == least
        assert chosen == sorted(chosen)


def test_an_impossible_wish_is_explained():
    j = Joint()
    x, t = j.primal(4), j.tangent(4)
    pair = j(aten.native_dropout.default, x, 0.5, True)
    y = j(operator.getitem, pair, 0)
    z = j(aten.sin.default, y)
    joint, keywords = j.done([z], [j(aten.mul.Tensor, t, z)])
    index = index_of(joint, keywords)
    save, redo = [NEVER] * len(index), [0] * len(index)
    redo[index.number[pair]] = NEVER
    with pytest.raises(PartitionError) as error:
        cheapest_residuals(index, save, redo, required_by_backward(index))
    lines = str(error.value).splitlines()
    assert lines[0] == "no partition exists:"
    assert lines[1].strip().startswith("native_dropout (aten.native_dropout.default) draws random numbers")
    assert lines[2].strip().startswith("getitem (<built-in function getitem>), which must be computed again")
    assert lines[3].strip().startswith("sin (aten.sin.default), which must be computed again")
    assert lines[4].strip() == "the backward needs that value"
