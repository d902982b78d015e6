"""Programs that branch on values of their inputs: each way is a graph, and the right one runs, or nothing is seen."""

from __future__ import annotations

import warnings

import pytest
import torch

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedDataDependentError
from tests.parity.oracle import check


def compiled_eagerly(fn):
    return foregrad.compile(fn, backend="eager", dynamic=False)


def graphs_of(fn):
    return len(fn.foregrad.specializations)


def vector(sign=1.0, n=4):
    return (torch.rand(n) + 0.1).mul(sign).requires_grad_()


def sign_branch(x):
    if x.sum() > 0:
        return (x * 2).relu()
    return x.sin()


def test_each_way_is_compiled_once():
    fn = compiled_eagerly(sign_branch)
    for sign in (1, -1, 1, -1, -1, 1):
        x = vector(sign)
        assert torch.equal(fn(x), sign_branch(x))
    assert graphs_of(fn) == 2


def alternating(make):
    """One maker after the other, for the oracle's calls."""
    return [lambda i=i: make(1.0 if i % 2 else -1.0) for i in range(7)]


def test_branch_gradients_are_eagers():
    assert check(sign_branch, alternating(lambda s: (vector(s),)), calls=6) == "equal"


def asserting(x):
    assert (x > 0).all(), "negative"
    return x.log()


@pytest.mark.filterwarnings("ignore:the text of a tensor")  # for pytest, which shows what an assert compared
def test_a_failing_assert_raises_as_in_eager():
    fn = compiled_eagerly(asserting)
    assert torch.equal(fn(vector()), fn.foregrad.function(vector())) is False  # other numbers, no error
    with pytest.raises(AssertionError, match="negative"):
        fn(vector(-1))
    x = vector()
    assert torch.equal(fn(x), x.log())


def halving(x):
    while x.norm() > 1:
        x = x / 2
    return x


def test_a_loop_until_a_value_is_small():
    makers = [lambda k=k: (torch.full((3,), float(k)).requires_grad_(),) for k in (1, 9, 3, 9, 1, 30, 3)]
    assert check(halving, makers, calls=6) == "equal"


def mutate_then_branch(x, buffer):
    buffer.add_(1)
    buffer.mul_(x.detach())
    if buffer.sum() > 10:
        buffer.zero_()
        return x * 3
    return x + buffer


def test_nothing_is_written_by_the_way_not_taken():
    """The graph tried first writes to an input; when it turns out wrong, that write must not have happened."""
    scales = (1.0, 5.0, 1.0, 5.0, 5.0, 1.0, 1.0)
    makers = [lambda k=k: (torch.full((4,), k).requires_grad_(), torch.ones(4)) for k in scales]
    assert check(mutate_then_branch, makers, calls=6) == "equal"


def drawing(x):
    y = torch.nn.functional.dropout(x, 0.5)
    if y.sum() > 2:
        y = y + torch.rand_like(y)
    if torch.rand(()) > 0.5:
        y = y * torch.randn(4)
    return y


def test_random_numbers_are_those_of_eager():
    """What decides is itself random: capture draws ahead without moving the generator, a wrong way puts it back."""
    assert check(drawing, lambda: (vector(),), calls=12) == "equal"


def test_own_generators_are_put_back():
    def fn(x, generator):
        y = torch.randn(3, generator=generator)
        return x * 2 if y.sum() > 0 else x * y

    compiled = compiled_eagerly(fn)
    mine, theirs = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
    for _ in range(12):
        x = vector(n=3)
        assert torch.equal(compiled(x, mine), fn(x, theirs))
        assert torch.equal(mine.get_state(), theirs.get_state())
    assert graphs_of(compiled) == 2


def turned_on(x, w):
    x.requires_grad_()
    if w.sum() > 0:
        return x * 2
    return x.sin()


def test_requires_grad_of_an_input_is_undone_when_the_way_is_wrong():
    fn = compiled_eagerly(turned_on)
    for sign in (1, -1, 1, -1):
        x = torch.rand(3)
        out = fn(x, torch.tensor([float(sign)]))
        assert x.requires_grad
        assert torch.equal(out, x * 2 if sign > 0 else x.sin())
        out.sum().backward()
        assert x.grad is not None


def numbers(x, n):
    k = int(n)
    scale = float(x.detach().max())
    return x[:k] * scale, n.tolist(), x.detach().mean().item()


def test_numbers_read_out_of_tensors():
    makers = [lambda k=k: (vector(), torch.tensor(k)) for k in (1, 3, 2, 1)]
    assert check(numbers, makers, calls=4) == "equal"


def guarded_index(table, i):
    if (i < table.shape[0]).all():
        return table[i]
    return table.sum() * torch.ones_like(i, dtype=table.dtype)


def test_a_graph_that_fails_with_other_values_is_a_wrong_way():
    """The index is in range only because of the branch: with other values the first graph raises half-way."""
    makers = [lambda k=k: (vector(), torch.tensor([0, k])) for k in (2, 9, 3, 8, 1)]
    assert check(guarded_index, makers, calls=5) == "equal"


