"""Random programs of several compiled functions, differentiated two and three times, compiled and in eager.

    python -m tests.higher.fuzz [--programs N] [--start SEED] [--hooks]

A program has some tensors (leaves, results of operators, some without gradients), two to four functions of a few
smooth operators, views, writes, detached parts, random numbers and gradients taken inside, a body that calls them in a
row with eager operators in between, and hooks. What it computes is differentiated by some of the tensors, the
gradients by others, and so on; results, gradients of every order and what the hooks saw must be eager's.
"""

from __future__ import annotations

import argparse
import linecache
import random
import sys
import warnings
from typing import Any

import torch

import foregrad
from foregrad.errors import ForegradError

UNARY = (
    "{a}.sin()", "{a}.tanh()", "{a}.sigmoid()", "({a} * 0.5).exp()", "{a} * {a}", "{a}.softmax(-1)", "{a}.cumsum(0)",
    "{a}.t()", "{a}[1:].sum(0) + {a}", "{a} * {a}.mean()", "torch.nn.functional.softplus({a})", "{a}.flip(0)",
    "{a}.reshape(-1).view(3, 3)", "{a}.t().contiguous()", "{a}.norm(dim=-1, keepdim=True) + {a}",
)  # fmt: skip
BINARY = (
    "{a} * {b}",
    "{a} + {b}",
    "{a} @ {b}",
    "{a} - {b}.sin()",
    "{a} / ({b} * {b} + 1)",
    "torch.where({a} > 0, {a}, {b})",
)
WRITES = (
    "{a}.mul_({b})",
    "{a}.add_({b}, alpha=0.5)",
    "{a}[0] = {b}[1] * 1",
    "{a}.t().add_({b} * 1)",
    "{a}[:, 1].mul_({b}[0] * 1)",
)
CUTS = ("{a}.detach() * {b}", "({a} * {b}).detach()")
RANDOM = ("torch.rand_like({a}) * {a}", "torch.nn.functional.dropout({a}, 0.3)")
INNER = (
    "torch.autograd.grad(({a}.sin() * {b}).sum(), {a}, create_graph=True)[0] if {a}.requires_grad else {a}",
    "torch.func.grad(lambda t: (t.tanh() * {b}).pow(2).sum())({a})",
)
VIEWS = ("{a}.t()", "{a}.view(3, 3)", "{a}[:2]")
HOOKS = (
    "lambda g: g * 2",
    "lambda g: g * g * 0.1",
    "lambda g: seen.append(g.detach().clone())",
    "lambda g: g / (g * g + 1)",
)


class Maker:
    """Writes one program from a seed."""

    def __init__(self, seed: int, hooks: bool) -> None:
        self.random = random.Random(seed)
        self.hooks = hooks
        self.lines: list[str] = []

    def chance(self, percent: int) -> bool:
        return self.random.randrange(100) < percent

    def pick(self, options: Any) -> Any:
        return self.random.choice(list(options))

    def function(self, name: str, arity: int) -> int:
        """A function of `arity` tensors (3, 3); how many it returns."""
        known = [f"a{i}" for i in range(arity)]
        own: list[str] = []
        body = []
        for step in range(self.random.randint(2, 6)):
            a, b = self.pick(known), self.pick(known)
            kind = self.random.randrange(100)
            new = f"v{step}"
            if kind < 40:
                code = self.pick(UNARY)
            elif kind < 68:
                code = self.pick(BINARY)
            elif kind < 80 and (own or self.chance(30)):
                a = self.pick(own) if own and self.chance(85) else self.pick(known)
                body.append(self.pick(WRITES).format(a=a, b=b))
                continue
            elif kind < 86:
                code = self.pick(CUTS)
            elif kind < 93:
                code = self.pick(RANDOM)
            else:
                code = self.pick(INNER)
            body.append(f"{new} = {code.format(a=a, b=b)}")
            known.append(new)
            own.append(new)
        results = [self.pick(own or known)]
        while self.chance(40) and len(results) < 3:
            results.append(self.pick(known))
        if self.chance(25):
            body.append(f"r = {self.pick(VIEWS).format(a=self.pick(known))}")
            results.append("r")
        self.lines += [f"def {name}({', '.join(known[:arity])}):", *("    " + line for line in body)]
        self.lines += [f"    return {', '.join(results)},", ""]
        return len(results)

    def program(self) -> str:
        count = self.random.randint(2, 4)
        functions = []
        for i in range(self.random.randint(2, 4)):
            arity = self.random.randint(1, 3)
            functions.append((f"f{i}", arity, self.function(f"f{i}", arity)))
        body, leaves, known = [], [], []
        for i in range(count):
            takes = i == 0 or self.chance(75)
            body.append(f"x{i} = torch.randn(3, 3, dtype=torch.float64, requires_grad={takes})")
            if takes:
                leaves.append(f"x{i}")
            if self.chance(60):
                body.append(f"y{i} = x{i} * {self.pick((0.5, 1.5))}")
                known.append(f"y{i}")
            else:
                known.append(f"x{i}")
        outputs: list[str] = []
        for name, arity, results in functions:
            run = name if self.chance(20) else f"compiled({name})"
            given = [self.pick(outputs if outputs and self.chance(60) else known) for _ in range(arity)]
            made = [f"{name}_{i}" for i in range(results)]
            body.append(f"{', '.join(made)}, = {run}({', '.join(given)})")
            for value in made:
                if self.hooks and self.chance(30):
                    # Without a look at the history, a hook on a view that was written to ends PyTorch 2.13 itself.
                    body.append(f"if {value}.grad_fn: {value}.register_hook({self.pick(HOOKS)})")
            if self.hooks and self.chance(15):
                value = self.pick(given)
                body.append(f"if {value}.grad_fn: {value}.register_hook({self.pick(HOOKS)})")
            square = []
            for value in made:
                body.append(
                    f"{value}s = {value}.sum(0) + {self.pick(known)}" if self.chance(20) else f"{value}s = {value}"
                )
                body.append(f"if {value}s.shape != (3, 3): {value}s = {value}s.sum() * x0")
                square.append(f"{value}s")
            outputs += square
            if self.chance(30):
                body.append(f"z_{name} = {self.pick(UNARY + BINARY).format(a=self.pick(outputs), b=self.pick(known))}")
                outputs.append(f"z_{name}")
        if self.hooks and self.chance(30):
            body.append(f"{self.pick(leaves)}.register_hook({self.pick(HOOKS)})")
        chosen = self.random.sample(outputs, min(len(outputs), self.random.randint(1, 3)))
        body.append(f"results += [{', '.join(outputs)}]")
        body.append(f"total = sum((t / (t * t + 1) + 0.1 * t).sum() for t in [{', '.join(chosen)}])")
        order = self.random.randint(2, 3)
        for step in range(order):
            by = self.random.sample(leaves, self.random.randint(1, len(leaves)))
            body.append("if not total.requires_grad: return")
            keep = step + 1 < order
            body.append(f"g = torch.autograd.grad(total, [{', '.join(by)}], create_graph={keep}, allow_unused=True)")
            body.append("results += g")
            if keep:
                body.append("g = [t for t in g if t is not None and t.requires_grad]")
                body.append("if not g: return")
                if self.hooks and self.chance(30):
                    body.append(f"g[0].register_hook({self.pick(HOOKS)})")
                body.append("total = sum((0.01 * t * t + t / (t * t + 1)).sum() for t in g)")
        self.lines += ["def program(compiled, results, seen):", *("    " + line for line in body), ""]
        return "\n".join(self.lines)


