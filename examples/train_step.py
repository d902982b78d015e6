"""The whole training step as one graph: the demo's GPT, its loss, the backward, clipping and AdamW.

Run with `python examples/train_step.py`. The same steps in eager PyTorch, from the same start and with the same random
numbers, end with the same bits.
"""

import copy
import pathlib
import sys
import time

import torch

import foregrad

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))

from demo.gpt import GPT, GPTConfig
from demo.text import Batches, read_sources

STEPS = 12

config = GPTConfig(layers=2, width=64)
batches = Batches(read_sources(), batch=4, context=config.context, seed=0)
data = [batches.draw() for _ in range(STEPS)]
torch.manual_seed(0)
start = GPT(config)


def train(wrap):
    """The losses and the model after all steps, and what `wrap` has made of the step."""
    model = copy.deepcopy(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    def step(inputs, targets):
        optimizer.zero_grad()
        loss = model(inputs, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    call = wrap(step)
    torch.manual_seed(1)  # for the dropout
    losses, times = [], []
    for inputs, targets in data:
        begin = time.perf_counter()
        losses.append(call(inputs, targets))
        times.append(time.perf_counter() - begin)
        scheduler.step()
    print(f"{wrap.__name__}: loss {losses[-1]:.4f}, the last step took {times[-1] * 1e3:.0f} ms")
    return losses, model, call


def eager(step):
    return step


def foregrad_eager_kernels(step):
    return foregrad.compile(step, backend="eager")


losses, model, _ = train(eager)
found, trained, compiled = train(foregrad_eager_kernels)
assert all(map(torch.equal, losses, found))
assert all(map(torch.equal, model.parameters(), trained.parameters()))
assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), trained.parameters(), strict=True))
print(f"{len(foregrad.explain_recompiles(compiled))} graphs for {STEPS} steps; losses, weights and gradients are equal")
