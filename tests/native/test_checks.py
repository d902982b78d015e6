"""The checks of the C++ part by themselves: each says no to whatever PyTorch's own guard says no to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from foregrad._torch.guards import TensorGuards
from foregrad._torch.native import make_tensor_check, make_version_check, native

pytestmark = pytest.mark.skipif(native() is None, reason="the C++ part was not built")


class Subclass(torch.Tensor):
    pass


def like(x):
    return torch.randn(2, 3).as_subclass(type(x))


OTHERS = {
    "the same kind": lambda: torch.randn(2, 3),
    "another shape": lambda: torch.randn(3, 3),
    "fewer dimensions": lambda: torch.randn(6),
    "other strides": lambda: torch.randn(3, 2).T,
    "another dtype": lambda: torch.randn(2, 3, dtype=torch.float64),
    "complex": lambda: torch.randn(2, 3, dtype=torch.complex64),
    "another device": lambda: torch.empty(2, 3, device="meta"),
    "requires grad": lambda: torch.randn(2, 3, requires_grad=True),
    "has a history": lambda: torch.randn(2, 3, requires_grad=True) * 2,
    "a parameter": lambda: nn.Parameter(torch.randn(2, 3)),
    "a parameter that is frozen": lambda: nn.Parameter(torch.randn(2, 3), requires_grad=False),
    "a subclass": lambda: torch.randn(2, 3).as_subclass(Subclass),
    "sparse": lambda: torch.randn(2, 3).to_sparse(),
    "negated lazily": lambda: torch.randn(2, 3, dtype=torch.complex64).conj().imag,
    "zero, lazily": lambda: torch._efficientzerotensor(2, 3),
    "no tensor": lambda: 3,
    "None": lambda: None,
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("first", ["the same kind", "requires grad", "a parameter", "other strides"])
def test_it_says_what_pytorchs_guard_says(first, name):
    made, other = OTHERS[first](), OTHERS[name]()
    sizes, strides = [list(made.shape)], [list(made.stride())]
    ours = make_tensor_check([made], sizes, strides, distinct=True)
    theirs = TensorGuards(made, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    assert ours(other) is theirs.check(other)
    assert ours(made) is ours.all((made,)) is True
    assert ours(made) is True, "asked again"


def test_made_for_the_state_of_the_thread():
    x = torch.randn(2, 3)
    ours = make_tensor_check([x], [x.shape], [x.stride()], distinct=True)
    theirs = TensorGuards(x, dynamic_dims_sizes=[[2, 3]], dynamic_dims_strides=[[3, 1]])
    for state in (torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.no_grad()):
        with state:
            for tensor in (x, torch.randn(2, 3)):
                assert ours(tensor) is theirs.check(tensor)
    assert ours(x)


def test_sizes_that_are_not_looked_at():
    x = torch.randn(2, 3)
    check = make_tensor_check([x], [[None, 3]], [[3, 1]], distinct=True)
    assert check(torch.randn(7, 3))
    assert not check(torch.randn(7, 4))
    assert not check(torch.randn(7, 3, 1))


@pytest.mark.parametrize("count", [2, 5, 40])
def test_no_two_may_be_one(count):
    xs = [torch.zeros(2) for _ in range(count)]
    check = make_tensor_check(xs, [x.shape for x in xs], [x.stride() for x in xs], distinct=True)
    ys = [torch.ones(2) for _ in range(count)]
    for objects in (xs, ys, [*xs[:-1], ys[0]], [ys[1], *xs[1:]], xs[::-1]):
        assert check(*objects)
        assert check(*objects)
        for i in range(count):
            twice = [*objects]
            twice[i] = objects[i - 1]
            assert not check(*twice)
    assert make_tensor_check(xs, [x.shape for x in xs], [x.stride() for x in xs], distinct=False)(*[xs[0]] * count)


def test_another_number_of_tensors():
    x = torch.zeros(2)
    check = make_tensor_check([x], [x.shape], [x.stride()], distinct=True)
    assert not check()
    assert not check(x, torch.zeros(2))


def test_what_it_leaves_to_pytorch():
    sparse = torch.randn(2, 3).to_sparse()
    nested = torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)
    for tensor in (sparse, nested):
        assert make_tensor_check([tensor], [[2, 3]], [[3, 1]], distinct=True) is None


@pytest.mark.skipif(not hasattr(native(), "VersionCheck"), reason="dicts count no writes in this Python")
def test_any_write_to_a_dict_is_noticed():
    dicts = [{"a": 1}, {}, {1: 2, 3: 4}]
    writes = [
        lambda d: d.update(a=2),
        lambda d: d.__setitem__("new", 1),
        lambda d: d.setdefault("other", 1),
        lambda d: d.clear(),
        lambda d: d.pop("a", None) or d.__setitem__("a", 1),
    ]
    for number in range(3):
        for write in writes:
            for d in dicts:
                d["filled"] = 1
            check = make_version_check(dicts)
            assert check(())
            _ = [d.get("a") for d in dicts]
            assert check(())
            write(dicts[number])
            assert not check(())
