"""The parts of a model that run eagerly: why each can't be captured, its cost, and the change that would compile it.

A capture ends at the first thing that it can't hold. So the modules of a model are captured one by one, with the
arguments that an eager call gives them; what is left of the model is captured with those that failed as eager regions.

Known weakness: in one forward only the first reason is found.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from .._torch.patches import MARK
from ..dispatch.dispatcher import Dispatcher
from ..dispatch.explain import split_reason
from ..dispatch.module import forward_of
from ..dispatch.refusals import reason_of
from ..frontend.call import flatten_call
from .tree import EagerPart

__all__ = ["Stumbles", "parts_of_function", "parts_of_module", "refusal"]


@dataclasses.dataclass(slots=True)
class _Call:
    """The first call of a module in an eager run, and what all of them took."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    count: int = 0
    seconds: float = 0.0
    begun: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Stumbles:
    """The parts that run eagerly; `operators`: how many compile when these are eager regions, None if none do."""

    parts: tuple[EagerPart, ...]
    operators: int | None


def refusal(dispatcher: Dispatcher, args: Any, kwargs: Any) -> Any:
    """The specialization of a call, or the exception that its capture ends with. The function does not run for real."""
    try:
        call = flatten_call(dispatcher.function, args, kwargs, objects=True)
        return dispatcher.specializer.specialize(call, [])
    except Exception as error:
        return error


def parts_of_function(text: str, name: str, seconds: float | None, calls: int) -> Stumbles:
    """The one part of a function that is no module: all of it."""
    why, change, line = split_reason(text)
    return Stumbles((EagerPart(name, why, change, line, calls, seconds),), None)


def parts_of_module(module: torch.nn.Module, args: Any, kwargs: Any, like: Dispatcher) -> Stumbles:
    """The parts of a model, a copy, that can't be captured."""
    names = {id(part): name for name, part in module.named_modules()}
    calls = _calls(module, args, kwargs)
    refused: dict[torch.nn.Module, str] = {}

    def visit(part: torch.nn.Module) -> None:
        call = calls.get(part)
        if call is None:
            return
        error = _error(part, call, like)
        if error is None:
            return
        before = len(refused)
        for child in part.children():
            visit(child)
        if len(refused) > before:
            with _as_regions(refused):
                error = _error(part, call, like)
        if error is not None:
            refused[part] = reason_of(part.forward, names[id(part)] or type(part).__name__, error)

    visit(module)
    parts = []
    for part, text in refused.items():
        why, change, line = split_reason(text)
        call = calls[part]
        name = names[id(part)] or type(part).__name__
        parts.append(EagerPart(name, why, change, line, call.count, call.seconds / max(call.count, 1)))
    return Stumbles(tuple(parts), _operators_besides(module, refused, args, kwargs, like))


def _operators_besides(module: torch.nn.Module, refused: Any, args: Any, kwargs: Any, like: Dispatcher) -> int | None:
    if not refused or module in refused:
        return None
    with _as_regions(refused):
        rest = refusal(_dispatcher(module, like), args, kwargs)
    return (
        None
        if isinstance(rest, Exception)
        else sum(n.op == "call_function" for n in rest.product.captured.joint.graph.nodes)
    )


def _error(part: torch.nn.Module, call: _Call, like: Dispatcher) -> Exception | None:
    result = refusal(_dispatcher(part, like), call.args, call.kwargs)
    return result if isinstance(result, Exception) else None


def _dispatcher(module: torch.nn.Module, like: Dispatcher) -> Dispatcher:
    return Dispatcher(forward_of(module), like.pipeline, like.config, type(module).__name__)


@contextmanager
def _as_regions(modules: Mapping[torch.nn.Module, Any]) -> Iterator[None]:
    for module in modules:
        vars(module)[MARK] = True
    try:
        yield
    finally:
        for module in modules:
            vars(module).pop(MARK, None)


def _calls(module: torch.nn.Module, args: Any, kwargs: Any) -> dict[torch.nn.Module, _Call]:
    """The arguments of each module in an eager run, and how long its calls take."""
    calls: dict[torch.nn.Module, _Call] = {}

    def before(part: torch.nn.Module, args: Any, kwargs: Any) -> None:
        call = calls.setdefault(part, _Call(args, kwargs))
        call.count += 1
        call.begun = time.perf_counter()

    def after(part: torch.nn.Module, _args: Any, _result: Any) -> None:
        calls[part].seconds += time.perf_counter() - calls[part].begun

    handles = []
    for part in module.modules():
        handles.append(part.register_forward_pre_hook(before, with_kwargs=True))
        handles.append(part.register_forward_hook(after))
    try:
        module(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return calls
