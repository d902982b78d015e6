"""Random programs over tensors that alias one another: as data, as Python source, as functions.

A program has a set-up that makes one to four arguments (fresh tensors, views of one another, the same object twice,
memory shared behind autograd's back) and a body of steps: views, in-place changes, pure ops, random ops, some under
`no_grad`. It is grown step by step while running it eagerly, so that every choice is made with the shapes and dtypes
at hand, and nearly all programs are valid; a few that eager rejects are kept, since those must be rejected alike.

The choices come from a `Chooser`: hypothesis when it should shrink, `random` when thousands are wanted.
"""

from __future__ import annotations

import dataclasses
import linecache
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

from tests.parity.program_ops import ARGUMENTS, OPS, RESHAPING, Op, Pool, overlaps_itself

T = TypeVar("T")


class Chooser(Protocol):
    """Where a growing program gets its choices from."""

    def integer(self, low: int, high: int) -> int: ...

    def choice(self, options: Sequence[T]) -> T: ...

    def chance(self, percent: int) -> bool: ...


class RandomChooser:
    """Choices from a seeded generator: fast, no shrinking."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def chance(self, percent: int) -> bool:
        return self._random.randrange(100) < percent


class DrawnChooser:
    """Choices from hypothesis: what it draws, it can shrink (towards the first option and towards no)."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        from hypothesis import strategies as st

        return self._draw(st.integers(low, high))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.integer(0, len(options) - 1)]

    def chance(self, percent: int) -> bool:
        return self.integer(0, 99) >= 100 - percent


@dataclasses.dataclass(frozen=True)
class Step:
    """One line: `target = code`, or just `code` where the target is empty."""

    op: str
    code: str
    target: str = ""
    no_grad: bool = False

    def lines(self) -> list[str]:
        line = f"{self.target} = {self.code}" if self.target else self.code
        return ["with torch.no_grad():", f"    {line}"] if self.no_grad else [line]


@dataclasses.dataclass(frozen=True)
class Program:
    """`setup` makes tensors; `arguments` names those that are passed; `body` and `result` are the function."""

    setup: tuple[Step, ...]
    arguments: tuple[str, ...]
    body: tuple[Step, ...]
    result: str

    def source(self) -> str:
        parameters = [f"x{i}" for i in range(len(self.arguments))]
        made = [line for step in self.setup for line in step.lines()]
        done = [line for step in self.body for line in step.lines()]
        passed = ", ".join(self.arguments) + "," * (len(self.arguments) == 1)
        text = ["def make_args():", *(f"    {line}" for line in made), f"    return ({passed})", "", ""]
        text += [f"def f({', '.join(parameters)}):", *(f"    {line}" for line in done), f"    return {self.result}"]
        return "\n".join(text) + "\n"

    def load(self) -> tuple[Callable[..., Any], Callable[[], Any]]:
        return load(self.source())

    def __str__(self) -> str:
        return self.source()


def load(source: str) -> tuple[Callable[..., Any], Callable[[], Any]]:
    """`f` and `make_args` of a program's source; tracebacks show its lines."""
    name = f"<program {hash(source) & 0xFFFFFFFF:08x}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    space: dict[str, Any] = {"torch": torch}
    exec(compile(source, name, "exec"), space)
    return space["f"], space["make_args"]


@dataclasses.dataclass(frozen=True)
class Profile:
    """What kind of programs to grow. Weights are relative; percents are chances."""

    view: int = 4
    in_place: int = 4
    pure: int = 2
    random: int = 1
    storage: int = 0
    steps: int = 8
    related: int = 60
    grad: int = 50
    no_grad: int = 12
    keep_invalid: int = 5
    dtypes: tuple[str, ...] = ("float32",) * 5 + ("float64", "int64", "int32", "complex64", "bool")

    def weight(self, kind: str) -> int:
        return getattr(self, kind.replace("-", "_"))


PROFILES = {
    "everything": Profile(),
    "overlaps": Profile(view=2, in_place=6, random=0, related=90, grad=15),
    "gradients": Profile(random=0, grad=100, no_grad=6, dtypes=("float32", "float64", "complex64")),
    "views": Profile(view=8, in_place=1, pure=1, random=0),
    "random": Profile(random=5),
    "storage": Profile(storage=3, random=0),
    "long": Profile(steps=20),
}


