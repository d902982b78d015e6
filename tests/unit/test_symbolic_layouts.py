"""Layouts told by rules are those of FakeTensor's kernels, for symbolic sizes; and no rule asks what makes a guard."""

import pytest
import torch

from foregrad._torch.fakes import FakeTensorMode, new_fake
from foregrad._torch.symbols import SymbolTable, is_product_of_sizes
from foregrad.graph.meta import TensorSpec, contiguous_strides
from foregrad.tracing.kernels.layouts import _OF_ONE, _VIEWS, RULES, result_layout, view_layout

aten = torch.ops.aten
CPU = torch.device("cpu")
CONTIGUOUS = torch.contiguous_format


class Sizes:
    """Fakes of symbolic sizes: a text gives each size, a letter for a symbol."""

    def __init__(self):
        self.table = SymbolTable()
        self.mode = FakeTensorMode(shape_env=self.table.env)
        self.known = {n: self.table.symbol(v, n, n) for n, v in {"a": 4, "b": 6, "c": 5}.items()}

    def size(self, text):
        return self.known.get(text) or eval(str(text), dict(self.known))

    def sizes(self, texts):
        return [self.size(text) for text in texts]

    def fake(self, *shape, stride=None):
        shape = tuple(self.sizes(shape))
        stride = contiguous_strides(shape) if stride is None else tuple(self.sizes(stride))
        return new_fake(self.mode, shape, stride, torch.float32, CPU)


STRIDED = ([2, 1], [1, 0], [1, 2], False, [0, 0], 2)
# Makes the arguments from `Sizes`.
CALLS = [
    (aten.relu.default, lambda s: [s.fake("a", 3)]),
    (aten.add.Tensor, lambda s: [s.fake("a", "b"), s.fake("a", "b")]),
    (aten.mul.Scalar, lambda s: [s.fake("a", 3), 2.0]),
    (aten.threshold_backward.default, lambda s: [s.fake("a", 3), s.fake("a", 3), 0]),
    (aten._softmax.default, lambda s: [s.fake("a", 3, "b"), -1, False]),
    (aten._log_softmax_backward_data.default, lambda s: [s.fake("a", 3), s.fake("a", 3), -1, torch.float32]),
    (aten.mm.default, lambda s: [s.fake("a", 3), s.fake(3, 5)]),
    (aten.mm.default, lambda s: [s.fake("a*b", "c", stride=(1, "a*b")), s.fake("c", 5)]),
    (aten.addmm.default, lambda s: [s.fake(5), s.fake("a*8", 3), s.fake(3, 5)]),
    (aten.bmm.default, lambda s: [s.fake("a*2", 3, "b"), s.fake("a*2", "b", 7)]),
    (aten.native_layer_norm.default, lambda s: [s.fake("a", 3, 8), [8], s.fake(8), s.fake(8), 1e-5]),
    (aten.native_batch_norm.default, lambda s: [s.fake("a", 3, 8), s.fake(3), s.fake(3), None, None, True, 0.1, 1e-5]),
    (aten.convolution.default, lambda s: [s.fake("a", 6, 8, 8), s.fake(4, 3, 3, 3), s.fake(4), *STRIDED]),
    (
        aten.convolution_backward.default,
        lambda s: [s.fake("a", 4, 4, 4), s.fake("a", 6, 8, 8), s.fake(4, 3, 3, 3), [4], *STRIDED, [True, False, True]],
    ),
    (aten.clone.default, lambda s: [s.fake("a", "b")]),
    (aten.clone.default, lambda s: [s.fake("a", "b", stride=(1, "a")), CONTIGUOUS]),
    (aten.sum.dim_IntList, lambda s: [s.fake("a", 3, "b"), [0]]),
    (aten.mean.dim, lambda s: [s.fake("a", 3, "b"), [0]]),
    (aten.sum.dim_IntList, lambda s: [s.fake("a", 3, "b"), [0, -1], True]),
    (aten.detach.default, lambda s: [s.fake("a", 3, stride=(1, "a"))]),
    (aten.alias.default, lambda s: [s.fake("a", 3)]),
    (aten.t.default, lambda s: [s.fake("a", "b")]),
    (aten.transpose.int, lambda s: [s.fake("a", 3, "b"), -1, 0]),
    (aten.permute.default, lambda s: [s.fake("a", 3, "b"), [2, 0, -2]]),
    (aten.unsqueeze.default, lambda s: [s.fake("a", "b"), 0]),
    (aten.unsqueeze.default, lambda s: [s.fake("a", "b"), 1]),
    (aten.unsqueeze.default, lambda s: [s.fake("a", "b"), -1]),
    (aten.expand.default, lambda s: [s.fake("a", 1, 3), s.sizes(["b", "a", "c", 3])]),
    (aten.expand.default, lambda s: [s.fake("a", 3), s.sizes([2, "a", -1])]),
    (aten.view.default, lambda s: [s.fake("a", 6, 4), [-1, 4]]),
    (aten.view.default, lambda s: [s.fake("a", 6, 4), s.sizes(["a", 6, 2, 2])]),
    (aten.view.default, lambda s: [s.fake("a", "b", 4), s.sizes(["a*b", 4])]),
    (aten.view.default, lambda s: [s.fake("a*b", 4), s.sizes(["a", "b", -1])]),
    (aten._unsafe_view.default, lambda s: [s.fake("a*2", "b", 4), s.sizes(["a", 2, "b", 4])]),
]
# What no rule may answer: the answer is not one for all sizes, or the kernel raises.
UNANSWERED = [
    (aten.add.Tensor, lambda s: [s.fake("a", 3), s.fake("b", 3)]),
    (aten.mm.default, lambda s: [s.fake("a", "b"), s.fake("c", 3)]),
    (aten.relu.default, lambda s: [s.fake("a//2", 3)]),
    (aten.relu.default, lambda s: [s.fake("a - 1", 3)]),
    (aten.expand.default, lambda s: [s.fake("a", 3), s.sizes(["b", 3])]),
    (aten.view.default, lambda s: [s.fake("a", "b"), [-1, 4]]),
    (aten.view.default, lambda s: [s.fake("a", "b"), s.sizes(["c", "c"])]),
    (aten.view.default, lambda s: [s.fake("a", "b", stride=(1, "a")), [-1]]),
    (aten.view.default, lambda s: [s.fake("a", 3, 3), [-1, 2]]),
    (aten.transpose.int, lambda s: [s.fake("a", 3), 0, 2]),
    (aten.permute.default, lambda s: [s.fake("a", 3), [0, 0]]),
    (aten.sum.dim_IntList, lambda s: [s.fake("a", 3), [0, 0]]),
    (aten.clone.default, lambda s: [s.fake("a", 3), torch.channels_last]),
]


