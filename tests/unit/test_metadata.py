"""Remembered layouts are those that FakeTensor's kernels give, for every operator of PyTorch's own database."""

from __future__ import annotations

import contextlib
import itertools
import os
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import foregrad
from foregrad._torch.ops import has_composite_implicit_kernel
from foregrad._torch.stand_ins import FakeRuns, is_stand_in, new_stand_in, new_stand_in_over, set_layout
from foregrad._torch.tensors import share_memory
from foregrad.graph.meta import TensorSpec
from foregrad.tracing.kernels import metadata
from foregrad.tracing.kernels.layouts import RULES, layout_of
from foregrad.tracing.kernels.metadata import Metadata, forget_all, is_cacheable
from foregrad.tracing.tape.opinfo import op_info
from tests.parity.cases import ops

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _empty_cache():
    forget_all()
    yield
    forget_all()


def known(fake: torch.Tensor) -> Any:
    return types.SimpleNamespace(spec=TensorSpec.of(fake))


class Compared(TorchDispatchMode):
    """Runs each operator in FakeTensor's way and twice in ours, and compares. `count` says how often."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode = mode
        self.runs = FakeRuns(mode, is_symbolic=False)
        self.metadata = Metadata(known, self.kernels)
        self.wrong: list[str] = []
        self.count = 0
        self.asked = 0

    def kernels(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.asked += 1
        return self.expected(func, args, kwargs)

    def expected(self, func: Any, args: Any, kwargs: Any) -> Any:
        return self.runs.run(lambda func, args, kwargs: self.mode.dispatch(func, (), args, kwargs), func, args, kwargs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten" or has_composite_implicit_kernel(func) or not is_cacheable(op_info(func)):
            return self.expected(func, args, kwargs)
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        expected = self.expected(func, args, kwargs)
        for _ in range(2):
            found, specs = self.metadata.run(op_info(func), args, kwargs)
            if described(found, inputs) != described(expected, inputs):
                self.wrong.append(f"{func}{args}{kwargs}: {described(found, inputs)}, {described(expected, inputs)}")
            if specs is not None:
                stated = [s for s in tree_leaves(specs, is_leaf=lambda s: isinstance(s, TensorSpec)) if s is not None]
                made = [t for t in tree_leaves(found) if isinstance(t, torch.Tensor) and not is_one_of(t, inputs)]
                if [TensorSpec.of(t) for t in made] != stated:
                    self.wrong.append(f"{func}{args}{kwargs}: {stated}")
        self.count += 1
        return found


def is_one_of(tensor: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
    return any(tensor is t for t in tensors)


def described(value: Any, inputs: list[torch.Tensor]) -> list[Any]:
    """The layout of each result, and which arguments it is or shares memory with."""
    result: list[Any] = []
    for leaf in tree_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            result.append(leaf)
            continue
        assert is_stand_in(leaf)
        layout = (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.storage_offset())
        bits = (leaf.is_conj(), leaf.is_neg(), leaf.layout)
        relations = tuple((leaf is t, share_memory(leaf, t)) for t in inputs)
        result.append((layout, bits, relations))
    return result


def inside_of_memory(value: Any) -> Any:
    """A tensor like this one that does not start where its memory does."""
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_conj() and not value.is_neg():
        return torch.stack([value, value])[1]
    return value


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A stand-in of that layout."""
    made = new_stand_in(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.storage_offset())
    torch._C._set_conj(made, tensor.is_conj())
    torch._C._set_neg(made, tensor.is_neg())
    return made


def stand_ins(value: Any) -> Any:
    return tree_map(lambda t: stand_in(t) if isinstance(t, torch.Tensor) else t, value)


