"""Random programs over wrapper subclasses, compared with eager: `python -m tests.classes.wrapper_programs --examples 500`.

A program is a list of steps drawn from a seed; each takes its operands from a pool that begins with the arguments:
views, writes in place, pure operators, changes of history, questions, some under `no_grad`. What is compared, in two
calls on other numbers: results and arguments with all that is in them, which results are which argument, version
counters, gradients, and what a write to each result does to all the others.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import logging
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch

import foregrad
from foregrad.errors import ForegradWarning, UnsupportedError
from tests.classes.wrappers import Logging, Quantised, TwoTensor, Unit, described

__all__ = ["CLASSES", "Program", "judge"]


def _whole(*size: int) -> torch.Tensor:
    """Whole numbers: sums of gradients are exact in any order."""
    return torch.randint(-4, 5, size).float()


def _two(*size: int, grad: bool = False) -> TwoTensor:
    return TwoTensor(_whole(*size), _whole(*size)).requires_grad_(grad)


def _quantised(*size: int, grad: bool = False) -> Quantised:
    return Quantised(torch.randint(-8, 8, size, dtype=torch.int8), torch.full((size[0], 1), 0.5)).requires_grad_(grad)


CLASSES: dict[str, Callable[..., torch.Tensor]] = {
    "two": _two,
    "nested": lambda *size, grad=False: TwoTensor(_two(*size), _two(*size)).requires_grad_(grad),
    "quantised": _quantised,
    "unit": lambda *size, grad=False: Unit(_whole(*size), 1).requires_grad_(grad),
    "logging": lambda *size, grad=False: Logging(_whole(*size)).requires_grad_(grad),
    "plain": lambda *size, grad=False: _whole(*size).requires_grad_(grad),
}


def _doubled(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 2


PURE = {
    "negative": lambda a: -a,
    "twice": lambda a: a * 2,
    "squared": lambda a: a * a,
    "sum": lambda a: a.sum(),
    "relu": lambda a: a.relu(),
    "clone": lambda a: a.clone(),
    "detach": lambda a: a.detach(),
}
VIEWS = {
    "flat": lambda a: a.view(-1),
    "transposed": lambda a: a.t(),
    "first": lambda a: a[0],
    "rest": lambda a: a[1:],
    "one_more": lambda a: a.unsqueeze(0),
    "split": lambda a: a.split(2)[0],
    "expanded": lambda a: a.expand(2, *a.shape),
}
WRITES = {
    "add_": lambda a: a.add_(1),
    "mul_": lambda a: a.mul_(3),
    "zero_": lambda a: a.zero_(),
    "first_add_": lambda a: a[0].add_(1),
    "item": lambda a: a.__setitem__(0, 2.0),
    "data": lambda a: a.data.mul_(2),
}
HISTORIES = {
    "hook": lambda a: a.register_hook(_doubled),
    "retain": lambda a: a.retain_grad(),
}
ASKING = {
    "version": lambda a: a * (a._version + 1),
    "leaf": lambda a: a * (2 if a.is_leaf else 3),
    "node": lambda a: a * (2 if a.grad_fn is None else 3),
    "base": lambda a: a * (2 if a._base is None else 3),
}
BINARY = {"times": lambda a, b: a * b, "plus": lambda a, b: a + b, "copy_": lambda a, b: a if a is b else a.copy_(b)}


@dataclasses.dataclass(frozen=True)
class Step:
    """One operator: its name, the operands' places in the pool (from the end), whether gradients are off."""

    name: str
    operands: tuple[int, ...]
    no_grad: bool

    def run(self, pool: list[Any]) -> None:
        operands = [pool[-1 - place % len(pool)] for place in self.operands]
        tables = (PURE, VIEWS, WRITES, BINARY, HISTORIES, ASKING)
        table = next(table for table in tables if self.name in table)
        no_grad = self.no_grad or self.name in WRITES or self.name == "copy_"  # with gradients they are refused
        with torch.no_grad() if no_grad else contextlib.nullcontext():
            result = table[self.name](*operands)
        if isinstance(result, torch.Tensor) and table not in (WRITES, HISTORIES):
            pool.append(result)


