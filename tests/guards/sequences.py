"""Random sequences of calls and changes against eager: `python -m tests.guards.sequences --examples 2000`.

An example is a module, compiled once, and some steps: a call with random arguments in a random context, or a change
to the module, its options, a global or its weights. A twin that is never compiled goes through the same steps; after
each call everything that can be seen must be the same, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import warnings
from typing import Any

import torch
from torch import nn

import foregrad

GLOBALS = {"gain": 1, "function": torch.sin}


class Options:
    def __init__(self) -> None:
        self.scale = 1.0
        self.kind = "add"


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("seen", torch.zeros(3))
        self.options = Options()
        self.counting = True

    def forward(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
        x = self.drop(self.linear(x)) * self.options.scale
        if self.counting and self.training:
            self.seen.add_(x.detach().mean(0).to(self.seen.dtype))
        if y is not None:
            x = x + y if self.options.kind == "add" else x * y
        return x


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Part(), Part()])
        self.depth = 2
        self.extra: Any = None

    def forward(self, x: torch.Tensor, y: Any = None, inplace: bool = False) -> dict[str, Any]:
        if inplace:
            x.mul_(2)
        for part in self.parts[: self.depth]:
            x = part(x, y)
        if self.extra is not None:
            x = x + self.extra
        return {"x": GLOBALS["function"](x) * GLOBALS["gain"], "y": y, "view": x[0]}


# ---------------------------------------------------------------------------------------------- changes to a module

CHANGES = [
    lambda m, r: m.train(r.random() < 0.5),
    lambda m, r: r.choice(m.parts).train(r.random() < 0.5),
    lambda m, r: setattr(r.choice(m.parts).drop, "p", r.choice([0.0, 0.25, 0.5])),
    lambda m, r: setattr(r.choice(m.parts).options, "scale", r.choice([1.0, 2.0, 1, -0.0])),
    lambda m, r: setattr(r.choice(m.parts).options, "kind", r.choice(["add", "multiply"])),
    lambda m, r: setattr(r.choice(m.parts), "counting", r.random() < 0.5),
    lambda m, r: setattr(m, "depth", r.choice([1, 2])),
    lambda m, r: setattr(m, "extra", r.choice([None, 1, 2.0, torch.ones(3)])),
    lambda m, r: setattr(m, "unread", r.random()),
    lambda m, r: GLOBALS.update(gain=r.choice([1, 2, 2.0])),
    lambda m, r: GLOBALS.update(function=r.choice([torch.sin, torch.tanh, torch.clone])),
    lambda m, r: r.choice(m.parts).linear.weight.requires_grad_(r.random() < 0.5),
    lambda m, r: r.choice(m.parts).requires_grad_(r.random() < 0.5),
    lambda m, r: setattr(r.choice(m.parts).linear, "weight", nn.Parameter(torch.randn(3, 3))),
    lambda m, r: setattr(r.choice(m.parts).linear.weight, "data", r.choice([torch.randn(3, 3), torch.randn(3, 3).t()])),
    lambda m, r: setattr(r.choice(m.parts).linear, "bias", r.choice([None, nn.Parameter(torch.randn(3))])),
    lambda m, r: setattr(r.choice(m.parts), "linear", nn.Linear(3, 3)),
    lambda m, r: m.parts.__setitem__(r.choice([0, 1]), Part()),
    lambda m, r: setattr(m.parts[0].linear, "weight", m.parts[1].linear.weight),
    lambda m, r: setattr(r.choice(m.parts), "seen", torch.zeros(3)),
    lambda m, r: setattr(m.parts[0], "seen", m.parts[1].seen),
    lambda m, r: m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()}, assign=True),
    lambda m, r: m.load_state_dict({k: torch.randn_like(v) for k, v in m.state_dict().items()}),
    lambda m, r: r.choice(m.parts).linear.register_forward_hook(lambda _m, _i, out: out * 2),
    lambda m, r: r.choice(m.parts).linear._forward_hooks and r.choice(m.parts).linear._forward_hooks.clear(),
    lambda m, r: m.to(r.choice([torch.float32, torch.float64])),
]

CONTEXTS = [
    *[contextlib.nullcontext] * 6,
    torch.no_grad,
    torch.inference_mode,
    lambda: torch.autocast("cpu", torch.bfloat16),
    lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
]


def arguments(r: random.Random, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of a few shapes, layouts and kinds, some of them one and the same or overlapping."""
    rows = r.choice([1, 2, 4])
    memory = torch.randn(2 * rows, 3, dtype=dtype)
    x = r.choice([memory[:rows], torch.randn(rows, 3, dtype=dtype), torch.randn(3, rows, dtype=dtype).t()])
    if r.random() < 0.5:
        x = x.clone().requires_grad_()
        x = x if r.random() < 0.5 else x * 1
    leaf = x.requires_grad and x.is_leaf
    y = r.choice([None, 2, 2.0, x, memory[rows // 2 : rows // 2 + rows], torch.randn(3, dtype=dtype)])
    kwargs = {"inplace": True} if not leaf and r.random() < 0.3 else {}
    return ((x,), {"y": y, **kwargs}) if r.random() < 0.3 else ((x, y), kwargs)


def everything(model: nn.Module, call: Any, seed: int, choice: random.Random) -> dict[str, Any]:
    """One call: what it returns or raises, and all that it changes."""
    torch.manual_seed(seed)
    dtype = model.parts[0].linear.weight.dtype
    args, kwargs = arguments(choice, dtype)
    context, backward = choice.choice(CONTEXTS), choice.random() < 0.7
    model.zero_grad(set_to_none=True)
    seen: dict[str, Any] = {}
    try:
        with context():
            out = call(*args, **kwargs)
        seen["x"], seen["view"] = out["x"], out["view"]
        seen["shares"] = out["y"] is kwargs.get("y", args[1] if len(args) > 1 else None)
        if backward and out["x"].requires_grad:
            out["x"].float().sum().backward()
    except foregrad.errors.UnsupportedError:
        raise
    except Exception as error:
        seen["error"] = type(error).__name__
    for index, value in enumerate((*args, *kwargs.values())):
        if isinstance(value, torch.Tensor):
            seen[f"argument {index}"] = value
            seen[f"grad of argument {index}"] = value.grad if value.is_leaf and not value.is_inference() else None
    seen |= {f"parameter {n}": p for n, p in model.named_parameters()}
    seen |= {f"grad of {n}": p.grad for n, p in model.named_parameters()}
    seen |= {f"buffer {n}": b for n, b in model.named_buffers()}
    seen["generator"] = torch.get_rng_state()
    return seen


def differs(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return type(a) is not type(b) or a != b
    facts = [
        (t.dtype, t.shape, t.requires_grad, t.is_inference(), t.stride() if t.numel() > 1 else None) for t in (a, b)
    ]
    return facts[0] != facts[1] or not torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())


def play(seed: int, steps: int, *, compiled: bool, anew: bool = False) -> list[tuple[str, dict[str, Any]]]:
    """Every call of the example of that seed: (what happened before it, what was seen).

    `anew`: compile before each call. A difference that stays is the capture's, not the guards'.
    """
    choice = random.Random(seed)
    torch.manual_seed(seed)
    GLOBALS.update(gain=1, function=torch.sin)
    model = Whole()
    call = model
    if compiled:
        with foregrad.config.override(recompile_limit=10_000):
            call = foregrad.compile(model, backend="eager")
    seen, since = [], []
    for step in range(steps):
        if choice.random() < 0.5:
            index = choice.randrange(len(CHANGES))
            since.append(index)
            torch.manual_seed(step)
            CHANGES[index](model, choice)
        else:
            if anew:  # every graph for one call: no guards
                call = foregrad.compile(model, backend="eager")
            found = everything(model, call, step, choice)
            # Copies: later steps write to these.
            copied = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in found.items()}
            facts = {
                f"facts of {k}": (v.requires_grad, v.is_inference(), v.stride() if v.numel() > 1 else None)
                for k, v in found.items()
                if isinstance(v, torch.Tensor)
            }
            if "error" in found:  # how far eager got, nobody promises; and from here on the twins differ
                seen.append((f"step {step}, after changes {since}", {"error": found["error"]}))
                return seen
            seen.append((f"step {step}, after changes {since}", copied | facts))
    return seen


def judge(seed: int, steps: int = 12) -> str:
    """'' for no difference, "refused ...", or what differs first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = play(seed, steps, compiled=False)
        try:
            actual = play(seed, steps, compiled=True)
        except foregrad.errors.UnsupportedError as refusal:
            return f"refused: {refusal}"
    for (where, eager), (_, ours) in zip(expected, actual, strict=True):
        wrong = [k for k in eager if k not in ours or differs(eager[k], ours[k])]
        if wrong or eager.keys() != ours.keys():
            shown = {k: (eager.get(k), ours.get(k)) for k in wrong if not isinstance(eager.get(k), torch.Tensor)}
            return f"{where}: {', '.join(wrong)} {shown}{_whose(seed, steps, expected)}"
    return ""


def _whose(seed: int, steps: int, expected: list[tuple[str, dict[str, Any]]]) -> str:
    actual = play(seed, steps, compiled=True, anew=True)
    same = all(
        eager.keys() == ours.keys() and not any(differs(eager[k], ours[k]) for k in eager)
        for (_, eager), (_, ours) in zip(expected, actual, strict=True)
    )
    return " (by the guards)" if same else " (by the capture)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guards.sequences", description=__doc__)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started, failures, refusals = time.monotonic(), 0, 0
    for seed in range(options.seed, options.seed + options.examples):
        verdict = judge(seed, options.steps)
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