def test_an_error_that_eager_raises_comes_through():
    def fn(x, i):
        if x.sum() > 0:
            return x[i]
        return x

    compiled = compiled_eagerly(fn)
    compiled(vector(), torch.tensor([1]))
    with pytest.raises(IndexError):
        compiled(vector(), torch.tensor([77]))
    x = vector()
    assert torch.equal(compiled(x, torch.tensor([1])), x[1:2])


class _Deciding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 if x.sum() > 0 else grad.sin()


def test_a_backward_that_branches_on_what_was_saved():
    assert check(_Deciding.apply, alternating(lambda s: (vector(s),)), calls=6) == "equal"


class _DecidingOnTangent(_Deciding):
    @staticmethod
    def backward(ctx, grad):
        return grad * 2 if grad.sum() > 0 else grad.sin()


def test_a_backward_that_branches_on_its_gradient():
    fn = compiled_eagerly(lambda x: _DecidingOnTangent.apply(x) + 1)
    for sign in (1, -1, -1, 1):
        x = vector()
        (fn(x) * sign).sum().backward()
        assert torch.equal(x.grad, _DecidingOnTangent.backward(None, torch.full_like(x, sign)))
    assert graphs_of(fn) == 1


def test_past_the_limit_calls_run_eagerly_and_say_where():
    with foregrad.config.override(path_limit=3):
        fn = compiled_eagerly(lambda x: x * x.sum().item())
    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ForegradWarning)
        for _ in range(20):
            x = torch.rand(3)
            seen.append(torch.equal(fn(x), x * x.sum().item()))
    assert all(seen)
    told = [w for w in caught if issubclass(w.category, ForegradWarning)]
    assert len(told) == 1
    assert "test_branches.py" in str(told[0].message)
    assert "path_limit" in str(told[0].message)
    assert graphs_of(fn) == 3


def test_past_the_limit_an_error_when_asked():
    with foregrad.config.override(path_limit=2, error_on_recompile_limit=True):
        fn = compiled_eagerly(lambda x: x * x.sum().item())
    fn(torch.ones(2))
    fn(torch.ones(2) * 2)
    with pytest.raises(UnsupportedDataDependentError, match="path_limit"):
        fn(torch.ones(2) * 3)


def test_the_same_way_at_many_shapes_is_one_way():
    with foregrad.config.override(path_limit=2):
        fn = compiled_eagerly(sign_branch)
    for n in range(2, 9):
        x = vector(n=n)
        assert torch.equal(fn(x), sign_branch(x))
    assert graphs_of(fn) == 7


def test_every_nan_and_zero_is_told_from_the_others():
    def fn(x):
        return x + x.sum().item()

    compiled = compiled_eagerly(fn)
    for value in (0.0, -0.0, float("nan"), float("inf"), 0.0, -0.0, float("nan")):
        x = torch.tensor([value])
        got, expected = compiled(x), fn(x)
        assert torch.equal(got.isnan(), expected.isnan())
        assert torch.equal(torch.signbit(got), torch.signbit(expected))


def test_decisions_are_named_in_the_print():
    joint = foregrad.capture(sign_branch, vector())
    (decision,) = joint.signature.stops.decisions
    assert decision.value is True
    assert "test_branches.py" in decision.where
    assert "if x.sum() > 0" in str(joint.signature.graph_outputs.slots[decision.output])
    joint.check()
    assert "decided at" in str(joint)


def test_without_guards_a_wrong_way_runs_the_module():
    class Model(torch.nn.Module):
        def forward(self, x):
            return (sign_branch(x),)

    model = Model()
    forward = foregrad.aot_module_simplified(model, [vector()], foregrad.nop)
    for sign in (1, -1, 1):
        x = vector(sign)
        assert torch.equal(forward(x)[0], sign_branch(x))


def test_a_branch_under_no_grad_and_inference_mode():
    fn = compiled_eagerly(sign_branch)
    for context in (torch.no_grad, torch.inference_mode):
        for sign in (1, -1, 1):
            with context():
                x = torch.rand(3) * sign
                assert torch.equal(fn(x), sign_branch(x))
    assert graphs_of(fn) == 4


class BatchNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3, momentum=None)

    def forward(self, x):
        return self.norm(x)


def test_cumulative_batch_norm_counts_its_batches():
    """Its momentum is a number read from a buffer that it has just written."""
    assert check(BatchNorm(), lambda: (torch.randn(5, 3).requires_grad_(),), calls=4) == "equal"


@torch.library.custom_op("branches::fill_with_noise", mutates_args=("x",), tags=(torch.Tag.nondeterministic_seeded,))
def fill_with_noise(x: torch.Tensor) -> None:
    x.uniform_()


def test_a_branch_on_what_an_operator_of_the_users_drew():
    def f(x):
        y = x.clone()
        fill_with_noise(y)
        return y * 2 if y.sum() > 1.5 else y * 3

    compiled = foregrad.compile(f, backend="eager")
    for seed in range(4):
        results = []
        for called in (f, compiled):
            torch.manual_seed(seed)
            results.append(called(torch.ones(3)))
        assert torch.equal(*results)
