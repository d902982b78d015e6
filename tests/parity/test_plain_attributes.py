"""Code that asks a tensor for its attributes finds those of a plain tensor in a capture, none of a fake's own."""

from __future__ import annotations

import copy

import pytest
import torch

import foregrad
from foregrad.errors import UnsupportedSideEffectError
from tests.parity.oracle import check
from tests.programs import Table

HIDDEN = {"constant", "fake_mode", "fake_device", "real_tensor", "pytype", "_is_param", "item_memo"}
# Names of a fake's own, one that both have, one that neither has.
NAMES = sorted({*HIDDEN, "requires_grad", "nothing"} - {"_is_param"})
ASKED = {
    "hasattr": "return x * (2 if hasattr({tensor}, '{name}') else 3)",
    "getattr": "return x * (2 if getattr({tensor}, '{name}', None) is None else 3)",
    "except": "try:\n  {tensor}.{name}\n except AttributeError:\n  return x * 2\n return x * 3",
    "dir": "return x * (2 if '{name}' in dir({tensor}) else 3)",
    "table": "return x * (2 if '{name}' in vars({tensor}) else 3)",
    "made up": "return x * (2 if hasattr({tensor}, ''.join('{name}')) else 3)",
}
weight = torch.nn.Parameter(torch.ones(2))


def program(how, tensor, name):
    scope = {"weight": weight}
    exec(f"def program(x):\n {ASKED[how].format(tensor=tensor, name=name)}", scope)
    return scope["program"]


@pytest.mark.parametrize("how", ASKED)
@pytest.mark.parametrize("tensor", ["x", "(x + 1)", "weight"])
def test_attributes_are_those_of_a_plain_tensor(how, tensor):
    for name in NAMES:
        function = program(how, tensor, name)
        x = torch.ones(2)
        assert torch.equal(foregrad.compile(function, backend="eager")(x), function(x)), name


stored = PROGRAMS = Table()


@stored
def number_of_attributes(x):
    return x * len(vars(x)), x * len((x + 1).__dict__), x * len(dir(x + 1))


@stored
def set_and_read(x):
    y = x + 1
    y.constant, y.item_memo, y.other = 3, 4, 5
    return y * y.constant * y.item_memo * y.other, x * hasattr(x + 2, "constant")


@stored
def table_written(x):
    y = x + 1
    y.__dict__["a"] = 3
    vars(y).update(b=4, constant=6)
    vars(y).pop("a")
    return y * sum(y.__dict__.values()) * y.b * len(vars(y))


@stored
def deleted(x):
    y = x + 1
    y.constant = 3
    del y.constant
    return y * (2 if hasattr(y, "constant") else 5)


@stored
def names_in_a_loop(x):
    for name in ("constant", "other", "fake_mode"):
        x = x * getattr(x, name, 2)
    return x


@stored
def copied(x):
    y = x.detach() * 2
    y.constant = 3
    z = copy.copy(y)
    return x * z * z.constant


@stored
def memory_of_a_copy_is_shared(x):
    y = x.detach().clone()
    copy.copy(y).mul_(3)
    return x * y


@stored
def memory_of_a_deep_copy_is_not(x):
    y = x.detach().clone()
    z, other = copy.deepcopy([y, {"a": y}])
    z.mul_(3)
    return x * y, other["a"] * x


@stored
def copy_of_a_leaf(x):
    y = copy.copy(x)
    return x * (2 if y.requires_grad and y.is_leaf and y is not x else 3)


def args():
    return (torch.randn(3, requires_grad=True),)


def args_with_attributes():
    x = torch.randn(3, requires_grad=True)
    x.constant, x._scale, x.fake_mode = 4, 3, 5
    return (x,)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name):
    check(PROGRAMS[name], args)


def attributes_of_the_argument(x):
    return x * x.constant * x._scale * x.fake_mode * len(vars(x))


def test_an_argument_may_have_attributes_under_names_of_a_fake():
    check(attributes_of_the_argument, args_with_attributes)


def test_another_attribute_is_another_graph():
    def function(x):
        return x * (1 + len(vars(x))) * getattr(x, "constant", 2)

    compiled = foregrad.compile(function, backend="eager")
    for _ in range(2):
        for make in (args, args_with_attributes):
            (x,) = make()
            assert torch.equal(compiled(x), function(x))


@pytest.mark.parametrize("name", ["constant", "_private", "other"])
def test_an_attribute_set_on_an_argument_is_refused(name):
    with pytest.raises(UnsupportedSideEffectError, match=name):
        foregrad.capture(lambda x: (setattr(x, name, 9), x * 2)[1], torch.ones(2))


def test_nothing_stays_after_a_capture():
    before = dict(vars(torch._subclasses.FakeTensor))
    for function in PROGRAMS.values():
        foregrad.compile(function, backend="eager")(*args())
    assert dict(vars(torch._subclasses.FakeTensor)) == before


# Dynamo itself fails at the others, with every backend.
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"number_of_attributes", "table_written", "deleted"}))
def test_programs_under_torch_compile(name):
    torch._dynamo.reset()
    compiled = torch.compile(PROGRAMS[name], backend="foregrad", options={"backend": "eager"})
    reference = torch.compile(PROGRAMS[name], backend="eager")
    (x,) = args()
    for a, b in zip(*map(torch.utils._pytree.tree_leaves, (compiled(x), reference(x))), strict=True):
        assert torch.equal(a, b)
