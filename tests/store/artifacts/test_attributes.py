"""Tensors assigned to attributes of modules: twelve kinds are reported by path and put back, registered buffers not."""

from __future__ import annotations

import types

import pytest
import torch
from torch import nn

import foregrad
from foregrad import check_attribute_assignment
from foregrad.errors import AttributeAssignedError


class Inner(nn.Module):
    shared = None

    def __init__(self):
        super().__init__()
        self.cache, self.items, self.pair, self.seen = {"old": torch.zeros(1)}, [torch.zeros(1)], (1, 2), set()
        self.deep = {"layers": [{"k": None}]}
        self.holder = types.SimpleNamespace(value=None)
        self.old = torch.zeros(2)
        self.nothing = None
        self.register_buffer("kept", torch.zeros(3))
        self.register_buffer("none", None)

    def forward(self, x):
        return x


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.act = None

    def forward(self, x):
        self.act(self, self.inner, x)
        return x * 2


def new(o, i, x):
    o.fresh = x + 1


def over_none(o, i, x):
    i.nothing = x


def over_a_tensor(o, i, x):
    i.old = x.sin()


def item_of_a_dict(o, i, x):
    i.cache["new"] = x


def item_over_another(o, i, x):
    i.cache["old"] = x


def appended(o, i, x):
    i.items.append(x)


def item_of_a_list(o, i, x):
    i.items[0] = x


def in_a_tuple(o, i, x):
    i.pair = (1, x)


def deeply(o, i, x):
    i.deep["layers"][0]["k"] = x


def of_an_object(o, i, x):
    i.holder.value = x


def in_a_set(o, i, x):
    i.seen.add(x)


def of_the_class(o, i, x):
    type(i).shared = x


def new_container(o, i, x):
    o.states = {"h": [x, x.cos()]}


def through_vars(o, i, x):
    vars(i)["hidden"] = x


KINDS = {
    new: "self.fresh",
    over_none: "self.inner.nothing",
    over_a_tensor: "self.inner.old",
    item_of_a_dict: "self.inner.cache['new']",
    item_over_another: "self.inner.cache['old']",
    appended: "self.inner.items[1]",
    item_of_a_list: "self.inner.items[0]",
    in_a_tuple: "self.inner.pair[1]",
    deeply: "self.inner.deep['layers'][0]['k']",
    of_an_object: "self.inner.holder.value",
    in_a_set: "self.inner.seen",
    of_the_class: "Inner.shared",
    new_container: "self.states['h'][0], self.states['h'][1]",
    through_vars: "self.inner.hidden",
}


def made(act):
    module = Outer()
    object.__setattr__(module, "act", act)
    return module


def state(module):
    inner = module.inner
    return (
        sorted(vars(module)), sorted(vars(inner)), {k: id(v) for k, v in inner.cache.items()}, list(map(id, inner.items)),
        inner.pair, set(inner.seen), inner.deep, vars(inner.holder), id(inner.old), inner.nothing, Inner.shared,
    )  # fmt: skip


@pytest.mark.parametrize("act", KINDS, ids=lambda act: act.__name__)
def test_kinds_are_reported_by_path_and_put_back(act):
    module = made(act)
    containers = module.inner.cache, module.inner.items, module.inner.deep
    before = repr(state(module))
    with pytest.raises(AttributeAssignedError) as found, check_attribute_assignment(module) as paths:
        module(torch.ones(2))
    assert ", ".join(paths) == KINDS[act]
    assert f" {KINDS[act]} w" in str(found.value)
    assert repr(state(module)) == before
    assert (module.inner.cache, module.inner.items, module.inner.deep) == containers
    assert module.inner.cache is containers[0]
    assert module.inner.items is containers[1]


@pytest.mark.parametrize("act", KINDS, ids=lambda act: act.__name__)
def test_export_refuses_them_by_path(act):
    module = made(act)
    before = repr(state(module))
    with pytest.raises(AttributeAssignedError) as found:
        foregrad.export(module, (torch.ones(2),))
    assert f" {KINDS[act]} w" in str(found.value)
    assert repr(state(module)) == before


def write_a_buffer(o, i, x):
    i.kept.add_(1)


def numbers(o, i, x):
    o.count = 3
    i.cache["n"] = 4
    i.items.append("text")


def nothing_at_all(o, i, x):
    pass


@pytest.mark.parametrize("act", [write_a_buffer, nothing_at_all], ids=lambda act: act.__name__)
def test_registered_buffers_may_be_written(act):
    module = made(act)
    with check_attribute_assignment(module) as paths:
        module(torch.ones(2))
    assert paths == []
    foregrad.export(module, (torch.ones(2),))


def test_registered_buffers_may_be_assigned():
    module = made(nothing_at_all)
    with check_attribute_assignment(module) as paths:
        module.inner.kept = torch.ones(3)
        module.inner.none = torch.ones(1)
        module.inner.register_buffer("more", torch.ones(1))
    assert paths == []


def test_what_is_no_tensor_is_put_back_in_silence():
    module = made(numbers)
    with check_attribute_assignment(module):
        module(torch.ones(2))
    assert not hasattr(module, "count")
    assert "n" not in module.inner.cache
    assert len(module.inner.items) == 1


def test_an_error_inside_is_passed_on_and_the_attributes_are_put_back():
    module = made(new)
    with pytest.raises(KeyError, match="mine"), check_attribute_assignment(module):
        module(torch.ones(2))
        raise KeyError("mine")
    assert not hasattr(module, "fresh")
