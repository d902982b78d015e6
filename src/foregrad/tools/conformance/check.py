"""`check_compiler` and `check_partitioner`: the suite, in this process or in child processes."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import foregrad
from foregrad.tools.cli.screen import Advance

from .cases import Selection, groups_of, in_turn
from .probe import name_of
from .report import ConformanceReport, Finding
from .trial import TrialSubject, tried


def check_compiler(
    compiler: Any,
    *,
    size: str = "short",
    only: str | Sequence[str] = (),
    dtypes: Sequence[str] = (),
    decompositions: Any = None,
    isolated: bool = False,
    jobs: int = 1,
    timeout: float = 120.0,
    folder: str | None = None,
    progress: Advance | None = None,
) -> ConformanceReport:
    """Check a compiler of graphs against eager: operators, small programs, calls, threads, models.

    The compiler gets forward and backward graphs as `aot_function` hands them over. Each compiled graph is compared
    with eager's kernels on the same values, and a caller's results with eager.

    Args:
        compiler: takes (fx.GraphModule, example inputs) and gives a callable; or the name of a registered backend; or
            the text `package.module:name` or `file.py:name`.
        size: "short", some 180 cases; or "full", all operators of PyTorch's database in seven dtypes.
        only: names of cases, `group/what`, as shell patterns: `"operators/softmax*"`.
        dtypes: the operators' dtypes in place of the suite's: `("float32", "complex64")`.
        decompositions: operators to replace while capturing, as for `aot_function`.
        isolated: run the cases in child processes, so a crash or an endless loop is a finding. The compiler then needs
            a name that can be imported.
        jobs: the number of child processes; timeout: seconds until a case in a child process counts as crashed.
        folder: the folder for programs that show faults; by default new temporary folders.
        progress: called with the number of finished cases, and the name of the last.

    Raises: ValueError for an unknown size, dtype or case, or an `isolated` compiler without a name; TypeError if
        `compiler` can't be called.

    Example:
        >>> import foregrad
        >>> foregrad.testing.check_compiler("eager", only="sizes/*").ok
        True
    """
    selection = Selection(size, (only,) if isinstance(only, str) else tuple(only), tuple(dtypes))
    if isolated:
        from .children import Request, run_isolated

        request = Request.of("compiler", compiler, selection, folder, decompositions)
        return run_isolated(request, jobs=jobs, timeout=timeout, progress=progress)
    return checked(subject_for("compiler", compiler, folder, decompositions), selection, progress)


def check_partitioner(
    partition: Any,
    *,
    size: str = "short",
    only: str | Sequence[str] = (),
    dtypes: Sequence[str] = (),
    isolated: bool = False,
    jobs: int = 1,
    timeout: float = 120.0,
    folder: str | None = None,
    progress: Advance | None = None,
) -> ConformanceReport:
    """Check a function that splits joint graphs: `partition(joint, inputs, *, num_fwd_outputs, ...)` gives two graphs.

    The halves run on eager's kernels. Arguments, errors and cases are `check_compiler`'s.

    Example:
        >>> import foregrad
        >>> foregrad.testing.check_partitioner(foregrad.default_partition, only="views/*").ok
        True
    """
    selection = Selection(size, (only,) if isinstance(only, str) else tuple(only), tuple(dtypes))
    if isolated:
        from .children import Request, run_isolated

        request = Request.of("partition", partition, selection, folder, None)
        return run_isolated(request, jobs=jobs, timeout=timeout, progress=progress)
    return checked(subject_for("partition", partition, folder), selection, progress)


def subject_for(kind: str, value: Any, folder: str | None = None, decompositions: Any = None) -> TrialSubject:
    """The subject to check, from a function, a text that names a function, or the name of a backend."""
    from .names import load

    backend = ""
    if isinstance(value, str):
        if kind == "compiler" and (":" not in value or value.startswith(_MADE)):
            registered = foregrad.get_backend(value)
            compiler: Any = registered.inference_compiler
            table = decompositions if decompositions is not None else registered.decompositions
            return TrialSubject(value, compiler, None, table, value, folder)
        backend, value = "", load(value)
    if not callable(value):
        raise TypeError(f"a {kind} is a function, not {value!r}")
    if kind == "partition":
        return TrialSubject(
            name_of(value), foregrad.get_backend("eager").inference_compiler, value, None, "eager", folder
        )
    return TrialSubject(name_of(value), value, None, decompositions, backend, folder)


def checked(subject: TrialSubject, selection: Selection, progress: Advance | None = None) -> ConformanceReport:
    """Run the selected cases in the calling process."""
    begin = time.perf_counter()
    cases = selection.cases()
    if not cases:
        raise ValueError(f"the suite has no case {', '.join(selection.only)}")
    findings: list[Finding] = []

    def found(finding: Finding) -> None:
        findings.append(finding)
        if progress is not None:
            progress(len(findings), finding.case)

    for group in groups_of(cases):
        in_turn(group, functools.partial(tried, subject=subject), found)
    return ConformanceReport(subject.name, selection.size, tuple(findings), time.perf_counter() - begin)


_MADE = ("torch:", "crash-on:")  # backends that are made from the rest of the name