# Operators ask FakeTensor once for each of these, at a millisecond and more: a tenth of them is a fair sample.
_EVERY = 10
_SAMPLES = 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64], ids=str)
def test_results_from_the_cache_are_laid_out_as_the_kernels_results(dtype: torch.dtype) -> None:
    compared = 0
    for op in list(ops().values())[:: int(os.environ.get("FOREGRAD_TEST_EVERY", _EVERY))]:
        if dtype in op.supported_dtypes("cpu") and "jiterator" not in op.name:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                samples = list(itertools.islice(op.sample_inputs("cpu", dtype), _SAMPLES))
            for sample in samples:
                compared += compare(op, sample)
                compared += compare(op, sample.transform(inside_of_memory))
    assert compared > 100


def compare(op: Any, sample: Any) -> int:
    """How many operators inside of `op` were compared."""
    if any(t.layout is not torch.strided for t in tree_leaves(sample.input) if isinstance(t, torch.Tensor)):
        return 0
    mode = FakeTensorMode()
    args, kwargs = stand_ins((sample.input, *sample.args)), stand_ins(sample.kwargs)
    with warnings.catch_warnings(), Compared(mode) as checked:
        warnings.simplefilter("ignore")
        # What FakeTensor can't do is none of the cache's business: other tests see to that.
        with contextlib.suppress(Exception):
            op(*args, **kwargs)
    assert not checked.wrong
    return checked.count


def test_rules_agree_with_the_kernels() -> None:
    """Every rule is tried on arguments that it answers for, without asking a kernel."""
    x, y = torch.randn(3, 4, 5), torch.randn(3, 5, 4)
    image, c, weight = torch.randn(2, 3, 4, 4), torch.randn(3), torch.randn(3, 3, 3, 3)
    indices = torch.arange(12).view(3, 4)
    calls: dict[Any, tuple[Any, ...]] = {
        aten.mm.default: (x[0], y[0]),
        aten.addmm.default: (torch.randn(4), x[0], y[0]),
        aten.bmm.default: (x, y),
        aten._softmax.default: (x, -1, False),
        aten._log_softmax.default: (x, 1, False),
        aten._safe_softmax.default: (x, -1),
        aten._softmax_backward_data.default: (x, x.clone(), -1, torch.float32),
        aten._log_softmax_backward_data.default: (x, x.clone(), -1, torch.float32),
        aten.native_layer_norm.default: (x, [4, 5], torch.randn(4, 5), torch.randn(4, 5), 1e-5),
        aten.native_layer_norm_backward.default: (
            x, x.clone(), [5], torch.randn(3, 4, 1), torch.randn(3, 4, 1), torch.randn(5), torch.randn(5), [True] * 3,
        ),
        aten.native_batch_norm.default: (image, c, c.clone(), c.clone(), c.clone(), True, 0.1, 1e-5),
        aten.native_batch_norm_backward.default: (
            image, image.clone(), c, c.clone(), c.clone(), c.clone(), c.clone(), True, 1e-5, [True] * 3,
        ),
        aten.convolution.default: (image, weight, c, [2, 1], [1, 0], [1, 1], False, [0, 0], 1),
        aten.convolution_backward.default: (
            torch.randn(2, 3, 2, 2), image, weight, [3], [2, 1], [1, 0], [1, 1], False, [0, 0], 1, [False, True, True],
        ),
        aten.threshold_backward.default: (x, x.clone(), 0),
        aten.pow.Tensor_Scalar: (x, 3.0),
        aten.mul.Scalar: (x, 2),
        aten.add.Scalar: (x, 2),
        aten.div.Scalar: (x, 2),
        aten.bernoulli.p: (x, 0.5),
        aten.embedding.default: (x[0], indices),
        aten.embedding_dense_backward.default: (x, indices, 7, -1, False),
        aten.nll_loss_forward.default: (x[0], indices[0], None, 1, -100),
        aten.nll_loss_backward.default: (x[0, 0, 0], x[0], indices[0], None, 2, -100, x[0, 0, 0]),
        aten.slice_backward.default: (x, [3, 9, 5], 1, 2, 9, 2),
    }  # fmt: skip
    for op in RULES:
        count = sum(str(a.type) == "Tensor" for a in op._schema.arguments)
        args = calls.get(op) or tuple(x.clone() for _ in range(count))
        mode = FakeTensorMode()
        for dtype in (torch.float32, torch.float64):
            given = tree_map(
                lambda a, to=dtype: a.to(to) if isinstance(a, torch.Tensor) and a.is_floating_point() else a, args
            )
            given = tuple(dtype if a is torch.float32 else a for a in given)
            given = stand_ins(given)
            with Compared(mode) as checked:
                op(*given)
            assert not checked.wrong
            assert checked.count == 1
            assert checked.asked == 0, f"no rule answered for {op}"