@dataclasses.dataclass(frozen=True)
class Program:
    """`arguments`: the class, size and history of each. `results`: places in the pool at the end; a copy is returned of a
    view of an argument, and of what shares its memory with another result, which are refused. `tangents`: of what kind
    that of each result is, in turn.
    """

    arguments: tuple[tuple[str, tuple[int, ...], str], ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]
    same: bool
    tangents: tuple[str, ...]

    @classmethod
    def drawn(cls, seed: int, kind: str) -> Program:
        """The program of a seed, whose first argument is of one class."""
        rng = random.Random(f"{kind} {seed}")
        history = ["none", "none", "leaf", "computed"]
        arguments = [(kind, (4, 3), rng.choice(history))]
        if rng.random() < 0.4:
            arguments.append((rng.choice([kind, kind, "plain"]), (4, 3), rng.choice(history)))
        # A quantised tensor's views are copies: eager loses what is written to them.
        names = [*PURE, *VIEWS, *VIEWS, *BINARY] if kind == "quantised" else [*PURE, *VIEWS, *VIEWS, *WRITES, *BINARY]
        names += [*HISTORIES, *ASKING] if rng.random() < 0.5 else []
        steps = []
        for _ in range(rng.randint(1, 5)):
            name = rng.choice(names)
            operands = tuple(rng.randrange(8) for _ in range(2 if name in BINARY else 1))
            steps.append(Step(name, operands, rng.random() < 0.15))
        results = tuple(rng.randrange(8) for _ in range(rng.randint(1, 2)))
        same = len(arguments) == 1 and rng.random() < 0.15
        tangents = tuple(rng.choice(TANGENTS) for _ in range(2))
        return cls(tuple(arguments), tuple(steps), results, same, tangents)

    def __call__(self, *args: torch.Tensor) -> tuple[Any, ...]:
        pool = list(args)
        for step in self.steps:
            step.run(pool)
        given = [pool[-1 - place % len(pool)] for place in self.results]
        return tuple(one.clone() if is_copied else one for one, is_copied in zip(given, self.copied(), strict=True))

    def copied(self) -> list[bool]:
        """Of each result, whether a copy is returned."""
        count = len(self.arguments) * (2 if self.same else 1)
        roots = [*range(count)]  # of each in the pool: the first that is in its memory
        for step in self.steps:
            if step.name in WRITES or step.name in HISTORIES:
                continue
            of = roots[-1 - step.operands[0] % len(roots)]
            is_view = step.name in VIEWS or step.name in ("detach", "copy_")
            roots.append(of if is_view else len(roots))
        places = [len(roots) - 1 - place % len(roots) for place in self.results]
        found = [roots[place] for place in places]
        return [
            root not in places[at : at + 1] if root < count else root in found[:at] for at, root in enumerate(found)
        ]

    def make(self, seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed)
        args = []
        for kind, size, history in self.arguments:
            made = CLASSES[kind](*size, grad=history != "none")
            args.append(made * 1 if history == "computed" else made)
        return args * 2 if self.same else args


def _observed(program: Program, call: Callable[..., Any]) -> list[Any]:
    seen: list[Any] = []
    for seed in range(2):
        Logging.seen.clear()
        args = program.make(seed)
        versions = [arg._version for arg in args]
        try:
            results = call(*args)
        except UnsupportedError:
            raise
        except Exception as error:
            return [*seen, type(error)]
        seen += [_described(results), _described(args)]
        seen += [[a is b for b in (*args, *results)] for a in results]
        # How often a plain tensor was written to is not told: writes that nobody sees in between are one.
        moved = [arg._version - version for arg, version in zip(args, versions, strict=True)]
        seen += [bool(m) if type(arg) is torch.Tensor else m for arg, m in zip(args, moved, strict=True)]
        seen += [[result._base is arg for arg in args if type(arg) is type(result)] for result in results]
        seen += _gradients(args, results, program.tangents)
        for result in results:
            try:
                with torch.no_grad():
                    result.add_(1)
                seen.append([_described(results), _described(args)])
            except RuntimeError as error:
                seen.append(type(error))
    return seen


TANGENTS = ("like", "like", "like", "plain", "two", "unit")


def _tangent(kind: str, loss: torch.Tensor) -> torch.Tensor:
    ones = torch.ones_like(torch.empty_strided(loss.shape, loss.stride()))
    if kind == "plain":
        return ones
    # What is made of tensors of two classes goes by which of them comes first.
    if kind == "two" and type(loss) in (TwoTensor, torch.Tensor):
        return TwoTensor(ones, ones * 2)
    return Unit(ones, 3) if kind == "unit" and type(loss) in (Unit, torch.Tensor) else torch.ones_like(loss)


def _described(values: Any) -> Any:
    try:
        return described(list(values))
    except RuntimeError as error:  # a view that eager forbids to look at by now
        return type(error)


def _gradients(args: list[torch.Tensor], results: tuple[Any, ...], kinds: tuple[str, ...]) -> list[Any]:
    wanted = [arg for arg in dict.fromkeys(args) if arg.requires_grad]
    losses = [result for result in results if result.requires_grad]
    if not wanted or not losses:
        return []
    try:
        tangents = [_tangent(kinds[i % 2], loss.detach()) for i, loss in enumerate(losses)]
        return described(list(torch.autograd.grad(losses, wanted, tangents, allow_unused=True)))
    except UnsupportedError:
        raise
    except Exception as error:
        return [type(error)]


def judge(program: Program) -> str:
    """`equal`, `differs`, or what the compiled function refuses."""
    expected = _observed(program, program.__call__)
    fast = foregrad.compile(program.__call__, backend="eager", on_unsupported="raise")
    try:
        found = _observed(program, fast)
    except UnsupportedError as error:
        return f"refused: {str(error)[:200]}"
    return "equal" if found == expected else "differs"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--examples", type=int, default=200)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--kinds", nargs="*", default=[kind for kind in CLASSES if kind != "plain"])
    options = parser.parse_args()
    logging.disable(logging.ERROR)  # fake tensors log what eager raises too
    for kind in options.kinds:
        counts: collections.Counter[str] = collections.Counter()
        for seed in range(options.start, options.start + options.examples):
            program = Program.drawn(seed, kind)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                said = judge(program)
            counts[said] += 1
            if said == "differs":
                print(seed, program)
        print(kind, *(f"\n  {count:5} {said}" for said, count in counts.most_common()))


if __name__ == "__main__":
    warnings.simplefilter("ignore", ForegradWarning)
    main()
