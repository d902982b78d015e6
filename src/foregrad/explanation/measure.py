"""Measured costs of a step: bytes held between forward and backward, the peak of memory, the time.

A step is a call, then the backward from all of its results that have gradients, with ones for their gradients. Peaks
are the allocator's own reports; what is held for the backward is found in autograd's graph.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._torch.histories import nodes_behind
from .._torch.memory import peak_bytes
from ..frontend.tree import open_objects
from ..subclasses.conversion import Samples

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
    """Bytes that the autograd graph of a compiled call's results holds, but for those given and the results."""
    saved = [tensor for node in nodes_behind(_differentiable(result)) for tensor in getattr(node, "saved_tensors", ())]
    return _bytes(saved, [result, present])


def packed_by(call: Call, present: Sequence[Any]) -> int | None:
    """Bytes that eager's autograd saves in a call, but for those given and the results; each memory once. None where
    the function allows no hooks on saved tensors: `torch.func.grad` does not.
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
    leaves = open_objects([value], lambda _: None, Samples()).leaves
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


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
    """Autocast as it is on this thread, for another."""
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            yield functools.partial(torch.autocast, kind, dtype)


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
        once(make_step)  # for what is made on first use
    times: dict[str, list[float]] = {name: [] for name in make_steps}
    begin = time.perf_counter()
    rounds = 0
    while rounds < _MOST_ROUNDS and (rounds < 2 or time.perf_counter() - begin < _SECONDS):
        for name, make_step in make_steps.items():
            times[name].append(once(make_step))
        rounds += 1
    return {name: min(seconds) for name, seconds in times.items()}, rounds