SHAPES = [
    [(2, 3, 4)], [(2, 1, 4)], [(2, 3, 4), (2, 3, 4)], [(2, 2, 2), (2, 2, 2)], [(2, 3, 4), (4,)], [(2, 3, 4), (3, 1)],
    [(2, 1, 4), (1, 3, 4)], [(1, 3, 4), (1, 3, 4)], [(4, 2), (2, 3, 4, 2)], [(), (3, 2)], [(3, 2), ()],
]  # fmt: skip


def strided(shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
    """Tensors of a shape, with dimensions in every order, with and without gaps; some of one element or row."""
    for order in itertools.permutations(range(len(shape))):
        back = [order.index(dim) for dim in range(len(shape))]
        yield torch.rand([shape[dim] for dim in order]).permute(back)
        yield torch.rand([2 * shape[dim] for dim in order]).permute(back)[tuple(slice(None, None, 2) for _ in shape)]
    yield torch.rand([1] * len(shape)).expand(shape)
    yield torch.rand(shape[-1:]).expand(shape)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("op", [aten.mul.Tensor, aten.neg.default, aten.silu.default, aten.pow.Tensor_Scalar], ids=str)
def test_rules_for_any_strides_agree_with_the_kernels(op: Any, shapes: list[tuple[int, ...]]) -> None:
    answered = 0
    for tensors in itertools.product(*map(strided, shapes)):
        if len(shapes) > 1 and op is not aten.mul.Tensor:
            continue
        args = (*tensors, 2.0) if op is aten.pow.Tensor_Scalar else tensors * (2 if len(shapes) == 1 else 1)
        args = args[: len(op._schema.arguments)]
        expected = TensorSpec.of(op(*args))
        found = layout_of(op, [TensorSpec.of(t) for t in args if isinstance(t, torch.Tensor)], args, {})
        assert found in (None, expected)
        answered += found is not None
    assert answered or len(shapes) > 1


x, classes, one = torch.randn(4, 5), torch.tensor([1, 2, 3, 0]), torch.tensor(1.0)


@pytest.mark.parametrize(
    "op, args",
    [
        (aten.nll_loss_forward.default, (x, classes, torch.rand(5), 1, -100)),
        (aten.nll_loss_forward.default, (x, classes, None, 0, -100)),
        (aten.nll_loss_forward.default, (x, classes[:3], None, 1, -100)),
        (aten.nll_loss_forward.default, (x, classes.float(), None, 1, -100)),
        (aten.nll_loss_forward.default, (x[0], classes[0], None, 1, -100)),
        (aten.nll_loss_backward.default, (one, x, classes, torch.rand(5), 1, -100, one)),
        (aten.nll_loss_backward.default, (x[:, 0], x, classes, None, 0, -100, one)),
        (aten.embedding.default, (x, classes.float())),
        (aten.embedding.default, (x, classes.int())),
        (aten.embedding.default, (x[0], classes)),
        (aten.embedding_dense_backward.default, (x[:3], classes, 7, -1, False)),
        (aten.slice_backward.default, (x, [4, 9], 1, 0, 3, 1)),
        (aten.slice_backward.default, (x, [4, 9], 5, 0, 3, 1)),
        (aten.slice_backward.default, (x, [4, 9], 1, 0, 3, 0)),
        (aten.add.Tensor, (x, torch.randn(3, 5))),
        (aten.mul.Tensor, (x, x.double())),
        (aten.empty_like.default, (x.t(),)),
    ],
    ids=lambda value: "arguments" if isinstance(value, tuple) else str(value),
)
def test_no_rule_answers_for_arguments_of_further_kinds(op: Any, args: tuple[Any, ...]) -> None:
    assert layout_of(op, [TensorSpec.of(a) for a in args if isinstance(a, torch.Tensor)], args, {}) is None


@pytest.mark.parametrize("channels, groups", [(1, 1), (4, 1), (4, 2), (4, 4)])
@pytest.mark.parametrize("size", [(5,), (1,), (5, 6), (1, 1), (4, 3, 5)], ids=str)
def test_convolutions_are_laid_out_as_the_kernels_results_are(
    size: tuple[int, ...], channels: int, groups: int
) -> None:
    """By a rule, no kernel being asked: sizes of one, a stride, a padding, a mask of the gradients among them."""
    rank = len(size)
    for batch, kernel, stride, padding, dilation in itertools.product((1, 2), (1, 3), (1, 2), (0, 1), (1, 2)):
        x = torch.randn(batch, channels, *size)
        weight, bias = torch.randn(channels * 2, channels // groups, *[kernel] * rank), torch.randn(channels * 2)
        options = ([stride] * rank, [padding] * rank, [dilation] * rank, False, [0] * rank, groups)
        try:
            out = aten.convolution.default(x, weight, bias, *options)
        except RuntimeError:  # the image is smaller than the kernel
            continue
        mask = [batch == 1, stride == 1, padding == 1]
        backward = (torch.randn_like(out), x, weight, [channels * 2], *options, mask)
        for op, args in (
            (aten.convolution.default, (x, weight, bias, *options)),
            (aten.convolution_backward.default, backward),
        ):
            checked = Compared(FakeTensorMode())
            found, _ = checked.metadata.run(op_info(op), stand_ins(args), {})
            expected = op(*args)
            assert checked.asked == 0
            for ours, theirs in zip(tree_leaves(found), tree_leaves(expected), strict=True):
                # Some kernels compute a gradient that isn't wanted.
                assert ours is None or (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())


@pytest.mark.parametrize(
    "changed",
    [{1: (3, 2, 3, 3)}, {3: [1, 1]}, {5: [0, 1]}, {4: [-1, 0]}, {0: (2, 3, 1, 1)}, {8: 2}, {6: True}],
    ids=str,
)
def test_no_rule_answers_for_a_convolution_that_kernels_refuse(changed: dict[int, Any]) -> None:
    args: list[Any] = [(2, 3, 4, 4), (3, 3, 3, 3), (3,), [1, 1], [0, 0], [1, 1], False, [0, 0], 1]
    for at, value in changed.items():
        args[at] = value
    specs = [TensorSpec.of(torch.empty(shape)) for shape in args[:3]]
    answered = layout_of(aten.convolution.default, specs, tuple(args), {})
    try:
        expected = TensorSpec.of(aten.convolution.default(*map(torch.empty, args[:3]), *args[3:]))
    except RuntimeError:
        assert answered is None
    else:
        assert answered in (None, expected)


@pytest.mark.parametrize("shape", [(3, 1, 4), (1, 1, 1), (2, 3, 4)])
def test_clones_and_sums_are_laid_out_as_the_kernels_results_are(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    dims = [dims for count in (1, 2, 3) for dims in itertools.combinations(range(-1, 2), count)]
    sums = (aten.sum.dim_IntList, aten.mean.dim)
    calls = [(op, (x, list(dim), keep), {}) for op in sums for dim in dims for keep in (False, True)]
    calls += [(aten.clone.default, (x.permute(order),), kwargs) for order in itertools.permutations(range(3))
              for kwargs in ({}, {"memory_format": torch.contiguous_format})]  # fmt: skip
    for op, args, kwargs in calls:
        found, _ = Compared(FakeTensorMode()).metadata.run(op_info(op), stand_ins(args), kwargs)
        expected = op(*args, **kwargs)
        assert (found.shape, found.stride()) == (expected.shape, expected.stride())


def test_errors_are_raised_each_time_and_not_remembered() -> None:
    mode = FakeTensorMode()
    a, b = stand_ins((torch.randn(2, 3), torch.randn(2, 3)))
    compared = Compared(mode)
    for _ in range(2):
        with pytest.raises(RuntimeError):
            compared.metadata.run(op_info(aten.mm.default), (a, b), {})
    assert not metadata._recipes


def test_keys_tell_numbers_of_different_types_apart() -> None:
    """`1`, `1.0` and `True` are equal in Python and promote differently."""
    mode = FakeTensorMode()
    (x,) = stand_ins((torch.arange(3),))
    compared = Compared(mode)
    dtypes = [compared.metadata.run(op_info(aten.mul.Scalar), (x, n), {})[0].dtype for n in (1, 1.0, True, 1j)]
    assert dtypes == [torch.int64, torch.float32, torch.int64, torch.complex64]


def test_the_default_dtype_is_part_of_the_key() -> None:
    mode = FakeTensorMode()
    (x,) = stand_ins((torch.arange(3),))
    compared = Compared(mode)
    found = []
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            found.append(compared.metadata.run(op_info(aten.div.Scalar), (x, 2), {})[0].dtype)
    finally:
        torch.set_default_dtype(before)
    assert found == [torch.float32, torch.float64]


def chain(x: torch.Tensor, first: Any) -> list[Any]:
    """The layouts of a chain of views."""
    found, x = [], first(x)
    for _ in range(3):
        found.append((tuple(x.shape), x.stride(), x.storage_offset(), x.dtype))
        x = x.unsqueeze(0)[0][1:]
    return found


@pytest.mark.parametrize(
    "first", [lambda x: x.unbind(1)[2], lambda x: x[1:].transpose(0, 1), lambda x: x.view(torch.int32)[:, 1:]]
)
def test_views_of_views_count_offsets_from_the_beginning_of_the_memory(first: Any) -> None:
    real = torch.arange(60.0).view(5, 4, 3)[1:]
    for _ in range(2):  # the first fills the cache
        mode = FakeTensorMode()
        fake = stand_in(real)
        with Compared(mode) as checked:
            found = chain(fake, first)
        assert not checked.wrong
        assert chain(real, first) == found


def test_a_view_follows_the_memory_its_base_has_now() -> None:
    x, other = (new_stand_in((4, 5), (5, 1), torch.float32, torch.device("cpu")) for _ in range(2))
    assert share_memory(new_stand_in_over(x, (5,), (1,), torch.float32, x.device, 5), x)
    set_layout(x, other)
    view = new_stand_in_over(x, (5,), (1,), torch.float32, x.device, 5)
    assert share_memory(view, other)
    assert view.storage_offset() == 5
    assert view.dtype is torch.float32
    assert view.device == torch.device("cpu")


@pytest.mark.parametrize(
    "op", [aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, aten.add.Scalar, aten.mul.Scalar, aten.div.Scalar]
)
def test_arithmetic_with_a_number_is_laid_out_as_the_kernels_result_is(op):
    """A batch of one whose channels come last, as attention over an image leaves it, among others."""
    image = torch.randn(1, 256, 64).transpose(-1, -2).view(1, 64, 16, 16)
    others = [torch.randn(2, 1, 3, 4).permute(order) for order in itertools.permutations(range(4))]
    empty = torch.randn(3, 0, 2)
    for x in (image, *others, image[:, :, ::2], others[3].double(), empty, empty.permute(2, 0, 1)):
        result = op(x, 2.0)
        seen = []
        foregrad.compile(lambda x, seen=seen: (y := op(x, 2.0), seen.append(y.stride()))[0], backend="eager")(x)
        assert seen[0] == result.stride(), x.stride()
