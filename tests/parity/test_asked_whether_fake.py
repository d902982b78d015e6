"""Code that asks whether a tensor is a fake, or for what only a fake would have, is told what it is told in eager."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.overrides import has_torch_function, has_torch_function_unary, has_torch_function_variadic, is_tensor_like
from torch.utils.dlpack import to_dlpack

import foregrad
from foregrad.errors import ForegradError

ASKED = {
    "is_fake": lambda x: is_fake(x),
    "is_fake of the module": lambda x: torch._subclasses.fake_tensor.is_fake(x),
    "isinstance": lambda x: isinstance(x, FakeTensor),
    "isinstance by the package": lambda x: isinstance(x, torch._subclasses.FakeTensor),
    "has_torch_function": lambda x: has_torch_function((x, 3)),
    "of the module": lambda x: torch.overrides.has_torch_function((x,)),
    "unary": lambda x: has_torch_function_unary(x),
    "variadic": lambda x: has_torch_function_variadic(x, x),
    "is_tensor_like": lambda x: is_tensor_like(x),
    "device of the storage": lambda x: x.untyped_storage().device,
    "device of a result's": lambda x: (x * 2).untyped_storage().device.type,
    "size of the storage": lambda x: (x.untyped_storage().nbytes(), len(x.untyped_storage())),
    "class of the storage": lambda x: type(x.untyped_storage()).__name__,
}
if sys.version_info >= (3, 11):
    ASKED["__getstate__"] = lambda x: x.__getstate__()


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ASKED)
def test_asked(name, requires_grad):
    def f(x):
        return x * 2, ASKED[name](x)

    before = is_fake, FakeTensor, has_torch_function, to_dlpack
    g = foregrad.compile(f, backend="eager", on_unsupported="raise")
    for _ in range(2):
        x = torch.ones(3, requires_grad=requires_grad)
        assert g(x)[1] == f(x)[1]
    assert (is_fake, FakeTensor, has_torch_function, to_dlpack) == before
    assert torch.overrides.has_torch_function is has_torch_function
    assert torch.utils.dlpack.to_dlpack is to_dlpack


HANDED_ON = {
    "from_dlpack": lambda x: torch.from_dlpack(x) + 1,
    "to_dlpack": lambda x: torch.from_dlpack(to_dlpack(x)) + 1,
    "torch.to_dlpack": lambda x: torch.from_dlpack(torch.to_dlpack(x * 2)) + 1,
    "numpy.from_dlpack": lambda x: x + np.from_dlpack(x).sum().item(),
    "__dlpack__": lambda x: (x.__dlpack__() is not None, x + 1)[1],
    "numbers of the storage": lambda x: x + x.untyped_storage()[0],
    "text of the storage": lambda x: x + len(repr(x.untyped_storage())),
}


@pytest.mark.parametrize("name", HANDED_ON)
def test_memory_and_values_that_leave_the_graph(name):
    f = HANDED_ON[name]
    with pytest.raises(ForegradError):
        foregrad.compile(f, backend="eager", on_unsupported="raise")(torch.ones(3))
    with foregrad.config.override(on_unsupported="eager"), pytest.warns(foregrad.errors.ForegradWarning):
        assert torch.equal(foregrad.compile(f, backend="eager")(torch.ones(3)), f(torch.ones(3)))


def test_an_object_that_overrides_functions_is_still_told_apart():
    class Mine:
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return 3

    def f(x):
        return x * 2, has_torch_function((x, Mine())), torch.add(x, Mine())

    assert foregrad.compile(f, backend="eager")(torch.ones(3))[1:] == f(torch.ones(3))[1:]
