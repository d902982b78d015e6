"""A case of the suite, and the suite as a list of cases."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from .report import CaseVerdict, Finding

Compile = Callable[..., Callable[..., Any]]
"""`compile(function, dynamic=False, keep_inference_input_mutations=False)`, by the compiler that is checked."""


class BrokenContractError(Exception):
    """The contract does not hold; the message says where."""


def expect(condition: Any, text: str) -> None:
    """Raise `BrokenContractError` unless the condition holds."""
    if not condition:
        raise BrokenContractError(text)


@dataclasses.dataclass(frozen=True, slots=True)
class CaseProgram:
    """A function or module with its arguments, to be compared with eager.

    `settings` are `aot_function`'s. `versus_eager`: compare the caller's results with eager, besides each graph.
    `title` tells the programs of one case apart.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    versus_eager: bool = True
    title: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One case, `group/what`. It has programs to compare, or a script that asks for a contract by `expect`. `may_join`:
    the programs have no settings of their own, and may be tried in one graph with those of further cases.
    """

    name: str
    programs: Callable[[], Iterable[CaseProgram]] | None = None
    script: Callable[[Compile], None] | None = None
    may_join: bool = False

    @classmethod
    def joined(cls, cases: Sequence[Case]) -> Case:
        """Several cases as one, whose one program calls all of theirs: a graph in place of many."""

        def programs() -> Iterable[CaseProgram]:
            parts = [program for case in cases for program in (case.programs or list)()]

            def each(*given: Any) -> list[Any]:
                return [part.function(*args, **kwargs) for part, (args, kwargs) in zip(parts, given, strict=True)]

            yield CaseProgram(each, tuple((part.args, dict(part.kwargs)) for part in parts), versus_eager=False)

        return cls(JOIN.join(case.name for case in cases), programs)

    @property
    def count(self) -> int:
        """Of how many cases it is made."""
        return len(self.name.split(JOIN))


JOIN = " + "
_TOGETHER = 8


def in_turn(cases: Sequence[Case], one: Callable[[Case], Finding], found: Callable[[Finding], None]) -> None:
    """Try cases, by `one`, and tell the findings. Cases that may join are tried as one first: if it does not pass, each
    is tried by itself.
    """
    if len(cases) > 1:
        whole = one(Case.joined(cases))
        if whole.verdict is CaseVerdict.PASSED:
            for case in cases:
                found(dataclasses.replace(whole, case=case.name, seconds=whole.seconds / len(cases)))
            return
    for case in cases:
        found(one(case))


def groups_of(cases: Sequence[Case]) -> list[list[Case]]:
    """The cases, those together that are tried as one."""
    groups: list[list[Case]] = []
    for case in cases:
        last = groups[-1] if groups else []
        if case.may_join and last and last[0].may_join and len(last) < _TOGETHER:
            last.append(case)
        else:
            groups.append([case])
    return groups


@dataclasses.dataclass(frozen=True)
class Selection:
    """A choice of cases: `size` "short" or "full"; `only`, patterns of names as in a shell; operators' `dtypes`."""

    size: str = "short"
    only: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.size not in ("short", "full"):
            raise ValueError(f'the size of the suite is "short" or "full", not {self.size!r}')
        for name in self.dtypes:
            if not isinstance(getattr(torch, name, None), torch.dtype):
                raise ValueError(f"PyTorch has no dtype {name!r}")

    def cases(self) -> list[Case]:
        """The cases, in order."""
        from .models import model_cases
        from .operators import operator_cases
        from .programs import PROGRAMS
        from .scripts import SCRIPTS

        is_full = self.size == "full"
        groups: list[tuple[str, Callable[[], Iterable[Case]]]] = [
            ("programs", lambda: PROGRAMS),
            ("scripts", lambda: SCRIPTS),
            ("operators", lambda: operator_cases(is_full=is_full, dtypes=self.dtypes)),
            ("models", lambda: model_cases(is_full=is_full)),
        ]
        return [case for group, make in groups if self._may_have(group) for case in make() if self._has(case.name)]

    def _may_have(self, group: str) -> bool:
        """Whether a group is worth listing: PyTorch's database takes seconds to load."""
        if group not in ("operators", "models") or not self.only:
            return True
        return any(
            any(character in "*?[" for character in p.partition("/")[0]) or p.startswith(f"{group}/") for p in self.only
        )

    def _has(self, name: str) -> bool:
        return not self.only or any(fnmatch.fnmatchcase(name, pattern) for pattern in self.only)