def load(source: str, seed: int) -> Any:
    name = f"<program {seed}>"
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    space: dict[str, Any] = {"torch": torch}
    exec(compile(source, name, "exec"), space)
    return space["program"]


def run(program: Any, compiled: Any) -> tuple[list[Any], list[Any], Exception | None]:
    results: list[Any] = []
    seen: list[Any] = []
    torch.manual_seed(0)
    try:
        program(compiled, results, seen)
    except Exception as error:
        return results, seen, error
    results.append(torch.rand(1))
    return results, seen, None


def differences(wanted: list[Any], found: list[Any], what: str) -> str | None:
    if len(wanted) != len(found):
        return f"{len(found)} {what} instead of {len(wanted)}"
    for i, (a, b) in enumerate(zip(wanted, found, strict=True)):
        if (a is None) != (b is None):
            return f"{what} {i}: eager {'None' if a is None else 'a tensor'}, compiled {'None' if b is None else 'one'}"
        if a is None:
            continue
        if a.requires_grad != b.requires_grad or a.shape != b.shape:
            return f"{what} {i}: requires_grad {a.requires_grad} and {b.requires_grad}"
        if not torch.allclose(a, b, rtol=1e-7, atol=1e-8, equal_nan=True):
            return f"{what} {i}: off by {(a - b).abs().max().item():.3g} of {a.abs().max().item():.3g}"
    return None


def not_seen(wanted: list[Any], found: list[Any]) -> str | None:
    """Hooks must see what they see in eager, in that order.

    They may see more: a compiled function is one node, which runs when any of its inputs is asked for.
    """
    left = iter(found)
    for i, one in enumerate(wanted):
        if not any(differences([one], [other], "") is None for other in left):
            return f"hooks did not see gradient {i} of {len(wanted)} ({len(found)} seen)"
    return None


def judge(source: str, seed: int = 0, **settings: Any) -> tuple[str, str]:
    """("equal", "raised", "refused" or "WRONG", what was said)."""
    program = load(source, seed)
    settings = {"backend": "eager", **settings}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted, seen, error = run(program, lambda f: f)
        found, seen_compiled, error_compiled = run(program, lambda f: foregrad.compile(f, **settings))
    if isinstance(error_compiled, ForegradError):
        return "refused", str(error_compiled)
    if (error is None) != (error_compiled is None):
        return "WRONG", f"eager raises {error!r}, compiled {error_compiled!r}"
    if error is not None:
        return ("raised" if type(error) is type(error_compiled) else "WRONG"), f"{error!r} and {error_compiled!r}"
    off = differences(wanted, found, "results") or not_seen(seen, seen_compiled)
    return ("WRONG", off) if off else ("equal", "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--hooks", action="store_true")
    parser.add_argument("--partition", default="default")
    parser.add_argument("--show", action="store_true")
    opts = parser.parse_args(argv)
    torch.set_num_threads(1)
    counts: dict[str, int] = {}
    for seed in range(opts.start, opts.start + opts.programs):
        source = Maker(seed, opts.hooks).program()
        verdict, said = judge(source, seed, partition=opts.partition)
        counts[verdict] = counts.get(verdict, 0) + 1
        if verdict in ("WRONG", "refused"):
            print(f"{verdict} {seed}: {said[:400]}", flush=True)
            if opts.show:
                print(source)
    print(", ".join(f"{n} {v}" for v, n in sorted(counts.items())))
    return 1 if counts.get("WRONG") else 0


if __name__ == "__main__":
    sys.exit(main())
