"""Saved tensors of the node in C++ while hooks let go of them. (A node in Python ends the process, as in eager.)"""

from __future__ import annotations

import pytest
import torch

import foregrad
from foregrad._torch.native import native
from tests import forked

pytestmark = pytest.mark.skipif(native() is None, reason="the C++ part is not built")


@pytest.mark.parametrize("how", ["let_go", "raw", "backward"])
def test_an_unpack_hook_that_lets_go_of_what_is_saved(how):
    """In a process of its own, which must not end by a signal: the hook frees what is being unpacked."""
    done = forked.run("tests.native.letting_go", how)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


def test_what_hooks_are_registered_on_outlives_the_node():
    x = torch.randn(3, requires_grad=True)
    with foregrad.config.override(native=True):
        y = foregrad.compile(lambda x: x.exp().sin(), backend="eager")(x)
    raw = y.grad_fn._raw_saved_tensors
    y.sum().backward()
    del y
    for each in raw:
        each.register_hooks(lambda t: t.clone(), lambda t: t)
