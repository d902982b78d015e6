"""An unpack hook that frees what is being unpacked: `python -m tests.native.letting_go let_go|raw|backward`."""

import sys

import torch

import foregrad


def let_go():
    outs[0].grad_fn.maybe_clear_saved_tensors()


def let_go_of_raw():
    raw[:] = outs[0].grad_fn._raw_saved_tensors
    let_go()


def run_backward():
    if len(outs) == 1:
        outs.append(None)
        outs[0].backward()


outs, raw, how = [], [], {"let_go": let_go, "raw": let_go_of_raw, "backward": run_backward}[sys.argv[1]]


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
