"""Names of PyTorch and Python that a capture replaces mean what they meant when it is over, or never began."""

from __future__ import annotations

import builtins
import logging

import pytest
import torch

import foregrad
from foregrad._torch import patches


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
        patch.setattr(patches.torchscript, "install", failing)
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
