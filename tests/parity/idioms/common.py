"""What programs of tests/parity/idioms are registered with, and the tensors that they take."""

from __future__ import annotations

import torch

__all__ = ["PROGRAMS", "interior", "leaf", "plain", "program"]

PROGRAMS = {}


def program(make_args, **options):
    """Register a function: the name of the test is its own."""

    def register(f):
        PROGRAMS[f.__name__] = (f, make_args, options)
        return f

    return register


def plain(*shape):
    return torch.randn(*shape)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def interior(*shape):
    """A tensor with a history, which may be written in place."""
    return torch.randn(*shape, requires_grad=True) * 1
