"""Training steps of the architectures in `tests.models.zoo`, eager and compiled side by side.

All of them, through torch.compile and foregrad, with any backend inside:

    python -m tests.dynamo.training --inner eager
    python -m tests.dynamo.training --inner inductor --names gpt2 resnet
"""

from __future__ import annotations

import argparse
import copy
import time
import warnings

import torch

from tests.models.zoo import WITHOUT_ATTENTION, ZOO

STEPS = 5


def losses(entry, model, call, steps=STEPS):
    """The losses of some steps of plain gradient descent, other inputs each."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        model.zero_grad(set_to_none=True)
        loss = entry.loss(call(**entry.inputs(step)))
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.1)
        found.append(loss.item())
    return found


def train_both(name, compile, steps=STEPS, reference_call=lambda model: model):
    """(eager's losses, the compiled model's, the largest difference of a weight afterwards)."""
    entry = ZOO[name]
    model = entry.build("eager" if name in WITHOUT_ATTENTION else "sdpa")
    reference = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        actual = losses(entry, model, compile(model), steps)
        expected = losses(entry, reference, reference_call(reference), steps)
    off = max(
        (p - q).abs().max().item() for p, q in zip(model.parameters(), reference.parameters(), strict=True) if p.numel()
    )
    return expected, actual, off


def main():
    from tests.dynamo.installed import make_known

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inner", default="eager", help="the backend inside: eager, inductor, ...")
    parser.add_argument("--names", nargs="*", default=list(ZOO))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    make_known()
    for name in arguments.names:
        torch._dynamo.reset()
        started = time.process_time()

        def compile(model):
            return torch.compile(model, backend="foregrad", options={"backend": arguments.inner})

        expected, actual, off = train_both(name, compile)
        worst = max(abs(a - b) for a, b in zip(expected, actual, strict=True))
        verdict = "equal" if worst == 0 and off == 0 else f"losses off by {worst:.1e}, weights by {off:.1e}"
        print(f"{name:12s} {verdict:45s} {time.process_time() - started:6.1f} s CPU", flush=True)


if __name__ == "__main__":
    main()
