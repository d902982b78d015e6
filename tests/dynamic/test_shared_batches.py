"""Arguments that are views of one batch, of many lengths: one graph serves them while they are only read."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

import foregrad
from foregrad.backends.eager import eager_compiler
from foregrad.errors import ForegradWarning, UnsupportedError
from tests.covering import each

W = torch.randn(50, 50, requires_grad=True)


def loss(x, y):
    return F.cross_entropy(W[x].flatten(0, 1), y.reshape(-1))


def shifted(size):
    batch = torch.arange(4 * size).reshape(4, size) % 50
    return batch[:, :-1], batch[:, 1:]


def of_features(size):
    batch = torch.randn(2, size, 3)
    return batch[:, 1:], batch[:, :-1]


def halves(size):
    return torch.randn(2, size).unbind(0)


def with_gradients(size):
    batch = torch.randn(4, size, requires_grad=True)
    return (batch * 1)[:, :-1], (batch * 2)[:, 1:]


def of_one_with_a_gradient(size):
    twice = torch.randn(4, size, requires_grad=True) * 2
    return twice[:, :-1], twice[:, 1:]


def a_view_of_itself(size):
    x = torch.randn(4, size)
    return x, x[:]


def mixed(x, y):
    return (x * 2 + y).sin().sum()


def views_of_both(x, y):
    return x.t(), y.flatten()[1:], x.shape[1] * y


def asks_for_bases(x, y):
    return x * 2 if x._base is y._base else y


def asks_for_memory(x, y):
    return x * 2 if x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() else y * 3


def asks_whether_set_to(x, y):
    return x * 2 if x.is_set_to(y) else y * 3


PROGRAMS = [
    (loss, shifted, 2),
    (mixed, of_features, 2),
    (mixed, halves, 2),
    (mixed, with_gradients, 2),
    (mixed, of_one_with_a_gradient, 2),
    (views_of_both, shifted, 2),
    (mixed, a_view_of_itself, 2),
    (asks_for_bases, shifted, None),
    (asks_for_memory, shifted, None),
    (asks_whether_set_to, a_view_of_itself, None),
]


def leaves_of(results):
    return results if isinstance(results, tuple) else (results,)


def compared(compiled, function, make, sizes):
    for size in sizes:
        torch.manual_seed(size)
        ours = make(size)
        torch.manual_seed(size)
        theirs = make(size)
        got, expected = leaves_of(compiled(*ours)), leaves_of(function(*theirs))
        for a, b in zip(got, expected, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
            assert (a.untyped_storage().data_ptr() == ours[0].untyped_storage().data_ptr()) == (
                b.untyped_storage().data_ptr() == theirs[0].untyped_storage().data_ptr()
            )
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
            assert a._version == b._version
        if got[0].requires_grad:
            inputs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a.requires_grad]
            grads = [
                torch.autograd.grad(out[0].sum(), [W, *(pair[i] for pair in inputs)], allow_unused=True)
                for i, out in enumerate((got, expected))
            ]
            for a, b in zip(*grads, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize(("function", "make", "graphs"), PROGRAMS)
@pytest.mark.filterwarnings("ignore::foregrad.errors.ForegradWarning")
def test_views_of_one_batch_that_are_only_read_have_symbolic_sizes(function, make, graphs):
    compiled = foregrad.compile(function, backend="eager", on_unsupported="eager" if graphs is None else "raise")
    compared(compiled, function, make, range(10, 18))
    if graphs is not None:
        assert len(list(compiled.foregrad.all_specializations())) == graphs


def test_a_single_slice_of_a_batch_has_a_stride_that_follows_from_its_size():
    compiled = foregrad.compile(lambda x: (x * 2).sum(), backend="eager")
    compared(compiled, lambda x: (x * 2).sum(), lambda n: (torch.randn(4, n)[:, :-2],), range(10, 18))
    assert len(compiled.foregrad.specializations) == 2


def test_slices_of_one_width_keep_their_stride_as_it_is():
    whole = torch.randn(4, 64)
    compiled = foregrad.compile(lambda x: (x * 2).sum(), backend="eager")
    compared(compiled, lambda x: (x * 2).sum(), lambda n: (whole[:, :n],), range(10, 18))
    assert len(compiled.foregrad.specializations) == 2


@pytest.mark.parametrize("make", [shifted, lambda size: tuple(x.clone() for x in shifted(size))])
def test_through_the_door_of_dynamo_there_are_no_more_graphs_than_for_separate_tensors(make):
    graphs = []

    def counting(module, inputs):
        graphs.append(module)
        return eager_compiler(module, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="foregrad", options={"backend": (counting, eager_compiler)})
    for size in range(10, 18):
        batch = make(size)
        assert torch.equal(compiled(*batch), loss(*batch))
    assert len(graphs) == 2


def test_a_mark_on_one_of_them_is_kept_from_the_first_call_on():
    compiled = foregrad.compile(mixed, backend="eager")
    for size in range(10, 14):
        x, y = torch.randn(2, size).unbind(0)
        foregrad.mark_dynamic(x, 0)
        foregrad.mark_dynamic(y, 0)
        assert torch.equal(compiled(x, y), mixed(x, y))
    assert len(compiled.foregrad.specializations) == 1


# ------------------------------------------------------------------------------------------------ written to
def writes_first(x, y):
    x.mul_(2)
    return x + y


def writes_second(x, y):
    y[:, 0].add_(1)
    return x.sum() + y


def resizes(x, y):
    x.unsqueeze_(0)
    return x.sum() + y


def detaches(x, y):
    return x.detach().zero_().sum() + y


@pytest.mark.parametrize(
    ("function", "make"),
    each([writes_first, writes_second, resizes, detaches], [of_features, shifted, a_view_of_itself], times=2),
)
def test_writes_to_one_of_them_are_seen_in_the_others(function, make):
    compared(foregrad.compile(function, backend="eager"), function, make, range(10, 15))


def test_a_graph_for_separate_tensors_is_not_used_for_shared_ones_that_are_written():
    compiled = foregrad.compile(writes_first, backend="eager")
    for make in (lambda n: (torch.randn(4, n), torch.randn(4, n)), shifted):
        compared(compiled, writes_first, make, range(10, 13))


def test_past_the_limit_the_warning_names_the_shared_memory_and_its_remedy_works():
    with foregrad.config.override(recompile_limit=3):
        compiled = foregrad.compile(writes_first, backend="eager", on_unsupported="eager")
        with pytest.warns(ForegradWarning, match=r"share memory and the function writes to it: pass a `\.clone\(\)`"):
            compared(compiled, writes_first, shifted, range(10, 16))
        compiled = foregrad.compile(writes_first, backend="eager", on_unsupported="eager")
        compared(compiled, writes_first, lambda size: tuple(x.clone() for x in shifted(size)), range(10, 16))


@pytest.mark.parametrize("dynamic", [None, True])
def test_the_report_says_which_sizes_stay_fixed_and_dynamic_warns_of_them(dynamic):
    def scaled(a, x, y):
        return writes_first(x, y) * a.sum()

    compiled, batch = foregrad.compile(scaled, backend="eager", dynamic=dynamic), shifted(10)
    for size in range(3, 6):
        compiled(torch.ones(size), *batch)
    assert "stay fixed" not in str(foregrad.explain_recompiles(compiled)), "`a` shares no memory"
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for size in range(11, 13):
            compiled(torch.ones(4), *shifted(size))
    assert [str(one.message)[:38] for one in heard] == ["`scaled` makes a graph for each x.shape"[:38]] * bool(dynamic)
    assert str(foregrad.explain_recompiles(compiled)).count("Sizes stay fixed where arguments share memory") == 1


def test_a_change_is_advised_only_where_it_makes_one_graph():
    for function, change in ((mixed, "dynamic=True"), (writes_first, ""), (lambda x, y: (x * 2, y.sum()), "x")):
        compiled = foregrad.compile(function, backend="eager", dynamic=False)
        for size in range(10, 13):
            compiled(*halves(size))
        (advice,) = (
            one for one in foregrad.explain(compiled, *halves(9)).advice if "compiled 2 more times" in one.text
        )
        assert advice.change == (change if change != "x" else "foregrad.mark_dynamic(x, 0)")
        assert ("makes a single graph" in advice.text) is bool(change)


def test_a_mark_that_can_not_be_kept_is_an_error():
    compiled = foregrad.compile(writes_first, backend="eager", on_unsupported="raise")
    x, y = halves(9)
    foregrad.mark_dynamic(x, 0)
    with pytest.raises(
        UnsupportedError, match=r"args\[0\] was marked as dynamic. The tensor shares memory .* `.clone\(\)`"
    ):
        compiled(x, y)
    x, y = (part.clone() for part in halves(9))
    foregrad.mark_dynamic(x, 0)
    foregrad.mark_dynamic(y, 0)
    compiled(x, y)
    assert torch.equal(compiled(torch.ones(5), torch.ones(5)), torch.full((5,), 3.0))
    assert len(compiled.foregrad.specializations) == 1
