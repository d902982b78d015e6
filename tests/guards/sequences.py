"""Random sequences of calls and changes against eager: `python -m tests.guards.sequences --examples 2000`.

An example is a module, compiled once, and some steps: a call with random arguments in a random context, or a change
to the module, its options, a global or its weights. A twin that is never compiled goes through the same steps; after
each call everything that can be seen must be the same, bit for bit.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
import warnings
from typing import Any

import torch

import foregrad
from tests.guards.random_functions import FunctionExample
from tests.guards.random_modules import ModuleExample

EXAMPLES = {"modules": ModuleExample, "functions": FunctionExample}


def _strides(tensor: torch.Tensor) -> Any:
    """Those that an address depends on."""
    if tensor.numel() < 2:
        return None
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def differs(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is not type(b) or a != b
    facts = [(t.dtype, t.shape, t.requires_grad, t.is_inference(), _strides(t)) for t in (a, b)]
    return facts[0] != facts[1] or not torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())


def play(
    seed: int, steps: int, *, compiled: bool, anew: bool = False, world: str = "modules"
) -> list[tuple[str, dict[str, Any]]]:
    """Every call of the example of that seed: (what happened before it, what was seen).

    `anew`: compile before each call. A difference that stays is the capture's, not the guards'.
    """
    choice = random.Random(seed)
    torch.manual_seed(seed)
    example: Any = EXAMPLES[world](choice)
    if compiled and not anew:
        example.compile()
    seen: list[tuple[str, dict[str, Any]]] = []
    since: list[Any] = []
    for step in range(steps):
        way = choice.random()
        torch.manual_seed(step)
        if way < 0.03:
            since.append("copy")
            example.live_on(choice)
        elif way < 0.5:
            index = choice.randrange(len(example.changes))
            since.append(index)
            example.change(index, choice)
        else:
            if anew:  # every graph for one call: no guards
                example.compile()
            found = example.observe(choice) | {"generator": torch.get_rng_state()}
            # Copies: later steps write to these.
            copied = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
            facts = {
                f"facts of {k}": (type(v), v.requires_grad, v.is_inference(), _strides(v))
                for k, v in found.items()
                if isinstance(v, torch.Tensor)
            }
            if "error" in found:  # how far eager got, nobody promises; and from here on the twins differ
                seen.append((f"step {step}, after changes {since}", {k: found[k] for k in ("error", "error text")}))
                return seen
            seen.append((f"step {step}, after changes {since}", copied | facts))
    return seen


def judge(seed: int, steps: int = 12, world: str = "modules") -> str:
    """'' for no difference, "refused ...", or what differs first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = play(seed, steps, compiled=False, world=world)
        try:
            actual = play(seed, steps, compiled=True, world=world)
        except foregrad.errors.UnsupportedError as refusal:
            return f"refused: {refusal}"
    for (where, eager), (_, ours) in zip(expected, actual, strict=False):
        if ("error" in eager) != ("error" in ours):
            return (
                f"{where}: eager {eager.get('error text', 'went on')!r}, compiled {ours.get('error text', 'went on')!r}"
            )
        wrong = [k for k in eager if k != "error text" and (k not in ours or differs(eager[k], ours[k]))]
        if wrong or eager.keys() != ours.keys():
            shown = {k: (eager.get(k), ours.get(k)) for k in wrong if not isinstance(eager.get(k), torch.Tensor)}
            return f"{where}: {', '.join(wrong)} {shown}{_whose(seed, steps, expected, world)}"
    return "" if len(expected) == len(actual) else "one of them stopped at an error"


def _whose(seed: int, steps: int, expected: list[tuple[str, dict[str, Any]]], world: str) -> str:
    actual = play(seed, steps, compiled=True, anew=True, world=world)
    same = all(
        eager.keys() == ours.keys() and not any(differs(eager[k], ours[k]) for k in eager if k != "error text")
        for (_, eager), (_, ours) in zip(expected, actual, strict=True)
    )
    return " (by the guards)" if same else " (by the capture)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guards.sequences", description=__doc__)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", choices=list(EXAMPLES), default="modules")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, failures, refusals = time.monotonic(), 0, 0
    for seed in range(options.seed, options.seed + options.examples):
        verdict = judge(seed, options.steps, options.world)
        refusals += verdict.startswith("refused")
        if verdict and not verdict.startswith("refused"):
            failures += 1
            if failures <= 10:
                print(f"seed {seed}: {verdict[:600]}", flush=True)
        elif verdict and refusals <= 5:
            print(f"seed {seed}: {verdict[:300]}", flush=True)
    spent = time.monotonic() - started
    print(
        f"{options.examples} sequences of {options.steps} steps in {spent:.0f} s: {failures} differ, {refusals} refused"
    )
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