class Growth:
    """A program while it grows: the steps so far and the values they have given."""

    def __init__(self, chooser: Chooser, profile: Profile) -> None:
        self.chooser = chooser
        self.profile = profile
        self.space: dict[str, Any] = {"torch": torch}
        self.pool = Pool(chooser)
        self.resized: set[int] = set()
        self.by_kind = {kind: [op for op in OPS if op.kind == kind] for kind in {op.kind for op in OPS}}
        self.kinds = [kind for kind in sorted(self.by_kind) for _ in range(profile.weight(kind))]

    def run(self, step: Step) -> bool:
        """Do a step eagerly; False when it raises."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec("\n".join(step.lines()), self.space)
        except Exception:
            return False
        if step.target:
            self.pool.add(step.target, self.space[step.target])
        return True

    def setup(self) -> list[Step]:
        steps: list[Step] = []
        wanted = self.chooser.integer(1, 4)
        for i in range(wanted):
            related = bool(steps) and self.chooser.chance(self.profile.related)
            step = self.related(f"a{i}") if related else self.fresh(f"a{i}")
            if self.run(step):
                steps.append(step)
        if not steps:
            steps = [Step("fresh", "torch.randn(2, 3)", "a0")]
            self.run(steps[0])
        return steps

    def fresh(self, name: str) -> Step:
        choose = self.chooser
        dtype = choose.choice(self.profile.dtypes)
        shape = choose.choice([(2, 3), (4,), (2, 2), (3, 2, 2), (6,), (1, 3), (), (2, 1, 2)])
        code = _fresh_code(choose.choice(["plain"] * 3 + ["strided", "sliced", "expanded"]), shape, dtype)
        if dtype in ("float32", "float64", "complex64") and choose.chance(self.profile.grad):
            code = f"({code}).detach().requires_grad_()"
            if choose.chance(50):
                code += " * 1"
        return Step("fresh", code, name)

    def related(self, name: str) -> Step:
        """A tensor that shares memory with an earlier one."""
        source = self.pool.name(self.chooser)
        value = self.pool[source]
        op = self.chooser.choice([op for op in ARGUMENTS if op.suits(value)])
        return Step(op.name, op.write(source, value, self.pool), name, no_grad=self.chooser.chance(15))

    def step(self, name: str) -> Step:
        source = self.pool.name(self.chooser)
        value = self.pool[source]
        options: list[Op] = []
        while not options:
            kind = self.chooser.choice(self.kinds)
            options = [op for op in self.by_kind[kind] if op.suits(value)]
            if value.untyped_storage().data_ptr() in self.resized and not self.is_own(
                value
            ):  # gradients are not to flow there later
                options = [op for op in options if op.name != "requires_grad_" and op.kind != "in-place"]
            if not self.may_change_sizes(value):  # that is refused
                options = [op for op in options if op.name not in RESHAPING]
            if not self.may_be_given_memory(value):  # that is refused
                options = [op for op in options if op.name != "data assigned"]
            if self.repeats_elements(value):  # writes to parts of that are refused
                options = [op for op in options if op.kind != "in-place" and op.name not in ("as_strided", "windows")]
        op = self.chooser.choice(options)
        no_grad = self.chooser.chance(self.profile.no_grad)
        if op.name in RESHAPING:
            self.resized.add(value.untyped_storage().data_ptr())
        if op.name in RESHAPING and value.requires_grad:
            # Eager itself leaves a history of the old shape behind, and fails in the backward.
            no_grad = False
        return Step(op.name, op.write(source, value, self.pool), name if op.gives else "", no_grad)

    def beside(self, value: torch.Tensor) -> list[str]:
        """The names of the tensors in its memory."""
        memory = value.untyped_storage().data_ptr()
        return [name for name, other in self.pool.names.items() if other.untyped_storage().data_ptr() == memory]

    def is_own(self, value: torch.Tensor) -> bool:
        """Whether the function made it, and nothing else is in its memory."""
        there = self.beside(value)
        return len(there) == 1 and not there[0].startswith("x") and not value._is_view()

    def may_change_sizes(self, value: torch.Tensor) -> bool:
        """Whether no gradients flow to its memory, or it is alone there."""
        return self.is_own(value) or not any(self.pool[name].requires_grad for name in self.beside(value))

    def may_be_given_memory(self, value: torch.Tensor) -> bool:
        """Whether it is no view, nothing is a view of it, and it is an argument or made by the function."""
        others = [self.pool[name] for name in self.beside(value) if self.pool[name] is not value]
        is_base = any(other._base is value for other in others)
        is_of_input = any(name.startswith("x") and self.pool[name] is not value for name in self.beside(value))
        return not value._is_view() and not is_base and not is_of_input

    def repeats_elements(self, value: torch.Tensor) -> bool:
        """Whether a tensor in its memory has several elements in one place."""
        return any(overlaps_itself(self.pool[name]) for name in self.beside(value))

    def body(self) -> list[Step]:
        steps: list[Step] = []
        for i in range(self.chooser.integer(1, self.profile.steps)):
            step = self.step(f"v{i}")
            if self.run(step):
                steps.append(step)
            elif self.chooser.chance(self.profile.keep_invalid):
                return [*steps, step]
        return steps

    def result(self) -> str:
        names = list(self.pool.names)
        picked = [self.chooser.choice(names) for _ in range(self.chooser.integer(1, 4))]
        form = self.chooser.choice(["tuple", "one", "list", "dict", "nested", "none"])
        if form == "one":
            return picked[0]
        if form == "list":
            return f"[{', '.join(picked)}]"
        if form == "dict":
            return "{" + ", ".join(f"'k{i}': {name}" for i, name in enumerate(picked)) + "}"
        if form == "nested":
            return f"[{picked[0]}, ({', '.join(picked[1:])}{',' * (len(picked) == 2)}), {{'n': 3, 'z': None}}]"
        return "None" if form == "none" and self.chooser.chance(20) else f"({', '.join(picked)},)"


def _fresh_code(layout: str, shape: tuple[int, ...], dtype: str) -> str:
    if layout == "strided" and len(shape) > 1:
        strides, step = [], 1
        for size in shape:
            strides.append(step)
            step *= size
        made = f"torch.empty_strided({shape}, {tuple(strides)}, dtype=torch.{dtype})"
        return f"{made}.copy_({_numbers(shape, dtype)})"
    if layout == "sliced" and shape:
        return f"{_numbers((shape[0] + 2, *shape[1:]), dtype)}[1:-1]"
    if layout == "expanded" and len(shape) > 1:
        return f"{_numbers((1, *shape[1:]), dtype)}.expand({shape})"
    return _numbers(shape, dtype)


def _numbers(shape: tuple[int, ...], dtype: str) -> str:
    if dtype == "bool":
        return f"(torch.randint(0, 2, {shape}) > 0)"
    if dtype.startswith("int"):
        return f"torch.randint(-3, 4, {shape}, dtype=torch.{dtype})"
    return f"torch.randn({shape}, dtype=torch.{dtype})"


def grow(chooser: Chooser, profile: Profile) -> Program:
    """One random program."""
    growth = Growth(chooser, profile)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        setup = growth.setup()
        made = [step.target for step in setup]
        arguments = [chooser.choice(made) for _ in range(chooser.integer(1, 4))]
        missing = [name for name in made if name not in arguments and chooser.chance(80)]
        arguments = (missing + arguments)[:4]
        # The body sees parameters only: what the set-up kept for itself is a hidden base.
        values = [growth.space[name] for name in arguments]
        growth.space = {"torch": torch}
        growth.pool = Pool(chooser)
        for i, value in enumerate(values):
            growth.space[f"x{i}"] = value
            growth.pool.add(f"x{i}", value)
        body = growth.body()
        return Program(tuple(setup), tuple(arguments), tuple(body), growth.result())


def reduce(program: Program, still_fails: Callable[[Program], bool], tries: int = 500) -> Program:
    """A smaller program that still fails: steps dropped one by one until nothing more can go, or `tries` are up."""
    shrunk = True
    while shrunk:
        shrunk = False
        for candidate in _smaller(program):
            tries -= 1
            if tries < 0:
                return program
            if still_fails(candidate):
                program, shrunk = candidate, True
                break
    return program


def _smaller(program: Program) -> list[Program]:
    found = []
    for part in ("body", "setup"):
        steps = getattr(program, part)
        for i in reversed(range(len(steps))):
            found.append(dataclasses.replace(program, **{part: steps[:i] + steps[i + 1 :]}))
            if steps[i].no_grad:
                plain = dataclasses.replace(steps[i], no_grad=False)
                found.append(dataclasses.replace(program, **{part: (*steps[:i], plain, *steps[i + 1 :])}))
    last = len(program.arguments) - 1
    if last > 0:
        found.append(dataclasses.replace(program, arguments=program.arguments[:last]))
    names = sorted({step.target for step in program.body if step.target} | {f"x{i}" for i in range(last + 1)})
    if program.result not in names and program.result != "()":
        found += [dataclasses.replace(program, result=result) for result in ["()", *names]]
        found += [dataclasses.replace(program, result=f"({a}, {b})") for a in names for b in names if a < b]
    return [candidate for candidate in found if len(candidate.source()) < len(program.source())]
