"""What a function returns is the Python object that eager returns: parameters that it made, attributes that it set."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import foregrad
from foregrad.errors import UnsupportedSideEffectError

DOORS = {
    "directly": lambda f: foregrad.compile(f, backend="eager"),
    "under torch.compile": lambda f: torch.compile(f, backend="foregrad", options={"backend": "eager"}),
}


def filled(x):
    layer = nn.Linear(3, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(3))
    return layer.weight


def given_data(x):
    made = nn.Parameter(x * 2)
    made.data = x * 3
    return made


def written(x):
    made = nn.Parameter(x * 2)
    with torch.no_grad():
        made.add_(1)
    return made


def shared(x):
    y = x * 2
    return nn.Parameter(y), y


def twice(x):
    made = nn.Parameter(x * 2)
    return made, made, made[:2]


def by_a_module(x):
    module = nn.Module()
    module.register_parameter("w", nn.Parameter(x * 2))
    return module.w


def tagged(x):
    y = x * 2
    y.tag, y.kinds = "made here", [1, (2, None)]
    return y, x + 1


def tagged_view(x):
    y = x[:2]
    y.size_by_then = x.shape
    return {"view": y}


PROGRAMS = {
    "a parameter": lambda x: nn.Parameter(x * 2),
    "one without gradient": lambda x: nn.Parameter(x * 2, requires_grad=False),
    "one of a constant": lambda x: (nn.Parameter(torch.zeros(3)), x + 1),
    "one of an argument": lambda x: nn.Parameter(x),
    "in a list": lambda x: [nn.Parameter(x.sin())],
    "in a dict": lambda x: {"p": nn.Parameter(x.sin()), "q": x},
    "its copies": lambda x: (copy.deepcopy(nn.Parameter(x * 2)), copy.copy(nn.Parameter(x * 3))),
    "of it": lambda x: (nn.Parameter(x * 2) * 1, nn.Parameter(x * 2).detach(), nn.Parameter(x * 2).data),
    "a layer's": filled,
    "with other data": given_data,
    "written": written,
    "in memory of another": shared,
    "twice, and a view": twice,
    "a module's": by_a_module,
    "a buffer": lambda x: nn.Buffer(x * 2),
    "attributes": tagged,
    "an attribute of a view": tagged_view,
}


def seen(value):
    if isinstance(value, (list, tuple)):
        return [type(value), *map(seen, value)]
    if isinstance(value, dict):
        return {key: seen(item) for key, item in value.items()}
    if not isinstance(value, torch.Tensor):
        return value
    # Dynamo leaves its marks, and since 2.15 `fake_device` on what is given other data, whatever the backend.
    own = {key: item for key, item in vars(value).items() if not key.startswith("_dynamo_") and key != "fake_device"}
    attributes = {key: seen(item) for key, item in own.items()}
    kinds = (type(value), isinstance(value, nn.Parameter), isinstance(value, nn.Buffer))
    return (*kinds, attributes, value.requires_grad, value.is_leaf, value.tolist())


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo looks at it
def test_results_are_of_eagers_classes_with_its_attributes(name, door):
    torch._dynamo.reset()
    f = PROGRAMS[name]
    g = DOORS[door](f)
    for start in (0.0, 1.0, 2.0):
        x = torch.arange(3.0) + start
        assert seen(g(x)) == seen(f(x))


def test_a_list_that_is_an_attribute_is_each_results_own():
    g = foregrad.compile(tagged, backend="eager")
    first, second = g(torch.ones(3))[0], g(torch.ones(3))[0]
    first.kinds.append(3)
    assert second.kinds == [1, (2, None)]


def test_a_parameter_that_is_returned_can_be_trained():
    g = foregrad.compile(lambda x: nn.Parameter(x * 2), backend="eager")
    module = nn.Module()
    module.w = g(torch.ones(3))
    assert [name for name, _ in module.named_parameters()] == ["w"]
    module.w.pow(2).sum().backward()
    assert torch.equal(module.w.grad, torch.full((3,), 4.0))


def test_a_tensor_as_an_attribute_of_a_result_is_refused():
    def f(x):
        y = x * 2
        y.other = x * 3
        return y

    with pytest.raises(UnsupportedSideEffectError, match="the attribute other of out"):
        foregrad.compile(f, backend="eager")(torch.ones(3))
