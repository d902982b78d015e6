"""Operators that save a substitute for a tensor: a copy in host memory, or the state of a generator.

From an accelerator, the copy goes to pinned memory on a stream of its own, so the forward runs on meanwhile. From the
CPU, without further memory, it goes to a mapped temporary file: the operating system may write it out. Checked on torch
2.11.0, 2.13.0.
"""

from __future__ import annotations

import functools
import mmap
import tempfile
from typing import Any

import torch

from .engine import default_generator, default_generators

_library = torch.library.Library("foregrad", "DEF")
_library.define("offload(Tensor x) -> Tensor")
_library.define("reload(Tensor host, Device device) -> Tensor")
_library.define("random_state(Device device) -> Tensor")
_library.define("rewind_random(Tensor state, Device device) -> Tensor")
_library.define("resume_random(Tensor state, Device device) -> ()")


def _span(x: torch.Tensor) -> int:
    """The number of elements of memory from the first to the last element."""
    if x.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((_span(x),), (1,), x.storage_offset())


def _offload(x: torch.Tensor) -> torch.Tensor:
    count = _span(x)
    if x.device.type == "cpu":
        host = _mapped(count * x.dtype.itemsize).view(x.dtype) if count else x.new_empty(0)
        host.copy_(_flat(x))
    else:
        host = torch.empty(count, dtype=x.dtype, pin_memory=True)
        stream = _stream(x.device)
        stream.wait_stream(torch.get_device_module(x.device).current_stream(x.device))
        with torch.get_device_module(x.device).stream(stream):
            host.copy_(_flat(x), non_blocking=True)
        x.record_stream(stream)
    return host.as_strided(x.shape, x.stride())


def _reload(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    source = _flat(host)
    copy = torch.empty(source.shape, dtype=host.dtype, device=device)
    if device.type == "cpu":
        copy.copy_(source)
    else:
        stream, current = _stream(device), torch.get_device_module(device).current_stream(device)
        stream.wait_stream(current)  # the memory may still be in use there
        with torch.get_device_module(device).stream(stream):
            copy.copy_(source, non_blocking=True)
        current.wait_stream(stream)
        copy.record_stream(stream)
    return copy.as_strided(host.shape, host.stride())


@functools.cache
def _stream(device: torch.device) -> Any:
    """One stream for both directions, so a copy back follows the copy out."""
    return torch.get_device_module(device).Stream(device)


def _mapped(size: int) -> torch.Tensor:
    """Memory of a file without a name; it goes with the tensor."""
    with tempfile.TemporaryFile(prefix="foregrad-offload-") as file:
        file.truncate(size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


# -------------------------------------------------------------------- states of generators
# The operators note the state of a random generator, go back to it, and return. They are for graphs that run node by
# node in their order: no data dependency ties a random operator to the node that rewinds its generator. A pass that
# drops nodes from such graphs asks `replayed`.


def _note(device: torch.device) -> torch.Tensor:
    return default_generator(device).get_state()


def _rewind(state: torch.Tensor, device: torch.device) -> torch.Tensor:
    now = _note(device)
    default_generator(device).set_state(state)
    return now


def _resume(state: torch.Tensor, device: torch.device) -> None:
    default_generator(device).set_state(state)


def state_bytes(device: torch.device) -> int:
    """The size of the state of a device's generator."""
    return _note(device).numel() if default_generators([device]) else _OF_ACCELERATORS


_OF_ACCELERATORS = 16  # bytes: a seed and an offset


for _name, _run, _fake in (
    ("offload", _offload, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")),
    ("reload", _reload, lambda x, device: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)),
    ("random_state", _note, lambda device: torch.empty(state_bytes(device), dtype=torch.uint8, device="cpu")),
    ("rewind_random", _rewind, lambda state, device: torch.empty_like(state)),
    ("resume_random", _resume, lambda state, device: None),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"foregrad::{_name}", _fake, lib=_library)

OFFLOAD = torch.ops.foregrad.offload.default
RELOAD = torch.ops.foregrad.reload.default
NOTE = torch.ops.foregrad.random_state.default
REWIND = torch.ops.foregrad.rewind_random.default
RESUME = torch.ops.foregrad.resume_random.default
for _op in (NOTE, REWIND, RESUME):
    torch.fx.node.has_side_effect(_op)


def replayed(node: torch.fx.Node) -> torch.fx.Node | None:
    """The random operator between `node`, which resumes the generator's state, and the operand of `node`, a rewinding
    node; None for other nodes. A graph has all three or none.
    """
    return node.prev if node.target is RESUME else None


def rewinding(node: torch.fx.Node) -> torch.fx.Node | None:
    """The node that rewinds the generator right before the random operator `node`; None for other nodes."""
    return node.prev if node.prev.target is REWIND else None
