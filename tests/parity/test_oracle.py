"""The oracle passes what is right and catches each kind of wrong: tests of the tests."""

from __future__ import annotations

import collections
import dataclasses

import pytest
import torch

from tests.parity.copies import copy_of
from tests.parity.observe import Strictness, compare_relations, compare_tensor
from tests.parity.oracle import Call, CompiledRaised, Fresh, Mismatch, Refused, check
from tests.parity.stand_ins import BROKEN, identity

Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Box:
    tensor: torch.Tensor
    number: int


def leaf():
    return (torch.randn(3, 4, requires_grad=True),)


def plain():
    return (torch.randn(3, 4),)


def two_leaves():
    return torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)


def nonleaf():
    return (torch.randn(3, 4, requires_grad=True) * 2,)


def two_views():
    base = torch.randn(6)
    return base[:4], base[2:]


def double_first(x, *_):
    x.mul_(2)
    return x.sin()


def change_both(x, y):
    x.mul_(2)
    y.add_(1)


# What the stand-in of each name must be caught at: function, arguments, a word of the message, options.
CAUGHT = {
    "view_becomes_copy": (lambda x: x[1:], leaf, "shares storage", {}),
    "input_becomes_copy": (lambda x: x, leaf, "same object", {}),
    "input_becomes_view": (lambda x: (x, x + 1), plain, "same object", {}),
    "drop_mutations": (double_first, plain, "args[0]: values", {}),
    "mutate_without_version": (double_first, plain, "version counter", {}),
    "mutate_without_grad": (double_first, nonleaf, "autograd history", {}),
    "mutate_too_much": (lambda x: x.sin(), plain, "args[0]: values", {}),
    "mutate_first_alias_only": (change_both, two_views, "values", {}),
    "other_strides": (lambda x: x.sin(), leaf, "strides", {}),
    "other_offset": (lambda x: x[1:], plain, "storage offset", {}),
    "other_dtype": (lambda x: x.sin(), leaf, "dtype", {}),
    "other_values": (lambda x: x.sin(), plain, "out: values", {}),
    "lost_signed_zeros": (lambda x: x * -0.0, plain, "out: values", {"signed_zeros": True}),
    "lost_grad": (lambda x: x.sin(), leaf, "requires_grad", {}),
    "lost_history": (lambda x: x.sin(), leaf, "is_leaf", {}),
    "extra_random": (lambda x: x.sin(), plain, "generator", {}),
    "kept_random": (lambda x: x + torch.rand(3, 4), plain, "generator", {}),
    "frozen": (lambda x: x.sin(), plain, "call 1", {}),
    "swallow_errors": (lambda x: x.view(5), plain, "eager raises RuntimeError", {}),
    "other_error": (lambda x: x.view(5), plain, "KeyError", {}),
    "shared_outputs": (lambda x: (x + 1, x + 2), plain, "shares storage", {}),
    "separate_outputs": (lambda x: (lambda y: (y, y.t()))(x + 1), plain, "shares storage", {}),
    "list_to_tuple": (lambda x: [x + 1], plain, "structure", {}),
    "number_to_tensor": (lambda x: (x + 1, 3), plain, "python value", {}),
    "zeros_for_none": (lambda x, y: x * 2, two_leaves, "is None", {}),
    "wrong_grad": (lambda x: x.sin(), leaf, "grad of args[0]: values", {}),
    "wrong_grad_strides": (lambda x: x * 2, leaf, "grad of args[0]: strides", {}),
    "random_in_backward": (lambda x: x.sin(), leaf, "generator", {}),
    "changed_tangent": (lambda x: x.sin(), leaf, "tangent of out", {}),
    "ignored_tangent_strides": (lambda x: x.sin(), leaf, "values", {}),
    "no_grad_at_all": (lambda x: x.sin(), leaf, "is None", {}),
}


def containers(x):
    y = x.sin()
    return {"box": Box(y, 3), "pair": Pair([y, y.t()], None), "views": (y[0], x), "text": "a"}


RIGHT = {
    "containers": (containers, leaf, {}),
    "nonleaf mutated": (double_first, nonleaf, {}),
    "overlap mutated": (double_first, two_views, {}),
    "random": (lambda x: torch.nn.functional.dropout(x, 0.5), leaf, {}),
    "nan": (lambda x: x / 0 - x / 0, leaf, {}),
    "both raise": (lambda x: x.view(5), leaf, {}),
    "metadata": (lambda x: x.t_(), plain, {}),
    "unused": (lambda x, y: x * 2, two_leaves, {}),
    "second order": (lambda x: x.sin().exp(), leaf, {"order": 2}),
    "keywords": (lambda x, *, by: x * by, lambda: Call(leaf(), {"by": 3.0}), {}),
    "module": (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)), leaf, {}),
    "complex": (lambda x: torch.view_as_complex(x.view(3, 2, 2)).conj(), leaf, {}),
    "sparse": (lambda x: x.to_sparse(), plain, {}),
    "inference": (lambda x: x + 1, plain, {"grad": False}),
    "resize": (lambda x: x.resize_(5, 4).zero_(), plain, {}),
}


