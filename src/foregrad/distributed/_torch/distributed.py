"""Collectives of `torch.distributed`, modules that communicate around their forward, and DTensor's rules for sizes.

Checked on torch 2.13.0. These modules' classes are looked up only once they are imported: most programs have none.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..._torch.engine import all_modes_off
from ..._torch.symbols import has_symbolic
from ...locks import Bind

_distributed: Any = torch.distributed

_named = [getattr(torch.distributed, name, None) for name in ("DeviceMesh", "ProcessGroup")]
GROUPS: tuple[type, ...] = tuple(cls for cls in _named if isinstance(cls, type))
"""Classes of objects that say which processes there are: nothing but themselves to a function."""

# Classes of modules. `fully_shard` works in hooks around the forward, the rest in the forward itself.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule"),
)
_BY_HOOKS = {"FSDPModule": "`fully_shard`"}


def data_parallel(module: Any, *, in_forward: bool = False) -> str | None:
    """The name of the class that makes a module communicate in a call; `in_forward`: in a call of its forward alone.
    None for a module that never communicates.
    """
    bases = type(module).__mro__  # `isinstance` asks abstract classes, in Python
    for imported, name in _WRAPPERS:
        cls: Any = getattr(sys.modules.get(imported), name, None)
        if cls in bases and not (in_forward and name in _BY_HOOKS):
            return _BY_HOOKS.get(name, f"`{name}`")
    return None


def bucket_sizes() -> tuple[int, ...]:
    """The bytes of the first and of the further gradient buckets of the `DistributedDataParallel` in its forward; empty
    outside.
    """
    cls: Any = getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
    module = None if cls is None else cls._get_active_ddp_module()
    if module is None:
        return ()
    size = int(module.bucket_bytes_cap)
    is_default = size == 25 << 20  # then the first bucket is smaller
    first: int = _distributed._DEFAULT_FIRST_BUCKET_BYTES if is_default else size
    return first, size


# ---------------------------------------------------------------------------------------------- collectives

# The names that functional collectives have for reductions, by the number of a `ReduceOp`.
_REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


def reduction_of(op: Any) -> str | None:
    """The name that functional collectives have for an operator's reduction; None if they lack it."""
    number = op.op()
    return _REDUCTIONS[number] if number < len(_REDUCTIONS) else None


def group_of(group: Any) -> tuple[str, int]:
    """The name and the size of the process group that is an operator's argument."""
    from torch._C._distributed_c10d import ProcessGroup

    process_group: Any = ProcessGroup.unbox(group)
    return process_group.group_name, process_group.size()


def functional_collective(name: str) -> Any:
    """A functional collective."""
    import torch.distributed._functional_collectives  # it brings the kernels for fakes

    return getattr(torch.ops._c10d_functional, name).default


def run_collective(op: Any, args: list[Any], group: str) -> None:
    """Call an operator that works in place, in the named group, and wait for its result."""
    c10d: Any = torch._C._distributed_c10d

    position = next(i for i, argument in enumerate(op._schema.arguments) if argument.name == "process_group")
    args[position] = c10d._resolve_process_group(group).boxed()
    result = op(*args)
    work = result[-1] if isinstance(result, (tuple, list)) else result
    if work is not None:
        c10d.Work.unbox(work).wait()


def finished_work() -> Any:
    """The work object for a collective that is finished."""
    from torch._C._distributed_c10d import FakeWork

    return FakeWork().boxed()


def work_of(finish: Callable[[], None], tensors: Any) -> Any:
    """A work object for a pending collective: `finish` is called once, at the first wait.

    The caller must keep it alive: C++ does not.
    """
    return _work_class()(finish, tensors)


@functools.cache
def _work_class() -> Any:
    base: Any = torch.distributed.Work

    class PendingWork(base):  # type: ignore[misc]
        """A collective of a graph that is recorded."""

        def __init__(self, finish: Callable[[], None], tensors: Any) -> None:
            super().__init__()
            self.finish, self.tensors = finish, tensors
            self.is_finished = False

        def wait(self, timeout: Any = None) -> bool:
            if not self.is_finished:
                self.is_finished = True
                self.finish()
            return True

        synchronize = block_current_stream = is_completed = is_success = wait

        def exception(self) -> None:
            return None

        def result(self) -> Any:
            self.wait()
            return self.tensors

        def get_future(self) -> Any:
            future: Any = torch.futures.Future()
            future.set_result(self.result())
            return future

    return PendingWork


# -------------------------------------------------------------------- sharding
# DTensor's propagation of sizes, which is no part of a program, and its caches. Checked on torch 2.13.0.
#
# DTensor runs an operator on fakes of the whole tensors, the first time. A capture would record that as work of the
# function, and random numbers drawn there would be drawn in each call.
#
# Its caches have specs as keys. A symbolic size has no hash, so no key holds it. But a symbolic size that stands for a
# plain integer of the program has a hash, and later calls would find a key with such a size and ask the size.


_MODULE, _CLASS = "torch.distributed.tensor._sharding_prop", "ShardingPropagator"
_METHOD = "_propagate_tensor_meta_non_cached"
_SPECS, _SPEC, _HASH = "torch.distributed.tensor._dtensor_spec", "DTensorSpec", "_hash_impl"


def install(bind: Bind, is_capturing: Callable[[], bool]) -> None:
    """Hide the propagation from captures, and symbolic sizes from the caches, on threads where `is_capturing()`."""
    owner: Any = getattr(sys.modules.get(_MODULE), _CLASS, None)
    original: Any = getattr(owner, _METHOD, None)
    specs: Any = getattr(sys.modules.get(_SPECS), _SPEC, None)
    original_hash: Any = getattr(specs, _HASH, None)

    def propagate(self: Any, schema: Any) -> Any:
        if not is_capturing():
            return original(self, schema)
        with all_modes_off():
            return original(self, schema)

    def hash_of(self: Any) -> Any:
        if is_capturing() and self.tensor_meta is not None and has_symbolic(tuple(self.tensor_meta)):
            raise TypeError("a spec with symbolic sizes is the key of no cache")
        return original_hash(self)

    if original is not None:
        bind(owner, _METHOD, propagate)
    if original_hash is not None:
        bind(specs, _HASH, hash_of)
