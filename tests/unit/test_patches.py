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
