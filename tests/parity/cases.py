"""The sweep's cases: every op and module of PyTorch's own test databases, and how one case is run.

A case is (op, variant, dtype) or (module, mode, dtype). Its samples each go through the oracle with a freshly
compiled function, so that no guard of one sample can help or hurt another.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tests.parity.copies import copy_of
from tests.parity.known import OTHER_FORMULA, UNREPEATABLE, UNWRITTEN
from tests.parity.oracle import Call, CompiledRaised, Mismatch, Refused, check

PASSED, REFUSED, SKIPPED, WRONG, ERROR = "pass", "refused", "skip", "WRONG", "ERROR"
CRASH, TIMEOUT = "CRASH", "TIMEOUT"
WORST_FIRST = (CRASH, TIMEOUT, WRONG, ERROR, REFUSED, PASSED, SKIPPED)
PYTHON_LEAVES = (torch.Tensor, int, float, bool, str, type(None))


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the sweep."""

    kind: str  # "op" or "module"
    name: str
    variant: str  # "plain" or "in-place" for ops, "train" or "eval" for modules
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.variant} {self.dtype}"


@dataclasses.dataclass
class Result:
    """What came of one case. `reasons`: class of refusal -> how many samples; `messages`: one of each."""

    case: Case
    status: str = SKIPPED
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    messages: dict[str, str] = dataclasses.field(default_factory=dict)
    truncated: bool = False
    seconds: float = 0.0

    def add(self, status: str, reason: str = "", message: str = "") -> None:
        self.counts[status] = self.counts.get(status, 0) + 1
        if reason:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
            self.messages.setdefault(reason, message)
        self.status = next(s for s in WORST_FIRST if s in self.counts)


@functools.cache
def ops() -> dict[str, Any]:
    from torch.testing._internal import common_methods_invocations as database

    samples_need_no_test()
    # Its random ops seed the generator inside the function: a side effect that hides what the op itself draws.
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.testing._internal")]:
        if hasattr(module, "wrapper_set_seed"):
            module.wrapper_set_seed = _call
    return {op.full_name: op for op in database.op_db}


def samples_need_no_test() -> None:
    """PyTorch's databases look for a `unittest.TestCase` on the stack, its lines read from files, before each sample."""
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    for module in (common_utils, core):
        if hasattr(module, "extract_test_fn"):
            module.extract_test_fn = _no_test


def _no_test() -> None:
    return None


def _call(op: Any, *args: Any, **kwargs: Any) -> Any:
    return op(*args, **kwargs)


@functools.cache
def modules() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


def op_cases(dtypes: Iterable[str]) -> Iterator[Case]:
    for name, op in ops().items():
        for dtype in dtypes:
            if getattr(torch, dtype) not in op.supported_dtypes("cpu"):
                continue
            yield Case("op", name, "plain", dtype)
            if op.get_inplace() is not None:
                yield Case("op", name, "in-place", dtype)


def module_cases(dtypes: Iterable[str]) -> Iterator[Case]:
    for name, info in modules().items():
        for dtype in dtypes:
            if getattr(torch, dtype).is_floating_point and getattr(torch, dtype) in info.dtypes:
                yield Case("module", name, "train", dtype)
                yield Case("module", name, "eval", dtype)


