"""Measured costs of a step, run on copies: bytes held between forward and backward, the peak of memory, the time.

A step is a call, then the backward from all of its results that have gradients, with ones for their gradients. Peaks
are the allocator's own reports; memory held for the backward is found in autograd's graph.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import sys
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from foregrad.extend import CompiledFunction, as_compiled, is_house_module, module_behind
from foregrad.tools._torch.tools import ThreadDispatchMode, compiled_by_dynamo, leaves_of, nodes_behind, peak_bytes

# --------------------------------------------------------------------------------------------------------- what is run
# The function to explain and its arguments, copied: measuring runs on copies.
#
# A module is copied with its parameters and buffers; a function with the variables of enclosing functions and the
# global modules and tensors that it names, so that a call writes to copies. An object that can't be copied is explained
# as it is and not run. `is_own` tells copies from the user's objects: nothing runs that would write to a user's object.


@dataclasses.dataclass(frozen=True)
class Subject:
    """A function to explain with its arguments. All are copies, unless `why_not_copied` says that there are none.

    `asked`: the object that the user asks about. `is_dynamo`: `torch.compile` made it.
    """

    name: str
    asked: Any
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    is_dynamo: bool
    why_not_copied: str | None
    copies: Mapping[int, Any]

    @property
    def compiled(self) -> CompiledFunction | None:
        """How it was compiled, where foregrad did that before."""
        return as_compiled(self.asked)

    @property
    def module(self) -> torch.nn.Module | None:
        """The module, where one is explained."""
        return self.function if isinstance(self.function, torch.nn.Module) else None

    def is_own(self, value: Any) -> bool:
        """Whether an object is one of the copies."""
        return id(value) in self.copies

    def renewed(self) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """The arguments copied once more, for a call that writes to them."""
        memo: dict[int, Any] = {}
        _copy_results(leaves_of((self.args, dict(self.kwargs))), memo)
        return copy.deepcopy((self.args, dict(self.kwargs)), memo)

    def tensors(self) -> list[torch.Tensor]:
        """The copied tensors."""
        return [value for value in self.copies.values() if isinstance(value, torch.Tensor)]

    def forget_gradients(self) -> None:
        for tensor in self.tensors():
            if tensor.is_leaf and tensor.requires_grad:
                tensor.grad = None


def subject_of(fn: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Subject:
    """Copies of a function or module and of the arguments of its call."""
    compiled = as_compiled(fn)
    plain = compiled_by_dynamo(fn)
    is_dynamo = plain is not None
    plain = fn if plain is None else plain
    if compiled is not None:
        plain = module_behind(plain) or compiled.function
    name = str(getattr(plain, "__name__", type(plain).__name__))
    memo: dict[int, Any] = {}
    try:
        _copy_results(leaves_of((args, dict(kwargs))), memo)
        function = _copied(plain, memo)
        args, kwargs, why = copy.deepcopy(args, memo), copy.deepcopy(dict(kwargs), memo), None
    except Exception as error:
        memo, function, why = {}, plain, f"it can't be copied: {type(error).__name__}: {error}"
    copies = {id(value): value for key, value in memo.items() if key != id(memo) and id(value) != key}
    return Subject(name, fn, function, args, kwargs, is_dynamo, why, copies | _tables(copies))


def _tables(copies: Mapping[int, Any]) -> dict[int, Any]:
    """The dicts and cells that hold attributes and variables of copies: targets of writes."""
    tables = [getattr(value, "__dict__", None) for value in copies.values()]
    for value in copies.values():
        if isinstance(value, types.FunctionType):
            tables += [value.__globals__, *(value.__closure__ or ())]
    return {id(table): table for table in tables if table is not None}


def _copy_results(leaves: list[Any], memo: dict[int, Any]) -> None:
    """Copies of tensors that autograd computed, which can't be copied with their history: results of a `clone`."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not leaf.is_leaf:
            memo[id(leaf)] = leaf.detach().clone().requires_grad_().clone()


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """A callable over copies of all that it reaches."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, _copied(value.__self__, memo))
    if isinstance(value, functools.partial):
        keywords = copy.deepcopy(value.keywords, memo)
        return functools.partial(_copied(value.func, memo), *copy.deepcopy(value.args, memo), **keywords)
    if isinstance(value, types.FunctionType) and not _is_of_library(value):
        return _copied_function(value, memo)
    return copy.deepcopy(value, memo)


def _copied_function(function: types.FunctionType, memo: dict[int, Any]) -> Any:
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    variables = dict(function.__globals__)
    copied = types.FunctionType(function.__code__, variables, function.__name__, function.__defaults__, cells or None)
    memo[id(function)] = copied  # before the objects that it leads to: one may be itself
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # of a variable that is not bound yet
            cell.cell_contents = _copied(old.cell_contents, memo)
    for name in {name for code in _codes_in(function.__code__) for name in code.co_names}:
        value = variables.get(name)
        if isinstance(value, (torch.nn.Module, torch.Tensor, types.FunctionType, types.MethodType)):
            variables[name] = _copied(value, memo)
    copied.__kwdefaults__, copied.__dict__ = function.__kwdefaults__, dict(function.__dict__)
    copied.__module__, copied.__qualname__ = function.__module__, function.__qualname__
    return copied


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes_in(constant)


def _is_of_library(function: types.FunctionType) -> bool:
    package = str(function.__module__).partition(".")[0]
    return package == "torch" or is_house_module(package) or package in sys.stdlib_module_names - {"__main__"}


Call = Callable[[], Any]
_SECONDS = 0.6  # for all rounds of both
_MOST_ROUNDS = 25


def step_of(call: Call, forget: Call) -> Call:
    """One step: forward, backward, and gradients let go."""

    def step() -> None:
        outputs = _differentiable(call())
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        del outputs
        forget()

    return step


def _differentiable(result: Any) -> list[torch.Tensor]:
    return [leaf for leaf in _tensors(result) if leaf.requires_grad]


def held_by(result: Any, present: Sequence[Any]) -> int:
    """Bytes that the autograd graph of a compiled call's results holds, besides present tensors and the results."""
    saved = [tensor for node in nodes_behind(_differentiable(result)) for tensor in getattr(node, "saved_tensors", ())]
    return _bytes(saved, [result, present])


