"""Look at the stages: the joint graph of a small function, its halves, and what is saved between them.

Run with `python examples/look_inside.py`.
"""

import torch

import foregrad


def residual_block(x, w):
    hidden = torch.nn.functional.gelu(x @ w)
    return (x + hidden.sin()).sum()


x = torch.randn(16, 16)
w = torch.randn(16, 16, requires_grad=True)
joint = foregrad.capture(residual_block, x, w)
print(joint)

for policy in ("default", "min_cut"):
    parts = foregrad.partition(joint, policy)
    print(f"\n===== {policy}: {parts.saved_bytes} bytes saved for the backward\n")
    print(parts)