def run_case(case: Case, *, compile: Any = None, limit: int | None = None, budget_s: float = 60.0) -> Result:
    """Run a case's samples until `limit` or until the time is up."""
    result = Result(case)
    started = time.perf_counter()
    samples = op_samples(case) if case.kind == "op" else module_samples(case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        while True:
            try:
                index_and_sample = next(samples, None)
            except Exception as error:
                result.add(SKIPPED, f"no samples: {type(error).__name__}", str(error)[:500])
                break
            if index_and_sample is None:
                break
            index, sample = index_and_sample
            late = time.perf_counter() - started > budget_s
            if late or (limit is not None and index >= limit):
                result.truncated = True
                break
            run_sample(result, index, sample, compile)
    result.seconds = round(time.perf_counter() - started, 2)
    return result


def run_sample(result: Result, index: int, sample: Sample, compile: Any) -> None:
    """One sample through the oracle; what came of it goes into `result`."""
    try:
        other_formula = OTHER_FORMULA.get(result.case.name)
        near = UNREPEATABLE.get(result.case.name) or other_formula
        closeness = {"values": sample.values, "atol": near, "rtol": near or 0.0}
        verdict = check(sample.fn, sample.makers, compile=compile, grad=sample.grad, **closeness)
        if other_formula is not None:
            check(sample.fn, sample.makers, compile=compile, grad=sample.grad, watched=True)
        result.add(PASSED if verdict == "equal" else SKIPPED)
    except Refused as refusal:
        reason = type(refusal.reason).__name__
        result.add(REFUSED, reason, f"sample {index}: {str(refusal.reason)[:1500]}")
    except CompiledRaised as fault:
        cause = type(fault.__cause__).__name__
        result.add(ERROR, f"ERROR {cause}", f"sample {index}: {str(fault)[:3000]}")
    except Mismatch as difference:
        aspect = str(difference).splitlines()[1:2] or [str(difference)]
        result.add(WRONG, f"WRONG {_aspect(aspect[0])}", f"sample {index}: {str(difference)[:3000]}")
    except Exception:
        result.add(ERROR, "ERROR in the harness", f"sample {index}: {traceback.format_exc()[-3000:]}")


def _aspect(line: str) -> str:
    parts = line.strip().split(": ")
    return parts[1] if len(parts) > 1 else line[:60]


# ------------------------------------------------------------------------------------------------ samples
@dataclasses.dataclass(frozen=True)
class Sample:
    fn: Any
    makers: list[Callable[[], Call]]
    values: bool = True
    grad: bool = True


def seed_everything() -> None:
    torch.manual_seed(0)
    random.seed(0)


# In place these change sizes or strides of the argument, which is refused where gradients flow to it.
OTHER_SIZES = frozenset(
    {"as_strided", "squeeze", "squeeze.multiple", "swapaxes", "swapdims", "t", "transpose", "unsqueeze"}
)


def op_samples(case: Case) -> Iterator[tuple[int, Sample]]:
    """The op's own sample inputs; the first one also without requires_grad."""
    op = ops()[case.name]
    dtype = getattr(torch, case.dtype)
    in_place = case.variant == "in-place"
    grad = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    if in_place:
        grad = grad and op.supports_inplace_autograd and case.name not in OTHER_SIZES
    target = op.get_inplace() if in_place else op.op
    seed_everything()
    index = 0
    for sample in op.sample_inputs("cpu", dtype, requires_grad=grad):
        if in_place and (sample.broadcasts_input or not isinstance(sample.input, torch.Tensor)):
            continue
        given = Call((sample.input, *sample.args), dict(sample.kwargs))
        fn, call = close_over_unusual(target, given)
        makers = [functools.partial(make_call, call, in_place, other) for other in (False, True)]
        yield index, Sample(fn, makers, values=case.name not in UNWRITTEN, grad=grad)
        if index == 0 and grad:
            makers = [functools.partial(make_call, call, False, other, detach=True) for other in (False, True)]
            yield index, Sample(fn, makers, values=case.name not in UNWRITTEN, grad=False)
        index += 1


def make_call(call: Call, in_place: bool, other_values: bool, detach: bool = False) -> Call:
    """Copied arguments; one that will be mutated must not be a leaf that requires grad."""
    args, kwargs = copy_of((call.args, call.kwargs), other_values=other_values)
    if detach:
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, (args, kwargs))
    if in_place and args and isinstance(args[0], torch.Tensor) and args[0].requires_grad:
        args = (args[0].clone(), *args[1:])
    return Call(args, kwargs)


def close_over_unusual(target: Any, call: Call) -> tuple[Any, Call]:
    """Dtypes, callables, slices and the like are no arguments of a compiled function: they are closed over."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    if all(isinstance(leaf, PYTHON_LEAVES) for leaf in leaves):
        return _as_function(target), call
    usual = [isinstance(leaf, PYTHON_LEAVES) for leaf in leaves]
    kept = [leaf for leaf, is_usual in zip(leaves, usual, strict=True) if not is_usual]
    passed = [leaf for leaf, is_usual in zip(leaves, usual, strict=True) if is_usual]

    def fn(*passed: Any) -> Any:
        given, fixed = iter(passed), iter(kept)
        merged = [next(given) if is_usual else next(fixed) for is_usual in usual]
        args, kwargs = pytree.tree_unflatten(merged, spec)
        return target(*args, **kwargs)

    return fn, Call(tuple(passed))


def _as_function(target: Any) -> Any:
    def fn(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    return fn


def module_samples(case: Case) -> Iterator[tuple[int, Sample]]:
    """The module's own inputs, each with a module built for it."""
    info = modules()[case.name]
    dtype, training = getattr(torch, case.dtype), case.variant == "train"
    seed_everything()
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for index, given in enumerate(inputs):
        if given.forward_input is None:
            continue
        build = given.constructor_input
        module = info.module_cls(*build.args, **build.kwargs).to(dtype).train(training)
        call = Call(tuple(given.forward_input.args), dict(given.forward_input.kwargs))
        if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
            first = make_call(call, False, False, detach=True)
            module(*first.args, **first.kwargs)  # gives it its parameters
        makers = [functools.partial(make_call, call, False, other) for other in (False, True)]
        yield index, Sample(module, makers)
