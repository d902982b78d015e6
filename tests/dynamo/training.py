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

from tests.models.zoo import RECURRENT, WITHOUT_ATTENTION, ZOO

STEPS = 5
MODELS = {**ZOO, **RECURRENT}


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
    entry = MODELS[name]
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


def fail_where_dynamo_gives_up():
    """Dynamo, told to make no more graphs of a function than its limit, runs it as eager does: which proves nothing.

    The models share the functions that it counts for, so it also forgets those of the model before.
    """
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def main():
    from tests.dynamo.installed import make_known

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inner", default="eager", help="the backend inside: eager, inductor, ...")
    parser.add_argument("--names", nargs="*", default=list(MODELS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    make_known()
    print("off by: the largest difference of a loss, of a weight afterwards", flush=True)
    for name in arguments.names:
        fail_where_dynamo_gives_up()
        started = time.process_time()

        def compile(model):
            return torch.compile(model, backend="foregrad", options={"backend": arguments.inner})

        verdict = compared(*train_both(name, compile))
        if verdict != "equal" and arguments.inner == "eager":
            # Where a model does other things while it is traced, by whomever, what counts is what Dynamo traced.
            torch._dynamo.reset()
            traced = compared(*train_both(name, compile, reference_call=lambda m: torch.compile(m, backend="eager")))
            verdict += f"; against what Dynamo traced: {traced}"
        print(f"{name:12s} {verdict:75s} {time.process_time() - started:6.1f} s CPU", flush=True)


def compared(expected, actual, off):
    worst = max(abs(a - b) for a, b in zip(expected, actual, strict=True))
    return "equal" if worst == 0 and off == 0 else f"off by {worst:.1e}, {off:.1e}"


if __name__ == "__main__":
    main()
