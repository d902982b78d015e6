"""Names of PyTorch and Python that a capture replaces mean what they meant when it is over, or never began."""

from __future__ import annotations

import builtins
import logging
import os
import random
import time

import pytest
import torch

import foregrad
from foregrad._torch import patches
from foregrad.locks import Replacements


def bound():
    """What some of the names are bound to, among them inherited ones."""
    owners = torch.Tensor, torch.nn.Module, torch._C.ScriptFunction
    names = ("tolist", "set_", "__getattr__", "__call__", "__setattr__", "__getattribute__", "_use_count")
    of_classes = [vars(owner).get(name) for owner in owners for name in names]
    return [*of_classes, builtins.print, logging.Logger.handle, torch.compile, torch.Generator, torch.Generator.seed]


@pytest.mark.parametrize("error", [RecursionError, KeyboardInterrupt])
def test_names_are_restored_if_not_all_can_be_replaced(monkeypatch, error):
    def failing(*_):
        raise error

    def call():
        return foregrad.compile(lambda x: x * 2, backend="eager")(torch.ones(1))

    before = bound()
    with monkeypatch.context() as patch:
        patch.setattr(patches.dynamo_off, "install", failing)
        with pytest.raises((error, foregrad.errors.UnsupportedError)):
            call()
    assert bound() == before
    assert call().item() == 2
    assert bound() == before


class Scaled(torch.nn.Module):
    """Reads attributes of its own and of the class, asks for one that is not there, and reads another's table."""

    offset = 1.0

    def __init__(self):
        super().__init__()
        self.scale, self.other = 2.0, torch.nn.Linear(1, 1)

    def forward(self, x):
        power = getattr(self, "power", 1)
        return x**power * self.scale + self.offset + self.other.__dict__["in_features"]


CHANGES = [("scale", 3.0), ("power", 2), ("offset", 5.0)]


@pytest.mark.parametrize("in_python", [False, True])
def test_reads_of_attributes_are_noted_in_either_way(monkeypatch, in_python):
    if in_python:
        monkeypatch.setattr(patches, "_attribute_reader", lambda: patches._getattribute)
    module = Scaled()
    compiled = foregrad.compile(module, backend="eager")
    x = torch.full((2,), 3.0)
    for name, value in [("scale", 2.0), *CHANGES]:
        setattr(module, name, value)
        assert torch.equal(compiled(x), module(x))
    module.other.in_features = 7
    assert torch.equal(compiled(x), module(x))
    graphs = len(compiled.foregrad.compilations)
    module.never_read = 1
    assert torch.equal(compiled(x), module(x)) and len(compiled.foregrad.compilations) == graphs


class Called:
    """What a class may have in place of the methods that are replaced."""

    def __call__(self):
        return "own"

    def __getattr__(self, name):
        return name

    def __setattr__(self, name, value):
        self.__dict__[name] = value, "own"


class Inherits(Called):
    pass


class Overrides(Called):
    __setattr__ = object.__setattr__

    def __call__(self):
        return "overridden"


REPLACED = {
    "__call__": lambda self: "replaced",
    "__setattr__": lambda self, name, value: self.__dict__.update({name: (value, "replaced")}),
    "__getattribute__": lambda self, name: (
        f"replaced {name}" if name[0] != "_" else object.__getattribute__(self, name)
    ),
}


def seen(made):
    made.x = 1
    return made(), made.__dict__["x"], made.x, made.missing


def test_special_methods_are_replaced_in_classes_that_inherit_them_and_in_no_other():
    """Also in classes that were made before, whose methods C calls, and where the code that calls them is warm."""

    class Later(Called):
        pass

    plain = [seen(kind()) for kind in (Called, Inherits, Overrides, Later) for _ in range(20)]
    before = dict(vars(Called))
    for _ in range(3):
        replacements = Replacements()
        for name, method in REPLACED.items():
            replacements.bind(Called, name, method)

        class Meanwhile(Called):
            pass

        of_base = ("replaced", (1, "replaced"), "replaced x", "replaced missing")
        assert [seen(kind()) for kind in (Called, Inherits, Later, Meanwhile)] == [of_base] * 4
        assert seen(Overrides()) == ("overridden", 1, "replaced x", "replaced missing")
        replacements.restore()
        assert dict(vars(Called)) == before
        assert [seen(kind()) for kind in (Called, Inherits, Overrides, Later) for _ in range(20)] == plain
        assert seen(Meanwhile()) == plain[0]


def test_special_methods_that_c_calls_by_itself_are_replaced():
    """`__setattr__ = object.__setattr__` in a class is called from another place than a method of Python."""

    class Quick(Called):
        __setattr__ = object.__setattr__

    class Inheriting(Quick):
        pass

    made = Inheriting()
    made.x = 1
    replacements = Replacements()
    replacements.bind(Quick, "__setattr__", REPLACED["__setattr__"])
    made.x = 2
    assert made.__dict__["x"] == (2, "replaced")
    replacements.restore()
    made.x = 3
    assert made.__dict__["x"] == 3


def replaced_by(monkeypatch, function):
    """The names that a capture of the function replaces, with the ids of the owners."""
    monkeypatch.setattr(Replacements, "names", set())
    foregrad.compile(function, backend="eager", on_unsupported="raise")(torch.ones(2, requires_grad=True))
    return Replacements.names


def test_functions_that_draw_are_replaced_only_where_code_names_one(monkeypatch):
    def owners(function):
        names = replaced_by(monkeypatch, function)
        return {owner for owner in (random, random.Random, time, os) if id(owner) in {number for number, _ in names}}

    assert owners(lambda x: x.sin()) == set()
    assert owners(lambda x: x * random.uniform(0, 1)) == {random, random.Random}
    assert owners(lambda x: x * (time.time() > 0)) == {time}


def test_a_capture_replaces_few_names_of_others(monkeypatch):
    """Each such name may get in the way of a further tool."""
    assert len(replaced_by(monkeypatch, lambda x: x.sin())) <= 70


def test_nothing_is_kept_of_names_bound_in_a_function_that_is_gone():
    """The names are kept by the owners' ids, which later objects get."""

    def used():
        foregrad.compile(lambda x: x.sin(), backend="eager")(torch.ones(2))
        return len(Replacements.names)

    used()
    assert [used() for _ in range(4)] == [used()] * 4