@pytest.mark.parametrize("name", RIGHT)
def test_eager_against_itself_is_equal(name):
    fn, make_args, options = RIGHT[name]
    expected = "raised" if name == "both raise" else "equal"
    assert check(fn, make_args, compile=identity, strict_view=True, exact_versions=True, **options) == expected


@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_compiler_is_caught(name):
    """The message says what differs; the same comparison passes for a right compiler."""
    fn, make_args, said, options = CAUGHT[name]
    check(fn, make_args, compile=identity, **options)
    with pytest.raises(Mismatch) as caught:
        check(fn, make_args, compile=BROKEN[name], **options)
    assert said in str(caught.value)


def test_a_closed_over_tensor_is_watched():
    """A tensor that the function closes over is compared like an argument."""

    def make():
        weight = torch.randn(4, requires_grad=True)
        count = torch.zeros(())

        def fn(x):
            count.add_(1)
            return x * weight

        return fn, {"weight": weight, "count": count}

    assert check(Fresh(make), leaf, compile=identity) == "equal"
    without_weight = lambda fn: lambda x: x * fn.__closure__[1].cell_contents.detach()
    with pytest.raises(Mismatch, match="count: values"):
        check(Fresh(make), leaf, compile=without_weight)


def test_an_output_cut_from_its_base_is_caught_by_changing_it():
    """Same memory, but autograd does not know: seen when the output is changed in place."""

    def cut(fn):
        def call(x):
            y = fn(x)
            return torch.empty(0).set_(y.untyped_storage(), y.storage_offset(), y.size(), y.stride())

        return call

    check(lambda x: x[1:], plain, compile=identity)
    with pytest.raises(Mismatch, match="version counter"):
        check(lambda x: x[1:], plain, compile=cut)
    with pytest.raises(Mismatch, match="is a view of"):
        check(lambda x: x[1:], plain, compile=cut, strict_view=True)


def test_a_copy_for_the_mutated_leaf_loses_the_gradient():
    """An argument that shares memory with a leaf but not its history gets no gradient."""
    scaled = lambda fn: lambda x: fn(x.detach().requires_grad_())
    with pytest.raises(Mismatch, match="is None"):
        check(lambda x: x.sin(), leaf, compile=scaled)


def test_refusals_and_faults_are_told_apart():
    """An UnsupportedError is Refused; another exception where eager answers is a fault of the compiler."""

    class UnsupportedError(RuntimeError):
        pass

    def refuses(fn):
        raise UnsupportedError("not this")

    def fails(fn):
        raise ZeroDivisionError("oops")

    with pytest.raises(Refused, match="not this"):
        check(lambda x: x, leaf, compile=refuses)
    with pytest.raises(CompiledRaised, match="oops"):
        check(lambda x: x, leaf, compile=fails)


def test_tolerance_is_only_used_when_given():
    near = BROKEN["other_values"]
    assert check(lambda x: x.sin(), plain, compile=near, atol=1e-5, rtol=1e-5) == "equal"
    with pytest.raises(Mismatch):
        check(lambda x: x.sin(), plain, compile=near)


def test_unwritten_memory_is_compared_by_its_metadata():
    fill = iter(range(100))
    assert check(lambda: torch.full((2,), next(fill)), tuple, compile=identity, values=False) == "equal"
    with pytest.raises(Mismatch):
        check(lambda: torch.full((2,), next(fill)), tuple, compile=identity)


def test_copies_keep_storages_views_leaves_and_objects():
    """Copied arguments relate to one another as the examples do, and share nothing with them."""
    base = torch.randn(2, 3, requires_grad=True)
    nonleaf = base * 2
    hidden = torch.randn(6)
    behind = torch.empty(0).set_(hidden.untyped_storage(), 1, (2, 2), (2, 1))
    odd = torch.randn(3, dtype=torch.complex64).conj()
    given = [base, base, nonleaf, nonleaf[0], hidden[1:], hidden[:2], behind, odd, torch.randn(3, 2).t()]
    copied = copy_of(given)
    pair = [[(str(i), tensor) for i, tensor in enumerate(side)] for side in (given, copied)]
    how = Strictness(strict_view=True)
    assert compare_relations(*pair, how) == []
    for (label, a), (_, b) in zip(*pair, strict=True):
        assert compare_tensor(label, a, b, how) == []
        assert a.untyped_storage()._cdata != b.untyped_storage()._cdata
    other = copy_of(given, other_values=True)
    assert torch.equal(other[0], base / 2)
    assert compare_relations(pair[0], [(str(i), tensor) for i, tensor in enumerate(other)], how) == []