def names_of(calls):
    return [f"{op}-{number}" for number, (op, _) in enumerate(calls)]


def told(op, args):
    """What the rules say; `aten.clone` has its format as a keyword."""
    args, kwargs = split(op, args)
    specs = [TensorSpec.of(a) for a in args if isinstance(a, torch.Tensor)]
    return view_layout(op, specs[0], tuple(args), kwargs) or result_layout(op, specs, tuple(args), kwargs)


def split(op, args):
    return (args[:1], {"memory_format": args[1]}) if op is aten.clone.default and len(args) > 1 else (args, {})


def text(specs):
    specs = specs if isinstance(specs, tuple) else (specs,)
    return [s and (str(s.shape), str(s.stride), s.dtype, str(s.device), str(s.offset)) for s in specs]


@pytest.mark.parametrize("op, make", CALLS, ids=names_of(CALLS))
def test_rules_say_what_the_kernels_do(op, make):
    sizes = Sizes()
    args = make(sizes)
    found = told(op, args)
    assert found is not None and sizes.table.guards() == []
    args, kwargs = split(op, args)
    with sizes.mode:
        out = op(*args, **kwargs)
    assert text(found) == text(
        TensorSpec.of(out)
        if isinstance(out, torch.Tensor)
        else tuple(None if o is None else TensorSpec.of(o) for o in out)
    )


@pytest.mark.parametrize("op, make", UNANSWERED, ids=names_of(UNANSWERED))
def test_rules_leave_alone_what_depends_on_the_sizes(op, make):
    sizes = Sizes()
    args = make(sizes)
    before = len(sizes.table.guards())
    assert told(op, args) is None
    assert len(sizes.table.guards()) == before


def test_every_rule_is_held_against_its_kernel():
    named = {op for op, _ in CALLS}
    assert set(_OF_ONE) | set(_VIEWS) <= named
    assert named <= set(_OF_ONE) | set(_VIEWS) | set(RULES)


def test_products_of_sizes_are_two_or_more():
    sizes = Sizes()
    a, b = sizes.sizes(["a", "b"])
    assert all(map(is_product_of_sizes, (a, a * b, 3 * a, a * a * 2)))
    assert not any(map(is_product_of_sizes, (a + b, a - 1, a // 2, -a, a % 2, a / 2)))
    low = sizes.table.env.create_unbacked_symint()
    assert not is_product_of_sizes(low)
    assert a == 4
    assert not is_product_of_sizes(a)  # it is that number now
