"""Saved tensors of the node in C++ while hooks let go of them. (A node in Python ends the process, as in eager.)"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import foregrad
from foregrad._torch.native import native

pytestmark = pytest.mark.skipif(native() is None, reason="the C++ part is not built")

LETS_GO = """
import sys, torch, foregrad

def let_go():
    outs[0].grad_fn.maybe_clear_saved_tensors()

def let_go_of_raw():
    raw[:] = outs[0].grad_fn._raw_saved_tensors
    let_go()

def run_backward():
    if len(outs) == 1:
        outs.append(None)
        outs[0].backward()

outs, raw, how = [], [], dict(let_go=let_go, raw=let_go_of_raw, backward=run_backward)[sys.argv[1]]

def unpack(saved):
    how()
    return saved.clone()

f = foregrad.compile(lambda x, y: (x.exp() * y).sin().sum(), backend="eager")
x, y = torch.randn(1000, requires_grad=True), torch.randn(1000, requires_grad=True)
with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
    outs.append(f(x, y))
try:
    outs[0].backward()
except RuntimeError as error:
    assert "a second time" in str(error), error
    print("refused")
for each in raw:
    try:
        each.register_hooks(lambda saved: saved, lambda saved: saved)
    except RuntimeError as error:
        assert "already been set" in str(error), error
"""


@pytest.mark.parametrize("how", ["let_go", "raw", "backward"])
def test_an_unpack_hook_that_lets_go_of_what_is_saved(how):
    """In a process of its own, which must not end by a signal: the hook frees what is being unpacked."""
    command = [sys.executable, "-c", LETS_GO, how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
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
