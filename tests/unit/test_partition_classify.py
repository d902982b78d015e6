from __future__ import annotations

import math
import operator

import pytest
import torch
from torch import fx

from foregrad.partitioners.classify import Kind, classify

aten, prims = torch.ops.aten, torch.ops.prims


def call(target, *args, **kwargs):
    graph = fx.Graph()
    return graph.call_function(target, args, kwargs)


@pytest.mark.parametrize(
    ("kind", "targets"),
    [
        (Kind.VIEW, [aten.view.default, aten.t.default, aten.transpose.int, aten.expand.default, aten.detach.default,
                     aten.split.Tensor, aten.unbind.int, aten.slice.Tensor, aten.as_strided.default,
                     aten._unsafe_view.default, aten.view_as_real.default, aten._conj.default, aten.view.dtype]),
        (Kind.CHEAP, [aten.add.Tensor, aten.gelu.default, aten._to_copy.default, aten.where.self, aten.clone.default,
                      aten.sum.dim_IntList, aten.threshold_backward.default, aten.index.Tensor, aten.reshape.default,
                      prims.convert_element_type.default]),
        (Kind.FACTORY, [aten.full.default, aten.zeros.default, aten.arange.default, aten.zeros_like.default]),
        (Kind.HEAVY, [aten.mm.default, aten.convolution.default, aten.sort.default, aten.native_layer_norm.default,
                      aten.scatter.src, aten.cat.default, aten.cumsum.default, aten.empty.memory_format,
                      aten.view_copy.default, aten._local_scalar_dense.default]),
        (Kind.RANDOM, [aten.native_dropout.default, aten.rand.default, aten.bernoulli.p, aten.randn_like.default,
                       aten.multinomial.default]),
        (Kind.EFFECT, [aten.add_.Tensor, aten.copy_.default, aten._assert_async.msg, aten._assert_scalar.default,
                       aten.sym_constrain_range.default, operator.setitem, operator.iadd, print]),
        (Kind.NUMBER, [operator.add, operator.floordiv, operator.and_, min, math.floor, torch.sym_max, torch.sym_float,
                       aten.sym_size.int, aten.sym_numel.default]),
        (Kind.ITEM, [operator.getitem]),
    ],
    ids=lambda value: value.name if isinstance(value, Kind) else "",
)  # fmt: skip
def test_kinds(kind, targets):
    found = {str(target): classify(call(target)).kind.name for target in targets}
    assert found == dict.fromkeys(found, kind.name)


def unknown(x):
    return x


def test_an_unknown_function_runs_once():
    assert classify(call(unknown)).kind is Kind.EFFECT


def test_arithmetic_of_tensors_is_not_of_sizes():
    node = call(operator.add, 1, 2)
    node.meta["val"] = torch.empty(3, device="meta")
    assert classify(node).kind is Kind.CHEAP


def test_inputs_and_attributes():
    graph = fx.Graph()
    assert classify(graph.placeholder("primals_1")).kind is Kind.INPUT
    graph.owning_module = fx.GraphModule({"c": torch.ones(1)}, fx.Graph())
    assert classify(graph.create_node("get_attr", "c")).kind is Kind.CONSTANT


@pytest.mark.parametrize("op", [aten._scaled_dot_product_flash_attention_for_cpu.default,
                                aten._scaled_dot_product_efficient_attention.default])  # fmt: skip
def test_attention_is_random_only_with_dropout(op):
    at = [argument.name for argument in op._schema.arguments].index("dropout_p")
    given = [None] * at
    assert classify(call(op, *given)).kind is Kind.HEAVY
    assert classify(call(op, *given, 0.0)).kind is Kind.HEAVY
    assert classify(call(op, *given, 0.5)).kind is Kind.RANDOM
    assert classify(call(op, *given, dropout_p=0.5)).kind is Kind.RANDOM
    assert classify(call(op, *given, dropout_p=0.0)).kind is Kind.HEAVY


def test_a_custom_operators_tags_are_read():
    with torch.library._scoped_library("foregrad_test_classify", "FRAGMENT") as library:
        library.define("wiggle(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
        library.define("scale(Tensor x) -> Tensor", tags=torch.Tag.pointwise)
        library.define("solve(Tensor x) -> Tensor")
        library.define("peek(Tensor(a) x) -> Tensor(a)")
        library.define("write(Tensor(a!) x) -> ()")
        space = torch.ops.foregrad_test_classify
        kinds = [
            classify(call(getattr(space, name).default)).kind for name in ("wiggle", "scale", "solve", "peek", "write")
        ]
        assert kinds == [Kind.RANDOM, Kind.CHEAP, Kind.HEAVY, Kind.VIEW, Kind.EFFECT]


def wrapper_over(*targets):
    """A higher-order operator called with a graph of these operators."""
    body = fx.Graph()
    x = body.placeholder("x")
    for target in targets:
        x = body.call_function(target, (x,))
    body.output(x)
    root = torch.nn.Module()
    root.body = fx.GraphModule({}, body)
    graph = fx.Graph()
    attribute = graph.create_node("get_attr", "body")
    graph.output(graph.call_function(torch.ops.higher_order.cond, (True, attribute, attribute, ())))
    return fx.GraphModule(root, graph).graph.output_node().args[0]


def test_a_higher_order_operator_is_what_its_graphs_are():
    assert classify(wrapper_over(aten.sin.default)).kind is Kind.HEAVY
    assert classify(wrapper_over(aten.sin.default, aten.rand_like.default)).kind is Kind.RANDOM
    assert classify(wrapper_over(aten.sin_.default)).kind is Kind.EFFECT


def test_what_fuses():
    assert classify(call(aten.add.Tensor)).fuses
    assert classify(call(aten.native_dropout.default)).fuses
    assert not classify(call(aten.mm.default)).fuses
    cat = classify(call(aten.cat.default))
    assert cat.fuses_inputs
    assert not cat.fuses