def packed_by(call: Call, present: Sequence[Any]) -> int | None:
    """Bytes that eager's autograd saves in a call, besides present tensors and the results; each memory once. None
    where the function allows no hooks on saved tensors: `torch.func.grad` does not.
    """
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.detach())
        return tensor

    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = call()
    except RuntimeError:
        return None
    return _bytes(saved, [result, present])


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in containers and plain objects: a model's result may hold a cache of keys and values."""
    found: list[torch.Tensor] = []
    waiting, seen = [value], {}
    while waiting:
        for leaf in leaves_of(waiting.pop()):
            if isinstance(leaf, torch.Tensor) and hasattr(leaf, "__tensor_flatten__"):
                waiting += [getattr(leaf, name) for name in leaf.__tensor_flatten__()[0]]
            elif isinstance(leaf, torch.Tensor):
                found.append(leaf)
            elif id(leaf) not in seen and _is_plain(leaf):
                seen[id(leaf)] = leaf
                waiting.append(vars(leaf))
    return found


def _is_plain(value: Any) -> bool:
    """Whether a value is an object of attributes: no module, class or function."""
    has_attributes = isinstance(getattr(value, "__dict__", None), dict)
    return has_attributes and not callable(value) and not isinstance(value, types.ModuleType)


def _bytes(saved: Sequence[Any], others: Sequence[Any]) -> int:
    excluded = {_storage(leaf) for other in others for leaf in _tensors(other)}
    sizes = {_storage(t): _size(t) for t in saved if isinstance(t, torch.Tensor)}
    return sum(size for storage, size in sizes.items() if storage not in excluded)


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else id(tensor)


def _size(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0


def peak_of(step: Call, device: torch.device | None) -> int | None:
    """The most bytes in use at once during a step, beyond those in use before it; None where it can't be told."""
    if device is not None:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    contexts = list(_contexts())
    grad = torch.is_grad_enabled()

    def run() -> None:
        with contextlib.ExitStack() as stack:
            for make in contexts:
                stack.enter_context(make())
            with torch.set_grad_enabled(grad):
                step()

    return peak_bytes(lambda: run)


def _contexts() -> Iterator[Callable[[], Any]]:
    """The thread's autocast, for a second thread."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            yield functools.partial(torch.autocast, kind, dtype)


def operators_of(step: Call, device: torch.device | None) -> list[tuple[str, int, float]]:
    """The operators of a step, the longest first: name, calls, seconds of all calls, each waited for."""
    mode = _Timing(device)
    with mode:
        step()
    rows = [(op, len(times), sum(times)) for op, times in mode.times.items()]
    return sorted(rows, key=lambda row: -row[2])


class _Timing(ThreadDispatchMode):
    """Context: the time of each operator that runs."""

    def __init__(self, device: torch.device | None) -> None:
        super().__init__()
        self.device, self.times = device, collections.defaultdict[str, list[float]](list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        if self.device is not None:
            torch.cuda.synchronize(self.device)
        self.times[str(func).rpartition(".")[0]].append(time.perf_counter() - start)
        return result


def times_of(make_steps: Mapping[str, Call], device: torch.device | None) -> tuple[dict[str, float], int]:
    """The least seconds of the step that each function makes, run in turns, and the number of rounds. Neighbours on a
    busy machine only ever add to a time.
    """

    def once(make_step: Call) -> float:
        step = make_step()
        if device is not None:
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        if device is not None:
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    for make_step in make_steps.values():
        once(make_step)  # for objects made on first use
    times: dict[str, list[float]] = {name: [] for name in make_steps}
    begin = time.perf_counter()
    rounds = 0
    while rounds < _MOST_ROUNDS and (rounds < 2 or time.perf_counter() - begin < _SECONDS):
        for name, make_step in make_steps.items():
            times[name].append(once(make_step))
        rounds += 1
    return {name: min(seconds) for name, seconds in times.items()}, rounds
